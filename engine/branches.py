"""One step of staggered blocks: the branches of guidance over the blocks of a call, and their weighed sum.

    text      history and text, reads the cache
    history   history and the null text; the one that writes what the cache keeps of the clean block
    alone     each block for itself, as a batch, with the null text

A distilled model has the first of them only, and it writes. Knows no timetable: how far a block sees and what its
branches weigh comes with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from engine.kvcache.cache import KVCache
from engine.kvcache.staged import StagedBlock
from engine.kvcache.staggered import IsolatedContext, Span, StaggeredContext
from engine.models import BlockModel, Conditioning, Prompt
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
    """The outcome: dx/dt of each active block (F, C, H, W), and how many blocks x branches it took and spared."""

    velocities: tuple[Tensor, ...]
    run: int
    skipped: int = 0


class Branches:
    """The calls of one step on behalf of one world."""

    def __init__(self, model: StaggeredModel, cache: KVCache) -> None:
        self.model, self.cache = model, cache
        self.width = model.geometry.frames_per_block

    def distilled(self, call: Call, staged: StagedBlock | None, rule: Distilled) -> Step:
        """One branch; a nearly clean oldest block goes along a second time, seeing only itself."""
        entries, oldest = call.entries, call.active[0]
        prompts = [e.prompt for e in entries]
        conditioning = self._conditioning(prompts, call, dropped=False)
        if not oldest.t > rule.nearly_clean:
            out = self._with_history(entries, conditioning, staged)
            return Step(tuple(out[-len(call.active) :]), len(entries))
        twin = replace(oldest, block=entries[-1].block + 1, reach=1)
        conditioning = self._conditioning([*prompts, oldest.prompt], call, dropped=False)
        *out, without = self._with_history((*entries, twin), conditioning, staged)
        velocities = out[-len(call.active) :]
        velocities[0] = rule.history * velocities[0] + (1 - rule.history) * without
        return Step(tuple(velocities), len(entries) + 1)

    def guided(self, call: Call, staged: StagedBlock | None, *, skip: bool) -> Step:
        """Three branches. With `skip` a block is left out of those that it neither needs nor is seen in."""
        count, first = len(call.active), len(call.entries) - len(call.active)
        text, history = (self._needed([e.weights[i] for e in call.active], skip) for i in (2, 1))
        alone = [i for i, e in enumerate(call.active) if e.weights.unconditional or not skip]
        parts: list[list[tuple[float, Tensor]]] = [[] for _ in call.active]
        if text:
            entries = call.entries[: first + text]
            conditioning = self._conditioning([e.prompt for e in entries], call, dropped=False)
            _gather(parts, self._with_history(entries, conditioning, None)[first:], call, 2, range(text))
        if history or first:
            entries = call.entries[: first + history]
            conditioning = self._conditioning([self.model.null] * len(entries), call, dropped=True)
            _gather(parts, self._with_history(entries, conditioning, staged)[first:], call, 1, range(history))
        if alone:
            _gather(parts, self._alone([call.active[i] for i in alone], call), call, 0, alone)
        run = (first + text if text else 0) + first + history + len(alone)
        velocities = tuple(sum((w * v for w, v in p[1:]), p[0][0] * p[0][1]) for p in parts)
        return Step(velocities, run, 2 * first + 3 * count - run)

    def given(self, call: Call, staged: StagedBlock, *, dropped: bool) -> None:
        """Fill `staged` with the keys and values of clean blocks that a world starts from."""
        conditioning = self._conditioning([e.prompt for e in call.active], call, dropped=dropped)
        self._with_history(call.active, conditioning, staged)

    def _needed(self, weights: Sequence[float], skip: bool) -> int:
        """How many blocks, oldest first, take part in a branch: younger ones see older ones, never the reverse."""
        return max((i + 1 for i, w in enumerate(weights) if w or not skip), default=0)

    def _with_history(
        self, entries: Sequence[Entry], conditioning: Conditioning, staged: StagedBlock | None
    ) -> list[Tensor]:
        start = entries[0].block * self.width
        oldest = self._oldest(start, self.width if staged is None else staged.frames)
        spans = [self._span(e, oldest) for e in entries]
        seen = StaggeredContext(start, self.width, spans, self.cache.attend, self.cache, staged)
        context = self.cache.spread(seen)
        x = torch.cat([e.latents for e in entries])[None]
        t = self._times(entries)[None]
        return [-flow for flow in torch.split(self.model.forward(x, t, conditioning, context)[0], self.width)]

    def _alone(self, entries: Sequence[Entry], call: Call) -> list[Tensor]:
        conditioning = self._conditioning([self.model.null] * len(entries), call, dropped=True)
        x = torch.stack([e.latents for e in entries])
        t = self._times(entries).view(len(entries), self.width)
        context = self.cache.spread(IsolatedContext(self.cache.attend))
        return list(-self.model.forward(x, t, conditioning, context))

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

    def _conditioning(self, prompts: Sequence[Prompt], call: Call, *, dropped: bool) -> Conditioning:
        return self.model.gather(prompts, dropped=dropped, distil=call.distil)


def _gather(
    parts: list[list[tuple[float, Tensor]]], found: Sequence[Tensor], call: Call, branch: int, active: Sequence[int]
) -> None:
    for i, velocity in zip(active, found, strict=True):
        parts[i].append((call.active[i].weights[branch], velocity))
