"""A world is a function of its spec and its signals: same seed, resumed, forked, retried, batched, the same blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from engine.generator import Generator, Recache
from engine.kvcache.policy import parse
from engine.kvcache.pool import PageFormat, PagePool
from engine.models import Prompt
from engine.protocol import ActionState, PromptChange
from engine.samplers import FewStep, FlowODE, Linear, NotFinite, Sampler, ShiftedFlow
from engine.signals import MOST_AT_A_BLOCK, SignalError
from engine.world import World
from tests.toy_model import HOLD_RIGHT, ToyModel, toy_world

KV = [
    *("full", "window=6 sink=1", "window=6 positions=window", "window=4 topk=1", "window=6 store=int8"),
    "window=4 topk=1 remember=4 offload=host",
]
SAMPLERS: list[Sampler] = [
    FewStep(Linear(), (1.0, 0.5), context_time=0.06, noise_context=True),
    FlowODE(Linear(), (1.0, 0.6, 0.3), guidance=3.0),
]
model = ToyModel()
generator = Generator(model)


def run(world: World, blocks: int) -> list[Tensor]:
    return [generator.next_block(world).latents for _ in range(blocks)]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("sampler", SAMPLERS, ids=["few-step", "guided flow"])
@pytest.mark.parametrize("kv", KV)
def test_the_same_seed_makes_the_same_world_and_another_seed_another(kv: str, sampler: Sampler) -> None:
    first = run(toy_world(model, kv, seed=7, sampler=sampler), 6)
    assert same(first, run(toy_world(model, kv, seed=7, sampler=sampler), 6))
    assert not any(
        torch.equal(a, b) for a, b in zip(first, run(toy_world(model, kv, seed=8, sampler=sampler), 6), strict=True)
    )


@pytest.mark.parametrize("sampler", SAMPLERS, ids=["few-step", "guided flow"])
@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize("at", [0, 1, 5])
def test_a_world_resumed_at_any_block_goes_on_bit_for_bit(kv: str, sampler: Sampler, at: int) -> None:
    world = toy_world(model, kv, sampler=sampler)
    run(world, at)
    state = world.snapshot()
    on = run(world, 4)
    again = toy_world(model, kv, sampler=sampler)
    again.restore(state)
    assert same(on, run(again, 4))


@pytest.mark.parametrize("kv", KV)
def test_a_fork_equals_its_parent_until_it_is_steered(kv: str) -> None:
    world = toy_world(model, kv)
    run(world, 3)
    twin, other = world.fork(), world.fork()
    other.steer(PromptChange(0, "something else", "cut"))
    a, b, c = run(world, 4), run(twin, 4), run(other, 4)
    assert same(a, b)
    assert not any(torch.equal(x, y) for x, y in zip(a, c, strict=True))


@pytest.mark.parametrize("sampler", SAMPLERS, ids=["few-step", "guided flow"])
def test_worlds_in_one_batch_equal_each_alone_to_rounding(sampler: Sampler) -> None:
    pool = PagePool(PageFormat(model.geometry.kv), 256)
    prompts = (PromptChange(0.0, "b"),)
    pair = [
        toy_world(model, "window=6 sink=1", seed=1, sampler=sampler, pool=pool),
        toy_world(model, "window=6 sink=1", seed=2, prompts=prompts, sampler=sampler, pool=pool),
    ]
    pair[1].act(HOLD_RIGHT)
    batched = [generator.next_blocks(pair) for _ in range(4)]
    alone = toy_world(model, "window=6 sink=1", seed=2, prompts=prompts, sampler=sampler)
    alone.act(HOLD_RIGHT)
    for blocks, expected in zip(batched, run(alone, 4), strict=True):
        torch.testing.assert_close(blocks[1].latents, expected, rtol=0, atol=1e-5)


def test_a_prompt_change_leaves_earlier_blocks_and_changes_later_ones() -> None:
    control = run(toy_world(model), 6)
    world = toy_world(model)
    before = run(world, 3)
    assert world.steer(PromptChange(0, "b", "cut")) == 3
    after = run(world, 3)
    assert same(control[:3], before)
    assert not any(torch.equal(a, b) for a, b in zip(control[3:], after, strict=True))


def test_a_cut_leaves_no_trace_in_the_cross_attention() -> None:
    """Equal to a world whose cross-attention cache never saw the first prompt, on the same self-attention cache."""
    world = toy_world(model)
    run(world, 3)
    fresh = toy_world(model, prompts=(PromptChange(0.0, "b", "cut"),))
    fresh.restore({**world.snapshot(), "prompts": fresh.snapshot()["prompts"]})
    world.steer(PromptChange(0, "b", "cut"))
    assert same(run(world, 3), run(fresh, 3))


@pytest.mark.parametrize("rule", ["blocks", "joint", "joint-keep-sink"])
@pytest.mark.parametrize("kv", ["full", "window=6 sink=1", "window=6 sink=2 positions=window"])
def test_a_recache_makes_the_visible_past_what_the_new_prompt_would_have_left(kv: str, rule: str) -> None:
    def world_at(blocks: int) -> World:
        world = toy_world(model, kv)
        run(world, blocks)
        return world

    cut, redone = world_at(5), world_at(5)
    cut.steer(PromptChange(0, "b", "cut"))
    redone.steer(PromptChange(0, "b", "recache"))
    recaching = Generator(model, rule)  # type: ignore[arg-type]
    a, b = generator.next_block(cut).latents, recaching.next_block(redone).latents
    assert not torch.equal(a, b)
    if kv == "full" and rule == "blocks":
        never_saw_a = toy_world(model, kv, prompts=(PromptChange(0.0, "b", "cut"),))
        generator.prefill(never_saw_a, torch.cat([k.latents for k in world_at(5).kept]))
        assert torch.equal(b, generator.next_block(never_saw_a).latents)


def test_a_block_that_fails_half_way_leaves_the_world_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    world, twin = toy_world(model, "window=6 sink=1"), toy_world(model, "window=6 sink=1")
    run(world, 5), run(twin, 5)
    whole, calls = ToyModel.forward, 0

    def fails_at_the_second_step(*args: object, **kwargs: object) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("out of memory")
        return whole(*args, **kwargs)  # type: ignore[arg-type]

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="out of memory"):
        patch.setattr(ToyModel, "forward", fails_at_the_second_step)
        generator.next_block(world)
    assert same(run(world, 4), run(twin, 4))


def test_actions_move_the_world_and_are_released() -> None:
    world = toy_world(model)
    run(world, 1)
    world.act(HOLD_RIGHT)
    hold = world.actions.hold_blocks
    run(world, hold + 3)
    assert world.motion == (float(hold),)


def test_a_world_of_any_length_holds_a_bounded_past() -> None:
    world = toy_world(model, "window=6 sink=1")
    run(world, 8)
    sizes = len(world.kept), world.caches[0].pool.used_bytes, len(world.prompts.switches)
    for block in range(40):
        world.steer(PromptChange(0, f"prompt {block}", "cut"))
        run(world, 1)
    assert (len(world.kept), world.caches[0].pool.used_bytes) == sizes[:2]
    assert len(world.prompts.switches) <= 3
    world.close()
    assert world.caches[0].pool.used_bytes == 0


def test_what_a_world_remembers_out_of_sight_is_bounded_and_until_then_nothing_is_lost() -> None:
    bounded, whole = (toy_world(model, f"window=4 topk=1 offload=host{b}") for b in (" remember=8", ""))
    assert same(run(bounded, 6), run(whole, 6))
    assert not same(run(bounded, 8), run(whole, 8))
    (cache,), page = bounded.caches, PageFormat(model.geometry.kv).page_bytes
    assert cache.bytes_by_tier()["host"] == 8 * page and whole.caches[0].bytes_by_tier()["host"] > 8 * page
    assert len(bounded.kept) == 6 and cache.policy.most_kept(2) == 12


def test_prompts_do_not_pile_up_in_a_world_that_makes_no_block() -> None:
    world = toy_world(model)
    run(world, 1)
    for i in range(MOST_AT_A_BLOCK):
        world.steer(PromptChange(0, f"prompt {i}", "cut"))
    with pytest.raises(SignalError, match=f"at most {MOST_AT_A_BLOCK} for block 1"):
        world.steer(PromptChange(0, "one too many", "cut"))
    assert world.signals()[0].prompt.text == f"prompt {MOST_AT_A_BLOCK - 1}"
    run(world, 1)
    assert world.steer(PromptChange(0, "another", "cut")) == 2 and len(world.prompts.switches) == 3


def test_a_prompt_is_encoded_once_however_many_blocks_read_it() -> None:
    counting = ToyModel()
    world = toy_world(counting)
    for _ in range(5):
        Generator(counting).next_block(world)
    assert counting.encodings == 1


def test_scheduled_prompts_take_effect_at_the_first_block_not_before_their_time() -> None:
    prompts = (PromptChange(0.0, "a"), PromptChange(1.2, "b"))
    world = toy_world(model, prompts=prompts)  # half a second to a block
    seen = []
    for _ in range(5):
        signals, _ = world.signals()
        seen.append(signals.prompt.text)
        run(world, 1)
    assert seen == ["a", "a", "a", "b", "b"]


@pytest.mark.parametrize("first", [None, 1, 3, 5])
@pytest.mark.parametrize("at_s", [0.0, 0.3, 0.5, 1.0, 1.3, 1.75, 2.25, 1e9])
def test_a_time_names_the_first_block_from_it_on_whatever_the_first_block_s_size(
    first: int | None, at_s: float
) -> None:
    world = toy_world(ToyModel(first_block_frames=first))
    block = world.block_at(at_s)
    assert world.media_s(block) >= at_s - 1e-6
    assert block == 0 or world.media_s(block - 1) < at_s - 1e-6


def test_a_prompt_that_cannot_be_encoded_costs_no_finished_block(monkeypatch: pytest.MonkeyPatch) -> None:
    world, twin = toy_world(model, "window=6"), toy_world(model, "window=6")
    for each in (world, twin):
        run(each, 2)
        each.steer(PromptChange(0, "b", "cut"))
        run(each, 1)
        each.steer(PromptChange(0, "c", "cut"))
        each.prompts.change(4, PromptChange(0, "d", "cut"))

    def fails(text: str, previous: Prompt | None) -> Prompt:
        if text == "d":
            raise RuntimeError("no memory for the text encoder")
        return model.encode(text, previous)

    with monkeypatch.context() as patch:
        patch.setattr(world.prompts, "encode", fails)
        made = run(world, 1)
        with pytest.raises(RuntimeError, match="text encoder"):
            generator.next_block(world)
    assert same(made + run(world, 3), run(twin, 4))


@pytest.mark.parametrize("rule", ["blocks", "joint", "joint-keep-sink"])
def test_where_nothing_of_the_past_is_seen_there_is_nothing_to_make_again(rule: Recache) -> None:
    cut, redone = toy_world(model, "window=0"), toy_world(model, "window=0")
    run(cut, 2), run(redone, 2)
    cut.steer(PromptChange(0, "b", "cut"))
    redone.steer(PromptChange(0, "b", "recache"))
    assert same(run(cut, 2), [Generator(model, rule).next_block(redone).latents for _ in range(2)])


@pytest.mark.parametrize("sampler", SAMPLERS, ids=["few-step", "guided flow"])
def test_latents_that_are_no_numbers_never_reach_the_cache(sampler: Sampler, monkeypatch: pytest.MonkeyPatch) -> None:
    world, twin = (toy_world(model, "window=6 sink=1", sampler=sampler) for _ in range(2))
    run(world, 4), run(twin, 4)
    whole = ToyModel.forward

    def overflows(*args: Any, **kwargs: Any) -> Tensor:
        return whole(*args, **kwargs) * float("inf")

    with monkeypatch.context() as patch, pytest.raises(NotFinite, match="block 4: expected finite latents, got"):
        patch.setattr(ToyModel, "forward", overflows)
        generator.next_block(world)
    assert same(run(world, 4), run(twin, 4))


def test_a_very_wide_window_costs_no_more_than_what_is_in_it() -> None:
    world = toy_world(model, f"window={10**15}")
    run(world, 2)
    assert len(world.kept) == 2


def test_what_a_world_was_opened_with_is_in_its_snapshot() -> None:
    world, again = toy_world(model), toy_world(model)
    world.extra = {"clip": torch.ones(2)}
    again.restore(world.snapshot())
    assert torch.equal(again.signals()[0].extra["clip"], torch.ones(2))


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        ((), "at least one"),
        ((PromptChange(0.0, "a"), PromptChange(float("inf"), "b")), "expected 0 to 1e\\+09 s, got inf"),
        ((PromptChange(0.0, "a"), PromptChange(1e300, "b")), "got 1e\\+300"),
        ((PromptChange(1.0, "a"),), "the first at 0 s, got it at 1.0"),
        ((PromptChange(0.0, "a"), PromptChange(3.0, "b"), PromptChange(2.0, "c")), "rising times, got 2.0 s after 3.0"),
        ((PromptChange(0.0, " "),), "expected some text"),
        ((PromptChange(0.0, "a", "blend", 0), PromptChange(1.0, "b", "blend", 0)), "over_blocks"),
    ],
)
def test_prompts_that_cannot_be_are_refused_at_the_door(prompts: tuple[PromptChange, ...], said: str) -> None:
    with pytest.raises(SignalError, match=said):
        toy_world(model, prompts=prompts)


def test_given_latents_begin_a_world_and_must_be_whole_blocks() -> None:
    start = torch.randn(4, 4, 2, 3, generator=torch.Generator().manual_seed(1))
    world = toy_world(model)
    generator.prefill(world, start)
    assert (world.block, world.start) == (2, 4)
    assert not torch.equal(run(world, 1)[0], run(toy_world(model), 3)[2])
    with pytest.raises(ValueError, match="1 frames are left over"):
        generator.prefill(toy_world(model), start[:3])


def test_the_shifted_flow_is_the_published_table() -> None:
    warped = ShiftedFlow(5.0).warp([1000, 750, 500, 250])
    assert warped == pytest.approx([1000, 937.5, 833.3333, 625], rel=1e-6)
    assert ShiftedFlow(5.0).sigma(0) == pytest.approx(0.00498, abs=1e-5)
    assert ShiftedFlow(8.0).sigma(757) == pytest.approx(0.75676, abs=1e-5)


def test_an_unknown_action_changes_nothing() -> None:
    world = toy_world(model)
    with pytest.raises(SignalError, match="got 'jump'"):
        world.act(ActionState(keys=("jump",)))
    assert world.actions.states == []


def test_a_policy_that_cannot_hold_a_block_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        toy_world(model, str(parse("window=1")))
