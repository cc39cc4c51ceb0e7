"""TAEHV, the tiny decoder for Wan2.1 latents (weights `taew2_1`): a fast preview behind the same contract.

A few 3 x 3 convolutions whose only memory is the frame before; the first latent gives one picture, each later one four,
as with the full autoencoder. It takes normalised latents. Decoding only: worlds start through the full encoder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.models import Conditioning, LatentShape, State
from engine.models.bands import crops, even, scaled

WIDTHS = (256, 128, 64, 64)
GROWTH = (1, 2, 2)  # pictures made of each frame at each level
REACHES = (10, 10, 10, 2)  # rows that the 3 x 3 convolutions of each level reach together


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

    def decode(
        self, latents: Tensor, state: list[Tensor] | None = None, crops: Sequence[slice] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """(F, C, h, w) -> pictures (N, 3, 8 h, 8 w) in [0, 1] and the new state.

        `crops`: the rows to go on with at the start and after each doubling, and those of the result.
        """
        memory: Iterator[Tensor] | None = iter(state) if state is not None else None
        left = iter(crops or [slice(None)] * (len(REACHES) + 1))
        kept: list[Tensor] = []
        x = latents[..., next(left), :]
        for layer in self.decoder:
            if isinstance(layer, MemoryBlock):
                x, last = layer(x, torch.zeros_like(x[:1]) if memory is None else next(memory))
                kept.append(last)
            else:
                x = layer(x)
            if isinstance(layer, nn.Upsample):
                x = x[..., next(left), :]
        x = x[..., next(left), :]
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


class TaehvBand:
    """Some rows of a world's pictures: nothing reaches far, so a band is the same as in a picture decoded at once."""

    def __init__(self, net: Taehv, rows: range, height: int) -> None:
        """`rows` of the `height` of a latent."""
        cell = 2 ** len(GROWTH)
        self._net, self.rows = net, scaled(rows, cell)
        self._crops = crops(REACHES, self.rows, height * cell)

    @torch.inference_mode()
    def decode(self, latents: Tensor, state: State) -> tuple[Tensor, State]:
        """(F, C, H, W) -> (N, rows, 8 W, 3) uint8."""
        return _decoded(self._net, latents, state, self._crops)


class TaehvDecoder:
    """The streaming decoder of a world, tiny."""

    def __init__(self, net: Taehv) -> None:
        self._net = net

    @torch.inference_mode()
    def decode(self, latents: Tensor, conditioning: Conditioning, state: State) -> tuple[Tensor, State]:
        """(F, C, H, W) -> (N, 8 H, 8 W, 3) uint8."""
        return _decoded(self._net, latents, state)

    def bands(self, latent: LatentShape, parts: int) -> list[TaehvBand]:
        return [TaehvBand(self._net, rows, latent.height) for rows in even(latent.height, parts)]


def _decoded(net: Taehv, latents: Tensor, state: State, crops: Sequence[slice] = ()) -> tuple[Tensor, State]:
    weight = next(net.parameters())
    pictures, state = net.decode(latents.to(weight.device, weight.dtype), state, crops)
    return (pictures.float() * 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous(), state
