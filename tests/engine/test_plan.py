"""A plan is what will be allocated, to the byte."""

from __future__ import annotations

import argparse
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine import recipe
from engine.commands import plan as command
from engine.generator import Generator
from engine.kvcache.policy import PolicyError
from engine.kvcache.pool import PageFormat, PagePool
from engine.models import KVGeometry
from engine.models.presets import PRESETS, Preset
from engine.plan import Plan, PlanError
from tests.toy_model import TOY, ToyModel, toy_world


@given(st.sampled_from(["native", "int8", "int4", "fp8"]), st.sampled_from([2, 4]))
def test_a_page_is_priced_as_it_is_allocated(store: str, element_bytes: int) -> None:
    plan = Plan.of(TOY, f"store={store}", element_bytes=element_bytes)
    s = TOY.sizes
    geometry = KVGeometry(s.layers, s.kv_heads, s.head_dim, s.tokens_per_frame)
    dtype = {2: torch.bfloat16, 4: torch.float32}[element_bytes]
    pool = PagePool(PageFormat(geometry, dtype, plan.rule.store), 1)
    allocated = sum(p.numel() * p.element_size() for p in pool.storage.planes.values())
    assert plan.page_bytes == pool.format.page_bytes == allocated


@pytest.mark.parametrize("store", ["native", "int8", "int4", "fp8"])
@pytest.mark.parametrize("preset", PRESETS.values(), ids=lambda preset: preset.name)
def test_memory_is_counted_as_the_cache_will_take_it(preset: Preset, store: str) -> None:
    plan = Plan.of(preset, f"store={store}")
    s, held = preset.sizes, plan.rule.most_held(preset.frames_per_block)
    form = PageFormat(KVGeometry(s.layers, s.kv_heads, s.head_dim, s.tokens_per_frame), torch.bfloat16, plan.rule.store)
    assert held is not None, "a preset's worlds have a bounded cache"
    caches = recipe.sampler(preset).caches
    expected = form.page_bytes * (held + preset.recache_room(held)) * caches  # what the loader admits a world with
    assert plan.needs().kv == plan.world_bytes(3600) == expected and plan.needs().kv_per_second == 0
    assert Plan.of(preset).needs().device >= plan.needs().device > 0


@pytest.mark.parametrize("kv", ["window=6 sink=1", "full"])
def test_a_world_holds_the_pages_it_was_planned_to(kv: str) -> None:
    model = ToyModel()
    world, generator = toy_world(model, kv), Generator(model)
    plan = Plan.of(TOY, kv, element_bytes=4)
    for block in range(1, 9):
        generator.next_block(world)
        assert len(world.caches[0].held) == plan.held_frames(block * plan.block_s)


def test_a_window_stops_growing_and_a_full_cache_does_not() -> None:
    windowed, full = Plan.of(TOY, "window=6 sink=1"), Plan.of(TOY, "full")
    assert windowed.world_bytes(60) == windowed.world_bytes(6000) == (6 + TOY.recache_room(6)) * windowed.page_bytes
    grown = full.world_bytes(120) - full.world_bytes(60)
    assert grown == pytest.approx(60 * full.needs().kv_per_second) and grown > 0
    assert full.needs().kv == full.world_bytes(full.block_s)


def test_what_is_remembered_in_host_memory_stops_growing_too() -> None:
    plan = Plan.of(TOY, "window=4 topk=1 remember=10 offload=host")
    assert plan.host_bytes(60) == plan.host_bytes(6000) == 10 * plan.page_bytes
    assert plan.host_bytes(plan.block_s * 3) == 2 * plan.page_bytes


def test_a_budget_smaller_than_a_block_says_the_least_that_would_do() -> None:
    plan = Plan.of(TOY)
    with pytest.raises(PlanError, match="expected at least"):
        plan.worlds_in(plan.block_bytes - 1, 10)
    assert plan.worlds_in(5 * plan.world_bytes(10), 10) == 5


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args(words))


@pytest.mark.parametrize("model", sorted(PRESETS))
def test_every_model_can_be_planned(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--model", model, "--json", "--budget", "900g") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["model"] == model and said["worlds"] > 0 and said["curve"][-1][1] == said["world_bytes"]
    assert run("--model", model) == 0
    assert "pages at the end" in capsys.readouterr().out


def test_ranks_are_planned_in_all_teams_that_they_can_make(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--model", "magi-1-4.5b", "--ranks", "6", "--json") == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["ranks"]
    pages = {layout: {memory["cache"] for memory in ranks} for layout, ranks in found.items()}
    assert pages["ulysses=2 ring=1 cfg=3"] == pages["ulysses=2 ring=1 pipeline=3"]
    assert pages["ulysses=1 ring=1 pipeline=2 cfg=3"] == pages["ulysses=1 ring=1 pipeline=3 cfg=2"]
    assert run("--model", "magi-1-4.5b-distill", "--ranks", "6", "--json") == 0
    assert "cfg" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "self-forcing-1.3b", "--budget", "1m"], "expected at least"),
        (["--model", "nothing"], "got 'nothing'"),
        (["--model", "self-forcing-1.3b", "--kv", "window=2"], "expected at least 3"),
        (["--model", "self-forcing-1.3b", "--seconds", "-1"], "more than 0"),
    ],
)
def test_what_cannot_be_planned_is_one_clear_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*words) == 2
    assert said in " ".join(capsys.readouterr().out.split())


def test_a_policy_that_staggered_blocks_cannot_have_is_refused_as_by_the_engine() -> None:
    for kv in ("window=30 sink=6", "window=0", "topk=2 offload=host"):
        with pytest.raises(PolicyError, match="staggered blocks"):
            Plan.of(PRESETS["magi-1-4.5b"], kv)


def test_staggered_blocks_in_host_memory_are_counted() -> None:
    plan = Plan.of(PRESETS["magi-1-4.5b"], "offload=host")
    kept = plan.rule.most_kept(plan.preset.frames_per_block)
    assert kept is not None and plan.host_bytes(600) == kept * plan.page_bytes


@pytest.mark.parametrize("seconds", [0.1, 0.75, 6.0, 60.0])
@pytest.mark.parametrize("name", ["self-forcing-1.3b", "tiny-world"])
def test_a_world_that_forgets_nothing_has_frames_for_every_picture(name: str, seconds: float) -> None:
    preset = PRESETS[name]
    plan, per_frame, blocks = Plan.of(preset, "full"), preset.pictures_per_frame, 1
    first = per_frame if preset.first_pictures is None else preset.first_pictures
    while first + (blocks * preset.frames_per_block - 1) * per_frame < seconds * preset.fps:
        blocks += 1
    assert plan.held_frames(seconds) == blocks * preset.frames_per_block
