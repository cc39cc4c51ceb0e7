"""A recording: the session's packets as fragmented MP4 on disk, written by a thread of its own.

One fragment per second, flushed when it is complete: what a kill leaves plays up to the last fragment, and the file
can be read while it grows. Trouble (disk full, limits) ends the recording and nothing else.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import BinaryIO, Literal

import av

from engine.protocol import CLOCK_HZ, Packet
from server.broadcast import Broadcast, BroadcastOver
from server.schemas import OutputState, OutputView, now
from server.settings import Limits

log = logging.getLogger(__name__)

TIME_BASE = Fraction(1, CLOCK_HZ)
RESERVE_BYTES = 64 * 1024**2  # of free disk, left to the rest of the machine
TELL_EVERY_S = 5.0
FRAGMENT_US = 1_000_000
SUFFIX = ".inferix.mp4"
QUEUED_PACKETS = 256


class RecordingFull(Exception):
    """A limit is reached; the message says which."""


class RecordingFile:
    """The file itself. Blocking: used by one thread."""

    def __init__(self, path: Path, width: int, height: int, fps: float, limits: Limits) -> None:
        self._limits = limits
        self._file: BinaryIO = path.open("wb", buffering=0)
        self._folder = path.parent
        self._container = av.open(
            self._file,
            "w",
            format="mp4",
            options={
                "movflags": "frag_keyframe+empty_moov+default_base_moof",
                "frag_duration": str(FRAGMENT_US),
                "flush_packets": "1",
            },
        )
        rate = Fraction(fps).limit_denominator(1001)
        self._stream = self._container.add_mux_stream(
            "h264", rate=rate, width=width, height=height, time_base=TIME_BASE
        )
        self._start_pts: int | None = None
        self.seconds = 0.0
        self.bytes = 0

    def write(self, packet: Packet) -> None:
        """Raises RecordingFull, OSError or av.FFmpegError; the file stays readable."""
        if self._start_pts is None:
            self._start_pts = packet.pts
        pts = packet.pts - self._start_pts
        if packet.keyframe:
            self._check_limits(pts / CLOCK_HZ)
        out = av.Packet(packet.data)
        out.pts = out.dts = pts
        out.time_base = TIME_BASE
        out.duration = packet.duration
        out.is_keyframe = packet.keyframe
        out.stream = self._stream
        self._container.mux(out)
        self.seconds = (pts + packet.duration) / CLOCK_HZ
        self.bytes = self._file.tell()

    def close(self) -> None:
        try:
            self._container.close()
            self.bytes = self._file.tell()
        finally:
            self._file.close()

    def _check_limits(self, seconds: float) -> None:
        if seconds >= self._limits.record_s:
            raise RecordingFull(f"the limit of {self._limits.record_s:g} s is reached")
        if self.bytes >= self._limits.record_bytes:
            raise RecordingFull(f"the limit of {self._limits.record_bytes} bytes is reached")
        if shutil.disk_usage(self._folder).free < RESERVE_BYTES:
            raise OSError(errno.ENOSPC, "less than 64 MiB of disk are free")


class Recorder:
    kind: Literal["recording"] = "recording"

    def __init__(
        self,
        id: str,
        path: Path,
        broadcast: Broadcast,
        open_file: Callable[[Path], RecordingFile],
        changed: Callable[[OutputView], None],
    ) -> None:
        """`open_file` is called at the first packet, when size and rate are known."""
        self._broadcast = broadcast
        self._open_file = open_file
        self._changed = changed
        self._subscription = broadcast.subscribe("recording", QUEUED_PACKETS)
        self._file: RecordingFile | None = None
        self._since = now()
        self.id = id
        self.path = path
        self.state: OutputState = "connecting"
        self.reason = ""

    @property
    def active(self) -> bool:
        return self.state not in ("failed", "stopped")

    def view(self) -> OutputView:
        return OutputView(
            id=self.id,
            kind=self.kind,
            state=self.state,
            reason=self.reason,
            since=self._since,
            packets_dropped=self._subscription.dropped,
            bytes=self._file.bytes if self._file else 0,
            seconds=round(self._file.seconds, 3) if self._file else 0.0,
        )

    def stop(self) -> None:
        self._subscription.close()

    async def run(self) -> None:
        """Record until stopped, until the session is over, or until the disk or a limit says no."""
        loop = asyncio.get_running_loop()
        thread = ThreadPoolExecutor(1, thread_name_prefix=f"recording-{self.id}")
        end: tuple[OutputState, str] = ("stopped", "")
        told_s = loop.time()
        try:
            while True:
                packet = await self._subscription.get()
                await loop.run_in_executor(thread, self._write, packet)
                if self.state == "connecting":
                    self._enter("live")
                elif loop.time() - told_s > TELL_EVERY_S:
                    told_s = loop.time()
                    self._changed(self.view())
        except BroadcastOver:
            pass
        except RecordingFull as error:
            end = ("stopped", str(error))
        except (OSError, av.FFmpegError) as error:
            end = ("failed", _told(error))
        finally:
            self._subscription.close()
            problem = await asyncio.shield(loop.run_in_executor(thread, self._finish))
            thread.shutdown(wait=False)
            self._enter(*(("failed", problem) if problem and end[0] != "failed" else end))

    def _write(self, packet: Packet) -> None:
        if self._file is None:
            self._file = self._open_file(self.path)
        self._file.write(packet)

    def _finish(self) -> str:
        """Close the file; what went wrong, in words."""
        try:
            if self._file is not None:
                self._file.close()
        except (OSError, av.FFmpegError) as error:
            return _told(error)
        return ""

    def _enter(self, state: OutputState, reason: str = "") -> None:
        self.state, self.reason, self._since = state, reason, now()
        log.info("recording %s: %s%s", self.path.name, state, f" ({reason})" if reason else "")
        self._changed(self.view())


def remove_old(folder: Path, keep_days: float) -> list[Path]:
    """Delete recordings of ours (by their suffix) older than this; returns what went."""
    gone = []
    for path in folder.glob(f"*{SUFFIX}"):
        if time.time() - path.stat().st_mtime > keep_days * 86_400:
            path.unlink(missing_ok=True)
            gone.append(path)
    return gone


def _told(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return "the disk is full"
    return f"the file cannot be written: {error.strerror if isinstance(error, OSError) else error}"
