"""MAGI-1's video autoencoder: a vision transformer each way, run over tiles that are blended at their seams.

Encodes to the distribution's mean. Every block is decoded on its own, so decoding carries no state. Knows nothing of
the transformer that makes the latents beyond the factor its latents are scaled by.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.layers.attention import Attention, sdpa
from engine.models import Conditioning, LatentShape, State
from engine.models.bands import even

LATENT_SCALE = 0.18215
PIXEL_HALF_RANGE = 127.5
HEAD_EPS = 1e-5  # added to the standard deviation, not to the variance
NORM_EPS = 1e-5


@dataclass(frozen=True)
class MagiVAEConfig:
    """Sizes; the defaults are those of the published autoencoder."""

    video_size: int = 256  # the picture and clip size that the position embedding was made for
    video_length: int = 16
    patch_size: int = 8
    patch_length: int = 4
    z_channels: int = 16
    width: int = 1024
    depth: int = 24
    heads: int = 16
    mlp_ratio: float = 4.0

    @property
    def patch(self) -> tuple[int, int, int]:
        return self.patch_length, self.patch_size, self.patch_size

    @property
    def grid(self) -> tuple[int, int, int]:
        """Patches per axis of the native clip: frame, row, column."""
        side = self.video_size // self.patch_size
        return self.video_length // self.patch_length, side, side


@dataclass(frozen=True)
class Tiling:
    """Tile sizes in frames and pixels (frame, row, column), and the part of a tile that its neighbour covers too.

    A size of None takes the whole axis. The published programs use 12 x 256 x 256 with a quarter's overlap in space.
    """

    size: tuple[int | None, int | None, int | None] = (12, 256, 256)
    overlap: tuple[float, float, float] = (0.0, 0.25, 0.25)


class TileMismatch(ValueError):
    """Tiles or clips that do not fall on whole patches."""


class HeadNormAttention(nn.Module):
    """Full attention whose queries, keys and values are each normalised per head, without weights."""

    def __init__(self, width: int, heads: int, attention: Attention) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads, self.attention = heads, attention

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (_normalise(part) for part in torch.unflatten(self.qkv(x), -1, (3, self.heads, -1)).unbind(2))
        out: Tensor = self.proj(self.attention(q, k, v).flatten(2))
        return out


def _normalise(x: Tensor) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    return (x - mean) / (x.std(-1, correction=0, keepdim=True) + HEAD_EPS)


class MLP(nn.Module):
    def __init__(self, width: int, ratio: float) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, int(width * ratio)), nn.Linear(int(width * ratio), width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(F.gelu(self.fc1(x)))
        return out


class Block(nn.Module):
    """No norm before attention (it normalises its heads), one before the MLP."""

    def __init__(self, config: MagiVAEConfig, attention: Attention) -> None:
        super().__init__()
        self.attn = HeadNormAttention(config.width, config.heads, attention)
        self.norm2 = nn.LayerNorm(config.width, NORM_EPS)
        self.mlp = MLP(config.width, config.mlp_ratio)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class Trunk(nn.Module):
    """What both ways share: a class token, position embeddings resized to the clip, blocks and a norm."""

    def __init__(self, config: MagiVAEConfig, attention: Attention) -> None:
        super().__init__()
        self.config = config
        self.cls_token = nn.Parameter(torch.empty(1, 1, config.width))
        self.pos_embed = nn.Parameter(torch.empty(1, 1 + math.prod(config.grid), config.width))
        self.blocks = nn.ModuleList(Block(config, attention) for _ in range(config.depth))
        self.norm = nn.LayerNorm(config.width, NORM_EPS)

    def run(self, tokens: Tensor, grid: tuple[int, int, int]) -> Tensor:
        """(N, patches, width) -> the same"""
        x = torch.cat([self.cls_token.expand(len(tokens), -1, -1), tokens], 1) + self._positions(grid)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.norm(x)[:, 1:]
        return out

    def _positions(self, grid: tuple[int, int, int]) -> Tensor:
        if grid == self.config.grid:
            return self.pos_embed
        cls, native = self.pos_embed[:, :1], torch.unflatten(self.pos_embed[:, 1:].transpose(1, 2), 2, self.config.grid)
        resized = F.interpolate(native, size=grid, mode="trilinear", align_corners=False)
        return torch.cat([cls, resized.flatten(2).transpose(1, 2)], 1)


class PatchEmbed(nn.Module):
    def __init__(self, config: MagiVAEConfig) -> None:
        super().__init__()
        self.proj = nn.Conv3d(3, config.width, config.patch, config.patch)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.proj(x)
        return out


class EncoderTrunk(Trunk):
    def __init__(self, config: MagiVAEConfig, attention: Attention) -> None:
        super().__init__(config, attention)
        self.patch_embed = PatchEmbed(config)
        self.last_layer = nn.Linear(config.width, 2 * config.z_channels)

    def forward(self, video: Tensor) -> Tensor:
        """(N, 3, T, H, W) in [-1, 1] -> (N, 2 z, t, h, w): means, then log-variances. One frame stands for four."""
        if video.shape[2] == 1:
            video = video.expand(-1, -1, self.config.patch_length, -1, -1)
        if any(n % p for n, p in zip(video.shape[2:], self.config.patch, strict=True)):
            raise TileMismatch(f"clip: expected multiples of {self.config.patch}, got {tuple(video.shape[2:])}")
        x = self.patch_embed(video)
        grid = (x.shape[2], x.shape[3], x.shape[4])
        out: Tensor = self.last_layer(self.run(x.flatten(2).transpose(1, 2), grid))
        return torch.unflatten(out.transpose(1, 2), 2, grid)


class DecoderTrunk(Trunk):
    def __init__(self, config: MagiVAEConfig, attention: Attention) -> None:
        super().__init__(config, attention)
        self.proj_in = nn.Linear(config.z_channels, config.width)
        self.last_layer = nn.Conv3d(config.width // math.prod(config.patch), 3, 3, padding=1)

    def forward(self, latents: Tensor) -> Tensor:
        """(N, z, t, h, w) -> (N, 3, T, H, W), not clamped."""
        grid = (latents.shape[2], latents.shape[3], latents.shape[4])
        x = self.run(self.proj_in(latents.flatten(2).transpose(1, 2)), grid)
        x = torch.unflatten(torch.unflatten(x, 2, (*self.config.patch, -1)), 1, grid)  # (N, t, h, w, q, p, p, C)
        x = x.permute(0, 7, 1, 4, 2, 5, 3, 6).flatten(6, 7).flatten(4, 5).flatten(2, 3)
        out: Tensor = self.last_layer(x)
        return out


class MagiVAE(nn.Module):
    """Both ways; `tiling` None runs a clip in one piece."""

    def __init__(self, config: MagiVAEConfig, tiling: Tiling | None = Tiling(), attention: Attention = sdpa) -> None:
        super().__init__()
        self.config, self.tiling = config, tiling
        self.encoder = EncoderTrunk(config, attention)
        self.decoder = DecoderTrunk(config, attention)

    def encode_mean(self, video: Tensor) -> Tensor:
        """(N, 3, T, H, W) in [-1, 1] -> (N, z, t, h, w)"""

        def mean(tile: Tensor) -> Tensor:
            out: Tensor = self.encoder(tile)[:, : self.config.z_channels]
            return out

        if self.tiling is None:
            return mean(video)
        sizes = self._tile(video.shape, self.config.patch)
        patches = [n // p for n, p in zip(sizes, self.config.patch, strict=True)]
        return tiled(mean, video, sizes, patches, self.tiling.overlap, against_blended=True)

    def decode_video(self, latents: Tensor, *, single: bool = True, rows: range | None = None) -> Tensor:
        """(N, z, t, h, w) -> (N, 3, T, H, W), not clamped. `rows` of tiles, where not all are wanted.

        With `single` a tile of one latent frame gives one picture, as in the published program (the last tile of a
        longer clip too); without, as many as any latent frame.
        """

        def run(tile: Tensor) -> Tensor:
            out: Tensor = self.decoder(tile)
            return out[:, :, :1] if single and tile.shape[2] == 1 else out

        if self.tiling is None:
            return run(latents)
        video = [n * p for n, p in zip(latents.shape[2:], self.config.patch, strict=True)]
        sizes = self._tile(torch.Size([0, 0, *video]), self.config.patch)
        patches = [n // p for n, p in zip(sizes, self.config.patch, strict=True)]
        return tiled(run, latents, patches, sizes, self.tiling.overlap, against_blended=False, rows=rows)

    def encode(self, pictures: Tensor) -> Tensor:
        """(N, H, W, 3) uint8, N = 1 or a multiple of 4 -> latents (F, C, H, W) as the transformer knows them."""
        video = pictures.to(self._dtype) / PIXEL_HALF_RANGE - 1
        return self.encode_mean(video.permute(3, 0, 1, 2)[None])[0].transpose(0, 1) * LATENT_SCALE

    def decode(self, latents: Tensor, conditioning: Conditioning, state: State) -> tuple[Tensor, State]:
        """(F, C, H, W) -> (4 F, H, W, 3) uint8; there is no state."""
        return self.pictures(latents), None

    def bands(self, latent: LatentShape, parts: int) -> list[MagiBand]:
        """Of whole tiles: not more than there are one below the other; one where pictures are decoded in one piece."""
        height = latent.height * self.config.patch_size
        size, overlap = (None, 0.0) if self.tiling is None else (self.tiling.size[1], self.tiling.overlap[1])
        tile = height if size is None else size
        stride = tile - int(tile * overlap)
        found = even(math.ceil(height / stride), parts)
        return [MagiBand(self, tiles, range(tiles.start * stride, min(tiles.stop * stride, height))) for tiles in found]

    def pictures(self, latents: Tensor, rows: range | None = None) -> Tensor:
        """(F, C, H, W) -> (4 F, H, W, 3) uint8, or of `rows` of tiles."""
        z = latents.to(self._dtype).transpose(0, 1)[None] / LATENT_SCALE
        return to_pictures(self.decode_video(z, single=False, rows=rows)[0])

    @property
    def _dtype(self) -> torch.dtype:
        return self.encoder.pos_embed.dtype

    def _tile(self, shape: torch.Size, patch: tuple[int, int, int]) -> list[int]:
        assert self.tiling is not None
        sizes = [whole if size is None else size for size, whole in zip(self.tiling.size, shape[2:], strict=True)]
        for size, overlap, p in zip(sizes, self.tiling.overlap, patch, strict=True):
            if size % p or int(size * (1 - overlap)) % p:
                raise TileMismatch(
                    f"tile of {size} with overlap {overlap}: expected tile and stride in multiples of {p}"
                )
        return sizes


class MagiBand:
    """Some rows of tiles. The tiles above them, which are blended into the first, are run here too."""

    def __init__(self, vae: MagiVAE, tiles: range, rows: range) -> None:
        self._vae, self._tiles, self.rows = vae, tiles, rows

    def decode(self, latents: Tensor, state: State) -> tuple[Tensor, State]:
        """(F, C, H, W) -> (4 F, rows, W, 3) uint8; there is no state."""
        return self._vae.pictures(latents, self._tiles), None


def to_pictures(video: Tensor) -> Tensor:
    """(3, T, H, W) in [-1, 1] -> (T, H, W, 3) uint8, clamped and truncated."""
    return (video.float() * PIXEL_HALF_RANGE + PIXEL_HALF_RANGE).clamp(0, 255).to(torch.uint8).permute(1, 2, 3, 0)


def tiled(
    run: Callable[[Tensor], Tensor],
    x: Tensor,
    tile: list[int],
    out_tile: list[int],
    overlap: tuple[float, float, float],
    *,
    against_blended: bool,
    rows: range | None = None,
) -> Tensor:
    """Run x (N, C, T, H, W) tile by tile: each result is blended into its predecessors, cropped, and joined.

    `tile` and `out_tile` are one tile's size going in and coming out. A tile is blended with its predecessors as they
    came out or, `against_blended`, as they are after their own blending. Of `rows` of tiles alone: those before the
    first are run to be blended in, which does `against_blended` no justice.
    """
    assert rows is None or not against_blended
    strides = [max(1, int(n * (1 - part))) for n, part in zip(tile, overlap, strict=True)]
    blends = [int(n * part) for n, part in zip(out_tile, overlap, strict=True)]
    times, rows_there, columns = (range(math.ceil(n / s)) for n, s in zip(x.shape[2:], strides, strict=True))
    rows = rows_there if rows is None else rows
    raw: dict[tuple[int, ...], Tensor] = {}
    done: dict[tuple[int, ...], Tensor] = {}
    for at in product(times, range(max(0, rows.start - 1), rows.stop), columns):
        window = [(i * s, i * s + n) for i, s, n in zip(at, strides, tile, strict=True)]
        raw[at] = run(_cut(x, window))
        if at[1] < rows.start:
            continue
        new = raw[at]
        for axis in range(3):
            if at[axis]:
                before = tuple(i - (a == axis) for a, i in enumerate(at))
                new = blend(raw[before], new, axis - 3, blends[axis])
        raw[at] = new if against_blended else raw[at]
        done[at] = _cut(new, [(0, n - b) for n, b in zip(out_tile, blends, strict=True)])
    return torch.cat(
        [torch.cat([torch.cat([done[t, r, c] for c in columns], -1) for r in rows], -2) for t in times], -3
    )


def _cut(x: Tensor, window: list[tuple[int, int]]) -> Tensor:
    t, h, w = (slice(*bounds) for bounds in window)
    return x[:, :, t, h, w]


def blend(before: Tensor, new: Tensor, axis: int, width: int) -> Tensor:
    """`new` with its first `width` positions faded in over the last ones of `before`: position k weighs k / width."""
    width = min(width, before.shape[axis], new.shape[axis])
    if width == 0:
        return new
    shape = [1] * new.ndim
    shape[axis] = width
    weight = (torch.arange(width, dtype=new.dtype, device=new.device) / width).view(shape)
    old, start = before.narrow(axis, before.shape[axis] - width, width), new.narrow(axis, 0, width)
    faded = old * (1 - weight) + start * weight
    return torch.cat([faded, new.narrow(axis, width, new.shape[axis] - width)], axis)
