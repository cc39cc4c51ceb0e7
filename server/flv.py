"""H.264 packets → FLV tags, in memory, with silent AAC beside them where wanted.

PyAV muxes; it never sees the network. One muxer per connection: timestamps begin at 0 and the first packet must be a
keyframe with its parameter sets.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import av
import numpy as np

from engine.protocol import CLOCK_HZ, Packet

AUDIO_HZ = 44_100
AAC_SAMPLES = 1024  # per packet; the encoder also delays by as many
AUDIO_AHEAD_S = 4 * AAC_SAMPLES / AUDIO_HZ
TIME_BASE = Fraction(1, CLOCK_HZ)
TAG_HEADER, PREVIOUS_SIZE = 11, 4
FILE_HEADER = 9 + PREVIOUS_SIZE


@dataclass(frozen=True)
class Tag:
    """One FLV tag, which is one RTMP message. Kinds: 8 audio, 9 video, 18 script data."""

    kind: int
    timestamp_ms: int
    payload: bytes


class _Memory(io.RawIOBase):
    """Collects what the muxer writes. Not seekable, as a live stream is not."""

    def __init__(self) -> None:
        self.data = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]
        self.data += data
        return len(data)


class FlvMuxer:
    def __init__(self, width: int, height: int, fps: float, *, silent_audio: bool) -> None:
        self._memory = _Memory()
        self._container = av.open(
            self._memory, "w", format="flv", options={"flvflags": "no_duration_filesize+no_sequence_end"}
        )
        rate = Fraction(fps).limit_denominator(1001)
        self._video = self._container.add_mux_stream("h264", rate=rate, width=width, height=height, time_base=TIME_BASE)
        self._audio = self._container.add_stream("aac", rate=AUDIO_HZ) if silent_audio else None
        if self._audio is not None:
            self._audio.codec_context.layout = "stereo"
            self._audio.codec_context.bit_rate = 64_000
        self._samples = 0
        self._start_pts: int | None = None
        self._header_seen = False

    def mux(self, packet: Packet) -> Iterator[Tag]:
        """The tags that this packet completes; audio is always a little ahead so that video never waits for it."""
        if self._start_pts is None:
            assert packet.keyframe, "a stream begins at a keyframe"
            self._start_pts = packet.pts
        pts = packet.pts - self._start_pts
        self._mux_silence(until_s=pts / CLOCK_HZ + AUDIO_AHEAD_S)
        out = av.Packet(packet.data)
        out.pts = out.dts = pts
        out.time_base = TIME_BASE
        out.duration = packet.duration
        out.is_keyframe = packet.keyframe
        out.stream = self._video
        self._container.mux(out)
        yield from self._tags()

    def close(self) -> None:
        self._container.close()

    def _mux_silence(self, until_s: float) -> None:
        if self._audio is None:
            return
        while self._samples / AUDIO_HZ < until_s:
            frame = av.AudioFrame.from_ndarray(np.zeros((2, AAC_SAMPLES), np.float32), format="fltp", layout="stereo")
            frame.sample_rate = AUDIO_HZ
            self._samples += AAC_SAMPLES
            frame.pts = self._samples  # one frame late, so that the first packet has time 0 and not a negative one
            frame.time_base = Fraction(1, AUDIO_HZ)
            self._container.mux(self._audio.encode(frame))

    def _tags(self) -> Iterator[Tag]:
        data = self._memory.data
        if not self._header_seen:
            if len(data) < FILE_HEADER:
                return
            del data[:FILE_HEADER]
            self._header_seen = True
        while len(data) >= TAG_HEADER:
            size = int.from_bytes(data[1:4], "big")
            if len(data) < TAG_HEADER + size + PREVIOUS_SIZE:
                return
            timestamp_ms = int.from_bytes(data[4:7], "big") | data[7] << 24
            yield Tag(data[0], timestamp_ms, bytes(data[TAG_HEADER : TAG_HEADER + size]))
            del data[: TAG_HEADER + size + PREVIOUS_SIZE]
