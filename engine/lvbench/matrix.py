"""The response matrix: how each dimension answers to each fault. The proof that the classic measures are apart.

python -m engine.lvbench.matrix docs/lvbench-response.svg
"""

import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.lvbench.faults import FAULTS, FPS, HEIGHT, WIDTH, Fault, clip_frames
from engine.lvbench.judge import Method, judge_frames
from engine.lvbench.measures import DIMENSIONS, Dimension
from engine.lvbench.video import VideoFacts

OWN_FAULT: dict[Dimension, Fault] = {
    "clarity": "blur",
    "motion": "stutter",
    "aesthetic": "fade",
    "background": "slide",
    "subject": "morph",
}
FRAMES = 150
CELL_WIDTH, CELL_HEIGHT, LEFT, TOP = 96, 40, 84, 34


def response(fault: Fault, frames: int, parts: int) -> NDArray[np.float64]:
    """The mean drift of each dimension (5,) on the clip with one fault."""
    facts = VideoFacts(fault, WIDTH, HEIGHT, frames, frames / FPS, "none")
    verdict = judge_frames(clip_frames(fault, frames), facts, Method(parts=parts))
    return np.array([found.mean if found else np.nan for found in verdict.drifts.values()])


def draw(rows: dict[Fault, NDArray[np.float64]]) -> str:
    """The matrix as an SVG; a cell's colour is its share of the largest in its row."""
    width, height = LEFT + CELL_WIDTH * len(DIMENSIONS) + 8, TOP + CELL_HEIGHT * len(rows) + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="system-ui, sans-serif" font-size="13"><rect width="100%" height="100%" fill="#fff"/>'
    ]
    for column, name in enumerate(DIMENSIONS):
        x = LEFT + CELL_WIDTH * (column + 0.5)
        parts.append(f'<text x="{x}" y="{TOP - 12}" text-anchor="middle" font-weight="600">{name}</text>')
    for line, (fault, row) in enumerate(rows.items()):
        y = TOP + CELL_HEIGHT * line
        parts.append(f'<text x="{LEFT - 10}" y="{y + 25}" text-anchor="end" font-weight="600">{fault}</text>')
        scale = max(float(row.max()), 0.1)  # a clean clip has no colour of its own
        for column, value in enumerate(row):
            strength = float(value) / scale
            ink = "#fff" if strength > 0.6 else "#222"
            parts.append(
                f'<rect x="{LEFT + CELL_WIDTH * column + 1}" y="{y + 1}" width="{CELL_WIDTH - 2}" '
                f'height="{CELL_HEIGHT - 2}" rx="4" fill="#d9480f" fill-opacity="{0.05 + 0.95 * strength:.3f}"/>'
                f'<text x="{LEFT + CELL_WIDTH * (column + 0.5)}" y="{y + 25}" text-anchor="middle" fill="{ink}">'
                f"{100 * value:.1f} %</text>"
            )
    return "\n".join([*parts, "</svg>\n"])


def main(path: Path) -> None:
    """Measures all faults and writes the picture."""
    path.write_text(draw({fault: response(fault, FRAMES, 10) for fault in FAULTS}), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
