"""One more world is opened only where all may grow to what they were planned to."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.config import EngineConfig
from engine.loader import SpecError, load, plan
from engine.models import presets
from engine.protocol import PromptChange, WorldSpec
from engine.room import Room
from engine.scheduler import Scheduler
from tests import toy_preset

KV = "window=4 topk=1 remember=8 offload=host"


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(presets.PRESETS, "toy", toy_preset.PRESET)


def spec(kv: str) -> WorldSpec:
    return WorldSpec("toy", (PromptChange(0.0, "a"),), kv=kv)


def test_a_world_that_was_admitted_stays_within_its_plan() -> None:
    loaded = load("toy", EngineConfig(0), lambda: None)
    wanted = plan(loaded, spec(KV), None)
    world = wanted.open()
    for _ in range(12):
        loaded.generator.next_block(world)
        used = world.caches[0].bytes_by_tier()
        assert used["device"] <= wanted.cache_bytes and used["host"] <= wanted.host_bytes


@pytest.mark.parametrize(("device", "host", "said"), [(1.5, 9, "KV budget"), (9, 1.5, "host budget"), (9, 9, "")])
def test_a_world_waits_for_those_whose_memory_it_would_need(device: float, host: float, said: str) -> None:
    wanted = plan(load("toy", EngineConfig(0), lambda: None), spec(KV), None)
    room = Room(Scheduler(4, 1.0), int(device * wanted.cache_bytes), int(host * wanted.host_bytes))
    assert room.admit(wanted, []).admitted
    second = room.admit(wanted, [wanted])
    assert second.admitted is not bool(said) and second.reason.startswith(said)
    assert (second.retry_after_s > 0) is bool(said)


def test_a_world_larger_than_a_budget_is_refused_for_good() -> None:
    loaded = load("toy", EngineConfig(0), lambda: None)
    wanted = plan(loaded, spec(KV), None)
    with pytest.raises(SpecError, match="KV budget: expected a world of at most"):
        plan(loaded, spec(KV), wanted.cache_bytes - 1)
    with pytest.raises(SpecError, match=r"host budget: .* \(11 frames\)"):
        plan(loaded, spec(KV), None, wanted.host_bytes - 1)
    plan(loaded, spec(KV), wanted.cache_bytes, wanted.host_bytes)


@pytest.mark.parametrize(
    ("kv", "said"),
    [
        ("full", "expected window=N"),
        ("full offload=host", "expected window=N"),
        ("window=4 topk=2", "expected remember=N beside topk=2"),
        ("window=4 topk=2 offload=host", "expected remember=N beside topk=2"),
    ],
)
def test_a_cache_without_an_end_is_refused_and_what_would_do_is_named(kv: str, said: str) -> None:
    with pytest.raises(SpecError, match=f"{said}.*got {kv}, which keeps every frame"):
        plan(load("toy", EngineConfig(0), lambda: None), spec(kv), 1 << 40)


def test_a_model_whose_own_cache_has_no_end_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(presets.PRESETS, "toy", replace(toy_preset.PRESET, kv="full"))
    with pytest.raises(SpecError, match="expected window=N"):
        load("toy", EngineConfig(0), lambda: None)
