"""Small video files for the tests of LV-Bench."""

from collections.abc import Iterable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Literal

import av
import numpy as np

from engine.lvbench.pixels import Pixels

TICKS = 1000  # a second


def write_video(
    path: Path,
    pictures: Iterable[Pixels],
    times_ms: Sequence[int] | None = None,
    codec: Literal["libx264", "ffv1"] = "libx264",
) -> Path:
    """Pictures (H, W, 3) to a file, at 16 fps or at the given times. `ffv1` in .mkv takes odd sizes, without loss."""
    container = av.open(str(path), "w")
    stream: av.VideoStream | None = None
    for index, picture in enumerate(pictures):
        if stream is None:
            stream = container.add_stream(codec, rate=16)
            stream.height, stream.width = picture.shape[:2]
            stream.pix_fmt = "bgr0" if codec == "ffv1" else "yuv420p"
            stream.time_base = stream.codec_context.time_base = Fraction(1, TICKS)
        frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")
        frame.time_base = Fraction(1, TICKS)
        frame.pts = times_ms[index] if times_ms is not None else index * TICKS // 16
        container.mux(stream.encode(frame))
    if stream is not None:
        container.mux(stream.encode(None))
    container.close()
    return path


def noise(frames: int, height: int, width: int) -> list[Pixels]:
    """A still, random picture with a bright square that walks."""
    ground = np.random.default_rng(1).integers(0, 200, (height, width, 3), dtype=np.uint8)
    pictures = []
    for index in range(frames):
        picture = ground.copy()
        left = index % max(1, width - 4)
        picture[height // 3 : 2 * height // 3, left : left + 4] = 255
        pictures.append(picture)
    return pictures
