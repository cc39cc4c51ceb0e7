"""Pictures to files people can open: MP4, animated GIF, a contact sheet, single PNGs.

A movie is written in fragments of a second, so that what was made before a full disk, a kill or an interrupt plays.
Knows nothing of where the pictures come from.
"""

from __future__ import annotations

import fcntl
import io
import logging
import math
import os
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import Self

import av
import numpy as np
from av.error import FFmpegError
from numpy.typing import NDArray
from typing_extensions import Buffer

log = logging.getLogger(__name__)

Picture = NDArray[np.uint8]
"""(H, W, 3) RGB."""

GIF_MAX_PICTURES = 600
_GIF_IN_MEMORY = f"a GIF is kept whole in memory, expected at most {GIF_MAX_PICTURES} pictures"


class OutputError(RuntimeError):
    """A file that cannot be written; the first `written` pictures of it play."""

    def __init__(self, message: str, written: int = 0) -> None:
        super().__init__(message)
        self.written = written


class Movie:
    """An MP4 (H.264) or, by its name, a GIF. Opened before anything is computed, so a bad path costs nothing."""

    def __init__(self, path: Path, width: int, height: int, fps: float, pictures: int = 0) -> None:
        """`pictures`: how many will be added, if that is known. Raises OutputError, and leaves the file as it was."""
        if path.suffix.lower() not in (".mp4", ".gif"):
            raise OutputError(f"output: expected a name ending in .mp4 or .gif, got {path.name!r}")
        self.path, self.written = path, 0
        self._told = False  # that writing has failed
        self._kind = path.suffix.lower()
        if self._kind == ".gif" and pictures > GIF_MAX_PICTURES:
            raise OutputError(f"output: {_GIF_IN_MEMORY}, got {pictures}")
        options = {"movflags": "frag_keyframe+empty_moov+default_base_moof"} if self._kind == ".mp4" else {}
        try:
            self._file = _File(path)
        except BlockingIOError as error:
            raise OutputError(f"output: {path} is being written by another process") from error
        except OSError as error:
            raise OutputError(f"output: cannot write {path}: {error.strerror}") from error
        container = av.open(self._file, "w", format=self._kind[1:], options=options)
        self._container: av.container.OutputContainer | None = container
        rate = Fraction(fps).limit_denominator(1001)
        self._colours = _Palette(width, height, rate) if self._kind == ".gif" else None
        self._stream = container.add_stream("gif" if self._colours else "libx264", rate=rate)
        self._stream.width, self._stream.height = width, height
        self._stream.pix_fmt = "pal8" if self._colours else "yuv420p"
        if not self._colours:
            self._stream.codec_context.gop_size = max(1, round(fps))
            self._stream.options = {"crf": "17", "preset": "veryfast"}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def add(self, pictures: NDArray[np.uint8]) -> None:
        """Append (N, H, W, 3). Raises OutputError when the disk is full; what was written before plays."""
        try:
            for picture in pictures:
                frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")
                if self._colours:
                    self._colours.add(frame)
                else:
                    frame.pts = self.written
                    self._mux(self._stream.encode(frame))
                self.written += 1
        except (OSError, FFmpegError) as error:
            raise self._stopped(error) from error
        if self._file.error is not None:
            raise self._stopped(self._file.error)

    def _mux(self, packets: list[av.Packet[av.VideoStream]]) -> None:
        assert self._container is not None, "the movie is closed"
        self._container.mux(packets)

    def close(self) -> None:
        """Write what is left and finish the file. Raises OutputError if that fails."""
        if self._container is None:
            return
        container = self._container
        try:
            for frame in self._colours.frames() if self._colours else ():
                self._mux(self._stream.encode(frame))
            self._mux(self._stream.encode(None))
            container.close()
        except (OSError, FFmpegError) as error:
            if not self._told:
                raise self._stopped(self._file.error or error) from error
        finally:
            self._container = None
            self._file.close()
            if self._file.error is not None and self._kind == ".mp4":
                _cut_to_whole_fragments(self.path)

    def _stopped(self, error: OSError | FFmpegError) -> OutputError:
        self._told = True
        text = f"output: writing {self.path} stopped after {self.written} pictures: {error.strerror or error}"
        return OutputError(text, self.written)


