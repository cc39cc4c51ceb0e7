"""`inferix bench engine`: how fast blocks are made, where the time goes, how far a step is from its own products."""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine import profiler
from engine.bench.floor import Floor, Op, record
from engine.bench.result import Cell, Result, count, spread
from engine.generator import Block
from engine.models.presets import LoadOptions
from engine.profiler import Profiler, Span
from engine.protocol import PromptChange
from engine.rollout import Request, Rollout, use_threads


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="tiny-world")
    parser.add_argument("--kv", default="")
    parser.add_argument("--steps", type=count)
    parser.add_argument("--blocks", type=count, default=48, help="blocks measured (default: %(default)s)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=count, default=1, help="of the denoiser (default: %(default)s)")


def measure(args: argparse.Namespace) -> Result:
    """Warm up over the window, then measure `blocks` blocks."""
    use_threads(args.threads)
    with Rollout.open(_request(args)) as rollout:
        for _ in range(_warm_up(rollout)):
            rollout.generator.next_block(rollout.world)
        phases = _phases(rollout, args.blocks)
        ratios, floor_ms, kinds = _against_floor(rollout, max(8, args.blocks // 2))
        real_time = _real_time(rollout, args.blocks)
        g, name = rollout.model.geometry, rollout.request.model
    block_ms = sum(statistics.median(times) for times in phases.values())
    rows: list[tuple[Cell, ...]] = [
        (phase, round(statistics.median(times), 2), f"{statistics.median(times) / block_ms:.0%}")
        for phase, times in sorted(phases.items(), key=lambda item: -statistics.median(item[1]))
    ]
    notes = (
        f"blocks one after another: {block_ms:.1f} ms for {g.block_s * 1e3:.0f} ms of video",
        f"decoding beside denoising: {real_time:.2f} × real time at {g.fps:g} fps, {g.width}x{g.height}",
        f"a step takes {spread(ratios)} × its own products alone ({floor_ms:.1f} ms; a block's: {kinds})",
    )
    return Result("engine", ("phase", "ms per block", "share"), tuple(rows), notes, name)


def _request(args: argparse.Namespace) -> Request:
    prompts = (PromptChange(0.0, "a sunny beach with a sailing boat"),)
    seconds = 3600.0
    return Request(args.model, prompts, seconds, kv=args.kv, steps=args.steps, load=LoadOptions(device=args.device))


def _warm_up(rollout: Rollout) -> int:
    most = rollout.world.caches[0].policy.most_read(rollout.model.geometry.frames_per_block)
    return 4 + (most or 0) // rollout.model.geometry.frames_per_block


def _phases(rollout: Rollout, blocks: int) -> dict[str, list[float]]:
    """Milliseconds of each phase in each block, nothing running beside."""
    recorder = Profiler()
    profiler.enable(recorder)
    made = [_in_turn(rollout) for _ in range(blocks)]
    profiler.disable()
    wanted = {block.index for block in made}
    return own_ms([span for span in recorder.spans.copy() if span.place.block in wanted])


def own_ms(spans: Sequence[Span]) -> dict[str, list[float]]:
    """Milliseconds of each phase in each block, of nested ones where they are innermost; spans as they ended."""
    times: dict[str, dict[int | None, float]] = defaultdict(lambda: defaultdict(float))
    inside: dict[tuple[str, int], float] = defaultdict(float)  # (thread, depth) -> of spans whose outer one is open
    for span in spans:
        inside[span.thread, span.depth] += span.ms
        own = span.ms - inside.pop((span.thread, span.depth + 1), 0.0)
        times["between phases" if span.name == "block" else span.name][span.place.block] += own
    return {name: list(per_block.values()) for name, per_block in times.items()}


def _in_turn(rollout: Rollout) -> Block:
    with profiler.span("block", block=rollout.world.block):
        block = rollout.generator.next_block(rollout.world)
    rollout.decode(block)
    return block


@dataclass
class _Watched:
    """Stands in for a model's forward: notes the products of each call, or times it."""

    inner: Callable[..., object]
    clock: Callable[[], float]
    ops: list[Op] | None = None
    seconds: float = 0.0
    calls: int = 0

    def __call__(self, *args: object, **kwargs: object) -> object:
        self.calls += 1
        if self.ops is not None:
            made: list[object] = []
            self.ops += record(lambda: made.append(self.inner(*args, **kwargs)))
            return made[0]
        began = self.clock()
        out = self.inner(*args, **kwargs)
        self.seconds += self.clock() - began
        return out


def _against_floor(rollout: Rollout, blocks: int) -> tuple[list[float], float, str]:
    """Ratios of the time of a block's steps to that of their products alone, taken in turns.

    On a CPU both are processor seconds: what other programs take does not count.
    """
    model, whole = rollout.model, rollout.model.forward
    clock = time.process_time if model.device.type == "cpu" else time.perf_counter
    watched = _Watched(whole, clock, ops=[])
    model.forward = watched  # type: ignore[method-assign, assignment]
    try:
        rollout.generator.next_block(rollout.world)
        assert watched.ops is not None
        calls, floor, watched.ops = watched.calls, Floor(watched.ops), None
        ratios, floors = [], []
        for _ in range(blocks):
            watched.seconds = 0.0
            rollout.generator.next_block(rollout.world)
            floors.append(floor.seconds(clock))
            ratios.append(watched.seconds / floors[-1])
    finally:
        model.forward = whole  # type: ignore[method-assign]
    kinds = ", ".join(f"{count} {name}" for name, count in floor.kinds.most_common())
    return ratios, statistics.median(floors) / calls * 1e3, kinds


def _real_time(rollout: Rollout, blocks: int) -> float:
    """Media seconds per second with decoding in its own thread, as when a world runs live."""
    parts = iter(rollout)
    next(parts)
    pictures, began = 0, time.perf_counter()
    for _ in range(blocks):
        pictures += len(next(parts).pictures)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return pictures / rollout.model.geometry.fps / (time.perf_counter() - began)
