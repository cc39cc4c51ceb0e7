"""The cost of a pass of blocks in flight against a pass played through layer by layer; and what is chosen by it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from engine.kvcache.deal import Blocks
from engine.models import KVGeometry, presets
from engine.parallel.choose import MARGIN, Machine, grids, message
from engine.parallel.deal import Dealt, work
from engine.parallel.passes import Layers, choose_for_steps, predict_pass, predict_step, steps_of
from engine.parallel.split import Layout
from engine.stages import Distilled, Guided, Plan

LINKS = {"nvlink": (5e-6, 2e11), "pcie": (2e-5, 1.5e10), "ethernet": (8e-5, 1.1e9), "slow": (2e-4, 1e8)}
PLANS = [Plan(8, Distilled()), Plan(8, Guided())]
MAGI = presets.find("magi-1-4.5b-distill").sizes
LARGE = Layers.of(KVGeometry(34, 8, 128, MAGI.tokens_per_frame), 24, MAGI.parameters, 2)
SMALL = Layers(KVGeometry(30, 24, 128, 390), 24, 4.0, 2)


def machine(link: str, rate: float = 3e14) -> Machine:
    latency, bandwidth = LINKS[link]
    return Machine(latency, bandwidth, 2 * latency, bandwidth, rate, 1e-5, 1e12)


def play(teams: int, blocks: Blocks, layers: Layers, machine: Machine) -> float:
    """Seconds per layer of a pass on teams of one rank: links first come first served, one layer ahead at most."""
    dealt, kv = Dealt.over(teams, blocks, layers.beside), layers.kv
    size = 2 * blocks.width * kv.tokens * kv.heads * kv.head_dim * layers.item_bytes
    flops = 4 * blocks.width * kv.tokens**2 * layers.heads * kv.head_dim
    loads = [load * flops / machine.attention_rate + machine.call_s for load in work(blocks, layers.beside)]
    done, sent = [0.0] * teams, [0.0] * teams
    for _ in range(kv.layers):
        began = [max(one, other) for one, other in zip(done, sent, strict=True)]
        arrived, sent = list(began), list(began)
        for team, to in itertools.combinations(range(teams), 2):
            if count := len(dealt.sent(team, to)):
                free = max(sent[team], arrived[to] if arrived[to] > began[to] else 0.0)
                sent[team] = arrived[to] = free + message(machine, count * size)
        done = [max(began[t], arrived[t]) + sum(loads[i] for i in dealt.computed(t)) for t in range(teams)]
    return max(done) / kv.layers


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("plan", PLANS, ids=["distilled", "guided"])
def test_a_pass_costs_what_it_does_when_played_through(plan: Plan, link: str) -> None:
    for teams, layers, rate in itertools.product((2, 3, 4), (LARGE, SMALL), (3e14, 3e10)):
        for blocks in itertools.chain(*(step.passes()[0] for step in steps_of(plan, 6, 30))):
            given = machine(link, rate)
            predicted = predict_pass(Layout(1, 1, teams), blocks, layers, given)
            assert predicted == pytest.approx(play(teams, blocks, layers, given), rel=0.1)


@pytest.mark.parametrize("ranks", [2, 4])
def test_blocks_are_dealt_out_where_links_are_slow_and_shared_where_they_are_fast(ranks: int) -> None:
    chosen = {}
    for link in LINKS:
        possible = grids(ranks, LARGE.kv, LARGE.heads, pipeline=True)
        steps = steps_of(PLANS[0], 6, 30)
        chosen[link], reason = choose_for_steps(possible, steps, LARGE, machine(link))
        assert str(chosen[link]) in reason
    assert chosen["nvlink"].pipeline == 1 and chosen["ethernet"].pipeline > 1


def test_dealing_out_must_save_the_margin() -> None:
    """Every team of a pipeline keeps whole pages."""
    shared, dealt, steps = Layout(2, 1), Layout(1, 1, 2), steps_of(PLANS[1], 6, 30)

    def cost(layout: Layout, given: Machine) -> float:
        return sum(predict_step(layout, step, LARGE, given) for step in steps)

    seen = set()
    for bandwidth in (10 ** (9 + i / 20) for i in range(60)):
        given = replace(machine("pcie"), bandwidth=bandwidth, collective_bandwidth=bandwidth)
        best, _ = choose_for_steps([shared, dealt], steps, LARGE, given)
        assert (best == dealt) == (cost(dealt, given) < (1 - MARGIN) * cost(shared, given))
        seen.add(best)
    assert seen == {shared, dealt}


def test_one_team_costs_what_sharing_every_block_costs() -> None:
    """Twice the ranks, half the work, where links cost nothing."""
    free = Machine(0.0, 1e18, 0.0, 1e18, 3e14)
    blocks = steps_of(PLANS[1], 6, 30)[0].blocks
    whole, half = (predict_pass(Layout(n), blocks, SMALL, free) for n in (1, 2))
    assert half == pytest.approx(whole / 2, rel=1e-6)


def test_a_model_that_looks_back_without_limit_sees_what_its_window_keeps() -> None:
    far = Plan(4, Guided(), reaches=())
    (step,) = steps_of(far, 3, 15)
    assert [step.blocks.frames_seen(i) for i in range(5)] == [15, 18, 21, 24, 27]  # the clean one first
    (grown,) = steps_of(far, 3, None)
    assert grown.blocks.spans[0].first == 0 and grown.blocks.frames_seen(0) > 15
