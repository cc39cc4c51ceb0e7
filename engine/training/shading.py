"""Small pieces of compiled drawing: a pixel painted over, light and haze of a light vector, distances.

`out` is a picture (144, 256, 3) in [0, 1], `planes` says what each pixel belongs to, `state` is a light vector.
"""

import math

from numba import njit

from engine.training import lighting as light

FRONT, GROUND, NEAR, BOAT, MID, FAR, CLOUD, SKY = range(8)
TURN = 2 * math.pi


@njit(inline="always")
def unit(x):  # type: ignore[no-untyped-def]
    return 0.0 if x < 0.0 else (1.0 if x > 1.0 else x)


@njit(inline="always")
def segment(px, py, ax, ay, bx, by):  # type: ignore[no-untyped-def]
    """Distance of a point to the segment a-b."""
    dx, dy = bx - ax, by - ay
    q = unit(((px - ax) * dx + (py - ay) * dy) / (dx * dx + dy * dy + 1e-6))
    return math.sqrt((px - ax - q * dx) ** 2 + (py - ay - q * dy) ** 2)


@njit(inline="always")
def put(out, y, x, r, g, b, a):  # type: ignore[no-untyped-def]
    out[y, x, 0] += (r - out[y, x, 0]) * a
    out[y, x, 1] += (g - out[y, x, 1]) * a
    out[y, x, 2] += (b - out[y, x, 2]) * a


@njit(inline="always")
def stamp(out, planes, y, x, r, g, b, a):  # type: ignore[no-untyped-def]
    """Paints a pixel of a subject, which owns the pixel once it covers half of it."""
    if a > 0:
        put(out, y, x, r, g, b, a)
        if a > 0.5:
            planes[y, x] = FRONT


@njit(inline="always")
def ambient(state):  # type: ignore[no-untyped-def]
    dim = 1 - state[light.DIM] * 0.75
    return state[light.AMBIENT] * dim, state[light.AMBIENT + 1] * dim, state[light.AMBIENT + 2] * dim


@njit(inline="always")
def grey(r, g, b, share, dim):  # type: ignore[no-untyped-def]
    """A colour drained by overcast (`share`) and dimmed."""
    level = 0.30 * r + 0.59 * g + 0.11 * b
    keep = 1 - share
    return (
        (r * keep + level * 0.88 * share) * dim,
        (g * keep + level * 0.92 * share) * dim,
        (b * keep + level * share) * dim,
    )


@njit(inline="always")
def haze(state):  # type: ignore[no-untyped-def]
    low = light.SKY_LOW
    return grey(state[low], state[low + 1], state[low + 2], state[light.OVERCAST] * 0.8, 1 - state[light.DIM] * 0.75)
