"""Renders a frame of the little planet: exactly what `tiny-world` should show for a camera, a clock and a light.

A frame is a pure function of (light vector, camera, clock, facing). Besides the picture it says what each pixel
belongs to and where rain and snow are, which teaches the decoder to move planes between keyframes. Needed for
training and evaluation only; a running world never calls it. Coordinates are pixels at 256x144.
"""

import math
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import numpy.typing as npt
from numba import njit

from engine.models.tiny.planet import CLOUD_PERIOD, HEIGHT, PRECIPITATION_COLOUR, WIDTH
from engine.training import lighting as light
from engine.training.painting import Planet, paint_planet
from engine.training.shading import CLOUD, FAR, GROUND, MID, NEAR, SKY, TURN, ambient, grey, haze, put, unit
from engine.training.subjects import draw_balloon, draw_birds, draw_boat, draw_car, draw_walker

Array = npt.NDArray[np.float32]
Planes = npt.NDArray[np.uint8]

HORIZON = 84.0
SUN_X, MOON_X = 180.0, 76.0
RAIN_PERIOD = SNOW_PERIOD = 72.0
RAIN_SPEED, SNOW_SPEED = 288.0, 36.0
RAIN_SLANT = 0.22
STRIKES = (1.0, 5.25)
"""Seconds of every eight at which lightning strikes, for half a second."""

_random = np.random.default_rng(11)
STAR_MAP = (_random.random((46, 4)) * np.array([256, 62, 1, 1])).astype(np.float32)
RAIN_MAP = np.array([(i * 256 / 30 + _random.uniform(0, 6), _random.uniform(0, 72)) for i in range(30)], np.float32)
SNOW_MAP = np.array([(i * 12.8 + _random.uniform(2, 11), _random.uniform(0, 72)) for i in range(20)], np.float32)


@cache
def planet() -> Planet:
    return paint_planet()


@dataclass
class Frame:
    """A picture taken apart: `base` RGB without rain or snow, what each pixel belongs to, rain and snow cover."""

    base: Array = field(default_factory=lambda: np.zeros((HEIGHT, WIDTH, 3), np.float32))
    planes: Planes = field(default_factory=lambda: np.zeros((HEIGHT, WIDTH), np.uint8))
    rain: Array = field(default_factory=lambda: np.zeros((HEIGHT, WIDTH), np.float32))
    snow: Array = field(default_factory=lambda: np.zeros((HEIGHT, WIDTH), np.float32))

    def picture(self) -> Array:
        """RGB (144, 256, 3) in [0, 1] with rain and snow."""
        cover = np.maximum(self.rain, self.snow)[..., None]
        return np.asarray(self.base * (1 - cover) + np.array(PRECIPITATION_COLOUR) * cover, np.float32)


def render(vector: Array, camera: float, clock: float, facing: float) -> Frame:
    """The frame of a light vector with the camera at `camera` pixels and the clock at `clock` seconds."""
    frame = Frame()
    world = planet()
    draw_sky(frame.base, frame.planes, vector, STAR_MAP)
    draw_clouds(frame.base, frame.planes, vector, world.clouds, float(camera), float(clock))
    draw_flash(frame.base, vector, float(clock))
    draw_sea(frame.base, frame.planes, vector, float(camera), float(clock))
    if vector[light.BOAT] > 0:
        draw_boat(frame.base, frame.planes, vector, float(clock), float(facing))
    for index, texture in enumerate(world.layers):
        draw_layer(frame.base, frame.planes, vector, texture, index, float(camera))
    draw_subject(frame, vector, float(camera), float(clock), float(facing))
    draw_rain(frame.rain, vector, RAIN_MAP, float(clock))
    draw_snow(frame.snow, vector, SNOW_MAP, float(clock))
    finish(frame.base, flash_strength(vector, float(clock)))
    return frame


def draw_subject(frame: Frame, vector: Array, camera: float, clock: float, facing: float) -> None:
    if vector[light.CAR] > 0:
        draw_car(frame.base, frame.planes, vector, facing)
    if vector[light.WALKER] > 0:
        draw_walker(frame.base, frame.planes, vector, camera, facing)
    if vector[light.BALLOON] > 0:
        draw_balloon(frame.base, frame.planes, vector, clock)
    if vector[light.BIRDS] > 0:
        draw_birds(frame.base, frame.planes, vector, facing)


