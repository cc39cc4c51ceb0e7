"""Which team of a pipeline computes which blocks of a call, and whose keys and values go where: integers.

Blocks go by age: the first team has the oldest, so that keys and values are sent one way only, from a team to those
after it. A block that neither sees others of the call nor is seen goes where there is room. A block is as much work as
it sees frames, and what a layer does beside attention (Spread.beside); the cut is where the team with most work has as
little as can be. A team for which no block is left computes the oldest once more, which needs nothing of others; its
result is not used. Knows no torch and no transport.
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
    owned: tuple[tuple[int, ...], ...]  # by team, ascending; all blocks together, each once

    @classmethod
    def over(cls, teams: int, blocks: Blocks, beside: float) -> Dealt:
        """`beside`: see `work`. What the cache keeps must be of one block at most; all teams have it afterwards."""
        assert blocks.kept <= 1, "several blocks whose keys are kept are computed by all"
        loads = work(blocks, beside)
        cuts = [(order, cut(tuple(loads[i] for i in order), teams)) for order in _orders(blocks)]
        order, spans = min(
            cuts, key=lambda each: max(sum(loads[i] for i in each[0][s.start : s.stop]) for s in each[1])
        )
        return cls(blocks, tuple(tuple(sorted(order[span.start : span.stop])) for span in spans))

    def computed(self, team: int) -> tuple[int, ...]:
        """The blocks that a team computes, its own or the oldest."""
        return self.owned[team] or (0,)

    def needed(self, team: int) -> list[int]:
        """Blocks whose keys and values come to a team: those that its own see, and the one that the cache keeps."""
        own = self.owned[team]
        if not own:
            return []
        seen = {i for each in own for i in range(self.blocks.first_seen(each), each)}
        return sorted(seen.union(range(self.blocks.kept)).difference(own))

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


def _orders(blocks: Blocks) -> list[list[int]]:
    """By age, but for those that see no other and are not seen: these together at any place behind what is kept."""
    count = len(blocks.spans)
    seen = {i for each in range(count) for i in range(blocks.first_seen(each), each)}.union(range(blocks.kept))
    loose = [i for i in range(count) if i not in seen and blocks.first_seen(i) == i]
    rest = [i for i in range(count) if i not in loose]
    return [rest[:at] + loose + rest[at:] for at in range(len(rest), blocks.kept - 1, -1)]


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
