"""Running worlds have drift meters: on a thread of their own, within their share of a core, and seen in Stats."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine import drift
from engine.decoder import Pictures
from engine.drift import EVERY_S, SHARE, DriftMeters, thumbnails
from engine.generator import Block
from engine.lvbench.live import WINDOW_BURSTS
from engine.models import presets
from engine.protocol import PromptChange, Shutdown, Stats, Steer
from tests import toy_preset
from tests.engine_process import EngineThread
from tests.toy_model import ToyConditioning, ToyModel, toy_world

WAIT_S = 30.0


def landscape(at: int, dim: float = 1.0) -> Pictures:
    """Four pictures of a camera that pans over a fixed pattern of soft squares."""
    rng = np.random.default_rng(3)
    wide = rng.integers(0, 255, (16, 48, 3)).astype(np.uint8).repeat(10, 0).repeat(10, 1)
    views = [wide[:, at + 2 * i : at + 2 * i + 240] for i in range(4)]
    return np.asarray(np.stack(views) * dim, np.uint8)


def block(index: int, began: bool = False) -> Block:
    world = toy_world(ToyModel())
    conditioning = world.model.condition(world.signals()[0])
    assert isinstance(conditioning, ToyConditioning)
    return Block(index, index, torch.zeros(1), conditioning, began)


class Bench:
    """Meters whose clock and costs the test sets by hand."""

    def __init__(self) -> None:
        self.now_s, self.spent_s, self.cost_s = 0.0, 0.0, 0.0
        self.looked = threading.Semaphore(0)
        self.meters = DriftMeters(lambda: self.now_s, self._spent)
        self.meters.start()

    def _spent(self) -> float:
        """Called before and after each look."""
        self.spent_s += self.cost_s
        self.looked.release()
        return self.spent_s

    def look(self, at: int, dim: float = 1.0, *, began: bool = False) -> bool:
        """Offer the next pictures when they are due; wait until they have been looked at."""
        taken = self.meters.offer("w", block(at, began), at * EVERY_S, landscape(at, dim))
        for _ in range(2 if taken else 0):
            assert self.looked.acquire(timeout=WAIT_S)
        return taken


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.meters.close()


def test_a_world_that_fades_drifts_and_one_that_stays_does_not(bench: Bench) -> None:
    for at in range(WINDOW_BURSTS + 1):
        assert not bench.meters.metrics("w"), "no reading while the reference is being taken"
        assert bench.look(at, began=at == 0)
    bench.look(WINDOW_BURSTS + 1)
    rested = bench.meters.metrics("w")
    for at in range(WINDOW_BURSTS + 2, 2 * WINDOW_BURSTS + 3):
        bench.look(at, dim=0.15)
    faded = bench.meters.metrics("w")
    assert set(faded) == {"drift"} | {f"drift_{name}" for name in "clarity motion aesthetic background subject".split()}
    assert faded["drift"] > 0.3 and faded["drift_aesthetic"] > 3 * rested["drift_aesthetic"]


def test_a_new_prompt_is_a_new_reference(bench: Bench) -> None:
    for at in range(WINDOW_BURSTS + 2):
        bench.look(at)
    assert bench.meters.metrics("w")
    assert not bench.look(WINDOW_BURSTS + 2, began=True), "what is still changing is no reference"
    assert not bench.meters.metrics("w")
    for at in range(WINDOW_BURSTS + 3, 2 * WINDOW_BURSTS + 5):
        assert bench.look(at, dim=0.15)
    assert bench.meters.metrics("w")["drift_aesthetic"] < 0.3, "what it compares with is dim too"


def test_pictures_are_looked_at_every_few_seconds_only(bench: Bench) -> None:
    assert bench.look(0)
    assert not bench.meters.offer("w", block(1), 0.9 * EVERY_S, landscape(0))
    assert bench.look(1)


def test_the_thread_rests_until_it_has_kept_to_its_share_of_a_core(bench: Bench) -> None:
    bench.cost_s = 1.0
    assert bench.look(0)
    bench.meters.close()  # the thread has noted by now what it spent
    while not bench.meters.offer("other", block(0), 0.0, landscape(0)):
        bench.now_s += 0.5
    assert 1.0 / SHARE <= bench.now_s <= 1.0 / SHARE + 0.5


def test_pictures_too_small_to_judge_get_no_meter_and_are_not_looked_at_again(bench: Bench) -> None:
    tiny = np.zeros((4, 16, 24, 3), np.uint8)
    assert bench.meters.offer("w", block(0), 0.0, tiny)
    for _ in range(2):
        assert bench.looked.acquire(timeout=WAIT_S)
    assert not bench.meters.offer("w", block(1), 10 * EVERY_S, tiny) and not bench.meters.metrics("w")
    assert not bench.meters.offer("w", block(1), 10 * EVERY_S, tiny[:2]), "two pictures show no motion"


def test_a_world_that_is_gone_is_forgotten_and_the_thread_ends_with_its_owner() -> None:
    threads = threading.active_count()
    bench = Bench()
    for at in range(WINDOW_BURSTS + 2):
        bench.look(at)
    assert bench.meters.metrics("w")
    bench.meters.forget("w")
    assert not bench.meters.metrics("w")
    bench.meters.close()
    assert threading.active_count() == threads


@pytest.mark.parametrize(
    ("size", "small"), [((144, 256), (90, 160)), ((480, 832), (90, 156)), ((90, 160), (90, 160)), ((40, 30), (40, 30))]
)
def test_thumbnails_keep_the_shape_and_the_mean_of_the_picture(size: tuple[int, int], small: tuple[int, int]) -> None:
    pictures = np.random.default_rng(0).integers(0, 255, (3, *size, 3)).astype(np.uint8)
    made = thumbnails(pictures)
    assert made.shape == (3, *small, 3) and made.dtype == np.uint8
    assert abs(float(made.mean()) - float(pictures.mean())) < 1.0


def test_a_served_world_tells_its_drift_in_stats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toy_preset, "SIZE", (32, 48))
    monkeypatch.setitem(presets.PRESETS, "toy", replace(toy_preset.PRESET, width=48, height=32))
    monkeypatch.setattr(drift, "EVERY_S", 0.1)
    monkeypatch.setattr(drift, "SETTLE_S", 0.5)
    monkeypatch.setattr(drift, "SHARE", 1.0)
    with EngineThread(profile=False) as engine:
        engine.open("w")
        stats = engine.wait_for(Stats, lambda e: "drift" in e.metrics)
        assert 0.0 <= stats.metrics["drift"] and "drift_clarity" in stats.metrics
        mark = len(engine.events)
        engine.send(Steer("s", "w", prompt=PromptChange(0.0, "b")))
        engine.wait_for(Stats, lambda e: "drift" not in e.metrics, after=mark)
        engine.send(Shutdown())
        engine.drain()
        assert engine.ended() == 0
