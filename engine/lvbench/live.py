"""The drift meter of a running world: the five weight-free measures on thumbnails, every few seconds, in numpy alone.

`LiveDrift.observe` takes a burst of three neighbouring thumbnails (about 90 lines) and compares them with the world's
anchor, the mean of its first bursts. Motion is the error of the middle thumbnail predicted by symmetric block
matching; what moves unlike the rest is the subject. Cheaper and coarser than `classic.py`, and never put in one table
with it. Knows nothing of worlds or clocks: the caller decides when to look.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from engine.lvbench.appearance import (
    Descriptor,
    centre_mask,
    describe_background,
    describe_subject,
    likeness,
    mean_descriptor,
    sample,
)
from engine.lvbench.pixels import Floats, Pixels, box_mean, colour_quality, luma_of, sharpness

WINDOW_BURSTS = 4
THUMBNAIL_LINES = 90  # larger thumbnails are averaged down to about this
BLOCK = 10  # pixels along one side of a matched block
REACH = 5  # half the furthest motion over the burst, in pixels
BORDER = REACH + 1
HALF_ERROR_PX = 0.75
STRANGER_PX = 1.5  # half-motion beyond the camera's from which a block belongs to the subject
LARGEST_SUBJECT = 0.5  # as a share of all blocks
SMALLEST_SUBJECT_BLOCKS = 4


class ThumbnailsWrong(ValueError):
    """A burst that cannot be read."""


@dataclass(frozen=True)
class LiveReading:
    """How far each dimension has moved from the anchor: 0 the same, 1 all gone.

    Clarity and aesthetic count both ways, |m - m_anchor| / m_anchor; the others only what was lost.
    """

    clarity: float
    motion: float
    aesthetic: float
    background: float
    subject: float

    def as_metrics(self) -> dict[str, float]:
        """`drift_clarity` .. `drift_subject`, and `drift`, the largest of them."""
        values = {f"drift_{field.name}": float(getattr(self, field.name)) for field in fields(self)}
        return {**values, "drift": max(values.values())}


class LiveDrift:
    """One world's meter. Holds its anchor and the last few bursts, whatever the world's age."""

    def __init__(self) -> None:
        self._recent: deque[_Burst] = deque(maxlen=WINDOW_BURSTS)
        self._anchor: _Anchor | None = None

    def observe(self, thumbnails: Sequence[Pixels]) -> LiveReading | None:
        """Three neighbouring RGB thumbnails (H, W, 3), oldest first. What is compared is the mean of the last few
        bursts; None while the anchor is being taken. Thumbnails of another size start anew.
        """
        burst = _read_burst(thumbnails)
        if self._recent and self._recent[0].shape != burst.shape:
            self.reset()
        self._recent.append(burst)
        if self._anchor is not None:
            return self._anchor.compare(self._recent)
        if len(self._recent) == WINDOW_BURSTS:
            self._anchor = _Anchor(self._recent)
        return None

    def reset(self) -> None:
        """Forgets the anchor: after a cut or a new prompt, what comes next is the new reference."""
        self._recent.clear()
        self._anchor = None


@dataclass(frozen=True)
class _Burst:
    shape: tuple[int, ...]
    sharp: float
    misplaced: float  # grey levels
    evidence: float  # grey levels per pixel
    colour: float
    background: Descriptor
    moving: Descriptor | None
    centre: Descriptor


class _Anchor:
    """The mean of the first bursts, and how alike they were to each other."""

    def __init__(self, bursts: Sequence[_Burst]) -> None:
        self._sharp = _mean([burst.sharp for burst in bursts])
        self._smooth = _smoothness(bursts)
        self._colour = _mean([burst.colour for burst in bursts])
        self._background, self._background_own = _reference([burst.background for burst in bursts])
        moving = _moving(bursts)
        self._by_motion = len(moving) > 1
        self._subject, self._subject_own = _reference(moving if self._by_motion else [b.centre for b in bursts])

    def compare(self, bursts: Sequence[_Burst]) -> LiveReading:
        subjects = _moving(bursts) if self._by_motion else [burst.centre for burst in bursts]
        return LiveReading(
            clarity=_change(_mean([burst.sharp for burst in bursts]), self._sharp),
            motion=_loss(_smoothness(bursts), self._smooth),
            aesthetic=_change(_mean([burst.colour for burst in bursts]), self._colour),
            background=_loss(_alike(self._background, [burst.background for burst in bursts]), self._background_own),
            subject=self._subject_loss(subjects),
        )

    def _subject_loss(self, subjects: list[Descriptor]) -> float:
        """Nothing lost while no subject shows itself: what stands still is seen as background."""
        return _loss(_alike(self._subject, subjects), self._subject_own) if subjects else 0.0


def _alike(reference: Descriptor, descriptors: list[Descriptor]) -> float:
    return _mean([likeness(reference, descriptor) for descriptor in descriptors])


def _moving(bursts: Sequence[_Burst]) -> list[Descriptor]:
    return [burst.moving for burst in bursts if burst.moving is not None]


def _smoothness(bursts: Sequence[_Burst]) -> float:
    misplaced_px = sum(burst.misplaced for burst in bursts) / sum(burst.evidence for burst in bursts)
    return 1.0 / (1.0 + misplaced_px / HALF_ERROR_PX)


def _read_burst(thumbnails: Sequence[Pixels]) -> _Burst:
    if len(thumbnails) != 3:
        raise ThumbnailsWrong(f"expected 3 neighbouring thumbnails, got {len(thumbnails)}")
    shape = thumbnails[0].shape
    if len(shape) != 3 or shape[2] != 3 or min(shape[:2]) < 3 * BLOCK or any(t.shape != shape for t in thumbnails):
        got = [t.shape for t in thumbnails]
        raise ThumbnailsWrong(f"expected three RGB pictures of one size, {3 * BLOCK} pixels or more a side, got {got}")
    before, middle, after = (box_mean(luma_of(t), THUMBNAIL_LINES) for t in thumbnails)
    misplaced, evidence, mask = _match(before, middle, after)
    seen = mask if mask is not None else np.zeros_like(middle)
    centre = describe_subject(middle, centre_mask(*middle.shape))
    assert centre is not None  # its mask is never empty
    return _Burst(
        shape=shape,
        sharp=sharpness(luma_of(thumbnails[1])),
        misplaced=misplaced,
        evidence=evidence,
        colour=colour_quality(thumbnails[1]),
        background=describe_background(middle, seen),
        moving=describe_subject(middle, seen),
        centre=centre,
    )


def _match(before: Floats, middle: Floats, after: Floats) -> tuple[float, float, Floats | None]:
    """(error of the middle, its slope, mask of what moves unlike the rest) by matching blocks of both neighbours.

    A block that is at x in the middle came from x - d and goes to x + d: the d where both neighbours agree best, in
    whole pixels first, then in halves. A border of REACH + 1 pixels is lost.
    """
    whole = [(dy, dx) for dy in range(-REACH, REACH + 1) for dx in range(-REACH, REACH + 1)]
    costs = [_block_sums(np.abs(_inner(before, -dy, -dx) - _inner(after, dy, dx))) for dy, dx in whole]
    moves = _cheapest(np.array(whole, dtype=np.float32), np.stack(costs))  # (R, C, 2)

    fine_before, fine_after, picture = _doubled(before), _doubled(after), _inner(middle, 0, 0)
    halves = np.array([(dy, dx) for dy in (-0.5, 0.0, 0.5) for dx in (-0.5, 0.0, 0.5)], dtype=np.float32)
    pairs = [(_moved(fine_before, -moves - half), _moved(fine_after, moves + half)) for half in halves]
    costs = [_block_sums(np.abs(past - future)) for past, future in pairs]
    cut = picture[: pairs[0][0].shape[0], : pairs[0][0].shape[1]]
    errors = np.stack([_block_sums(np.minimum(np.abs(past - cut), np.abs(future - cut))) for past, future in pairs])
    chosen = np.stack(costs).argmin(axis=0)  # (R, C)
    moves = moves + halves[chosen]
    error = np.take_along_axis(errors, chosen[None], axis=0)[0]
    dy, dx = np.gradient(cut)
    speed = np.linalg.norm(moves, axis=-1)
    weight = speed / (speed + 0.5) + 0.01
    evidence = float((weight * _block_sums(np.hypot(dx, dy) + 1.0)).sum())
    return float((weight * error).sum()), evidence, _stranger_mask(moves, middle.shape)


def _cheapest(shifts: Floats, costs: Floats) -> Floats:
    """The best of (S, 2) shifts for each block by costs (S, R, C); among like ones the smaller."""
    costs = costs + 0.02 * BLOCK**2 * np.linalg.norm(shifts, axis=1)[:, None, None]
    return np.asarray(shifts[costs.argmin(axis=0)], dtype=np.float32)


def _moved(fine: Floats, moves: Floats) -> Floats:
    """Each block of the inner picture read at its place plus its move (R, C, 2), from a picture of twice the size."""
    steps = np.kron(np.rint(2 * moves).astype(np.intp), np.ones((BLOCK, BLOCK, 1), dtype=np.intp))  # (H, W, 2)
    ys, xs = np.ogrid[: steps.shape[0], : steps.shape[1]]
    return np.asarray(fine[2 * (ys + BORDER) + steps[..., 0], 2 * (xs + BORDER) + steps[..., 1]], dtype=np.float32)


def _doubled(picture: Floats) -> Floats:
    height, width = picture.shape
    return sample(picture, np.arange(2 * height - 1) / 2.0, np.arange(2 * width - 1) / 2.0)


def _stranger_mask(moves: Floats, shape: tuple[int, ...]) -> Floats | None:
    camera = np.median(moves.reshape(-1, 2), axis=0)
    strange = np.linalg.norm(moves - camera, axis=-1) > STRANGER_PX  # (R, C)
    around = sum(np.roll(strange, (dy, dx), (0, 1)).astype(int) for dy in (-1, 0, 1) for dx in (-1, 0, 1)) - strange
    strange = (strange & (around >= 2)) | (around >= 4)  # no lone blocks, no holes
    if not SMALLEST_SUBJECT_BLOCKS <= strange.sum() < LARGEST_SUBJECT * strange.size:
        return None
    mask = np.zeros(shape, dtype=np.float32)
    blocks = np.kron(strange, np.ones((BLOCK, BLOCK), dtype=bool))
    mask[BORDER : BORDER + blocks.shape[0], BORDER : BORDER + blocks.shape[1]] = blocks
    return mask


def _inner(picture: Floats, dy: int, dx: int) -> Floats:
    height, width = picture.shape
    return picture[BORDER + dy : height - BORDER + dy, BORDER + dx : width - BORDER + dx]


def _block_sums(values: Floats) -> Floats:
    rows, columns = values.shape[0] // BLOCK, values.shape[1] // BLOCK
    cut = values[: rows * BLOCK, : columns * BLOCK]
    return np.asarray(cut.reshape(rows, BLOCK, columns, BLOCK).sum(axis=(1, 3)), dtype=np.float32)


def _reference(descriptors: list[Descriptor]) -> tuple[Descriptor, float]:
    """The mean, and how alike each is to the mean of the others."""
    own = [
        likeness(mean_descriptor(descriptors[:i] + descriptors[i + 1 :]), descriptors[i])
        for i in range(len(descriptors))
    ]
    return mean_descriptor(descriptors), _mean(own)


def _mean(values: Sequence[float] | NDArray[np.float64]) -> float:
    return float(np.mean(values))


def _change(now: float, then: float) -> float:
    return abs(now - then) / then if then > 0.0 else 0.0


def _loss(now: float, then: float) -> float:
    return max(0.0, then - now) / then if then > 0.0 else 0.0
