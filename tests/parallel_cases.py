"""Cases that ranks run: a world spread over some ranks against the same world on one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from engine.generator import Generator
from engine.kvcache.cache import KVCache
from engine.kvcache.policy import parse
from engine.kvcache.pool import PageFormat, PagePool
from engine.models import BlockModel
from engine.parallel.cache import ParallelCache, Spread
from engine.parallel.choose import Mode
from engine.parallel.mesh import Mesh
from engine.parallel.split import Layout
from engine.protocol import PromptChange, PromptMode, WorldSpec
from engine.samplers import FewStep, FlowODE, Linear, Sampler
from engine.world import World
from tests.toy_model import HOLD_RIGHT, ToyModel

TOLERANCE = 1e-5
PAGES = 96
SAMPLERS: dict[str, Sampler] = {
    "few-step": FewStep(Linear(), (1.0, 0.5), context_time=0.06, noise_context=True),
    "guided": FlowODE(Linear(), (1.0, 0.5), guidance=2.0),
}


def spread_over(mesh: Mesh, layout: tuple[int, int], model: BlockModel, mode: Mode | None) -> Spread:
    return Spread.over(mesh.grid(Layout(*layout)), model.geometry.kv, mode=mode or "pass-q")


def open_world(model: BlockModel, kv: str, sampler: Sampler, spread: Spread | None, seed: int = 3) -> World:
    policy, per_block = parse(kv), model.geometry.frames_per_block
    form = PageFormat(spread.kv if spread else model.geometry.kv, model.dtype, policy.store)
    pool = PagePool(form, PAGES)
    make: Callable[..., KVCache] = spread.cache if spread else KVCache
    caches = tuple(make(pool, policy, per_block) for _ in range(sampler.branches))
    return World(WorldSpec(model.name, (PromptChange(0.0, "a"),), seed), model, sampler, caches)


def world(
    mesh: Mesh,
    ranks: int,
    layout: tuple[int, int],
    mode: Mode | None = None,
    kv: str = "full",
    sampler: str = "few-step",
    steer: PromptMode | None = "cut",
    recache: Any = "blocks",
    blocks: int = 5,
    toy: dict[str, Any] | None = None,
    tolerance: float = TOLERANCE,
) -> None:
    """Blocks and, at the end, the gathered cache are those of one rank."""
    model = ToyModel(**(toy or {}))
    alone = open_world(model, kv, SAMPLERS[sampler], None)
    shared = open_world(model, kv, SAMPLERS[sampler], spread_over(mesh, layout, model, mode))
    generator = Generator(model, recache)
    for block in range(blocks):
        if block == blocks // 2 and steer:
            for each in (alone, shared):
                each.steer(PromptChange(0, "b", steer, 2))
                each.act(HOLD_RIGHT)
        same(generator.next_block(shared).latents, generator.next_block(alone).latents, tolerance)
    if parse(kv).store == "native" or layout[1] == 1:
        same_cache(shared, alone, tolerance)


def same_cache(shared: World, alone: World, tolerance: float) -> None:
    for one, other in zip(shared.caches, alone.caches, strict=True):
        assert isinstance(one, ParallelCache)
        joined, whole = one.snapshot(), other.snapshot()
        assert joined.keys() == whole.keys()
        for name in joined:
            same(joined[name].float(), whole[name].float(), 1 if "int" in str(whole[name].dtype) else tolerance)


def same(got: Tensor, expected: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=tolerance)