@njit(cache=True, fastmath=True)
def draw_sky(out, planes, state, stars):  # type: ignore[no-untyped-def]
    dim, over = 1 - state[light.DIM] * 0.75, state[light.OVERCAST]
    sun_y, moon_y = state[light.SUN_HEIGHT] * 144.0, 0.22 * 144.0
    sr, sg, sb = state[light.SUN_COLOUR], state[light.SUN_COLOUR + 1], state[light.SUN_COLOUR + 2]
    for y in range(86):
        v = min(1.0, y / HORIZON)
        lo, hi, q = light.SKY_TOP, light.SKY_MIDDLE, v / 0.55
        if v >= 0.55:
            lo, hi, q = light.SKY_MIDDLE, light.SKY_LOW, (v - 0.55) / 0.45
        r0 = state[lo] * (1 - q) + state[hi] * q
        g0 = state[lo + 1] * (1 - q) + state[hi + 1] * q
        b0 = state[lo + 2] * (1 - q) + state[hi + 2] * q
        r0, g0, b0 = grey(r0, g0, b0, over * 0.8, dim)
        for x in range(256):
            planes[y, x] = SKY
            out[y, x, 0], out[y, x, 1], out[y, x, 2] = r0, g0, b0
            if state[light.SUN] > 0.01:
                d = math.sqrt((x - SUN_X) ** 2 + (y - sun_y) ** 2)
                glow = state[light.SUN] * (1 - 0.85 * over) * (0.50 * math.exp(-d / 24.0) + 0.25 * math.exp(-d / 75.0))
                put(out, y, x, sr, sg, sb, glow)
                disc = unit((12.0 - d) * 0.8) * state[light.SUN] * (1 - over)
                put(out, y, x, 1.0, 0.5 + 0.5 * sg, 0.3 + 0.7 * sb, disc)
            if state[light.MOON] > 0.01:
                d = math.sqrt((x - MOON_X) ** 2 + (y - moon_y) ** 2)
                bite = math.sqrt((x - MOON_X - 5) ** 2 + (y - moon_y + 2.5) ** 2)
                put(out, y, x, 0.75, 0.82, 0.95, state[light.MOON] * (1 - 0.8 * over) * 0.32 * math.exp(-d / 22.0))
                disc = unit((11.0 - d) * 0.9) * unit((bite - 9.0) * 0.9) * state[light.MOON] * (1 - over)
                put(out, y, x, 0.97, 0.97, 0.90, disc)
    if state[light.STARS] > 0.02:
        draw_stars(out, state[light.STARS] * (1 - over), stars)


@njit(cache=True, fastmath=True)
def draw_stars(out, strength, stars):  # type: ignore[no-untyped-def]
    for i in range(stars.shape[0]):
        px, py, radius = stars[i, 0], stars[i, 1], 0.8 + 0.7 * stars[i, 2]
        shine = strength * (1 - py / 105.0) * 0.9
        for y in range(max(0, int(py) - 2), min(86, int(py) + 4)):
            for x in range(max(0, int(px) - 2), min(256, int(px) + 4)):
                a = unit(1.25 - ((x - px) ** 2 + (y - py) ** 2) / (radius * radius))
                put(out, y, x, 1.0, 1.0, 1.0, a * shine)


