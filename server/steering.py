"""One session's signals: prompts in order, held keys by connection, and what the engine said to each.

Turns what people send into `Steer` commands and the engine's answers into events and journal entries. Plain state, no
I/O: the session sends the commands, and says what became of that (`sent`, `forget`, `hold`, `let_go`).
"""

from __future__ import annotations

import collections
import itertools
from dataclasses import dataclass, replace

from engine.protocol import (
    ACTION_HOLD_S,
    ActionState,
    Packet,
    PromptChange,
    PromptMode,
    SignalApplied,
    Steer,
    WorldSpec,
)
from server import messages
from server.problems import Problem
from server.schemas import ActionView, JournalEntry, PromptState, PromptView

PROMPTS_KEPT = 256
WAITING_PROMPTS = 32
WAITING_ACTIONS = 64
JOURNAL_ENTRIES = 10_000
RENEWAL = "renewal"  # the engine's id of commands whose outcome is no news


@dataclass(frozen=True)
class Prompt:
    id: str
    change: PromptChange
    state: PromptState
    block: int | None = None
    media_ms: int | None = None

    def view(self) -> PromptView:
        change = self.change
        return PromptView(
            id=self.id,
            text=change.text,
            mode=change.mode,
            over_blocks=change.over_blocks,
            at_s=change.at_s if self.state == "scheduled" or self.id.startswith("at-") else None,
            state=self.state,
            block=self.block,
            media_ms=self.media_ms,
        )


@dataclass(frozen=True)
class Waiting:
    """A command whose outcome is not known yet."""

    id: str  # the sender's
    number: int
    received_s: float
    prompt: PromptChange | None = None
    action: ActionState | None = None


@dataclass(frozen=True)
class Unshown:
    """A signal in force whose first picture has not left yet."""

    applied: SignalApplied
    id: str
    received_s: float


