"""Trials of `inferix bench parallel`: one call of attention by each strategy, measured, predicted, chosen.

Every rank has random keys of its share in a cache of one layer and attends to all of them with its share of a block;
the time of a call is the slowest rank's, the best of several.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from engine.kvcache.policy import parse
from engine.kvcache.pool import PageFormat, PagePool
from engine.models import KVGeometry
from engine.parallel.cache import ParallelCache, Spread
from engine.parallel.choose import UNMEASURED, Call, Chooser, Strategy, predict, sent_bytes, strategies
from engine.parallel.mesh import Mesh
from engine.parallel.probe import measure as measure_machine


@dataclass(frozen=True)
class Calls:
    """What is measured."""

    ranks: tuple[int, ...] = (2, 4)
    tokens: int = 96  # of a latent frame
    heads: int = 8
    kv_heads: int = 8
    head_dim: int = 64
    q_frames: int = 3
    kv_frames: tuple[int, ...] = (3, 6, 12, 24, 48)
    repeats: int = 7
    device: str = "cpu"

    @property
    def kv(self) -> KVGeometry:
        return KVGeometry(1, self.kv_heads, self.head_dim, self.tokens)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.device == "cpu" else torch.bfloat16

    @property
    def note(self) -> str:
        return (
            f"frames of keys to {self.q_frames} of queries, {self.tokens} tokens each, {self.heads} heads on "
            f"{self.kv_heads} of {self.head_dim}; a call in one layer, the slowest rank's time, best of {self.repeats}"
        )

    def rows(self, mesh: Mesh) -> Iterator[Row]:
        """All ranks call it together."""
        machine = measure_machine(mesh, self.heads, self.head_dim, self.dtype)
        possible = strategies(mesh.ranks, self.kv, self.heads)
        chooser = Chooser(machine, possible)
        for frames in self.kv_frames:
            call = Call(self.kv, self.heads, self.q_frames, frames, self.dtype.itemsize)
            chosen = chooser.choose(call).strategy
            with ExitStack() as stack:
                trials = [Trial(mesh, self, strategy, call, stack) for strategy in possible]
                for _ in range(self.repeats + 1):  # in turn, so that what disturbs one disturbs all
                    for trial in trials:
                        trial.run()
            for trial in trials:
                way, taken_s = trial.strategy, min(trial.taken_s[1:])
                predicted_s, sent = predict(way, call, machine), sent_bytes(way, call)
                yield Row(mesh.ranks, frames, str(way), taken_s, predicted_s, sent, way == chosen)


@dataclass(frozen=True)
class Row:
    """One way to share at one length."""

    ranks: int
    kv_frames: int
    strategy: str
    measured_s: float
    predicted_s: float
    sent_bytes: int
    chosen: bool


class Trial:
    """One strategy's call over a cache of random keys, ready to be made again and again."""

    def __init__(self, mesh: Mesh, calls: Calls, strategy: Strategy, call: Call, stack: ExitStack) -> None:
        self.strategy, self._mesh = strategy, mesh
        self.taken_s: list[float] = []
        spread = Spread.over(mesh.grid(strategy.layout), calls.kv, UNMEASURED, strategy.mode)
        pool = PagePool(PageFormat(spread.kv, calls.dtype), call.kv_frames, mesh.device)
        cache = spread.cache(pool, parse("full"), call.q_frames)
        past, mine = call.kv_frames - call.q_frames, len(spread.exchange.split.mine)
        _fill(cache, past)
        self._q, self._k, self._v = (
            torch.randn(1, call.q_frames, mine, n, calls.head_dim, device=mesh.device).to(calls.dtype)
            for n in (calls.heads, calls.kv_heads, calls.kv_heads)
        )
        self._block = stack.enter_context(cache.stage(past, call.q_frames))

    def run(self) -> None:
        self.taken_s.append(seconds(self._mesh, lambda: self._block.attend(0, self._q, self._k, self._v, None)))


def seconds(mesh: Mesh, act: Callable[[], object]) -> float:
    """Until the slowest rank is done. All ranks call it together."""
    mesh.wait_for_all()
    began = time.perf_counter()
    act()
    if mesh.device.type == "cuda":
        torch.cuda.synchronize()
    mesh.wait_for_all()
    return time.perf_counter() - began


def _fill(cache: ParallelCache, frames: int) -> None:
    """Random keys and values as the past."""
    if not frames:
        return
    form, device = cache.pool.format, cache.pool.device
    with cache.stage(0, frames) as block:
        block.clean = True
        k, v = (torch.randn(1, frames, *form.shape, device=device).to(form.dtype) for _ in range(2))
        block.store(0, k, v)
        block.commit()
