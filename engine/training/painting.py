"""Paints the map of the little planet once: four parallax textures and a cloud field, periodic around the ring.

Every texture has premultiplied RGB, coverage and glow (lamps, lit windows) per pixel. Knows nothing of light, weather
or camera.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.models.tiny.planet import CLOUD_PERIOD, LAYER_PERIODS
from engine.training.canvas import FINE, Array, Canvas, Colour, Doubles
from engine.training.props import (
    building,
    cabin,
    castle,
    igloo,
    lighthouse,
    pine,
    plant_alps,
    plant_beach,
    plant_desert,
    plant_forest,
    plant_snow,
    plant_street,
    pyramid,
)

Random = np.random.Generator

HORIZON = 84


@dataclass(frozen=True)
class Planet:
    """Textures (144, period, 5) of the far, mid, near and ground layers, and the cloud field (96, CLOUD_PERIOD)."""

    layers: tuple[Array, Array, Array, Array]
    clouds: Array


def paint_planet(seed: int = 7) -> Planet:
    """The map; the same for the same seed."""
    random = np.random.default_rng(seed)
    layers = (paint_far(random), paint_mid(random), paint_near(random), paint_ground(random))
    return Planet(layers, cloud_field(np.random.default_rng(3)))


def noise(random: Random, cells: int, width: int) -> Doubles:
    """Periodic value noise in [0, 1]: `cells` random values over `width` samples."""
    values = random.random(cells)
    x = np.arange(width) / width * cells
    cell = x.astype(int)
    f = x - cell
    f = f * f * (3 - 2 * f)
    return np.asarray(values[cell % cells] * (1 - f) + values[(cell + 1) % cells] * f)


def ridges(random: Random, cells: int, width: int) -> Doubles:
    return 1 - np.abs(2 * noise(random, cells, width) - 1)


def zone_weights(width: int, softness: float) -> Doubles:
    """How much each of the six places owns each column (6, width); they sum to one and meet softly."""
    x = (np.arange(width) + 0.5) / width * 6
    weights = np.zeros((6, width))
    for k in range(6):
        distance = np.abs((x - (k + 0.5) + 3) % 6 - 3)
        weights[k] = np.clip((0.5 + softness / 2 - distance) / softness, 0, 1)
    weights = weights * weights * (3 - 2 * weights)
    return np.asarray(weights / weights.sum(0))


def mix(weights: Doubles, colours: Sequence[Colour]) -> Doubles:
    return np.asarray((weights[..., None] * np.array(colours)[:, None]).sum(0))


def paint_far(random: Random) -> Array:
    canvas = Canvas(LAYER_PERIODS[0])
    n = canvas.width
    weights = zone_weights(n, 0.5)
    big = 0.6 * ridges(random, 14, n) + 0.28 * ridges(random, 34, n) + 0.12 * noise(random, 90, n)
    soft = 0.6 * noise(random, 16, n) + 0.3 * noise(random, 37, n) + 0.1 * noise(random, 90, n)
    mesas = np.clip((noise(random, 20, n) - 0.42) * 7, 0, 1) * (0.8 + 0.2 * noise(random, 40, n))
    heights = np.stack([2 + 7 * soft, 4 + 12 * soft, 10 + 16 * soft, 14 + 52 * big, 14 + 34 * big, 6 + 24 * mesas])
    colours = ((0.48, 0.62, 0.74), (0.56, 0.63, 0.74), (0.42, 0.58, 0.60), (0.48, 0.54, 0.68), (0.72, 0.79, 0.90))
    high = weights[3] + weights[4] > 0.3
    snow_line = np.where(high, HORIZON - 28 + 6 * noise(random, 60, n) + 14 * weights[4], -99.0)
    top = HORIZON + 2 - (weights * heights).sum(0)
    canvas.silhouette(top, mix(weights, (*colours, (0.80, 0.50, 0.40))), 0.10, 60, snow_line)
    return canvas.texture()


def paint_mid(random: Random) -> Array:
    canvas = Canvas(LAYER_PERIODS[1])
    n, zone = canvas.width, LAYER_PERIODS[1] / 6
    weights = zone_weights(n, 0.22)
    colours = ((0.55, 0.62, 0.52), (0.44, 0.50, 0.60), (0.24, 0.46, 0.38), (0.36, 0.45, 0.50), (0.84, 0.89, 0.97))
    hills = 0.65 * noise(random, 24, n) + 0.25 * noise(random, 60, n) + 0.1 * noise(random, 140, n)
    rock = 0.6 * ridges(random, 30, n) + 0.4 * ridges(random, 70, n)
    dunes = 0.5 + 0.5 * np.sin(np.arange(n) / n * 2 * np.pi * 26)
    heights = (-64 + 0 * hills, 10 + 4 * hills, 12 + 20 * hills, 12 + 34 * rock, 14 + 20 * hills)
    top = HORIZON + 10 - (weights * np.stack([*heights, 8 + 14 * dunes * hills + 4 * hills])).sum(0)
    for u in np.arange(2 * zone + 6, 4.9 * zone, 7.5):
        place, wood = int(u / zone), random.random()
        if place == 2 or (place == 3 and wood < 0.35) or (place == 4 and wood < 0.4):
            green, snow = ((0.36, 0.48, 0.52), 0.6) if place == 4 else ((0.17, 0.38, 0.31), 0.0)
            base = top[int(u * FINE) % n] + 3
            pine(canvas, u + random.uniform(-2, 2), base, random.uniform(13, 20), 4.6, green, snow)
    distant_city(canvas, random, zone)
    props = canvas.lift_off()
    snow_line = np.where(weights[3] > 0.6, HORIZON - 18 + 8 * noise(random, 80, n), -99.0)
    canvas.silhouette(top, mix(weights, (*colours, (0.93, 0.66, 0.44))), 0.16, 50, snow_line)
    canvas.lay_over(props, props[1] > 0.5)
    return canvas.texture()


def distant_city(canvas: Canvas, random: Random, zone: float) -> None:
    u = zone + 8
    while u < 2 * zone - 14:
        width, tint = random.uniform(12, 20), 0.9 + 0.25 * random.random()
        wall = (0.44 * tint, 0.50 * tint, 0.61 * tint)
        building(canvas, random, (u, HORIZON + 6, width, random.uniform(18, 52)), wall, (4.4, 5.5, 0.4))
        u += width + random.uniform(0, 4)
    u = 1.5 * zone + 8  # the television tower
    legs = [(u - 5, HORIZON + 6), (u - 1.2, HORIZON - 66), (u + 1.2, HORIZON - 66), (u + 5, HORIZON + 6)]
    canvas.polygon(legs, (0.62, 0.42, 0.46))
    canvas.ellipse(u, HORIZON - 50, 6.5, 4, (0.75, 0.52, 0.52), 0.7)
    canvas.box(u - 0.7, HORIZON - 78, u + 0.7, HORIZON - 64, (0.7, 0.4, 0.4))
    canvas.ellipse(u, HORIZON - 78, 1.6, 1.6, (1, 0.4, 0.3), 1.0)


def paint_near(random: Random) -> Array:
    canvas = Canvas(LAYER_PERIODS[2])
    n, zone = canvas.width, LAYER_PERIODS[2] / 6
    weights = zone_weights(n, 0.16)
    colours = ((0.90, 0.80, 0.58), (0.30, 0.33, 0.42), (0.12, 0.31, 0.22), (0.30, 0.47, 0.31), (0.90, 0.94, 0.99))
    hills = 0.7 * noise(random, 40, n) + 0.3 * noise(random, 100, n)
    dunes = 0.5 + 0.5 * np.sin(np.arange(n) / n * 2 * np.pi * 31 + 0.6)
    heights = (-60 + 0 * hills, 6 + 0 * hills, 7 + 9 * hills, 8 + 14 * hills, 7 + 10 * hills)
    top = 118 - (weights * np.stack([*heights, 5 + 13 * dunes * hills + 3 * hills])).sum(0)
    pyramid(canvas, 5.55 * zone, 62, 52, (0.88, 0.66, 0.40))
    pyramid(canvas, 5.28 * zone, 90, 26, (0.86, 0.64, 0.40))
    castle(canvas, 3.5 * zone, top[int(3.5 * zone * FINE) % n] + 2)
    near_city(canvas, random, zone)
    near_woods(canvas, random, zone, top)
    lighthouse(canvas, 0.40 * zone)
    props = canvas.lift_off()
    canvas.silhouette(top, mix(weights, (*colours, (0.92, 0.72, 0.46))), 0.14, 45)
    buried = (canvas.cover > 0.5) & (canvas.y[:, None] > top[None] + 5)
    canvas.lay_over(props, (props[1] > 0.5) & ~buried)
    return canvas.texture()


def near_city(canvas: Canvas, random: Random, zone: float) -> None:
    u = zone + 14
    while u < 2 * zone - 26:
        width, tint, warm = random.uniform(22, 36), 0.8 + 0.45 * random.random(), random.random()
        wall = (0.32 * tint + 0.12 * warm, 0.34 * tint, 0.44 * tint - 0.06 * warm)
        building(canvas, random, (u, 116, width, random.uniform(20, 62)), wall, (6.2, 8.5, 0.45))
        u += width + random.uniform(1, 12)


def near_woods(canvas: Canvas, random: Random, zone: float, top: Doubles) -> None:
    for u in np.arange(2 * zone + 10, 5 * zone - 10, 16.0):
        place, x, wood = int(u / zone), u + random.uniform(-5, 5), random.random()
        rocky = place == 3 and abs(u - 3.5 * zone) > 64 and wood < 0.5
        if place == 2 or rocky or (place == 4 and wood < 0.45):
            green, snow = ((0.26, 0.40, 0.40), 1.0) if place == 4 else ((0.10, 0.30, 0.21), 0.0)
            base = top[int(x * FINE) % len(top)] + 4
            pine(canvas, x, base, random.uniform(30, 50), random.uniform(8.5, 11), green, snow)


def paint_ground(random: Random) -> Array:
    canvas = Canvas(LAYER_PERIODS[3])
    n, zone = canvas.width, LAYER_PERIODS[3] / 6
    weights = zone_weights(n, 0.12)
    colours = ((0.96, 0.87, 0.64), (0.42, 0.43, 0.48), (0.24, 0.42, 0.20), (0.42, 0.56, 0.32), (0.95, 0.97, 1.0))
    bumps = 0.7 * noise(random, 48, n) + 0.3 * noise(random, 150, n)
    top = 121 - (weights * np.array([5, 0, 4, 5, 5, 5])[:, None]).sum(0) * bumps
    canvas.silhouette(top, mix(weights, (*colours, (0.97, 0.79, 0.52))), 0.10, 24)
    road(canvas, weights)
    planters = (plant_beach, plant_street, plant_forest, plant_alps, plant_snow, plant_desert)
    for place, plant in enumerate(planters):
        u = place * zone + 26
        while u < (place + 1) * zone - 24:
            if place in (2, 4) and abs(u - (place + 0.5) * zone) < (46 if place == 2 else 40):
                u += 20
                continue
            u += plant(canvas, random, u, top[int(u * FINE) % n] + 3)
    cabin(canvas, 2.5 * zone, top[int(2.5 * zone * FINE) % n] + 3)
    igloo(canvas, 4.5 * zone, top[int(4.5 * zone * FINE) % n] + 4)
    return canvas.texture()


def road(canvas: Canvas, weights: Doubles) -> None:
    colours = ((0.78, 0.68, 0.48), (0.24, 0.25, 0.28), (0.50, 0.42, 0.30), (0.48, 0.44, 0.38), (0.74, 0.80, 0.88))
    lane = (canvas.y > 128.5) & (canvas.y < 140)
    canvas.colour[lane] = mix(weights, (*colours, (0.80, 0.60, 0.38)))[None]
    stripe = (canvas.y > 133.6) & (canvas.y < 134.9)
    dashes = ((np.arange(canvas.width) / FINE) % 32 < 16) & (weights[1] > 0.5)
    canvas.colour[np.ix_(stripe, dashes)] = (0.93, 0.88, 0.70)


def cloud_field(random: Random) -> Array:
    """Soft noise (96, CLOUD_PERIOD) in [0, 1], periodic in x; a cloud is where it exceeds a threshold."""

    def octave(nx: int, ny: int) -> Doubles:
        values = random.random((ny + 1, nx))
        x, y = np.arange(CLOUD_PERIOD) / CLOUD_PERIOD * nx, np.arange(96) / 96 * ny
        i, j = x.astype(int), y.astype(int)
        f, g = x - i, (y - j)[:, None]
        f, g = f * f * (3 - 2 * f), g * g * (3 - 2 * g)

        def row(k: npt.NDArray[np.int64]) -> Doubles:
            return np.asarray(values[k][:, i % nx] * (1 - f) + values[k][:, (i + 1) % nx] * f)

        return np.asarray(row(j) * (1 - g) + row(np.minimum(j + 1, ny)) * g)

    field = 0.58 * octave(10, 6) + 0.28 * octave(22, 11) + 0.14 * octave(50, 22)
    return np.asarray((field - field.min()) / (field.max() - field.min()), np.float32)
