"""Spans close, nest, stay within their world and thread, and what was recorded can be read by others."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator

import pytest

from engine import profiler
from engine.profiler import Place, Profiler, add_hook, boundary, count, gauge, profiled, remove_hook, span
from engine.trace import chrome_trace, snapshot


@pytest.fixture
def recorded() -> Iterator[Profiler]:
    own = Profiler()
    profiler.enable(own)
    yield own
    profiler.disable()


@profiled("double")
def double(x: int) -> int:
    return 2 * x


def test_inner_spans_inherit_world_and_block(recorded: Profiler) -> None:
    with span("denoise", world="w", block=4):
        for step in range(2):
            with span("step", step=step):
                assert double(2) == 4
    places = [(s.name, s.place, s.depth) for s in recorded.spans]
    assert places == [
        ("double", Place("w", 4, 0), 2),
        ("step", Place("w", 4, 0), 1),
        ("double", Place("w", 4, 1), 2),
        ("step", Place("w", 4, 1), 1),
        ("denoise", Place("w", 4), 0),
    ]
    inner, outer = recorded.spans[1], recorded.spans[4]
    assert outer.start_ns <= inner.start_ns <= inner.end_ns <= outer.end_ns


def test_an_exception_closes_its_spans_and_goes_on(recorded: Profiler) -> None:
    with pytest.raises(KeyError), span("outer", world="w"), span("inner"):
        raise KeyError("x")
    assert [(s.name, s.failed) for s in recorded.spans] == [("inner", True), ("outer", True)]
    assert recorded.place == Place(), "nothing is left open"


def test_spans_of_two_threads_do_not_mix(recorded: Profiler) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def other() -> None:
        with span("b", world="two", block=7):
            inside.set()
            go_on.wait(10)
            with span("b inner"):
                pass

    thread = threading.Thread(target=other, name="other")
    with span("a", world="one", block=1):
        thread.start()
        inside.wait(10)
        with span("a inner"):
            pass
        go_on.set()
        thread.join()
    owners = {s.name: (s.place.world, s.thread) for s in recorded.spans}
    assert owners["a inner"] == ("one", "MainThread")
    assert owners["b inner"] == ("two", "other")


def test_off_nothing_is_recorded_and_every_span_is_the_same_object() -> None:
    profiler.disable()
    assert span("a", world="w") is span("b")
    with span("a"):
        count("x")
        gauge("y", 1.0)
        boundary("block")
    assert double(3) == 6
    assert profiler.active() is None


def test_the_ring_is_bounded() -> None:
    small = Profiler(spans=10)
    profiler.enable(small)
    for i in range(50):
        with span("s", block=i):
            pass
    profiler.disable()
    assert [s.place.block for s in small.spans] == list(range(40, 50))


def test_a_measure_of_your_own_appears_beside_the_built_in_ones(recorded: Profiler) -> None:
    add_hook("sharpness", lambda place: {"sharpness": 0.5 + (place.block or 0)})
    for block in range(3):
        with span("denoise", world="w", block=block):
            pass
        boundary("block", world="w", block=block)
    remove_hook("sharpness")
    shot = snapshot(recorded, "w", blocks=2)
    assert [b["metrics"] for b in shot["blocks"]] == [{"sharpness": 1.5}, {"sharpness": 2.5}]
    assert shot["gauges"]["sharpness"] == 2.5
    trace = chrome_trace(recorded)
    assert [e["args"]["value"] for e in trace["traceEvents"] if e["ph"] == "C"] == [0.5, 1.5, 2.5]


def test_hooks_run_at_the_boundary_they_wait_for(recorded: Profiler) -> None:
    seen: list[Place] = []

    def at_step(place: Place) -> dict[str, float]:
        seen.append(place)
        return {}

    add_hook("steps", at_step, at="step")
    with span("denoise", world="w", block=1):
        boundary("step", step=0)
        boundary("block")
    remove_hook("steps")
    assert seen == [Place("w", 1, 0)]


def test_a_hook_that_fails_is_taken_out_and_counted(recorded: Profiler) -> None:
    add_hook("bad", lambda place: {"x": 1 / 0})
    boundary("block", world="w", block=0)
    boundary("block", world="w", block=1)
    assert recorded.counters == {"hook failed: bad": 1}
    add_hook("bad", lambda place: {})
    with pytest.raises(ValueError, match="'bad' again"):
        add_hook("bad", lambda place: {})
    remove_hook("bad")


def test_a_snapshot_shows_one_world_only(recorded: Profiler) -> None:
    for world in ("one", "two"):
        for block in range(4):
            with span("denoise", world=world, block=block), span("step", step=0):
                pass
        gauge("kv_bytes", 10.0, world=world)
    gauge("rss_bytes", 5.0)
    count("blocks", 8)
    shot = json.loads(json.dumps(snapshot(recorded, "one", blocks=3)))
    assert [b["block"] for b in shot["blocks"]] == [1, 2, 3]
    assert {s["name"] for b in shot["blocks"] for s in b["spans"]} == {"denoise", "step"}
    assert shot["totals"]["step"]["count"] == 3
    assert shot["gauges"] == {"kv_bytes": 10.0, "rss_bytes": 5.0}
    assert shot["counters"] == {"blocks": 8}
    recorded.forget("one")
    assert snapshot(recorded, "one", blocks=3)["gauges"] == {"rss_bytes": 5.0}


def test_a_trace_has_what_perfetto_needs(recorded: Profiler) -> None:
    with span("load"):
        pass
    for block in range(3):
        with span("denoise", world="w", block=block), span("step", step=1):
            pass
    with span("denoise", world="other", block=0):
        pass
    trace = json.loads(json.dumps(chrome_trace(recorded, "w", blocks=1)))
    events = trace["traceEvents"]
    complete = [e for e in events if e["ph"] == "X"]
    assert {e["name"] for e in complete} == {"load", "denoise", "step"}
    assert len(complete) == 3
    assert all(e["dur"] >= 0 and e["ts"] >= 0 for e in complete)
    assert all(isinstance(e["pid"], int) and isinstance(e["tid"], int) for e in complete)
    assert {e["args"]["name"] for e in events if e["name"] == "thread_name"} == {"MainThread"}
    assert [e["args"] for e in complete if e["name"] == "step"] == [{"world": "w", "block": 2, "step": 1}]


class Event:
    """A device event whose queue the test moves on by hand."""

    reached = 0.0
    made = 0

    def record(self) -> None:
        Event.made += 1
        self.at_ms = 10.0 * Event.made

    def query(self) -> bool:
        return self.at_ms <= Event.reached

    def elapsed_time(self, end_event: Event, /) -> float:
        return end_event.at_ms - self.at_ms


def test_device_times_are_read_when_the_device_has_got_there() -> None:
    own = Profiler(device_event=Event)
    profiler.enable(own)
    with span("denoise", world="w", block=0):
        pass
    profiler.disable()
    assert "device_ms" not in snapshot(own, "w", 1)["blocks"][0]["spans"][0]
    Event.reached = 100.0
    assert snapshot(own, "w", 1)["blocks"][0]["spans"][0]["device_ms"] == 10.0
