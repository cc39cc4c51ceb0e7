"""One picture in, its packets out: PyAV encoders set up for live use, chosen by trying them.

H.264 is constrained baseline without B frames, parameter sets repeated at every IDR (a viewer may join at any of them),
one slice a picture, rate held by a half-second buffer. VP8 is libvpx in its real-time mode. Knows no world, no clock
and no viewers; timestamps come with each picture. An encoder belongs to the one thread that calls it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from fractions import Fraction

import av
import numpy as np
from av.error import FFmpegError
from av.video.frame import PictureType
from av.video.reformatter import ColorRange, Colorspace, VideoReformatter
from numpy.typing import NDArray

from engine.profiler import span
from engine.protocol import CLOCK_HZ, Codec

log = logging.getLogger(__name__)

Picture = NDArray[np.uint8]
"""(H, W, 3) uint8, RGB."""

TIME_BASE = Fraction(1, CLOCK_HZ)
KEYFRAME_EVERY_S = 4.0  # without being asked; joins ask, so this only bounds how long a lost request hurts
VBV_S = 0.5
MAX_RATE = 1.5  # of the bit rate, over the buffer's length
BITS_PER_PIXEL, BITS_BESIDE = 0.2, 450_000  # small pictures have more detail to a pixel
MIN_BITS_PER_SECOND, MAX_BITS_PER_SECOND = 60_000, 40_000_000
SMPTE170M, BT709 = 6, 1  # as in ISO/IEC 23091-2; 601 matrix, because viewers assume it below 720 lines

_HARDWARE = ("h264_nvenc", "h264_qsv", "h264_v4l2m2m")
_SOFTWARE = {"h264": "libx264", "vp8": "libvpx"}
_OPTIONS = {
    "libx264": {"preset": "ultrafast", "tune": "zerolatency", "x264-params": "repeat-headers=1:scenecut=0"},
    "libvpx": {
        "deadline": "realtime",
        "cpu-used": "8",
        "lag-in-frames": "0",
        "error-resilient": "1",
        "auto-alt-ref": "0",
    },
    "h264_nvenc": {"preset": "p1", "tune": "ull", "zerolatency": "1", "delay": "0", "forced-idr": "1", "rc": "cbr"},
    "h264_qsv": {"preset": "veryfast", "async_depth": "1", "forced_idr": "1", "look_ahead": "0"},
    "h264_v4l2m2m": {},
}


class EncoderError(RuntimeError):
    """An encoder could not be opened or failed on a picture."""


@dataclass(frozen=True)
class Encoded:
    data: bytes  # Annex B for H.264
    pts: int  # at 90 kHz
    keyframe: bool


class VideoEncoder:
    """Encodes pictures of one size; each picture gives its packet at once."""

    def __init__(self, name: str, width: int, height: int, fps: float, bits_per_second: int) -> None:
        if width % 2 or height % 2 or min(width, height) < 16:
            raise EncoderError(f"expected a width and height that are even and at least 16, got {width}x{height}")
        self.name, self.width, self.height, self.fps = name, width, height, fps
        self.bits_per_second = _bounded(bits_per_second)
        self._reformatter = VideoReformatter()
        self._context = self._open()

    def encode(self, picture: Picture, pts: int, *, keyframe: bool = False) -> list[Encoded]:
        """The packets that `picture` completes (one, with every encoder that has no delay)."""
        if picture.shape != (self.height, self.width, 3) or picture.dtype != np.uint8:
            expected = f"({self.height}, {self.width}, 3) uint8"
            raise EncoderError(f"expected a picture {expected}, got {picture.shape} {picture.dtype}")
        frame = self._frame(picture)
        frame.pts, frame.time_base = pts, TIME_BASE
        if keyframe:
            frame.pict_type = PictureType.I
        try:
            packets = self._context.encode(frame)
        except FFmpegError as error:
            raise EncoderError(f"{self.name} failed: {error}") from error
        return [Encoded(bytes(p), p.pts, p.is_keyframe) for p in packets if p.pts is not None]

    def set_bitrate(self, bits_per_second: int) -> bool:
        """Aim at another rate from the next picture on, then a keyframe; False when the change is too small.

        The wrapped libraries do not take a new rate on the fly (measured with libx264 and libvpx: the old rate goes
        on), and opening again costs about 3 ms.
        """
        wanted = _bounded(bits_per_second)
        if abs(wanted - self.bits_per_second) < 0.1 * self.bits_per_second:
            return False
        self.bits_per_second = wanted
        self._context = self._open()
        return True

    def _frame(self, picture: Picture) -> av.VideoFrame:
        with span("colour"):
            return self._planes(picture)

    def _planes(self, picture: Picture) -> av.VideoFrame:
        source = av.VideoFrame.from_ndarray(picture, format="rgb24")
        return self._reformatter.reformat(
            source,
            format="yuv420p",
            dst_colorspace=Colorspace.SMPTE170M,
            dst_color_range=ColorRange.MPEG,
        )

    def _open(self) -> av.VideoCodecContext:
        context = av.CodecContext.create(self.name, "w")
        assert isinstance(context, av.VideoCodecContext)
        context.width, context.height, context.pix_fmt = self.width, self.height, "yuv420p"
        context.time_base, context.framerate = TIME_BASE, Fraction(self.fps).limit_denominator(1001)
        context.bit_rate, context.gop_size = self.bits_per_second, max(1, round(self.fps * KEYFRAME_EVERY_S))
        context.max_b_frames, context.thread_count = 0, 1  # more threads would cut pictures into slices
        context.color_range, context.colorspace = ColorRange.MPEG, SMPTE170M
        context.color_primaries, context.color_trc = BT709, BT709
        if self.name != "libvpx":
            context.profile = "Baseline"
        buffer = {
            "maxrate": str(int(MAX_RATE * self.bits_per_second)),
            "bufsize": str(int(VBV_S * self.bits_per_second)),
        }
        context.options = {**_OPTIONS[self.name], **buffer}
        try:
            context.open()
        except (FFmpegError, ValueError) as error:
            raise EncoderError(f"{self.name} cannot be opened at {self.width}x{self.height}: {error}") from error
        return context


def default_bitrate(width: int, height: int, fps: float) -> int:
    """Bits per second at which a picture of this size loses less than a model's own error (35 dB in tiny-world)."""
    return _bounded(int(BITS_PER_PIXEL * width * height * fps) + BITS_BESIDE)


