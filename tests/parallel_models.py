"""The models whose worlds are spread over ranks in tests: small, their weights random but for the one we ship."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from engine.models import BlockModel, Geometry, KVGeometry, LatentShape, presets
from engine.models.magi import MagiConfig, MagiTransformer
from engine.models.magi_model import MagiModel
from engine.models.magi_text import Row
from engine.models.magi_vae import MagiVAE, MagiVAEConfig
from engine.models.presets import LoadOptions
from engine.models.tiny.model import WEIGHTS
from engine.samplers import FewStep, FlowODE, Linear, Sampler, ShiftedFlow
from engine.stages import Distilled, Guided, Plan
from engine.staggered import StaggeredSampler
from tests.small_wan import random_weights, small_model, small_preset
from tests.toy_model import ToyModel

SHIPPED = [WEIGHTS / name for name in ("world.safetensors", "decoder.safetensors")]

SAMPLERS: dict[str, Sampler] = {
    "few-step": FewStep(Linear(), (1.0, 0.5), context_time=0.06, noise_context=True),
    "guided": FlowODE(Linear(), (1.0, 0.5), guidance=2.0),
    "wan": FewStep(ShiftedFlow(5.0), (1000.0, 833.0)),
    "tiny": FewStep(ShiftedFlow(5.0), (1000.0, 833.0)),
    "staggered": StaggeredSampler(Plan(steps=8, guidance=Guided(), window=4)),
    "staggered distilled": StaggeredSampler(Plan(steps=8, guidance=Distilled(), window=4)),
}


def toy(**sizes: Any) -> ToyModel:
    if "size" in sizes:
        sizes["size"] = tuple(sizes["size"])
    return ToyModel(**sizes)


def wan() -> BlockModel:
    """Two heads, four tokens."""
    return small_model(small_preset(frames_per_block=2))


def tiny() -> BlockModel:
    """The model we ship."""
    return presets.load("tiny-world", LoadOptions())


def magi() -> BlockModel:
    """Four heads on two key heads, six tokens, three frames to a block."""
    config = MagiConfig(2, 64, 48, 4, 2, 16, latent_channels=4, caption_channels=12, caption_tokens=60)
    network = MagiTransformer(config)
    random_weights(network, 0.1)
    latent = LatentShape(4, 4, 6)
    geometry = Geometry(latent, KVGeometry(2, 2, 16, 6), 3, 4, 48, 32, 24.0)
    autoencoder = MagiVAE(MagiVAEConfig(z_channels=4, width=256, depth=1, heads=2))
    return MagiModel("magi", geometry, network, _caption, autoencoder, None)


def _caption(text: str) -> Row:
    seed = torch.Generator().manual_seed(sum(text.encode()))
    return Row(torch.randn(60, 12, generator=seed), torch.arange(60) < 5)


MODELS: dict[str, Callable[..., BlockModel]] = {"toy": toy, "wan": wan, "tiny": tiny, "magi": magi}


def shipped() -> bool:
    return all(Path(path).exists() for path in SHIPPED)
