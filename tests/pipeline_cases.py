"""Cases that ranks run: worlds whose blocks in flight, or whose branches, are dealt out, against those of one rank."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from engine.branches import Call, StaggeredModel, Step
from engine.generator import Generator
from engine.kvcache.cache import KVCache
from engine.kvcache.deal import Blocks, Deal
from engine.kvcache.staged import StagedBlock
from engine.loader import Watched
from engine.models import BlockModel, Geometry
from engine.parallel.cache import Spread
from engine.parallel.choose import Mode
from engine.parallel.crew import Crew, Follower, LedGenerator, LedWorld, between_passes
from engine.parallel.deal import Dealt
from engine.parallel.mesh import Grid, Mesh
from engine.parallel.split import Layout
from engine.parts import parts
from engine.protocol import PromptChange, WorldSpec
from engine.stages import Distilled, Guided, Plan
from engine.staggered import StaggeredSampler
from engine.world import World
from tests.parallel_cases import TOLERANCE, caches_of, open_world, same, same_caches
from tests.parallel_models import MODELS

PLANS = {
    "guided": Plan(8, Guided()),
    "distilled": Plan(8, Distilled()),
    "two in flight": Plan(4, Distilled(), window=2),
    "one in flight": Plan(2, Guided(), window=1, reaches=(3, 2)),
    "sees all": Plan(4, Guided(), reaches=()),
}


def flight(
    mesh: Mesh,
    ranks: int,
    layout: Sequence[int],
    plan: str = "guided",
    mode: Mode | None = None,
    kv: str = "window=9",
    given: int = 0,
    blocks: int = 2,
    last: int | None = None,
    beside: float = 0.0,
    tolerance: float = TOLERANCE,
) -> list[Any]:
    """Blocks and caches are those of one rank. How many bytes all ranks sent, by the formula too, and of what kinds."""
    model, sampler = MODELS["magi"](), Noting(PLANS[plan], last)
    grid = mesh.grid(Layout(*layout))
    spread = Spread.over(grid, model.geometry.kv, mode=mode or "pass-q", beside=beside)
    alone = open_world(model, kv, StaggeredSampler(PLANS[plan], last), None)
    shared = open_world(model, kv, sampler, spread)
    passes, before = listen(shared.caches[0]), dict(mesh.sent_bytes)
    generator = Generator(model, "none")
    if given:
        latents = torch.randn(given, 4, 4, 6, generator=torch.Generator().manual_seed(1))
        for world in (alone, shared):
            generator.prefill(world, latents)
    for block in range(blocks):
        if block == 1:
            for world in (alone, shared):
                world.steer(PromptChange(0, "a city at night"))
        same(generator.next_block(shared).latents, generator.next_block(alone).latents, tolerance)
    assert shared.caches[0].held == alone.caches[0].held
    same_caches(shared, alone, tolerance)
    sent = {kind: n - before.get(kind, 0) for kind, n in mesh.sent_bytes.items() if n > before.get(kind, 0)}
    counted = torch.tensor([sum(sent.get(kind, 0) for kind in ("pipeline", "velocities", "cfg"))])
    total = grid.cfg.sum(grid.pipeline.sum(grid.everyone.sum(counted, "count"), "count"), "count")
    of_team = sum(bytes_of(each, grid, model.geometry, beside) for each in passes)
    formula = grid.cfg.sum(torch.tensor([of_team]), "count") + cfg_bytes(
        sum(sampler.found), grid.layout, model.geometry
    )
    return [int(total), int(formula), sorted(set(sent) - {"snapshot"})]


@dataclass(frozen=True)
class Noting(StaggeredSampler):
    """How many velocities each step finds, over all branches."""

    found: list[int] = field(default_factory=list)

    def step(self, model: StaggeredModel, world: World, call: Call, staged: StagedBlock | None) -> Step:
        weights = [entry.weights for entry in call.active]
        self.found.append(sum(len(part.blocks) for part in parts(weights, skip=self.skip)))
        return super().step(model, world, call, staged)


def cfg_bytes(velocities: int, layout: Layout, geometry: Geometry) -> int:
    """n / g (g - 1) V F C H W 4"""
    shape, g = geometry.latent, layout.cfg
    size = geometry.frames_per_block * shape.channels * shape.height * shape.width
    return layout.ranks // g * (g - 1) * velocities * size * 4


def listen(cache: KVCache) -> list[Blocks]:
    """The passes that will be dealt out."""
    passes, deal = [], cache.deal

    def noted(blocks: Blocks) -> Deal:
        passes.append(blocks)
        return deal(blocks)

    cache.deal = noted  # type: ignore[method-assign]
    return passes


def bytes_of(blocks: Blocks, grid: Grid, geometry: Geometry, beside: float) -> int:
    """m 2 F S k d e in each layer, and (n - 1) B F C H W 4 at the end on each rank of a team."""
    kv, shape, teams = geometry.kv, geometry.latent, grid.layout.pipeline
    copies = max(kv.heads, grid.layout.ulysses)  # of key heads in a team
    keys = 2 * blocks.width * kv.tokens * copies * kv.head_dim * 4
    latents = len(blocks.spans) * blocks.width * shape.channels * shape.height * shape.width
    needed = Dealt.over(teams, blocks, beside).messages
    return kv.layers * needed * keys + (teams - 1) * latents * 4 * grid.layout.team.ranks


def resumed(mesh: Mesh, ranks: int, layout: Sequence[int], then: Sequence[int], plan: str) -> None:
    """A world goes on from its snapshot on another grid of the same ranks, and on one rank, as if nothing had been."""
    model, sampler = MODELS["magi"](), StaggeredSampler(PLANS[plan])
    first, second = (Spread.over(mesh.grid(Layout(*x)), model.geometry.kv, mode="pass-kv") for x in (layout, then))
    generator = Generator(model, "none")
    alone, before = (open_world(model, "window=9", sampler, spread) for spread in (None, first))
    for _ in range(2):
        generator.next_block(before), generator.next_block(alone)
    state, twin = before.snapshot(), before.fork()
    others = [open_world(model, "window=9", sampler, spread) for spread in (second, None)]
    for other in others:
        other.restore(state)
    for _ in range(2):
        expected = generator.next_block(alone).latents
        for each in (before, twin, *others):
            same(generator.next_block(each).latents, expected, TOLERANCE)


def led(mesh: Mesh, ranks: int, layout: Sequence[int]) -> None:
    """Rank 0 gives up a block between two passes, forks and closes, and ranks with other blocks follow."""
    model, sampler = MODELS["magi"](), StaggeredSampler(PLANS["guided"])
    spread = Spread.over(mesh.grid(Layout(*layout)), model.geometry.kv, mode="pass-q")
    branching = spread.branching
    if mesh.rank:
        watched = cast(BlockModel, Watched(model, functools.partial(between_passes, mesh)))

        def follow_in(spec: WorldSpec) -> World:
            return World(spec, watched, sampler, caches_of(watched, "window=9", sampler, spread), branching=branching)

        Follower(mesh, follow_in, {"magi": Generator(watched, "none")}).follow()
        return
    crew, passes_left = Crew(mesh), 1000

    def pulse() -> None:
        nonlocal passes_left
        passes_left -= 1
        if passes_left < 0:
            raise TimeoutError

    watched = cast(BlockModel, Watched(model, crew.watched(pulse)))
    spec = WorldSpec("magi", (PromptChange(0.0, "a beach"),), 3)
    leading, generator = LedGenerator(watched, "none", crew), Generator(model, "none")
    shared = LedWorld(spec, watched, sampler, caches_of(watched, "window=9", sampler, spread), crew, branching)
    alone = World(spec, model, sampler, caches_of(model, "window=9", sampler, None))

    def both(one: World, other: World) -> Tensor:
        expected = generator.next_block(other).latents
        same(leading.next_block(one).latents, expected, TOLERANCE)
        return expected

    both(shared, alone)
    passes_left = 4  # in the midst of the next block
    with pytest.raises(TimeoutError):
        leading.next_block(shared)
    passes_left = 1000
    both(shared, alone)
    twin, other = shared.fork(), alone.fork()
    both(shared, alone)
    both(twin, other)
    for world in (shared, twin):
        world.close()
    crew.close()
