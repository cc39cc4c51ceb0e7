"""Tokens to heads and back around attention (DeepSpeed-Ulysses, arXiv 2309.14509), and the split of tokens itself.

    outside      every rank has its tokens, all heads
    scatter      one all-to-all: queries, keys and values of a rank's own heads come together, of the group's chunk
    attention    as on one rank, with fewer heads; a cache under it holds fewer heads
    gather       one all-to-all: each rank has its tokens back, all heads

With T tokens in a call on a group of u ranks of which this one holds t, h query and k key/value heads of d numbers of e
bytes, of which this rank attends with h' and k' (those of all ranks add up to h and to K, K > k where key heads are
copied), it sends

    scatter   t d e ((h - h') + 2 (K - k'))
    gather    (T - t) d e h'

all ranks together, where shares are even and K = h, (u - 1) / u of 4 T h d e. Cross attention needs no exchange: its
queries are split by token like all else, its keys are the prompt's, the same on every rank. Knows no cache, no policy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from engine.models import Expand, Rotate
from engine.parallel.mesh import Grid, as_bytes
from engine.parallel.split import Split

Attend: TypeAlias = Callable[[int, Tensor, Tensor, Tensor, Rotate | None], Tensor]
AttendLatent: TypeAlias = Callable[[int, Tensor, Tensor, Expand, Rotate | None], Tensor]


class HeadExchange:
    """What one rank does with its share of a model's tokens; made once for a world, it remembers no block."""

    def __init__(self, grid: Grid, split: Split) -> None:
        self.grid, self.split = grid, split
        self._at_ring, self._at_ulysses = split.layout.place(split.rank)
        group = split.layout.ulysses_group(self._at_ring)
        self._sizes = [len(split.tokens[rank]) for rank in group]  # tokens of a frame, by ulysses index
        self._turns_shares = False  # whether the model's rotary embedding can turn this rank's own tokens alone

    # ---------------------------------------------------------------------------------------------- tokens

    def shard(self, tokens: Tensor) -> Tensor:
        """(B, F, S, D) -> (B, F, S', D), this rank's.

        A model that shards positions too (an integer tensor) is one whose rotary embedding knows its share of them.
        """
        self._turns_shares |= not tokens.is_floating_point()
        mine = self.split.mine
        return tokens[:, :, mine.start : mine.stop]

    def unshard(self, tokens: Tensor) -> Tensor:
        """(B, F, S', D) -> (B, F, S, D): all ranks send their share to all others."""
        b, f, _, d = tokens.shape
        sizes = [len(share) for share in self.split.tokens]
        per_token = b * f * d * tokens.element_size()
        parts = self.grid.everyone.gather(as_bytes(tokens), [per_token * s for s in sizes], "unshard")
        return torch.cat([p.view(tokens.dtype).view(b, f, s, d) for p, s in zip(parts, sizes, strict=True)], 2)

    # ------------------------------------------------------------------------------------------- attention

    def attend(self, inner: Attend, layer: int, qkv: tuple[Tensor, Tensor, Tensor], rotate: Rotate | None) -> Tensor:
        """`inner`, a context's `attend`, over the chunk and this rank's heads. (B, F, S', heads, head_dim)"""
        heads = qkv[0].shape[3]
        q, k, v = self.scatter(*qkv)
        return self.gather(inner(layer, q, k, v, self.placed(rotate)), heads)

    def attend_latent(
        self, inner: AttendLatent, layer: int, tensors: tuple[Tensor, Tensor], expand: Expand, rotate: Rotate | None
    ) -> Tensor:
        """The same around a context's `attend_latent`: queries, and one latent (B, F, S', R) per token."""
        heads = tensors[0].shape[3]
        q, latent = self.scatter_latent(*tensors)
        return self.gather(inner(layer, q, latent, self.own_heads(expand), self.placed(rotate)), heads)

    # ----------------------------------------------------------------------------------------------- heads

    def scatter(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, F, S', all heads, head_dim) -> (B, F, chunk, own heads, head_dim)."""
        if self.grid.ulysses.size == 1:
            return q, k, v
        heads = self.split.q_heads(q.shape[3])
        q, k, v = self._scatter([(q, heads), (k, self.split.kv_heads), (v, self.split.kv_heads)])
        return q, k, v

    def scatter_latent(self, q: Tensor, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Latents (B, F, S', R) have no heads: each rank of the group gets all of the chunk's."""
        if self.grid.ulysses.size == 1:
            return q, latent
        everything = [range(1)] * self.grid.ulysses.size
        q, latent = self._scatter([(q, self.split.q_heads(q.shape[3])), (latent.unsqueeze(3), everything)])
        return q, latent.squeeze(3)

    def gather(self, out: Tensor, heads: int) -> Tensor:
        """(B, F, chunk, own heads, head_dim) -> (B, F, S', all `heads`, head_dim)."""
        axis = self.grid.ulysses
        if axis.size == 1:
            return out
        b, f, _, _, d = out.shape
        own = self._sizes[self._at_ulysses]
        counts = [len(span) for span in self.split.q_heads(heads)]
        parts = [as_bytes(x) for x in torch.split(out, self._sizes, 2)]
        received = axis.exchange(parts, [b * f * own * h * d * out.element_size() for h in counts], "ulysses")
        pieces = [p.view(out.dtype).view(b, f, own, h, d) for p, h in zip(received, counts, strict=True)]
        return torch.cat(pieces, 3)

    def placed(self, rotate: Rotate | None) -> Rotate | None:
        """The model's rotary embedding for the chunk this rank attends with.

        The whole frame it can always turn. A chunk it can turn as it is where the model knows it as this rank's share;
        otherwise the chunk is turned in its place among zeros.
        """
        total, chunk = self.split.kv.tokens, self.split.chunk
        if rotate is None or len(chunk) == total or (self._turns_shares and chunk == self.split.mine):
            return rotate

        def turn(x: Tensor, frames: Tensor) -> Tensor:
            whole = x.new_zeros(*x.shape[:2], total, *x.shape[3:])
            whole[:, :, chunk.start : chunk.stop] = x
            return rotate(whole, frames)[:, :, chunk.start : chunk.stop]

        return turn

    def own_heads(self, expand: Expand) -> Expand:
        """An up-projection of latents of which only this rank's heads are kept."""
        span = self.split.kv_heads[self._at_ulysses]
        if len(span) == self.split.kv.heads:
            return expand

        def narrowed(latent: Tensor) -> tuple[Tensor, Tensor]:
            k, v = expand(latent)
            return k[..., span.start : span.stop, :], v[..., span.start : span.stop, :]

        return narrowed

    def _scatter(self, tensors: Sequence[tuple[Tensor, Sequence[range]]]) -> list[Tensor]:
        """Heads [span i] of each tensor to rank i, all of them in one message to each rank."""
        axis, me = self.grid.ulysses, self._at_ulysses
        parts = [
            torch.cat([as_bytes(x[:, :, :, s[i].start : s[i].stop]) for x, s in tensors]) for i in range(axis.size)
        ]
        # bytes of one token of each tensor, for the heads that come here
        widths = [x.shape[0] * x.shape[1] * len(s[me]) * x.shape[4] * x.element_size() for x, s in tensors]
        received = axis.exchange(parts, [sum(widths) * size for size in self._sizes], "ulysses")
        cut = [
            torch.split(data, [width * size for width in widths])
            for data, size in zip(received, self._sizes, strict=True)
        ]
        return [self._join(x, len(s[me]), [pieces[i] for pieces in cut]) for i, (x, s) in enumerate(tensors)]

    def _join(self, like: Tensor, heads: int, pieces: Sequence[Tensor]) -> Tensor:
        b, f, _, _, d = like.shape
        return torch.cat(
            [p.view(like.dtype).view(b, f, size, heads, d) for p, size in zip(pieces, self._sizes, strict=True)], 2
        )
