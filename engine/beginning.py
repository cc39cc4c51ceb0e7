"""How a world begins from a picture or a clip: read from a file, encoded by the model, made part of its past.

Knows no clock and no link. Only files of this machine are read: a path that names none is refused before anything else
looks at it.
"""

from __future__ import annotations

from pathlib import Path

import av
import numpy as np
import torch
from av.error import FFmpegError
from av.video.reformatter import VideoReformatter
from numpy.typing import NDArray

from engine.generator import Block
from engine.loader import Plan, SpecError
from engine.models import Geometry
from engine.world import World

MOST_BLOCKS = 8  # of a clip: a world begins with its first seconds


def begin(plan: Plan, world: World) -> list[Block]:
    """Blocks that a newly opened world starts with, in order; none unless its spec names a picture.

    Raises SpecError if the model cannot start from one or the file is none.
    """
    path, encoder = plan.spec.start_picture, plan.loaded.model.encoder
    if path is None:
        return []
    if encoder is None:
        raise SpecError(f"start_picture: {plan.loaded.preset.name} cannot start from a picture, got {path!r}")
    pictures = read_pictures(Path(path), plan.loaded.model.geometry)
    with torch.inference_mode():
        return plan.loaded.generator.prefill(world, encoder.encode(torch.from_numpy(pictures)))


def read_pictures(path: Path, geometry: Geometry) -> NDArray[np.uint8]:
    """(N, H, W, 3) uint8: whole blocks of a clip, or a still picture for the length of one block.

    Raises SpecError if there is no such file or nothing in it can be shown.
    """
    if not path.is_file():
        raise SpecError(f"start_picture: expected a file, got {str(path)!r}")
    shaper = VideoReformatter()
    pictures: list[NDArray[np.uint8]] = []
    most = geometry.pictures_before(geometry.block_start(MOST_BLOCKS))
    try:
        with av.open(str(path)) as container:
            for frame in container.decode(video=0):
                shaped = shaper.reformat(frame, geometry.width, geometry.height, "rgb24")
                pictures.append(shaped.to_ndarray().astype(np.uint8, copy=False))
                if len(pictures) == most:
                    break
    except (FFmpegError, IndexError, OSError) as error:
        raise SpecError(f"start_picture: {path} cannot be read as a picture or clip: {error}") from error
    return np.stack(_whole_blocks(pictures, geometry, path))


def _whole_blocks(pictures: list[NDArray[np.uint8]], geometry: Geometry, path: Path) -> list[NDArray[np.uint8]]:
    """Cut to the most blocks there are pictures for; too few for one are held to its end."""
    if not pictures:
        raise SpecError(f"start_picture: expected at least one picture in {path}, got none")
    ends = [geometry.pictures_before(geometry.block_start(block)) for block in range(1, MOST_BLOCKS + 1)]
    whole = [end for end in ends if end <= len(pictures)]
    if whole:
        return pictures[: whole[-1]]
    return pictures + [pictures[-1]] * (ends[0] - len(pictures))
