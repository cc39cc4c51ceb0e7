"""From noise to a clean block: few-step re-noising, and the flow ODE with classifier-free guidance.

A sampler takes one block of one or several worlds of the same model through its steps, each of which reads the cache,
and through the clean pass, which writes it. A block that fails half way leaves its worlds as they were. Staggered
blocks (MAGI-1) are in `staggered.py`. Knows nothing of prompts, decoding or time.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from engine.kvcache.staged import Batch, StagedBlock
from engine.models import BlockModel, Conditioning, Context
from engine.noise import Purpose
from engine.profiler import boundary, span
from engine.world import World, empty_frame


class NotFinite(ArithmeticError):
    """A model's latents hold NaN or infinity. They would spread through the cache to every later block."""


@dataclass(frozen=True)
class Made:
    """A finished block: (F, C, H, W) as it will be shown, and as the clean pass saw it."""

    latents: Tensor
    context: Tensor


class Sampler(Protocol):
    """How a model's blocks are denoised."""

    @property
    def branches(self) -> int:
        """Of guidance, that can be computed apart; 1: no guidance."""
        ...

    @property
    def caches(self) -> int:
        """That a world needs: one for each branch, or one that all of them read."""
        ...

    @property
    def context_time(self) -> float:
        """The time told to the model in the clean pass."""
        ...

    def advance(self, model: BlockModel, worlds: Sequence[World], conditioning: Sequence[Conditioning]) -> list[Made]:
        """The next finished block of each world; the worlds' caches hold it afterwards."""
        ...

    def blocks_in_flight(self, world: World) -> int:
        """Blocks from `world.block` on that have begun already and can no longer be steered."""
        ...


@runtime_checkable
class Beginner(Protocol):
    """A sampler that lets given latents begin a world in a way of its own, whole blocks or not."""

    def begin(self, model: BlockModel, world: World, latents: Tensor) -> int:
        """Take (F, C, H, W) as the world's first frames; the result is how many of them are shown as they are."""
        ...


class Schedule(Protocol):
    """Maps a model's time to the share of noise in a latent: x_t = (1 - sigma) x0 + sigma noise."""

    def sigma(self, t: float) -> float: ...


@dataclass(frozen=True)
class Linear:
    """sigma = t, t in [0, 1]."""

    def sigma(self, t: float) -> float:
        return t


class ShiftedFlow:
    """The flow-matching table of the Wan family.

    sigma_i = s u_i / (1 + (s - 1) u_i) with u_i = 1 - i/1000, and t_i = 1000 sigma_i.
    In float32 throughout; sigma(t) is that of the entry nearest to t. Source: the scheduler of Wan2.1 as used by
    Self-Forcing and CausVid (shift 5 and 8).
    """

    def __init__(self, shift: float) -> None:
        u = torch.linspace(1, 0, 1001)[:-1]
        self.sigmas = shift * u / (1 + (shift - 1) * u)
        self.timesteps = self.sigmas * 1000

    def sigma(self, t: float) -> float:
        return float(self.sigmas[(self.timesteps - t).abs().argmin()])

    def warp(self, steps: Sequence[int]) -> tuple[float, ...]:
        """The times that stand for steps counted from 1000 down: [1000, 750, …] -> entries of the table."""
        table = torch.cat([self.timesteps, torch.zeros(1)])
        return tuple(float(table[1000 - step]) for step in steps)


@dataclass(frozen=True)
class FewStep:
    """Denoise, add fresh noise up to the next time, denoise again: the sampler of distilled models.

    `context_time` is the time told to the model in the clean pass; with `noise_context` that much noise is mixed into
    what it sees.
    """

    schedule: Schedule
    times: tuple[float, ...]
    context_time: float = 0.0
    noise_context: bool = False
    branches: int = 1
    caches: int = 1

    def advance(self, model: BlockModel, worlds: Sequence[World], conditioning: Sequence[Conditioning]) -> list[Made]:
        with _Rows(model, worlds, conditioning, branches=1) as rows:
            x = rows.noise("initial", 0)
            for step, t in enumerate(self.times):
                sigma = self.schedule.sigma(t)
                x0 = to_clean(x, rows.forward(x, t)[0], sigma)
                if step + 1 < len(self.times):
                    x = add_noise(x0, rows.noise("renoise", step), self.schedule.sigma(self.times[step + 1]))
            return rows.finish(x0, self.context_time, self._context_sigma)

    def blocks_in_flight(self, world: World) -> int:
        return 0

    @property
    def _context_sigma(self) -> float:
        return self.schedule.sigma(self.context_time) if self.noise_context else 0.0


@dataclass(frozen=True)
class FlowODE:
    """Euler steps along the flow, dx/dsigma = v, with classifier-free guidance v = v_u + g (v_c - v_u).

    With `guidance` other than 1 a world has two caches: the unconditional branch has a past of its own.
    """

    schedule: Schedule
    times: tuple[float, ...]
    guidance: float = 1.0
    context_time: float = 0.0
    noise_context: bool = False

    @property
    def branches(self) -> int:
        return 1 if self.guidance == 1 else 2

    @property
    def caches(self) -> int:
        return self.branches

    def advance(self, model: BlockModel, worlds: Sequence[World], conditioning: Sequence[Conditioning]) -> list[Made]:
        with _Rows(model, worlds, conditioning, self.branches) as rows:
            x = rows.noise("initial", 0)
            sigmas = [*map(self.schedule.sigma, self.times), 0.0]
            for step, t in enumerate(self.times):
                x = x + self._guided(rows.forward(x, t)) * (sigmas[step + 1] - sigmas[step])
            sigma = self.schedule.sigma(self.context_time) if self.noise_context else 0.0
            return rows.finish(x, self.context_time, sigma)

    def blocks_in_flight(self, world: World) -> int:
        return 0

    def _guided(self, flows: list[Tensor]) -> Tensor:
        if len(flows) == 1:
            return flows[0]
        conditional, unconditional = flows
        return unconditional + self.guidance * (conditional - unconditional)


