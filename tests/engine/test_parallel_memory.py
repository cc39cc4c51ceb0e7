"""What ranks are said to need before anything is allocated is what they then hold."""

from __future__ import annotations

import pytest
import torch

from engine.kvcache.policy import parse
from engine.kvcache.pool import PageFormat, PagePool
from engine.models import KVGeometry
from engine.models.clip_vision import ClipConfig, ClipVision
from engine.models.presets import PRESETS, find
from engine.parallel.memory import Model, model_of, per_rank
from engine.parallel.split import Layout, Split, SplitError, layouts
from engine.plan import Plan

KV = KVGeometry(layers=2, heads=4, head_dim=8, tokens=12)
MODEL = Model(parameters=1000, dim=32, ffn_dim=64, heads=4, kv=KV, frames_per_block=3)


@pytest.mark.parametrize("store", ["native", "int8"])
@pytest.mark.parametrize("layout", layouts(4), ids=str)
def test_the_cache_of_a_rank_is_what_its_pool_takes(layout: Layout, store: str) -> None:
    policy = parse(f"window=9 sink=1 store={store}")
    said = per_rank(MODEL, layout, policy, torch.float32)
    for rank, memory in enumerate(said):
        form = PageFormat(Split(layout, rank, KV).local_kv, torch.float32, policy.store)
        planes = PagePool(form, 9).storage.planes.values()
        assert memory.cache == sum(plane.numel() * plane.element_size() for plane in planes)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_cache_and_activations_fall_with_ranks_and_weights_do_not(name: str) -> None:
    model, policy = model_of(find(name)), parse("window=21")
    whole = per_rank(model, Layout(), policy, torch.bfloat16)[0]
    for ranks in (2, 4):
        for layout in layouts(ranks):
            if layout.ulysses > model.heads:
                continue
            for memory in per_rank(model, layout, policy, torch.bfloat16):
                copies = max(model.kv.heads, layout.ulysses) / model.kv.heads
                assert memory.cache == pytest.approx(whole.cache / ranks * copies, rel=0.15)
                if layout.ring == 1:  # what goes round a ring may be more than a block
                    assert memory.activations < whole.activations
                assert memory.weights == whole.weights
                assert memory.beside == whole.beside
                assert memory.total == memory.weights + memory.beside + memory.cache + memory.activations


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_ranks_together_hold_all_that_one_world_is_admitted_with(name: str) -> None:
    plan = Plan.of(find(name))
    model, frames = model_of(plan.preset), plan.held_frames(20.0)
    ranks = per_rank(model, Layout(1, 2), plan.rule, torch.bfloat16, frames, plan.caches)
    assert sum(memory.cache for memory in ranks) >= plan.world_bytes(20.0)


def test_a_team_keeps_the_pages_of_its_own_branch_or_all_of_those_that_branches_share() -> None:
    def pages(layout: Layout, caches: int) -> int:
        return per_rank(MODEL, layout, parse("window=9"), torch.float32, caches=caches)[0].cache

    one, team = Layout(), Layout(cfg=2)
    assert pages(one, 2) == 2 * pages(team, 2)
    assert pages(one, 1) == pages(team, 1) == pages(team, 2)


def test_every_rank_holds_what_lies_beside_the_network_in_its_own_precision() -> None:
    text, autoencoder, vision = 5_680_910_336, 126_892_531, 632_076_800
    policy = parse("window=0")
    wan = per_rank(model_of(find("wan2.1-i2v-14b")), Layout(2, 1), policy, torch.float32, 21)
    assert {(m.text_encoder, m.decoder, m.image_encoder) for m in wan} == {(2 * text, 4 * autoencoder, 4 * vision)}
    magi = per_rank(model_of(find("magi-1-4.5b")), Layout(2, 1), parse("window=30"), torch.bfloat16)[1]
    assert (magi.text_encoder, magi.decoder, magi.image_encoder) == (4 * 4_762_310_656, 4 * 613_800_000, 0)


def test_the_picture_encoder_is_as_large_as_is_said() -> None:
    with torch.device("meta"):
        clip = ClipVision(ClipConfig())
    assert sum(p.numel() for p in clip.parameters()) == find("wan2.1-i2v-14b").sizes.image_parameters


def test_a_cache_that_grows_needs_a_length() -> None:
    short, long = (per_rank(MODEL, Layout(2, 1), parse("full"), torch.float32, n)[1].cache for n in (30, 60))
    assert long == 2 * short


def test_more_ranks_than_heads_are_refused() -> None:
    with pytest.raises(SplitError, match="at most 4 ranks for 4 heads, got 8"):
        per_rank(MODEL, Layout(8, 1), parse("window=9"), torch.float32)
