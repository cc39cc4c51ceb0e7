"""One open world in the engine's loop: its journal, its pace, and what its signals came to.

Knows no schedule, no playout and no link; the loop sends the events that come out of here.
"""

from __future__ import annotations

import logging
import re
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch

from engine.generator import Block
from engine.journal import Change, Journal, Opening
from engine.loader import Plan, SpecError
from engine.profiler import active, gauge, span
from engine.protocol import SignalApplied, Stats, Steer, WorldSpec
from engine.screen import Figures
from engine.signals import check_action
from engine.snapshots import EVERY_S, SnapshotError, resume, save, worth_saving
from engine.start import begin
from engine.world import World

log = logging.getLogger(__name__)

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
RECENT_BLOCKS = 32


@dataclass
class Running:
    """A world and what the loop remembers of it."""

    id: str
    plan: Plan
    world: World
    journal: Journal
    opened_s: float = field(default_factory=time.monotonic)
    given: deque[Block] = field(default_factory=deque)  # blocks that the world began with, to be shown first
    paused: bool = False
    steered: set[int] = field(default_factory=set)  # blocks at which a command changed the prompt
    recent_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_BLOCKS))  # of the slower stage, by block
    saves_to: Path | None = None
    saved_s: float = field(default_factory=time.monotonic)
    ready_ms: float = 0.0  # media time up to which pictures are made

    @classmethod
    def open(cls, id: str, plan: Plan, journal_dir: Path | None, continues: str = "") -> Running:
        """Raises SpecError, SignalError, CacheFull or OSError; nothing is left behind then."""
        for name in (id, continues) if continues else (id,):
            if not NAME.fullmatch(name):
                raise SpecError(f"world: expected a name of letters, digits, _ . and -, got {name[:140]!r}")
        world = plan.open()
        path = journal_dir / f"{id}.jsonl" if journal_dir else None
        with ExitStack() as undo:
            undo.callback(world.close)
            with span("open", world=id):
                went_on = bool(continues) and _go_on(world, journal_dir, continues)
                given = deque() if went_on else deque(begin(plan.loaded.generator, world))
            journal = Journal(Opening(plan.spec, plan.loaded.digest, continues if went_on else ""), path)
            undo.pop_all()
        saves_to = journal_dir / f"{id}.snapshot" if journal_dir else None
        ready_ms = 1000 * world.media_s() if went_on else 0.0
        return cls(id, plan, world, journal, given=given, saves_to=saves_to, ready_ms=ready_ms)

    def close(self) -> None:
        """Give everything back; a world that ends needs no snapshot any more."""
        self.world.close()
        self.journal.close()
        if self.saves_to is not None:
            self.saves_to.unlink(missing_ok=True)

    def save(self) -> None:
        """Write a snapshot if the last one is some seconds old. A disk that is full ends that, and nothing else."""
        now_s = time.monotonic()
        if self.saves_to is None or now_s - self.saved_s < EVERY_S or not worth_saving(self.world):
            return
        self.saved_s = now_s
        try:
            with span("save", world=self.id):
                save(self.world, self.saves_to)
        except OSError as error:
            log.warning("world %s: no more snapshots: %s", self.id, error)
            self.saves_to = None

    @property
    def spec(self) -> WorldSpec:
        return self.plan.spec

    @property
    def next_media_s(self) -> float:
        """Media time at which the next block to be shown begins."""
        return self.world.media_s(self.given[0].index if self.given else None)

    @property
    def period_s(self) -> float:
        return self.world.model.geometry.block_s

    @property
    def lead_s(self) -> float:
        """One block period is the least that lets a denoiser work all the time."""
        return self.period_s if self.spec.lead_ms is None else self.spec.lead_ms / 1000

    def make(self) -> Block:
        """The next block, all of it: an accelerator has finished it too."""
        loaded = self.plan.loaded
        loaded.watched.begin()
        if self.given:
            return self.given.popleft()
        with span("denoise", world=self.id, block=self.world.block):
            block = loaded.generator.next_block(self.world)
            if block.latents.is_cuda:
                torch.cuda.current_stream(block.latents.device).synchronize()
        return block

    def steer(self, command: Steer) -> Iterator[SignalApplied]:
        """Change signals from the next block on. Raises SignalError, and changes nothing, if one cannot be."""
        world, at = self.world, self.world.block
        if command.action is not None:
            check_action(command.action, world.model.action_keys, world.model.action_values)
        if command.prompt is not None:
            block = world.steer(command.prompt)
            self.journal.note(Change(at, block, prompt=command.prompt, id=command.id))
            self.steered.add(block)
            yield self._applied(command, "prompt", block)
        if command.action is not None:
            block = world.act(command.action)
            self.journal.note(Change(at, block, action=command.action, id=command.id))
            yield self._applied(command, "action", block)

    def began(self, block: Block) -> SignalApplied | None:
        """That a prompt of the schedule has taken effect with this block."""
        self.steered = {b for b in self.steered if b >= block.index}
        if not block.began_prompt or block.index in self.steered:
            return None
        prompt, texts = block.conditioning.prompt, [change.text for change in self.spec.prompts]
        text = prompt.text if prompt.text in texts else ""  # a merged caption is no prompt of the schedule
        media_ms = round(1000 * self.world.media_s(block.index))
        return SignalApplied("", self.id, "prompt", block.index, media_ms, prompt.understood, prompt.ignored, text)

    def note(self, stages_s: dict[str, float], pictures: int) -> None:
        """A block is made and decoded: seconds by stage, and how many pictures."""
        self.recent_s.append(max(stages_s.values()))
        self.ready_ms += 1000 * pictures / self.world.model.geometry.fps

    @property
    def real_time_factor(self) -> float:
        """Media seconds per second that this world alone would reach: the slower stage sets the pace."""
        return self.period_s / median(self.recent_s) if self.recent_s else 0.0

    @property
    def kv_bytes(self) -> dict[str, int]:
        total: dict[str, int] = {}
        for cache in self.world.caches:
            for tier, count in cache.bytes_by_tier().items():
                total[tier] = total.get(tier, 0) + count
        return total

    def stats(self, figures: Figures, drift: dict[str, float]) -> Stats:
        """What is sent about once a second."""
        lead_ms = max(0.0, self.ready_ms - figures.media_ms)
        for name, value in {"lead_ms": lead_ms, "release_late_ms": figures.release_late_ms, **drift}.items():
            gauge(name, value, world=self.id)
        recorded = active()
        return Stats(
            world=self.id,
            fps=figures.fps,
            real_time_factor=self.real_time_factor,
            lead_ms=lead_ms,
            reserve_ms=figures.reserve_ms,
            late_blocks=figures.late_blocks,
            stretched_ms=figures.stretched_ms,
            kv_bytes=self.kv_bytes,
            bitrate=figures.bitrate,
            block=figures.block,
            media_ms=figures.media_ms,
            metrics=(recorded.values(self.id) if recorded else {}) | drift,
        )

    def _applied(self, command: Steer, signal: str, block: int) -> SignalApplied:
        media_ms = round(1000 * self.world.media_s(block))
        if command.seen_ms is not None:
            gauge("steer_to_block_ms", media_ms - command.seen_ms, world=self.id, block=block)
        if signal == "action":
            return SignalApplied(command.id, self.id, "action", block, media_ms)
        with span("encode signal", world=self.id, block=block):
            prompt = self.world.prompts.at(block).prompt
        return SignalApplied(
            command.id, self.id, "prompt", block, media_ms, prompt.understood, prompt.ignored, prompt.text
        )


def _go_on(world: World, folder: Path | None, lost: str) -> bool:
    """Let a new world continue a lost one; False if it has to begin anew. The snapshot is used once."""
    if folder is None:
        return False
    path, wanted = folder / f"{lost}.snapshot", world.spec.prompts
    try:
        resume(world, path)
    except SnapshotError as error:
        log.warning("world %s is not continued: %s", lost, error)
        return False
    path.unlink(missing_ok=True)
    (folder / f"{lost}.jsonl").unlink(missing_ok=True)
    world.prompts.keep_until(world.block)
    now_s = world.media_s()
    for change in wanted:
        if change.at_s > 0:
            world.schedule(change, now_s + change.at_s)
        elif change.text != world.prompts.switches[-1].change.text:
            world.steer(change)
    return True
