"""The Wan2.1 diffusion transformer, once: bidirectional and block-causal, text- and image-conditioned, any size.

Parameters carry the names of the published files. What a block sees of the past is the context's affair: the same
forward pass is bidirectional when the context holds nothing but the call's own frames. Knows no cache, no sampler and
no checkpoint format; the values in which Self-Forcing, CausVid and LongLive differ are rows in `engine.models.presets`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.layers.attention import Attention, sdpa
from engine.layers.rope import Rope3D
from engine.models import Conditioning, Context, Expand, Prompt, Rotate

Sources: TypeAlias = Sequence[tuple[Tensor, Tensor]]
"""What a layer's cross attention reads: keys and values (B, L, heads, head_dim) of the text, and of a picture."""

PATCH = 2  # rows and columns of latent that make one token


class ConfigError(ValueError):
    """A model's own description names an architecture that this code does not have."""


@dataclass(frozen=True)
class WanConfig:
    """The sizes of one Wan2.1 transformer; the defaults are those of the 1.3B text-to-video model."""

    dim: int = 1536
    ffn_dim: int = 8960
    num_heads: int = 12
    num_layers: int = 30
    in_dim: int = 16
    out_dim: int = 16
    freq_dim: int = 256
    text_dim: int = 4096
    text_len: int = 512
    eps: float = 1e-6
    clip_dim: int | None = None  # width of the CLIP tokens of an image-to-video model; None: text only

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> WanConfig:
        """From the `config.json` of a published model; raises ConfigError on an architecture that this is not."""
        fixed = {"patch_size": [1, PATCH, PATCH], "qk_norm": True, "cross_attn_norm": True}
        for name, expected in fixed.items():
            got = values.get(name, expected)
            if (list(got) if isinstance(got, tuple) else got) != expected:
                raise ConfigError(f"{name}: expected {expected}, got {got}")
        known = {f.name for f in fields(cls)}
        clip_dim = values.get("clip_dim", 1280) if values.get("model_type") == "i2v" else None
        return cls(**{k: v for k, v in values.items() if k in known} | {"clip_dim": clip_dim})

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads

    def tokens(self, height: int, width: int) -> int:
        """Tokens of one latent frame of this size."""
        return (height // PATCH) * (width // PATCH)


@dataclass(eq=False)
class WanConditioning(Conditioning):
    """A Wan block's conditioning: the prompt and, for image-to-video models, the picture twice over."""

    image: Prompt | None = None  # CLIP tokens (1, 257, clip_dim) with their own cached keys and values
    picture: Tensor | None = None  # (B, F, 4 mask + 16 latent channels, H, W), joined to the noisy latents


class RMSNorm(nn.Module):
    """x / rms(x) in float32, cast back, times a weight per channel."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale).to(x.dtype) * self.weight


def heads(x: Tensor, count: int) -> Tensor:
    """(..., D) -> (..., count, D / count)"""
    return x.view(*x.shape[:-1], count, -1)


class SelfAttention(nn.Module):
    """The projections around the attention of a block over itself and what its context shows of the past."""

    def __init__(self, config: WanConfig) -> None:
        super().__init__()
        self.heads = config.num_heads
        self.q, self.k, self.v, self.o = (nn.Linear(config.dim, config.dim) for _ in range(4))
        self.norm_q, self.norm_k = (RMSNorm(config.dim, config.eps) for _ in range(2))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, F, S, D) -> queries, keys and values (B, F, S, heads, head_dim), not rotated."""
        q, k = self.norm_q(self.q(x)), self.norm_k(self.k(x))
        return heads(q, self.heads), heads(k, self.heads), heads(self.v(x), self.heads)


class CrossAttention(nn.Module):
    """Attention to the text and, in image-to-video models, to the picture's CLIP tokens beside it."""

    def __init__(self, config: WanConfig) -> None:
        super().__init__()
        self.heads = config.num_heads
        self.q, self.k, self.v, self.o = (nn.Linear(config.dim, config.dim) for _ in range(4))
        self.norm_q, self.norm_k = (RMSNorm(config.dim, config.eps) for _ in range(2))
        if config.clip_dim is not None:
            self.k_img, self.v_img = (nn.Linear(config.dim, config.dim) for _ in range(2))
            self.norm_k_img = RMSNorm(config.dim, config.eps)

    def project(self, text: Tensor) -> tuple[Tensor, Tensor]:
        """(B, L, D) -> keys and values (B, L, heads, head_dim)."""
        return heads(self.norm_k(self.k(text)), self.heads), heads(self.v(text), self.heads)

    def project_image(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return heads(self.norm_k_img(self.k_img(tokens)), self.heads), heads(self.v_img(tokens), self.heads)

    def forward(self, x: Tensor, sources: Sources, attention: Attention) -> Tensor:
        """x: (B, F, S, D); the results over the separate sources are added before the output projection."""
        q = heads(self.norm_q(self.q(x)), self.heads).flatten(1, 2)  # (B, F * S, heads, head_dim)
        first, *others = (attention(q, k.expand(len(x), -1, -1, -1), v.expand(len(x), -1, -1, -1)) for k, v in sources)
        out: Tensor = self.o(sum(others, first).flatten(-2).view_as(x))
        return out


class Layer(nn.Module):
    """Self attention, cross attention and a feed-forward net, the first and last modulated per latent frame.

    What comes before self attention and what comes after are two functions of tensors alone: they can be compiled,
    while attention over the cache is the context's.
    """

    def __init__(self, config: WanConfig) -> None:
        super().__init__()
        self.eps = config.eps
        self.self_attn = SelfAttention(config)
        self.cross_attn = CrossAttention(config)
        self.norm3 = nn.LayerNorm(config.dim, config.eps)
        gelu = nn.GELU(approximate="tanh")
        self.ffn = nn.Sequential(nn.Linear(config.dim, config.ffn_dim), gelu, nn.Linear(config.ffn_dim, config.dim))
        self.modulation = nn.Parameter(torch.zeros(1, 6, config.dim))

    def before(self, x: Tensor, time: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x: (B, F, S, D), time: (B, F, 6, D) -> what self attention takes."""
        shift, scale, *_ = self._modulation(time)
        return self.self_attn.project(modulated(x, shift, scale, self.eps))

    def after(self, x: Tensor, attended: Tensor, time: Tensor, sources: Sources, attention: Attention) -> Tensor:
        """x and time as in `before`; attended: (B, F, S, heads, head_dim)."""
        _, _, gate, shift, scale, ffn_gate = self._modulation(time)
        x = torch.addcmul(x, gate, self.self_attn.o(attended.flatten(-2)))
        x = x + self.cross_attn(self.norm3(x), sources, attention)
        return torch.addcmul(x, ffn_gate, self.ffn(modulated(x, shift, scale, self.eps)))

    def _modulation(self, time: Tensor) -> tuple[Tensor, ...]:
        """Six of (B, F, 1, D): shift, scale and gate of self attention, then of the feed-forward net."""
        return (self.modulation[:, None] + time).chunk(6, dim=2)


def modulated(x: Tensor, shift: Tensor, scale: Tensor, eps: float) -> Tensor:
    """LN(x) * (1 + scale) + shift; shift and scale (B, F, 1, D)."""
    return torch.addcmul(shift, F.layer_norm(x, x.shape[-1:], eps=eps), 1 + scale)


class Head(nn.Module):
    """Tokens to patches of flow."""

    def __init__(self, config: WanConfig) -> None:
        super().__init__()
        self.eps = config.eps
        self.head = nn.Linear(config.dim, config.out_dim * PATCH * PATCH)
        self.modulation = nn.Parameter(torch.zeros(1, 2, config.dim))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """x: (B, F, S, D); time: (B, F, D), the time embedding itself."""
        shift, scale = (self.modulation[:, None] + time[:, :, None]).chunk(2, dim=2)
        out: Tensor = self.head(modulated(x, shift, scale, self.eps))
        return out


class ImageEmbedding(nn.Module):
    """CLIP tokens to the width of the text."""

    def __init__(self, clip_dim: int, dim: int) -> None:
        super().__init__()
        parts = (nn.LayerNorm(clip_dim), nn.Linear(clip_dim, clip_dim), nn.GELU(), nn.Linear(clip_dim, dim))
        self.proj = nn.Sequential(*parts, nn.LayerNorm(dim))

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.proj(tokens)
        return out


class WanTransformer(nn.Module):
    """The network: noisy latents, times and conditioning in, flow (noise - clean) out."""

    def __init__(self, config: WanConfig) -> None:
        super().__init__()
        self.config = config
        self.attention: Attention = sdpa  # of cross attention; self attention is the context's
        self.patch_embedding = nn.Conv3d(config.in_dim, config.dim, (1, PATCH, PATCH), (1, PATCH, PATCH))
        self.text_embedding = _mlp(config.text_dim, config.dim, nn.GELU(approximate="tanh"))
        self.time_embedding = _mlp(config.freq_dim, config.dim, nn.SiLU())
        self.time_projection = nn.Sequential(nn.SiLU(), nn.Linear(config.dim, 6 * config.dim))
        self.blocks: Sequence[Layer] = nn.ModuleList(Layer(config) for _ in range(config.num_layers))  # type: ignore[assignment]
        self.head = Head(config)
        if config.clip_dim is not None:
            self.img_emb = ImageEmbedding(config.clip_dim, config.dim)
        self._before, self._after = Layer.before, Layer.after
        self._ropes: dict[tuple[int, int], Rope3D] = {}

    def compile_layers(self, backend: str = "inductor") -> None:
        """Compile both halves of a layer, once for all layers and for the shapes that come: they never change."""
        self._before = torch.compile(Layer.before, backend=backend, dynamic=False)
        self._after = torch.compile(Layer.after, backend=backend, dynamic=False)

    def forward(self, x: Tensor, t: Tensor, conditioning: Conditioning, context: Context) -> Tensor:
        """x: (B, F, C, H, W); t: (B, F) or (B, 1), 0 .. 1000 -> (B, F, C, H, W)."""
        size = (x.shape[-2] // PATCH, x.shape[-1] // PATCH)
        t = t.expand(x.shape[:2])
        time = self.time_embedding(sinusoid(t, self.config.freq_dim).to(x.dtype))  # (B, F, D)
        modulation = heads(self.time_projection(time), 6)  # (B, F, 6, D)
        tokens = context.shard(self.patches(x, conditioning))
        rotate = self._rotate(size, tokens, context)
        sources = self._sources(conditioning)
        for i, layer in enumerate(self.blocks):
            q, k, v = self._before(layer, tokens, modulation)
            attended = context.attend(i, q, k, v, rotate)
            tokens = self._after(layer, tokens, attended, modulation, sources(i), self.attention)
        return unpatch(self.head(context.unshard(tokens), time), size)

    def prepare(self, conditioning: Conditioning) -> None:
        """Make the keys and values of cross attention now, so that every pass under this prompt finds them."""
        sources = self._sources(conditioning)
        for i in range(len(self.blocks)):
            sources(i)

    def patches(self, x: Tensor, conditioning: Conditioning) -> Tensor:
        """(B, F, C, H, W) -> (B, F, S, D); a convolution whose stride is its kernel is a product over patches."""
        if isinstance(conditioning, WanConditioning) and conditioning.picture is not None:
            x = torch.cat((x, conditioning.picture), dim=2)
        b, f, c, h, w = x.shape
        cut = x.view(b, f, c, h // PATCH, PATCH, w // PATCH, PATCH).permute(0, 1, 3, 5, 2, 4, 6)
        weight = self.patch_embedding.weight.flatten(1)
        return F.linear(cut.reshape(b, f, -1, c * PATCH * PATCH), weight, self.patch_embedding.bias)

    def embed_text(self, embedding: Tensor) -> Tensor:
        """(B, L, text_dim) -> (B, text_len, D): zero rows that pad the text are embedded and attended to as well."""
        missing = self.config.text_len - embedding.shape[1]
        out: Tensor = self.text_embedding(F.pad(embedding, (0, 0, 0, missing)))
        return out

    def _rotate(self, size: tuple[int, int], tokens: Tensor, context: Context) -> Rotate:
        if size not in self._ropes:
            self._ropes[size] = Rope3D(self.config.head_dim, *size)
        rope = self._ropes[size]
        if tokens.shape[2] == rope.tokens:
            return rope
        share = context.shard(torch.arange(rope.tokens, device=tokens.device).view(1, 1, -1, 1)).flatten()
        return functools.partial(rope, share=share)

    def _sources(self, conditioning: Conditioning) -> Callable[[int], Sources]:
        """The keys and values of cross attention by layer; what they are projected from is made at most once."""
        prompt, image = conditioning.prompt, getattr(conditioning, "image", None)
        text = functools.cache(lambda: self.embed_text(prompt.embedding))

        def of_layer(i: int) -> Sources:
            cross = self.blocks[i].cross_attn
            sources = [prompt.cross_kv(i, lambda _: cross.project(text()))]
            if image is not None:
                sources.append(image.cross_kv(i, lambda tokens: cross.project_image(self.img_emb(tokens))))
            return sources

        return of_layer


def _mlp(inputs: int, dim: int, activation: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, dim), activation, nn.Linear(dim, dim))


def sinusoid(t: Tensor, size: int) -> Tensor:
    """[cos(t * f_j), sin(t * f_j)] with f_j = 10000^(-j / half), cosines first: (...) -> (..., size) float64."""
    half = size // 2
    frequencies = 10000.0 ** (-torch.arange(half, dtype=torch.float64, device=t.device) / half)
    angle = t.to(torch.float64).unsqueeze(-1) * frequencies
    return torch.cat((angle.cos(), angle.sin()), dim=-1)


def unpatch(patches: Tensor, size: tuple[int, int]) -> Tensor:
    """(B, F, S, 2 * 2 * C), ordered row in patch, column in patch, channel -> (B, F, C, H, W)."""
    b, f, _, _ = patches.shape
    grid = patches.view(b, f, *size, PATCH, PATCH, -1).permute(0, 1, 6, 2, 4, 3, 5)  # (B, F, C, h, 2, w, 2)
    return grid.flatten(5, 6).flatten(3, 4).contiguous()


class OwnFrames:
    """A context without a past: every token of the call sees every other."""

    def __init__(self, attention: Attention = sdpa, start: int = 0) -> None:
        self._attention = attention
        self._start = start
        self._positions: Tensor | None = None

    def shard(self, tokens: Tensor) -> Tensor:
        return tokens

    def unshard(self, tokens: Tensor) -> Tensor:
        return tokens

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rotate: Rotate | None) -> Tensor:
        if rotate is not None:
            if self._positions is None:
                self._positions = torch.arange(self._start, self._start + q.shape[1])
            q, k = rotate(q, self._positions), rotate(k, self._positions)
        return self._attention(q.flatten(1, 2), k.flatten(1, 2), v.flatten(1, 2)).view_as(q)

    def attend_latent(self, layer: int, q: Tensor, latent: Tensor, expand: Expand, rotate: Rotate | None) -> Tensor:
        return self.attend(layer, q, *expand(latent), rotate)
