"""Latents to pictures: one block at a time, each going on exactly where the one before ended.

What the decoder remembers lives in the world and changes only when a block is done, so a block can be decoded again.
Colour conversion to uint8 happens once per block, on the model's device. Knows no clock and no encoder.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from engine.generator import Block
from engine.profiler import span
from engine.world import World

Pictures = NDArray[np.uint8]
"""(N, H, W, 3) RGB."""


@torch.inference_mode()
def decode(world: World, block: Block, name: str | None = None) -> Pictures:
    """The pictures of a block. Blocks of a world are decoded in order, each once, by one thread at a time.

    `name` is the world's in the profiler, where no span around this says it.
    """
    with span("decode", world=name, block=block.index):
        pictures = world.show(block.start, block.latents, block.conditioning)
        return pictures.contiguous().cpu().numpy()
