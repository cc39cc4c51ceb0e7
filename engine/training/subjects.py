"""What moves on the little planet: boat, car, walker, balloon, birds. Compiled; see `shading` for the arguments."""

import math

from numba import njit

from engine.training import lighting as light
from engine.training.shading import BOAT, TURN, ambient, haze, put, segment, stamp, unit


@njit(cache=True, fastmath=True)
def draw_boat(out, planes, state, clock, facing):  # type: ignore[no-untyped-def]
    ar, ag, ab = ambient(state)
    pr, pg, pb = state[light.PAINT], state[light.PAINT + 1], state[light.PAINT + 2]
    cx, cy, roll = 112.0, 96.0 + 1.6 * math.sin(TURN * clock / 2.0), 0.06 * math.sin(TURN * clock / 2.0 + 0.8)
    for y in range(int(cy - 44), int(cy + 10)):
        for x in range(int(cx - 26), int(cx + 26)):
            qx, qy = (x - cx) * facing / 0.95, (y - cy) / 0.95
            px, py = qx + qy * roll, qy - qx * roll
            hull = unit(20.5 - 6.0 * ((py + 3.0) / 8.0) ** 2 - abs(px + 0.6)) if -3 < py < 5 else 0.0
            mast = unit(1.0 - abs(px)) if -40 < py <= -3 else 0.0
            main = unit(min(px - 0.7, 2.0 + 16.0 * (py + 39) / 34.0 - px)) if -40 < py < -5 else 0.0
            jib = unit(min(-px - 0.7, px + 2.0 + 11.0 * (py + 33) / 28.0)) if -33 < py < -5 else 0.0
            top = py < -1
            put(
                out,
                y,
                x,
                (0.92 if top else pr) * ar,
                (0.90 if top else pg) * ag,
                (0.86 if top else pb) * ab,
                hull,
            )
            put(out, y, x, 0.30 * ar, 0.22 * ag, 0.18 * ab, mast)
            put(out, y, x, 0.98 * ar, 0.96 * ag, 0.92 * ab, main)
            put(out, y, x, pr * ar, pg * ag, pb * ab, jib)
            if max(hull, mast, main, jib) > 0.5:
                planes[y, x] = BOAT


@njit(cache=True, fastmath=True)
def draw_car(out, planes, state, facing):  # type: ignore[no-untyped-def]
    ar, ag, ab = ambient(state)
    pr, pg, pb = state[light.PAINT], state[light.PAINT + 1], state[light.PAINT + 2]
    hr, hg, hb = haze(state)
    lamps, cx, cy = state[light.LAMPS], 106.0, 133.0
    for y in range(110, 141):
        for x in range(int(cx - 44), int(cx + 44)):
            px, py = (x - cx) * facing, y - cy
            if lamps > 0.2 and 17 < px < 41 and py > -7:
                q = (px - 17) / 24.0
                beam = unit(1 - abs(py + 2 - 2 * q) / (1.6 + 5 * q)) * (1 - q) * 0.6 * lamps
                stamp(out, planes, y, x, 1.0, 0.93, 0.65, beam)
            body = max(abs(px) - 18.5, abs(py + 4.0) - 4.0)
            cabin = max(abs(px + 1.5) - (7.5 + 4.5 * (py + 14.5) / 7.0), abs(py + 11.0) - 3.8)
            stamp(out, planes, y, x, pr * ar, pg * ag, pb * ab, unit(0.5 - min(body, cabin)))
            if py < -7.8 and abs(px + 1.5) > 0.8:
                glass = unit(-1.1 - cabin)
                stamp(out, planes, y, x, 0.6 * ar + 0.2 * hr, 0.75 * ag + 0.2 * hg, 0.85 * ab + 0.2 * hb, glass)
            for wheel in (-11.0, 11.0):
                d = math.sqrt((px - wheel) ** 2 + (py - 0.6) ** 2)
                stamp(out, planes, y, x, 0.08 * ar, 0.08 * ag, 0.09 * ab, unit(4.7 - d))
                stamp(out, planes, y, x, 0.75 * ar, 0.75 * ag, 0.75 * ab, unit(2.4 - d))