def to_clean(x: Tensor, flow: Tensor, sigma: float) -> Tensor:
    """x0 = x_t - sigma v, in float64."""
    return (x.double() - sigma * flow.double()).to(flow.dtype)


def add_noise(clean: Tensor, noise: Tensor, sigma: float) -> Tensor:
    """(1 - sigma) x0 + sigma noise, in float32."""
    return ((1 - sigma) * clean.float() + sigma * noise.float()).to(clean.dtype)


def clean_pass(model: BlockModel, block: Context, x: Tensor, t: float, conditioning: Conditioning) -> None:
    """One forward pass of which only what it writes to the cache counts. x: (B, F, C, H, W)"""
    times = torch.full(x.shape[:2], t, device=x.device, dtype=torch.float32)
    model.forward(x, times, conditioning, block)


def check_finite(latents: Tensor, block: int) -> None:
    """Raise NotFinite unless every number of a finished block is one."""
    if not bool(latents.isfinite().all()):
        wrong = int((~latents.isfinite()).sum())
        raise NotFinite(f"block {block}: expected finite latents, got {wrong} of {latents.numel()} that are not")


def before_each(first: Tensor, latents: Tensor) -> Tensor:
    """For each latent frame (B, F, C, H, W) the one before it; `first` (B, 1, C, H, W) stands before the first."""
    return torch.cat([first, latents[:, :-1]], 1)


class _Rows:
    """The next blocks of some worlds, staged in their caches, as one batch. Leaving without `finish` undoes it."""

    def __init__(
        self, model: BlockModel, worlds: Sequence[World], conditioning: Sequence[Conditioning], branches: int
    ) -> None:
        self._model, self._worlds, self._branching = model, worlds, worlds[0].branching
        self._sizes = [1] * branches  # each is a part of a step, and finds one flow
        self._mine = self._branching.mine(branches, branches)
        parts = [model.negative(c) if branch else c for branch in self._mine for c in conditioning]
        self._conditioning = type(parts[0]).stack(parts)
        self._last = torch.stack([_last_frame(model, w) for w in worlds])  # (B, 1, C, H, W)
        self._frames = model.geometry.block_frames(worlds[0].block)
        self._staged: list[StagedBlock] = []
        self._stack = ExitStack()
        self._steps = 0

    def __enter__(self) -> _Rows:
        with ExitStack() as undo:
            for own in range(len(self._mine)):
                for world in self._worlds:
                    block = world.caches[own].stage(world.start, self._frames)
                    self._staged.append(undo.enter_context(block))
            self._stack = undo.pop_all()
        self._context: Context = self._staged[0] if len(self._staged) == 1 else Batch(self._staged)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def noise(self, purpose: Purpose, step: int) -> Tensor:
        """(B, F, C, H, W) from each world's own stream."""
        shape = self._model.geometry.latent
        size = (self._frames, shape.channels, shape.height, shape.width)
        draws = [w.noise(purpose, w.block, step, size) for w in self._worlds]
        return torch.stack(draws).to(self._model.device, self._model.dtype)

    def forward(self, x: Tensor, t: float) -> list[Tensor]:
        """The flow (B, F, C, H, W) of each branch."""
        with span("step", step=self._steps):
            rows = torch.cat([x] * len(self._mine))
            times = torch.full(rows.shape[:2], t, device=x.device, dtype=torch.float32)
            conditioning = self._with(self._last.expand_as(x))
            flows = self._model.forward(rows, times, conditioning, self._context).chunk(len(self._mine))
            found = self._branching.gather(flows, self._sizes, flows[0])
        boundary("step", step=self._steps)
        self._steps += 1
        return found

    def finish(self, clean: Tensor, context_time: float, sigma: float) -> list[Made]:
        """The clean pass, and every cache holds the block."""
        context = add_noise(clean, self.noise("context", 0), sigma) if sigma else clean
        for block in self._staged:
            block.clean = True
        conditioning = self._with(before_each(self._last, context))
        with span("clean pass"):
            clean_pass(self._model, self._context, torch.cat([context] * len(self._mine)), context_time, conditioning)
        check_finite(clean, self._worlds[0].block)
        with span("cache write"):
            for block in self._staged:
                block.commit()
        return [Made(a, b) for a, b in zip(clean, context, strict=True)]

    def _with(self, previous: Tensor) -> Conditioning:
        if not self._model.uses_previous:
            return self._conditioning
        return self._conditioning.with_previous(torch.cat([previous] * len(self._mine)))


def _last_frame(model: BlockModel, world: World) -> Tensor:
    last = world.last_frame
    return empty_frame(model) if last is None else last
