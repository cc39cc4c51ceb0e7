"""MAGI-1's transformer: several blocks at once, each at its own time, with its own text and its own view of the past.

Parameter names are those of the published checkpoints, so a checkpoint loads without a key map. One call carries any
number of consecutive blocks; what each may see of the others and of the past is the context's business. Knows no
schedule, no guidance (engine/staggered.py) and no special tokens (engine/models/magi_text.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.layers.attention import Attention, sdpa
from engine.models import Conditioning, Context, Prompt, Rotate
from engine.models.magi_fp8 import Fp8Linear, SmoothFp8Linear

PATCH = 2
PROJECTION_GROUPS = 8  # the self and cross attention results enter the output projection interleaved in 8 groups
TIME_CHANNELS = 256
TIME_SCALE = 1000.0
ROUNDED_UP = (12, 106)
NULL_ROW_KEPT, NULL_ROW_DROPPED = -2, -1  # rows of the null caption that the time conditioning adds


@dataclass(frozen=True)
class MagiConfig:
    """The sizes of one member of the family."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    latent_channels: int = 16
    duplicate_channels: bool = False  # the latent enters twice on the channel axis (24B)
    rescale: float = 1.0
    gated: bool = False  # SiLU-gated MLP (24B) instead of GELU
    caption_channels: int = 4096
    caption_tokens: int = 800
    eps: float = 1e-6
    fp8: bool = False  # all layers but the first and the last hold float8 weights

    @property
    def condition(self) -> int:
        return self.hidden // 4

    @property
    def input_channels(self) -> int:
        return self.latent_channels * (2 if self.duplicate_channels else 1)


@dataclass(eq=False)
class MagiConditioning(Conditioning):
    """What one call reads besides the latents: a text for each (sample, block), samples outermost."""

    prompts: tuple[Prompt, ...] = ()
    dropped: tuple[bool, ...] = (False,)  # per sample, or one for all: which null row conditions the time
    distil: float | None = None  # second scalar of the distilled models' time embedding


class LayerNorm1p(nn.Module):
    """LayerNorm whose multiplier is `weight + 1`, computed in the precision its weights are held in."""

    def __init__(self, width: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(width, dtype=dtype))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.to(self.weight.dtype), self.weight.shape, self.weight + 1, self.bias, self.eps)


def frequencies(device: torch.device) -> Tensor:
    """exp(-ln(10000) i / 128) for i < 128, in float32: the exponent first, then its exponential.

    Angles reach 8000 radians, where a frequency's last bit is worth more than all the rest of the network's rounding,
    and libraries disagree on that bit where the exponential lies nearly half way between two floats. The bits are
    therefore fixed here: the nearest float, but the upper one of the two for the exponentials in `ROUNDED_UP` (0.48 of
    the gap above the lower one), as in the numbers published with the tests' fixtures.
    """
    half = TIME_CHANNELS // 2
    exponents = -math.log(10000.0) * torch.arange(half, dtype=torch.float32) / half
    nearest = exponents.double().exp().float()
    for i in ROUNDED_UP:
        nearest[i] = torch.nextafter(nearest[i], nearest.new_tensor(1.0))
    return nearest.to(device)


class TimeEmbedder(nn.Module):
    """Sinusoid of 1000 t (the factor comes last), then a two-layer MLP.

    The sinusoid is rounded to the precision the model runs in.
    """

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(TIME_CHANNELS, width), nn.SiLU(), nn.Linear(width, width))
        self.dtype = dtype
        self._frequencies: Tensor | None = None

    def forward(self, t: Tensor) -> Tensor:
        if self._frequencies is None or self._frequencies.device != t.device:
            self._frequencies = frequencies(t.device)
        angles = t.float()[..., None] * self._frequencies * TIME_SCALE
        out: Tensor = self.mlp(torch.cat([angles.cos(), angles.sin()], -1).to(self.dtype).float())
        return out


class CaptionEmbedder(nn.Module):
    """Text for cross attention, and the null caption with its two conditioning rows."""

    def __init__(self, config: MagiConfig) -> None:
        super().__init__()
        self.null_caption_embedding = nn.Parameter(torch.empty(config.caption_tokens, config.caption_channels))
        self.y_proj_xattn = nn.Sequential(nn.Linear(config.caption_channels, config.hidden), nn.SiLU())
        self.y_proj_adaln = nn.Sequential(nn.Linear(config.caption_channels, config.condition))

    def adaln(self, dropped: tuple[bool, ...]) -> Tensor:
        """(len(dropped), condition)"""
        rows = [NULL_ROW_DROPPED if d else NULL_ROW_KEPT for d in dropped]
        out: Tensor = self.y_proj_adaln(self.null_caption_embedding[rows])
        return out


