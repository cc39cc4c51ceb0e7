"""MAGI-1's part of `inferix bench model`: a published architecture with random weights, and what guidance spared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from engine.layers.attention import choose
from engine.models.magi import MagiConfig, MagiTransformer
from engine.models.magi_load import ARCHITECTURES
from engine.models.magi_model import MagiModel, geometry
from engine.models.magi_text import Row
from engine.models.magi_vae import MagiVAE, MagiVAEConfig
from engine.models.presets import Preset
from engine.staggered import StaggeredSampler
from engine.world import World

CAPTION_TOKENS = 32
VAE = MagiVAEConfig(width=256, depth=0, heads=2)  # nothing is decoded here


@dataclass(frozen=True)
class Scale:
    """Sizes in place of the architecture's, and the side of a square picture in place of the preset's."""

    layers: int
    hidden: int
    side: int


SCALES: Mapping[str, Scale | None] = {
    "tiny": Scale(layers=2, hidden=256, side=64),
    "mid": Scale(layers=4, hidden=512, side=128),
    "full": None,
}


def build(preset: Preset, scale: str, device: torch.device) -> tuple[Preset, MagiModel]:
    """The preset at this scale and a model of it with random weights: MLP and channels as the architecture has them."""
    config, chosen = ARCHITECTURES[preset.architecture].network, SCALES[scale]
    if chosen is not None:
        config = _scaled(config, chosen)
        preset = replace(preset, width=chosen.side, height=chosen.side)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    with device:
        network = MagiTransformer(config, dtype, choose("auto", device, dtype).attend).eval().requires_grad_(False)
    for name, value in network.state_dict().items():
        _fill(name, value)
    shape = geometry(config, VAE, preset, preset.width, preset.height)
    embedding = torch.randn(config.caption_tokens, config.caption_channels, generator=torch.Generator().manual_seed(0))
    row = Row(embedding, torch.arange(config.caption_tokens) < CAPTION_TOKENS)
    return preset, MagiModel(preset.name, shape, network, lambda text: row, MagiVAE(VAE), None)


def spared(world: World) -> tuple[str, ...]:
    """What the sampler left out."""
    assert isinstance(world.sampler, StaggeredSampler)
    run, skipped = world.sampler.counts(world)
    return (
        "a block's keys and values are written once, in its clean pass",
        f"{run} passes of a block through a branch, {skipped} more were left out because their weight is zero",
    )


def _scaled(config: MagiConfig, scale: Scale) -> MagiConfig:
    ratio = config.ffn / config.hidden
    return replace(
        config,
        layers=scale.layers,
        hidden=scale.hidden,
        ffn=int(scale.hidden * ratio),
        heads=8,
        kv_heads=max(1, 8 * config.kv_heads // config.heads),
        head_dim=scale.hidden // 8,
        caption_channels=64,
        fp8=config.fp8 and scale.layers > 2,
    )


def _fill(name: str, value: torch.Tensor) -> None:
    if "scale" in name:
        value.fill_(1.0)
    elif value.dtype == torch.float8_e4m3fn:
        value.copy_((torch.randn(value.shape, device=value.device) * 0.02).to(value.dtype))
    else:
        value.normal_(0, 0.02)
