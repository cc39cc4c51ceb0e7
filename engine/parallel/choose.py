"""Which exchange is the fastest for a call of attention: a cost model over measured numbers, and a choice that holds.

The cost of one call in one layer, in seconds. A message of m bytes takes latency + m / bandwidth; a product of Tq
queries and Tk keys in h heads of d takes call + 4 Tq Tk h d / rate. A transfer posted before a product hides behind it
as far as a transfer moves beside one, at `overlap` of its speed: hop(p, x) = max(p, x + (1 - overlap) p).

    ulysses   two all-to-alls, each collective + m / collective bandwidth, and one product    (see ulysses.py)
    pass-KV   n - 1 hops (product, keys on their way), one product, the merge                  (see ring.py)
    pass-Q    a hop (product, queries on their way), then hops of a product, queries on their
              way out and the partial result before on its way home, a last result, the merge
    both      ulysses around a ring of its chunks                          (USP, arXiv 2405.07719)

Each term is that of the rank with the largest share. A choice changes only when another promises to save more than
`MARGIN` of what the present one costs, so it costs at most 1 / (1 - MARGIN) of the best and does not flap. The numbers
are the same on every rank (probe.py), so every rank comes to the same choice by itself. Whether blocks in flight are
better dealt out is counted with these in passes.py. Knows no torch.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from engine import profiler
from engine.models import KVGeometry
from engine.parallel.split import Layout, Split, SplitError, layouts

logger = logging.getLogger(__name__)

Mode = Literal["pass-kv", "pass-q"]
MODES: tuple[Mode, ...] = ("pass-kv", "pass-q")
MARGIN = 0.08
LSE_BYTES = 4


@dataclass(frozen=True)
class Machine:
    """What was measured of the ranks and of the links between them."""

    latency_s: float  # of one message
    bandwidth: float  # bytes per second that a rank sends while it receives as many
    collective_s: float  # an all-to-all, however little is sent
    collective_bandwidth: float  # bytes per second that a rank sends in an all-to-all while it receives as many
    attention_rate: float  # floating-point operations per second of one rank
    call_s: float = 0.0  # of a product, however small
    merge_rate: float = 8e9  # bytes per second at which partial results are merged
    overlap: float = 1.0  # of a transfer's speed, beside a product


UNMEASURED = Machine(0.0, 1.0, 0.0, 1.0, 1.0)
"""Where there is nothing to choose."""


@dataclass(frozen=True)
class Call:
    """One call of attention of a whole world: all its ranks together."""

    kv: KVGeometry
    heads: int  # of queries
    q_frames: int
    kv_frames: int  # latent frames attended to, the block's own included
    item_bytes: int = 4


@dataclass(frozen=True)
class Strategy:
    """A way to make a call. Without a ring there is no mode to it."""

    layout: Layout
    mode: Mode | None = None

    def __str__(self) -> str:
        named = [f"ulysses {self.layout.ulysses}"] if self.layout.ulysses > 1 else []
        named += [f"{self.mode} {self.layout.ring}"] if self.mode else []
        return " x ".join(named) or "one rank"


@dataclass(frozen=True)
class Choice:
    """The strategy taken, its cost by the model, and why it was taken."""

    strategy: Strategy
    seconds: float
    reason: str


def grids(ranks: int, kv: KVGeometry, heads: int, *, pipeline: bool = False, cfg: Iterable[int] = (1,)) -> list[Layout]:
    """Every layout that these ranks, tokens and heads allow; `pipeline` and `cfg` as in `layouts`."""
    found = [each for each in layouts(ranks, pipeline=pipeline, cfg=cfg) if _fits(each.team, kv, heads)]
    if not found:
        raise SplitError(f"ranks: expected at most {kv.tokens}, the tokens of a latent frame; got {ranks}")
    return found


def strategies(ranks: int, kv: KVGeometry, heads: int) -> list[Strategy]:
    """Every strategy for a call that these ranks share."""
    return [s for layout in grids(ranks, kv, heads) for s in of_layout(layout)]


def of_layout(layout: Layout) -> list[Strategy]:
    return [Strategy(layout, mode) for mode in MODES] if layout.ring > 1 else [Strategy(layout)]


def predict(strategy: Strategy, call: Call, machine: Machine) -> float:
    """Seconds of one call in one layer."""
    return exchanged(strategy.layout, call, machine) + attended(strategy, call, machine)


def exchanged(layout: Layout, call: Call, machine: Machine) -> float:
    """Of that, the all-to-alls: of the group that holds most, as long as the rank takes that sends or receives most."""
    if layout.ulysses == 1:
        return 0.0
    split = Split(layout, 0, call.kv)
    tokens = [len(split.tokens[rank]) for rank in layout.ulysses_group(0)]
    queries = [len(s) for s in split.q_heads(call.heads)]
    there = [q + 2 * len(s) for q, s in zip(queries, split.kv_heads, strict=True)]  # heads that come to a rank
    most = sum(_most(tokens, heads) for heads in (there, queries))  # the way back is the way there, the other way round
    row = call.q_frames * call.kv.head_dim * call.item_bytes
    return 2 * machine.collective_s + most * row / machine.collective_bandwidth


def attended(strategy: Strategy, call: Call, machine: Machine) -> float:
    """Of that, attention itself, with the ring around it."""
    n, split = strategy.layout.ring, Split(strategy.layout, 0, call.kv)  # rank 0 has one token more, if any has
    chunk = len(split.chunk)  # tokens of a latent frame
    heads, kv_heads = max(map(len, split.q_heads(call.heads))), max(map(len, split.kv_heads))
    p = machine.call_s + 4 * (call.q_frames * chunk) * (call.kv_frames * chunk) * heads * call.kv.head_dim / (
        machine.attention_rate
    )
    if n == 1:
        return p
    row = call.kv.head_dim * call.item_bytes
    merge = 2 * n * call.q_frames * chunk * heads * row / machine.merge_rate
    if strategy.mode == "pass-kv":
        ring = _pass_kv(machine, n, p, 2 * call.kv_frames * chunk * kv_heads * row)
    else:
        rows = call.q_frames * chunk * heads
        ring = _pass_q(machine, n, p, (rows * row, rows * (row + LSE_BYTES)))
    return ring + merge


def sent_bytes(strategy: Strategy, call: Call) -> int:
    """Bytes that all ranks together send in one call in one layer: the formulas of ulysses.py and ring.py."""
    layout, row = strategy.layout, call.kv.head_dim * call.item_bytes
    u, n, total = layout.ulysses, layout.ring, 0
    first = Split(layout, 0, call.kv)
    queries = [len(s) for s in first.q_heads(call.heads)]
    keys = [len(s) for s in first.kv_heads]
    for chunk_ranks in (layout.ulysses_group(i) for i in range(n)):
        tokens = [len(first.tokens[r]) for r in chunk_ranks]
        for t, h, k in zip(tokens, queries, keys, strict=True):
            out = (call.heads - h) + 2 * (sum(keys) - k)
            total += call.q_frames * row * (t * out + (sum(tokens) - t) * h) if u > 1 else 0
    tokens_q, tokens_kv = call.q_frames * call.kv.tokens, call.kv_frames * call.kv.tokens
    if strategy.mode == "pass-kv":
        total += (n - 1) * 2 * tokens_kv * sum(keys) * row
    elif strategy.mode == "pass-q":
        total += (n - 1) * tokens_q * call.heads * (2 * row + LSE_BYTES)
    return total


class Chooser:
    """The strategy for one call after another: the fastest of `allowed`, left only for one that saves the margin."""

    def __init__(self, machine: Machine, allowed: Sequence[Strategy], margin: float = MARGIN) -> None:
        assert allowed, "something must be allowed"
        self.machine, self.allowed, self.margin = machine, tuple(allowed), margin
        self.current: Choice | None = None
        self._made: dict[tuple[Call, Strategy | None], Choice] = {}

    def choose(self, call: Call) -> Choice:
        """Called with the same calls in the same order on every rank, it answers the same on every rank."""
        before = self.current.strategy if self.current else None
        key = (call, before)
        if key not in self._made:
            self._made[key] = self._decide(call, before)
        choice = self._made[key]
        if choice.strategy != before and len(self.allowed) > 1:
            logger.info("exchange: %s (%s)", choice.strategy, choice.reason)
            profiler.count(f"exchange: {choice.strategy} ({choice.reason})")
        self.current = choice
        return choice

    def _decide(self, call: Call, before: Strategy | None) -> Choice:
        costs = {s: predict(s, call, self.machine) for s in self.allowed}
        best = min(costs, key=costs.__getitem__)
        if len(self.allowed) == 1:
            return Choice(best, costs[best], "asked for, or the only way")
        keys = f"{call.kv_frames} frames of keys to {call.q_frames} of queries"
        if before is not None and costs[best] >= (1 - self.margin) * costs[before]:
            return Choice(before, costs[before], f"{keys}: no other saves {self.margin:.0%}")
        others = {str(s): cost for s, cost in costs.items() if s != best}
        second = min(others, key=others.__getitem__)
        saved = f"{1e3 * costs[best]:.3g} ms, {second} {1e3 * others[second]:.3g} ms"
        return Choice(best, costs[best], f"{keys}: {saved}")


def choose_layout(machine: Machine, ranks: int, calls: Iterable[Call]) -> Choice:
    """The layout for a world that will make these calls, each as often as the others: its cache is cut once.

    The mode of a ring is chosen call by call, so a layout is worth what its best mode costs at each.
    """
    wanted = list(calls)
    possible = {s.layout for s in strategies(ranks, wanted[0].kv, wanted[0].heads)}
    costs = {
        layout: sum(min(predict(s, call, machine) for s in of_layout(layout)) for call in wanted)
        for layout in sorted(possible, key=lambda each: -each.ulysses)
    }
    best = min(costs, key=costs.__getitem__)
    said = ", ".join(f"{layout} {1e3 * cost / len(wanted):.3g} ms" for layout, cost in costs.items())
    strategy = min(of_layout(best), key=lambda s: predict(s, wanted[-1], machine))
    return Choice(strategy, costs[best] / len(wanted), f"a call in a layer takes {said}")


def _fits(layout: Layout, kv: KVGeometry, heads: int) -> bool:
    return layout.ulysses <= heads and layout.ranks <= kv.tokens


def _most(tokens: Sequence[int], heads: Sequence[int]) -> int:
    """The most that a rank sends or receives when each gets its heads of all others' tokens."""
    return max(max(t * (sum(heads) - h), (sum(tokens) - t) * h) for t, h in zip(tokens, heads, strict=True))


def _pass_kv(machine: Machine, n: int, product: float, shard: int) -> float:
    return (n - 1) * hop(machine, product, message(machine, shard)) + product


def _pass_q(machine: Machine, n: int, product: float, sizes: tuple[int, int]) -> float:
    queries, result = (message(machine, size) for size in sizes)
    seconds = 0.0
    for i in range(n):
        link = (queries if i + 1 < n else 0.0) + (result if i >= 2 else 0.0)
        seconds += hop(machine, product, link)
    return seconds + result


def hop(machine: Machine, product: float, transfer: float) -> float:
    return max(product, transfer + (1 - machine.overlap) * product)


def message(machine: Machine, size: int) -> float:
    return machine.latency_s + size / machine.bandwidth
