"""Our Wan network and autoencoder give what diffusers' do with the same weights, found through the key maps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.models import Prompt
from engine.models.wan import OwnFrames, WanConditioning, WanConfig, WanTransformer
from engine.models.wan_names import transformer_names, vae_names
from engine.models.wan_vae import MEAN, STD, VaeConfig, WanVae
from tests.golden_wan import per_frame

pytestmark = pytest.mark.filterwarnings("ignore:::diffusers.*", "ignore:.*torch.jit.*:DeprecationWarning")
diffusers = pytest.importorskip("diffusers", reason="equality with diffusers needs diffusers (the dev extra)")


def randomised(module: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.2)
    return module.eval().requires_grad_(False)


def renamed(module: nn.Module, names: Mapping[str, str]) -> dict[str, Tensor]:
    """The module's weights under diffusers' names."""
    ours = module.state_dict()
    return {theirs: ours[official] for theirs, official in names.items() if official in ours}


def their_transformer(config: WanConfig) -> Any:
    return diffusers.WanTransformer3DModel(
        num_attention_heads=config.num_heads,
        attention_head_dim=config.head_dim,
        in_channels=config.in_dim,
        out_channels=config.out_dim,
        text_dim=config.text_dim,
        freq_dim=config.freq_dim,
        ffn_dim=config.ffn_dim,
        num_layers=config.num_layers,
        image_dim=config.clip_dim,
        added_kv_proj_dim=config.dim if config.clip_dim else None,
    ).eval()


@pytest.mark.parametrize("kind", ["t2v", "i2v"])
def test_the_network_is_diffusers_network(kind: str) -> None:
    image = kind == "i2v"
    config = WanConfig(
        dim=24,
        ffn_dim=20,
        num_heads=2,
        num_layers=2,
        in_dim=36 if image else 16,
        freq_dim=8,
        text_dim=6,
        text_len=512,  # diffusers counts on it where it separates image tokens
        clip_dim=10 if image else None,
    )
    ours, theirs = randomised(WanTransformer(config)), their_transformer(config)
    theirs.load_state_dict(renamed(ours, transformer_names(config)), strict=True)
    x, y = torch.randn(2, 16, 3, 4, 6), torch.randn(2, 20, 3, 4, 6)
    text, clip, t = torch.randn(2, 512, 6), torch.randn(2, 257, 10), torch.tensor([937.5, 250.0])
    text[:, 5:] = 0
    conditioning = WanConditioning(Prompt("", text[:, :5]))
    if image:
        conditioning = WanConditioning(Prompt("", text[:, :5]), image=Prompt("", clip), picture=per_frame(y))
    got = per_frame(ours(per_frame(x), t[:, None].expand(2, 3), conditioning, OwnFrames()))
    with torch.no_grad():
        expected = theirs(
            hidden_states=torch.cat((x, y), 1) if image else x,
            timestep=t,
            encoder_hidden_states=text,
            encoder_hidden_states_image=clip if image else None,
            return_dict=False,
        )[0]
    assert (got - expected).abs().max() < 1e-4


def test_the_autoencoder_is_diffusers_autoencoder() -> None:
    config = VaeConfig(dim=4)
    ours = randomised(WanVae(config))
    assert isinstance(ours, WanVae)
    theirs = diffusers.AutoencoderKLWan(base_dim=4, z_dim=16, latents_mean=list(MEAN), latents_std=list(STD)).eval()
    theirs.load_state_dict(renamed(ours, vae_names(config)), strict=True)
    video, latents = torch.rand(1, 3, 9, 32, 32) * 2 - 1, torch.randn(1, 16, 3, 4, 4)
    with torch.no_grad():
        mu = theirs.encode(video).latent_dist.mode()
        pixels = theirs.decode(latents * ours.std + ours.mean, return_dict=False)[0]
        assert (ours.encode(video) - (mu - ours.mean) / ours.std).abs().max() < 1e-4
        assert (ours.decode(latents)[0].clamp(-1, 1) - pixels).abs().max() < 2e-4
