"""What several blocks in flight see during one call: each its own range of frames, of the past and of the call itself.

Blocks are consecutive and ranges contiguous, so past and present are laid side by side once per layer and each block
reads a slice. Knows no schedule and no guidance; it learns the ranges from whoever makes the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kvcache.cache import KVCache
from engine.kvcache.policy import Policy, PolicyError
from engine.kvcache.staged import StagedBlock
from engine.layers.attention import Attention
from engine.models import Expand, Rotate


@dataclass(frozen=True)
class Span:
    """Frames [first, end) that one block attends to, absolute in the world."""

    first: int
    end: int


class StaggeredContext:
    """The context of one call that carries `len(spans)` blocks of `width` frames from absolute frame `start` on.

    `keep` receives the keys and values of the call's first frames, as many as it has pages for.
    """

    def __init__(
        self,
        start: int,
        width: int,
        spans: Sequence[Span],
        attention: Attention,
        past: KVCache | None = None,
        keep: StagedBlock | None = None,
    ) -> None:
        end = start + width * len(spans)
        for span in spans:
            if not 0 <= span.first < span.end <= end:
                raise ValueError(f"range of a block: expected to lie in [0, {end}), got [{span.first}, {span.end})")
        self.start, self.width, self.spans, self.attention = start, width, spans, attention
        self.past, self.keep = past, keep
        self._frames: Tensor | None = None
        self._oldest = min(start, *(span.first for span in spans))
        if self._oldest < start and past is None:
            raise ValueError(f"frames from {self._oldest} on are wanted, the call starts at {start} and has no past")

    def shard(self, tokens: Tensor) -> Tensor:
        return tokens

    def unshard(self, tokens: Tensor) -> Tensor:
        return tokens

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rotate: Rotate | None) -> Tensor:
        """q: (1, F, S, heads, head_dim) -> the same shape"""
        assert rotate is not None, "staggered blocks are told apart by position"
        if self._frames is None:  # one tensor for all layers: rotations keep what they make of it
            self._frames = torch.arange(self.start, self.start + q.shape[1], device=q.device)
        q, k = rotate(q, self._frames), rotate(k, self._frames)
        if self.keep is not None:
            self.keep.store(layer, k[:, : self.keep.frames], v[:, : self.keep.frames])
        k, v = self._with_past(layer, k.flatten(1, 2), v.flatten(1, 2))
        per_frame, out = q.shape[2], []
        for block, span in zip(torch.split(q, self.width, 1), self.spans, strict=True):
            seen = slice((span.first - self._oldest) * per_frame, (span.end - self._oldest) * per_frame)
            out.append(self.attention(block.flatten(1, 2), k[:, seen], v[:, seen]).view(block.shape))
        return torch.cat(out, 1)

    def attend_latent(self, layer: int, q: Tensor, latent: Tensor, expand: Expand, rotate: Rotate | None) -> Tensor:
        k, v = expand(latent)
        return self.attend(layer, q, k, v, rotate)

    def _with_past(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if self.past is None or self._oldest == self.start:
            return k, v
        past_k, past_v = (x.flatten(0, 1)[None] for x in self.past.between(layer, self._oldest, self.start))
        return torch.cat([past_k, k], 1), torch.cat([past_v, v], 1)


class IsolatedContext:
    """Blocks as a batch, each seeing only itself, at the positions of a world's first block."""

    def __init__(self, attention: Attention) -> None:
        self.attention = attention
        self._frames: Tensor | None = None

    def shard(self, tokens: Tensor) -> Tensor:
        return tokens

    def unshard(self, tokens: Tensor) -> Tensor:
        return tokens

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rotate: Rotate | None) -> Tensor:
        """q: (blocks, F, S, heads, head_dim) -> the same shape"""
        assert rotate is not None, "a block's frames are told apart by position"
        if self._frames is None:
            self._frames = torch.arange(q.shape[1], device=q.device)
        flat = (x.flatten(1, 2) for x in (rotate(q, self._frames), rotate(k, self._frames), v))
        return self.attention(*flat).view(q.shape)

    def attend_latent(self, layer: int, q: Tensor, latent: Tensor, expand: Expand, rotate: Rotate | None) -> Tensor:
        k, v = expand(latent)
        return self.attend(layer, q, k, v, rotate)


def check_policy(policy: Policy) -> None:
    """Raise PolicyError for what staggered blocks cannot do: they read one contiguous range each."""
    unusual = {
        "sink": policy.sink != 0,
        "range": bool(policy.ranges),
        "frames": bool(policy.frames),
        "topk": policy.topk != 0,
        "positions": policy.positions != "absolute",
        "window=0": policy.window == 0,
    }
    for name, given in unusual.items():
        if given:
            raise PolicyError(f"staggered blocks: expected full or window=N, with store and offload; got {name}")
