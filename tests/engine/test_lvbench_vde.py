import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.lvbench.judge import is_sampled
from engine.lvbench.vde import DriftUndefined, drift, part_of, part_weights


def test_a_constant_quality_does_not_drift() -> None:
    assert drift([0.7] * 10).raw == 0.0
    assert drift([0.7] * 10).mean == 0.0


def test_linear_decay_has_the_closed_form() -> None:
    parts, loss = 10, 0.03
    found = drift([1.0 - loss * i for i in range(parts)])
    # sum over k = 1..N-1 of (N - k) * loss * k
    assert found.raw == pytest.approx(loss * (parts - 1) * parts * (parts + 1) / 6)
    assert found.mean == pytest.approx(loss * (parts + 1) / 3)


def test_early_parts_weigh_more() -> None:
    early, late = [1.0, 0.5, 1.0, 1.0], [1.0, 1.0, 1.0, 0.5]
    assert drift(early).raw == pytest.approx(3 * 0.5)
    assert drift(late).raw == pytest.approx(1 * 0.5)


def test_logarithmic_weights() -> None:
    np.testing.assert_allclose(part_weights(4, "log"), [math.log(3), math.log(2), 0.0])
    found = drift([2.0, 1.0, 3.0, 9.0], "log")
    assert found.raw == pytest.approx(0.5 * math.log(3) + 0.5 * math.log(2))
    assert found.mean == pytest.approx(0.5)


def test_a_rise_drifts_as_much_as_a_fall() -> None:
    assert drift([1.0, 1.25, 1.5]) == drift([1.0, 0.75, 0.5])


@given(st.lists(st.floats(0.1, 10.0), min_size=2, max_size=30), st.floats(0.01, 100.0))
def test_drift_has_no_unit(series: list[float], factor: float) -> None:
    scaled = drift([factor * value for value in series])
    assert scaled.raw == pytest.approx(drift(series).raw, abs=1e-9, rel=1e-9)
    assert 0.0 <= scaled.mean <= scaled.raw + 1e-9


def test_the_mean_can_be_compared_between_numbers_of_parts() -> None:
    found = [drift([1.0] + [0.8] * (parts - 1)).mean for parts in (2, 5, 20)]
    assert found == pytest.approx([0.2, 0.2, 0.2])


@pytest.mark.parametrize(
    ("series", "scheme", "reason"),
    [
        ([0.0, 1.0], "linear", "expected other than 0, got 0"),
        ([1.0], "linear", "expected at least 2 parts, got 1"),
        ([1.0, 1.0], "log", "expected at least 3 parts, got 2"),
        ([1.0, math.nan], "linear", "expected finite numbers"),
        ([1.0, 1.0], "square", "expected linear or log, got 'square'"),
    ],
)
def test_what_has_no_value_is_refused(series: list[float], scheme: str, reason: str) -> None:
    with pytest.raises(DriftUndefined, match=reason):
        drift(series, scheme)  # type: ignore[arg-type]


@given(st.integers(1, 40), st.integers(0, 500))
def test_parts_are_equal_in_frames(parts: int, extra: int) -> None:
    frames = parts + extra
    lengths = np.bincount([part_of(i, frames, parts) for i in range(frames)], minlength=parts)
    assert lengths.sum() == frames and lengths.max() - lengths.min() <= 1


@given(st.integers(1, 300), st.integers(1, 16))
def test_samples_are_as_many_as_asked_for(length: int, samples: int) -> None:
    assert sum(is_sampled(i, length, samples) for i in range(length)) == min(length, samples)
