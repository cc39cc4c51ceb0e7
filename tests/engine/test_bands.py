"""Decoders in bands: a picture made of them is the one that is decoded at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.models import BandedDecoder, Conditioning, Decoder, LatentShape, Prompt, presets
from engine.models.bands import crops, even
from engine.models.magi_vae import MagiVAE, MagiVAEConfig, Tiling
from engine.models.presets import LoadOptions
from engine.models.taehv import Taehv, TaehvDecoder
from engine.models.wan_vae import VaeConfig, WanDecoder, WanVae
from tests.parallel_models import shipped
from tests.small_wan import random_weights

NOTHING = Conditioning(Prompt("", torch.zeros(1, 0, 1)))
STREAM = [2, 1, 3]  # latent frames by block


def wan() -> WanDecoder:
    vae = WanVae(VaeConfig(dim=2))
    random_weights(vae)
    return WanDecoder(vae)


def tiny() -> TaehvDecoder:
    net = Taehv(16, (8, 8, 4, 4))
    random_weights(net, 0.17)
    return TaehvDecoder(net)


def magi() -> MagiVAE:
    tiling = Tiling((8, 32, 32), (0.0, 0.25, 0.25))
    vae = MagiVAE(MagiVAEConfig(32, 8, z_channels=16, width=256, depth=1, heads=2), tiling)
    random_weights(vae, 0.1)
    return vae


DECODERS: dict[str, Callable[[], Decoder]] = {"wan": wan, "tiny": tiny, "magi": magi}


@torch.inference_mode()
def streamed(decoder: Decoder, latents: Tensor) -> Tensor:
    state, made = None, []
    for block in torch.split(latents, STREAM):
        pictures, state = decoder.decode(block, NOTHING, state)
        made.append(pictures)
    return torch.cat(made)


@torch.inference_mode()
def in_bands(decoder: BandedDecoder, latents: Tensor, parts: int) -> Tensor:
    made = []
    for band in decoder.bands(LatentShape(*latents.shape[1:]), parts):
        state, pictures = None, []
        for block in torch.split(latents, STREAM):
            part, state = band.decode(block, state)
            pictures.append(part)
        made.append(torch.cat(pictures))
        assert made[-1].shape[1] == len(band.rows)
    return torch.cat(made, 1)


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
@pytest.mark.parametrize("height", [3, 44])
@pytest.mark.parametrize("kind", DECODERS)
def test_bands_make_the_picture_that_is_decoded_at_once(kind: str, height: int, parts: int) -> None:
    decoder = DECODERS[kind]()
    latents = torch.randn(sum(STREAM), 16, height, 4, generator=torch.Generator().manual_seed(0))
    whole = streamed(decoder, latents)
    assert whole.float().std(dim=1).mean() > 5  # from row to row
    assert isinstance(decoder, BandedDecoder)
    apart = (in_bands(decoder, latents, parts).int() - whole.int()).abs()
    assert apart.max() <= 1  # of 255: what another order of additions may do to a rounding
    assert (apart > 0).float().mean() < 1e-3


def test_a_band_state_is_not_changed_so_that_a_block_can_be_decoded_again() -> None:
    band = wan().bands(LatentShape(16, 8, 4), 2)[1]
    latents = torch.randn(2, 16, 8, 4, generator=torch.Generator().manual_seed(0))
    _, state = band.decode(latents, None)
    once, _ = band.decode(latents, state)
    assert torch.equal(once, band.decode(latents, state)[0])


@pytest.mark.skipif(not shipped(), reason="the shipped model's weights are not in the tree")
def test_the_shipped_model_s_decoder_is_for_one_rank() -> None:
    assert not isinstance(presets.load("tiny-world", LoadOptions()).decoder, BandedDecoder)


def test_the_published_decoder_begins_with_13_latent_rows_around_a_band_and_ends_with_7_of_the_picture() -> None:
    with torch.device("meta"):
        reaches = WanVae().decoder.reaches
    found = crops(reaches, range(160, 320), 480, after=1)
    assert found[0] == slice(20 - 13, 40 + 13)
    assert found[-1] == slice(7, 167)


def test_a_band_with_its_halo_is_exact_and_without_is_not() -> None:
    vae, height = wan()._vae.double(), 44
    z = torch.randn(1, 16, 2, height, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rows = range(8 * height // 2, 8 * height)
    whole = vae.decode(z)[0][..., rows.start :, :]

    def apart(reaches: list[int]) -> float:
        band, _ = vae.decode(z, None, crops(reaches, rows, 8 * height, after=1))
        return float((band - whole).abs().max())

    reaches = [*vae.decoder.reaches]
    assert apart(reaches) < 1e-12
    assert apart([0] * len(reaches)) > 1e-3


@settings(max_examples=50)
@given(st.integers(1, 40), st.integers(1, 8), st.lists(st.integers(0, 9), min_size=2, max_size=4), st.integers(0, 1))
def test_what_is_cut_lies_within_what_is_held(height: int, parts: int, reaches: list[int], after: int) -> None:
    finest = height * 2 ** (len(reaches) - 1)
    for band in even(height, parts):
        rows = range(band.start * finest // height, band.stop * finest // height)
        held = height
        for i, cut in enumerate(crops(reaches, rows, finest, after)):
            held = 2 * held if 0 < i < len(reaches) else held
            assert 0 <= cut.start < cut.stop <= held
            held = cut.stop - cut.start
        assert held == len(rows)
