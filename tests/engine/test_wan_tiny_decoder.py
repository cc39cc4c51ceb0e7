"""The tiny decoder: the stream's arithmetic, and the layer numbers of the published file."""

from __future__ import annotations

import torch

from engine.models import Conditioning, Prompt
from engine.models.taehv import Taehv, TaehvDecoder

NOTHING = Conditioning(Prompt("", torch.zeros(1, 0, 1)))


def small() -> Taehv:
    torch.manual_seed(0)
    net = Taehv(4, (8, 8, 4, 4)).eval().requires_grad_(False)
    for parameter in net.parameters():  # far from zero, so that pictures are not all black
        parameter.mul_(2.0)
    last = net.decoder[-1]
    assert isinstance(last, torch.nn.Conv2d) and last.bias is not None
    last.weight.mul_(0.05)
    last.bias.fill_(0.5)
    return net


def test_a_cut_stream_gives_the_same_pictures_and_twelve_for_three_latents() -> None:
    net, latents = small(), torch.randn(7, 4, 2, 3)
    whole, _ = net.decode(latents)
    assert whole.shape == (25, 3, 16, 24)
    first, state = net.decode(latents[:1])
    second, state = net.decode(latents[1:4], state)
    third, _ = net.decode(latents[4:], state)
    assert [len(first), len(second), len(third)] == [1, 12, 12]
    assert torch.allclose(torch.cat((first, second, third)), whole, atol=1e-6)


def test_a_picture_depends_on_the_latent_before_it_and_on_none_after() -> None:
    net, latents = small(), torch.randn(3, 4, 2, 3)
    whole, _ = net.decode(latents)
    assert torch.allclose(net.decode(latents[:2])[0], whole[:5], atol=1e-6)
    assert not torch.allclose(net.decode(latents[1:], net.decode(-latents[:1])[1])[0], whole[1:], atol=1e-3)


def test_the_decoder_of_a_world_gives_bytes_and_leaves_the_state_alone() -> None:
    decoder, latents = TaehvDecoder(small()), torch.randn(4, 4, 2, 3)
    first, state = decoder.decode(latents[:1], NOTHING, None)
    rest, _ = decoder.decode(latents[1:], NOTHING, state)
    assert first.dtype == torch.uint8 and first.shape == (1, 16, 24, 3) and len(rest) == 12
    assert torch.equal(decoder.decode(latents[1:], NOTHING, state)[0], rest)


def test_parameters_are_numbered_as_published() -> None:
    shapes = {k: tuple(v.shape) for k, v in Taehv().state_dict().items()}
    assert shapes["decoder.1.weight"] == (256, 16, 3, 3)
    assert shapes["decoder.3.conv.0.weight"] == (256, 512, 3, 3)
    assert shapes["decoder.7.conv.weight"] == (256, 256, 1, 1)
    assert shapes["decoder.8.weight"] == (128, 256, 3, 3) and "decoder.8.bias" not in shapes
    assert shapes["decoder.13.conv.weight"] == (256, 128, 1, 1)
    assert shapes["decoder.19.conv.weight"] == (128, 64, 1, 1)
    assert shapes["decoder.22.weight"] == (3, 64, 3, 3)
