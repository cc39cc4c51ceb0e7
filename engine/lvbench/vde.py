"""Video Drift Error: how far the quality of a long video moves away from that of its first part.

    VDE = sum over i = 2..N of  w_i * |m_i - m_1| / m_1        w_i = N - i + 1  (linear)  or  log(N - i + 1)  (log)

The raw sum is what published tables hold; it grows with N. The weighted mean (the sum divided by the sum of the
weights) can be compared between different N. Early parts weigh more: a world that breaks in its second part is worse
than one that breaks in its last.

Knows only numbers: nothing of videos or of what was measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

WeightScheme = Literal["linear", "log"]
Floats = NDArray[np.float64]


class DriftUndefined(ValueError):
    """The formula has no value for this series."""


@dataclass(frozen=True)
class Drift:
    """One dimension's drift: `raw` is the published sum, `mean` the weighted mean (both without unit, 0 = no drift)."""

    raw: float
    mean: float


def part_of(index: int, frames: int, parts: int) -> int:
    """The part (0-based) that frame `index` of `frames` belongs to; parts differ by at most one frame in length."""
    return index * parts // frames


def part_weights(parts: int, scheme: WeightScheme = "linear") -> Floats:
    """The weights of parts 2..N, shape (N - 1,)."""
    fewest = 2 if scheme == "linear" else 3
    if scheme not in get_args(WeightScheme):
        raise DriftUndefined(f"weights: expected linear or log, got {scheme!r}")
    if parts < fewest:
        raise DriftUndefined(f"{scheme} weights: expected at least {fewest} parts, got {parts}")
    remaining = np.arange(parts - 1, 0, -1, dtype=np.float64)  # N - i + 1 for i = 2..N
    return remaining if scheme == "linear" else np.log(remaining)


def drift(qualities: Sequence[float] | Floats, scheme: WeightScheme = "linear") -> Drift:
    """The drift of a series of part qualities m_1..m_N, shape (N,)."""
    series = np.asarray(qualities, dtype=np.float64)
    if series.ndim != 1:
        raise DriftUndefined(f"qualities: expected one number per part, got an array of shape {series.shape}")
    weights = part_weights(len(series), scheme)
    if not np.isfinite(series).all():
        raise DriftUndefined(f"qualities: expected finite numbers, got {series.tolist()}")
    if series[0] == 0.0:
        raise DriftUndefined(
            "quality of the first part: expected other than 0, got 0; drift relative to it has no value"
        )
    raw = float(weights @ np.abs(series[1:] - series[0]) / abs(series[0]))
    return Drift(raw=raw, mean=raw / float(weights.sum()))
