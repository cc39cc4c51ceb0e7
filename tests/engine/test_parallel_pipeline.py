"""Blocks in flight dealt out to ranks are those of one rank; keys go one way, as many bytes as the formula says."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import ConfigError, EngineConfig
from engine.kvcache.deal import Blocks, Span
from engine.models.presets import Preset
from engine.parallel.choose import Machine
from engine.parallel.deal import Dealt, cut, work
from engine.parallel.passes import steps_of
from engine.parallel.split import Layout, SplitError, layouts
from engine.parallel.wish import Wish
from engine.stages import Distilled, Plan
from tests.parallel_lab import Lab
from tests.pipeline_cases import listen
from tests.small_magi import DISTILLED, GUIDED, QUICK, small_model, small_preset, small_world
from tests.toy_preset import PRESET as TOY

Way = tuple[int, tuple[int, int, int], str | None]
TEAMS: list[Way] = [(2, (1, 1, 2), None), (3, (1, 1, 3), None), (4, (1, 1, 4), None)]
MIXED: list[Way] = [(4, (2, 1, 2), None), (4, (1, 2, 2), "pass-kv"), (4, (1, 2, 2), "pass-q")]


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    group = Lab.open("tests.pipeline_cases")
    yield group
    group.close()


def check(said: Any, *, pure: bool) -> None:
    counted, formula, kinds = said
    assert counted == formula > 0
    if pure:  # no all-to-all, no gather of tokens
        assert kinds == ["pipeline", "velocities"]


@pytest.mark.parametrize("plan", ["guided", "distilled"])
@pytest.mark.parametrize(("ranks", "layout", "mode"), TEAMS + MIXED)
def test_blocks_in_flight_are_those_of_one_rank(lab: Lab, ranks: int, layout: Any, mode: str | None, plan: str) -> None:
    check(lab.run("flight", ranks, layout=layout, mode=mode, plan=plan), pure=layout[:2] == (1, 1))


@pytest.mark.parametrize(
    "case",
    [
        {"kv": "full"},
        {"kv": "window=6", "blocks": 3},
        {"kv": "window=9 offload=host", "plan": "distilled", "blocks": 3},
        {"kv": "window=9 store=int8", "plan": "distilled", "blocks": 3, "tolerance": 1e-4},
        {"given": 1},
        {"given": 4, "plan": "distilled"},
        {"given": 10, "kv": "full"},
        {"last": 3, "plan": "distilled"},
        {"last": 2, "given": 1},
        {"plan": "two in flight", "blocks": 5},
        {"plan": "one in flight", "blocks": 4},
        {"plan": "sees all", "kv": "full"},
        {"plan": "distilled", "beside": 10.5},
    ],
    ids=str,
)
def test_windows_beginnings_and_ends_are_those_of_one_rank(lab: Lab, case: dict[str, Any]) -> None:
    """On three ranks, of which the third has no block at times."""
    check(lab.run("flight", 3, layout=(1, 1, 3), **({"blocks": case.get("last", 2)} | case)), pure=True)


@pytest.mark.parametrize("plan", ["guided", "distilled"])
@pytest.mark.parametrize(("layout", "then"), [((1, 1, 4), (4, 1, 1)), ((2, 1, 2), (1, 1, 4))])
def test_a_snapshot_goes_on_on_another_grid_and_on_one_rank(lab: Lab, layout: Any, then: Any, plan: str) -> None:
    lab.run("resumed", 4, layout=layout, then=then, plan=plan)


def test_all_ranks_do_to_a_world_what_rank_0_does(lab: Lab) -> None:
    lab.run("led", 4, layout=(1, 1, 4))


# --------------------------------------------------------------------------------------------------- who has what


def blocks_of(reaches: list[int], kept: int = 0, width: int = 3, past: int = 5) -> Blocks:
    """Blocks that see so many, themselves included, behind `past` others."""
    ends = [(past + i + 1) * width for i in range(len(reaches))]
    spans = tuple(Span(max(0, end - r * width), end) for end, r in zip(ends, reaches, strict=True))
    return Blocks(past * width, width, spans, kept)


REACHES = st.lists(st.integers(1, 7), min_size=1, max_size=7)


@settings(deadline=None)
@given(REACHES, st.integers(1, 5), st.booleans(), st.sampled_from([0.0, 2.5, 30.0]))
def test_every_block_is_computed_once_and_keys_go_one_way(
    reaches: list[int], teams: int, kept: bool, beside: float
) -> None:
    blocks = blocks_of(reaches, int(kept))
    dealt = Dealt.over(teams, blocks, beside)
    assert sorted(i for part in dealt.owned for i in part) == list(range(len(reaches)))
    for team in range(teams):
        here = {*dealt.computed(team), *dealt.needed(team)}
        assert all(set(range(blocks.first_seen(i), i + 1)) <= here for i in dealt.computed(team))
        assert not kept or 0 in here
        came = sorted(i for other in range(teams) for i in dealt.sent(other, team))
        assert came == dealt.needed(team)
        assert all(not dealt.sent(team, to) for to in range(team + 1))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=7), st.integers(1, 5))
def test_the_heaviest_part_of_a_cut_is_as_light_as_can_be(loads: list[int], parts: int) -> None:
    spans = cut(tuple(loads), parts)
    assert [i for span in spans for i in span] == list(range(len(loads)))
    ways = itertools.combinations_with_replacement(range(len(loads) + 1), parts - 1)
    best = min(max(sum(loads[a:b]) for a, b in itertools.pairwise((0, *way, len(loads)))) for way in ways)
    assert max(sum(loads[i] for i in span) for span in spans) == best


def test_as_many_blocks_as_ranks_that_see_all_older_ones_send_one_for_each_pair() -> None:
    assert Dealt.over(4, blocks_of([9, 9, 9, 9]), 100.0).messages == 6


def test_what_the_cache_keeps_goes_to_every_team_that_has_blocks() -> None:
    dealt = Dealt.over(3, blocks_of([1, 1, 1], kept=1), 0.0)
    assert [dealt.needed(team) for team in range(3)] == [[], [0], [0]]


def test_a_team_without_a_block_computes_the_oldest_and_hears_nothing() -> None:
    dealt = Dealt.over(4, blocks_of([2, 3], kept=1), 50.0)
    assert [dealt.computed(team) for team in range(4)] == [(0,), (1,), (0,), (0,)]
    assert dealt.messages == 1


def test_a_block_that_nobody_sees_is_computed_where_there_is_room() -> None:
    """The published distilled ranges: the oldest goes along a second time, alone, and fits beside it."""
    blocks = blocks_of([2, 3, 4, 5, 1], width=6)
    dealt = Dealt.over(4, blocks, 10.5)
    assert dealt.owned == ((0, 4), (1,), (2,), (3,))
    loads = work(blocks, 10.5)
    assert max(sum(loads[i] for i in part) for part in dealt.owned) == max(loads)


@pytest.mark.parametrize("plan", [DISTILLED, GUIDED, QUICK, Plan(8, Distilled(), clean_reach=-1)], ids=str)
def test_the_passes_that_are_counted_with_are_those_that_are_made(plan: Plan) -> None:
    preset = small_preset(plan)
    generator, world = small_world(preset, small_model(preset))
    for _ in range(4):
        generator.next_block(world)
    made = listen(world.caches[0])
    generator.next_block(world)
    steps = steps_of(plan, preset.frames_per_block, 10)
    assert [seen(each) for each in made] == [seen(each) for step in steps for each in step.passes()[0]]


def seen(blocks: Blocks) -> tuple[int, list[int], list[int]]:
    numbers = range(len(blocks.spans))
    return blocks.kept, [blocks.frames_seen(i) for i in numbers], [blocks.first_seen(i) for i in numbers]


# ------------------------------------------------------------------------------------------------ what is asked for

SMALL = small_preset(DISTILLED)
MACHINE = Machine(1e-6, 1e12, 1e-6, 1e12, 1e12)


@pytest.mark.parametrize(
    ("wish", "layout"),
    [
        (Wish(4, pipeline=4), Layout(1, 1, 4)),
        (Wish(4, 2, pipeline=2), Layout(2, 1, 2)),
        (Wish(4, ring=2, pipeline=2), Layout(1, 2, 2)),
        (Wish(4, ulysses=4), Layout(4, 1, 1)),
        (Wish(4, ulysses=2, ring=2), Layout(2, 2, 1)),
    ],
)
def test_what_is_asked_for_is_taken(wish: Wish, layout: Layout) -> None:
    assert wish.layout(MACHINE, SMALL, small_model(SMALL)) == layout


def test_where_nothing_is_asked_for_the_cost_of_a_pass_decides() -> None:
    model = small_model(SMALL)
    slow, fast = Machine(0.0, 1e6, 0.0, 1e6, 1e15), Machine(0.0, 1e18, 0.0, 1e18, 1e9)
    assert Wish(2).layout(slow, SMALL, model) == Layout(1, 1, 2)
    assert Wish(2).layout(fast, SMALL, model).pipeline == 1
    assert Wish(2, pipeline=1).layout(slow, SMALL, model).pipeline == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"ranks": 4, "pipeline": 3}, "pipeline: expected numbers that divide the 4 ranks, got 3"),
        ({"ranks": 4, "ulysses": 4, "pipeline": 2}, "ulysses, pipeline: expected numbers that divide the 4 ranks"),
        (
            {"ranks": 8, "ulysses": 2, "ring": 2, "pipeline": 1},
            "ulysses x ring x pipeline: expected 8, the ranks; got 2 x 2 x 1",
        ),
        ({"ranks": 0}, "ranks: expected at least 1, got 0"),
    ],
)
def test_teams_that_do_not_add_up_are_refused(arguments: dict[str, int], said: str) -> None:
    with pytest.raises(SplitError, match=re.escape(said)):
        Wish(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("preset", "ranks", "said"),
    [
        (TOY, 2, "pipeline: expected a model with several blocks in flight (MAGI-1), got toy, which makes one at a"),
        (SMALL, 8, "pipeline: expected at most 6, the blocks of a pass; got 8"),
    ],
)
def test_a_pipeline_without_blocks_for_it_is_refused_by_name(preset: Preset, ranks: int, said: str) -> None:
    with pytest.raises(SplitError, match=re.escape(said)):
        Wish(ranks, pipeline=ranks).layout(MACHINE, preset, small_model(SMALL))


def test_settings_say_which_grid_does_not_add_up() -> None:
    with pytest.raises(ConfigError, match="pipeline: expected a number that divides the 4 ranks, got 3"):
        EngineConfig.read(["--fd", "3", "--ranks", "4", "--pipeline", "3"], {})
    with pytest.raises(ConfigError, match="ulysses x pipeline: expected a number that divides the 4 ranks, got 8"):
        EngineConfig.read(["--fd", "3", "--ranks", "4", "--ulysses", "4", "--pipeline", "2"], {})


@pytest.mark.parametrize("ranks", [4, 6])
def test_grids_of_several_teams_are_all_there_are(ranks: int) -> None:
    found = layouts(ranks, pipeline=True)
    assert len(set(found)) == len(found) and all(each.ranks == ranks for each in found)
    assert {each.pipeline for each in found} == {n for n in range(1, ranks + 1) if ranks % n == 0}
    assert layouts(ranks) == [each for each in found if each.pipeline == 1]
