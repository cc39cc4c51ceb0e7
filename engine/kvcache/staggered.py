"""What several blocks in flight see during one call: each its own range of frames, of the past and of the call itself.

Blocks are consecutive and ranges contiguous, so past and present are laid side by side once per layer and each block
reads a slice. Knows no schedule and no guidance; it learns the ranges from whoever makes the call.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from engine.kvcache.cache import KVCache
from engine.kvcache.deal import Deal
from engine.kvcache.policy import Policy, PolicyError
from engine.kvcache.staged import StagedBlock
from engine.layers.attention import Attention
from engine.models import Expand, Rotate


class StaggeredContext:
    """The context of one call: of those of its blocks that `deal` has computed here, as a rule all.

    `keep` receives the keys and values of the call's first frames, as many as it has pages for.
    """

    def __init__(
        self, deal: Deal, attention: Attention, past: KVCache | None = None, keep: StagedBlock | None = None
    ) -> None:
        blocks = deal.blocks
        self.start, self.width, self.spans = blocks.start, blocks.width, blocks.spans
        end = self.start + self.width * len(self.spans)
        for span in self.spans:
            if not 0 <= span.first < span.end <= end:
                raise ValueError(f"range of a block: expected to lie in [0, {end}), got [{span.first}, {span.end})")
        self.deal, self.attention, self.past, self.keep = deal, attention, past, keep
        self._own = [frame for i in deal.mine for frame in blocks.frames(i)]
        self._oldest = min(self._own[0], *(self.spans[i].first for i in deal.mine))
        self._at: Tensor | None = None  # positions of the blocks computed here
        if self._oldest < self.start and past is None:
            raise ValueError(
                f"frames from {self._oldest} on are wanted, the call starts at {self.start} and has no past"
            )

    def shard(self, tokens: Tensor) -> Tensor:
        return tokens

    def unshard(self, tokens: Tensor) -> Tensor:
        return tokens

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rotate: Rotate | None) -> Tensor:
        """q: (1, F, S, heads, head_dim), the blocks computed here -> the same shape"""
        assert rotate is not None, "staggered blocks are told apart by position"
        if self._at is None:  # one tensor for all layers: rotations keep what they make of it
            self._at = torch.tensor(self._own, device=q.device)
        q, k = rotate(q, self._at), rotate(k, self._at)
        older = self.deal.older(layer, k, v)
        self._keep(layer, *older.get(0, (k, v)))
        k, v, frames = self._seen(layer, k, v, older)
        per_frame, out = q.shape[2], []
        for block, number in zip(torch.split(q, self.width, 1), self.deal.mine, strict=True):
            span = self.spans[number]
            first = frames.index(span.first) * per_frame
            seen = slice(first, first + (span.end - span.first) * per_frame)
            out.append(self.attention(block.flatten(1, 2), k[:, seen], v[:, seen]).view(block.shape))
        return torch.cat(out, 1)

    def attend_latent(self, layer: int, q: Tensor, latent: Tensor, expand: Expand, rotate: Rotate | None) -> Tensor:
        k, v = expand(latent)
        return self.attend(layer, q, k, v, rotate)

    def _keep(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Write what the cache keeps of the call's first frames."""
        if self.keep is not None:
            self.keep.store(layer, k[:, : self.keep.frames], v[:, : self.keep.frames])

    def _seen(
        self, layer: int, k: Tensor, v: Tensor, older: Mapping[int, tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor, list[int]]:
        """All that is seen here, in order of time: keys and values (1, tokens, heads, head_dim), and whose they are."""
        if self._oldest >= self.start and not older:
            return k.flatten(1, 2), v.flatten(1, 2), self._own
        own = (torch.split(x, self.width, 1) for x in (k, v))
        blocks = {**older, **dict(zip(self.deal.mine, zip(*own, strict=True), strict=True))}
        frames = [frame for i in sorted(blocks) for frame in self.deal.blocks.frames(i)]
        parts = [blocks[i] for i in sorted(blocks)]
        if self._oldest < self.start:
            assert self.past is not None, "checked at the start"
            past_k, past_v = self.past.between(layer, self._oldest, self.start)
            parts.insert(0, (past_k[None], past_v[None]))
            frames = [*range(self._oldest, self.start), *frames]
        keys, values = (torch.cat(each, 1).flatten(1, 2) for each in zip(*parts, strict=True))
        return keys, values, frames


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
