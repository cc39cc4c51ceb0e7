"""Blocks in flight dealt out to ranks: each computes whole blocks, keys and values of older ones come to younger ones.

    model.forward   the call of one rank, with the blocks that are its own (deal.py)
    older           in each layer, one way: keys and values of own blocks to the ranks whose blocks see them, while
                    those of the next layer are awaited
    collect         the velocities of all blocks, once at the end

There is no all-to-all and no gather of tokens. In one call on n ranks, with blocks of F frames of S tokens, k key/value
heads of d numbers of e bytes, and m the number of (block, other rank that needs it), all ranks together send

    in each layer   m 2 F S k d e
    at the end      (n - 1) B F C H W 4        B blocks of F latent frames (C, H, W) in float32

For B = n blocks that see all older ones m = n (n - 1) / 2. The block that has just finished is one of the call's, run
clean: its keys and values go to all ranks, each of which keeps whole pages. (Were it computed by all, its (n - 1) 2 F S
k d e bytes would be spared, of which younger blocks see to it that most are sent anyway, and the call would last 1 +
ceil(B / n) blocks in place of ceil((B + 1) / n).) Given blocks, once at the start of a world, are computed by all.

Ranks may be teams that share each block by token and head; then n counts teams, the first row is for all ranks of a
team together, where key heads have no copies, and the second for each of them. A rank is at most one layer ahead of
those that need its keys: it waits for what it sent in a layer before it sends the next.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.kvcache.deal import Deal
from engine.parallel.deal import Dealt
from engine.parallel.mesh import Axis, Pending, as_bytes


class PipelineDeal(Deal):
    """One rank's part in one pass through the model."""

    def __init__(self, axis: Axis, dealt: Dealt, layers: int) -> None:
        super().__init__(dealt.blocks)
        self._axis, self._dealt, self._layers = axis, dealt, layers
        self.mine = dealt.computed(axis.index)
        others = [i for i in range(axis.size) if i != axis.index]
        self._to = [(i, sent) for i in others if (sent := dealt.sent(axis.index, i))]
        self._from = [(i, sent) for i in others if (sent := dealt.sent(i, axis.index))]
        self._going: Pending | None = None
        self._coming: Pending | None = None

    def older(self, layer: int, k: Tensor, v: Tensor) -> dict[int, tuple[Tensor, Tensor]]:
        self._wait_for_sent()
        self._going = self._axis.send([(i, self._message(k, v, blocks)) for i, blocks in self._to], "pipeline")
        coming = self._coming or self._expect(k)
        arrived = self._unpack(coming.wait(), k)
        self._coming = self._expect(k) if layer + 1 < self._layers else None
        return arrived

    def collect(self, velocities: list[Tensor]) -> list[Tensor]:
        self._wait_for_sent()
        own, like = self._dealt.owned[self._axis.index], velocities[0]
        mine = as_bytes(torch.stack(velocities)) if own else like.new_empty(0, dtype=torch.uint8)
        size = like.numel() * like.element_size()
        parts = self._axis.gather(mine, [size * len(part) for part in self._dealt.owned], "velocities")
        found = torch.cat(parts).view(like.dtype).view(-1, *like.shape)
        order = [i for part in self._dealt.owned for i in part]
        return [found[order.index(i)] for i in range(len(order))]

    def _wait_for_sent(self) -> None:
        if self._going is not None:
            self._going.wait()
            self._going = None

    def _message(self, k: Tensor, v: Tensor, blocks: Sequence[int]) -> Tensor:
        """Keys and values of some of the blocks computed here, block by block."""
        width, places = self.blocks.width, [self.mine.index(i) for i in blocks]
        cuts = [slice(at * width, (at + 1) * width) for at in places]
        return torch.cat([as_bytes(x[:, frames]) for frames in cuts for x in (k, v)])

    def _expect(self, like: Tensor) -> Pending:
        size = 2 * like[:, : self.blocks.width].numel() * like.element_size()
        return self._axis.receive([(i, size * len(blocks)) for i, blocks in self._from], "pipeline")

    def _unpack(self, data: Tensor, like: Tensor) -> dict[int, tuple[Tensor, Tensor]]:
        numbers = [i for _, blocks in self._from for i in blocks]
        halves = data.view(like.dtype).view(2 * len(numbers), 1, self.blocks.width, *like.shape[2:])
        return {i: (halves[2 * at], halves[2 * at + 1]) for at, i in enumerate(numbers)}
