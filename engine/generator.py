"""One block of a world: signals to conditioning, noise through the sampler to clean latents, cache and world moved on.

    block = generator.next_block(world)          # or next_blocks([...]) for worlds of the same kind in one batch
    pictures = decode(model, world, block)       # decoder.py

Also what happens between blocks: starting a world from given latents, and computing the visible past again under a new
prompt. If anything fails the world is as it was, and the same block can be tried again; only a past that has been
computed again for that block stays so, because what it was before would need as much memory once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from engine.kvcache.cache import KVCache
from engine.models import BlockModel, Conditioning
from engine.profiler import count, gauge, span
from engine.protocol import PromptChange
from engine.samplers import Beginner, before_each, clean_pass
from engine.world import Kept, World, empty_frame

Recache = Literal["blocks", "joint", "joint-keep-sink", "none"]
"""How the past is computed again: block by block with each block's own signals, or all visible frames in one call, in
which case the sink may stay as it was (LongLive, arXiv 2509.22622). "none": it knows no prompt (MAGI-1)."""


@dataclass(frozen=True)
class Block:
    """A finished block, on its way to the decoder."""

    index: int
    start: int  # first latent frame
    latents: Tensor  # (F, C, H, W)
    conditioning: Conditioning
    began_prompt: bool  # the first block under its prompt


class Generator:
    """Moves worlds of one model on, a block at a time."""

    def __init__(self, model: BlockModel, recache: Recache = "blocks") -> None:
        self.model = model
        self.recache_rule = recache

    @torch.inference_mode()
    def next_block(self, world: World) -> Block:
        """The next block of one world."""
        return self._next([world])[0]

    @torch.inference_mode()
    def next_blocks(self, worlds: Sequence[World]) -> list[Block]:
        """The next block of several worlds in one batch: same sampler, same number of frames in the block."""
        return self._next(worlds)

    @torch.inference_mode()
    def prefill(self, world: World, latents: Tensor) -> list[Block]:
        """Let given latents (F, C, H, W) be the first blocks of a world that has none yet.

        Raises ValueError if they are not a whole number of blocks, unless the world's sampler begins worlds itself.
        """
        if isinstance(world.sampler, Beginner):
            blocks = self._begun(world, world.sampler, latents.to(self.model.device))
        else:
            blocks = self._prefilled(world, latents)
        for block in blocks:
            world.hand_out(block.start, block.latents, block.conditioning)
        return blocks

    def _prefilled(self, world: World, latents: Tensor) -> list[Block]:
        g, blocks, at = self.model.geometry, [], 0
        while at < latents.shape[0]:
            frames = g.block_frames(world.block)
            if at + frames > latents.shape[0]:
                raise ValueError(f"start: expected whole blocks, {latents.shape[0] - at} frames are left over")
            blocks.append(self._prefill_block(world, latents[at : at + frames].to(self.model.device, self.model.dtype)))
            at += frames
        return blocks

    def _begun(self, world: World, sampler: Beginner, latents: Tensor) -> list[Block]:
        """What is left over of whole blocks is shown now and made again as the head of the next block."""
        shown = sampler.begin(self.model, world, latents)
        blocks, at = [], 0
        while at < shown:
            signals, value = world.signals()
            conditioning = self.model.condition(signals)
            part = latents[at : min(at + signals.frames, shown)].to(self.model.dtype)
            blocks.append(Block(signals.block, signals.start, part, conditioning, value.began))
            if part.shape[0] == signals.frames:
                world.moved_on(signals, part, conditioning.motion)
            at += part.shape[0]
        return blocks

    def _next(self, worlds: Sequence[World]) -> list[Block]:
        values = [world.signals() for world in worlds]
        for world, (_, value) in zip(worlds, values, strict=True):
            if value.began and value.change.mode == "recache" and self._has_past(world):
                self._recache_once(world, value.change)
        with span("condition"):
            conditioning = [self.model.condition(signals) for signals, _ in values]
        before = _moved_bytes(worlds)
        made = worlds[0].sampler.advance(self.model, worlds, conditioning)
        for name, moved in _moved_bytes(worlds).items():
            gauge(name, moved - before[name])
            count(name, moved - before[name])
        blocks = []
        for world, (signals, value), c, m in zip(worlds, values, conditioning, made, strict=True):
            world.moved_on(signals, m.context, c.motion)
            start = signals.start + m.context.shape[0] - m.latents.shape[0]
            world.hand_out(start, m.latents, c)
            blocks.append(Block(signals.block, start, m.latents, c, value.began))
        return blocks

    def _prefill_block(self, world: World, latents: Tensor) -> Block:
        signals, value = world.signals()
        conditioning = self.model.condition(signals)
        for branch, cache in world.branches:
            with cache.stage(signals.start, signals.frames) as staged:
                staged.clean = True
                c = self.model.negative(conditioning) if branch else conditioning
                clean_pass(self.model, staged, latents[None], 0.0, self._after(c, world.last_frame, latents))
                staged.commit()
        world.moved_on(signals, latents, conditioning.motion)
        return Block(signals.block, signals.start, latents, conditioning, value.began)

    def _has_past(self, world: World) -> bool:
        """Whether there is anything that knows the prompt and is still seen."""
        return (
            self.recache_rule != "none" and bool(world.kept) and any(cache.policy.window != 0 for cache in world.caches)
        )

    def _recache_once(self, world: World, change: PromptChange) -> None:
        """A block that is tried again finds its past computed again already."""
        if world.recached != (world.block, change):
            with span("re-cache"):
                self._recache(world)
            world.recached = (world.block, change)

    def _recache(self, world: World) -> None:
        """Keys and values of the visible past computed again under the prompt of the next block."""
        if self.recache_rule == "blocks":
            self._recache_blocks(world)
        else:
            self._recache_jointly(world, keep_sink=self.recache_rule == "joint-keep-sink")

    def _recache_blocks(self, world: World) -> None:
        now, _ = world.signals()
        for branch, cache in world.branches:
            redone: list[int] = []
            for i, kept in enumerate(world.kept):
                signals = replace(kept.signals, prompt=now.prompt, before=None, weight=1.0, weight_start=1.0)
                if any(f not in cache for f in range(signals.start, signals.start + signals.frames)):
                    continue
                before = world.kept[i - 1].latents[-1:] if i else None
                self._rewrite(world, (branch, cache), replace(kept, signals=signals), before, redone)
                redone += range(signals.start, signals.start + signals.frames)

    def _rewrite(
        self, world: World, of: tuple[int, KVCache], kept: Kept, before: Tensor | None, seen: list[int]
    ) -> None:
        (branch, cache), signals, latents = of, kept.signals, kept.latents
        conditioning = self.model.condition(signals)
        conditioning = self.model.negative(conditioning) if branch else conditioning
        with cache.stage(signals.start, signals.frames, visible=seen) as staged:
            staged.clean = True
            clean_pass(
                self.model,
                staged,
                latents[None],
                world.sampler.context_time,
                self._after(conditioning, before, latents),
            )
            staged.commit()

    def _recache_jointly(self, world: World, keep_sink: bool) -> None:
        """The r = min(window, frames made) newest frames in one bidirectional call.

        With `keep_sink`, once frames have left the window, the sink stays and the first r frames are queries only.
        Without, the sink is from now on the first of the re-cached frames.
        """
        now, _ = world.signals()
        for branch, cache in world.branches:
            policy = cache.policy
            first = 0 if policy.window is None else max(0, world.start - policy.window)
            latents = _newest(world.kept, first)
            first = world.start - latents.shape[0]
            sink = policy.sink if keep_sink and first > 0 else 0
            visible = [f for f in range(cache.origin, cache.origin + sink) if f in cache]
            signals = replace(now, start=first, frames=latents.shape[0])
            conditioning = self.model.condition(signals)
            conditioning = self.model.negative(conditioning) if branch else conditioning
            with cache.stage(first, latents.shape[0], visible=visible, hidden=len(visible)) as staged:
                staged.clean = True
                clean_pass(self.model, staged, latents[None], world.sampler.context_time, conditioning)
                staged.commit()
            if not keep_sink or first == 0:
                cache.drop(f for f in cache.held if f < first)
                cache.origin = first

    def _after(self, conditioning: Conditioning, last: Tensor | None, latents: Tensor) -> Conditioning:
        if not self.model.uses_previous:
            return conditioning
        first = empty_frame(self.model) if last is None else last
        return conditioning.with_previous(before_each(first[None], latents[None]))


def _moved_bytes(worlds: Sequence[World]) -> dict[str, int]:
    """What the caches of these worlds have copied so far."""
    caches = [cache for world in worlds for cache in world.caches]
    return {
        "kv_copied_bytes": sum(cache.copied_bytes for cache in caches),
        "kv_gathered_bytes": sum(cache.gathered_bytes for cache in caches),
        "kv_offloaded_bytes": sum(cache.offloaded_bytes for cache in caches),
    }


def _newest(kept: Sequence[Kept], first: int) -> Tensor:
    """The kept latents from frame `first` on."""
    parts = [k.latents[max(0, first - k.signals.start) :] for k in kept]
    return torch.cat([p for p in parts if p.shape[0]])
