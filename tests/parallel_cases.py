"""Cases that ranks run: a world spread over some ranks against the same world on one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from engine.generator import Generator
from engine.guidance import ALL_BRANCHES, Branching
from engine.kvcache.cache import KVCache
from engine.kvcache.policy import parse
from engine.kvcache.pool import PageFormat, PagePool
from engine.loader import Watched
from engine.models import BlockModel, KVGeometry
from engine.parallel.cache import ParallelCache, Spread
from engine.parallel.choose import Call, Machine, Mode, Strategy, of_layout, sent_bytes
from engine.parallel.crew import Crew, Follower, LedGenerator, LedWorld, between_passes
from engine.parallel.mesh import Mesh
from engine.parallel.probe import measure
from engine.parallel.split import Layout
from engine.protocol import PromptChange, PromptMode, WorldSpec
from engine.samplers import Sampler
from engine.world import World
from tests.parallel_models import MODELS, SAMPLERS
from tests.toy_model import HOLD_RIGHT

TOLERANCE = 1e-5
PAGES = 96


def open_world(model: BlockModel, kv: str, sampler: Sampler, spread: Spread | None, seed: int = 3) -> World:
    spec = WorldSpec(model.name, (PromptChange(0.0, "a beach"),), seed)
    return World(spec, model, sampler, caches_of(model, kv, sampler, spread), branching=branching_of(spread))


def caches_of(model: BlockModel, kv: str, sampler: Sampler, spread: Spread | None) -> tuple[KVCache, ...]:
    policy, per_block = parse(kv), model.geometry.frames_per_block
    form = PageFormat(spread.kv if spread else model.geometry.kv, model.dtype, policy.store)
    pool = PagePool(form, PAGES)
    make: Callable[..., KVCache] = spread.cache if spread else KVCache
    return tuple(make(pool, policy, per_block) for _ in branching_of(spread).mine(sampler.branches, sampler.caches))


def branching_of(spread: Spread | None) -> Branching:
    return spread.branching if spread else ALL_BRANCHES


def world(
    mesh: Mesh,
    ranks: int,
    layout: Sequence[int],
    mode: Mode | None = None,
    kv: str = "full",
    model: str = "toy",
    sampler: str = "few-step",
    steer: PromptMode | None = "cut",
    recache: Any = "blocks",
    blocks: int = 5,
    sizes: dict[str, Any] | None = None,
    tolerance: float = TOLERANCE,
) -> None:
    """Blocks and, at the end, the gathered cache are those of one rank."""
    made = MODELS[model](**(sizes or {}))
    grid = mesh.grid(Layout(*layout))
    spread = Spread.over(grid, made.geometry.kv, mode=mode or "pass-q")
    alone, shared = (open_world(made, kv, SAMPLERS[sampler], s) for s in (None, spread))
    generator = Generator(made, recache)
    for block in range(blocks):
        if block == blocks // 2 and steer:
            for each in (alone, shared):
                each.steer(PromptChange(0, "a city at night", steer, 2))
                if made.action_keys:
                    each.act(HOLD_RIGHT)
        same(generator.next_block(shared).latents, generator.next_block(alone).latents, tolerance)
    assert [cache.held for _, cache in shared.branches] == [alone.caches[branch].held for branch, _ in shared.branches]
    if parse(kv).store == "native" or grid.layout.ring == 1:
        same_caches(shared, alone, tolerance)


def resumed(
    mesh: Mesh,
    ranks: int,
    layout: Sequence[int],
    then: Sequence[int],
    kv: str = "window=6 sink=1",
    sampler: str = "few-step",
) -> None:
    """A world goes on from its snapshot on another grid of the same ranks, and on one rank, as if nothing had been."""
    model, rule = MODELS["toy"](heads=4, kv_heads=4), SAMPLERS[sampler]
    first, second = (Spread.over(mesh.grid(Layout(*x)), model.geometry.kv, mode="pass-kv") for x in (layout, then))
    generator = Generator(model)
    alone, before = (open_world(model, kv, rule, spread) for spread in (None, first))
    for _ in range(4):
        generator.next_block(before), generator.next_block(alone)
    state = before.snapshot()
    twin = before.fork()
    others = [open_world(model, kv, rule, spread) for spread in (second, None)]
    for other in others:
        other.restore(state)
    for _ in range(3):
        expected = generator.next_block(alone).latents
        for each in (before, twin, *others):
            same(generator.next_block(each).latents, expected, TOLERANCE)


def batched(mesh: Mesh, ranks: int, layout: Sequence[int], mode: Mode, sampler: str = "few-step") -> None:
    """Two worlds in one batch are each what they are alone."""
    model, rule = MODELS["toy"](), SAMPLERS[sampler]
    spread = Spread.over(mesh.grid(Layout(*layout)), model.geometry.kv, mode=mode)
    generator = Generator(model)
    alone, pair = ([open_world(model, "window=4", rule, s, seed) for seed in (1, 2)] for s in (None, spread))
    for _ in range(3):
        for got, world in zip(generator.next_blocks(pair), alone, strict=True):
            same(got.latents, generator.next_block(world).latents, TOLERANCE)


def latent_attention(mesh: Mesh, ranks: int, layout: Sequence[int], mode: Mode | None = None) -> None:
    """One latent per token in the cache: a block over two before it."""
    kv = KVGeometry(1, 4, 8, 6, latent_dim=5)
    generator = torch.Generator().manual_seed(0)
    up = torch.randn(2, 5, 4 * 8, generator=generator)
    rotate = MODELS["toy"]().rotate  # type: ignore[attr-defined]

    def expand(latent: Tensor) -> tuple[Tensor, Tensor]:
        k, v = (torch.unflatten(latent @ w, -1, (4, 8)) for w in up)
        return k, v

    spread = Spread.over(mesh.grid(Layout(*layout)), kv, mode=mode or "pass-q")
    shared = spread.cache(PagePool(PageFormat(spread.kv), 16), parse("full"), 2)
    alone = KVCache(PagePool(PageFormat(kv), 16), parse("full"), 2)
    for block in range(3):
        q = torch.randn(1, 2, 6, 4, 8, generator=generator)
        latent = torch.randn(1, 2, 6, 5, generator=generator)
        with shared.stage(2 * block, 2) as one, alone.stage(2 * block, 2) as other:
            one.clean = other.clean = True
            expected = other.attend_latent(0, q, latent, expand, rotate)
            own = torch.unflatten(one.shard(q.flatten(3)), 3, (4, 8))
            mine = one.attend_latent(0, own, one.shard(latent), expand, rotate)
            same(one.unshard(mine.flatten(3)), expected.flatten(3), TOLERANCE)
            one.commit()
            other.commit()


def attend_bytes(
    mesh: Mesh, ranks: int, layout: Sequence[int], mode: Mode | None, kv: Sequence[int], heads: int, past: int
) -> list[int]:
    """Bytes that all ranks send in one call over `past` frames of past: counted, and by the formula."""
    grid, geometry = mesh.grid(Layout(*layout)), KVGeometry(1, *kv)
    spread = Spread.over(grid, geometry, mode=mode or "pass-q")
    cache = spread.cache(PagePool(PageFormat(spread.kv), 64), parse("full"), 2)
    counted = 0
    for start in range(0, past + 1, 2):
        with cache.stage(start, 2) as block:
            block.clean = True
            q, k, v = (torch.randn(1, 2, geometry.tokens, n * geometry.head_dim) for n in (heads, kv[0], kv[0]))
            q, k, v = (torch.unflatten(block.shard(x), -1, (-1, geometry.head_dim)) for x in (q, k, v))
            before = sum(mesh.sent_bytes.values())
            block.attend(0, q, k, v, None)
            counted = sum(mesh.sent_bytes.values()) - before
            block.commit()
    total = int(grid.everyone.sum(torch.tensor([counted], dtype=torch.int64), "count"))
    call = Call(geometry, heads, 2, past + 2)
    return [total, sent_bytes(Strategy(grid.layout, mode), call)]


def unshard_bytes(mesh: Mesh, ranks: int, layout: Sequence[int], tokens: int) -> list[int]:
    """The same of gathering a block's tokens at the end: (n - 1) F S D e."""
    spread = Spread.over(mesh.grid(Layout(*layout)), KVGeometry(1, ranks, 8, tokens), mode="pass-q")
    h = torch.arange(2.0 * tokens * 16).view(1, 2, tokens, 16)
    before = sum(mesh.sent_bytes.values())
    same(spread.exchange.unshard(spread.exchange.shard(h)), h, 0)
    counted = sum(mesh.sent_bytes.values()) - before
    total = spread.exchange.grid.everyone.sum(torch.tensor([counted], dtype=torch.int64), "count")
    return [int(total), (ranks - 1) * 2 * tokens * 16 * 4]


