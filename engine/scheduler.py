"""Whose block is next, when it may begin, and whether one more world fits: numbers in, a choice out.

A block may begin at most `lead_s` before its first picture is due: one block period by default, the least that lets a
denoiser work all the time. So a prompt reaches the screen in at most two periods, one for the block that has just
begun and one for the next. Where blocks are quick the lead is smaller still: what a block was measured to take, what
the others that may come first take, and some to spare. The reserve that playout has learnt from late blocks comes on
top, within those two periods where nobody asked for another lead.

Among the blocks that may begin, the one due first goes first, so worlds share what there is in turn and none starves;
when there is too little, due times lie in the past, the longest wait is served first, and the media clocks stretch
alike.

Admission adds up what blocks of each kind were measured to cost. Knows no torch, no clock and no threads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from statistics import median

COST_BLOCKS = 32  # blocks that a kind's cost is the median of
WORST_BLOCKS = 8  # blocks of which the slowest says when the next must begin
SPARE = 1.25  # of that
SPARE_S = 0.05
RETRY_AFTER_S = 15.0


@dataclass
class Turn:
    """One world's place in the schedule."""

    world: str
    kind: str  # worlds of one kind cost the same: model, size, steps
    period_s: float  # media time of a block
    lead_s: float
    due_s: float  # when the first picture of the next block is to be shown
    adaptive: bool = False  # whether less lead will do where blocks are quick
    reserve_s: float = 0.0
    paused: bool = False


@dataclass(frozen=True)
class Choice:
    """The world whose block to make now, or how long nothing will be allowed to begin.

    `early_s`: how much earlier than without its reserve the block begins.
    """

    world: str | None
    wait_s: float = 0.0
    early_s: float = 0.0


@dataclass(frozen=True)
class Admission:
    admitted: bool
    reason: str = ""
    retry_after_s: float = 0.0


@dataclass
class Costs:
    """Seconds that a block of one kind keeps each stage busy. Stages (denoise, decode) run side by side."""

    stages: dict[str, deque[float]] = field(default_factory=dict)

    def note(self, seconds: Mapping[str, float]) -> None:
        for stage, spent in seconds.items():
            self.stages.setdefault(stage, deque(maxlen=COST_BLOCKS)).append(spent)

    def typical(self) -> dict[str, float]:
        return {stage: median(spent) for stage, spent in self.stages.items()}

    def worst_s(self) -> float:
        """Seconds from beginning to end that a block may well take."""
        return sum(max(list(spent)[-WORST_BLOCKS:]) for spent in self.stages.values())


class Scheduler:
    """Earliest due first among the worlds whose lead allows it."""

    def __init__(self, max_worlds: int, max_load: float) -> None:
        self.max_worlds, self.max_load = max_worlds, max_load
        self.turns: dict[str, Turn] = {}
        self._costs: dict[str, Costs] = {}

    def admit(self, kind: str, period_s: float) -> Admission:
        """Whether a world of this kind leaves all others their real time. The first one always gets its chance."""
        if len(self.turns) >= self.max_worlds:
            reason = f"all {self.max_worlds} places for worlds are taken"
            return Admission(False, reason, RETRY_AFTER_S)
        loads = self.load()
        for stage, cost in self.typical(kind).items():
            wanted = loads.get(stage, 0.0) + cost / period_s
            if self.turns and wanted > self.max_load:
                reason = (
                    f"one more world would need {wanted:.0%} of the time there is for {stage},"
                    f" at most {self.max_load:.0%} can be promised"
                )
                return Admission(False, reason, RETRY_AFTER_S)
        return Admission(True)

    def load(self) -> dict[str, float]:
        """Seconds of work per second and stage that the worlds at hand need, paused ones too: they may resume."""
        loads: dict[str, float] = {}
        for turn in self.turns.values():
            for stage, cost in self.typical(turn.kind).items():
                loads[stage] = loads.get(stage, 0.0) + cost / turn.period_s
        return loads

    def add(self, turn: Turn) -> None:
        if turn.world in self.turns:
            raise ValueError(f"expected a new world, got {turn.world!r} again")
        self.turns[turn.world] = turn

    def remove(self, world: str) -> None:
        self.turns.pop(world, None)

    def note(self, kind: str, seconds: Mapping[str, float]) -> None:
        """What one block of this kind (`FAMILY …`) has cost, by stage."""
        for name in {kind, kind.split(" ")[0]}:
            self._costs.setdefault(name, Costs()).note(seconds)

    def choose(self, now_s: float) -> Choice:
        """The world to make a block for now."""
        ready = [turn for turn in self.turns.values() if not turn.paused]
        allowed = [turn for turn in ready if self.may_begin_s(turn) <= now_s]
        if not allowed:
            return Choice(None, min((self.may_begin_s(turn) - now_s for turn in ready), default=inf))
        turn = min(allowed, key=lambda one: one.due_s)
        return Choice(turn.world, early_s=max(0.0, turn.due_s - self.lead_s(turn) - now_s))

    def may_begin_s(self, turn: Turn) -> float:
        """From when on a world's next block may begin. Where the lead adapts, the reserve has to fit into it."""
        lead_s = self.lead_s(turn)
        room_s = turn.lead_s - lead_s if turn.adaptive else inf
        return turn.due_s - lead_s - min(turn.reserve_s, room_s)

    def lead_s(self, turn: Turn) -> float:
        """How long before it is due a world's next block may begin, its reserve left aside."""
        costs = self._costs.get(turn.kind)
        if not turn.adaptive or costs is None:
            return turn.lead_s
        others = [t for t in self.turns.values() if t is not turn and not t.paused]
        before_s = sum(self.typical(other.kind).get("denoise", 0.0) for other in others)
        return min(turn.lead_s, SPARE * costs.worst_s() + before_s + SPARE_S)

    def typical(self, kind: str) -> dict[str, float]:
        """Seconds by stage of a block of this kind, or for want of that of its family (the word before the space)."""
        costs = self._costs.get(kind) or self._costs.get(kind.split(" ")[0])
        return costs.typical() if costs else {}
