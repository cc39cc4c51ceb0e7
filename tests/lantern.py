"""A whole model in one file, as docs/adding-a-model.md builds it: a lantern whose light the prompt colours.

One layer of attention with random weights: it means nothing, and every part of the contract is there.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.layers.rope import Rope3D
from engine.models import (
    BlockSignals,
    Conditioning,
    Context,
    Geometry,
    KVGeometry,
    LatentShape,
    Prompt,
    State,
)
from engine.models.presets import FewStep, LoadOptions, Preset, Sizes
from engine.protocol import PromptMode, Signal
from engine.weights import digest

ROWS, COLUMNS, CHANNELS, HEADS, HEAD_DIM = 8, 12, 4, 2, 16
WIDTH = HEADS * HEAD_DIM


class Lantern(nn.Module):
    name = "lantern"
    geometry = Geometry(
        latent=LatentShape(CHANNELS, ROWS, COLUMNS),
        kv=KVGeometry(layers=1, heads=HEADS, head_dim=HEAD_DIM, tokens=ROWS * COLUMNS),
        frames_per_block=2,
        pictures_per_frame=4,
        width=COLUMNS * 8,
        height=ROWS * 8,
        fps=16.0,
    )
    signals: tuple[Signal, ...] = ("prompt",)
    action_keys: tuple[str, ...] = ()
    action_values: tuple[str, ...] = ()
    suggestions = ("a red lantern", "a blue lantern")
    encoder = None
    uses_previous = False
    switch: tuple[PromptMode, int] = ("blend", 2)
    device = torch.device("cpu")
    dtype = torch.float32

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(CHANNELS, WIDTH), nn.Linear(WIDTH, CHANNELS)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.rotate = Rope3D(HEAD_DIM, ROWS, COLUMNS)
        self.decoder = LanternDecoder()

    def forward(self, x: Tensor, t: Tensor, conditioning: Conditioning, context: Context) -> Tensor:
        colour = conditioning.prompt.embedding.mean(1)[:, None, None]  # (B, 1, 1, D)
        h = self.embed(x.flatten(3).transpose(2, 3)) + colour + t[..., None, None] / 1000  # (B, F, S, D)
        h = context.shard(h)
        q, k, v = (part.unflatten(-1, (HEADS, HEAD_DIM)) for part in self.qkv(h).chunk(3, dim=-1))
        h = h + self.out(context.attend(0, q, k, v, self.rotate).flatten(-2))
        flow: Tensor = self.head(F.silu(context.unshard(h)))
        return flow.transpose(2, 3).reshape(x.shape)

    def encode(self, text: str, previous: Prompt | None) -> Prompt:
        seed = hashlib.sha256(text.encode()).digest()[:4]
        generator = torch.Generator().manual_seed(int.from_bytes(seed))
        return Prompt(text, torch.randn(1, 1, WIDTH, generator=generator))

    def condition(self, signals: BlockSignals) -> Conditioning:
        prompt = signals.prompt
        if signals.before is not None:
            prompt = replace(
                prompt, embedding=torch.lerp(signals.before.embedding, prompt.embedding, signals.weight), cross={}
            )
        return Conditioning(prompt)

    def negative(self, conditioning: Conditioning) -> Conditioning:
        return replace(conditioning, prompt=Prompt("", torch.zeros(1, 1, WIDTH)))

    def digest(self) -> str:
        return digest(self)


class LanternDecoder:
    def decode(self, latents: Tensor, conditioning: Conditioning, state: State) -> tuple[Tensor, State]:
        before = latents[:1] if state is None else state
        ends = torch.cat((before, latents))  # (F + 1, C, H, W)
        pictures = [torch.lerp(a, b, i / 4)[:3] for a, b in zip(ends, ends[1:], strict=False) for i in range(1, 5)]
        wide = F.interpolate(torch.stack(pictures), scale_factor=8.0).sigmoid()
        return (wide * 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous(), latents[-1:].clone()


PRESET = Preset(
    name="lantern",
    family="lantern",
    about="a lantern whose light the prompt colours",
    loader="tests.lantern:load",
    architecture="lantern",
    sampler=FewStep((1000, 500), shift=1.0),
    kv="window=8 sink=2",
    width=96,
    height=64,
    fps=16.0,
    frames_per_block=2,
    sizes=Sizes(4_500, 1, HEADS, HEAD_DIM, ROWS * COLUMNS, WIDTH, WIDTH),
    switch=("blend", 2),
)


def load(preset: Preset, options: LoadOptions) -> Lantern:
    torch.manual_seed(0)
    return Lantern().eval().requires_grad_(False)
