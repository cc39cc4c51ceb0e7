"""Worlds of staggered blocks: prompts, copies in mid-flight, failures, windows, given beginnings, finite worlds."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine import recipe
from engine.generator import Generator
from engine.kvcache.policy import PolicyError
from engine.models import Conditioning, Context
from engine.models.magi_model import MagiModel
from engine.models.presets import Preset
from engine.protocol import PromptChange
from engine.stages import Distilled, Guided, Plan
from engine.staggered import StaggeredSampler, WorldOver
from engine.world import World
from tests.small_magi import DISTILLED, GUIDED, QUICK, small_model, small_preset, small_world

PLANS = pytest.mark.parametrize("plan", [DISTILLED, GUIDED, QUICK], ids=["distilled", "guided", "quick"])


def worlds(plan: Plan, count: int = 2, kv: str = "", pages: int = 64) -> tuple[Generator, list[World]]:
    """Several worlds of one preset, alike."""
    preset = small_preset(plan)
    model = small_model(preset)
    made = [small_world(preset, model, kv=kv, frames=pages) for _ in range(count)]
    return made[0][0], [world for _, world in made]


def run(generator: Generator, world: World, blocks: int) -> list[Tensor]:
    return [generator.next_block(world).latents for _ in range(blocks)]


def same(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@PLANS
def test_as_many_blocks_are_in_flight_as_the_window_holds(plan: Plan) -> None:
    generator, (world,) = worlds(plan, 1)
    assert world.next_open_block == 0
    for done in range(1, 4):
        generator.next_block(world)
        assert world.block == done and world.next_open_block == done - 1 + plan.window


@PLANS
def test_a_prompt_enters_with_the_next_block_to_start_and_touches_none_in_flight(plan: Plan) -> None:
    generator, (changed, kept) = worlds(plan)
    assert same(run(generator, changed, 2), run(generator, kept, 2))
    at = changed.steer(PromptChange(0.0, "something else"))
    assert at == 1 + plan.window
    between = at - changed.block
    assert same(run(generator, changed, between), run(generator, kept, between))
    assert not same(run(generator, changed, 1), run(generator, kept, 1))


@PLANS
@pytest.mark.parametrize("kv", ["", "full", "full offload=host", "store=int8"])
def test_blocks_in_flight_survive_snapshot_restore_and_fork(plan: Plan, kv: str) -> None:
    generator, (world, restored) = worlds(plan, 2, kv)
    run(generator, world, 3)
    snapshot = copy.deepcopy(world.snapshot())
    twin = world.fork()
    expected = run(generator, world, 4)
    assert same(run(generator, twin, 4), expected)
    restored.restore(snapshot)
    assert restored.next_open_block == 2 + plan.window
    assert same(run(generator, restored, 4), expected)


class Failing:
    """A model whose forward fails at a given call."""

    def __init__(self, model: MagiModel, at: int) -> None:
        self._model, self.left = model, at

    def __getattr__(self, name: str) -> object:
        return getattr(self._model, name)

    def forward(self, x: Tensor, t: Tensor, conditioning: Conditioning, context: Context) -> Tensor:
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("out of memory")
        return self._model.forward(x, t, conditioning, context)


@settings(max_examples=12, deadline=None)
@given(at=st.integers(0, 30), guided=st.booleans())
def test_a_block_that_fails_half_way_leaves_its_world_as_it_was(at: int, guided: bool) -> None:
    pages = 10 + small_preset().recache_room(10)  # what an engine gives to one world
    generator, (world, undisturbed) = worlds(GUIDED if guided else DISTILLED, pages=pages)
    expected = run(generator, undisturbed, 4)
    broken = Generator(cast(MagiModel, Failing(cast(MagiModel, generator.model), at)), "none")
    got: list[Tensor] = []
    while len(got) < 4:
        try:
            got.append(broken.next_block(world).latents)
        except RuntimeError:
            break
    assert same(got + run(generator, world, 4 - len(got)), expected)
    assert sorted(world.caches[0].held) == sorted(undisturbed.caches[0].held)


@pytest.mark.parametrize(
    ("plan", "spared_per_block"), [(GUIDED, 2), (Plan(4, Guided(), window=1), 2), (Plan(16, Guided(), window=2), 4)]
)
def test_branches_of_no_weight_are_not_computed_and_nothing_changes(plan: Plan, spared_per_block: int) -> None:
    """In its last quarter a block is left out of the branch without history; alone, out of the one with text too."""
    generator, (spared, full) = worlds(plan)
    full.sampler = StaggeredSampler(plan, skip=False)
    for a, b in zip(run(generator, spared, 4), run(generator, full, 4), strict=True):
        assert float((a - b).abs().max() / b.std()) < 1e-5
    done, skipped = cast(StaggeredSampler, spared.sampler).counts(spared)
    everything, none = full.sampler.counts(full)
    assert done + skipped == everything and none == 0
    assert skipped == 4 * spared_per_block


def test_with_one_block_in_flight_the_last_quarter_is_the_same_to_the_bit() -> None:
    """The published scales leave one branch of three there; a product that is not batched has no other rounding."""
    plan = Plan(4, Guided(), window=1)
    generator, (spared, full) = worlds(plan)
    full.sampler = StaggeredSampler(plan, skip=False)
    assert same(run(generator, spared, 3), run(generator, full, 3))
    assert cast(StaggeredSampler, spared.sampler).counts(spared) == (3 * (3 * 3 + 1) + 2 * 2, 3 * 2)


@PLANS
def test_a_window_that_holds_every_range_changes_nothing(plan: Plan) -> None:
    generator, (full,) = worlds(plan, 1, "full")
    _, (window,) = worlds(plan, 1, "window=10")
    _, (host,) = worlds(plan, 1, "window=10 offload=host")
    expected = run(generator, full, 7)
    assert same(run(generator, window, 7), expected) and same(run(generator, host, 7), expected)
    assert len(window.caches[0].held) <= 10 < len(full.caches[0].held)
    assert host.caches[0].bytes_by_tier()["host"] > 0


def test_one_finished_block_is_all_that_the_published_ranges_read_of_a_world_without_a_given_clip() -> None:
    generator, (full,) = worlds(DISTILLED, 1, "full")
    _, (small,) = worlds(DISTILLED, 1, "window=4")
    assert same(run(generator, full, 7), run(generator, small, 7))
    assert len(small.caches[0].held) <= 4


def test_a_smaller_window_sees_less_and_keeps_less() -> None:
    generator, (full,) = worlds(DISTILLED, 1, "full")
    _, (small,) = worlds(DISTILLED, 1, "window=2")
    assert not same(run(generator, full, 6), run(generator, small, 6))
    assert len(small.caches[0].held) <= 2


def test_a_model_that_looks_back_without_limit_is_bounded_by_the_window() -> None:
    plan = replace(DISTILLED, reaches=())
    generator, (full,) = worlds(plan, 1, "full")
    _, (small,) = worlds(plan, 1, "window=6")
    before, after = run(generator, full, 7), run(generator, small, 7)
    assert same(before[:2], after[:2]) and not same(before[6:], after[6:])
    assert len(small.caches[0].held) <= 6


@pytest.mark.parametrize("kv", ["sink=2", "topk=1", "range=0:2", "frames=1", "positions=window", "window=0"])
def test_a_policy_that_staggered_blocks_cannot_follow_is_refused_before_anything_is_made(kv: str) -> None:
    with pytest.raises(PolicyError, match="staggered blocks: expected full or window=N"):
        recipe.kv_policy(small_preset(), kv)


@pytest.mark.parametrize("steps", [6, 0])
def test_steps_that_do_not_divide_into_stages_are_refused(steps: int) -> None:
    with pytest.raises(recipe.RecipeError, match="steps: expected"):
        recipe.sampler(small_preset(), steps)


def test_a_world_of_so_many_blocks_ends_with_the_last_and_starts_none_after_it() -> None:
    generator, (endless, finite) = worlds(DISTILLED)
    assert isinstance(finite.sampler, StaggeredSampler)
    finite.sampler = replace(finite.sampler, blocks=9)
    model = cast(MagiModel, generator.model)
    model.flags = replace(model.flags, duration=False)  # what is left of it is no text of this world's
    for a, b in zip(run(generator, endless, 9), run(generator, finite, 9), strict=True):
        assert float((a - b).abs().max() / b.std()) < 1e-5
    assert finite.next_open_block == 9
    with pytest.raises(WorldOver, match="expected a block before 9, where this world ends; got 9"):
        generator.next_block(finite)
    assert finite.sampler.counts(finite)[0] < cast(StaggeredSampler, endless.sampler).counts(endless)[0]


@PLANS
@pytest.mark.parametrize("given_frames", [1, 2, 3, 5, 12])
def test_a_given_beginning_is_shown_and_gone_on_from(plan: Plan, given_frames: int) -> None:
    generator, (world,) = worlds(plan, 1)
    start = torch.randn(given_frames, 4, 4, 6, generator=torch.Generator().manual_seed(2))
    shown = generator.prefill(world, start)
    assert world.block == given_frames // 2
    if given_frames == 1:
        assert not shown
    else:
        assert torch.equal(torch.cat([b.latents for b in shown]), start)
    first = generator.next_block(world)
    left_over = given_frames % 2 if given_frames > 1 else 0
    assert (first.start, len(first.latents)) == (given_frames - given_frames % 2 + left_over, 2 - left_over)
    assert len(generator.next_block(world).latents) == 2
    assert set(world.caches[0].held) >= set(range(max(0, given_frames // 2 * 2 - 6), given_frames // 2 * 2))


def test_many_given_blocks_fill_a_small_window_as_well_as_a_large_cache() -> None:
    generator, (small, large) = worlds(DISTILLED)
    preset: Preset = small_preset(DISTILLED)
    _, large = small_world(preset, cast(MagiModel, generator.model), kv="full")
    start = torch.randn(24, 4, 4, 6, generator=torch.Generator().manual_seed(2))
    for world in (small, large):
        generator.prefill(world, start)
    for a, b in zip(run(generator, small, 3), run(generator, large, 3), strict=True):
        assert float((a - b).abs().max() / b.std()) < 1e-5


def test_worlds_side_by_side_do_not_touch_each_other() -> None:
    generator, (a, b, alone) = worlds(DISTILLED, 3)
    b.steer(PromptChange(0.0, "another"))
    for _ in range(3):
        together = generator.next_blocks([a, b])
        assert torch.equal(together[0].latents, generator.next_block(alone).latents)
        assert not torch.equal(together[0].latents, together[1].latents)


def test_a_distilled_world_of_twelve_steps_runs_on_its_own_grid() -> None:
    generator, (long, short) = worlds(Plan(12, Distilled()))
    short.sampler = StaggeredSampler(Plan(12, Distilled(), pattern="16,16,8"))
    assert not same(run(generator, long, 2), run(generator, short, 2))
