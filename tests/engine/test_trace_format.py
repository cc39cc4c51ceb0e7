"""Traces hold to the Trace Event Format as Perfetto reads it: what its parser would drop or misplace fails here.

Perfetto's own trace processor is a binary that its package fetches when first used, so it cannot run offline; this
checks the rules of the format's document ("Trace Event Format", sections "JSON Object Format" and "Event Descriptions")
and of Perfetto's importer, which drops complete events of one thread that overlap without one holding the other.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine import profiler
from engine.models import presets
from engine.profiler import Profiler
from engine.protocol import PromptChange
from engine.report import write_trace
from engine.rollout import WORLD, Request, Rollout
from engine.trace import chrome_trace
from tests.toy_model import TOY

METADATA = {"process_name", "process_labels", "process_sort_index", "thread_name", "thread_sort_index"}
TOP = {"traceEvents", "displayTimeUnit", "otherData"}
FIELDS = {
    "X": {"ph", "name", "cat", "pid", "tid", "ts", "dur", "args"},
    "C": {"ph", "name", "pid", "ts", "args"},
    "M": {"ph", "name", "pid", "tid", "args"},
}


class TraceWrong(AssertionError):
    """A trace that a reader of the format could not take as it was meant."""


def check(text: str) -> list[dict[str, Any]]:
    """The events of a trace file's text. Raises TraceWrong."""
    trace = json.loads(text, parse_constant=_no_constant)
    _must(isinstance(trace, dict) and set(trace) <= TOP and isinstance(trace.get("traceEvents"), list), "top level")
    _must(trace.get("displayTimeUnit") in ("ms", "ns"), "displayTimeUnit")
    events: list[dict[str, Any]] = trace["traceEvents"]
    for event in events:
        _check_event(event)
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    _must(set(tracks) <= named, "a thread without a name")
    for spans in tracks.values():
        _check_nesting(sorted(spans, key=lambda span: (span[0], -span[1])))
    return events


def _check_event(event: dict[str, Any]) -> None:
    phase = event.get("ph")
    _must(phase in FIELDS and set(event) == FIELDS[phase], f"fields of {event}")
    _must(isinstance(event["name"], str) and event["name"] != "", f"name of {event}")
    _must(all(isinstance(event[key], int) for key in ("pid", "tid") if key in event), f"ids of {event}")
    for key in ("ts", "dur"):
        _must(key not in event or (isinstance(event[key], int | float) and event[key] >= 0), f"{key} of {event}")
    args = event["args"]
    _must(isinstance(args, dict), f"args of {event}")
    if phase == "M":
        _must(event["name"] in METADATA and isinstance(args.get("name"), str), f"metadata {event}")
    if phase == "C":
        _must(args != {} and all(_is_number(v) for v in args.values()), f"a counter's values are numbers: {event}")


def _check_nesting(spans: list[tuple[float, float]]) -> None:
    open_ends: list[float] = []
    for start, end in spans:
        while open_ends and open_ends[-1] <= start + 1e-3:  # a nanosecond, for what rounding does
            open_ends.pop()
        _must(not open_ends or end <= open_ends[-1] + 1e-3, f"a span at {start} us outlives the one around it")
        open_ends.append(end)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _no_constant(text: str) -> float:
    raise TraceWrong(f"JSON has no {text}")


def _must(held: bool, what: str) -> None:
    if not held:
        raise TraceWrong(what)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Profiler]:
    """Two seconds of a world, decoded in a second thread, with hooks of which one answers nonsense."""
    monkeypatch.setitem(presets.PRESETS, "toy", TOY)
    own = Profiler()
    profiler.enable(own)
    profiler.add_hook("odd", lambda at: {"odd": math.nan, "even": 2.0 * (at.block or 0)})
    try:
        with Rollout.open(Request("toy", (PromptChange(0.0, "a"), PromptChange(1.0, "b")), 2.0)) as rollout:
            for _ in rollout:
                pass
    finally:
        profiler.remove_hook("odd")
        profiler.disable()
    yield own


def test_a_worlds_trace_holds_to_the_format(recorded: Profiler, tmp_path: Path) -> None:
    write_trace(tmp_path / "t.json", recorded)
    events = check((tmp_path / "t.json").read_text())
    names = {e["name"] for e in events}
    assert {"block", "step", "clean pass", "cache write", "decode", "hook odd", f"even ({WORLD})"} <= names
    assert {e["args"]["name"] for e in events if e["name"] == "thread_name"} == {"MainThread", "decode_0"}


def test_the_trace_of_the_last_blocks_of_one_world_does_too(recorded: Profiler) -> None:
    events = check(json.dumps(chrome_trace(recorded, WORLD, blocks=2)))
    assert {e["args"]["block"] for e in events if e["name"] == "step"} == {2, 3}


def test_a_measure_that_is_no_number_is_counted_and_left_out(recorded: Profiler) -> None:
    assert "odd" not in recorded.values(WORLD) and recorded.values(WORLD)["even"] == 6.0
    assert recorded.counters["not finite: odd"] == 4


X = {"ph": "X", "name": "a", "cat": "engine", "pid": 1, "tid": 1, "ts": 0.0, "dur": 10.0, "args": {}}
NAMED = {"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": {"name": "main"}}


@pytest.mark.parametrize(
    "events",
    [
        [X],
        [NAMED, X | {"ts": -1.0}],
        [NAMED, X | {"ts": "0"}],
        [NAMED, X, X | {"ts": 5.0}],
        [NAMED, X | {"ph": "Q"}],
        [NAMED, {key: value for key, value in X.items() if key != "dur"}],
        [{"ph": "C", "name": "c", "pid": 1, "ts": 0.0, "args": {"value": "3"}}],
        [{"ph": "C", "name": "c", "pid": 1, "ts": 0.0, "args": {"value": math.nan}}],
        [{"ph": "M", "name": "thread", "pid": 1, "tid": 1, "args": {"name": "main"}}],
    ],
)
def test_the_check_itself_finds_what_is_wrong(events: list[dict[str, Any]]) -> None:
    check(json.dumps({"traceEvents": [NAMED, X, X | {"ts": 2.0, "dur": 8.0}], "displayTimeUnit": "ms"}))
    with pytest.raises(TraceWrong):
        check(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