class Rotary(nn.Module):
    """Learnable bands over frame, row and column: the first three quarters of a head, halves paired."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.bands = nn.Parameter(torch.empty(head_dim // 8))

    def make(self, rows: int, columns: int, dtype: torch.dtype, share: Tensor | None = None) -> Rotate:
        """The rotation for a grid of patches, or for a rank's share of it, in the precision attention runs in.

        Time positions come in at each call: absolute latent frame numbers.
        """
        bands = self.bands.float()
        scale = math.sqrt(rows * columns / 256)
        row, column = (_centred(n, scale, bands.device)[:, None] * bands for n in (rows, columns))
        grid = torch.cat([row[:, None].expand(-1, columns, -1), column[None].expand(rows, -1, -1)], -1).flatten(
            0, 1
        )  # (S, 2 bands)

        tables: list[tuple[Tensor, Tensor, Tensor]] = []  # frames, cos, sin: one set of positions serves every layer

        def rotate(x: Tensor, frames: Tensor) -> Tensor:
            if not tables or tables[0][0] is not frames or tables[0][1].shape[1] != x.shape[2]:
                here = grid if share is None or x.shape[2] == len(grid) else grid[share]
                time = frames.to(bands.device, torch.float32)[:, None] * bands
                angles = torch.cat([time[:, None].expand(-1, len(here), -1), here.expand(len(time), -1, -1)], -1)
                tables[:] = [(frames, angles.cos()[:, :, None], angles.sin()[:, :, None])]
            _, cos, sin = tables[0]
            return _half_split(x.float(), cos, sin).to(dtype)

        return rotate


def _centred(count: int, scale: float, device: torch.device) -> Tensor:
    if count < 2:
        raise ValueError(f"MAGI-1 pictures: expected at least 2 patches (32 pixels) a side, got {count}")
    index = torch.arange(count, dtype=torch.float32, device=device)
    return (index - (count - 1) / 2) / (count - 1) * (count / scale - 1)


def _half_split(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    m = cos.shape[-1]
    a, b, rest = x[..., :m], x[..., m : 2 * m], x[..., 2 * m :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


class QKVProjection(nn.Module):
    """Norm, then queries for self and cross attention, keys and values; no biases."""

    def __init__(self, config: MagiConfig, dtype: torch.dtype, fp8: bool) -> None:
        super().__init__()
        self.layer_norm = nn.LayerNorm(config.hidden, config.eps, dtype=dtype)
        linear = Fp8Linear if fp8 else _plain(dtype)
        width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q, self.qx = linear(config.hidden, width), linear(config.hidden, width)
        self.k, self.v = linear(config.hidden, kv_width), linear(config.hidden, kv_width)


def _plain(dtype: torch.dtype) -> Callable[[int, int], nn.Module]:
    return lambda inputs, outputs: nn.Linear(inputs, outputs, bias=False, dtype=dtype)


class ParallelAttention(nn.Module):
    """Self attention through the context and cross attention to each block's text, from the same normed input."""

    def __init__(self, config: MagiConfig, dtype: torch.dtype, fp8: bool, attention: Attention) -> None:
        super().__init__()
        self.config, self.attention = config, attention
        self.linear_qkv = QKVProjection(config, dtype, fp8)
        self.linear_kv_xattn = nn.Linear(config.hidden, 2 * config.kv_heads * config.head_dim, bias=False, dtype=dtype)
        self.linear_proj = (SmoothFp8Linear if fp8 else _plain(dtype))(2 * config.hidden, config.hidden)
        self.q_layernorm, self.k_layernorm = (LayerNorm1p(config.head_dim, config.eps, torch.float32) for _ in "qk")
        self.q_layernorm_xattn, self.k_layernorm_xattn = (LayerNorm1p(config.head_dim, config.eps, dtype) for _ in "qk")

    def forward(self, h: Tensor, prompts: tuple[Prompt, ...], context: Context, layer: int, rotate: Rotate) -> Tensor:
        """(B, F, S, D) -> (B, F, S, D); prompts: B x blocks."""
        qkv, heads = self.linear_qkv, (-1, self.config.head_dim)
        z = qkv.layer_norm(h)
        q, k = (
            self.q_layernorm(torch.unflatten(qkv.q(z), -1, heads)),
            self.k_layernorm(torch.unflatten(qkv.k(z), -1, heads)),
        )
        attended = context.attend(layer, q, k, torch.unflatten(qkv.v(z), -1, heads), rotate).flatten(-2)
        qx = self.q_layernorm_xattn(torch.unflatten(qkv.qx(z), -1, heads))
        crossed = self._cross(qx, prompts, layer).flatten(-2)
        both = [torch.unflatten(x, -1, (PROJECTION_GROUPS, -1)) for x in (attended, crossed)]
        return self._project(torch.cat(both, -1).flatten(-2))

    def text_kv(self, text: Tensor) -> tuple[Tensor, Tensor]:
        """(1, L, D) -> keys and values (1, L, kv_heads, head_dim); each head's keys lie before its values."""
        k, v = torch.unflatten(self.linear_kv_xattn(text), -1, (self.config.kv_heads, -1)).chunk(2, -1)
        return self.k_layernorm_xattn(k), v

    def _cross(self, q: Tensor, prompts: tuple[Prompt, ...], layer: int) -> Tensor:
        """Queries (B, F, S, heads, head_dim), one product a block: what it gets depends on its own text alone."""
        out = []
        for part, prompt in zip(q.reshape(len(prompts), 1, -1, *q.shape[-2:]), prompts, strict=True):
            k, v = prompt.cross[layer]
            out.append(self.attention(part, k, v) if k.shape[1] else torch.zeros_like(part))
        return torch.cat(out).view(q.shape)

    def _project(self, x: Tensor) -> Tensor:
        """The unquantised projection is accumulated and kept in float32, the quantised one has its own precision."""
        if isinstance(self.linear_proj, SmoothFp8Linear):
            quantised: Tensor = self.linear_proj(x)
            return quantised.float()
        if x.dtype == torch.float32:
            full: Tensor = self.linear_proj(x)
            return full
        weight = self.linear_proj.get_parameter("weight")
        if x.is_cuda:
            return torch.mm(x.flatten(0, -2), weight.t(), out_dtype=torch.float32).view(*x.shape[:-1], -1)
        return F.linear(x.float(), weight.float())