def measured(mesh: Mesh, ranks: int) -> list[float]:
    """The machine, the same on every rank, and the choices made by it too."""
    machine = measure(mesh, 2, 16)
    numbers = torch.tensor(list(vars(machine).values()), dtype=torch.float64)
    total = mesh.everyone.sum(numbers, "check")
    assert torch.equal(total, numbers * ranks)
    return [float(x) for x in numbers]


def cfg_bytes(mesh: Mesh, ranks: int, layout: Sequence[int]) -> list[int]:
    """Bytes that all ranks send to the other branch in one block: n (g - 1) b F C H W e in each of two steps."""
    model, rule = MODELS["toy"](), SAMPLERS["guided"]
    spread = Spread.over(mesh.grid(Layout(*layout)), model.geometry.kv, mode="pass-q")
    open_one = open_world(model, "window=4", rule, spread)
    assert len(open_one.caches) == 1
    before = mesh.sent_bytes.get("cfg", 0)
    latents = Generator(model).next_block(open_one).latents
    counted = torch.tensor([mesh.sent_bytes["cfg"] - before], dtype=torch.int64)
    total = mesh.everyone.sum(counted, "count")
    return [int(total), 2 * ranks * (layout[3] - 1) * latents.numel() * latents.element_size()]


def chosen(mesh: Mesh, ranks: int, layout: Sequence[int]) -> list[str]:
    """A world whose ring chooses for itself: keys first, queries once they are outnumbered."""
    model = MODELS["toy"](heads=8, kv_heads=2)
    grid = mesh.grid(Layout(*layout))
    machine = Machine(0, 1e6, 0, 1e6, 1e15)  # bytes alone decide
    spread = Spread.over(grid, model.geometry.kv, machine)
    alone, shared = (open_world(model, "full", SAMPLERS["few-step"], s) for s in (None, spread))
    modes, generator = [], Generator(model)
    for _ in range(10):
        before = {mode: mesh.sent_bytes.get(mode, 0) for mode in ("pass-kv", "pass-q")}
        same(generator.next_block(shared).latents, generator.next_block(alone).latents, TOLERANCE)
        modes += [mode for mode, sent in before.items() if mesh.sent_bytes.get(mode, 0) > sent]
    assert len(of_layout(grid.layout)) == 2
    return modes


