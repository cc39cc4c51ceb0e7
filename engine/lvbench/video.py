"""Reads a video one frame at a time, at two sizes, in memory that does not depend on its length.

`probe` walks the packets without decoding them: headers lie about the number of frames, and live recordings have
none. `read_frames` then decodes. Each frame comes as luma (up to 480 lines, for sharpness) and as a small RGB picture
(for everything else). Time stamps are kept, so a variable frame rate is no special case. Knows nothing of parts or
measures.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import av
import numpy as np
from av.video.reformatter import Interpolation
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]

LUMA_LINES = 480  # sharpness is judged at no more than this
SMALL_LINES = 144  # the shorter side of the small picture


class VideoUnusable(ValueError):
    """A file that cannot be judged: not a video, damaged, or too short."""


@dataclass(frozen=True)
class VideoFacts:
    """What a walk over the packets tells. `frames` counts the packets that carry a picture."""

    path: str
    width: int
    height: int
    frames: int
    duration_s: float
    codec: str


@dataclass(frozen=True)
class VideoFrame:
    """One decoded frame, uint8. `small` (h, w, 3) is RGB; `luma()` (H, W) and `picture()` (H, W, 3), larger, are
    converted when asked for, which for most frames nobody does.
    """

    index: int
    time_s: float
    small: Pixels
    luma: Callable[[], Pixels]
    picture: Callable[[], Pixels]


def probe(path: Path) -> VideoFacts:
    """Counts frames and measures the duration without decoding."""
    if not path.is_file():
        raise VideoUnusable(f"{path}: expected a video file, got nothing there")
    try:
        with av.open(str(path)) as container:
            return _walk_packets(path, container)
    except av.FFmpegError as error:
        raise VideoUnusable(f"{path}: expected a video file, got: {error.strerror}") from error


def read_frames(path: Path) -> Iterator[VideoFrame]:
    """Decodes the first video stream. A damaged stretch ends in `VideoUnusable`, which says after how many frames."""
    index, time_s = 0, 0.0
    try:
        with av.open(str(path)) as container:
            stream = container.streams.video[0]
            stream.thread_type = "SLICE"  # frame threads would hold a dozen full frames
            size = (0, 0)
            for frame in container.decode(stream):
                time_s = frame.time if frame.time is not None else time_s
                size = size if index else (frame.width, frame.height)  # a later change of size is scaled away
                yield _two_sizes(index, time_s, frame, size)
                index += 1
    except av.FFmpegError as error:
        raise VideoUnusable(f"{path}: expected an undamaged video, got {error.strerror} after frame {index}") from error


def _walk_packets(path: Path, container: av.container.InputContainer) -> VideoFacts:
    if not container.streams.video:
        raise VideoUnusable(f"{path}: expected a video stream, got {len(container.streams)} streams without one")
    stream = container.streams.video[0]
    frames, first, last, length = 0, None, None, 0
    for packet in container.demux(stream):
        if packet.size == 0 or packet.is_discard:
            continue
        frames += 1
        if packet.pts is not None:
            first = packet.pts if first is None else min(first, packet.pts)
            last = packet.pts if last is None else max(last, packet.pts)
            length = packet.duration or length
    ticks = (last - first + length) if first is not None and last is not None else 0
    seconds = float(ticks * stream.time_base) if stream.time_base is not None else 0.0
    return VideoFacts(str(path), stream.width, stream.height, frames, seconds, stream.codec_context.name)


def _two_sizes(index: int, time_s: float, frame: av.VideoFrame, size: tuple[int, int]) -> VideoFrame:
    def read(lines: int, pixel_format: str) -> Pixels:
        width, height = fit(*size, lines)
        scaled = frame.reformat(width, height, pixel_format, interpolation=Interpolation.AREA)
        return np.asarray(scaled.to_ndarray(), dtype=np.uint8)

    return VideoFrame(
        index,
        time_s,
        read(SMALL_LINES, "rgb24"),
        luma=lambda: read(LUMA_LINES, "gray"),
        picture=lambda: read(LUMA_LINES, "rgb24"),
    )


def fit(width: int, height: int, lines: int) -> tuple[int, int]:
    """(width, height) scaled down, never up, so that the shorter side has at most `lines`."""
    shorter = min(width, height)
    if shorter <= lines:
        return width, height
    return max(1, round(width * lines / shorter)), max(1, round(height * lines / shorter))