@njit(cache=True, fastmath=True)
def draw_clouds(out, planes, state, field_, camera, clock):  # type: ignore[no-untyped-def]
    ar, ag, ab = ambient(state)
    hr, hg, hb = haze(state)
    cr, cg, cb = state[light.CLOUD_COLOUR], state[light.CLOUD_COLOUR + 1], state[light.CLOUD_COLOUR + 2]
    offset, threshold = (0.125 * camera + 8.0 * clock) % CLOUD_PERIOD, 0.86 - 0.60 * state[light.CLOUDS]
    for x in range(256):
        u = (x + offset) % CLOUD_PERIOD
        i = int(u)
        f, j = u - i, (i + 1) % CLOUD_PERIOD
        for y in range(86):
            c = field_[y, i] * (1 - f) + field_[y, j] * f
            a = unit((c - threshold) * 5.0) * unit((1.06 - y / HORIZON) * 2.4) * 0.92
            if a > 0:
                lit = 0.28 * unit(1.0 - (c - threshold) * 1.1)
                r, g, b = (cr * 0.72 + lit) * (ar * 0.75 + 0.25 * hr), cg * 0.72 + lit, cb * 0.72 + lit
                put(out, y, x, r, g * (ag * 0.75 + 0.25 * hg), b * (ab * 0.75 + 0.25 * hb), a)
                if a > 0.3:
                    planes[y, x] = CLOUD


@njit(inline="always")
def flash_place(clock):  # type: ignore[no-untyped-def]
    """x of the bolt and how bright it still is; two strikes in eight seconds."""
    phase = clock % 8.0
    if STRIKES[0] <= phase < STRIKES[0] + 0.5:
        return 178.0, 1 - (phase - STRIKES[0]) * 2
    if STRIKES[1] <= phase < STRIKES[1] + 0.5:
        return 70.0, 1 - (phase - STRIKES[1]) * 2
    return 0.0, 0.0


@njit(cache=True)
def flash_strength(state, clock):  # type: ignore[no-untyped-def]
    return state[light.LIGHTNING] * flash_place(clock)[1]


@njit(cache=True, fastmath=True)
def draw_flash(out, state, clock):  # type: ignore[no-untyped-def]
    bolt_x, strength = flash_place(clock)
    strength = strength * state[light.LIGHTNING]
    if strength <= 0:
        return
    for y in range(86):
        centre = bolt_x + 7.0 * math.sin(y * 0.21 + bolt_x) + 4.0 * math.sin(y * 0.55 + 1.3 * bolt_x)
        for x in range(256):
            put(out, y, x, 0.85, 0.87, 1.0, strength * 0.35)
            d = abs(x - centre)
            if y < 84:
                put(out, y, x, 1.0, 1.0, 1.0, unit(unit(2.6 - d) * strength + 0.4 * math.exp(-d / 6.0) * strength))


@njit(cache=True, fastmath=True)
def draw_sea(out, planes, state, camera, clock):  # type: ignore[no-untyped-def]
    """Water with long swells, seen where mid and near land are absent; it moves with the mid layer."""
    ar, ag, ab = ambient(state)
    hr, hg, hb = haze(state)
    sr, sg, sb = state[light.SUN_COLOUR], state[light.SUN_COLOUR + 1], state[light.SUN_COLOUR + 2]
    source = SUN_X if state[light.SUN] > 0.5 else MOON_X
    shine = max(state[light.SUN], state[light.MOON] * 0.7) * (1 - state[light.OVERCAST])
    for y in range(84, 144):
        depth = (y - 83.5) / 60.0
        for x in range(256):
            u = TURN * (x - 128 + 0.3125 * camera) / 1280.0
            bend = 1.3 * math.sin(16 * u + 0.9 * y) + 0.7 * math.sin(10 * u)
            swell = math.sin((1.9 - 1.1 * depth) * (y - 84) + bend - TURN * clock / 4.0)
            m = unit(0.56 - 0.62 * depth + swell * 0.10)
            r, g, b = 0.09 * ar * (1 - m) + hr * m, 0.46 * ag * (1 - m) + hg * m, 0.64 * ab * (1 - m) + hb * m
            glitter = math.exp(-(((x - source) / (8.0 + 26.0 * depth)) ** 2)) * shine * unit(0.3 + swell * 0.7) * 0.7
            out[y, x, 0], out[y, x, 1], out[y, x, 2] = r, g, b
            put(out, y, x, sr, sg, sb, glitter)
            planes[y, x] = MID


