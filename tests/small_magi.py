"""A MAGI-1 model small enough for property tests, its weights random and nowhere zero, and its worlds.

Also an installed model (`install`), so that an engine process can be told to load it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from engine import recipe
from engine.generator import Generator
from engine.kvcache.cache import KVCache
from engine.kvcache.pool import PageFormat, PagePool
from engine.models.magi import MagiConfig, MagiTransformer
from engine.models.magi_model import MagiModel, geometry
from engine.models.magi_text import Row, SpecialTokens
from engine.models.magi_vae import MagiVAE, MagiVAEConfig, Tiling
from engine.models.presets import LoadOptions, Preset, Sizes
from engine.protocol import PromptChange, WorldSpec
from engine.stages import Distilled, Guided, Plan
from engine.world import World

torch.set_num_threads(1)  # tensors this small only make threads wait for one another
CONFIG = MagiConfig(layers=2, hidden=64, ffn=48, heads=8, kv_heads=2, head_dim=8, latent_channels=4, caption_channels=6)
VAE = MagiVAEConfig(video_size=32, video_length=8, z_channels=4, width=256, depth=1, heads=2, mlp_ratio=0.5)
DISTILLED, GUIDED = Plan(8, Distilled()), Plan(8, Guided())
QUICK, QUICK_GUIDED = Plan(4, Distilled(), window=2), Plan(4, Guided(), window=2)


def random_weights(module: nn.Module, scale: float = 0.2) -> None:
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.data.normal_(0, scale, generator=generator)
    module.eval().requires_grad_(False)


def caption(text: str) -> Row:
    """Any text as up to 9 positions that count."""
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)
    generator = torch.Generator().manual_seed(seed)
    embedding = torch.randn(CONFIG.caption_tokens, CONFIG.caption_channels, generator=generator)
    return Row(embedding, torch.arange(CONFIG.caption_tokens) < 1 + seed % 9)


def special_tokens() -> SpecialTokens:
    generator = torch.Generator().manual_seed(1)
    rows: list[Tensor] = [torch.randn(n, CONFIG.caption_channels, generator=generator) for n in (1, 1, 100)]
    return SpecialTokens(*rows)


def small_preset(plan: Plan = DISTILLED, kv: str = "window=10", frames_per_block: int = 2) -> Preset:
    return Preset(
        name="small-magi",
        family="magi-1",
        about="for tests",
        loader="tests.small_magi:load",
        architecture="",
        sampler=plan,
        kv=kv,
        width=48,
        height=32,
        fps=24.0,
        frames_per_block=frames_per_block,
        sizes=Sizes(0, CONFIG.layers, CONFIG.kv_heads, CONFIG.head_dim, 6, CONFIG.hidden, CONFIG.ffn),
        recache="none",
    )


PRESET, GUIDED_PRESET = small_preset(QUICK), small_preset(QUICK_GUIDED)


def small_model(preset: Preset = PRESET, config: MagiConfig = CONFIG) -> MagiModel:
    network, vae = MagiTransformer(config), MagiVAE(VAE, Tiling((8, 32, 32)))
    random_weights(network)
    random_weights(vae, 0.05)
    shape = geometry(config, VAE, preset, preset.width, preset.height)
    return MagiModel(preset.name, shape, network, caption, vae, special_tokens())


def load(preset: Preset, options: LoadOptions) -> MagiModel:
    return small_model(preset)


def small_world(
    preset: Preset,
    model: MagiModel,
    prompts: Sequence[PromptChange] = (PromptChange(0.0, "a"),),
    frames: int = 64,
    kv: str = "",
) -> tuple[Generator, World]:
    """A world with a pool of `frames` pages of its own."""
    rule = recipe.kv_policy(preset, kv)
    pool = PagePool(PageFormat(model.geometry.kv, model.dtype, rule.store), frames)
    cache = KVCache(pool, rule, preset.frames_per_block)
    spec = WorldSpec(preset.name, tuple(prompts))
    return recipe.generator(model, preset), World(spec, model, recipe.sampler(preset), (cache,))


def install(folder: Path, preset: str = "PRESET") -> None:
    """Make `folder`, once it is on the path, a place where the small model is an installed model.

    `preset`: the name of its row in this module.
    """
    info = folder / "small_magi-0.0.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: small-magi\nVersion: 0.0.0\n")
    (info / "entry_points.txt").write_text(f"[inferix.models]\nsmall-magi = tests.small_magi:{preset}\n")
