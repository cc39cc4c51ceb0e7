"""Latent pages: nothing is lost at full rank, little below it, and a page takes what its rank says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.generator import Generator
from engine.kvcache.cache import KVCache
from engine.kvcache.latent import Projection, fit
from engine.kvcache.policy import Policy, parse
from engine.kvcache.pool import PageFormat, PagePool
from engine.models import BlockModel, presets
from engine.models.presets import LoadOptions
from engine.protocol import PromptChange, WorldSpec
from engine.recipe import sampler
from engine.world import World
from tests.toy_model import TOY, ToyModel


def open_world(model: BlockModel, kv: str, preset: presets.Preset, projections: tuple[Projection, ...] = ()) -> World:
    geometry, rule = model.geometry.kv, parse(kv)
    if projections:
        geometry = replace(geometry, latent_dim=projections[0].down.shape[1])
    pool = PagePool(PageFormat(geometry, model.dtype), 64)
    cache = KVCache(pool, rule, model.geometry.frames_per_block, projections=projections)
    prompt = PromptChange(0.0, "the beach at noon")
    return World(WorldSpec(preset.name, (prompt,), seed=1), model, sampler(preset), (cache,))


def learn(model: BlockModel, preset: presets.Preset, rank: int, blocks: int = 8) -> tuple[Projection, ...]:
    """Projections fitted to what a world of the model wrote, un-rotated."""
    world = open_world(model, "full positions=window", preset)
    for _ in range(blocks):
        Generator(model).next_block(world)
    cache, layers = world.caches[0], range(model.geometry.kv.layers)
    written = [cache.select(i, cache.held) for i in layers]
    return fit([k.flatten(0, 1) for k, _ in written], [v.flatten(0, 1) for _, v in written], rank)


def last_of(world: World, blocks: int) -> Tensor:
    return [Generator(world.model).next_block(world).latents for _ in range(blocks)][-1]


@pytest.mark.parametrize("kv", ["full", "window=6 sink=1", "window=6 positions=window"])
def test_at_full_rank_a_world_with_latent_pages_is_the_same_world(kv: str) -> None:
    model = ToyModel(size=(4, 6))
    full = learn(model, TOY, rank=2 * 2 * 8)
    plain, latent = open_world(model, kv, TOY), open_world(model, kv, TOY, full)
    torch.testing.assert_close(last_of(latent, 6), last_of(plain, 6), rtol=0, atol=1e-4)


def test_the_shipped_world_keeps_its_picture_at_a_quarter_of_the_bytes() -> None:
    model, preset = presets.load("tiny-world", LoadOptions()), presets.find("tiny-world")
    squeezed = learn(model, preset, rank=128)
    plain, latent = open_world(model, preset.kv, preset), open_world(model, preset.kv, preset, squeezed)
    assert latent.caches[0].pool.format.page_bytes * 4 == plain.caches[0].pool.format.page_bytes
    with torch.inference_mode():
        a, b = last_of(plain, 6), last_of(latent, 6)
    assert (a - b).square().mean() < 0.01 * a.square().mean()


def test_a_rank_that_cannot_be_says_what_can() -> None:
    k = torch.randn(40, 2, 8)
    with pytest.raises(ValueError, match="expected 1 to 32 .* got 33"):
        Projection.fit(k, k, 33)


def test_quantised_latent_pages_are_refused() -> None:
    geometry = replace(ToyModel().geometry.kv, latent_dim=8)
    with pytest.raises(ValueError, match="latent pages are kept as they are"):
        PagePool(PageFormat(geometry, torch.float32, Policy(store="int8").store), 4)
