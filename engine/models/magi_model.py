"""A MAGI-1 model as the engine sees it: transformer, text and autoencoder behind the `BlockModel` contract.

Beyond the contract it gives what staggered blocks need: the null text, the text of a block, and the conditioning of a
call that carries several. Knows no world, no cache and no timetable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from engine import weights
from engine.models import BlockSignals, Conditioning, Context, Geometry, KVGeometry, LatentShape, Prompt
from engine.models.magi import PATCH, MagiConditioning, MagiConfig, MagiTransformer
from engine.models.magi_text import (
    LONGEST_DURATION,
    Row,
    SpecialTokens,
    TextEncoder,
    TokenFlags,
    caption_row,
    null_row,
)
from engine.models.magi_vae import MagiVAE, MagiVAEConfig
from engine.models.presets import Preset
from engine.protocol import PromptMode, Signal

SUGGESTIONS = (
    "A paper boat drifts down a rain-filled gutter at dusk, the camera follows close to the water.",
    "An old lighthouse keeper climbs the spiral stairs with a lantern, warm light on stone walls.",
    "A hot-air balloon rises over terraced fields at sunrise, mist in the valleys.",
)


class SizeError(ValueError):
    """A picture size that the model's grid of tokens does not fit."""


@dataclass(eq=False)
class MagiPrompt(Prompt):
    """A caption, and what blocks read under it: the caption behind special tokens, by how many blocks are left."""

    texts: dict[int, Prompt] = field(default_factory=dict, repr=False)


@dataclass(eq=False)
class MagiModel:
    """See `BlockModel` and `StaggeredModel`. `tokens` None: captions stand alone."""

    name: str
    geometry: Geometry
    network: MagiTransformer
    captions: TextEncoder
    autoencoder: MagiVAE
    tokens: SpecialTokens | None
    flags: TokenFlags = TokenFlags()
    signals: tuple[Signal, ...] = ("prompt",)
    action_keys: tuple[str, ...] = ()
    action_values: tuple[str, ...] = ()
    suggestions: tuple[str, ...] = SUGGESTIONS
    uses_previous: bool = False
    switch: tuple[PromptMode, int] = ("cut", 1)
    _null: Prompt | None = field(default=None, init=False, repr=False)
    _digest: str = field(default="", init=False, repr=False)

    @property
    def decoder(self) -> MagiVAE:
        return self.autoencoder

    @property
    def encoder(self) -> MagiVAE:
        return self.autoencoder

    @property
    def device(self) -> torch.device:
        return self.network.final_linear.linear.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.network.dtype

    # -------------------------------------------------------------------------------------------- signals

    def encode(self, text: str, previous: Prompt | None) -> MagiPrompt:
        row = self.captions(text)
        return MagiPrompt(text, row.embedding[None].to(self.device), row.mask[None].to(self.device))

    def condition(self, signals: BlockSignals) -> MagiConditioning:
        return MagiConditioning(signals.prompt, prompts=(self.text(signals.prompt, None),))

    def negative(self, conditioning: Conditioning) -> MagiConditioning:
        return self.gather([self.null], dropped=True, distil=None)

    @property
    def null(self) -> Prompt:
        if self._null is None:
            embedding = self.network.y_embedder.null_caption_embedding.float()
            self._null = Prompt("", null_row(embedding, self.flags, self.tokens).kept)
        return self._null

    def text(self, prompt: Prompt, blocks_left: int | None) -> Prompt:
        """Raises TypeError on a prompt of another model."""
        if not isinstance(prompt, MagiPrompt) or prompt.mask is None:
            raise TypeError(f"prompt: expected one that this model encoded, got {type(prompt).__name__}")
        left = LONGEST_DURATION if blocks_left is None else min(blocks_left, LONGEST_DURATION)
        if left not in prompt.texts:
            caption = Row(prompt.embedding[0], prompt.mask[0])
            empty = not bool(caption.mask.any())
            row = caption_row(caption, self.flags, self.tokens, left)
            prompt.texts[left] = self.null if empty else Prompt(prompt.text, row.kept)
        return prompt.texts[left]

    def gather(self, prompts: Sequence[Prompt], *, dropped: bool, distil: float | None) -> MagiConditioning:
        return MagiConditioning(prompts[0], prompts=tuple(prompts), dropped=(dropped,), distil=distil)

    # ------------------------------------------------------------------------------------------ the network

    def forward(self, x: Tensor, t: Tensor, conditioning: Conditioning, context: Context) -> Tensor:
        """Flow (noise - clean) of whole blocks; the network's velocity points the other way."""
        width = self.geometry.frames_per_block
        assert x.shape[1] % width == 0, f"whole blocks of {width} frames, got {x.shape[1]}"
        velocity: Tensor = self.network(x, t[:, ::width], cast(MagiConditioning, conditioning), context)
        return -velocity

    def digest(self) -> str:
        if not self._digest:
            self._digest = weights.digest(self.network)
        return self._digest


def geometry(config: MagiConfig, vae: MagiVAEConfig, preset: Preset, width: int, height: int) -> Geometry:
    """Raises SizeError unless width and height are whole numbers of tokens, at least two each way."""
    cell = vae.patch_size * PATCH
    if width % cell or height % cell or min(width, height) < 2 * cell:
        raise SizeError(f"picture size: expected multiples of {cell} from {2 * cell} on, got {width}x{height}")
    latent = LatentShape(config.latent_channels, height // vae.patch_size, width // vae.patch_size)
    tokens = (height // cell) * (width // cell)
    return Geometry(
        latent=latent,
        kv=KVGeometry(config.layers, config.kv_heads, config.head_dim, tokens),
        frames_per_block=preset.frames_per_block,
        pictures_per_frame=vae.patch_length,
        width=width,
        height=height,
        fps=preset.fps,
    )
