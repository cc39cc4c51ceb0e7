"""What a background and a subject look like: orientation histograms, and how alike two of them are.

Only directions of edges on luma are kept, per cell and normalised, from a picture made small first: colour, contrast
and moderate blur cancel, shape and layout remain. Numpy alone, no weights. Which pixels are subject is decided
elsewhere (a soft mask).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.lvbench.pixels import Floats, box_mean

ORIENTATIONS = 8
BACKGROUND_LINES = 36  # the background is read this small
CELL = 6  # pixels of that small picture along one side of a cell
SUBJECT_SIDE = 24  # a subject is read as a square of this many pixels
SUBJECT_CELL = 6
DETAIL = 5  # pixels below which a subject's pattern does not count
MARGIN = 1.25  # how much of its surroundings a subject's square takes in

Mask = NDArray[np.float32]  # (H, W), 0 background .. 1 subject


@dataclass(frozen=True)
class Descriptor:
    """`features` (C, D) per cell and `weights` (C,) telling how much of each cell was seen."""

    features: Floats
    weights: Floats


def describe_background(luma: Floats, mask: Mask) -> Descriptor:
    """The background of (H, W) luma: one row per cell in place, then one row per line of cells, wherever along the
    line it is.

    The second half makes a camera that pans along a like landscape cost less than one that arrives somewhere else.
    """
    small, hidden = box_mean(luma, BACKGROUND_LINES), box_mean(mask, BACKGROUND_LINES)
    seen = (1.0 - np.minimum(1.0, 2.0 * hidden)).astype(np.float32)
    votes = _orientation_votes(small) * seen[..., None]
    cells = _pool(votes, CELL)  # (R, K, D)
    weights = _pool(seen[..., None], CELL)[..., 0]  # (R, K)
    lines = np.einsum("rkd->rd", cells)
    features = np.concatenate([_unit(cells.reshape(-1, ORIENTATIONS)), _unit(lines)])
    columns = weights.shape[1]
    return Descriptor(features, np.concatenate([weights.ravel(), columns * weights.mean(axis=1)]))


def describe_subject(luma: Floats, mask: Mask) -> Descriptor | None:
    """The subject of (H, W) luma as a square around the mask's centre, sized by its spread: pattern, then outline.

    None when the mask is empty.
    """
    total = float(mask.sum())
    if total < 1.0:
        return None
    ys, xs = np.arange(mask.shape[0]), np.arange(mask.shape[1])
    rows, columns = mask.sum(axis=1) / total, mask.sum(axis=0) / total
    y, x = float(ys @ rows), float(xs @ columns)
    half = MARGIN * np.sqrt(3.0) * max(1.0, np.sqrt(0.5 * float((ys - y) ** 2 @ rows + (xs - x) ** 2 @ columns)))
    grid = np.linspace(-half, half, SUBJECT_SIDE)
    seen = sample(mask, y + grid, x + grid)
    pattern = _orientation_votes(sample(_without_detail(luma), y + grid, x + grid)) * seen[..., None]
    outline = _orientation_votes(_without_detail(seen))
    cells = [_unit(_pool(votes, SUBJECT_CELL).reshape(-1, ORIENTATIONS)) for votes in (pattern, outline)]
    return Descriptor(np.concatenate(cells), np.ones(len(cells[0]) + len(cells[1]), dtype=np.float32))


def likeness(a: Descriptor, b: Descriptor) -> float:
    """Weighted cosine of two descriptors, cut at 0: 1 the same, 0 unrelated."""
    shared = a.weights * b.weights
    dot = float(shared @ np.einsum("cd,cd->c", a.features, b.features))
    norms = float(shared @ np.einsum("cd,cd->c", a.features, a.features)) * float(
        shared @ np.einsum("cd,cd->c", b.features, b.features)
    )
    return max(0.0, dot / np.sqrt(norms)) if norms > 1e-12 else 0.0


def mean_descriptor(descriptors: list[Descriptor]) -> Descriptor:
    """The mean of several, each cell weighted by how much of it was seen."""
    features = np.stack([d.features for d in descriptors])  # (n, C, D)
    weights = np.stack([d.weights for d in descriptors])  # (n, C)
    total = np.maximum(weights.sum(axis=0), 1e-6)
    return Descriptor(np.einsum("ncd,nc->cd", features, weights) / total[:, None], weights.mean(axis=0))


def centre_mask(height: int, width: int) -> Mask:
    """An ellipse over the middle of the picture, 1 inside: what is judged when no subject shows itself by moving."""
    y, x = np.ogrid[-1 : 1 : height * 1j, -1 : 1 : width * 1j]
    return np.asarray((x / 0.45) ** 2 + (y / 0.6) ** 2 < 1.0, dtype=np.float32)


def sample(picture: Floats, ys: NDArray[np.float64], xs: NDArray[np.float64]) -> Floats:
    """Bilinear samples of (H, W) at the grid ys x xs; outside, the border repeats."""
    height, width = picture.shape
    y, x = np.clip(ys, 0, height - 1), np.clip(xs, 0, width - 1)
    top, left = np.minimum(y.astype(np.intp), max(0, height - 2)), np.minimum(x.astype(np.intp), max(0, width - 2))
    bottom, right = np.minimum(top + 1, height - 1), np.minimum(left + 1, width - 1)
    fy, fx = (y - top).astype(np.float32)[:, None], (x - left).astype(np.float32)[None]
    upper = picture[np.ix_(top, left)] * (1 - fx) + picture[np.ix_(top, right)] * fx
    lower = picture[np.ix_(bottom, left)] * (1 - fx) + picture[np.ix_(bottom, right)] * fx
    return np.asarray(upper * (1 - fy) + lower * fy, dtype=np.float32)


def _without_detail(picture: Floats) -> Floats:
    """(H, W) without what a moderate blur would take away: a box of DETAIL pixels, twice."""
    for _ in range(2):
        picture = _running_mean(_running_mean(picture).T).T
    return picture


def _running_mean(picture: Floats) -> Floats:
    """The mean of DETAIL rows around each; outside, the border repeats."""
    padded = np.pad(picture, ((DETAIL // 2 + 1, DETAIL // 2), (0, 0)), mode="edge")
    sums = padded.cumsum(axis=0)
    return np.asarray((sums[DETAIL:] - sums[:-DETAIL]) / DETAIL, dtype=np.float32)


def _orientation_votes(picture: Floats) -> Floats:
    """(H, W) to (H, W, D): each pixel's gradient magnitude, shared between the two nearest of D unsigned directions."""
    dy, dx = np.gradient(picture) if min(picture.shape) > 1 else (np.zeros_like(picture), np.zeros_like(picture))
    magnitude = np.hypot(dx, dy)
    position = (np.arctan2(dy, dx) / np.pi % 1.0) * ORIENTATIONS
    lower = np.floor(position).astype(np.intp) % ORIENTATIONS
    share = (position - np.floor(position)).astype(np.float32)
    votes = np.zeros((*picture.shape, ORIENTATIONS), dtype=np.float32)
    np.put_along_axis(votes, lower[..., None], (magnitude * (1 - share))[..., None], axis=2)
    np.put_along_axis(votes, ((lower + 1) % ORIENTATIONS)[..., None], (magnitude * share)[..., None], axis=2)
    return votes


def _pool(values: Floats, cell: int) -> Floats:
    """Sums (H, W, D) over cells of `cell` pixels a side; a rest at the border is left out."""
    rows, columns = max(1, values.shape[0] // cell), max(1, values.shape[1] // cell)
    cut = values[: rows * cell, : columns * cell]
    if cut.shape[0] < cell or cut.shape[1] < cell:
        return np.asarray(values.sum(axis=(0, 1), keepdims=True), dtype=np.float32)
    return np.asarray(cut.reshape(rows, cell, columns, cell, -1).sum(axis=(1, 3)), dtype=np.float32)


def _unit(cells: Floats) -> Floats:
    """Centres (C, D) over directions and scales to about unit length; cells without edges stay near 0."""
    centred = cells - cells.mean(axis=1, keepdims=True)
    strongest = float(np.abs(cells).sum(axis=1).max(initial=0.0))
    length = np.linalg.norm(centred, axis=1, keepdims=True)
    return np.asarray(centred / (length + 0.02 * strongest + 1e-6), dtype=np.float32)
