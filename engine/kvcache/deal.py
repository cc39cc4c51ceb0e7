"""Which blocks of a call of staggered blocks are computed here, and what comes of those that are not: integers mostly.

On one rank, and on ranks that share every block by token and head, all of them. Ranks of a pipeline compute whole
blocks, each its own; engine/parallel/pipeline.py brings the keys and values of the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Span:
    """Frames [first, end) that one block attends to, absolute in the world."""

    first: int
    end: int


@dataclass(frozen=True)
class Blocks:
    """The blocks of one call, of `width` frames each, consecutive from absolute frame `start` on."""

    start: int
    width: int
    spans: tuple[Span, ...]  # what each of them sees
    kept: int = 0  # how many, from the first on, leave their keys and values in the cache

    def first_seen(self, block: int) -> int:
        """The first block of the call that block number `block` of it sees."""
        return max(0, self.spans[block].first - self.start) // self.width

    def frames_seen(self, block: int) -> int:
        return self.spans[block].end - self.spans[block].first

    def frames(self, block: int) -> range:
        """Its own, absolute in the world."""
        return range(self.start + block * self.width, self.start + (block + 1) * self.width)


class Deal:
    """All blocks of a call are computed here."""

    def __init__(self, blocks: Blocks) -> None:
        self.blocks = blocks
        self.mine = tuple(range(len(blocks.spans)))  # numbers of blocks in the call, ascending

    def older(self, layer: int, k: Tensor, v: Tensor) -> Mapping[int, tuple[Tensor, Tensor]]:
        """Keys and values (1, width, S, heads, head_dim) of blocks computed elsewhere, by number: those needed here.

        `k` and `v`: of the blocks that are computed here, keys rotated. Called once a layer, layer by layer.
        """
        return {}

    def collect(self, velocities: list[Tensor]) -> list[Tensor]:
        """From those of the blocks that are computed here, (F, C, H, W) each, to those of all blocks of the call."""
        return velocities
