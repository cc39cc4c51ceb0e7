"""The Wan2.1 video autoencoder: 8 x 8 pixels and 4 pictures to one latent, causal in time, streamed.

Every temporal layer remembers the last frames of its input; `Memory` carries them in the order in which layers run, so
a decode that is cut anywhere gives the same pictures as one that is not. Parameters carry the names of the published
file. Knows no world and keeps no state of its own: state goes in and out by value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.models import Conditioning, LatentShape, State
from engine.models.bands import crops, even, scaled

MEAN = (
    *(-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508),
    *(0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921),
)
STD = (
    *(2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743),
    *(3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.916),
)


@dataclass(frozen=True)
class VaeConfig:
    """Sizes of the autoencoder; the defaults are the published ones."""

    dim: int = 96
    z_dim: int = 16
    dim_mult: tuple[int, ...] = (1, 2, 4, 4)
    num_res_blocks: int = 2
    temporal_down: tuple[bool, ...] = (False, True, True)  # which levels halve time on the way down

    @property
    def pictures_per_frame(self) -> int:
        return int(2 ** sum(self.temporal_down))

    @property
    def pixels_per_cell(self) -> int:
        return int(2 ** len(self.temporal_down))


class Memory:
    """What temporal layers remember between calls, taken and left in the order in which they run."""

    def __init__(self, past: Sequence[Tensor] | None) -> None:
        self.starting = past is None  # nothing has gone through these layers yet
        self._past = iter(past or ())
        self.next: list[Tensor] = []  # the state to hand to the next call

    def extend(self, x: Tensor, frames: int) -> Tensor:
        """x (B, C, T, H, W) with the `frames` frames before it in front: zeros at the start of the stream."""
        b, c, _, h, w = x.shape
        whole = torch.cat((x.new_zeros(b, c, frames, h, w) if self.starting else next(self._past), x), dim=2)
        self.next.append(whole[:, :, whole.shape[2] - frames :].clone())
        return whole

    def carry(self, whole: Tensor, frames: int) -> None:
        """Remember the last `frames` frames of `whole` without having read anything."""
        self.next.append(whole[:, :, whole.shape[2] - frames :].clone())

    def take(self) -> Tensor:
        return next(self._past)


class CausalConv(nn.Conv3d):
    """A 3-d convolution that sees no later frame."""

    def __init__(self, inputs: int, outputs: int, kernel: tuple[int, int, int]) -> None:
        super().__init__(inputs, outputs, kernel, padding=(0, kernel[1] // 2, kernel[2] // 2))

    def streamed(self, x: Tensor, memory: Memory) -> Tensor:
        out: Tensor = self(memory.extend(x, self.kernel_size[0] - 1))
        return out


class ChannelNorm(nn.Module):
    """x / ||x||_2 over channels, times sqrt(C) and a gain."""

    def __init__(self, channels: int, *, images: bool = False) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(channels, 1, 1, *(() if images else (1,))))
        self.scale = channels**0.5

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = F.normalize(x, dim=1) * self.scale * self.gamma
        return out


class ResidualBlock(nn.Module):
    """Two normalised convolutions beside a shortcut."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.residual = nn.ModuleDict(
            {
                "0": ChannelNorm(inputs),
                "2": CausalConv(inputs, outputs, (3, 3, 3)),
                "3": ChannelNorm(outputs),
                "6": CausalConv(outputs, outputs, (3, 3, 3)),
            }
        )
        self.shortcut = CausalConv(inputs, outputs, (1, 1, 1)) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, memory: Memory) -> Tensor:
        part = self.residual
        y = streamed(part["2"], F.silu(part["0"](x)), memory)
        y = streamed(part["6"], F.silu(part["3"](y)), memory)
        out: Tensor = y + self.shortcut(x)
        return out


def streamed(conv: nn.Module, x: Tensor, memory: Memory) -> Tensor:
    assert isinstance(conv, CausalConv)
    return conv.streamed(x, memory)


