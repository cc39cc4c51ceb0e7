"""Worlds share the machine by due time, none leads further than allowed, and admission keeps what was promised."""

from __future__ import annotations

import heapq
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.scheduler import Scheduler, Turn


def turn(world: str, due_s: float, *, period_s: float = 1.0, lead_s: float = 1.0) -> Turn:
    return Turn(world, "kind", period_s, lead_s, due_s)


def schedule(*turns: Turn) -> Scheduler:
    scheduler = Scheduler(max_worlds=64, max_load=1.0)
    for one in turns:
        scheduler.add(one)
    return scheduler


def test_the_block_due_first_goes_first() -> None:
    scheduler = schedule(turn("late", 5.0), turn("soon", 4.5), turn("later", 6.0))
    assert scheduler.choose(now_s=10.0).world == "soon"


def test_nothing_begins_before_its_lead_allows() -> None:
    scheduler = schedule(turn("a", 5.0, lead_s=1.0), turn("b", 5.5, lead_s=2.0))
    choice = scheduler.choose(now_s=3.0)
    assert (choice.world, choice.wait_s) == (None, 0.5)
    assert scheduler.choose(now_s=3.5).world == "b", "a is due earlier but may not begin yet"


def test_a_reserve_lets_a_block_begin_earlier() -> None:
    scheduler = schedule(turn("a", 5.0, lead_s=1.0))
    scheduler.turns["a"].reserve_s = 0.25
    assert scheduler.choose(now_s=3.5).wait_s == 0.25
    choice = scheduler.choose(now_s=3.75)
    assert (choice.world, choice.early_s) == ("a", 0.25)
    assert scheduler.choose(now_s=4.5).early_s == 0.0


def test_where_blocks_are_quick_the_lead_is_what_they_take_and_some_to_spare() -> None:
    one = turn("a", 10.0, lead_s=1.0)
    one.adaptive = True
    scheduler = schedule(one)
    assert scheduler.lead_s(one) == 1.0, "nothing is known yet"
    for cost in (0.1, 0.3, 0.1):
        scheduler.note("kind", {"denoise": cost, "decode": 0.1})
    assert scheduler.lead_s(one) == pytest.approx(1.25 * 0.4 + 0.05)
    one.reserve_s = 0.1
    assert scheduler.may_begin_s(one) == pytest.approx(10.0 - 0.65)
    one.reserve_s = 3.0
    assert scheduler.may_begin_s(one) == 9.0, "a reserve fits into the lead, so that a prompt takes two periods at most"
    one.reserve_s = 0.0
    assert scheduler.choose(now_s=9.4).world is None and scheduler.choose(now_s=9.46).world == "a"
    scheduler.add(turn("b", 99.0))
    assert scheduler.lead_s(one) == pytest.approx(1.25 * 0.4 + 0.05 + 0.1), "b may be due just before"
    scheduler.note("kind", {"denoise": 2.0})
    assert scheduler.lead_s(one) == 1.0, "never more than was asked for"


def test_a_paused_world_gets_no_turn_and_keeps_nobody_waiting() -> None:
    scheduler = schedule(turn("a", 1.0), turn("b", 2.0))
    scheduler.turns["a"].paused = True
    assert scheduler.choose(now_s=5.0).world == "b"
    scheduler.turns["b"].paused = True
    assert scheduler.choose(now_s=5.0).wait_s == inf


def simulate(worlds: list[tuple[float, float]], until_s: float) -> tuple[dict[str, int], float, float]:
    """Run worlds of (period, cost) on one denoiser: blocks made by each, the longest lead, the worst lateness."""
    scheduler = schedule(*(turn(str(i), 0.0, period_s=p, lead_s=p) for i, (p, _) in enumerate(worlds)))
    now_s, made, lead_s, late_s = 0.0, dict.fromkeys(scheduler.turns, 0), 0.0, 0.0
    wakes: list[float] = []
    while now_s < until_s:
        choice = scheduler.choose(now_s)
        if choice.world is None:
            now_s += choice.wait_s
            continue
        one = scheduler.turns[choice.world]
        lead_s = max(lead_s, one.due_s - now_s)
        now_s += worlds[int(choice.world)][1]
        if made[choice.world]:
            late_s = max(late_s, now_s - one.due_s)
        one.due_s = max(now_s, one.due_s) + one.period_s  # a late block stretches its world's clock
        made[choice.world] += 1
        heapq.heappush(wakes, now_s)
    return made, lead_s, late_s


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.floats(0.2, 2.0), st.floats(0.05, 1.0)), min_size=2, max_size=6))
def test_no_world_starves_and_no_lead_is_exceeded_under_any_load(worlds: list[tuple[float, float]]) -> None:
    round_s = sum(cost for _, cost in worlds)
    made, lead_s, _ = simulate(worlds, until_s=60.0)
    assert lead_s <= max(period for period, _ in worlds) + 1e-6
    for i, (period_s, _) in enumerate(worlds):
        assert made[str(i)] >= 60.0 / (2 * period_s + 2 * round_s) - 1


def test_equal_worlds_get_equal_shares_when_there_is_too_little() -> None:
    made, _, _ = simulate([(0.5, 0.4)] * 3, until_s=120.0)
    assert max(made.values()) - min(made.values()) <= 1


def test_worlds_that_fit_are_never_late() -> None:
    _, _, late_s = simulate([(0.75, 0.3), (0.75, 0.3)], until_s=60.0)
    assert late_s <= 0.0


def test_admission_adds_up_measured_costs_by_stage() -> None:
    scheduler = Scheduler(max_worlds=8, max_load=0.9)
    assert scheduler.admit("kind", 1.0).admitted, "nothing is known yet, and nobody can be hurt"
    scheduler.add(turn("a", 0.0))
    for _ in range(5):
        scheduler.note("kind", {"denoise": 0.4, "decode": 0.1})
    assert scheduler.admit("kind", 1.0).admitted
    scheduler.add(turn("b", 0.0))
    refused = scheduler.admit("kind", 1.0)
    assert not refused.admitted and refused.retry_after_s > 0
    assert "120%" in refused.reason and "90%" in refused.reason and "denoise" in refused.reason
    scheduler.remove("a")
    assert scheduler.admit("kind", 1.0).admitted


def test_the_first_world_is_admitted_even_if_it_is_too_slow_for_real_time() -> None:
    scheduler = Scheduler(max_worlds=8, max_load=0.9)
    scheduler.note("slow", {"denoise": 5.0})
    assert scheduler.admit("slow", 1.0).admitted


def test_one_outlier_does_not_close_the_door() -> None:
    scheduler = schedule(turn("a", 0.0))
    for cost in (0.3, 9.0, 0.3, 0.3):
        scheduler.note("kind", {"denoise": cost})
    assert scheduler.admit("kind", 1.0).admitted


def test_a_kind_not_yet_measured_costs_what_its_family_does() -> None:
    scheduler = schedule(turn("a", 0.0))
    scheduler.note("model 4 steps", {"denoise": 1.5})
    assert not scheduler.admit("model 2 steps", 1.0).admitted
    assert scheduler.admit("other 2 steps", 1.0).admitted


def test_places_are_limited() -> None:
    scheduler = Scheduler(max_worlds=1, max_load=1.0)
    scheduler.add(turn("a", 0.0))
    assert "1 places" in scheduler.admit("kind", 1.0).reason
    with pytest.raises(ValueError, match="'a' again"):
        scheduler.add(turn("a", 0.0))
