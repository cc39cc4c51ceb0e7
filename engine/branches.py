"""One step of staggered blocks: the branches of guidance over the blocks of a call, and their weighed sum.

    text      history and text, reads the cache
    history   history and the null text; the one that writes what the cache keeps of the clean block
    alone     each block for itself, as a batch, with the null text

A distilled model has the first of them only, and it writes. Teams of ranks may share the branches out (parts.py).
Knows no timetable: how far a block sees and what its branches weigh comes with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from engine.guidance import ALL_BRANCHES, Branching
from engine.kvcache.cache import KVCache
from engine.kvcache.deal import Blocks, Deal, Span
from engine.kvcache.staged import StagedBlock
from engine.kvcache.staggered import IsolatedContext, StaggeredContext
from engine.models import BlockModel, Conditioning, Prompt
from engine.parts import ALONE, HISTORY, TEXT, Part, parts, passes
from engine.stages import HISTORY_ONLY, Distilled, Weights


class StaggeredModel(BlockModel, Protocol):
    """What a model of staggered blocks gives beyond the usual."""

    @property
    def null(self) -> Prompt:
        """The text of the branches without text, and of clean blocks."""
        ...

    def text(self, prompt: Prompt, blocks_left: int | None) -> Prompt:
        """What a block reads under `prompt`; `blocks_left` counts the block itself, None: no end is in sight."""
        ...

    def gather(self, prompts: Sequence[Prompt], *, dropped: bool, distil: float | None) -> Conditioning:
        """The conditioning of a call: a text for each (sample, block)."""
        ...


@dataclass(frozen=True)
class Entry:
    """One block in one call."""

    block: int
    latents: Tensor  # (F, C, H, W) float32
    t: float
    prompt: Prompt
    reach: int | None  # how many blocks it sees, itself included; None: all
    weights: Weights = HISTORY_ONLY


@dataclass(frozen=True)
class Call:
    """What one step asks of the model: the blocks under way, and a clean one before them when one has just finished."""

    clean: Entry | None
    active: tuple[Entry, ...]
    distil: float | None = None

    @property
    def entries(self) -> tuple[Entry, ...]:
        return self.active if self.clean is None else (self.clean, *self.active)


@dataclass(frozen=True)
class Step:
    """The outcome: dx/dt of each active block (F, C, H, W), and how many blocks x branches it took and spared.

    The same on every rank, and as many as on one rank.
    """

    velocities: tuple[Tensor, ...]
    run: int
    skipped: int = 0


class Branches:
    """The calls of one step on behalf of one world."""

    def __init__(self, model: StaggeredModel, cache: KVCache, branching: Branching = ALL_BRANCHES) -> None:
        self.model, self.cache, self.branching = model, cache, branching
        self.width = model.geometry.frames_per_block

    def distilled(self, call: Call, staged: StagedBlock | None, rule: Distilled) -> Step:
        """One branch; a nearly clean oldest block goes along a second time, seeing only itself."""
        entries, oldest = call.entries, call.active[0]
        if not oldest.t > rule.nearly_clean:
            out = self._with_history(entries, call, staged)
            return Step(tuple(out[-len(call.active) :]), len(entries))
        twin = replace(oldest, block=entries[-1].block + 1, reach=1)
        *out, without = self._with_history((*entries, twin), call, staged)
        velocities = out[-len(call.active) :]
        velocities[0] = rule.history * velocities[0] + (1 - rule.history) * without
        return Step(tuple(velocities), len(entries) + 1)

    def guided(self, call: Call, staged: StagedBlock | None, *, skip: bool) -> Step:
        """Three branches. With `skip` a block is left out of those that it neither needs nor is seen in."""
        wanted, first = parts([e.weights for e in call.active], skip=skip), len(call.entries) - len(call.active)
        own = passes(wanted, self.branching.teams, clean=bool(first))[self.branching.index]
        found = [v for each in own for v in self._pass(each, call, staged)]
        sizes = [len(part.blocks) for part in wanted]
        velocities = self.branching.gather(found, sizes, call.active[0].latents)
        keys = ((part.branch, i) for part in wanted for i in part.blocks)
        by_branch = dict(zip(keys, velocities, strict=True))
        run = sum(sizes) + first * (1 + any(part.branch == TEXT for part in wanted))
        weighed = tuple(_weighed(by_branch, i, e.weights) for i, e in enumerate(call.active))
        return Step(weighed, run, 2 * first + 3 * len(call.active) - run)

    def given(self, call: Call, staged: StagedBlock, *, dropped: bool) -> None:
        """Fill `staged` with the keys and values of clean blocks that a world starts from; no rank leaves one out."""
        self._run(Deal(self._blocks(call.active, staged)), call.active, call, staged, dropped=dropped)

    def _pass(self, part: Part, call: Call, staged: StagedBlock | None) -> list[Tensor]:
        """The velocities of the blocks of one branch."""
        if part.branch == ALONE:
            return self._alone(self._without_text([call.active[i] for i in part.blocks]), call)
        first = len(call.entries) - len(call.active)
        entries = call.entries[: first + len(part.blocks)]
        if part.branch == HISTORY:
            return self._with_history(self._without_text(entries), call, staged, dropped=True)[first:]
        return self._with_history(entries, call, None)[first:]

    def _without_text(self, entries: Sequence[Entry]) -> list[Entry]:
        return [replace(e, prompt=self.model.null) for e in entries]

    def _with_history(
        self, entries: Sequence[Entry], call: Call, staged: StagedBlock | None, *, dropped: bool = False
    ) -> list[Tensor]:
        deal = self.cache.deal(self._blocks(entries, staged))
        return self._run(deal, entries, call, staged, dropped=dropped)

    def _run(
        self, deal: Deal, entries: Sequence[Entry], call: Call, staged: StagedBlock | None, *, dropped: bool
    ) -> list[Tensor]:
        mine = [entries[i] for i in deal.mine]
        context = self.cache.spread(StaggeredContext(deal, self.cache.attend, self.cache, staged))
        x = torch.cat([e.latents for e in mine])[None]
        flow = self.model.forward(x, self._times(mine)[None], self._conditioning(mine, call, dropped=dropped), context)
        return deal.collect([-each for each in torch.split(flow[0], self.width)])

    def _alone(self, entries: Sequence[Entry], call: Call) -> list[Tensor]:
        spans = (Span(i * self.width, (i + 1) * self.width) for i in range(len(entries)))
        deal = self.cache.deal(Blocks(0, self.width, tuple(spans)))
        mine = [entries[i] for i in deal.mine]
        context = self.cache.spread(IsolatedContext(self.cache.attend))
        x, t = torch.stack([e.latents for e in mine]), self._times(mine).view(len(mine), self.width)
        return deal.collect(list(-self.model.forward(x, t, self._conditioning(mine, call, dropped=True), context)))

    def _blocks(self, entries: Sequence[Entry], staged: StagedBlock | None) -> Blocks:
        start, kept = entries[0].block * self.width, 0 if staged is None else staged.frames // self.width
        oldest = self._oldest(start, self.width if staged is None else staged.frames)
        return Blocks(start, self.width, tuple(self._span(e, oldest) for e in entries), kept)

    def _oldest(self, start: int, staged: int) -> int:
        """The first frame that the cache's policy keeps beside those staged, in a call that begins at frame `start`."""
        window = self.cache.policy.window
        return 0 if window is None else max(0, start - (window - staged))

    def _span(self, entry: Entry, oldest: int) -> Span:
        """What a block sees: as far as it reaches, blocks in flight always, the past as far as it is kept."""
        end = (entry.block + 1) * self.width
        return Span(oldest if entry.reach is None else max(oldest, end - entry.reach * self.width), end)

    def _times(self, entries: Sequence[Entry]) -> Tensor:
        times = torch.tensor([e.t for e in entries], dtype=torch.float32, device=self.model.device)
        return times.repeat_interleave(self.width)

    def _conditioning(self, entries: Sequence[Entry], call: Call, *, dropped: bool) -> Conditioning:
        return self.model.gather([e.prompt for e in entries], dropped=dropped, distil=call.distil)


def _weighed(found: Mapping[tuple[int, int], Tensor], block: int, weights: Weights) -> Tensor:
    """The sum over branches, always in the same order."""
    terms = [weights[branch] * found[branch, block] for branch in (TEXT, HISTORY, ALONE) if (branch, block) in found]
    return sum(terms[1:], terms[0])
