"""Each phase of a block has its span, each span its world and block, and what was moved and chosen is told beside."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from engine import profiler
from engine.accelerator import Gauges, activities, annotation, device_event
from engine.encoder import VideoEncoder
from engine.generator import Generator
from engine.models import presets
from engine.profiler import Place, Profiler, Span, span
from engine.protocol import BlockDone, Packet, Profile, PromptChange, Shutdown, Stats, Steer, WantProfile
from engine.trace import chrome_trace, snapshot
from tests import toy_preset
from tests.engine_process import EngineThread
from tests.toy_model import ToyModel, toy_world


@pytest.fixture
def recorded() -> Iterator[Profiler]:
    own = Profiler()
    profiler.enable(own)
    yield own
    profiler.disable()


def made(kv: str, blocks: int) -> dict[str, int]:
    """Blocks of a toy world; the bytes it held by tier at the end."""
    model = ToyModel()
    world, generator = toy_world(model, kv), Generator(model)
    for block in range(blocks):
        with span("denoise", world="w", block=block):
            generator.next_block(world)
    held = world.caches[0].bytes_by_tier()
    world.close()
    return held


def by_name(spans: list[Span]) -> dict[str, list[Place]]:
    found = defaultdict(list)
    for s in spans:
        found[s.name].append(s.place)
    return found


def test_denoising_is_told_apart_by_phase_and_step(recorded: Profiler) -> None:
    made("window=6", 3)
    spans = by_name(list(recorded.spans))
    assert {"encode prompt", "condition", "step", "clean pass", "cache write", "denoise"} <= set(spans)
    assert spans["encode prompt"] == [Place("w", 0)]
    assert spans["step"] == [Place("w", block, step) for block in range(3) for step in range(2)]
    assert spans["clean pass"] == spans["cache write"] == [Place("w", block) for block in range(3)]


def test_pages_that_move_have_their_spans_and_bytes(recorded: Profiler) -> None:
    held = made("window=4 topk=1 offload=host", 5)
    spans = by_name(list(recorded.spans))
    assert all(place.world == "w" and place.block is not None for place in spans["gather"] + spans["offload"])
    assert all(place.step == 0 for place in spans["gather"]), "the past is brought in once, by the first step"
    counters = recorded.counters
    assert counters["kv_copied_bytes"] > 0 and counters["kv_gathered_bytes"] > 0
    assert counters["kv_offloaded_bytes"] == held["host"] > 0, "each page goes once and stays"
    last = snapshot(recorded, "w", 1)["blocks"][0]["metrics"]
    assert 0 < last["kv_offloaded_bytes"] <= counters["kv_offloaded_bytes"]
    each = [s.value for s in recorded.samples if s.name == "kv_gathered_bytes"]
    assert sum(each) == counters["kv_gathered_bytes"] and len(each) == 5


def test_a_world_that_moves_nothing_says_so(recorded: Profiler) -> None:
    made("window=6", 4)
    assert recorded.counters["kv_offloaded_bytes"] == 0


def test_colour_is_a_phase_of_its_own_inside_encoding(recorded: Profiler) -> None:
    with span("encode", world="w", block=3):
        VideoEncoder("libx264", 32, 16, 8.0, 100_000).encode(np.zeros((16, 32, 3), np.uint8), 0)
    assert by_name(list(recorded.spans))["colour"] == [Place("w", 3)]


def test_a_served_world_shows_every_phase_with_its_world_and_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(presets.PRESETS, "toy", toy_preset.PRESET)
    with EngineThread() as engine:
        engine.open("w")
        engine.wait_for(BlockDone, lambda e: e.block == 1)
        engine.send(Steer("s", "w", prompt=PromptChange(0.0, "b")))
        engine.wait_for(Packet, lambda p: p.block == 4)
        engine.wait_for(Stats, lambda e: e.block >= 1)
        engine.send(WantProfile("j", "w", 100), WantProfile("t", "w", 100, trace=True))
        shot = json.loads(engine.wait_for(Profile, lambda e: e.id == "j").body)
        trace = json.loads(engine.wait_for(Profile, lambda e: e.id == "t").body)
        engine.send(Shutdown())
        engine.drain()
        assert engine.ended() == 0
    phases = set(shot["totals"])
    for wanted in ("encode prompt", "step", "clean pass", "cache write", "decode", "colour", "encode", "send"):
        assert wanted in phases, wanted
    assert all(s["step"] in (0, 1) for b in shot["blocks"] for s in b["spans"] if s["name"] == "step")
    assert shot["facts"] == {"attention of toy": "sdpa"} == trace["otherData"]
    assert {
        "rss_bytes",
        "cpu_share",
        "lead_ms",
        "due_in_ms",
        "kv_device_bytes",
        "kv_host_bytes",
        "kv_copied_bytes",
    } <= set(shot["gauges"])
    assert {"blocks", "late_blocks", "kv_copied_bytes"} <= set(shot["counters"])
    complete: list[dict[str, Any]] = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    homeless = {e["name"] for e in complete if "world" not in e["args"]}
    assert homeless == {"socket write"}, "only what carries several worlds at once belongs to none"


# --------------------------------------------------------------------------------------- the vendor's tools


def test_what_spans_open_besides_themselves_depends_on_device_and_wish() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert annotation(cpu, torch_profile=False, nvtx=True) is None, "NVTX is CUDA's"
    assert annotation(cuda, torch_profile=False, nvtx=False) is None
    assert annotation(cpu, torch_profile=True, nvtx=True) is torch.profiler.record_function
    names = {annotation(cuda, torch_profile=t, nvtx=n) for t, n in ((True, True), (True, False), (False, True))}
    assert len(names) == 3 and None not in names
    assert [a.name for a in activities(cpu)] == ["CPU"] and [a.name for a in activities(cuda)] == ["CPU", "CUDA"]
    assert device_event(cpu) is None and device_event(cuda) is not None


def test_spans_open_and_close_their_annotations_also_when_they_fail() -> None:
    seen: list[str] = []

    class Note:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> None:
            seen.append(f"> {self.name}")

        def __exit__(self, *error: object) -> None:
            seen.append(f"< {self.name}")

    profiler.enable(Profiler(annotate=Note))
    try:
        with pytest.raises(KeyError), span("outer"), span("inner"):
            raise KeyError
    finally:
        profiler.disable()
    assert seen == ["> outer", "> inner", "< inner", "< outer"]


def test_a_cpu_has_no_memory_of_its_own_and_a_driver_that_cannot_tell_is_asked_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert Gauges("cpu").read() == {}
    asked: list[object] = []

    def utilization(device: torch.device) -> int:
        asked.append(device)
        raise ModuleNotFoundError("pynvml")

    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 10)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 20)
    monkeypatch.setattr(torch.cuda, "utilization", utilization)
    gauges = Gauges("cuda")
    for _ in range(2):
        assert gauges.read() == {"device_allocated_bytes": 10.0, "device_reserved_bytes": 20.0}
    assert len(asked) == 1
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 50)
    assert Gauges("cuda").read()["device_share"] == 0.5


def test_facts_are_in_the_trace_beside_the_events(recorded: Profiler) -> None:
    profiler.fact("attention", "sdpa")
    assert chrome_trace(recorded)["otherData"] == {"attention": "sdpa"}
    profiler.disable()
    profiler.fact("attention", "nobody listens")
    assert recorded.facts == {"attention": "sdpa"}
