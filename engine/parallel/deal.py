"""Which team of a pipeline computes which blocks of a call, and whose keys and values go where: integers.

Blocks go by age: the first team has the oldest, so that keys and values are sent one way only, from a team to those
after it. A block is as much work as it sees frames, and what a layer does beside attention (Spread.beside); the cut is
where the team with most work has as little as can be. A team for which no block is left computes the oldest once more,
which needs nothing of others; its result is not used. Knows no torch and no transport.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from engine.kvcache.deal import Blocks


@dataclass(frozen=True)
class Dealt:
    """The blocks of one call over the teams of a pipeline."""

    blocks: Blocks
    owned: tuple[range, ...]  # by team; consecutive, all blocks together

    @classmethod
    def over(cls, teams: int, blocks: Blocks, beside: float) -> Dealt:
        """`beside`: see `work`. What the cache keeps must be of one block at most; all teams have it afterwards."""
        assert blocks.kept <= 1, "several blocks whose keys are kept are computed by all"
        return cls(blocks, cut(work(blocks, beside), teams))

    def computed(self, team: int) -> range:
        """The blocks that a team computes, its own or the oldest."""
        return self.owned[team] or range(1)

    def needed(self, team: int) -> list[int]:
        """Blocks whose keys and values come to a team: those that its own see, and the one that the cache keeps."""
        own = self.owned[team]
        if not own:
            return []
        first = min(self.blocks.first_seen(i) for i in own)
        return [i for i in range(own.start) if i >= first or i < self.blocks.kept]

    def sent(self, team: int, to: int) -> list[int]:
        """Blocks whose keys and values one team sends to another."""
        return [i for i in self.needed(to) if i in self.owned[team]]

    @property
    def messages(self) -> int:
        """How many keys and values of a block are sent in a layer, over all teams."""
        return sum(len(self.needed(team)) for team in range(len(self.owned)))


def work(blocks: Blocks, beside: float) -> tuple[float, ...]:
    """Of each block, in frames that it sees; `beside` is what a layer does for it beside attention, in the same."""
    return tuple(blocks.frames_seen(i) + beside for i in range(len(blocks.spans)))


@lru_cache(maxsize=256)
def cut(loads: Sequence[float], parts: int) -> tuple[range, ...]:
    """Consecutive loads in `parts`, the heaviest as light as can be; the last parts are empty where fewer will do."""
    sums = {sum(loads[i:j]) for i, j in itertools.combinations(range(len(loads) + 1), 2)}
    packed = (_packed(loads, limit) for limit in sorted(sums) if limit >= max(loads))
    spans = next(found for found in packed if len(found) <= parts)
    return (*spans, *(range(len(loads), len(loads)) for _ in range(parts - len(spans))))


def _packed(loads: Sequence[float], limit: float) -> list[range]:
    """As few parts of at most `limit` as there can be."""
    starts = [0]
    for i in range(len(loads)):
        if sum(loads[starts[-1] : i + 1]) > limit:
            starts.append(i)
    return [range(a, b) for a, b in itertools.pairwise([*starts, len(loads)])]
