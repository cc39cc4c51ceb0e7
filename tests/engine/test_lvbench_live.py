import functools
import subprocess
import sys
from dataclasses import asdict

import cv2
import numpy as np
import pytest

from engine.lvbench.faults import Fault, clip
from engine.lvbench.live import WINDOW_BURSTS, LiveDrift, LiveReading, ThumbnailsWrong
from engine.lvbench.measures import DIMENSIONS, Dimension
from engine.lvbench.pixels import Pixels

FRAMES, EVERY = 120, 4


@functools.cache
def thumbnails(fault: Fault) -> list[Pixels]:
    return [
        np.asarray(cv2.resize(picture, (160, 90), interpolation=cv2.INTER_AREA), dtype=np.uint8)
        for picture in clip(fault, FRAMES)
    ]


def readings(fault: Fault) -> list[LiveReading]:
    pictures, meter = thumbnails(fault), LiveDrift()
    found = [meter.observe(pictures[i - 1 : i + 2]) for i in range(1, FRAMES - 1, EVERY)]
    assert found[:WINDOW_BURSTS] == [None] * WINDOW_BURSTS
    return [reading for reading in found if reading is not None]


def mean_of(found: list[LiveReading]) -> dict[Dimension, float]:
    each = [asdict(reading) for reading in found]
    return {name: float(np.mean([reading[name] for reading in each])) for name in DIMENSIONS}


@pytest.mark.parametrize(
    ("fault", "own"), [("blur", "clarity"), ("stutter", "motion"), ("cast", "aesthetic"), ("morph", "subject")]
)
def test_the_meter_shows_most_where_the_fault_is(fault: Fault, own: Dimension) -> None:
    mean = mean_of(readings(fault)[-12:])
    assert mean[own] > 0.12
    assert mean[own] > 1.5 * max(value for name, value in mean.items() if name != own), mean


def test_the_meter_sees_that_the_place_has_changed() -> None:
    pictures, meter = thumbnails("none"), LiveDrift()
    elsewhere = thumbnails("slide")[-20:]
    for i in range(1, 40, EVERY):
        meter.observe(pictures[i - 1 : i + 2])
    for i in range(1, 18, 4):
        last = meter.observe(elsewhere[i - 1 : i + 2])
    assert last is not None and last.background > 0.1


def test_the_meter_rests_on_a_clean_world() -> None:
    mean = mean_of(readings("none"))
    assert max(mean.values()) < 0.1, mean


def test_a_reset_takes_a_new_anchor() -> None:
    pictures, meter = thumbnails("cast"), LiveDrift()
    for i in range(1, FRAMES - 1, EVERY):
        meter.observe(pictures[i - 1 : i + 2])
    meter.reset()
    for _ in range(WINDOW_BURSTS):
        assert meter.observe(pictures[-3:]) is None
    reading = meter.observe(pictures[-3:])
    assert reading is not None and max(asdict(reading).values()) < 1e-6


def test_another_size_starts_anew() -> None:
    meter, small = LiveDrift(), [picture[:60, :80] for picture in thumbnails("none")[:3]]
    for _ in range(WINDOW_BURSTS):
        assert meter.observe(thumbnails("none")[:3]) is None
    assert meter.observe(small) is None


def test_metrics_carry_the_dimensions_and_the_largest() -> None:
    metrics = LiveReading(0.1, 0.0, 0.3, 0.0, 0.2).as_metrics()
    assert metrics == {
        "drift": 0.3,
        **{f"drift_{name}": value for name, value in zip(DIMENSIONS, (0.1, 0.0, 0.3, 0.0, 0.2), strict=True)},
    }


@pytest.mark.parametrize(
    "shapes", [[(90, 160, 3)] * 2, [(90, 160)] * 3, [(20, 20, 3)] * 3, [(90, 160, 3), (90, 160, 3), (80, 160, 3)]]
)
def test_wrong_bursts_are_refused(shapes: list[tuple[int, ...]]) -> None:
    with pytest.raises(ThumbnailsWrong, match="expected"):
        LiveDrift().observe([np.zeros(shape, np.uint8) for shape in shapes])


def test_the_meter_needs_numpy_alone() -> None:
    code = "import sys, engine.lvbench.live; print(sorted({'cv2', 'torch', 'av'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
