"""TAEHV, the tiny decoder for Wan2.1 latents (weights `taew2_1`): a fast preview behind the same contract.

A few 3 x 3 convolutions whose only memory is the frame before; the first latent gives one picture, each later one four,
as with the full autoencoder. It takes normalised latents. Decoding only: worlds start through the full encoder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.models import Conditioning, State

WIDTHS = (256, 128, 64, 64)
GROWTH = (1, 2, 2)  # pictures made of each frame at each level


def conv(inputs: int, outputs: int, *, bias: bool = True) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, padding=1, bias=bias)


class MemoryBlock(nn.Module):
    """A residual block that reads each frame together with the one before it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        layers = (
            conv(2 * channels, channels),
            nn.ReLU(),
            conv(channels, channels),
            nn.ReLU(),
            conv(channels, channels),
        )
        self.conv = nn.Sequential(*layers)

    def forward(self, x: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """x: (T, C, H, W); before: (1, C, H, W), the frame before x -> the result and the last frame of x."""
        past = torch.cat((before, x[:-1]))
        return F.relu(self.conv(torch.cat((x, past), dim=1)) + x), x[-1:].clone()


class Grow(nn.Module):
    """Each frame to `factor` frames."""

    def __init__(self, channels: int, factor: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels * factor, 1, bias=False)
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x)
        return y.reshape(len(x) * self.factor, -1, *x.shape[2:])


class SoftClamp(nn.Module):
    """3 tanh(x / 3)"""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x / 3) * 3


class Taehv(nn.Module):
    """The decoder half, its layers numbered as in the published file."""

    def __init__(self, channels: int = 16, widths: Sequence[int] = WIDTHS) -> None:
        super().__init__()
        layers: list[nn.Module] = [SoftClamp(), conv(channels, widths[0]), nn.ReLU()]
        for width, narrower, factor in zip(widths, widths[1:], GROWTH, strict=False):
            layers += [MemoryBlock(width) for _ in range(3)]
            layers += [nn.Upsample(scale_factor=2), Grow(width, factor), conv(width, narrower, bias=False)]
        self.decoder = nn.Sequential(*layers, nn.ReLU(), conv(widths[-1], 3))

    def decode(self, latents: Tensor, state: list[Tensor] | None = None) -> tuple[Tensor, list[Tensor]]:
        """(F, C, h, w) -> pictures (N, 3, 8 h, 8 w) in [0, 1] and the new state."""
        memory: Iterator[Tensor] | None = iter(state) if state is not None else None
        kept: list[Tensor] = []
        x = latents
        for layer in self.decoder:
            if isinstance(layer, MemoryBlock):
                x, last = layer(x, torch.zeros_like(x[:1]) if memory is None else next(memory))
                kept.append(last)
            else:
                x = layer(x)
        unseen = 0 if memory is not None else GROWTH[0] * GROWTH[1] * GROWTH[2] - 1  # the first latent is one picture
        return x[unseen:].clamp(0, 1), kept


def fitted(net: Taehv, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The decoder's share of a published file.

    Files made for other growth factors hold more rows in `Grow` than are used: the last ones are the newest picture's.
    """
    expected = net.state_dict()
    found = {name: value for name, value in tensors.items() if name.startswith("decoder.")}
    for name, value in expected.items():
        if name.endswith(".conv.weight") and name in found and len(found[name]) > len(value):
            found[name] = found[name][-len(value) :]
    return found


class TaehvDecoder:
    """The streaming decoder of a world, tiny."""

    def __init__(self, net: Taehv) -> None:
        self._net = net

    @torch.inference_mode()
    def decode(self, latents: Tensor, conditioning: Conditioning, state: State) -> tuple[Tensor, State]:
        """(F, C, H, W) -> (N, 8 H, 8 W, 3) uint8."""
        weight = next(self._net.parameters())
        pictures, state = self._net.decode(latents.to(weight.device, weight.dtype), state)
        return (pictures.float() * 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous(), state
