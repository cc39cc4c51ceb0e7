"""A moving test picture: a small parallax landscape whose light follows the prompt and whose camera follows the keys.

It stands in for a world in the tests of the page. It knows nothing of models, sessions or the network.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Picture = NDArray[np.uint8]
Floats = NDArray[np.float32]

WIDTH, HEIGHT, FPS = 256, 144, 16
PERIOD = 1024  # pixels after which a layer repeats


@dataclass(frozen=True)
class Light:
    """Colours of one time of day, from the sky's top to the ground."""

    top: tuple[int, int, int]
    low: tuple[int, int, int]
    far: tuple[int, int, int]
    near: tuple[int, int, int]
    ground: tuple[int, int, int]


LIGHTS = {
    "day": Light((84, 150, 214), (196, 224, 238), (142, 172, 190), (60, 108, 92), (196, 178, 128)),
    "sunset": Light((72, 52, 104), (246, 158, 96), (150, 88, 96), (74, 50, 66), (98, 60, 58)),
    "night": Light((8, 12, 34), (36, 52, 92), (28, 40, 70), (12, 22, 38), (20, 26, 42)),
    "storm": Light((46, 54, 66), (112, 122, 130), (78, 88, 96), (36, 50, 52), (70, 70, 66)),
    "snow": Light((150, 172, 196), (226, 234, 240), (190, 204, 218), (120, 148, 160), (238, 242, 246)),
}


class Landscape:
    """The state of the test world: where the camera is and what light it is under."""

    def __init__(self, seed: int = 0) -> None:
        self.camera_px = float(seed * 97 % PERIOD)
        self.held: frozenset[str] = frozenset()
        self._light = LIGHTS["day"]
        self._colours = _colours(self._light)
        self._frame = 0
        rng = np.random.default_rng(seed)
        self._far = _ridge(rng, base=78, height=26, waves=5)
        self._near = _trees(rng, base=100)
        self._stars = rng.integers(0, (HEIGHT // 2, WIDTH), size=(60, 2))

    def say(self, prompt: str) -> tuple[str, ...]:
        """Turn towards the light the prompt names; return the words that named one."""
        words = {"night": "night", "dark": "night", "sunset": "sunset", "evening": "sunset", "storm": "storm"}
        words |= {
            "thunderstorm": "storm",
            "rain": "storm",
            "snow": "snow",
            "winter": "snow",
            "day": "day",
            "sunny": "day",
        }
        known = tuple(word for word in prompt.lower().replace(",", " ").split() if word in words)
        if known:
            self._light = LIGHTS[words[known[-1]]]
        return known

    def next_frame(self) -> Picture:
        """One picture `# (HEIGHT, WIDTH, 3)`, RGB; moves the world on by one frame."""
        self._frame += 1
        self._colours += (_colours(self._light) - self._colours) * 0.12
        self.camera_px += 0.5 + 4.0 * (("right" in self.held) - ("left" in self.held))
        picture = self._sky()
        self._paint(picture, self._far, 2, 0.25)
        self._paint(picture, self._near, 3, 0.6)
        picture[118:] = self._colours[4] * (1.0 - 0.12 * np.linspace(0, 1, HEIGHT - 118)[:, None, None])
        self._walker(picture)
        return np.clip(picture, 0, 255).astype(np.uint8)

    def _sky(self) -> Floats:
        down = np.linspace(0, 1, HEIGHT, dtype=np.float32)[:, None, None] ** 0.8
        picture = np.repeat(self._colours[0] * (1 - down) + self._colours[1] * down, WIDTH, axis=1)
        darkness = max(0.0, 1.0 - float(self._colours[0].mean()) / 60)
        for y, x in self._stars:
            picture[y, x] += 150 * darkness * (0.6 + 0.4 * math.sin(self._frame * 0.3 + x))
        rows, columns = np.mgrid[0:HEIGHT, 0:WIDTH]
        sun = (rows - 44) ** 2 + (columns - 190) ** 2 < 13**2
        picture[sun] = picture[sun] * 0.25 + np.array([255, 236, 190], np.float32) * 0.75
        return picture

    def _paint(self, picture: Floats, tops: NDArray[np.int64], colour: int, parallax: float) -> None:
        seen = np.roll(tops, -int(self.camera_px * parallax))[:WIDTH]
        picture[np.arange(HEIGHT)[:, None] >= seen[None, :]] = self._colours[colour]

    def _walker(self, picture: Floats) -> None:
        stride = int(3 * math.sin(self._frame * 0.7))
        picture[104:116, 125:130] = (206, 84, 60)
        picture[99:104, 125:130] = (238, 200, 168)
        picture[116:122, 125 - stride : 127 - stride] = picture[116:122, 128 + stride : 130 + stride] = (38, 40, 52)


def _colours(light: Light) -> Floats:
    return np.array([light.top, light.low, light.far, light.near, light.ground], np.float32)


def _ridge(rng: np.random.Generator, base: int, height: int, waves: int) -> NDArray[np.int64]:
    angle = np.arange(PERIOD) * (2 * math.pi / PERIOD)
    shape = sum(np.sin(angle * (k + 1) * 2 + rng.uniform(0, 6.28)) / (k + 1) for k in range(waves))
    return (base - height * (np.asarray(shape) + 1) / 2).astype(np.int64)


def _trees(rng: np.random.Generator, base: int) -> NDArray[np.int64]:
    tops = np.full(PERIOD, base + 8)
    for centre in rng.integers(0, PERIOD, size=60):
        tall, half = int(rng.integers(14, 38)), int(rng.integers(5, 10))
        for dx in range(-half, half + 1):
            top = base + 8 - int(tall * (1 - abs(dx) / half))
            tops[(centre + dx) % PERIOD] = min(tops[(centre + dx) % PERIOD], top)
    return tops
