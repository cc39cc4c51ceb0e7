"""The timetable of staggered blocks: at which times blocks are denoised, how far they see, how branches are weighed.

Numbers in, numbers out; no torch. Times are float32 widened to Python's floats, because several of them lie exactly on
thresholds and it is that rounding which decides (0.3 in float32 is above 0.3). Source of the constants and formulas:
the published MAGI-1 configurations and inference program.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Pattern = Literal["8,16,16", "16,16,8"]
"""How the 12-step grid cuts a quarter of the way: which of its three steps is the long one."""

_SIXTEENTHS: dict[Pattern, tuple[int, int, int]] = {"8,16,16": (0, 2, 3), "16,16,8": (0, 1, 2)}
_INTERVALS: dict[Pattern, tuple[int, int, int]] = {"8,16,16": (2, 1, 1), "16,16,8": (1, 1, 2)}
TWELVE = 12
SHIFT = 3.0
EDGE = 1e-7  # a time this little above a threshold still counts as on it
GIVEN_REACH = 8  # blocks a given block sees where nothing else is said


class PlanError(ValueError):
    """A timetable that cannot be; the message says what was expected and what came."""


class Weights(NamedTuple):
    """Of the three branches in a block's velocity."""

    unconditional: float  # no text, no history
    history: float  # history, no text
    text: float  # both


HISTORY_ONLY = Weights(0.0, 1.0, 0.0)


@dataclass(frozen=True)
class Guided:
    """Base models: three branches, weighed by how far a block has come.

    v = (1 - p) unconditional + (p - s) history + s text, with p and s of the last range that begins before t.
    """

    starts: tuple[float, ...] = (0.0, 0.0217, 0.1, 0.3, 0.999)
    history: tuple[float, ...] = (1.5, 1.5, 1.5, 1.0, 1.0)
    text: tuple[float, ...] = (7.5, 7.5, 7.5, 0.0, 0.0)

    def __post_init__(self) -> None:
        if not len(self.starts) == len(self.history) == len(self.text) > 0 or self.starts[0] > 0:
            raise PlanError(f"guidance: expected as many scales as ranges, the first at 0; got {self}")

    def weights(self, t: float) -> Weights:
        at = max(i for i, start in enumerate(self.starts) if start - EDGE < t)
        p, s = self.history[at], self.text[at]
        return Weights(1 - p, p - s, s)


@dataclass(frozen=True)
class Distilled:
    """Distilled models: one branch, and for the oldest block, once nearly clean, some of what it is without history."""

    nearly_clean: float = 0.3
    history: float = 0.7


@dataclass(frozen=True)
class Plan:
    """How blocks of one model are denoised together.

    `reaches`: how many blocks, itself included, a block sees in each part of its way, noisiest first; none: all.
    `clean_reach`: the same for the clean pass; -1: as in the last part.
    """

    steps: int
    guidance: Guided | Distilled
    window: int = 4  # blocks in flight
    reaches: tuple[int, ...] = (5, 4, 3, 2)
    clean_reach: int = 1
    clean_t: float = 0.9999
    pattern: Pattern = "8,16,16"

    def __post_init__(self) -> None:
        if self.window < 1 or self.steps < 1 or self.steps % self.window:
            raise PlanError(f"steps: expected a multiple of the window of {self.window} blocks, got {self.steps}")
        if any(r < 1 for r in self.reaches) or len(self.reaches) > self.steps:
            raise PlanError(f"reaches: expected numbers of at least 1, one for each step at most; got {self.reaches}")
        if self.clean_reach < 1 and self.clean_reach != -1:
            raise PlanError(f"clean_reach: expected at least 1, or -1; got {self.clean_reach}")
        if self.pattern not in _INTERVALS:
            raise PlanError(f"pattern: expected one of {', '.join(_INTERVALS)}; got {self.pattern!r}")

    @property
    def steps_per_stage(self) -> int:
        return self.steps // self.window

    @cached_property
    def times(self) -> tuple[float, ...]:
        """steps + 1 times from 0 (noise) to 1 (clean): f(u^2) with f(z) = (z / 3) / (1 + (1/3 - 1) z).

        In float32, both constants rounded to it first: the last time is a little above 1.
        """
        z = self._even() ** 2
        t = z * np.float32(1 / SHIFT) / (np.float32(1) + np.float32(1 / SHIFT - 1) * z)
        return tuple(float(x) for x in t)

    def reach(self, step: int) -> int | None:
        """Blocks that a block at this step of its way sees, itself included; None: all."""
        return self.reaches[step * len(self.reaches) // self.steps] if self.reaches else None

    @property
    def reach_clean(self) -> int | None:
        """The same for a finished block's clean pass."""
        if not self.reaches:
            return None
        return self.reaches[-1] if self.clean_reach == -1 else self.clean_reach

    @property
    def reach_given(self) -> int:
        """The same for blocks that a world starts from."""
        if self.clean_reach != -1:
            return self.clean_reach
        return self.reaches[-1] if self.reaches else GIVEN_REACH

    def weights(self, t: float) -> Weights:
        return self.guidance.weights(t) if isinstance(self.guidance, Guided) else HISTORY_ONLY

    def distil(self, index: int) -> float | None:
        """The second scalar of a distilled model's time embedding at step `index` of a stage."""
        if isinstance(self.guidance, Guided):
            return None
        return 8 / self.interval(index) if self.steps == TWELVE else self.steps / 2

    def interval(self, index: int) -> int:
        """How long step `index` of a stage is, on the 12-step grid; 1 on the even ones."""
        return _INTERVALS[self.pattern][index % 3] if self.steps == TWELVE else 1

    def _even(self) -> NDArray[np.float32]:
        if self.steps != TWELVE:
            return np.arange(self.steps + 1, dtype=np.float32) / np.float32(self.steps)
        inner = [q / 4 + s / 16 for q in range(4) for s in _SIXTEENTHS[self.pattern]]
        return np.array([*inner, 1.0], dtype=np.float32)
