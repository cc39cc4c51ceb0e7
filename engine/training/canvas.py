"""A periodic strip of picture on which polygons are painted, four times finer than it is kept.

Knows nothing of what is painted.
"""

import math
from collections.abc import Sequence
from typing import TypeAlias

import cv2
import numpy as np
import numpy.typing as npt

from engine.models.tiny.planet import HEIGHT

Array: TypeAlias = npt.NDArray[np.float32]
Doubles: TypeAlias = npt.NDArray[np.float64]
Colour: TypeAlias = Sequence[float]

FINE = 4
"""Subpixels per pixel while painting."""


class Canvas:
    """A periodic strip on which shapes are painted in pixels, four times finer than it is kept."""

    def __init__(self, period: int) -> None:
        self.period = period
        self.width, self.height = period * FINE, HEIGHT * FINE
        self.colour = np.zeros((self.height, self.width, 3), np.float32)
        self.cover = np.zeros((self.height, self.width), np.float32)
        self.glow = np.zeros((self.height, self.width), np.float32)
        self.y = (np.arange(self.height) + 0.5) / FINE

    def silhouette(self, top: Doubles, colour: Doubles, shade: float, depth: float, cap: Doubles | None = None) -> None:
        """Land below `top` (y per fine column), darker downwards; white above the snow line `cap`."""
        inside = self.y[:, None] >= top[None]
        down = np.clip((self.y[:, None] - top[None]) / depth, 0, 1)
        shaded = colour[None] * (1 - shade * down[..., None])
        if cap is not None:
            white = np.clip((cap[None] - self.y[:, None]) / 2.5 + 0.5, 0, 1)[..., None]
            shaded = shaded * (1 - white) + np.array([0.95, 0.97, 1.0]) * white
        self.colour[inside] = shaded[inside]
        self.cover[inside] = 1
        self.glow[inside] = 0

    def polygon(self, points: Sequence[tuple[float, float]], colour: Colour, glow: float = 0.0) -> None:
        for offset in (-self.period, 0, self.period):
            fine = np.array([((x + offset) * FINE, y * FINE) for x, y in points])
            if fine[:, 0].max() < 0 or fine[:, 0].min() > self.width:
                continue
            corners = [np.round(fine).astype(np.int32)]
            cv2.fillPoly(self.colour, corners, tuple(float(c) for c in colour))
            cv2.fillPoly(self.cover, corners, (1.0,))
            cv2.fillPoly(self.glow, corners, (float(glow),))

    def ellipse(self, x: float, y: float, rx: float, ry: float, colour: Colour, glow: float = 0.0) -> None:
        turns = np.linspace(0, 2 * np.pi, 40)
        self.polygon([(x + rx * math.cos(a), y + ry * math.sin(a)) for a in turns], colour, glow)

    def box(self, x0: float, y0: float, x1: float, y1: float, colour: Colour, glow: float = 0.0) -> None:
        self.polygon([(x0, y0), (x1, y0), (x1, y1), (x0, y1)], colour, glow)

    def lift_off(self) -> tuple[Array, Array, Array]:
        """Takes what was painted away and hands it back, so that it can be laid over something painted later."""
        lifted = (self.colour.copy(), self.cover.copy(), self.glow.copy())
        for plane in (self.colour, self.cover, self.glow):
            plane[:] = 0
        return lifted

    def lay_over(self, lifted: tuple[Array, Array, Array], where: npt.NDArray[np.bool_]) -> None:
        self.colour[where] = lifted[0][where]
        self.cover[where] = 1
        self.glow[where] = lifted[2][where]

    def texture(self) -> Array:
        cover = self.cover[..., None]
        planes = np.concatenate([self.colour * cover, cover, self.glow[..., None] * cover], -1)
        coarse = planes.reshape(HEIGHT, FINE, self.period, FINE, 5).mean((1, 3))
        return np.ascontiguousarray(coarse).astype(np.float32)