@njit(cache=True, fastmath=True)
def draw_walker(out, planes, state, camera, facing):  # type: ignore[no-untyped-def]
    """A hiker whose stride follows the ground: one cycle in 64 pixels."""
    ar, ag, ab = ambient(state)
    pr, pg, pb = state[light.PAINT], state[light.PAINT + 1], state[light.PAINT + 2]
    phase, cx, scale = TURN * camera / 64.0, 106.0, 1.25
    stride, bob = math.sin(phase), -abs(math.cos(phase))
    for y in range(84, 142):
        for x in range(int(cx - 22), int(cx + 22)):
            px, py = (x - cx) * facing / scale, (y - 137.0 - bob) / scale
            legs = min(segment(px, py, 0.0, -14.0, 6.5 * stride, 0.0), segment(px, py, 0.0, -14.0, -6.5 * stride, 0.0))
            arms = min(segment(px, py, 0.4, -23, -5.5 * stride, -14), segment(px, py, 0.4, -23, 5.5 * stride, -14))
            head = math.sqrt((px - 0.8) ** 2 + (py + 31.0) ** 2)
            stamp(out, planes, y, x, 0.16 * ar, 0.18 * ag, 0.34 * ab, unit(2.5 - legs))
            stamp(out, planes, y, x, pr * ar, pg * ag, pb * ab, unit(4.2 - segment(px, py, 0, -15, 0.5, -24)))
            stamp(out, planes, y, x, 0.8 * pr * ar, 0.8 * pg * ag, 0.8 * pb * ab, unit(1.9 - arms))
            stamp(out, planes, y, x, 0.95 * ar, 0.76 * ag, 0.62 * ab, unit(4.1 - head))
            stamp(out, planes, y, x, 0.22 * ar, 0.3 * ag, 0.55 * ab, unit(2.2 - segment(px, py, -2.2, -34, 4.4, -33.4)))


@njit(cache=True, fastmath=True)
def draw_balloon(out, planes, state, clock):  # type: ignore[no-untyped-def]
    ar, ag, ab = ambient(state)
    pr, pg, pb = state[light.PAINT], state[light.PAINT + 1], state[light.PAINT + 2]
    cx, cy = 84.0, 42.0 + 3 * math.sin(TURN * clock / 8.0)
    for y in range(int(cy - 24), int(cy + 40)):
        for x in range(int(cx - 24), int(cx + 24)):
            px, py = (x - cx) / 0.95, (y - cy) / 0.95
            radius = 19.0 - max(0.0, py) * 0.40
            if py < 21:
                a = unit(0.5 + radius - math.sqrt(px * px + (py * 0.92) ** 2))
                stripe = int((math.asin(max(-1.0, min(1.0, px / (radius + 0.01)))) + 1.5708) / 0.52) % 2
                if stripe == 0:
                    stamp(out, planes, y, x, pr * ar, pg * ag, pb * ab, a)
                else:
                    stamp(out, planes, y, x, 0.98 * ar, 0.84 * ag, 0.48 * ab, a)
            if 15 <= py < 28 and abs(abs(px) - 3.6) < 0.6:
                stamp(out, planes, y, x, 0.3 * ar, 0.25 * ag, 0.2 * ab, 0.8)
            basket = unit(0.5 - max(abs(px) - 4.2, abs(py - 30.0) - 3.0))
            stamp(out, planes, y, x, 0.45 * ar, 0.30 * ag, 0.18 * ab, basket)


@njit(cache=True, fastmath=True)
def draw_birds(out, planes, state, facing):  # type: ignore[no-untyped-def]
    """Five gulls gliding in formation: between two keyframes they are exactly where they were."""
    ar, ag, ab = ambient(state)
    pale = state[light.DIM] > 0.2 or state[light.STARS] > 0.5
    for i in range(5):
        rank = (i + 1) // 2
        side = rank * 9.0 if i % 2 == 0 else -rank * 7.0
        cx, cy = 140.0 - facing * rank * 17.0, 44.0 + side
        flap = math.sin(0.4 + i * 1.1)
        for y in range(int(cy - 13), int(cy + 13)):
            for x in range(int(cx - 14), int(cx + 14)):
                px, py = abs(x - cx), y - cy
                inner = segment(px, py, 0.0, 0.0, 5.5, -3.4 * flap) - 1.4
                outer = segment(px, py, 5.5, -3.4 * flap, 11.5, -1.8 * flap + 1.5) - 1.0
                a = unit(0.5 - min(inner, outer))
                if pale:
                    stamp(out, planes, y, x, 0.95 * ar + 0.05, 0.95 * ag + 0.05, 0.95 * ab + 0.05, a)
                else:
                    stamp(out, planes, y, x, 0.14, 0.15, 0.20, a)
