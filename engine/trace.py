"""What a profiler has recorded, as JSON for a page and as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing.

Trace format: "Trace Event Format" (complete events "X", counters "C", metadata "M"; times in microseconds).
"""

from __future__ import annotations

import os
from collections import defaultdict
from typing import Any

from engine.profiler import Profiler, Sample, Span

Json = dict[str, Any]


def snapshot(profiler: Profiler, world: str, blocks: int) -> Json:
    """The last `blocks` blocks of a world: phases, spans and measures of each; totals, counters and gauges beside."""
    spans = [s for s in profiler.spans.copy() if s.place.world == world]
    samples = [s for s in profiler.samples.copy() if s.place.world == world]
    shown = _last_blocks(spans, blocks)
    return {
        "world": world,
        "blocks": [_block(index, spans, samples, profiler.started_ns) for index in shown],
        "totals": _totals([s for s in spans if s.place.block in shown]),
        "counters": dict(profiler.counters),
        "gauges": profiler.values(world),
        "facts": dict(profiler.facts),
    }


def chrome_trace(profiler: Profiler, world: str | None = None, blocks: int | None = None) -> Json:
    """Everything recorded (of one world and its last blocks, and of no world in particular) as a trace."""
    spans = [s for s in profiler.spans.copy() if world is None or s.place.world in (None, world)]
    samples = [s for s in profiler.samples.copy() if world is None or s.place.world in (None, world)]
    if blocks is not None:
        shown = {None, *_last_blocks(spans, blocks)}
        spans = [s for s in spans if s.place.block in shown]
        samples = [s for s in samples if s.place.block in shown]
    threads = {name: i for i, name in enumerate(dict.fromkeys(s.thread for s in spans), start=1)}
    pid = os.getpid()
    events = [_metadata("process_name", pid, 0, "engine")]
    events += [_metadata("thread_name", pid, tid, name) for name, tid in threads.items()]
    events += [_complete(s, pid, threads[s.thread], profiler.started_ns) for s in spans]
    events += [_counter(s, pid, profiler.started_ns) for s in samples]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": dict(profiler.facts)}


def _last_blocks(spans: list[Span], count: int) -> list[int]:
    known = sorted({s.place.block for s in spans if s.place.block is not None})
    return known[-count:] if count > 0 else []


def _block(index: int, spans: list[Span], samples: list[Sample], zero_ns: int) -> Json:
    own = sorted((s for s in spans if s.place.block == index), key=lambda s: s.start_ns)
    phases: dict[str, float] = defaultdict(float)
    for s in own:
        phases[s.name] += s.ms
    return {
        "block": index,
        "begun_ms": round((own[0].start_ns - zero_ns) / 1e6, 3),
        "phases_ms": {name: round(ms, 3) for name, ms in phases.items()},
        "metrics": {s.name: s.value for s in samples if s.place.block == index},
        "spans": [_span(s, zero_ns) for s in own],
    }


def _span(span: Span, zero_ns: int) -> Json:
    found: Json = {
        "name": span.name,
        "start_ms": round((span.start_ns - zero_ns) / 1e6, 3),
        "ms": round(span.ms, 3),
        "depth": span.depth,
        "thread": span.thread,
    }
    if span.place.step is not None:
        found["step"] = span.place.step
    if (device_ms := span.device_ms) is not None:
        found["device_ms"] = round(device_ms, 3)
    if span.failed:
        found["failed"] = True
    return found


def _totals(spans: list[Span]) -> Json:
    times: dict[str, list[float]] = defaultdict(list)
    for s in spans:
        times[s.name].append(s.ms)
    return {
        name: {
            "count": len(ms),
            "ms": round(sum(ms), 3),
            "mean_ms": round(sum(ms) / len(ms), 3),
            "max_ms": round(max(ms), 3),
        }
        for name, ms in times.items()
    }


def _metadata(kind: str, pid: int, tid: int, name: str) -> Json:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _complete(span: Span, pid: int, tid: int, zero_ns: int) -> Json:
    args: Json = {name: value for name, value in span.place._asdict().items() if value is not None}
    if (device_ms := span.device_ms) is not None:
        args["device_ms"] = device_ms
    if span.failed:
        args["failed"] = True
    return {
        "ph": "X",
        "name": span.name,
        "cat": "engine",
        "pid": pid,
        "tid": tid,
        "ts": (span.start_ns - zero_ns) / 1e3,
        "dur": (span.end_ns - span.start_ns) / 1e3,
        "args": args,
    }


def _counter(sample: Sample, pid: int, zero_ns: int) -> Json:
    owner = sample.place.world
    name = sample.name if owner is None else f"{sample.name} ({owner})"
    return {"ph": "C", "name": name, "pid": pid, "ts": (sample.at_ns - zero_ns) / 1e3, "args": {"value": sample.value}}