class FrameAttention(nn.Module):
    """One-head attention over the pixels of each frame."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = ChannelNorm(channels, images=True)
        self.to_qkv = nn.Conv2d(channels, channels * 3, 1)
        self.proj = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor, memory: Memory) -> Tensor:
        frames = images(x)  # (B * T, C, H, W)
        q, k, v = self.to_qkv(self.norm(frames)).flatten(2).transpose(1, 2).unsqueeze(1).chunk(3, dim=-1)
        mixed = F.scaled_dot_product_attention(q, k, v).squeeze(1).transpose(1, 2).reshape(frames.shape)
        return x + videos(self.proj(mixed), len(x))


def images(x: Tensor) -> Tensor:
    """(B, C, T, H, W) -> (B * T, C, H, W)"""
    return x.transpose(1, 2).flatten(0, 1)


def videos(x: Tensor, batch: int) -> Tensor:
    """(B * T, C, H, W) -> (B, C, T, H, W)"""
    return x.view(batch, -1, *x.shape[1:]).transpose(1, 2)


class Down(nn.Module):
    """Halve height and width, and time where asked to: the first frame alone, then frames (0, 1, 2), (2, 3, 4) …"""

    def __init__(self, channels: int, *, time: bool) -> None:
        super().__init__()
        self.resample = nn.ModuleDict({"1": nn.Conv2d(channels, channels, 3, stride=2)})
        self.time_conv = nn.Conv3d(channels, channels, (3, 1, 1), stride=(2, 1, 1)) if time else None

    def forward(self, x: Tensor, memory: Memory) -> Tensor:
        x = videos(self.resample["1"](F.pad(images(x), (0, 1, 0, 1))), len(x))
        if self.time_conv is None:
            return x
        if not memory.starting:
            return self._halved(torch.cat((memory.take(), x), dim=2), memory)
        return torch.cat((x[:, :, :1], self._halved(x, memory)), dim=2)

    def _halved(self, x: Tensor, memory: Memory) -> Tensor:
        """x: an odd number of frames, the first seen before; whole periods come in, so one frame is remembered."""
        assert self.time_conv is not None
        memory.carry(x, 1)
        out: Tensor = self.time_conv(x) if x.shape[2] > 1 else x[:, :, :0]
        return out


class Up(nn.Module):
    """Double height and width, and time where asked to: a stream's first frame is not doubled, nor seen later."""

    def __init__(self, channels: int, *, time: bool) -> None:
        super().__init__()
        self.resample = nn.ModuleDict({"1": nn.Conv2d(channels, channels // 2, 3, padding=1)})
        self.time_conv = CausalConv(channels, channels * 2, (3, 1, 1)) if time else None

    def forward(self, x: Tensor, memory: Memory) -> Tensor:
        if self.time_conv is not None:
            first = 1 if memory.starting else 0
            x = torch.cat((x[:, :, :first], self._doubled(x[:, :, first:], memory)), dim=2)
        wide = F.interpolate(images(x), scale_factor=2.0, mode="nearest-exact")
        return videos(self.resample["1"](wide), len(x))

    def _doubled(self, x: Tensor, memory: Memory) -> Tensor:
        """(B, C, T, H, W) -> (B, C, 2 T, H, W): the first C channels are the earlier frame, the last C the later."""
        assert self.time_conv is not None
        whole = memory.extend(x, 2)
        if x.shape[2] == 0:
            return x
        both = self.time_conv(whole)
        b, _, t, h, w = both.shape
        out: Tensor = both.view(b, 2, -1, t, h, w).permute(0, 2, 3, 1, 4, 5).reshape(b, -1, 2 * t, h, w)
        return out


class Coder(nn.Module):
    """What encoder and decoder share: a first convolution, layers in order, a head."""

    conv1: CausalConv
    middle: nn.ModuleList
    head: nn.ModuleDict

    def _run(self, layers: Sequence[nn.Module] | nn.ModuleList, x: Tensor, memory: Memory) -> Tensor:
        for layer in layers:
            x = layer(x, memory)
        return x

    def _finish(self, x: Tensor, memory: Memory) -> Tensor:
        return streamed(self.head["2"], F.silu(self.head["0"](x)), memory)


def middle(channels: int) -> nn.ModuleList:
    parts = (ResidualBlock(channels, channels), FrameAttention(channels), ResidualBlock(channels, channels))
    return nn.ModuleList(parts)


def head(channels: int, outputs: int) -> nn.ModuleDict:
    return nn.ModuleDict({"0": ChannelNorm(channels), "2": CausalConv(channels, outputs, (3, 3, 3))})


class Encoder(Coder):
    def __init__(self, config: VaeConfig) -> None:
        super().__init__()
        widths = [config.dim * m for m in (1, *config.dim_mult)]
        self.conv1 = CausalConv(3, widths[0], (3, 3, 3))
        layers: list[nn.Module] = []
        for level, (inputs, outputs) in enumerate(zip(widths[:-1], widths[1:], strict=True)):
            layers += [ResidualBlock(inputs if i == 0 else outputs, outputs) for i in range(config.num_res_blocks)]
            if level < len(config.temporal_down):
                layers.append(Down(outputs, time=config.temporal_down[level]))
        self.downsamples = nn.ModuleList(layers)
        self.middle = middle(widths[-1])
        self.head = head(widths[-1], config.z_dim * 2)

    def forward(self, x: Tensor, memory: Memory) -> Tensor:
        x = self._run(self.downsamples, streamed(self.conv1, x, memory), memory)
        return self._finish(self._run(self.middle, x, memory), memory)


class Decoder(Coder):
    def __init__(self, config: VaeConfig) -> None:
        super().__init__()
        widths = [config.dim * m for m in (config.dim_mult[-1], *reversed(config.dim_mult))]
        self.conv1 = CausalConv(config.z_dim, widths[0], (3, 3, 3))
        self.middle = middle(widths[0])
        layers: list[nn.Module] = []
        up_time = tuple(reversed(config.temporal_down))
        for level, (inputs, outputs) in enumerate(zip(widths[:-1], widths[1:], strict=True)):
            entering = inputs // 2 if level else inputs  # every step up but the last has halved the channels
            layers += [
                ResidualBlock(entering if i == 0 else outputs, outputs) for i in range(config.num_res_blocks + 1)
            ]
            if level < len(up_time):
                layers.append(Up(outputs, time=up_time[level]))
        self.upsamples = nn.ModuleList(layers)
        self.head = head(widths[-1], 3)
        by_level = [2 * (config.num_res_blocks + 1)] * len(config.dim_mult)
        self.reaches = (*by_level[:-1], by_level[-1] + 1)  # rows, after the middle; the head is of the last level

    def forward(self, x: Tensor, memory: Memory, crops: Sequence[slice] = ()) -> Tensor:
        """`crops`: the rows to go on with after the middle and after each step up, and those of the result."""
        left = iter(crops or [slice(None)] * (len(self.reaches) + 1))
        x = self._run(self.middle, streamed(self.conv1, x, memory), memory)[..., next(left), :]
        for layer in self.upsamples:
            x = layer(x, memory)
            if isinstance(layer, Up):
                x = x[..., next(left), :]
        return self._finish(x, memory)[..., next(left), :]


class WanVae(nn.Module):
    """Both halves. Pictures are float in [-1, 1] here; `WanDecoder` and `WanEncoder` speak uint8."""

    mean: Tensor
    std: Tensor

    def __init__(self, config: VaeConfig = VaeConfig()) -> None:  # frozen
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.conv1 = CausalConv(config.z_dim * 2, config.z_dim * 2, (1, 1, 1))
        self.conv2 = CausalConv(config.z_dim, config.z_dim, (1, 1, 1))
        self.decoder = Decoder(config)
        for name, values in (("mean", MEAN), ("std", STD)):
            constant = torch.tensor(values, device="cpu").view(1, -1, 1, 1, 1)  # real, even in a network of no device
            self.register_buffer(name, constant, persistent=False)

    def encode(self, video: Tensor) -> Tensor:
        """(B, 3, N, H, W) -> normalised latents (B, C, F, H / 8, W / 8); pictures past 1 + 4 k are left out."""
        return (self.mu(video) - self.mean.to(video)) / self.std.to(video)

    def mu(self, video: Tensor) -> Tensor:
        """The latents before they are normalised, one at a time so that memory does not grow with the clip."""
        out, state = [], None
        for pictures in self._periods(video):
            memory = Memory(state)
            out.append(self.conv1(self.encoder(pictures, memory)).chunk(2, dim=1)[0])
            state = memory.next
        return torch.cat(out, dim=2)

    def decode(
        self, latents: Tensor, state: list[Tensor] | None = None, crops: Sequence[slice] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """Normalised latents (B, C, F, h, w) -> pictures (B, 3, N, 8 h, 8 w), not yet clamped, and the new state.

        The first latent of a stream gives one picture, each later one four. One latent goes through at a time: the
        result does not depend on how a stream is cut, and memory does not grow with the block. `crops`: see `WanBand`.
        """
        z = self.conv2(latents * self.std.to(latents) + self.mean.to(latents))
        out = []
        for i in range(z.shape[2]):
            memory = Memory(state)
            out.append(self.decoder(z[:, :, i : i + 1], memory, crops))
            state = memory.next
        assert state is not None
        return torch.cat(out, dim=2), state

    def _periods(self, video: Tensor) -> Iterator[Tensor]:
        yield video[:, :, :1]
        period = self.config.pictures_per_frame
        for start in range(1, video.shape[2] - period + 1, period):
            yield video[:, :, start : start + period]


def to_pictures(video: Tensor) -> Tensor:
    """(3, N, H, W) in [-1, 1], clamped here -> (N, H, W, 3) uint8, truncated as the reference writes its files."""
    return ((video.clamp(-1, 1) * 0.5 + 0.5) * 255).to(torch.uint8).permute(1, 2, 3, 0).contiguous()


class WanBand:
    """Some rows of a world's pictures.

    Attention in the middle of the decoder sees all rows, so all bands run what comes before it and the middle itself in
    whole: about 2 % of the work. After it, a band is made of the rows that it depends on and no others, so it is the
    same as in a picture decoded at once. At the published sizes it begins with 13 latent rows around its own and
    enters the last level, at the size of the pictures, with 7 of those.
    """

    def __init__(self, vae: WanVae, rows: range, height: int) -> None:
        """`rows` of the `height` of a latent."""
        cell = vae.config.pixels_per_cell
        self._vae, self.rows = vae, scaled(rows, cell)
        self._crops = crops(vae.decoder.reaches, self.rows, height * cell, after=1)  # `Up` ends with a convolution

    @torch.inference_mode()
    def decode(self, latents: Tensor, state: State) -> tuple[Tensor, State]:
        """(F, C, H, W) -> (N, rows, 8 W, 3) uint8."""
        return _decoded(self._vae, latents, state, self._crops)


class WanDecoder:
    """The streaming decoder of a world."""

    def __init__(self, vae: WanVae) -> None:
        self._vae = vae

    @torch.inference_mode()
    def decode(self, latents: Tensor, conditioning: Conditioning, state: State) -> tuple[Tensor, State]:
        """(F, C, H, W) -> (N, 8 H, 8 W, 3) uint8."""
        return _decoded(self._vae, latents, state)

    def bands(self, latent: LatentShape, parts: int) -> list[WanBand]:
        return [WanBand(self._vae, rows, latent.height) for rows in even(latent.height, parts)]


def _decoded(vae: WanVae, latents: Tensor, state: State, crops: Sequence[slice] = ()) -> tuple[Tensor, State]:
    weight = vae.conv2.weight
    z = latents.to(weight.device, weight.dtype).transpose(0, 1)[None]
    video, state = vae.decode(z, state, crops)
    return to_pictures(video[0].float()), state


class WanEncoder:
    """Pictures to the latents that begin a world."""

    def __init__(self, vae: WanVae) -> None:
        self._vae = vae

    @torch.inference_mode()
    def encode(self, pictures: Tensor) -> Tensor:
        """(N, H, W, 3) uint8 -> (F, C, H / 8, W / 8)."""
        weight = self._vae.conv2.weight
        video = pictures.to(weight.device).permute(3, 0, 1, 2)[None].to(weight.dtype) / 127.5 - 1
        return self._vae.encode(video)[0].transpose(0, 1)
