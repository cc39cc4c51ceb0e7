"""Branches of guidance that share a cache, on teams of ranks: the worlds of one rank, for what the formula says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.models.presets import Preset
from engine.parallel.choose import Machine
from engine.parallel.passes import steps_of
from engine.parallel.split import Layout, SplitError
from engine.parallel.wish import Wish
from engine.parts import ALONE, HISTORY, TEXT, Part, deal, parts, passes
from engine.stages import Guided, Plan, Weights
from tests.parallel_lab import Lab
from tests.small_magi import DISTILLED, GUIDED, small_model, small_preset

Way = tuple[int, tuple[int, int, int, int], str | None]
TEAMS: list[Way] = [(2, (1, 1, 1, 2), None), (3, (1, 1, 1, 3), None)]
MIXED: list[Way] = [
    (4, (2, 1, 1, 2), None),
    (4, (1, 2, 1, 2), "pass-kv"),
    (4, (1, 2, 1, 2), "pass-q"),
    (4, (1, 1, 2, 2), None),
]


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    group = Lab.open("tests.pipeline_cases")
    yield group
    group.close()


def check(said: Any) -> None:
    counted, formula, _ = said
    assert counted == formula > 0


@pytest.mark.parametrize(("ranks", "layout", "mode"), TEAMS + MIXED)
def test_branches_on_teams_are_those_of_one_rank(lab: Lab, ranks: int, layout: Any, mode: str | None) -> None:
    """Over several blocks, with another prompt from the second on."""
    said: Any = lab.run("flight", ranks, layout=layout, mode=mode, blocks=3)
    check(said)
    if layout[:3] == (1, 1, 1):
        assert said[2] == ["cfg"]


@pytest.mark.parametrize(("ranks", "layout"), [(2, (1, 1, 1, 2)), (3, (1, 1, 1, 3))], ids=["cfg 2", "cfg 3"])
@pytest.mark.parametrize(
    "case",
    [
        {"kv": "full"},
        {"kv": "window=6", "blocks": 3},
        {"kv": "window=9 offload=host", "blocks": 3},
        {"kv": "window=9 store=int8", "blocks": 3, "tolerance": 1e-4},
        {"given": 1},
        {"given": 10, "kv": "full"},
        {"last": 3},
        {"last": 2, "given": 1},
        {"plan": "one in flight", "blocks": 4},
        {"plan": "sees all", "kv": "full"},
    ],
    ids=str,
)
def test_windows_beginnings_and_ends_are_those_of_one_rank(
    lab: Lab, ranks: int, layout: Any, case: dict[str, Any]
) -> None:
    """With teams that have no part of a step at times."""
    check(lab.run("flight", ranks, layout=layout, **({"blocks": case.get("last", 2)} | case)))


@pytest.mark.parametrize(("layout", "then"), [((2, 1, 1, 2), (1, 4)), ((1, 1, 1, 3), (3, 1)), ((1, 4), (1, 1, 2, 2))])
def test_a_snapshot_goes_on_on_another_grid_and_on_one_rank(lab: Lab, layout: Any, then: Any) -> None:
    lab.run("resumed", Layout(*layout).ranks, layout=layout, then=then, plan="guided")


@pytest.mark.parametrize("layout", [(2, 1, 1, 2), (1, 1, 2, 2)])
def test_all_ranks_of_all_teams_do_to_a_world_what_rank_0_does(lab: Lab, layout: Any) -> None:
    lab.run("led", 4, layout=layout)


def test_a_model_without_guidance_has_no_branches_to_share(lab: Lab) -> None:
    with pytest.raises(AssertionError, match="cfg: expected 1, for no guidance; got 2"):
        lab.run("flight", 2, layout=(1, 1, 1, 2), plan="distilled")


# --------------------------------------------------------------------------------------------------- who runs what

FULL, LATE = Weights(-0.5, -6.0, 7.5), Weights(0.0, 1.0, 0.0)  # of a block under way, and of one nearly clean
IN_FLIGHT = [LATE, FULL, FULL, FULL]
WEIGHTS = st.lists(st.sampled_from([FULL, LATE]), min_size=1, max_size=6)


@given(WEIGHTS, st.integers(1, 4), st.booleans(), st.booleans())
def test_every_part_is_found_by_one_team_and_every_team_writes_the_cache(
    weights: list[Weights], teams: int, clean: bool, skip: bool
) -> None:
    wanted = parts(weights, skip=skip)
    made = passes(wanted, teams, clean=clean)
    dealt = deal([len(part.blocks) for part in wanted], teams)
    assert sorted(i for own in dealt for i in own) == list(range(len(wanted)))
    for own, run in zip(dealt, made, strict=True):
        asked = [(wanted[i].branch, block) for i in own for block in wanted[i].blocks]
        found = [(part.branch, block) for part in run for block in part.blocks]
        assert found[: len(asked)] == asked
        assert not clean or sum(part.branch == HISTORY for part in run) == 1
    assert len({len(run) for run in made}) == 1, "rank 0 speaks between passes"


def test_three_branches_are_alike_on_two_teams_and_one_for_each_on_three() -> None:
    whole, six = Part(TEXT, (0, 1, 2, 3)), Part(HISTORY, (0, 1, 2, 3))
    assert passes(parts(IN_FLIGHT, skip=True), 2, clean=False) == [
        [whole, Part(ALONE, (1, 3))],
        [six, Part(ALONE, (2,))],
    ]
    assert passes(parts(IN_FLIGHT, skip=True), 3, clean=False) == [[whole], [six], [Part(ALONE, (1, 2, 3))]]


def test_a_team_without_history_runs_the_finished_block_by_itself() -> None:
    text, history, alone = passes(parts(IN_FLIGHT, skip=True), 3, clean=True)
    assert Part(HISTORY, ()) in text and Part(HISTORY, ()) in alone
    assert history == [Part(HISTORY, (0, 1, 2, 3)), Part(ALONE, (0,))]  # the second as many passes as the others make


def test_a_step_of_the_published_guidance_finds_eleven_velocities() -> None:
    for step in steps_of(Plan(64, Guided()), 6, 30):
        assert sum(len(part.blocks) for part in parts(step.weights, skip=True)) == 11


# ------------------------------------------------------------------------------------------------- what is asked for

SMALL = small_preset(GUIDED)
MACHINE = Machine(1e-6, 1e12, 1e-6, 1e12, 1e12)


@pytest.mark.parametrize(
    ("wish", "layout"),
    [
        (Wish(2, cfg=2), Layout(1, 1, 1, 2)),
        (Wish(3, cfg=3), Layout(1, 1, 1, 3)),
        (Wish(4, 2, cfg=2), Layout(2, 1, 1, 2)),
        (Wish(4, ring=2, cfg=2), Layout(1, 2, 1, 2)),
        (Wish(4, pipeline=2, cfg=2), Layout(1, 1, 2, 2)),
        (Wish(6, 2, cfg=3), Layout(2, 1, 1, 3)),
        (Wish(4, ulysses=2, ring=2), Layout(2, 2)),
        (Wish(2, 2), Layout(2, 1)),
    ],
)
def test_what_is_asked_for_is_taken(wish: Wish, layout: Layout) -> None:
    assert wish.layout(MACHINE, SMALL, small_model(SMALL)) == layout


def test_where_nothing_is_asked_for_the_cost_of_a_step_decides() -> None:
    """Every team keeps whole pages, so on fast links every block is shared."""
    model = small_model(SMALL)
    slow, fast = Machine(1e-3, 1e6, 1e-3, 1e6, 1e15), Machine(0.0, 1e18, 0.0, 1e18, 1e9)
    assert [Wish(n).layout(slow, SMALL, model).cfg for n in (2, 3)] == [2, 3]
    assert [Wish(n).layout(fast, SMALL, model).teams for n in (2, 3)] == [1, 1]
    assert Wish(2, cfg=1).layout(slow, SMALL, model).cfg == 1


@pytest.mark.parametrize(
    ("preset", "ranks", "said"),
    [
        (SMALL, 4, "cfg: expected 1 or 2 or 3, for the 3 branches of guidance; got 4"),
        (small_preset(DISTILLED), 2, "cfg: expected 1, for no guidance; got 2"),
    ],
)
def test_teams_for_branches_that_are_not_there_are_refused_by_name(preset: Preset, ranks: int, said: str) -> None:
    with pytest.raises(SplitError, match=re.escape(said)):
        Wish(ranks, cfg=ranks).layout(MACHINE, preset, small_model(preset))
