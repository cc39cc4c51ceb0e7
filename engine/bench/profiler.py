"""`inferix bench profiler`: what the profiler costs, by worlds that run with it and without it in turns."""

from __future__ import annotations

import argparse
import statistics
import time

from engine import profiler
from engine.bench.result import Cell, Result, count, spread
from engine.models.presets import LoadOptions
from engine.profiler import Profiler
from engine.protocol import PromptChange
from engine.rollout import Request, Rollout, use_threads

SPAN_CALLS = 20_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="tiny-world")
    parser.add_argument("--pairs", type=count, default=60, help="blocks with and without (default: %(default)s)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=count, default=1)


def measure(args: argparse.Namespace) -> Result:
    """Block by block in turns; the processor time of this thread, so that other programs do not count."""
    use_threads(args.threads)
    recorder = Profiler(spans=1_000_000)
    off: list[float] = []
    on: list[float] = []
    spans: list[int] = []
    request = Request(args.model, (PromptChange(0.0, "a beach"),), 3600.0, load=LoadOptions(device=args.device))
    with Rollout.open(request) as rollout:
        for _ in range(8):
            _block_s(rollout)
        for pair in range(args.pairs):
            for recording in ((False, True), (True, False))[pair % 2]:
                before = len(recorder.spans)
                profiler.enable(recorder) if recording else profiler.disable()
                (on if recording else off).append(_block_s(rollout))
                spans += [len(recorder.spans) - before] if recording else []
    profiler.disable()
    differences = [b / a - 1 for a, b in zip(off, on, strict=True)]
    off_ns, on_ns = _span_ns(None), _span_ns(recorder)
    per_block = statistics.median(spans)
    share = per_block * on_ns / 1e9 / statistics.median(off)
    rows: tuple[tuple[Cell, ...], ...] = (
        ("a block without", f"{spread([s * 1e3 for s in off])} ms"),
        ("a block with", f"{spread([s * 1e3 for s in on])} ms"),
        ("paired difference", f"{spread([d * 100 for d in differences])} %"),
        ("a span when off", f"{off_ns:.0f} ns"),
        ("a span when on", f"{on_ns:.0f} ns"),
        ("spans in a block", f"{per_block:.0f}"),
        ("their cost by count", f"{share:.3%} of a block"),
    )
    notes = ("median (lower to upper quartile); processor seconds of the denoising thread, in turns",)
    return Result("profiler", ("", ""), rows, notes, args.model)


def _block_s(rollout: Rollout) -> float:
    began = time.thread_time()
    with profiler.span("block", block=rollout.world.block):
        rollout.decode(rollout.generator.next_block(rollout.world))
    profiler.boundary("block")
    return time.thread_time() - began


def _span_ns(recorder: Profiler | None) -> float:
    profiler.enable(recorder) if recorder else profiler.disable()
    began = time.perf_counter_ns()
    for _ in range(SPAN_CALLS):
        with profiler.span("nothing"):
            pass
    profiler.disable()
    return (time.perf_counter_ns() - began) / SPAN_CALLS
