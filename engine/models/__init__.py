"""The contract between the engine and its models, and the table of presets.

A model is weights and arithmetic. It knows no world, no cache policy, no rank: what it may see of the past it reads
through the `Context` it is handed, what steers it comes in as `Conditioning`, and its decoder's memory goes in and out
by value.

To add a model write one file with a `load(preset, options)` that returns a `BlockModel`, and a row for `PRESETS` (or an
entry point in the group `inferix.models`); docs/adding-a-model.md walks through it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Protocol, Self, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from engine.protocol import ActionState, PromptMode, Signal

Rotate: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Apply a model's rotary embedding: (B, F, S, heads, head_dim) at latent-frame positions (F,) -> the same shape."""

Expand: TypeAlias = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Latents (B, F, S, R) -> keys and values (B, F, S, heads, head_dim), the up-projection of latent attention."""

State: TypeAlias = Any
"""A tree of tensors (dicts, lists, tuples, None) that a snapshot can hold."""


@dataclass(frozen=True)
class LatentShape:
    """One latent frame."""

    channels: int
    height: int
    width: int


@dataclass(frozen=True)
class KVGeometry:
    """What one latent frame puts into the cache: in each layer `tokens` keys and values of `heads` x `head_dim`.

    With `latent_dim` set the layer stores one vector of that size per token instead (multi-head latent attention), and
    the model's up-projection makes keys and values of it on read.
    """

    layers: int
    heads: int
    head_dim: int
    tokens: int
    latent_dim: int | None = None


@dataclass(frozen=True)
class Geometry:
    """The sizes of a model at one picture size."""

    latent: LatentShape
    kv: KVGeometry
    frames_per_block: int  # latent frames denoised together
    pictures_per_frame: int  # pictures of video one latent frame decodes to, after the first
    width: int  # of a picture
    height: int
    fps: float  # of the video
    first_pictures: int | None = None  # pictures the very first latent frame decodes to; None: as all others
    first_block_frames: int | None = None  # latent frames of the first block; None: as all others

    def block_frames(self, block: int) -> int:
        """Latent frames of block number `block`."""
        first = self.first_block_frames
        return self.frames_per_block if block or first is None else first

    def block_start(self, block: int) -> int:
        """Index of the first latent frame of block number `block`."""
        return 0 if block == 0 else self.block_frames(0) + (block - 1) * self.frames_per_block

    def pictures_before(self, frame: int) -> int:
        """Pictures of video that the latent frames before `frame` decode to."""
        first = self.pictures_per_frame if self.first_pictures is None else self.first_pictures
        return 0 if frame == 0 else first + (frame - 1) * self.pictures_per_frame

    @property
    def block_s(self) -> float:
        """Seconds of video in a block, in steady state."""
        return self.frames_per_block * self.pictures_per_frame / self.fps


@dataclass(eq=False)
class Prompt:
    """An encoded prompt, and the cross-attention keys and values computed of it: its whole cached conditioning.

    Dropping the object is clearing the cross-attention cache; the self-attention cache is not involved.
    """

    parts: ClassVar[tuple[type, ...]] = ()  # what a subclass holds beside tensors and plain values, for snapshots
    text: str  # what is in force now (a model with cumulative prompts answers with the merged caption)
    embedding: Tensor  # (1, L, D)
    mask: Tensor | None = None  # (1, L) bool, True where a token counts
    understood: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    cross: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)

    def cross_kv(self, layer: int, project: Callable[[Tensor], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Keys and values of `layer` for cross attention, projected from the embedding at the first call only."""
        if layer not in self.cross:
            self.cross[layer] = project(self.embedding)
        return self.cross[layer]


@dataclass(frozen=True)
class BlockSignals:
    """The value of every signal at one block."""

    block: int
    start: int  # index of the block's first latent frame
    frames: int  # latent frames in the block
    prompt: Prompt
    before: Prompt | None = None  # the prompt that `prompt` is replacing, while a blend lasts
    weight: float = 1.0  # of `prompt` against `before` at the end of this block, in (0, 1]
    weight_start: float = 1.0  # at its beginning
    action: ActionState = ActionState()
    motion: tuple[float, ...] = ()  # what the model made of the actions of the blocks before; () at the start
    extra: Mapping[str, Tensor] = field(
        default_factory=dict
    )  # other conditions a world was opened with (CLIP tokens …)


@dataclass(eq=False)
class Conditioning:
    """What `forward` reads besides the noisy latents; a model may subclass it.

    Tensors and prompts are stacked when worlds share a batch; anything else is taken from the first world of it, so
    `forward` must not read it.
    """

    prompt: Prompt
    motion: tuple[float, ...] = ()  # after this block
    previous: Tensor | None = (
        None  # (B, F, C, H, W): for each latent frame the context frame before it, zeros at the start
    )

    def with_previous(self, previous: Tensor | None) -> Self:
        return replace(self, previous=previous)

    @classmethod
    def stack(cls, parts: Sequence[Self]) -> Self:
        """Join the conditioning of several worlds along the batch axis."""
        joined: dict[str, Any] = {f.name: _join(parts, f.name) for f in fields(cls)}
        return parts[0] if len(parts) == 1 else replace(parts[0], **joined)