@njit(cache=True, fastmath=True)
def draw_layer(out, planes, state, texture, index, camera):  # type: ignore[no-untyped-def]
    ar, ag, ab = ambient(state)
    hr, hg, hb = haze(state)
    period, lamps, settled = texture.shape[1], state[light.LAMPS], state[light.SETTLED] * 0.35
    hazy = min(0.95, (0.50, 0.26, 0.06, 0.0)[index] + (0.22, 0.40, 0.34, 0.12)[index] * state[light.FOG])
    first, last = (16, 0, 40, 24)[index], (88 if index == 0 else 144)
    offset = (camera * period / 4096.0 - 128.0) % period
    for x in range(256):
        u = (x + offset) % period
        i = min(int(u), period - 1)
        f, j = u - i, (i + 1) % period
        for y in range(first, last):
            a = texture[y, i, 3] * (1 - f) + texture[y, j, 3] * f
            if a > 0.003:
                r = texture[y, i, 0] * (1 - f) + texture[y, j, 0] * f
                g = texture[y, i, 1] * (1 - f) + texture[y, j, 1] * f
                b = texture[y, i, 2] * (1 - f) + texture[y, j, 2] * f
                e = (texture[y, i, 4] * (1 - f) + texture[y, j, 4] * f) * lamps * 0.95
                r = (r + (0.93 * a - r) * settled) * ar
                g = (g + (0.95 * a - g) * settled) * ag
                b = (b + (a - b) * settled) * ab
                r, g, b = r + (hr * a - r) * hazy, g + (hg * a - g) * hazy, b + (hb * a - b) * hazy
                r, g, b = r + (a - r) * e, g + (0.84 * a - g) * e, b + (0.50 * a - b) * e
                out[y, x, 0] = out[y, x, 0] * (1 - a) + r
                out[y, x, 1] = out[y, x, 1] * (1 - a) + g
                out[y, x, 2] = out[y, x, 2] * (1 - a) + b
                if a > 0.5:
                    planes[y, x] = (FAR, MID, NEAR, GROUND)[index]


@njit(cache=True, fastmath=True)
def draw_rain(cover, state, rain_map, clock):  # type: ignore[no-untyped-def]
    strength = state[light.RAIN] * 0.55
    if strength <= 0.01:
        return
    for i in range(rain_map.shape[0]):
        for k in range(-1, 3):
            top = (rain_map[i, 1] + RAIN_SPEED * clock) % RAIN_PERIOD + RAIN_PERIOD * k
            for y in range(max(0, int(top)), min(144, int(top) + 22)):
                u = (rain_map[i, 0] - y * RAIN_SLANT) % 256.0
                x = int(u)
                a = unit((y - top) / 20.0 * 1.2) * strength
                cover[y, x] = max(cover[y, x], a * (1 - (u - x)))
                if x < 255:
                    cover[y, x + 1] = max(cover[y, x + 1], a * (u - x))


@njit(cache=True, fastmath=True)
def draw_snow(cover, state, snow_map, clock):  # type: ignore[no-untyped-def]
    if state[light.SNOW] <= 0.01:
        return
    for i in range(snow_map.shape[0]):
        radius = 1.6 + 0.9 * (i % 2)
        for k in range(-1, 3):
            py, px = (snow_map[i, 1] + SNOW_SPEED * clock) % SNOW_PERIOD + SNOW_PERIOD * k, snow_map[i, 0]
            for y in range(max(0, int(py) - 4), min(144, int(py) + 5)):
                for x in range(max(0, int(px) - 4), min(256, int(px) + 5)):
                    d = math.sqrt((x - px) ** 2 + (y - py) ** 2)
                    cover[y, x] = max(cover[y, x], unit(radius + 0.5 - d) * 0.9 * state[light.SNOW])


@njit(cache=True, fastmath=True)
def finish(out, flash):  # type: ignore[no-untyped-def]
    """Brightens by lightning and darkens the corners."""
    for y in range(144):
        for x in range(256):
            corner = 1 - 0.12 * (((x / 256.0 - 0.5) ** 2 + (y / 144.0 - 0.5) ** 2) * 2)
            for c in range(3):
                out[y, x, c] = unit((out[y, x, c] + (1 - out[y, x, c]) * flash * 0.10) * corner)
