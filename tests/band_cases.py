"""Cases that all ranks of a group run: worlds whose pictures they decode together, against one rank's."""

from __future__ import annotations

import functools
import gc
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Self, cast

import pytest
import torch
from torch import Tensor

from engine.decoder import Pictures, decode
from engine.generator import Block, Generator
from engine.loader import Watched
from engine.models import Band, BlockModel, State
from engine.models.wan_model import WanModel
from engine.parallel.bands import BandFailed, Bands, BandThread, Joining, bands, shown
from engine.parallel.cache import Spread
from engine.parallel.crew import Crew, Follower, LedGenerator, LedWorld, between_passes
from engine.parallel.mesh import Mesh
from engine.parallel.split import Layout
from engine.protocol import PromptChange, WorldSpec
from engine.world import World
from tests.parallel_cases import caches_of
from tests.parallel_models import SAMPLERS
from tests.small_wan import small_model, small_preset

HEIGHT, WIDTH = 384, 32  # 48 latent rows: more than a halo has
SPEC = WorldSpec("small-wan", (PromptChange(0.0, "a"),), 3)


def model() -> WanModel:
    return small_model(replace(small_preset(frames_per_block=2), height=HEIGHT))


def following(mesh: Mesh, spread: Spread, made: WanModel, shared: Bands) -> BandThread:
    """What other ranks do until rank 0 is done."""
    watched = cast(BlockModel, Watched(made, functools.partial(between_passes, mesh)))

    def open_world(spec: WorldSpec) -> World:
        return World(spec, watched, SAMPLERS["wan"], caches_of(watched, "full", SAMPLERS["wan"], spread))

    with BandThread(mesh, shared, 1) as thread:
        Follower(mesh, open_world, {"small-wan": Generator(watched)}).follow()
    return thread


class Leading:
    """Rank 0: worlds of all ranks, and the same on one."""

    def __init__(self, mesh: Mesh, spread: Spread, made: WanModel, shared: Bands, joining: Joining) -> None:
        self.crew, self._spread, self._made = Crew(mesh), spread, made
        watched = cast(BlockModel, Watched(made, self.crew.watched(lambda: None)))
        self.model = shown(watched, joining.decoder("small-wan", shared["small-wan"], WIDTH))
        self.generators = LedGenerator(self.model, "blocks", self.crew), Generator(made)
        self.decoding = ThreadPoolExecutor(1)

    def open(self, spec: WorldSpec = SPEC) -> LedWorld:
        caches = caches_of(self.model, "full", SAMPLERS["wan"], self._spread)
        return LedWorld(spec, self.model, SAMPLERS["wan"], caches, self.crew)

    def open_alone(self, spec: WorldSpec = SPEC) -> World:
        return World(spec, self._made, SAMPLERS["wan"], caches_of(self._made, "full", SAMPLERS["wan"], None))

    def make(self, world: World) -> Block:
        return self.generators[0 if isinstance(world, LedWorld) else 1].next_block(world)

    def pictures(self, *worlds: World) -> list[Pictures]:
        """Of the next block of each, decoded while the next world's is made."""
        futures = [self.decoding.submit(decode, world, self.make(world)) for world in worlds]
        return [future.result() for future in futures]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.decoding.shutdown()
        self.crew.close()


def joined(mesh: Mesh, ranks: int) -> list[int]:
    """Worlds that go on, fork and are resumed, on all ranks and on one; returns bytes counted, and by the formula."""
    made, mesh.sent_bytes = model(), {}
    spread = Spread.over(mesh.grid(Layout(1, ranks)), made.geometry.kv, mode="pass-kv")
    shared = bands({"small-wan": made}, ranks)
    pictures = blocks = 0
    if mesh.rank:
        following(mesh, spread, made, shared)
    else:
        with Joining(mesh) as joining, Leading(mesh, spread, made, shared, joining) as lead:
            pictures, blocks = led(lead)
    rows = len(shared["small-wan"][0].rows)
    sent = torch.tensor([mesh.sent_bytes.get(kind, 0) for kind in ("pictures", "latents")])
    told = [int(x) for x in mesh.everyone.sum(sent, "count")]
    latents = (ranks - 1) * blocks * 2 * 16 * (HEIGHT // 8) * (WIDTH // 8) * 4
    heads = (ranks - 1) * (blocks + 1) * 2048  # and of the last word
    return [told[0], pictures * (HEIGHT - rows) * WIDTH * 3 + 8 * (ranks - 1) * blocks, told[1], latents, heads]


def led(lead: Leading) -> tuple[int, int]:
    """How many pictures, and of how many blocks, ranks have decoded together."""
    one, alone = lead.open(), lead.open_alone()
    count = blocks = 0

    def same(*got: Pictures, expected: Pictures) -> None:
        nonlocal count, blocks
        for each in got:
            apart = abs(each.astype(int) - expected)
            assert each.shape == expected.shape and apart.max() <= 1 and (apart > 0).mean() < 1e-2
            count, blocks = count + len(each), blocks + 1

    for _ in range(2):
        got, expected = lead.pictures(one, alone)
        same(got, expected=expected)
    twin, state = one.fork(), one.snapshot()
    resumed, resumed_alone = lead.open(), lead.open_alone()
    for each in (resumed, resumed_alone):
        each.restore(state)
    count, blocks = 2 * count, 2 * blocks  # the resumed world has made its memory of the same blocks
    for _ in range(2):
        got, forked, again, by_one_rank, expected = lead.pictures(one, twin, resumed, resumed_alone, alone)
        assert abs(by_one_rank.astype(int) - expected).max() <= 1
        same(got, forked, again, expected=expected)
    for world in (one, twin, resumed):
        world.close()
    return count, blocks


class Breaking:
    """A band that fails the second time."""

    def __init__(self, band: Band) -> None:
        self._band, self.rows, self._calls = band, band.rows, 0

    def decode(self, latents: Tensor, state: State) -> tuple[Tensor, State]:
        self._calls += 1
        if self._calls == 2:
            raise MemoryError
        return self._band.decode(latents, state)


def failing(mesh: Mesh, ranks: int) -> None:
    """A band that cannot be made ends its world and no other; memories of the past are let go."""
    made = model()
    spread = Spread.over(mesh.grid(Layout(1, ranks)), made.geometry.kv, mode="pass-kv")
    found: Sequence[Band] = bands({"small-wan": made}, ranks)["small-wan"]
    shared = {"small-wan": [Breaking(band) if i == 1 else band for i, band in enumerate(found)]}
    if mesh.rank:
        thread = following(mesh, spread, made, shared)
        assert len(thread._memories) <= 3  # none, the last block's and the one's before
        return
    with Joining(mesh) as joining, Leading(mesh, spread, made, shared, joining) as lead:
        broken, whole, alone = lead.open(), lead.open(), lead.open_alone()
        lead.pictures(broken)
        with pytest.raises(BandFailed, match="rank 1 could not make its band"):
            lead.pictures(broken)
        broken.close()
        del broken
        for _ in range(4):
            gc.collect()  # the error's traceback and its future hold each other, and the world
            got, expected = lead.pictures(whole, alone)
            assert abs(got.astype(int) - expected).max() <= 1
