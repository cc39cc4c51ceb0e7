"""How a world begins from a picture or a clip: the file's pictures, fitted to the model, become its first blocks.

Scaled to cover the model's size and cropped in the middle; a clip is sampled at the model's rate. A picture, or a clip
that is too short, stands still until the first block is full. The file is opened here and handed to the demuxer as
bytes, which may open nothing else: what a path or a playlist inside points to is never fetched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import av
import av.container
import numpy as np
import torch
from av.error import FFmpegError
from numpy.typing import NDArray
from torch import Tensor

from engine.generator import Block, Generator
from engine.models import Geometry
from engine.samplers import Beginner
from engine.world import World

MAX_START_S = 20.0  # of a clip; what comes after is not read
MAX_PIXELS = 64_000_000  # of one picture in the file
FORMATS = frozenset(
    {"png_pipe", "jpeg_pipe", "webp_pipe", "bmp_pipe", "gif", "mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm", "mpegts"}
)


Conditions: TypeAlias = Callable[[Tensor], dict[str, Tensor]]
"""What some models have as `picture_conditions`: a picture (H, W, 3) to the `extra` signals of a world."""


class StartError(ValueError):
    """A world cannot begin from this file; the message says what was expected and what was got."""


@torch.inference_mode()
def begin(generator: Generator, world: World) -> list[Block]:
    """Let a newly opened world begin from the file its spec names; its first blocks, to be decoded like any others.

    Without such a file there are none; nor with a model that is conditioned on a picture all along. Raises StartError.
    """
    path, encoder, geometry = world.spec.start_picture, world.model.encoder, world.model.geometry
    conditions: Conditions | None = getattr(world.model, "picture_conditions", None)
    if path is None and conditions is not None:
        raise StartError(f"start_picture: {world.model.name} starts from a picture, got none")
    if path is None:
        return []
    if conditions is not None:
        world.extra = conditions(read_pictures(Path(path), geometry)[0])
        return []
    if encoder is None:
        raise StartError(f"start_picture: {world.model.name} cannot start from a picture, got {path!r}")
    pictures = read_pictures(Path(path), geometry)
    fitted = whole_frames if isinstance(world.sampler, Beginner) else filled
    return generator.prefill(world, encoder.encode(fitted(pictures, geometry)))


def read_pictures(path: Path, geometry: Geometry) -> Tensor:
    """The pictures of a file at the model's size and rate: (N, H, W, 3) uint8, at least one. Raises StartError."""
    most = max(1, int(MAX_START_S * geometry.fps))
    found: list[NDArray[np.uint8]] = []
    try:
        if not path.is_file():
            raise StartError(f"start_picture: expected a file, got {str(path)!r}")
        for picture in _sampled(path, geometry):
            found.append(picture)
            if len(found) == most:
                break
    except (FFmpegError, OSError) as error:
        raise StartError(f"start_picture: {path} cannot be read as a picture or clip: {error.strerror}") from error
    if not found:
        raise StartError(f"start_picture: expected a picture or a video, {path} has no pictures")
    return torch.from_numpy(np.stack(found))


def filled(pictures: Tensor, geometry: Geometry) -> Tensor:
    """Cut to whole blocks; if there are too few for the first, the last one is held."""
    blocks, count = 1, len(pictures)
    while geometry.pictures_before(geometry.block_start(blocks + 1)) <= count:
        blocks += 1
    wanted = geometry.pictures_before(geometry.block_start(blocks))
    held = pictures[-1:].expand(max(0, wanted - count), -1, -1, -1)
    return torch.cat((pictures, held))[:wanted]


def whole_frames(pictures: Tensor, geometry: Geometry) -> Tensor:
    """For samplers that need no whole blocks: as many pictures as fill latent frames, or the first one alone."""
    count = len(pictures) // geometry.pictures_per_frame * geometry.pictures_per_frame
    return pictures[: count or 1]


def _sampled(path: Path, geometry: Geometry) -> Iterator[NDArray[np.uint8]]:
    """For every 1 / fps seconds of the file the picture that is shown then."""
    given, at, first = 0, 0.0, None
    latest: av.VideoFrame | None = None
    with path.open("rb") as file, av.open(file, "r", options={"protocol_whitelist": "none"}) as container:
        for frame in container.decode(_stream(container, path)):
            time = 0.0 if frame.time is None else frame.time
            first = time if first is None else first
            at = (time - first) * geometry.fps
            while latest is not None and given < at - 1e-3:
                yield _fitted(latest, geometry.width, geometry.height)
                given += 1
            latest = frame
        if latest is not None and given <= at + 1e-3:
            yield _fitted(latest, geometry.width, geometry.height)


def _stream(container: av.container.InputContainer, path: Path) -> av.VideoStream:
    if container.format.name not in FORMATS:
        raise StartError(
            f"start_picture: expected a PNG, JPEG, WebP, GIF, MP4, MOV or WebM, got {container.format.name}"
        )
    if not container.streams.video:
        raise StartError(f"start_picture: expected a picture or a video, {path} has none")
    stream = container.streams.video[0]
    if stream.width * stream.height > MAX_PIXELS:
        raise StartError(f"start_picture: expected at most {MAX_PIXELS} pixels, got {stream.width}x{stream.height}")
    return stream


def _fitted(frame: av.VideoFrame, width: int, height: int) -> NDArray[np.uint8]:
    """Scaled to cover width x height, cropped in the middle."""
    scale = max(width / frame.width, height / frame.height)
    wide, high = max(width, round(frame.width * scale)), max(height, round(frame.height * scale))
    picture = frame.reformat(width=wide, height=high, format="rgb24", interpolation="BICUBIC").to_ndarray()
    left, top = (wide - width) // 2, (high - height) // 2
    return picture[top : top + height, left : left + width].astype(np.uint8)
