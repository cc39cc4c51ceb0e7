"""Where one exchange becomes cheaper than another, drawn: `python -m engine.parallel.picture FILE.svg`.

Left, what all ranks send in one call of attention in one layer; right, how long the call takes by the cost model, and
the way a ring's choice goes as its cache grows. Grouped queries, four ranks. Knows no files but the one it writes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.models import KVGeometry
from engine.parallel.choose import Call, Chooser, Machine, Strategy, of_layout, predict, sent_bytes
from engine.parallel.split import Layout

RANKS, FRAMES, HEADS = 4, 3, 40
KV = KVGeometry(layers=40, heads=8, head_dim=128, tokens=1560)
LENGTHS = range(FRAMES, 46, FRAMES)  # of the cache, in latent frames
MACHINE = Machine(3e-5, 1.2e10, 5e-5, 1.2e10, 2e14, call_s=2e-5, merge_rate=1e12)
COLOURS = {"ulysses 4": "#3b7a57", "pass-kv 4": "#c0504d", "pass-q 4": "#2f5d9b"}
WIDTH, HEIGHT, LEFT, TOP, PANEL, TALL = 860, 330, 60, 40, 340, 220


@dataclass(frozen=True)
class Line:
    name: str
    points: Sequence[tuple[float, float]]  # (frames of keys, value)


def draw() -> str:
    """The picture, as SVG."""
    ring, ulysses = of_layout(Layout(1, RANKS)), Strategy(Layout(RANKS, 1))
    calls = [Call(KV, HEADS, FRAMES, frames, 2) for frames in LENGTHS]
    sent = [Line(str(s), [(c.kv_frames, sent_bytes(s, c) / 2**20) for c in calls]) for s in (*ring, ulysses)]
    taken = [Line(str(s), [(c.kv_frames, 1e3 * predict(s, c, MACHINE)) for c in calls]) for s in (*ring, ulysses)]
    chooser = Chooser(MACHINE, ring)
    chosen = Line("chosen of a ring", [(c.kv_frames, 1e3 * chooser.choose(c).seconds) for c in calls])
    theory = FRAMES * HEADS / KV.heads * (1 + 2 / (KV.head_dim * 2))
    parts = [
        *_panel(LEFT, "MiB sent by all ranks", sent, theory),
        *_panel(LEFT + PANEL + 90, "ms", taken, None, chosen),
    ]
    said = f"{RANKS} ranks, {HEADS} query heads on {KV.heads} key heads of {KV.head_dim}, {KV.tokens} tokens to a frame"
    title = f'<text x="{LEFT}" y="18" font-size="13">One call of attention: {said}, a block of {FRAMES} frames</text>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="11" fill="#222">\n<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>\n{title}\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _panel(left: int, unit: str, lines: list[Line], mark: float | None, chosen: Line | None = None) -> Iterator[str]:
    most = max(value for line in lines for _, value in line.points) * 1.05
    first, last = LENGTHS[0], LENGTHS[-1]

    def at(frames: float, value: float) -> str:
        return f"{left + (frames - first) / (last - first) * PANEL:.1f},{TOP + TALL * (1 - value / most):.1f}"

    yield f'<path d="M{left},{TOP} V{TOP + TALL} H{left + PANEL}" fill="none" stroke="#888"/>'
    yield f'<text x="{left + PANEL / 2}" y="{TOP + TALL + 32}" text-anchor="middle">latent frames of keys</text>'
    yield f'<text x="{left + 2}" y="{TOP - 6}">{unit}</text>'
    for value in (0.0, most / 2, most):
        x, y = at(first, value).split(",")
        yield f'<text x="{float(x) - 6:.1f}" y="{y}" text-anchor="end">{value:.3g}</text>'
    for frames in LENGTHS[::2]:
        yield f'<text x="{at(frames, 0).split(",")[0]}" y="{TOP + TALL + 15}" text-anchor="middle">{frames}</text>'
    if mark is not None:
        x = at(mark, 0).split(",")[0]
        yield f'<path d="M{x},{TOP} V{TOP + TALL}" stroke="#888" stroke-dasharray="3 3"/>'
        yield f'<text x="{float(x) + 5:.1f}" y="{TOP + 10}">Tk / Tq = (h / k)(1 + 2 / de)</text>'
    if chosen is not None:
        points = " ".join(at(*point) for point in chosen.points)
        yield f'<polyline points="{points}" fill="none" stroke="#f2b632" stroke-width="8" stroke-opacity="0.55"/>'
    for i, line in enumerate(lines):
        colour = COLOURS[line.name]
        points = " ".join(at(*point) for point in line.points)
        yield f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
        yield f'<text x="{left + 10 + 85 * i}" y="{TOP + TALL + 55}" fill="{colour}">{line.name}</text>'
    if chosen is not None:
        yield f'<text x="{left + 265}" y="{TOP + TALL + 55}" fill="#a67a00">{chosen.name}</text>'


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(draw())
