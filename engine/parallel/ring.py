"""Attention over keys that are spread over ranks by token: the keys go round, or the queries do.

Every rank of the ring has queries of its own tokens and keys and values of its own tokens, the block's and the past's.

    pass-KV   (Ring Attention, arXiv 2310.01889) keys and values go round; a rank attends with its own queries
              to one shard after another
    pass-Q    queries go round; a rank attends to its own keys with one rank's queries after another, and sends
              each partial result back to its owner at once

Partial results are merged by their log-sum-exp. Each transfer is posted before the product that hides it. In one call
on a ring of n, with Tq query and Tk key tokens in all, h query and k key/value heads of d numbers of e bytes, all ranks
together send

    pass-KV   (n - 1) 2 Tk k d e
    pass-Q    (n - 1) Tq h (2 d e + 4)        the 4 is the log-sum-exp, a float32

so pass-Q sends less where Tk / Tq > (h / k) (1 + 2 / (d e)): with as many key as query heads as soon as there is a
past, with grouped queries once the keys outnumber the queries by the size of the group. Pass-KV sends half as many
messages.

Knows no pages, no positions and no policy: it takes the place of an attention backend.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from engine.layers.attention import merge, with_lse
from engine.parallel.choose import LSE_BYTES, Call, Chooser
from engine.parallel.mesh import Axis, Pending, as_bytes
from engine.parallel.split import Split


class RingAttention:
    """An attention backend: q (B, Tq, H, D), k and v (B, Tk, Hkv, D), each this rank's tokens -> (B, Tq, H, D).

    Tokens are frame by frame, so that the sizes of another rank's share are known from this one's.
    """

    def __init__(self, axis: Axis, split: Split, chooser: Chooser) -> None:
        self.chooser = chooser
        self._axis, self._kv = axis, split.kv
        self._chunks = [len(chunk) for chunk in split.chunks]  # tokens of a latent frame, by ring index

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        own = self._chunks[self._axis.index]
        kv = replace(self._kv, heads=k.shape[2])
        call = Call(kv, q.shape[2], q.shape[1] // own, k.shape[1] // own, q.element_size())
        mode = self.chooser.choose(call).strategy.mode
        return self._pass_kv(q, k, v) if mode == "pass-kv" else self._pass_q(q, k, v)

    def _pass_kv(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        axis, shard = self._axis, torch.cat([as_bytes(k), as_bytes(v)])
        parts = []
        for hop in range(axis.size):
            owner = (axis.index - hop) % axis.size
            pending = self._pass_on(shard, owner, "pass-kv") if hop + 1 < axis.size else None
            shape = self._shape(k, owner)
            keys, values = (half.view(k.dtype).view(shape) for half in shard.chunk(2))
            parts.append(with_lse(q, keys, values))
            if pending is not None:
                shard = pending.wait()
        return merge(parts)

    def _pass_q(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        axis, size = self._axis, self._axis.size
        visitor = as_bytes(q)
        parts: list[tuple[Tensor, Tensor]] = []
        returning: list[Pending] = []
        for hop in range(size):
            owner = (axis.index - hop) % size
            pending = self._pass_on(visitor, owner, "pass-q") if hop + 1 < size else None
            out, lse = with_lse(visitor.view(q.dtype).view(self._shape(q, owner)), k, v)
            if hop == 0:
                parts.append((out, lse))
            else:
                returning.append(self._send_back((out, lse), owner, (axis.index + hop) % size, q))
            if pending is not None:
                visitor = pending.wait()
        return merge(parts + [self._unpack(pending.wait(), q) for pending in returning])

    def _pass_on(self, data: Tensor, owner: int, kind: str) -> Pending:
        """The shard of `owner` to the next rank, while that of the one before `owner` comes here."""
        axis = self._axis
        after, before = (axis.index + 1) % axis.size, (axis.index - 1) % axis.size
        coming = self._chunks[(owner - 1) % axis.size]
        return axis.post(data, after, before, len(data) // self._chunks[owner] * coming, kind)

    def _send_back(self, partial: tuple[Tensor, Tensor], to: int, source: int, q: Tensor) -> Pending:
        """A partial result to whose queries they were, while one of this rank's own queries comes from `source`."""
        out, lse = partial
        data = torch.cat([as_bytes(lse), as_bytes(out)])
        rows = q.shape[0] * q.shape[1] * q.shape[2]
        return self._axis.post(data, to, source, rows * (LSE_BYTES + q.shape[3] * q.element_size()), "pass-q")

    def _unpack(self, data: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        rows = q.shape[0] * q.shape[1] * q.shape[2]
        lse, out = torch.split(data, [rows * LSE_BYTES, len(data) - rows * LSE_BYTES])
        return out.view(q.dtype).view(q.shape), lse.view(torch.float32).view(q.shape[:3])

    def _shape(self, mine: Tensor, owner: int) -> tuple[int, ...]:
        """The shape of what is `mine` here in the hands of another rank of the ring."""
        frames = mine.shape[1] // self._chunks[self._axis.index]
        return (mine.shape[0], frames * self._chunks[owner], *mine.shape[2:])
