"""Motion between neighbouring frames: how well the middle one of three follows from its neighbours, and which pixels
move on their own.

Needs OpenCV (dense flow by inverse search, DIS). Works on small luma; lengths are pixels of that picture.
"""

from dataclasses import dataclass

import cv2
import numpy as np
from numpy.typing import NDArray

from engine.lvbench.pixels import Floats

Flow = NDArray[np.float32]  # (H, W, 2), x then y, in pixels
Bytes = NDArray[np.uint8]

HALF_ERROR_PX = 0.75  # the misplacement of the middle frame that halves the marks for motion
MOVING_PX = 0.5  # slower than this, a pixel counts as standing
STANDING_WEIGHT = 0.01
LARGEST_SUBJECT = 0.5  # a moving region beyond this share of the picture is no subject
SMALLEST_SUBJECT = 0.003
VISIBLE_CHANGE = 4.0  # grey levels, on average over a region


@dataclass(frozen=True)
class Passage:
    """What three frames tell of the middle one: how far it is misplaced and how much moved that could be (`evidence`,
    for weighting), the plain prediction error `residual` in grey levels, and as masks (H, W) of 0 and 1 all that moves
    on its own (`moving`) and the most visible piece of it (`subject`, None when nothing does).
    """

    misplaced_px: float
    evidence: float
    residual: float
    moving: Floats
    subject: Floats | None


class MotionReader:
    """Reads triples of frames. Keeps the flow estimator and its grid, nothing of the video."""

    def __init__(self, height: int, width: int) -> None:
        self._dis = cv2.DISOpticalFlow.create(cv2.DISOPTICAL_FLOW_PRESET_FAST)
        self._xs, self._ys = np.meshgrid(np.arange(width, dtype=np.float32), np.arange(height, dtype=np.float32))
        self._too_small = min(height, width) < 24  # DIS needs patches of 8 at two scales

    def read(self, before: Bytes, middle: Bytes, after: Bytes, at: float) -> Passage:
        """`at` in (0, 1): where in time the middle frame lies between the others."""
        forth, back = self._flow(before, after), -self._flow(after, before)
        guesses = []
        for flow in (forth, back):
            guesses += [self._moved(before, flow, -at), self._moved(after, flow, 1.0 - at)]
        speed = np.maximum(np.hypot(forth[..., 0], forth[..., 1]), np.hypot(back[..., 0], back[..., 1]))
        misplaced, evidence = _misplacement(middle, guesses, speed)
        blend = (1.0 - at) * guesses[0] + at * guesses[1]
        moving, subject = self._independent_motion(before, after, 0.5 * (forth + back))
        return Passage(misplaced, evidence, float(np.abs(blend - middle).mean()), moving, subject)

    def _flow(self, start: Bytes, end: Bytes) -> Flow:
        if self._too_small:
            return np.zeros((*start.shape, 2), dtype=np.float32)
        # the stub does not know that None asks for a new array; an array would be taken as a first guess
        return np.asarray(self._dis.calc(start, end, None), dtype=np.float32)  # type: ignore[call-overload]

    def _independent_motion(self, before: Bytes, after: Bytes, flow: Flow) -> tuple[Floats, Floats | None]:
        """(moving, subject): what does not follow the camera, and shows it.

        The camera is an affine motion fitted to the flow by reweighted least squares, which gives a subject of under
        half the picture no say. Flow is guesswork where a picture is flat: a region only counts when following the
        camera would have left it visibly wrong.
        """
        camera = _camera_motion(flow)
        own = np.hypot(flow[..., 0] - camera[..., 0], flow[..., 1] - camera[..., 1])
        threshold = max(MOVING_PX, 0.4 * float(np.quantile(own, 0.98)))
        change = np.abs(self._moved(after, camera, 0.5) - self._moved(before, camera, -0.5))
        return _visible_regions((own > threshold).astype(np.uint8), change)

    def _moved(self, picture: Bytes, flow: Flow, by: float) -> Floats:
        """The picture as the flow says it looks at the middle frame's time."""
        xs, ys = self._xs + by * flow[..., 0], self._ys + by * flow[..., 1]
        moved = cv2.remap(picture.astype(np.float32), xs, ys, cv2.INTER_LINEAR, borderMode=cv2.BORDER_REPLICATE)
        return np.asarray(moved, dtype=np.float32)


def smoothness(misplaced_px: NDArray[np.float64]) -> NDArray[np.float64]:
    """Marks in 0..1 for middle frames misplaced by so many pixels."""
    return 1.0 / (1.0 + misplaced_px / HALF_ERROR_PX)


def _visible_regions(candidates: Bytes, change: Floats) -> tuple[Floats, Floats | None]:
    opened = cv2.morphologyEx(candidates, cv2.MORPH_OPEN, np.ones((3, 3), np.uint8))
    closed = cv2.morphologyEx(opened, cv2.MORPH_CLOSE, np.ones((5, 5), np.uint8))
    count, labels = cv2.connectedComponents(closed)
    areas = np.bincount(labels.ravel(), minlength=count)
    changes = np.bincount(labels.ravel(), weights=change.ravel(), minlength=count)
    share = areas / labels.size
    kept = (changes > VISIBLE_CHANGE * areas) & (share > SMALLEST_SUBJECT) & (share < LARGEST_SUBJECT)
    kept[0] = False  # what is no candidate
    moving = np.asarray(kept[labels], dtype=np.float32)
    if not kept.any():
        return moving, None
    most = int(np.argmax(np.where(kept, changes, 0.0)))
    return moving, np.asarray(labels == most, dtype=np.float32)


def _misplacement(middle: Bytes, guesses: list[Floats], speed: Floats) -> tuple[float, float]:
    """(pixels, evidence): the error of the best guess at each pixel, in grey levels over grey levels per pixel,
    weighted by motion.

    What is hidden in one neighbour shows in the other, and where the flow of one does not reach, the other's does; so
    the best guess forgives covering and uncovering, while a frame shown at the wrong time fits none. Dividing by the
    slope cancels contrast and most of a blur.
    """
    picture = middle.astype(np.float32)
    dy, dx = np.gradient(picture)
    weight = speed / (speed + MOVING_PX) + STANDING_WEIGHT
    error = np.minimum.reduce([np.abs(guess - picture) for guess in guesses])
    evidence = float((weight * (np.hypot(dx, dy) + 1.0)).sum())
    return float((weight * error).sum()) / evidence, evidence


def _camera_motion(flow: Flow, rounds: int = 4) -> Flow:
    height, width = flow.shape[:2]
    step = max(1, min(height, width) // 24)
    ys, xs = np.mgrid[0:height:step, 0:width:step].astype(np.float32)
    basis = _affine_basis(xs.ravel() / width, ys.ravel() / height)  # (n, 3)
    moves = flow[::step, ::step].reshape(-1, 2)
    weights = np.ones(len(moves), dtype=np.float32)
    for _ in range(rounds):
        weighted = basis * weights[:, None]
        fit = np.linalg.lstsq(weighted.T @ basis, weighted.T @ moves, rcond=None)[0]  # (3, 2)
        error = np.linalg.norm(moves - basis @ fit, axis=1)
        weights = 1.0 / (0.05 + error) ** 2
    across = np.arange(width, dtype=np.float32)[None, :, None] / width * fit[1]
    down = np.arange(height, dtype=np.float32)[:, None, None] / height * fit[2]
    return np.asarray(fit[0] + across + down, dtype=np.float32)


def _affine_basis(xs: Floats, ys: Floats) -> Floats:
    return np.stack([np.ones_like(xs), xs, ys], axis=1)
