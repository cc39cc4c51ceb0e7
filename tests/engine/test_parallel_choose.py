"""The cost model against brute force: strategies played through message by message, the choice among the best."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from engine.models import KVGeometry
from engine.parallel.choose import (
    LSE_BYTES,
    MARGIN,
    Call,
    Chooser,
    Machine,
    Strategy,
    choose_layout,
    of_layout,
    predict,
    sent_bytes,
    strategies,
)
from engine.parallel.picture import draw
from engine.parallel.split import Layout, Split, SplitError

LINKS = {"nvlink": (5e-6, 2e11), "pcie": (2e-5, 1.5e10), "ethernet": (8e-5, 1.1e9), "loopback": (2e-4, 5e8)}
RATES = {"cpu": 3e10, "gpu": 3e14}
KV_FRAMES = (3, 6, 12, 21, 48, 120)


def calls(tokens: int, heads: int, kv_heads: int) -> list[Call]:
    kv = KVGeometry(30, kv_heads, 128, tokens)
    return [Call(kv, heads, 3, frames, 2) for frames in KV_FRAMES]


def machines() -> list[Machine]:
    return [
        Machine(latency, bandwidth, 1.5 * latency, collective * bandwidth, rate, call_s, rate / 100, overlap)
        for (latency, bandwidth), collective, (rate, call_s), overlap in itertools.product(
            LINKS.values(), (0.5, 1.0), ((RATES["cpu"], 5e-5), (RATES["gpu"], 1e-5)), (0.3, 1.0)
        )
    ]


def machine_of(latency_s: float, bandwidth: float, rate: float) -> Machine:
    return Machine(latency_s, bandwidth, latency_s, bandwidth, rate)


# ------------------------------------------------------------------------------------------- played through


def play(strategy: Strategy, call: Call, machine: Machine) -> float:
    """Seconds until the last rank is done, each rank with its own share, links first come first served."""
    layout = strategy.layout
    splits = [Split(layout, rank, call.kv) for rank in range(layout.ranks)]
    began = [0.0] * layout.ranks
    if layout.ulysses > 1:
        began = _all_to_all(splits, call, machine, began, there=True)
    done = [0.0] * layout.ranks
    for at in range(layout.ulysses):
        ranks = list(layout.ring_group(at))
        ring = Ring([splits[r] for r in ranks], call, machine)
        ended = ring.play(strategy.mode, [began[r] for r in ranks])
        for rank, end in zip(ranks, ended, strict=True):
            done[rank] = end
    if layout.ulysses > 1:
        done = _all_to_all(splits, call, machine, done, there=False)
    return max(done)


def _all_to_all(splits: list[Split], call: Call, machine: Machine, began: list[float], *, there: bool) -> list[float]:
    layout, row = splits[0].layout, call.q_frames * call.kv.head_dim * call.item_bytes
    done = list(began)
    for group in map(layout.ulysses_group, range(layout.ring)):
        for rank in group:
            sent = received = 0
            for other in group:
                if other != rank:
                    a, b = (rank, other) if there else (other, rank)
                    sent += len(splits[a].mine) * _row_heads(splits[b], call, keys=there)
                    received += len(splits[b].mine) * _row_heads(splits[a], call, keys=there)
            taken = machine.collective_s + max(sent, received) * row / machine.collective_bandwidth
            done[rank] = max(began[r] for r in group) + taken
        together = max(done[r] for r in group)
        for rank in group:
            done[rank] = together
    return done


def _row_heads(split: Split, call: Call, *, keys: bool) -> int:
    at = split.layout.place(split.rank)[1]
    heads = len(split.q_heads(call.heads)[at])
    return heads + 2 * len(split.kv_heads[at]) if keys else heads


class Ring:
    """One ring: products run one after another on a rank, messages one after another on its way out."""

    def __init__(self, splits: list[Split], call: Call, machine: Machine) -> None:
        self.splits, self.call, self.machine, self.n = splits, call, machine, len(splits)
        at = splits[0].layout.place(splits[0].rank)[1]
        self.heads, self.keys = len(splits[0].q_heads(call.heads)[at]), len(splits[0].kv_heads[at])

    def play(self, mode: str | None, began: list[float]) -> list[float]:
        if self.n == 1:
            return [began[0] + self.product(0, 0)]
        start, link_free = list(began), list(began)
        arrivals: list[list[float]] = [[] for _ in range(self.n)]
        owed: list[tuple[float, int, int]] = []  # results on their way home: posted, from, to
        for hop in range(self.n):
            ends = []
            for r in range(self.n):
                owner = (r - hop) % self.n
                q, k = (r, owner) if mode == "pass-kv" else (owner, r)
                ends.append(start[r] + self.product(q, k))
            for posted, source, to in owed:
                link_free[source] = self.send(
                    max(posted, link_free[source]), self.result(to), start[source], ends[source]
                )
                arrivals[to].append(link_free[source])
            owed = []
            following = list(ends)
            for r in range(self.n):
                owner, after = (r - hop) % self.n, (r + 1) % self.n
                if hop + 1 < self.n:
                    size = self.shard(owner) if mode == "pass-kv" else self.queries(owner)
                    link_free[r] = self.send(max(start[r], link_free[r]), size, start[r], ends[r])
                    following[after] = max(following[after], link_free[r])
                if mode == "pass-q" and hop:
                    owed.append((ends[r], r, owner))
            start = following
        for posted, source, to in owed:
            arrivals[to].append(self.send(max(posted, link_free[source]), self.result(to), 0, 0))
        return [max([start[r], *arrivals[r]]) + self.merge(r) for r in range(self.n)]

    def send(self, at: float, size: float, busy_from: float, busy_to: float) -> float:
        """When a message that may begin at `at` has gone; beside a product it moves at `overlap` of its speed."""
        work, slow = self.machine.latency_s + size / self.machine.bandwidth, self.machine.overlap
        before = max(0.0, min(work, busy_from - at))
        work, at = work - before, at + before
        beside = max(0.0, busy_to - at)
        return at + work / slow if work <= slow * beside else at + beside + work - slow * beside

    def product(self, q: int, k: int) -> float:
        c = self.call
        flops = 4 * c.q_frames * len(self.splits[q].chunk) * c.kv_frames * len(self.splits[k].chunk)
        return self.machine.call_s + flops * self.heads * c.kv.head_dim / self.machine.attention_rate

    def row(self) -> int:
        return self.call.kv.head_dim * self.call.item_bytes

    def shard(self, r: int) -> float:
        return 2 * self.call.kv_frames * len(self.splits[r].chunk) * self.keys * self.row()

    def queries(self, r: int) -> float:
        return self.call.q_frames * len(self.splits[r].chunk) * self.heads * self.row()

    def result(self, r: int) -> float:
        return self.queries(r) + self.call.q_frames * len(self.splits[r].chunk) * self.heads * LSE_BYTES

    def merge(self, r: int) -> float:
        return 2 * self.n * self.queries(r) / self.machine.merge_rate


# --------------------------------------------------------------------------------------------------- tests


@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 8])
def test_the_choice_costs_at_most_a_tenth_more_than_the_best(ranks: int) -> None:
    worst, seen = 1.0, set()
    for (tokens, heads, kv_heads), machine in itertools.product(
        [(64, 12, 12), (390, 12, 12), (1560, 12, 12), (1560, 40, 40), (1560, 40, 8), (768, 24, 2)], machines()
    ):
        possible = strategies(ranks, KVGeometry(30, kv_heads, 128, tokens), heads)
        chooser = Chooser(machine, possible)
        for call in calls(tokens, heads, kv_heads):
            costs = {s: play(s, call, machine) for s in possible}
            chosen = chooser.choose(call).strategy
            worst = max(worst, costs[chosen] / min(costs.values()))
            seen.add(chosen)
    assert worst <= 1.10
    assert len(seen) > 1


@pytest.mark.parametrize("layout", [Layout(1, 2), Layout(1, 4), Layout(2, 2), Layout(1, 8)], ids=str)
def test_the_mode_of_a_ring_costs_at_most_a_tenth_more_than_the_other(layout: Layout) -> None:
    seen = set()
    for (tokens, heads, kv_heads), machine in itertools.product([(390, 12, 12), (1560, 40, 8)], machines()):
        chooser = Chooser(machine, of_layout(layout))
        for call in calls(tokens, heads, kv_heads):
            costs = {s: play(s, call, machine) for s in of_layout(layout)}
            chosen = chooser.choose(call).strategy
            assert costs[chosen] <= 1.10 * min(costs.values())
            seen.add(chosen.mode)
    assert seen == {"pass-kv", "pass-q"}


def test_a_choice_does_not_flap() -> None:
    """Keys that come and go around the crossover change the choice once at most."""
    kv = KVGeometry(1, 2, 64, 256)
    machine = machine_of(1e-5, 1e9, 1e12)
    chooser = Chooser(machine, of_layout(Layout(1, 4)))
    alike = [frames for frames in range(12, 128) if abs(1 - _ratio(Call(kv, 8, 12, frames), machine)) < MARGIN / 2]
    assert len(alike) > 1
    chosen = {chooser.choose(Call(kv, 8, 12, frames)).strategy for frames in alike * 3}
    assert len(chosen) == 1


def _ratio(call: Call, machine: Machine) -> float:
    a, b = (predict(s, call, machine) for s in of_layout(Layout(1, 4)))
    return a / b


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 2), (12, 1)])
@pytest.mark.parametrize("item_bytes", [2, 4])
def test_pass_q_sends_less_exactly_where_theory_says(heads: int, kv_heads: int, item_bytes: int) -> None:
    kv = KVGeometry(1, kv_heads, 64, 60)
    pass_kv, pass_q = of_layout(Layout(1, 3))
    for frames in range(2, 60):
        call = Call(kv, heads, 2, frames, item_bytes)
        crossed = frames / 2 > heads / kv_heads * (1 + 2 / (64 * item_bytes))
        assert (sent_bytes(pass_q, call) < sent_bytes(pass_kv, call)) == crossed


def test_early_blocks_pass_keys_and_late_ones_queries() -> None:
    """With grouped queries over a slow link, keys are few at first and outnumber the queries later."""
    kv = KVGeometry(30, 8, 128, 1560)
    chooser = Chooser(machine_of(1e-4, 1e9, 3e14), of_layout(Layout(1, 4)))
    modes = [chooser.choose(Call(kv, 40, 3, frames, 2)).strategy.mode for frames in range(3, 120, 3)]
    assert modes[0] == "pass-kv" and modes[-1] == "pass-q"
    assert sum(a != b for a, b in itertools.pairwise(modes)) == 1


def test_what_is_asked_for_is_taken() -> None:
    call = calls(390, 12, 12)[-1]
    for strategy in strategies(4, call.kv, 12):
        choice = Chooser(machine_of(1, 1, 1), [strategy]).choose(call)
        assert choice.strategy == strategy
        assert "asked for" in choice.reason


def test_a_layout_is_chosen_for_all_the_calls_to_come() -> None:
    machine = replace(machine_of(5e-6, 2e11, 3e14), call_s=1e-5, merge_rate=1e12)
    wanted = calls(1560, 12, 12)
    choice = choose_layout(machine, 4, wanted)
    best = min(
        {s.layout for s in strategies(4, wanted[0].kv, 12)},
        key=lambda layout: sum(min(play(s, c, machine) for s in of_layout(layout)) for c in wanted),
    )
    assert choice.strategy.layout == best
    assert str(best) in choice.reason


def test_more_ranks_than_heads_or_tokens_are_refused_by_name() -> None:
    assert all(s.layout.ulysses <= 2 for s in strategies(4, KVGeometry(1, 2, 8, 6), 2))
    with pytest.raises(SplitError, match="at most 3, the tokens of a latent frame; got 4"):
        strategies(4, KVGeometry(1, 2, 8, 3), 2)


def test_faster_links_never_cost_more() -> None:
    call = calls(390, 12, 12)[3]
    slow = replace(machine_of(1e-4, 1e9, 3e13), overlap=0.5)
    for strategy in strategies(6, call.kv, 12):
        for change in ({"bandwidth": 2e9}, {"latency_s": 1e-5}, {"collective_s": 1e-5}, {"overlap": 0.9}):
            better = replace(slow, **change)
            assert predict(strategy, call, better) <= predict(strategy, call, slow)


def test_the_picture_in_the_documentation_is_what_the_formulas_draw() -> None:
    assert (Path(__file__).parents[2] / "docs/images/parallel-crossover.svg").read_text() == draw()
