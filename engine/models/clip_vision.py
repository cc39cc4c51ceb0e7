"""The picture encoder of Wan2.1's image-to-video models: a ViT-H/14 of CLIP, up to its last layer but one.

Parameters carry the names of the published file (without `visual.`). What its last layer, norm and head would make of
the tokens is not needed; they are there so that a checkpoint is matched whole. Pictures go in at any size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True)
class ClipConfig:
    """Sizes of the encoder; the defaults are the published ones."""

    dim: int = 1280
    mlp_dim: int = 5120
    heads: int = 16
    layers: int = 32
    patch: int = 14
    picture: int = 224
    out_dim: int = 1024

    @property
    def tokens(self) -> int:
        return (self.picture // self.patch) ** 2 + 1


class Attention(nn.Module):
    def __init__(self, config: ClipConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.to_qkv = nn.Linear(config.dim, 3 * config.dim)
        self.proj = nn.Linear(config.dim, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        q, k, v = self.to_qkv(x).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        out: Tensor = self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, d))
        return out


class Layer(nn.Module):
    def __init__(self, config: ClipConfig) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(config.dim), nn.LayerNorm(config.dim)
        self.attn = Attention(config)
        self.mlp = nn.Sequential(
            nn.Linear(config.dim, config.mlp_dim), nn.GELU(), nn.Linear(config.mlp_dim, config.dim)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class ClipVision(nn.Module):
    """A picture to tokens."""

    def __init__(self, config: ClipConfig = ClipConfig()) -> None:  # frozen
        super().__init__()
        self.config = config
        self.patch_embedding = nn.Conv2d(3, config.dim, config.patch, config.patch, bias=False)
        self.cls_embedding = nn.Parameter(torch.zeros(1, 1, config.dim))
        self.pos_embedding = nn.Parameter(torch.zeros(1, config.tokens, config.dim))
        self.pre_norm, self.post_norm = nn.LayerNorm(config.dim), nn.LayerNorm(config.dim)
        self.transformer = nn.Sequential(*(Layer(config) for _ in range(config.layers)))
        self.head = nn.Parameter(torch.zeros(config.dim, config.out_dim))

    def forward(self, picture: Tensor) -> Tensor:
        """(B, 3, H, W) in [-1, 1] -> (B, tokens, dim); squeezed to a square, as officially."""
        size = (self.config.picture, self.config.picture)
        x = F.interpolate(picture.float(), size, mode="bicubic", align_corners=False) * 0.5 + 0.5
        mean, std = (torch.tensor(values, device=x.device).view(1, 3, 1, 1) for values in (MEAN, STD))
        patches = self.patch_embedding(((x - mean) / std).to(self.pos_embedding.dtype)).flatten(2).transpose(1, 2)
        tokens = torch.cat((self.cls_embedding.expand(len(x), -1, -1), patches), dim=1) + self.pos_embedding
        out: Tensor = self.transformer[:-1](self.pre_norm(tokens))
        return out
