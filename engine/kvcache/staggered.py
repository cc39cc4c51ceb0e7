"""What several blocks in flight see during one call: each its own range of frames, of the past and of the call itself.

Blocks are consecutive and ranges contiguous, so past and present are laid side by side once per layer and each block
reads a slice. Knows no schedule and no guidance; it learns the ranges from whoever makes the call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.layers.attention import Attention
from engine.models import Expand, Rotate

Read = Callable[[int, int, int], tuple[Tensor, Tensor]]
"""(layer, first frame, end frame) -> rotated keys and values (1, tokens, kv_heads, head_dim) of past frames."""

Keep = Callable[[int, Tensor, Tensor], None]
"""(layer, rotated keys, values), each (frames, S, kv_heads, head_dim): what a call leaves of its first block."""


class PastUnreadable(RuntimeError):
    """A block's range reaches into frames that this context was given no way to read."""


@dataclass(frozen=True)
class Span:
    """Frames [first, end) that one block attends to, absolute in the world."""

    first: int
    end: int


@dataclass
class StaggeredContext:
    """The context of one call that carries `len(spans)` blocks of `width` frames from absolute frame `start` on."""

    start: int
    width: int
    spans: Sequence[Span]
    attention: Attention
    read: Read | None = None
    keep: Keep | None = None
    _positions: Tensor | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        end = self.start + self.width * len(self.spans)
        for span in self.spans:
            if not 0 <= span.first < span.end <= end:
                raise ValueError(
                    f"staggered context: expected a range inside [0, {end}), got [{span.first}, {span.end})"
                )
        if self._oldest < self.start and self.read is None:
            raise PastUnreadable(f"frames from {self._oldest} on are wanted, the call starts at {self.start}")

    @property
    def _oldest(self) -> int:
        return min(self.start, *(span.first for span in self.spans))

    def shard(self, tokens: Tensor) -> Tensor:
        return tokens

    def unshard(self, tokens: Tensor) -> Tensor:
        return tokens

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rotate: Rotate | None) -> Tensor:
        """q: (1, F, S, heads, head_dim) -> the same shape"""
        assert rotate is not None, "staggered blocks are told apart by position"
        frames = self._frames(q)
        q, k = rotate(q, frames), rotate(k, frames)
        if self.keep is not None:
            self.keep(layer, k[0, : self.width], v[0, : self.width])
        oldest, per_frame = self._oldest, q.shape[2]
        k, v = k.flatten(1, 2), v.flatten(1, 2)
        if self.read is not None and oldest < self.start:
            past_k, past_v = self.read(layer, oldest, self.start)
            k, v = torch.cat([past_k, k], 1), torch.cat([past_v, v], 1)
        out = []
        for block, span in zip(torch.split(q, self.width, 1), self.spans, strict=True):
            seen = slice((span.first - oldest) * per_frame, (span.end - oldest) * per_frame)
            out.append(self.attention(block.flatten(1, 2), k[:, seen], v[:, seen]).view(block.shape))
        return torch.cat(out, 1)

    def attend_latent(self, layer: int, q: Tensor, latent: Tensor, expand: Expand, rotate: Rotate | None) -> Tensor:
        k, v = expand(latent)
        return self.attend(layer, q, k, v, rotate)

    def _frames(self, q: Tensor) -> Tensor:
        if self._positions is None:
            self._positions = torch.arange(self.start, self.start + q.shape[1], device=q.device)
        return self._positions


@dataclass(frozen=True)
class IsolatedContext:
    """Blocks as a batch, each seeing only itself, at the positions of a world's first block."""

    attention: Attention

    def shard(self, tokens: Tensor) -> Tensor:
        return tokens

    def unshard(self, tokens: Tensor) -> Tensor:
        return tokens

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rotate: Rotate | None) -> Tensor:
        """q: (blocks, F, S, heads, head_dim) -> the same shape"""
        assert rotate is not None
        frames = torch.arange(q.shape[1], device=q.device)
        flat = (x.flatten(1, 2) for x in (rotate(q, frames), rotate(k, frames), v))
        return self.attention(*flat).view(q.shape)

    def attend_latent(self, layer: int, q: Tensor, latent: Tensor, expand: Expand, rotate: Rotate | None) -> Tensor:
        k, v = expand(latent)
        return self.attend(layer, q, k, v, rotate)
