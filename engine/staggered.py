"""Several blocks in flight at staggered noise levels (MAGI-1): a new one enters each stage, the oldest leaves clean.

    stage i:   blocks i - window + 1 … i are under way, each `steps / window` steps further than the next
    a block that has just left is run once more, clean, at the head of the next stage's first call; that call's keys
    and values of it are what stays in the cache

The generator asks for a block and gets the oldest one; the younger ones wait in `world.in_flight`, a tree of tensors
and integers. Knows no text beyond which prompt belongs to which block, and no decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from engine.branches import Branches, Call, Entry, StaggeredModel, Step
from engine.kvcache.staged import StagedBlock
from engine.kvcache.staggered import check_policy
from engine.models import BlockModel, Conditioning, Prompt
from engine.profiler import boundary, count, span
from engine.samplers import Made, check_finite
from engine.stages import Distilled, Guided, Plan, Weights
from engine.world import World


class WorldOver(ValueError):
    """A world of a fixed number of blocks was asked for one more."""


@dataclass
class Flight:
    """The blocks of one world under way, as read from and written back to `world.in_flight`."""

    stage: int  # the next to run; also the next block to begin
    first: int  # the first generated block
    latents: list[Tensor] = field(default_factory=list)  # (F, C, H, W) float32, oldest first
    finished: Tensor | None = None  # the block before the oldest, until its clean pass
    prefix: Tensor | None = None  # given frames at the head of block `first`
    run: int = 0  # blocks x branches computed
    skipped: int = 0  # blocks x branches whose weight is zero, not computed


@dataclass(frozen=True)
class StaggeredSampler:
    """The sampler of MAGI-1.

    `blocks`: how many blocks a world has, its given ones included; None: it never ends. `skip` leaves out work whose
    weight is exactly zero.
    """

    plan: Plan
    blocks: int | None = None
    skip: bool = True

    @property
    def branches(self) -> int:
        return len(Weights._fields) if isinstance(self.plan.guidance, Guided) else 1

    @property
    def caches(self) -> int:
        """All branches of guidance read what the clean passes left."""
        return 1

    @property
    def context_time(self) -> float:
        return self.plan.clean_t

    def blocks_in_flight(self, world: World) -> int:
        begun = self._flight(world).stage
        return (begun if self.blocks is None else min(begun, self.blocks)) - world.block

    def counts(self, world: World) -> tuple[int, int]:
        """Blocks x branches computed, and left out because their weight is zero."""
        flight = self._flight(world)
        return flight.run, flight.skipped

    def advance(self, model: BlockModel, worlds: Sequence[World], conditioning: Sequence[Conditioning]) -> list[Made]:
        """Run stages until the oldest block of each world is done. Worlds are not batched: their ranges differ."""
        done = [self._advance(cast(StaggeredModel, model), world) for world in worlds]
        for world, (flight, _) in zip(worlds, done, strict=True):
            world.in_flight = vars(flight)
        return [made for _, made in done]

    def begin(self, model: BlockModel, world: World, latents: Tensor) -> int:
        """Begin a world with given latents (F, C, H, W): its cache holds the whole blocks among them afterwards.

        What is left over is put at the head of the first generated block each time the model sees it. A clip is shown
        as it is; a single picture only as the model draws it.
        """
        width, count = model.geometry.frames_per_block, latents.shape[0]
        whole = count // width
        given = latents.to(model.device, torch.float32)
        if whole:
            self._take_given(cast(StaggeredModel, model), world, torch.split(given[: whole * width], width))
        prefix = given[whole * width :].clone() if count % width else None
        world.in_flight = vars(Flight(stage=whole, first=whole, prefix=prefix))
        return 0 if count == 1 < width else count

    def step(self, model: StaggeredModel, world: World, call: Call, staged: StagedBlock | None) -> Step:
        """One call of the model, or three; what the cache keeps of the clean block goes into `staged`."""
        branches = Branches(model, world.caches[0], world.branching)
        if isinstance(self.plan.guidance, Distilled):
            return branches.distilled(call, staged, self.plan.guidance)
        return branches.guided(call, staged, skip=self.skip)

    # ------------------------------------------------------------------------------------------------ stages

    def _flight(self, world: World) -> Flight:
        if world.in_flight is None:
            check_policy(world.caches[0].policy)
            return Flight(stage=world.block, first=world.block)
        return Flight(**world.in_flight)

    def _advance(self, model: StaggeredModel, world: World) -> tuple[Flight, Made]:
        if self.blocks is not None and world.block >= self.blocks:
            raise WorldOver(f"expected a block before {self.blocks}, where this world ends; got {world.block}")
        flight = self._flight(world)
        flight.latents = list(flight.latents)
        while flight.stage < world.block + self.plan.window:
            self._run_stage(model, world, flight)
        oldest = flight.latents.pop(0)
        check_finite(oldest, world.block)
        flight.finished = oldest
        given = 0 if flight.prefix is None or world.block > flight.first else len(flight.prefix)
        # a given picture is shown as the model has redrawn it; given clips have been shown before
        shown = oldest[given:] if given > 1 or flight.first else oldest
        return flight, Made(shown.to(model.dtype), oldest.to(model.dtype))

    def _run_stage(self, model: StaggeredModel, world: World, flight: Flight) -> None:
        if self.blocks is None or flight.stage < self.blocks:
            flight.latents.append(_noise(model, world, flight.stage))
        prompts = [self._prompt(model, world, world.block + i) for i in range(len(flight.latents))]
        for index in range(self.plan.steps_per_stage):
            self._run_step(model, world, flight, prompts, index)
        flight.stage += 1

    def _run_step(
        self, model: StaggeredModel, world: World, flight: Flight, prompts: Sequence[Prompt], index: int
    ) -> None:
        times, oldest = self.plan.times, world.block
        steps = [(flight.stage - oldest - i) * self.plan.steps_per_stage + index for i in range(len(prompts))]
        seen = [_with_prefix(flight, oldest + i, x) for i, x in enumerate(flight.latents)]
        active = tuple(
            Entry(oldest + i, x, times[step], prompt, self.plan.reach(step), self.plan.weights(times[step]))
            for i, (x, step, prompt) in enumerate(zip(seen, steps, prompts, strict=True))
        )
        call = Call(self._clean(model, flight, oldest - 1), active, self.plan.distil(index))
        with self._staging(world, call) as staged, span("step", step=index):
            done = self.step(model, world, call, staged)
            if staged is not None:
                self._commit(world, staged)
        boundary("step", step=index)
        flight.finished = None
        flight.run, flight.skipped = flight.run + done.run, flight.skipped + done.skipped
        count("branch_passes", done.run)
        count("branch_passes_skipped", done.skipped)
        flight.latents = [
            entry.latents + v * (times[step + 1] - entry.t)
            for entry, step, v in zip(active, steps, done.velocities, strict=True)
        ]

    def _clean(self, model: StaggeredModel, flight: Flight, block: int) -> Entry | None:
        """The block that has just finished, for its clean pass."""
        if flight.finished is None:
            return None
        latents = _with_prefix(flight, block, flight.finished)
        return Entry(block, latents, self.plan.clean_t, model.null, self.plan.reach_clean)

    def _take_given(self, model: StaggeredModel, world: World, blocks: Sequence[Tensor]) -> None:
        """Clean passes of given blocks: in one call, or as many at a time as the window holds beside what they see."""
        cache, width = world.caches[0], model.geometry.frames_per_block
        window = cache.policy.window
        together = len(blocks) if window is None else max(1, window // width - 1)
        for at in range(0, len(blocks), together):
            entries = tuple(
                Entry(at + i, x, self.plan.clean_t, model.null, self.plan.reach_given)
                for i, x in enumerate(blocks[at : at + together])
            )
            call = Call(None, entries, self.plan.distil(0))
            with cache.stage(at * width, len(entries) * width) as staged:
                Branches(model, cache).given(call, staged, dropped=isinstance(self.plan.guidance, Guided))
                self._commit(world, staged)

    def _staging(self, world: World, call: Call) -> AbstractContextManager[StagedBlock | None]:
        if call.clean is None:
            return nullcontext()
        width = call.clean.latents.shape[0]
        return world.caches[0].stage(call.clean.block * width, width)

    def _commit(self, world: World, staged: StagedBlock) -> None:
        cache = world.caches[0]
        staged.clean = True
        with span("cache write"):
            staged.commit()
        if cache.policy.offload == "host":
            cache.offload(cache.held)

    def _prompt(self, model: StaggeredModel, world: World, block: int) -> Prompt:
        signals, _ = world.signals(block)
        left = None if self.blocks is None else self.blocks - block
        return model.text(model.condition(signals).prompt, left)


def _noise(model: StaggeredModel, world: World, block: int) -> Tensor:
    shape = model.geometry.latent
    size = (model.geometry.frames_per_block, shape.channels, shape.height, shape.width)
    return world.noise("initial", block, 0, size).to(model.device, torch.float32)


def _with_prefix(flight: Flight, block: int, latents: Tensor) -> Tensor:
    """A block as the model sees it: given frames stay as they were given, whatever the last step made of them."""
    if flight.prefix is None or block != flight.first:
        return latents
    return torch.cat([flight.prefix, latents[len(flight.prefix) :]])