class _File(io.FileIO):
    """A file that remembers why it could not be written: libav only says so, and not why, when it is closed."""

    def __init__(self, path: Path) -> None:
        super().__init__(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "wb")
        self.error: OSError | None = None
        try:
            _lock(self.fileno())
            self.truncate(0)
        except OSError:
            self.close()
            raise

    def write(self, data: Buffer, /) -> int:
        view = memoryview(data)
        try:
            while view:
                view = view[super().write(view) :]
        except OSError as error:
            self.error = self.error or error
            raise
        return memoryview(data).nbytes


def _lock(fd: int) -> None:
    """Raises BlockingIOError if another has the file locked. Goes away with the file."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:  # a file system without locks
        log.info("files there cannot be locked")


def _cut_to_whole_fragments(path: Path) -> None:
    """Take a half-written fragment off the end of an MP4 (ISO/IEC 14496-12: size and type before each box)."""
    end, at = 0, 0
    with path.open("r+b") as file:
        while len(header := file.read(8)) == 8:
            size = int.from_bytes(header[:4], "big")
            at += size
            if size < 8 or at > path.stat().st_size:
                break
            end = at if header[4:] in (b"moov", b"mdat") else end
            file.seek(at)
        file.truncate(end)


class _Palette:
    """Reduces a clip to one palette of 256 colours (palettegen, paletteuse)."""

    def __init__(self, width: int, height: int, rate: Fraction) -> None:
        self._graph, self._count, self._step = av.filter.Graph(), 0, 1 / rate
        self._source = self._graph.add_buffer(
            width=width, height=height, format=av.VideoFormat("rgb24"), time_base=1 / rate
        )
        split = self._graph.add("split")
        generate, use = self._graph.add("palettegen"), self._graph.add("paletteuse", "dither=sierra2_4a")
        self._sink = self._graph.add("buffersink")
        self._source.link_to(split)
        split.link_to(use, 0, 0)
        split.link_to(generate, 1, 0)
        generate.link_to(use, 0, 1)
        use.link_to(self._sink)
        self._graph.configure()

    def add(self, frame: av.VideoFrame) -> None:
        if self._count == GIF_MAX_PICTURES:
            raise OutputError(f"output: {_GIF_IN_MEMORY}, got more")
        frame.pts, frame.time_base = self._count, self._step
        self._count += 1
        self._source.push(frame)

    def frames(self) -> list[av.VideoFrame]:
        self._source.push(None)
        pulled = (self._sink.pull() for _ in range(self._count))
        return [frame for frame in pulled if isinstance(frame, av.VideoFrame)]


def write_png(path: Path, picture: Picture) -> None:
    """One picture as a PNG."""
    codec = av.CodecContext.create("png", "w")
    codec.width, codec.height, codec.pix_fmt = picture.shape[1], picture.shape[0], "rgb24"
    codec.time_base = Fraction(1, 1)
    packets = codec.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24"))
    try:
        path.write_bytes(b"".join(bytes(p) for p in packets + codec.encode(None)))
    except OSError as error:
        raise OutputError(f"output: cannot write {path}: {error}") from error


def contact_sheet(pictures: list[Picture], columns: int = 6, gap: int = 4) -> Picture:
    """Pictures of one size in rows, on white."""
    height, width, _ = pictures[0].shape
    rows = math.ceil(len(pictures) / columns)
    columns = min(columns, len(pictures))
    sheet = np.full((rows * (height + gap) - gap, columns * (width + gap) - gap, 3), 255, np.uint8)
    for i, picture in enumerate(pictures):
        y, x = i // columns * (height + gap), i % columns * (width + gap)
        sheet[y : y + height, x : x + width] = picture
    return sheet
