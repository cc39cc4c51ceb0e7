"""Long videos of a model trained on clips: segment after segment, each begun by the end of the one before (CausVid).

A segment is a world of its own, its cache empty at the start. Its successor starts from the picture that stands where
the overlap begins, encoded as a one-frame video, and from the latents after it; the pictures of the overlap are made
again there and dropped here. Knows no clock: a live world of such a model slides its window instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.generator import Generator
from engine.models.presets import Segments
from engine.models.wan_vae import WanVae
from engine.world import World


@dataclass(frozen=True)
class Segment:
    """One clip."""

    latents: Tensor  # (F, C, H, W)
    pictures: Tensor  # those that stay: (N, 3, H, W) in [0, 1]
    next_start: Tensor  # latents that the next one starts from


@torch.inference_mode()
def segments(
    generator: Generator, vae: WanVae, rule: Segments, open_world: Callable[[int], World]
) -> Iterator[Segment]:
    """Segments without end; `open_world(r)` opens the world of segment r, which is closed here when it is done."""
    start: Tensor | None = None
    number = 0
    while True:
        world = open_world(number)
        try:
            latents = _roll(generator, world, rule.frames, start)
        finally:
            world.close()
        segment = _finish(vae, latents, rule.overlap)
        start = segment.next_start
        number += 1
        yield segment


def _roll(generator: Generator, world: World, frames: int, start: Tensor | None) -> Tensor:
    blocks = [] if start is None else [block.latents for block in generator.prefill(world, start)]
    while world.start < frames:
        blocks.append(generator.next_block(world).latents)
    return torch.cat(blocks)


def _finish(vae: WanVae, latents: Tensor, overlap: int) -> Segment:
    video, _ = vae.decode(latents.transpose(0, 1)[None])
    pictures = (video[0].clamp(-1, 1) * 0.5 + 0.5).transpose(0, 1)  # (N, 3, H, W)
    at = pictures.shape[0] - vae.config.pictures_per_frame * (overlap - 1) - 1
    first = vae.encode((pictures[at] * 2 - 1)[None, :, None])[0].transpose(0, 1)  # (1, C, h, w)
    kept = latents[latents.shape[0] - (overlap - 1) :]
    return Segment(latents, pictures[:at], torch.cat((first, kept)))