def _join(parts: Sequence[Conditioning], name: str) -> object:
    values = [getattr(part, name) for part in parts]
    if isinstance(values[0], Tensor):
        return torch.cat(values)
    return _join_prompts(values) if isinstance(values[0], Prompt) else values[0]


def _join_prompts(prompts: Sequence[Prompt]) -> Prompt:
    masks = [p.mask for p in prompts if p.mask is not None]
    layers = set.intersection(*(set(p.cross) for p in prompts))
    cross = {
        i: (torch.cat([p.cross[i][0] for p in prompts]), torch.cat([p.cross[i][1] for p in prompts])) for i in layers
    }
    embedding = torch.cat([p.embedding for p in prompts])
    return Prompt(prompts[0].text, embedding, torch.cat(masks) if masks else None, cross=cross)


class Context(Protocol):
    """What a model sees of the past (and of its own block) during one forward pass."""

    def shard(self, tokens: Tensor) -> Tensor:
        """(B, F, S, D) -> this rank's share of S. Called once, after the patch embedding."""
        ...

    def unshard(self, tokens: Tensor) -> Tensor:
        """The inverse of `shard`. Called once, before the head."""
        ...

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rotate: Rotate | None) -> Tensor:
        """Self attention of the block over itself and what its world's policy shows of the past.

        q: (B, F, S, heads, head_dim), k and v: (B, F, S, kv_heads, head_dim), none of them rotated yet. The result has
        the shape of q. The context knows the positions; it calls `rotate` on whatever needs it.
        """
        ...

    def attend_latent(self, layer: int, q: Tensor, latent: Tensor, expand: Expand, rotate: Rotate | None) -> Tensor:
        """The same with one latent (B, F, S, R) per token in the cache, of which `expand` makes keys and values."""
        ...


class Decoder(Protocol):
    """Latents to pictures, one block at a time, with the memory that keeps blocks seamless passed by value."""

    def decode(self, latents: Tensor, conditioning: Conditioning, state: State) -> tuple[Tensor, State]:
        """(F, C, H, W) and the state after the block before (None at first) -> (N, H, W, 3) uint8 and the new state.

        The state given is not changed, so a block can be decoded again.
        """
        ...


class Band(Protocol):
    """Some rows of a decoder's pictures, made without the others: with a memory of its own, from latents alone."""

    @property
    def rows(self) -> range:
        """Of the pictures."""
        ...

    def decode(self, latents: Tensor, state: State) -> tuple[Tensor, State]:
        """As `Decoder.decode`: whole latent frames (F, C, H, W) -> (N, len(rows), W, 3) uint8 and the new state."""
        ...


@runtime_checkable
class BandedDecoder(Decoder, Protocol):
    """A decoder that several ranks can share. The bands of a picture, one below the other, are the picture."""

    def bands(self, latent: LatentShape, parts: int) -> Sequence[Band]:
        """`parts` bands of about the same height, or fewer where it cannot be cut into so many."""
        ...


class Encoder(Protocol):
    """Pictures to latents: how a world starts from a picture or a clip."""

    def encode(self, pictures: Tensor) -> Tensor:
        """(N, H, W, 3) uint8 at the model's size -> (F, C, H, W)."""
        ...


class BlockModel(Protocol):
    """A block-diffusion world model."""

    @property
    def name(self) -> str: ...
    @property
    def geometry(self) -> Geometry: ...
    @property
    def signals(self) -> tuple[Signal, ...]: ...
    @property
    def action_keys(self) -> tuple[str, ...]: ...
    @property
    def action_values(self) -> tuple[str, ...]: ...
    @property
    def suggestions(self) -> tuple[str, ...]:
        """Prompts worth trying."""
        ...

    @property
    def decoder(self) -> Decoder: ...
    @property
    def encoder(self) -> Encoder | None: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype:
        """Of latents and cache pages."""
        ...

    @property
    def uses_previous(self) -> bool:
        """Whether forward reads conditioning.previous."""
        ...

    @property
    def switch(self) -> tuple[PromptMode, int]:
        """How a prompt replaces another when nothing is said, and over how many blocks."""
        ...

    def encode(self, text: str, previous: Prompt | None) -> Prompt:
        """Encode a prompt. A model with cumulative prompts merges `text` into `previous`; the others ignore it."""
        ...

    def condition(self, signals: BlockSignals) -> Conditioning:
        """The conditioning of one block; deterministic, cheap, and free of side effects."""
        ...

    def negative(self, conditioning: Conditioning) -> Conditioning:
        """The unconditional branch of `conditioning`, for classifier-free guidance."""
        ...

    def forward(self, x: Tensor, t: Tensor, conditioning: Conditioning, context: Context) -> Tensor:
        """Predict the flow (noise - clean) of noisy latents.

        x: (B, F, C, H, W); t: (B, F), the time of each latent frame on the model's own scale; returns (B, F, C, H, W).
        """
        ...

    def digest(self) -> str:
        """Hash of the weights: with the seed and the journal it decides what a world looks like."""
        ...
