"""A Wan model small enough for property tests, its weights random and nowhere zero, and its worlds."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from engine import recipe
from engine.generator import Generator
from engine.models.presets import FewStep, Preset, Recache, Sizes
from engine.models.wan import WanConfig, WanTransformer
from engine.models.wan_model import Blend, WanModel, geometry
from engine.models.wan_vae import VaeConfig, WanDecoder, WanEncoder, WanVae
from engine.protocol import PromptChange, PromptMode, WorldSpec
from engine.world import World

CONFIG = WanConfig(
    dim=24, ffn_dim=20, num_heads=2, num_layers=2, in_dim=16, out_dim=16, freq_dim=8, text_dim=6, text_len=4
)
VAE = VaeConfig(dim=2)


def random_weights(module: nn.Module, scale: float = 0.2) -> None:
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.data.normal_(0, scale, generator=generator)
    module.eval().requires_grad_(False)


def embedding(text: str) -> Tensor:
    """Any text as (1, 3, 6)."""
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)
    return torch.randn(1, 3, CONFIG.text_dim, generator=torch.Generator().manual_seed(seed))


def small_preset(
    kv: str = "full",
    frames_per_block: int = 1,
    *,
    recache: Recache = "joint-keep-sink",
    switch: PromptMode = "cut",
    first_block_frames: int | None = None,
) -> Preset:
    return Preset(
        name="small-wan",
        family="wan2.1",
        about="for tests",
        loader="",
        architecture="",
        sampler=FewStep((1000, 500), shift=5.0),
        kv=kv,
        width=32,
        height=32,
        fps=16.0,
        frames_per_block=frames_per_block,
        sizes=Sizes(0, CONFIG.num_layers, CONFIG.num_heads, CONFIG.head_dim, 4, CONFIG.dim, CONFIG.ffn_dim),
        switch=(switch, 1),
        recache=recache,
        first_block_frames=first_block_frames,
        first_pictures=1,
    )


def small_model(preset: Preset, blend: Blend = "linear") -> WanModel:
    network, vae = WanTransformer(CONFIG), WanVae(VAE)
    random_weights(network)
    random_weights(vae)
    return WanModel(
        name=preset.name,
        geometry=geometry(CONFIG, VAE, preset, preset.width, preset.height),
        network=network,
        text=embedding,
        decoder=WanDecoder(vae),
        encoder=WanEncoder(vae),
        switch=preset.switch,
        blend=blend,
    )


def small_world(
    preset: Preset, model: WanModel, prompts: Sequence[PromptChange] = (PromptChange(0.0, "a"),), frames: int = 64
) -> tuple[Generator, World]:
    sampler = recipe.sampler(preset)
    caches = recipe.caches(model, preset, recipe.kv_policy(preset), sampler, frames)
    return recipe.generator(model, preset), World(WorldSpec(preset.name, tuple(prompts)), model, sampler, caches)
