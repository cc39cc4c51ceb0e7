"""A clean synthetic clip and five ways to let it drift, one for each dimension. What the measures are proved with.

The clip: a patterned subject on a smooth path before a still, coloured landscape. Each fault grows from nothing at
the start to full strength at the end and touches one thing only. Deterministic, numpy and OpenCV, nothing read from
disk.
"""

from collections.abc import Iterator
from typing import Literal, get_args

import cv2
import numpy as np
from numpy.typing import NDArray

from engine.lvbench.pixels import Pixels
from engine.lvbench.video import LUMA_LINES, SMALL_LINES, VideoFrame, fit

Fault = Literal["none", "blur", "stutter", "fade", "cast", "slide", "morph"]
FAULTS: tuple[Fault, ...] = get_args(Fault)

HEIGHT, WIDTH = 144, 256
FPS = 16.0
SUBJECT_RADIUS = 24.0
SUBJECT_REACH = 40  # nothing of the subject lies further from its centre
PATH_FRAMES = 30  # once around the figure of eight
STRONGEST_BLUR_PX = 2.5
LONGEST_STUTTER = 0.75  # share of frames that repeat an earlier one at the end
STRONGEST_FADE = 0.85
STRONGEST_CAST = 0.45


def clip(fault: Fault, frames: int) -> Iterator[Pixels]:
    """The pictures (HEIGHT, WIDTH, 3) of the clip with one fault."""
    landscape, shown_late = _panorama(), _stutter(frames)
    for index in range(frames):
        strength = index / max(1, frames - 1)
        moment = shown_late[index] if fault == "stutter" else index
        slid = WIDTH * strength**2 if fault == "slide" else 0.0
        picture = _window(landscape, slid)
        _paint_subject(picture, moment, strength if fault == "morph" else 0.0)
        yield _grade(picture, fault, strength)


def clip_frames(fault: Fault, frames: int) -> Iterator[VideoFrame]:
    """The same clip as `VideoFrame`s, as if it had been decoded."""
    for index, picture in enumerate(clip(fault, frames)):
        yield video_frame(index, index / FPS, picture)


def video_frame(index: int, time_s: float, picture: Pixels) -> VideoFrame:
    """Any RGB picture (H, W, 3) as a decoded frame."""
    height, width = picture.shape[:2]
    small = cv2.resize(picture, fit(width, height, SMALL_LINES), interpolation=cv2.INTER_AREA)
    large = cv2.resize(picture, fit(width, height, LUMA_LINES), interpolation=cv2.INTER_AREA)
    return VideoFrame(
        index,
        time_s,
        np.asarray(small, dtype=np.uint8),
        luma=lambda: np.asarray(cv2.cvtColor(large, cv2.COLOR_RGB2GRAY), dtype=np.uint8),
        picture=lambda: np.asarray(large, dtype=np.uint8),
    )


def _panorama() -> NDArray[np.float32]:
    """A landscape of two widths (H, 2 W, 3) in 0..1: like colours everywhere, forms that change from left to right."""
    random = np.random.default_rng(7)
    y, x = np.mgrid[0:HEIGHT, 0 : 2 * WIDTH].astype(np.float32)
    angle = np.pi * x / (2 * WIDTH) * 1.5
    waves = np.sin((x * np.cos(angle) + y * np.sin(angle)) / 4.0)
    grain = cv2.GaussianBlur(random.standard_normal((HEIGHT, 2 * WIDTH)).astype(np.float32), (0, 0), 1.2)
    hills = cv2.GaussianBlur(random.standard_normal((HEIGHT, 2 * WIDTH, 3)).astype(np.float32), (0, 0), 7.0)
    hills = hills / hills.std(axis=(0, 1))
    brightness = 0.5 + 0.11 * waves + 0.12 * grain / grain.std() * 0.6
    return np.asarray(np.clip(brightness[..., None] + 0.09 * hills, 0.0, 1.0), dtype=np.float32)


def _stutter(frames: int) -> list[int]:
    """Which moment each frame shows: more and more of them repeat an earlier one, then catch up."""
    random = np.random.default_rng(11)
    shown, moments = 0, []
    for index in range(frames):
        repeats = random.random() < LONGEST_STUTTER * index / max(1, frames - 1)
        shown = shown if repeats else index
        moments.append(shown)
    return moments


def _window(landscape: NDArray[np.float32], left: float) -> NDArray[np.float32]:
    shift = np.array([[1.0, 0.0, -left], [0.0, 1.0, 0.0]], dtype=np.float32)
    return np.asarray(
        cv2.warpAffine(landscape, shift, (WIDTH, HEIGHT), borderMode=cv2.BORDER_REFLECT), dtype=np.float32
    )


def _paint_subject(picture: NDArray[np.float32], moment: int, morph: float) -> None:
    """Draws the subject in place: a striped disc that, morphing, becomes a star with other stripes. Its area stays
    the same.
    """
    phase = 2.0 * np.pi * moment / PATH_FRAMES
    centre_x, centre_y = WIDTH * (0.5 + 0.08 * np.sin(phase)), HEIGHT * (0.5 + 0.05 * np.sin(2.0 * phase))
    top, left = int(centre_y - SUBJECT_REACH), int(centre_x - SUBJECT_REACH)
    y, x = np.mgrid[top : top + 2 * SUBJECT_REACH, left : left + 2 * SUBJECT_REACH].astype(np.float32)
    dx, dy = x - centre_x, y - centre_y
    bearing = np.arctan2(dy, dx)
    outline = 1.0 + 0.45 * morph * np.sin(4.0 * bearing + 0.5)
    radius = SUBJECT_RADIUS * outline / np.sqrt(1.0 + 0.5 * (0.45 * morph) ** 2)
    inside = np.clip(radius - np.hypot(dx, dy) + 0.5, 0.0, 1.0)[..., None]
    turn = 0.5 * np.pi * morph
    stripes = 0.5 + 0.5 * np.sin((dx * np.cos(turn) + dy * np.sin(turn)) / 2.5)
    coat = np.stack([0.35 + 0.45 * stripes, 0.25 + 0.45 * stripes, 0.2 + 0.45 * stripes], axis=-1)
    place = picture[top : top + 2 * SUBJECT_REACH, left : left + 2 * SUBJECT_REACH]
    place[:] = place * (1.0 - inside) + coat * inside


def _grade(picture: NDArray[np.float32], fault: Fault, strength: float) -> Pixels:
    if fault == "blur" and strength > 0.0:
        picture = np.asarray(cv2.GaussianBlur(picture, (0, 0), STRONGEST_BLUR_PX * strength + 0.05), dtype=np.float32)
    if fault == "fade":
        grey = picture @ np.array([0.299, 0.587, 0.114], dtype=np.float32)
        picture = picture + STRONGEST_FADE * strength * (grey[..., None] - picture)
    if fault == "cast":
        picture = picture * (1.0 + STRONGEST_CAST * strength * np.array([0.7, 0.0, -1.0], dtype=np.float32))
    return np.asarray(np.clip(255.0 * picture + 0.5, 0, 255), dtype=np.uint8)
