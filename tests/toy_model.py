"""A block model of random weights, a few hundred numbers wide: real attention through the cache, no meaning.

Tests of the engine build worlds of it in a line; tests of the models themselves use the models.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.kvcache.cache import KVCache
from engine.kvcache.policy import parse
from engine.kvcache.pool import PageFormat, PagePool
from engine.models import (
    BlockSignals,
    Conditioning,
    Context,
    Geometry,
    KVGeometry,
    LatentShape,
    Prompt,
    State,
    presets,
)
from engine.models.bands import even
from engine.models.presets import LoadOptions, Preset
from engine.protocol import ActionState, PromptChange, PromptMode, Signal, WorldSpec
from engine.samplers import FewStep, Linear, Sampler
from engine.world import World


class ToyDecoder:
    """Each picture is a latent's first three channels, mixed with the latent before: it has a memory."""

    def decode(self, latents: Tensor, conditioning: Conditioning, state: State) -> tuple[Tensor, State]:
        before = latents[:1] * 0 if state is None else state
        mixed = (torch.cat([before, latents[:-1]]) + latents) / 2
        pictures = (mixed[:, :3].sigmoid() * 255).to(torch.uint8).permute(0, 2, 3, 1)
        return pictures.repeat_interleave(2, 0), latents[-1:].clone()

    def bands(self, latent: LatentShape, parts: int) -> list[ToyBand]:
        return [ToyBand(rows) for rows in even(latent.height, parts)]


class ToyBand:
    """A picture's row depends on that row of the latents alone."""

    def __init__(self, rows: range) -> None:
        self.rows = rows

    def decode(self, latents: Tensor, state: State) -> tuple[Tensor, State]:
        nothing = Conditioning(Prompt("", latents.new_zeros(1, 0, 1)))
        return ToyDecoder().decode(latents[..., self.rows.start : self.rows.stop, :], nothing, state)


@dataclass(eq=False)
class ToyConditioning(Conditioning):
    pan: Tensor = field(default_factory=lambda: torch.zeros(1))  # (B,)