class Steering:
    def __init__(self, spec: WorldSpec) -> None:
        self._numbers = itertools.count(1)
        self._prompts: collections.OrderedDict[str, Prompt] = collections.OrderedDict()
        self._waiting: dict[str, Waiting] = {}  # by the id the engine knows
        self._held: collections.OrderedDict[str, ActionState] = collections.OrderedDict()  # by connection
        self._renewed_s = 0.0
        self._unshown: collections.deque[Unshown] = collections.deque(maxlen=WAITING_PROMPTS)
        self.journal: collections.deque[JournalEntry] = collections.deque(maxlen=JOURNAL_ENTRIES)
        self.journal_truncated = False
        for change in spec.prompts:
            id = f"at-{next(self._numbers)}"
            self._prompts[id] = Prompt(id, change, "scheduled")

    # ---------------------------------------------------------------------------------------------- from people

    def prompt(self, world: str, id: str | None, change: PromptChange, seen_ms: int | None, now_s: float) -> Steer:
        """A prompt for the next block; raises Problem when too many wait or the id still waits."""
        waiting = [entry for entry in self._waiting.values() if entry.prompt is not None]
        if len(waiting) >= WAITING_PROMPTS:
            raise Problem(429, "too-many-prompts", f"{len(waiting)} prompts wait for their block", retry_after_s=1)
        entry = self._wait_for(id, now_s, prompt=change)
        return Steer(self._engine_id(entry), world, prompt=change, seen_ms=seen_ms)

    def action(
        self, world: str, id: str | None, connection: str, state: ActionState, seen_ms: int | None, now_s: float
    ) -> Steer:
        """One connection's keys are to be these; what goes out is what everybody holds together."""
        held = self.held_with(connection, state)
        if id is None and connection in self._held and held == self.held():
            return self.renewal(world, now_s)
        entry = self._wait_for(id, now_s, action=held)
        self._renewed_s = now_s
        actions = [key for key, entry in self._waiting.items() if entry.action is not None]
        for key in actions[:-WAITING_ACTIONS]:  # newest wins: nobody will hear of the oldest
            del self._waiting[key]
        return Steer(self._engine_id(entry), world, action=held, seen_ms=seen_ms)

    def renewal(self, world: str, now_s: float) -> Steer:
        """What is held is still held: the engine lets go of what nobody renews. No news, so nobody is told."""
        self._renewed_s = now_s
        return Steer(RENEWAL, world, action=self.held())

    def renewal_due(self, now_s: float) -> bool:
        return bool(self._held) and now_s - self._renewed_s >= ACTION_HOLD_S / 2

    def holds(self, connection: str) -> bool:
        return connection in self._held

    def held_with(self, connection: str, state: ActionState) -> ActionState:
        """Keys add up; of two values for one name the newest counts."""
        states = [other for name, other in self._held.items() if name != connection] + [state]
        keys = dict.fromkeys(key for one in states for key in one.keys)
        values = {name: value for one in states for name, value in one.values.items()}
        return ActionState(tuple(keys), values)

    def sent(self, steer: Steer) -> None:
        """The command is on its way: a prompt is one of the session's from now on."""
        entry = self._waiting.get(steer.id)
        if entry is None or entry.prompt is None:
            return
        self._prompts.pop(entry.id, None)
        self._prompts[entry.id] = Prompt(entry.id, entry.prompt, "waiting")
        while len(self._prompts) > PROMPTS_KEPT:
            self._prompts.popitem(last=False)

    def forget(self, steer: Steer) -> None:
        """The command could not be sent after all."""
        self._waiting.pop(steer.id, None)

    def hold(self, connection: str, state: ActionState) -> None:
        """The connection's keys are these."""
        self._held.pop(connection, None)
        if state.keys or state.values:
            self._held[connection] = state

    def let_go(self, connection: str, wanted: ActionState) -> None:
        """The engine cannot be told: what is wanted no more is up all the same, and nothing more is pressed."""
        before = self._held.get(connection, ActionState())
        keys = tuple(key for key in before.keys if key in wanted.keys)
        values = {name: value for name, value in before.values.items() if name in wanted.values}
        self.hold(connection, ActionState(keys, values))

    # ---------------------------------------------------------------------------------------------- from the engine

    def applied(self, event: SignalApplied, media_ms: int) -> messages.SignalApplied:
        """The engine has put a signal in force at a block whose first frame is at `media_ms` of the session's clock."""
        entry = self._waiting.pop(event.id, None)
        id = entry.id if entry else self._scheduled_id(event)
        mode: PromptMode | None = None
        if event.signal == "prompt" and id in self._prompts:
            prompt = replace(self._prompts[id], state="applied", block=event.block, media_ms=media_ms)
            self._prompts[id] = prompt
            mode = prompt.change.mode
        if entry is not None:
            self._unshown.append(Unshown(event, id, entry.received_s))
            if entry.action is not None:
                self._drop_actions_before(entry.number)
        self._write(event, id, media_ms, entry)
        text = event.text or (self._prompts[id].change.text if id in self._prompts else "")
        return messages.SignalApplied(
            id=id,
            signal=event.signal,
            block=event.block,
            media_ms=media_ms,
            text=text,
            understood=event.understood,
            ignored=event.ignored,
            mode=mode or "",
        )

    def refused(self, engine_id: str) -> str:
        """The sender's id of a command that the engine refused."""
        entry = self._waiting.pop(engine_id, None)
        if entry is None:
            return engine_id
        if entry.id in self._prompts:
            self._prompts[entry.id] = replace(self._prompts[entry.id], state="refused")
        return entry.id

    def shown(self, packet: Packet) -> list[Unshown]:
        """Signals whose first picture this packet is."""
        shown = [one for one in self._unshown if one.applied.block <= packet.block]
        for one in shown:
            self._unshown.remove(one)
        return shown

    # ---------------------------------------------------------------------------------------------- starting over

    def spec_from(self, spec: WorldSpec, media_s: float) -> WorldSpec:
        """What to open again after the engine died at `media_s`: the prompt in force, then what is still to come."""
        current = self.current
        changes = [PromptChange(0.0, current.change.text)] if current else []
        for prompt in self._prompts.values():
            if prompt.state == "waiting":
                changes.append(replace_at(prompt.change, 0.0))
            elif prompt.state == "scheduled":
                changes.append(replace_at(prompt.change, max(0.0, prompt.change.at_s - media_s)))
        for id, prompt in self._prompts.items():
            if prompt.state == "waiting":
                self._prompts[id] = replace(prompt, state="scheduled")
        self._waiting.clear()
        self._unshown.clear()
        changes.sort(key=lambda change: change.at_s)
        return WorldSpec(
            model=spec.model,
            prompts=_last_at_zero(changes) or spec.prompts,
            seed=spec.seed,
            width=spec.width,
            height=spec.height,
            fps=spec.fps,
            steps=spec.steps,
            kv=spec.kv,
            lead_ms=spec.lead_ms,
            start_picture=spec.start_picture,
        )

    # ---------------------------------------------------------------------------------------------- to look at

    @property
    def current(self) -> Prompt | None:
        """The prompt in force, or the one that will be first."""
        applied = [prompt for prompt in self._prompts.values() if prompt.state == "applied"]
        if applied:
            return sorted(applied, key=lambda prompt: prompt.media_ms or 0)[-1]  # of equal ones the last
        return next(iter(self._prompts.values()), None)

    def prompt_views(self) -> tuple[PromptView, ...]:
        return tuple(prompt.view() for prompt in self._prompts.values())

    def held(self) -> ActionState:
        return self.held_with("", ActionState())

    def action_view(self) -> ActionView:
        held = self.held()
        return ActionView(keys=held.keys, values=held.values)

    def _wait_for(
        self, id: str | None, now_s: float, prompt: PromptChange | None = None, action: ActionState | None = None
    ) -> Waiting:
        if id is not None and any(entry.id == id for entry in self._waiting.values()):
            raise Problem(409, "id-in-use", f"the id {id!r} still waits for its outcome")
        number = next(self._numbers)
        entry = Waiting(id or f"c-{number}", number, now_s, prompt, action)
        self._waiting[self._engine_id(entry)] = entry
        return entry

    def _engine_id(self, entry: Waiting) -> str:
        return f"c-{entry.number}"

    def _scheduled_id(self, event: SignalApplied) -> str:
        """Scheduled prompts have no command; the oldest one with this text is meant."""
        for id, prompt in self._prompts.items():
            if prompt.state == "scheduled" and event.signal == "prompt" and event.text in ("", prompt.change.text):
                return id
        return event.id

    def _drop_actions_before(self, number: int) -> None:
        for key in [k for k, entry in self._waiting.items() if entry.action is not None and entry.number < number]:
            del self._waiting[key]

    def _write(self, event: SignalApplied, id: str, media_ms: int, entry: Waiting | None) -> None:
        prompt = self._prompts[id].change if id in self._prompts and event.signal == "prompt" else None
        action = entry.action if entry else None
        self.journal_truncated = self.journal_truncated or len(self.journal) == JOURNAL_ENTRIES
        self.journal.append(
            JournalEntry(
                block=event.block,
                media_ms=media_ms,
                signal=event.signal,
                id=id,
                text=prompt.text if prompt else None,
                mode=prompt.mode if prompt else None,
                over_blocks=prompt.over_blocks if prompt else None,
                keys=action.keys if action else None,
                values=action.values if action else None,
            )
        )


def replace_at(change: PromptChange, at_s: float) -> PromptChange:
    return PromptChange(at_s, change.text, change.mode, change.over_blocks)


def _last_at_zero(changes: list[PromptChange]) -> tuple[PromptChange, ...]:
    """A world begins under one prompt: of several at 0 the last stands."""
    at_zero = [change for change in changes if change.at_s <= 0]
    return tuple(at_zero[-1:] + [change for change in changes if change.at_s > 0])