def led(mesh: Mesh, ranks: int, layout: Sequence[int], mode: Mode | None = None, sampler: str = "few-step") -> None:
    """Rank 0 steers, gives up a block, forks, resumes and closes, and the others follow: its worlds are one rank's."""
    model, rule = MODELS["toy"](), SAMPLERS[sampler]
    spread = Spread.over(mesh.grid(Layout(*layout)), model.geometry.kv, mode=mode or "pass-q")
    if mesh.rank:
        watched = cast(BlockModel, Watched(model, functools.partial(between_passes, mesh)))

        def follow_in(spec: WorldSpec) -> World:
            caches = caches_of(watched, "window=6", rule, spread)
            return World(spec, watched, rule, caches, branching=spread.branching)

        Follower(mesh, follow_in, {"toy": Generator(watched)}).follow()
        return
    crew, enough = Crew(mesh), False

    def pulse() -> None:
        if enough:
            raise TimeoutError

    watched = cast(BlockModel, Watched(model, crew.watched(pulse)))
    spec = WorldSpec("toy", (PromptChange(0.0, "a beach"),), 3)
    leading, generator = LedGenerator(watched, "blocks", crew), Generator(model)
    shared, resumed = (
        LedWorld(spec, watched, rule, caches_of(watched, "window=6", rule, spread), crew, spread.branching)
        for _ in range(2)
    )
    alone = World(spec, model, rule, caches_of(model, "window=6", rule, None))

    def both(one: World, other: World) -> Tensor:
        expected = generator.next_block(other).latents
        same(leading.next_block(one).latents, expected, TOLERANCE)
        return expected

    start = torch.randn(4, 4, 2, 3, generator=torch.Generator().manual_seed(1))
    leading.prefill(shared, start)
    generator.prefill(alone, start)
    both(shared, alone)
    for each in (shared, alone):
        each.steer(PromptChange(0, "a city at night", "recache"))
        each.act(HOLD_RIGHT)
    enough = True
    with pytest.raises(TimeoutError):
        leading.next_block(shared)
    enough = False
    both(shared, alone)
    twin, other, state = shared.fork(), alone.fork(), shared.snapshot()
    expected = both(shared, alone)
    both(twin, other)
    resumed.restore(state)
    same(leading.next_block(resumed).latents, expected, TOLERANCE)
    for world in (shared, twin, resumed):
        world.close()
    crew.close()


def same_caches(shared: World, alone: World, tolerance: float) -> None:
    for branch, one in shared.branches:
        other = alone.caches[branch]
        assert isinstance(one, ParallelCache)
        joined, whole = one.snapshot(), other.snapshot()
        assert joined.keys() == whole.keys()
        for name in joined:
            codes = whole[name].dtype in (torch.int8, torch.uint8)
            allowed = max(tolerance, 1e-4 * (name[-5:] == "scale"))
            largest = (
                torch.cat([torch.ones(1), whole[name].float().abs().flatten()]).max().item()
            )  # what float32 rounds off grows with it
            same(joined[name].float(), whole[name].float(), 1 if codes else allowed * largest)


def same(got: Tensor, expected: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=tolerance)
