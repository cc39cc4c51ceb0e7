"""The contract between a video and the numbers taken from it, and the two sets that fulfil it.

`classic` needs no weights and runs anywhere; `published` is the set of the papers and needs weights. Their numbers
mean different things: every result names its set, and no table mixes them.
"""

import importlib
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from engine.lvbench.video import VideoFrame

Dimension = Literal["clarity", "motion", "aesthetic", "background", "subject"]
DIMENSIONS: tuple[Dimension, ...] = get_args(Dimension)
MeasureSet = Literal["classic", "published"]
VBENCH = ("subject_consistency", "background_consistency", "motion_smoothness", "aesthetic_quality", "imaging_quality")


TINY = 1e-9


class MeasuresUnavailable(RuntimeError):
    """A set of measures cannot run here: a package or a weight file is missing. The message says which and what to
    do.
    """


@dataclass(frozen=True)
class Scores:
    """`curves` holds one quality per part (N,), higher is better; `vbench` the five whole-video numbers; `notes` what
    to know.
    """

    curves: dict[Dimension, NDArray[np.float64]]
    vbench: dict[str, float]
    notes: list[str] = field(default_factory=list)


class Measures(Protocol):
    """Judges one video, fed frame by frame in order; holds nothing that grows with the video."""

    @property
    def name(self) -> MeasureSet: ...

    def observe(self, part: int, frame: VideoFrame, *, sampled: bool) -> None:
        """Takes the next frame of `part`. Slow measures look at `sampled` frames only, about 16 a part."""

    def finish(self) -> Scores:
        """The scores; every part must have had at least three frames."""


def measures(name: MeasureSet, parts: int, weights_dir: Path | None = None) -> Measures:
    """A fresh set for one video. Raises `MeasuresUnavailable`."""
    judge: Measures = measures_module(name).create(parts, weights_dir)
    return judge


def measures_module(name: MeasureSet) -> ModuleType:
    """The module of a set. Raises `MeasuresUnavailable`."""
    try:
        return importlib.import_module(f"engine.lvbench.{name}")
    except ModuleNotFoundError as error:
        raise MeasuresUnavailable(
            f"{name} measures: expected the package {error.name}, got none; pip install 'inferix-live[lvbench]'"
        ) from error


class PartMeans:
    """A running weighted mean per part."""

    def __init__(self, parts: int) -> None:
        self._sums = np.zeros(parts)
        self._weights = np.zeros(parts)

    def add(self, part: int, value: float, weight: float = 1.0) -> None:
        self._sums[part] += weight * value
        self._weights[part] += weight

    def curve(self) -> NDArray[np.float64]:
        """(N,) means; a part that got nothing has the value of the part before it."""
        values = self._sums / np.maximum(self._weights, TINY)
        for part in range(1, len(values)):
            if self._weights[part] == 0:
                values[part] = values[part - 1]
        return values

    def mean(self) -> float:
        return float(self._sums.sum() / max(TINY, self._weights.sum()))
