"""Bands of a picture, made each on its own: which rows a decoder that convolves and doubles must hold, level by level.

A convolution of 3 rows reaches one row further on either side. So a band needs some rows around it, its halo: most of
them at the coarsest level, hardly any at the finest, where the work is. Rows beyond a halo's are what a convolution
pads with, at the picture's own edges as in a whole picture; what that spoils at a band's inner edges is cut off before
it reaches the band. Knows no weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise


def even(rows: int, parts: int) -> list[range]:
    """`rows` in as many bands, or in as many as there are rows."""
    parts = min(parts, rows)
    ends = [rows * i // parts for i in range(parts + 1)]
    return [range(a, b) for a, b in pairwise(ends)]


def crops(reaches: Sequence[int], rows: range, height: int, after: int = 0) -> list[slice]:
    """Where a decoder cuts what it has: on entering each level, then at the end.

    reaches: rows that all convolutions of a level reach together, coarsest level first; each level has twice the rows
    of the one before, and `after` rows more are reached between the doubling and the cut. `rows` are those wanted of
    the `height` of the finest level.
    """
    windows, wanted = [rows], rows
    for level, reach in enumerate(reversed(reaches)):
        if level:
            wide = _grown(wanted, after, height)
            wanted, height = range(wide.start // 2, -(-wide.stop // 2)), height // 2
        wanted = _grown(wanted, reach, height)
        windows.append(wanted)
    windows.reverse()
    held = [range(height), *(range(2 * w.start, 2 * w.stop) for w in windows[:-2]), windows[-2]]
    return [slice(w.start - h.start, w.stop - h.start) for h, w in zip(held, windows, strict=True)]


def scaled(rows: range, factor: int) -> range:
    return range(rows.start * factor, rows.stop * factor)


def _grown(rows: range, reach: int, height: int) -> range:
    return range(max(0, rows.start - reach), min(height, rows.stop + reach))
