"""One world: what it was opened with, what steers it, what it remembers, and how far it has come.

Between two blocks a world can be put into a snapshot, forked or closed; the same spec, weights and signals always make
the same world. Knows no clock, no scheduling and no arithmetic of models: `generator.py` moves it on by a block.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.guidance import ALL_BRANCHES, Branching
from engine.kvcache.cache import KVCache
from engine.models import BlockModel, BlockSignals, Conditioning, State
from engine.noise import Noise, stream
from engine.protocol import ACTION_HOLD_S, ActionState, PromptChange, WorldSpec
from engine.signals import ActionTrack, PromptTrack, PromptValue, SignalError, check_action

if TYPE_CHECKING:
    from engine.samplers import Sampler

MOST_S = 1e9  # media time that can be asked for: some thirty years
MOST_UNSHOWN = 32  # blocks of a world that nobody shows; a clip to begin with is fewer


@dataclass(frozen=True)
class Kept:
    """A block of the past as its clean pass saw it: enough to compute its keys and values again."""

    signals: BlockSignals
    latents: Tensor  # (F, C, H, W)

    @property
    def frames(self) -> range:
        return range(self.signals.start, self.end)

    @property
    def end(self) -> int:
        return self.signals.start + self.signals.frames


@dataclass(frozen=True)
class Unshown:
    """A block on its way to the decoder."""

    start: int  # first latent frame
    latents: Tensor  # (F, C, H, W)
    conditioning: Conditioning


@dataclass(frozen=True)
class Shown:
    """How far the decoder has come: the latent frames before `end`, and what it remembers of them."""

    end: int = 0
    memory: State = None


class World:
    """One running simulation. `block` and `start` are the next block and its first latent frame."""

    def __init__(
        self,
        spec: WorldSpec,
        model: BlockModel,
        sampler: Sampler,
        caches: tuple[KVCache, ...],
        noise: Noise | None = None,
        branching: Branching = ALL_BRANCHES,
    ) -> None:
        """`caches`: those of the world's that are kept here, by `branching`.

        Raises SignalError on prompts that cannot be.
        """
        self.spec, self.model, self.sampler, self.caches = spec, model, sampler, caches
        self.branching = branching
        self.noise = noise or stream(spec.seed)
        self.block = 0
        self.start = 0
        self.motion: tuple[float, ...] = ()
        self.extra: dict[str, Tensor] = {}
        self.kept: list[Kept] = []
        self.recached: tuple[int, PromptChange] | None = None  # last time the past was computed again: block, reason
        self.in_flight: State = None  # of a sampler that has several blocks under way
        self.shown = Shown()  # written by the thread that decodes; the rest of the world by the one that denoises
        self.unshown: list[Unshown] = []  # all that `shown` lacks
        self.prompts = PromptTrack(model.encode)
        self.actions = ActionTrack(max(1, round(ACTION_HOLD_S / model.geometry.block_s)))
        for change in _in_order(spec.prompts):
            self.prompts.change(self.block_at(change.at_s), self._resolved(change))

    # ---------------------------------------------------------------------------------------------- steering

    def steer(self, change: PromptChange) -> int:
        """Let a prompt take effect at the next block that has not begun; return the first block that shows it."""
        return self.prompts.change(self.next_open_block, self._resolved(change))

    def schedule(self, change: PromptChange, at_s: float) -> None:
        """Let a prompt take effect at the first block that begins at or after a media time."""
        self.prompts.change(max(self.block_at(at_s), self.next_open_block), self._resolved(change))

    def act(self, state: ActionState) -> int:
        """Let an action take effect at the next block that has not begun; return that block's index."""
        check_action(state, self.model.action_keys, self.model.action_values)
        block = self.next_open_block
        self.actions.change(block, state)
        return block

    @property
    def next_open_block(self) -> int:
        """The first block whose making has not begun: signals can still change it."""
        return self.block + self.sampler.blocks_in_flight(self)

    def signals(self, block: int | None = None) -> tuple[BlockSignals, PromptValue]:
        """The value of every signal at a block (the next one)."""
        block = self.block if block is None else block
        g = self.model.geometry
        value = self.prompts.at(block)
        signals = BlockSignals(
            block=block,
            start=g.block_start(block),
            frames=g.block_frames(block),
            prompt=value.prompt,
            before=value.before,
            weight=value.weight,
            weight_start=value.weight_start,
            action=self.actions.at(block),
            motion=self.motion,
            extra=self.extra,
        )
        return signals, value

    # ---------------------------------------------------------------------------------------------- progress

    def moved_on(self, signals: BlockSignals, latents: Tensor, motion: tuple[float, ...]) -> None:
        """The block with these signals is part of the past; `latents` are what its clean pass saw."""
        self.kept.append(Kept(signals, latents))
        self.motion = motion
        self.block += 1
        self.start += signals.frames
        # a joint re-cache takes the newest `window` frames, though a sink has pushed some of them out of the cache
        cache, oldest = self.caches[0], self.start - (self.caches[0].policy.window or 0)
        self.kept = [
            k for k in self.kept if k.signals is signals or k.end > oldest or any(f in cache for f in k.frames)
        ]
        self.prompts.forget_before(self.block)
        self.actions.forget_before(self.block)

    def hand_out(self, start: int, latents: Tensor, conditioning: Conditioning) -> None:
        """A block is made, and is to be shown: `show` may come at any time, and in another thread."""
        waiting = [block for block in self.unshown if block.start >= self.shown.end]
        self.unshown = [*waiting, Unshown(start, latents, conditioning)][-MOST_UNSHOWN:]

    @property
    def last_frame(self) -> Tensor | None:
        """The newest latent frame (1, C, H, W) as the clean pass saw it; None at the start."""
        return self.kept[-1].latents[-1:] if self.kept else None

    def block_at(self, at_s: float) -> int:
        """The first block that begins at or after a media time. Raises SignalError on a time that cannot be."""
        if not 0 <= at_s <= MOST_S:
            raise SignalError(f"prompt time: expected 0 to {MOST_S:g} s, got {at_s}")
        block = int(at_s / self.model.geometry.block_s)
        while block and self.media_s(block - 1) >= at_s - 1e-6:  # a first block longer than the others
            block -= 1
        while self.media_s(block) < at_s - 1e-6:
            block += 1
        return block

    def media_s(self, block: int | None = None) -> float:
        """Media time at which a block (the next one) begins."""
        g = self.model.geometry
        return g.pictures_before(g.block_start(self.block if block is None else block)) / g.fps

    @property
    def branches(self) -> list[tuple[int, KVCache]]:
        """The caches that are kept here, each behind the branch of guidance that reads it.

        0 is the conditional one, or all of them where they read the same.
        """
        own = self.branching.mine(self.sampler.branches, self.sampler.caches)
        return list(zip(own, self.caches, strict=True))

    # ---------------------------------------------------------------------------------------- copies, the end

    def fork(self) -> World:
        """A second world that goes on from here; cache pages are shared until the two differ."""
        twin = copy.copy(self)
        twin.caches = tuple(cache.fork() for cache in self.caches)
        twin.kept = list(self.kept)
        twin.prompts, twin.actions = self.prompts.copy(), self.actions.copy()
        twin.in_flight, twin.shown = copy.deepcopy((self.in_flight, self.shown))
        return twin

    def snapshot(self, *, decoder: bool = True) -> State:
        """What the next block depends on, to be given to `restore`: all of it, or all but the decoder's memory."""
        return {
            "position": (self.block, self.start),
            "motion": self.motion,
            "extra": dict(self.extra),
            "caches": self.branching.collect([cache.snapshot() for cache in self.caches], self.sampler.caches),
            "kept": list(self.kept),
            "prompts": self.prompts.copy().switches,
            "actions": self.actions.copy().states,
            "in_flight": copy.deepcopy(self.in_flight),
            "decoder": copy.deepcopy(self._shown_before(None)) if decoder else None,
        }

    def restore(self, state: State) -> None:
        """Become the world that `snapshot` was taken of; this one must be newly opened with the same spec.

        Where the decoder's memory was left out it is made again, from the blocks that are kept.
        """
        self.block, self.start = state["position"]
        self.motion, self.extra = state["motion"], dict(state["extra"])
        for branch, cache in self.branches:
            cache.restore(state["caches"][branch])
        self.kept = list(state["kept"])
        self.prompts.switches = PromptTrack(self.model.encode, list(state["prompts"])).copy().switches
        self.actions.states = list(state["actions"])
        self.in_flight, shown = copy.deepcopy((state["in_flight"], state["decoder"]))
        self.shown = shown or Shown()
        for kept in self.kept if shown is None else ():
            self.show(kept.signals.start, kept.latents, self.model.condition(kept.signals))

    def show(self, start: int, latents: Tensor, conditioning: Conditioning) -> Tensor:
        """The pictures (N, H, W, 3) uint8 of the block at latent frame `start`. One thread at a time.

        The decoder goes on from the block before, which a fork may have to decode first.
        """
        before = self._shown_before(start)
        pictures, memory = self.model.decoder.decode(latents, conditioning, before.memory)
        self.shown = Shown(start + latents.shape[0], memory)
        return pictures

    def close(self) -> None:
        """Give back everything the world holds."""
        for cache in self.caches:
            cache.close()
        self.kept.clear()
        self.in_flight, self.shown, self.unshown = None, Shown(), []

    def _shown_before(self, start: int | None) -> Shown:
        """How far the decoder will have come before the block at `start`, or after all blocks there are."""
        shown = self.shown
        for block in self.unshown:
            if shown.end <= block.start and (start is None or block.start < start):
                _, memory = self.model.decoder.decode(block.latents, block.conditioning, shown.memory)
                shown = Shown(block.start + block.latents.shape[0], memory)
        return shown

    def _resolved(self, change: PromptChange) -> PromptChange:
        """`auto` replaced by what the model is best at."""
        if change.mode != "auto":
            return change
        mode, over = self.model.switch
        return PromptChange(change.at_s, change.text, mode, over)


def _in_order(prompts: tuple[PromptChange, ...]) -> tuple[PromptChange, ...]:
    if not prompts:
        raise SignalError("prompts: expected at least one, got none")
    if prompts[0].at_s != 0:
        raise SignalError(f"prompts: expected the first at 0 s, got it at {prompts[0].at_s} s")
    for a, b in zip(prompts, prompts[1:], strict=False):
        if b.at_s <= a.at_s:
            raise SignalError(f"prompts: expected rising times, got {b.at_s} s after {a.at_s} s")
    return prompts


def empty_frame(model: BlockModel) -> Tensor:
    """What stands before the first latent frame of a world: (1, C, H, W) zeros."""
    shape = model.geometry.latent
    return torch.zeros(1, shape.channels, shape.height, shape.width, dtype=model.dtype, device=model.device)
