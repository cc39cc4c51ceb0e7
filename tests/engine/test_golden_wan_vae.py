"""The Wan autoencoder against the reference's numbers, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.models import Conditioning, Prompt
from engine.models.wan_vae import VaeConfig, WanDecoder, WanEncoder, WanVae, to_pictures
from tests.golden_wan import PIXEL_TOLERANCE, Case, cases, close, vae

pytestmark = pytest.mark.golden
NOTHING = Conditioning(Prompt("", torch.zeros(1, 0, 1)))


@pytest.fixture(params=cases("autoencoder"))
def case(request: pytest.FixtureRequest) -> Case:
    found: Case = request.param
    return found


@pytest.fixture
def model(case: Case) -> WanVae:
    return vae(case.config["vae"], case.tensors("weights"))


def test_encoding_gives_the_references_latents(case: Case, model: WanVae) -> None:
    inputs, expected = case.tensors("inputs"), case.tensors("expected")
    close(model.mean.flatten(), expected["mean"], 0.0)
    close(model.std.flatten(), expected["std"], 0.0)
    close(model.mu(inputs["video"]), expected["encoded_raw_mu"])
    close(model.encode(inputs["video"]), expected["encoded"])
    close(model.encode(inputs["video"][:, :, :1]), expected["encoded_first_frame_only"])


def test_decoding_gives_the_references_pixels(case: Case, model: WanVae) -> None:
    inputs, expected = case.tensors("inputs"), case.tensors("expected")
    pixels, _ = model.decode(inputs["latents"])
    close(pixels, expected["decoded_unclamped"], PIXEL_TOLERANCE)
    close(pixels.clamp(-1, 1), expected["decoded_clamped"], PIXEL_TOLERANCE)
    close(model.decode(expected["encoded"])[0], expected["roundtrip_unclamped"], PIXEL_TOLERANCE)


def test_a_stream_is_bit_equal_however_it_is_cut(case: Case, model: WanVae) -> None:
    latents = case.tensors("inputs")["latents"]
    whole, _ = model.decode(latents)
    streaming: Mapping[str, Any] = case.config["streaming"]
    for cuts, facts in streaming.items():
        state: list[Tensor] | None = None
        pieces = []
        for part in torch.split(latents, json.loads(cuts), dim=2):
            pixels, state = model.decode(part, state)
            pieces.append(pixels)
        assert [piece.shape[2] for piece in pieces] == facts["pixel_frames_per_chunk"]
        assert torch.equal(torch.cat(pieces, dim=2), whole)


def test_the_streaming_decoder_of_a_world_gives_the_same_pictures(case: Case, model: WanVae) -> None:
    latents = case.tensors("inputs")["latents"][0].transpose(0, 1)  # (F, C, h, w)
    expected = to_pictures(case.tensors("expected")["decoded_clamped"][0])
    decoder = WanDecoder(model)
    first, state = decoder.decode(latents[:2], NOTHING, None)
    rest, _ = decoder.decode(latents[2:], NOTHING, state)
    again, _ = decoder.decode(latents[2:], NOTHING, state)
    assert torch.equal(rest, again)  # the state given is not changed
    got = torch.cat((first, rest))
    assert got.shape == expected.shape
    assert (got.int() - expected.int()).abs().max() <= 1  # truncation next to a whole number


def test_pictures_are_encoded_from_bytes(case: Case, model: WanVae) -> None:
    video = case.tensors("inputs")["video"][:, :, :1]
    pictures = to_pictures(video[0])
    close(WanEncoder(model).encode(pictures)[0], model.encode(video)[0, :, 0], 0.1)


def test_pictures_past_the_last_whole_period_are_left_out() -> None:
    torch.manual_seed(0)
    small = WanVae(VaeConfig(dim=2)).eval()
    video = torch.rand(1, 3, 8, 16, 16)
    with torch.no_grad():
        assert torch.equal(small.encode(video), small.encode(video[:, :, :5]))
