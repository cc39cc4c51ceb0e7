"""What stands on the little planet: trees, houses, landmarks and the small things of each place.

Each function paints one thing on a canvas with its foot at (x, base); a `plant_*` function also says how far away the
next thing may stand.
"""

import math

import numpy as np

from engine.training.canvas import Canvas, Colour

Random = np.random.Generator


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
