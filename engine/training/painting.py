"""Paints the map of the little planet once: four parallax textures and a cloud field, periodic around the ring.

Every texture has premultiplied RGB, coverage and glow (lamps, lit windows) per pixel. Knows nothing of light, weather
or camera.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import cv2
import numpy as np
import numpy.typing as npt

from engine.models.tiny.planet import CLOUD_PERIOD, HEIGHT, LAYER_PERIODS

Array = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Colour = Sequence[float]
Random = np.random.Generator

HORIZON = 84
FINE = 4
"""Subpixels per pixel while painting."""


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


def plant_beach(canvas: Canvas, random: Random, x: float, base: float) -> float:
    size, lean = random.uniform(0.8, 1.15), random.uniform(-9, 9)
    palm(canvas, x, base, size, lean)
    if random.random() < 0.5:
        u, cloth = x + 26, ((0.90, 0.30, 0.26), (0.25, 0.55, 0.80), (0.95, 0.75, 0.25))[random.integers(3)]
        canvas.box(u - 0.7, base - 17, u + 0.7, base + 2, (0.85, 0.85, 0.85))
        roof = [(u - 13, base - 14), (u - 7, base - 20), (u, base - 22), (u + 7, base - 20), (u + 13, base - 14)]
        canvas.polygon(roof, cloth)
        stripe = [(u - 4.5, base - 14), (u - 2, base - 21.5), (u + 2, base - 21.5), (u + 4.5, base - 14)]
        canvas.polygon(stripe, (0.96, 0.95, 0.92))
    return float(random.uniform(62, 110))


def palm(canvas: Canvas, x: float, base: float, size: float, lean: float) -> None:
    tall = 46 * size
    rise = np.linspace(0, 1, 9)
    left = [(x + lean * t * t - (2.2 - 1.1 * t) * size, base - tall * t) for t in rise]
    right = [(x + lean * t * t + (2.2 - 1.1 * t) * size, base - tall * t) for t in rise[::-1]]
    canvas.polygon(left + right, (0.42, 0.30, 0.20))
    fronds = ((-20, 2, 9), (20, 2, 9), (-15, -8, 3), (15, -8, 3), (-9, 8, 10), (10, 8, 10), (-4, -12, -2), (5, -12, -2))
    t = np.linspace(0, 1, 8)
    for reach, lift, drop in fronds:
        fx = x + lean + reach * size * t
        fy = base - tall + lift * size * t * 0.6 - 5 * size * np.sin(np.pi * t * 0.6) + drop * size * t * t
        thick = 2.6 * size * np.sin(np.pi * np.clip(t * 0.9 + 0.08, 0, 1))
        green = (0.14 + 0.05 * (lift < 0), 0.45 + 0.06 * (lift < 0), 0.23)
        upper = list(zip(fx, fy - thick, strict=True))
        canvas.polygon(upper + list(zip(fx[::-1], (fy + thick)[::-1], strict=True)), green)


def plant_street(canvas: Canvas, random: Random, x: float, base: float) -> float:
    post = (0.20, 0.21, 0.25)
    canvas.box(x - 0.9, base - 34, x + 0.9, base + 2, post)
    canvas.box(x - 0.9, base - 35, x + 8, base - 33.4, post)
    canvas.box(x + 4, base - 33.6, x + 9, base - 31.6, (0.95, 0.9, 0.7), 1.0)
    u = x + 34
    if random.random() < 0.6:
        canvas.box(u - 0.9, base - 9, u + 0.9, base + 2, (0.3, 0.22, 0.16))
        canvas.ellipse(u, base - 15, 8.5, 8.5, (0.26, 0.48, 0.26))
        canvas.ellipse(u - 3, base - 17, 4.5, 4.5, (0.33, 0.56, 0.30))
        return 68.0
    for x0, y0, x1, y1 in ((-9, -5, 9, -3.6), (-9, -10, 9, -8)):
        canvas.box(u + x0, base + y0, u + x1, base + y1, (0.55, 0.35, 0.22))
    for leg in (-8, 7):
        canvas.box(u + leg, base - 3.6, u + leg + 1, base + 2, (0.2, 0.2, 0.2))
    return 68.0


def plant_forest(canvas: Canvas, random: Random, x: float, base: float) -> float:
    kind = random.random()
    if kind < 0.55:
        pine(canvas, x, base, random.uniform(56, 84), random.uniform(15, 19), (0.13, 0.36, 0.20))
    elif kind < 0.8:
        canvas.ellipse(x, base - 4, 8, 6, (0.22, 0.48, 0.22))
        canvas.ellipse(x + 8, base - 2, 6, 5, (0.18, 0.42, 0.20))
    else:
        for d in (-5, 0, 6):
            canvas.box(x + d - 0.8, base - 4, x + d + 0.8, base + 2, (0.9, 0.88, 0.8))
            hat = [(x + d - 3.6, base - 3.5), (x + d - 2, base - 7), (x + d + 2, base - 7), (x + d + 3.6, base - 3.5)]
            canvas.polygon(hat, (0.85, 0.2, 0.16))
    return float(random.uniform(34, 64))


def plant_alps(canvas: Canvas, random: Random, x: float, base: float) -> float:
    kind = random.random()
    if kind < 0.45:
        q = random.uniform(10, 18)
        peak, right = (x - q * 0.1, base - q * 0.95), (x + q * 0.6, base - q * 0.6)
        left = [(x - q, base + 3), (x - q * 0.7, base - q * 0.5)]
        canvas.polygon([*left, peak, right, (x + q, base + 3)], (0.46, 0.46, 0.50))
        canvas.polygon([peak, right, (x + q, base + 3), (x + q * 0.2, base + 3)], (0.36, 0.36, 0.41))
    elif kind < 0.8:
        pine(canvas, x, base, random.uniform(36, 58), 11, (0.18, 0.38, 0.26))
    else:
        petals = ((-6, (0.9, 0.8, 0.3)), (-2, (0.9, 0.5, 0.6)), (3, (0.95, 0.95, 0.9)), (7, (0.7, 0.5, 0.85)))
        for d, colour in petals:
            canvas.box(x + d - 0.4, base - 4, x + d + 0.4, base + 2, (0.3, 0.5, 0.25))
            canvas.ellipse(x + d, base - 5, 1.8, 1.8, colour)
    return float(random.uniform(46, 84))


def plant_snow(canvas: Canvas, random: Random, x: float, base: float) -> float:
    kind = random.random()
    if kind < 0.55:
        pine(canvas, x, base, random.uniform(44, 66), 14, (0.25, 0.42, 0.40), 1.0)
    elif kind < 0.8:
        for up, radius in ((4, 6), (12.5, 4.3), (19, 3.1)):
            canvas.ellipse(x, base - up, radius, radius, (0.97, 0.98, 1.0))
        canvas.box(x - 3.2, base - 22.3, x + 3.2, base - 21.2, (0.15, 0.15, 0.2))
        canvas.box(x - 2, base - 26, x + 2, base - 22, (0.15, 0.15, 0.2))
        canvas.polygon([(x + 1, base - 19.4), (x + 6, base - 18.6), (x + 1, base - 18)], (0.95, 0.55, 0.2))
    else:
        canvas.ellipse(x, base, 12, 5, (0.88, 0.92, 0.98))
    return float(random.uniform(50, 88))


def plant_desert(canvas: Canvas, random: Random, x: float, base: float) -> float:
    size = random.uniform(0.8, 1.2)
    if random.random() < 0.7:
        cactus(canvas, x, base, size)
    else:
        q = 9 * size
        stone = [(x - q, base + 3), (x - q * 0.6, base - q * 0.6), (x + q * 0.3, base - q * 0.8), (x + q, base + 3)]
        canvas.polygon(stone, (0.74, 0.48, 0.32))
    return float(random.uniform(56, 100))


def cactus(canvas: Canvas, x: float, base: float, size: float) -> None:
    tall = 30 * size
    stems = (
        (x, base + 2, x, base - tall, 3.2),
        (x, base - tall * 0.40, x - 9 * size, base - tall * 0.40, 2.2),
        (x - 9 * size, base - tall * 0.40, x - 9 * size, base - tall * 0.78, 2.2),
        (x, base - tall * 0.55, x + 8 * size, base - tall * 0.55, 2.0),
        (x + 8 * size, base - tall * 0.55, x + 8 * size, base - tall * 0.9, 2.0),
    )
    for x0, y0, x1, y1, thick in stems:
        r = thick * size
        if abs(x1 - x0) < 0.1:
            canvas.box(x0 - r, y1, x1 + r, y0, (0.22, 0.48, 0.28))
        else:
            canvas.box(min(x0, x1), y0 - r, max(x0, x1), y0 + r, (0.22, 0.48, 0.28))
        canvas.ellipse(x1, y1, r, r, (0.22, 0.48, 0.28))


def pine(canvas: Canvas, x: float, base: float, tall: float, wide: float, green: Colour, snow: float = 0.0) -> None:
    canvas.box(x - wide * 0.10, base - tall * 0.2, x + wide * 0.10, base + 2, (0.26, 0.18, 0.13))
    for i in range(3):
        y = base - tall * 0.14 - i * tall * 0.26
        half, tip = wide * (1 - 0.25 * i), y - tall * 0.40
        canvas.polygon([(x - half, y), (x, tip), (x + half, y)], [min(1.0, v * (1 + 0.10 * i)) for v in green])
        if snow > 0:
            rim = [
                (x + half * 0.2, y - tall * 0.12),
                (x - half * 0.1, y - tall * 0.19),
                (x - half * 0.3, y - tall * 0.11),
            ]
            top = [(x - half * 0.55, y - tall * 0.18), (x, tip), (x + half * 0.55, y - tall * 0.18)]
            canvas.polygon([*top, *rim], (0.93, 0.96, 1.0))


def building(
    canvas: Canvas,
    random: Random,
    at: tuple[float, float, float, float],
    wall: Colour,
    windows: tuple[float, float, float],
) -> None:
    """A house at (x, base, width, height) with windows of (spacing x, spacing y, share lit)."""
    x, base, width, height = at
    step_x, step_y, lit_share = windows
    canvas.box(x, base - height, x + width, base + 30, wall)
    canvas.box(x, base - height, x + width * 0.18, base + 30, [v * 1.15 for v in wall])
    roof = random.random()
    if roof < 0.3:
        canvas.box(x + width * 0.25, base - height - 5, x + width * 0.75, base - height, wall)
    elif roof < 0.5:
        canvas.box(x + width * 0.5 - 0.6, base - height - 10, x + width * 0.5 + 0.6, base - height, wall)
    columns = max(1, int((width - 2) / step_x))
    margin = (width - columns * step_x) / 2
    for i in range(columns):
        for j in range(int((height - 3) / step_y)):
            lit = random.random() < lit_share
            x0, y0 = x + margin + i * step_x + step_x * 0.22, base - height + 3 + j * step_y
            pane = [0.8 * v + 0.1 for v in wall] if lit else [v * 0.78 for v in wall]
            canvas.box(x0, y0, x0 + step_x * 0.56, y0 + step_y * 0.55, pane, float(lit))


def pyramid(canvas: Canvas, x: float, tip: float, half: float, sand: Colour) -> None:
    canvas.polygon([(x - half, 118), (x, tip), (x + half, 118)], sand)
    shadow = (sand[0] - 0.18, sand[1] - 0.17, sand[2] - 0.10)
    canvas.polygon([(x, tip), (x + half, 118), (x + half * 0.27, 118)], shadow)


def castle(canvas: Canvas, x: float, base: float) -> None:
    hill = [(x - 60, base + 14), (x - 24, base - 12), (x + 24, base - 12), (x + 62, base + 14)]
    canvas.polygon(hill, (0.36, 0.42, 0.38))
    for dx, width, tall in ((-20, 8, 26), (-8, 16, 20), (12, 9, 32), (2, 7, 40)):
        left, top = x + dx, base - 12 - tall
        canvas.box(left, top, left + width, base - 6, (0.62, 0.60, 0.62))
        canvas.polygon([(left - 1.5, top), (left + width / 2, top - 9), (left + width + 1.5, top)], (0.62, 0.26, 0.24))
        middle = left + width / 2
        canvas.box(middle - 1, base - 8 - tall, middle + 1, base - 4 - tall, (0.3, 0.3, 0.34), 1.0)
    canvas.box(x - 22, base - 18, x + 22, base + 2, (0.56, 0.55, 0.58))
    canvas.ellipse(x, base - 4, 3.4, 6, (0.25, 0.2, 0.2))


def lighthouse(canvas: Canvas, x: float) -> None:
    rock = [(x - 26, 112), (x - 16, 100), (x - 6, 96), (x + 9, 97), (x + 18, 103), (x + 28, 112)]
    canvas.polygon(rock, (0.40, 0.36, 0.36))
    canvas.polygon([(x - 5.5, 97), (x - 3.6, 62), (x + 3.6, 62), (x + 5.5, 97)], (0.95, 0.94, 0.92))
    for q in (0, 2):
        low, high = 5.5 - 0.55 * (q + 1), 5.5 - 0.55 * (q + 1.8)
        y0, y1 = 97 - 10 * (q + 0.6), 97 - 10 * (q + 1.5)
        canvas.polygon([(x - low, y0), (x - high, y1), (x + high, y1), (x + low, y0)], (0.82, 0.22, 0.20))
    canvas.box(x - 4.6, 60.5, x + 4.6, 62.5, (0.25, 0.25, 0.3))
    canvas.box(x - 2.6, 54.5, x + 2.6, 60.5, (0.95, 0.9, 0.6), 1.0)
    canvas.polygon([(x - 4, 54.5), (x, 49.5), (x + 4, 54.5)], (0.82, 0.22, 0.20))


def cabin(canvas: Canvas, x: float, base: float) -> None:
    canvas.box(x - 22, base - 22, x + 22, base + 2, (0.50, 0.33, 0.20))
    canvas.box(x + 12, base - 46, x + 17, base - 30, (0.45, 0.28, 0.24))
    canvas.polygon([(x - 28, base - 20), (x, base - 44), (x + 28, base - 20)], (0.36, 0.20, 0.16))
    canvas.box(x - 5, base - 15, x + 5, base + 2, (0.30, 0.18, 0.12))
    for left in (-17, 9):
        canvas.box(x + left, base - 16, x + left + 8, base - 8, (0.9, 0.85, 0.6), 1.0)


def igloo(canvas: Canvas, x: float, base: float) -> None:
    def arch(cx: float, rx: float, ry: float, lift: float) -> list[tuple[float, float]]:
        turns = np.linspace(np.pi, 2 * np.pi, 30)
        return [(cx + rx * math.cos(t), base + lift + ry * math.sin(t)) for t in turns]

    canvas.polygon(arch(x, 26, 25, 0), (0.86, 0.91, 0.97))
    canvas.polygon(arch(x + 20, 9, 12, 0), (0.74, 0.82, 0.91))
    canvas.polygon(arch(x + 21, 5.5, 8, 0), (0.25, 0.30, 0.42), 0.8)
    for q in (0.33, 0.66):
        half = 26 * math.sqrt(1 - q * q) - 1
        canvas.box(x - half, base - 25 * q - 0.4, x + half, base - 25 * q + 0.4, (0.74, 0.81, 0.90))


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