class MLP(nn.Module):
    """Norm, widen, GELU or SiLU gate, narrow; no biases."""

    def __init__(self, config: MagiConfig, dtype: torch.dtype, fp8: bool) -> None:
        super().__init__()
        self.gated = config.gated
        self.layer_norm = nn.LayerNorm(config.hidden, config.eps, dtype=dtype)
        widen, narrow = (Fp8Linear, SmoothFp8Linear) if fp8 else (_plain(dtype), _plain(dtype))
        self.linear_fc1 = widen(config.hidden, config.ffn * (2 if config.gated else 1))
        self.linear_fc2 = narrow(config.ffn, config.hidden)

    def forward(self, h: Tensor) -> Tensor:
        u = self.linear_fc1(self.layer_norm(h))
        if self.gated:
            gate, value = u.chunk(2, -1)
            u = F.silu(gate) * value
        else:
            u = F.gelu(u)
        out: Tensor = self.linear_fc2(u)
        return out


class Gates(nn.Module):
    """One pair of multiplicative gates per block, before the tanh that bounds them."""

    def __init__(self, config: MagiConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.proj = nn.Sequential(nn.Linear(config.condition, 2 * config.hidden, dtype=dtype))

    def forward(self, condition: Tensor) -> Tensor:
        out: Tensor = self.proj(F.silu(condition).to(self.dtype))
        return out


class Layer(nn.Module):
    """Attention and MLP, each gated by its block's condition, then normed, then added in float32."""

    def __init__(self, config: MagiConfig, dtype: torch.dtype, fp8: bool, attention: Attention) -> None:
        super().__init__()
        self.ada_modulate_layer = Gates(config, dtype)
        self.self_attention = ParallelAttention(config, dtype, fp8, attention)
        self.self_attn_post_norm = LayerNorm1p(config.hidden, config.eps, torch.float32)
        self.mlp = MLP(config, dtype, fp8)
        self.mlp_post_norm = LayerNorm1p(config.hidden, config.eps, torch.float32)

    def forward(
        self, h: Tensor, condition: Tensor, prompts: tuple[Prompt, ...], context: Context, layer: int, rotate: Rotate
    ) -> Tensor:
        """h: (B, F, S, D), condition: (B, blocks, width) -> (B, F, S, D)"""
        gates = torch.tanh(self.ada_modulate_layer(condition).float())
        attention_gate, mlp_gate = gates.chunk(2, -1)  # (B, blocks, D) each
        attended = self.self_attention(h, prompts, context, layer, rotate)
        h = (h.float() + self.self_attn_post_norm(_gate(attended, attention_gate))).to(h.dtype)
        out: Tensor = (h.float() + self.mlp_post_norm(_gate(self.mlp(h), mlp_gate))).to(h.dtype)
        return out


def _gate(x: Tensor, gate: Tensor) -> Tensor:
    """(B, F, S, D) times (B, blocks, D), every frame of a block by its block's gate."""
    blocks = torch.unflatten(x.float(), 1, (gate.shape[1], -1))
    out: Tensor = (blocks * gate[:, :, None, None]).flatten(1, 2)
    return out


class Layers(nn.Module):
    """The stack and its final norm; with fp8 the first and the last layer stay as they are."""

    def __init__(self, config: MagiConfig, dtype: torch.dtype, attention: Attention) -> None:
        super().__init__()
        last = config.layers - 1
        self.layers = nn.ModuleList(
            Layer(config, dtype, config.fp8 and 0 < i < last, attention) for i in range(config.layers)
        )
        self.final_layernorm = LayerNorm1p(config.hidden, config.eps, torch.float32)


class FinalLinear(nn.Module):
    def __init__(self, config: MagiConfig) -> None:
        super().__init__()
        self.linear = nn.Linear(config.hidden, PATCH * PATCH * config.input_channels, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x.float())
        return out


class MagiTransformer(nn.Module):
    """Velocity of noisy latents: dx/dt with t = 0 noise and t = 1 clean.

    `dtype` is what the bulk of the weights and the residual stream are held in; embedders, rotary bands, the norms of
    q and k, the post norms and the head are float32 always.
    """

    def __init__(self, config: MagiConfig, dtype: torch.dtype = torch.float32, attention: Attention = sdpa) -> None:
        super().__init__()
        self.config, self.dtype = config, dtype
        patch = (1, PATCH, PATCH)
        self.x_embedder = nn.Conv3d(config.input_channels, config.hidden, patch, patch, bias=False)
        self.t_embedder = TimeEmbedder(config.condition, dtype)
        self.y_embedder = CaptionEmbedder(config)
        self.rope = Rotary(config.head_dim)
        self.videodit_blocks = Layers(config, dtype, attention)
        self.final_linear = FinalLinear(config)

    def forward(self, x: Tensor, t: Tensor, conditioning: MagiConditioning, context: Context) -> Tensor:
        """x: (B, F, C, H, W), t: (B, blocks) -> velocity (B, F, C, H, W)"""
        for prompt in conditioning.prompts:
            self._project_text(prompt)
        h, (rows, columns) = self._patchify(x)
        condition = self.condition(t, conditioning)
        share = context.shard(torch.arange(rows * columns, device=h.device).view(1, 1, -1, 1)).flatten()
        rotate = self.rope.make(rows, columns, self.dtype, share)
        h = context.shard(h)
        for i, layer in enumerate(self.videodit_blocks.layers):
            h = layer(h, condition, conditioning.prompts, context, i, rotate)
        h = context.unshard(h)
        return self._unpatchify(self.final_linear(self.videodit_blocks.final_layernorm(h)), rows, columns)

    def condition(self, t: Tensor, conditioning: MagiConditioning) -> Tensor:
        """(B, blocks) -> (B, blocks, width): time, the distilled models' second scalar, and a null caption row."""
        out: Tensor = self.t_embedder(t)
        if conditioning.distil is not None:
            out = out + self.t_embedder(t.new_full((1, 1), conditioning.distil))
        return out + self.y_embedder.adaln(conditioning.dropped)[:, None]

    def _project_text(self, prompt: Prompt) -> None:
        layers = cast("list[Layer]", self.videodit_blocks.layers)
        if len(prompt.cross) == len(layers):
            return
        text = self.y_embedder.y_proj_xattn(prompt.embedding.float()).to(self.dtype)
        for i, layer in enumerate(layers):
            prompt.cross[i] = layer.self_attention.text_kv(text)

    def _patchify(self, x: Tensor) -> tuple[Tensor, tuple[int, int]]:
        x = x.float().transpose(1, 2) * self.config.rescale  # (B, C, F, H, W)
        if self.config.duplicate_channels:
            x = torch.cat([x, x], 1)
        h = self.x_embedder(x).to(self.dtype)  # (B, D, F, rows, columns)
        return h.flatten(3).permute(0, 2, 3, 1).contiguous(), (h.shape[3], h.shape[4])

    def _unpatchify(self, x: Tensor, rows: int, columns: int) -> Tensor:
        """(B, F, S, 4 C) with channels ordered (patch row, patch column, C) -> (B, F, C, H, W)"""
        x = x.view(*x.shape[:2], rows, columns, PATCH, PATCH, -1).permute(0, 1, 6, 2, 4, 3, 5)
        x = x.reshape(*x.shape[:3], rows * PATCH, columns * PATCH)
        return x[:, :, : self.config.latent_channels] / self.config.rescale