class ToyModel(nn.Module):
    """Two layers over S = height * width tokens; the prompt enters by cross attention and the action by a shift."""

    name = "toy"
    signals: tuple[Signal, ...] = ("prompt", "action")
    action_keys = ("left", "right")
    action_values = ("pan",)
    suggestions = ("a", "b")
    encoder = None
    device = torch.device("cpu")
    uses_previous = False
    switch: tuple[PromptMode, int] = ("cut", 1)

    def __init__(
        self,
        frames_per_block: int = 2,
        layers: int = 2,
        heads: int = 2,
        kv_heads: int = 2,
        size: tuple[int, int] = (2, 3),
        dtype: torch.dtype = torch.float32,
        first_block_frames: int | None = None,
    ) -> None:
        super().__init__()
        self.dtype = dtype
        self.decoder = ToyDecoder()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, 8
        height, width = size
        kv = KVGeometry(layers, kv_heads, self.head_dim, height * width)
        self.geometry = Geometry(
            LatentShape(4, height, width), kv, frames_per_block, 2, width, height, 8.0, None, first_block_frames
        )
        with torch.random.fork_rng():
            torch.manual_seed(0)
            width = heads * self.head_dim
            self.embed, self.head = nn.Linear(4, width), nn.Linear(width, 4)
            self.layers = nn.ModuleList(ToyLayer(width, kv_heads * self.head_dim) for _ in range(layers))
        self.to(dtype).requires_grad_(False)
        self.encodings = 0

    def encode(self, text: str, previous: Prompt | None) -> Prompt:
        self.encodings += 1
        codes = torch.tensor([math.sin(i + ord(c)) for i, c in enumerate(text[:16])], dtype=self.dtype)
        width = self.heads * self.head_dim
        return Prompt(text, codes[None, :, None] * torch.linspace(-1, 1, width, dtype=self.dtype), understood=(text,))

    def condition(self, signals: BlockSignals) -> Conditioning:
        pan = signals.action.values.get("pan", 0.0) + ("right" in signals.action.keys) - ("left" in signals.action.keys)
        at = (signals.motion[0] if signals.motion else 0.0) + pan
        return ToyConditioning(signals.prompt, (at,), pan=torch.tensor([at], dtype=self.dtype))

    def negative(self, conditioning: Conditioning) -> Conditioning:
        return replace(conditioning, prompt=Prompt("", conditioning.prompt.embedding * 0))

    def forward(self, x: Tensor, t: Tensor, conditioning: Conditioning, context: Context) -> Tensor:
        h = self.embed(x.flatten(3).transpose(2, 3)) + t[:, :, None, None].to(x.dtype) / 1000
        assert isinstance(conditioning, ToyConditioning)
        h = h + conditioning.pan[:, None, None, None]
        h = context.shard(h)
        for i, layer in enumerate(self.layers):
            h = layer(h, i, conditioning.prompt, context, self)
        h = context.unshard(h)
        out: Tensor = self.head(h)
        return out.transpose(2, 3).reshape(x.shape)

    def digest(self) -> str:
        return "toy"

    def rotate(self, x: Tensor, frames: Tensor) -> Tensor:
        angle = frames.to(torch.float64)[:, None] * 10 ** (-torch.arange(self.head_dim // 2) / 4)
        cos, sin = (f.to(x.dtype)[None, :, None, None] for f in (angle.cos(), angle.sin()))
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class ToyLayer(nn.Module):
    def __init__(self, width: int, kv_width: int) -> None:
        super().__init__()
        self.q, self.kv, self.o = nn.Linear(width, width), nn.Linear(width, 2 * kv_width), nn.Linear(width, width)
        self.cross_kv, self.mlp = nn.Linear(width, 2 * width), nn.Linear(width, width)

    def forward(self, h: Tensor, i: int, prompt: Prompt, context: Context, model: ToyModel) -> Tensor:
        def heads(x: Tensor, count: int) -> Tensor:
            return x.reshape(*x.shape[:-1], count, model.head_dim)

        n = F.layer_norm(h, h.shape[-1:])
        k, v = self.kv(n).chunk(2, -1)
        out = context.attend(
            i, heads(self.q(n), model.heads), heads(k, model.kv_heads), heads(v, model.kv_heads), model.rotate
        )
        h = h + self.o(out.flatten(-2))

        def project(embedding: Tensor) -> tuple[Tensor, Tensor]:
            k, v = self.cross_kv(embedding).chunk(2, -1)
            return k, v

        k, v = prompt.cross_kv(i, project)
        if k.shape[0] != h.shape[0]:
            k, v = k.expand(h.shape[0], -1, -1), v.expand(h.shape[0], -1, -1)
        h = h + F.scaled_dot_product_attention(h.flatten(1, 2), k, v).reshape(h.shape)
        return h + F.gelu(self.mlp(h))


def toy_world(
    model: ToyModel,
    kv: str = "full",
    *,
    seed: int = 0,
    prompts: tuple[PromptChange, ...] = (PromptChange(0.0, "a"),),
    sampler: Sampler | None = None,
    pages: int = 256,
    pool: PagePool | None = None,
) -> World:
    """A world of the toy model under a policy in its declarative form."""
    policy = parse(kv)
    pool = pool or PagePool(PageFormat(model.geometry.kv, model.dtype, policy.store), pages)
    sampler = sampler or FewStep(Linear(), (1.0, 0.5), context_time=0.0)
    caches = tuple(KVCache(pool, policy, model.geometry.frames_per_block) for _ in range(sampler.caches))
    return World(WorldSpec("toy", prompts, seed), model, sampler, caches)


TOY = Preset(
    name="toy",
    family="toy",
    about="random weights, for tests",
    loader="tests.toy_model:load",
    architecture="toy",
    sampler=presets.FewStep((1000, 500), shift=1.0),
    kv="window=6 sink=1",
    width=32,
    height=16,
    fps=8.0,
    frames_per_block=2,
    sizes=presets.Sizes(1000, 2, 2, 8, 512, 16, 16),
)


def load(preset: Preset, options: LoadOptions) -> ToyModel:
    return ToyModel(size=(16, 32))


HOLD_RIGHT = ActionState(keys=("right",))