def choose_encoder(codec: Codec, wanted: str = "auto") -> str:
    """Name of the encoder to use: the first that encodes a picture here; a name in a list means nothing."""
    if codec == "vp8" or wanted in _SOFTWARE.values():
        return _SOFTWARE[codec]
    for name in _HARDWARE if wanted == "auto" else (wanted,):
        reason = probe(name)
        if not reason:
            return name
        log.log(logging.DEBUG if wanted == "auto" else logging.WARNING, "encoder %s not used: %s", name, reason)
    return _SOFTWARE[codec]


def probe(name: str) -> str:
    """Why the encoder `name` cannot be used here; "" when it encoded a keyframe and a picture after it."""
    try:
        encoder = VideoEncoder(name, 256, 144, 16.0, 400_000)
        picture = np.full((144, 256, 3), 128, np.uint8)
        packets = encoder.encode(picture, 0) + encoder.encode(picture, CLOCK_HZ // 16)
    except (EncoderError, FFmpegError, OSError, ValueError) as error:
        return str(error)
    return "" if len(packets) == 2 and packets[0].keyframe else f"expected two packets at once, got {len(packets)}"


def _bounded(bits_per_second: int) -> int:
    return min(max(int(bits_per_second), MIN_BITS_PER_SECOND), MAX_BITS_PER_SECOND)
