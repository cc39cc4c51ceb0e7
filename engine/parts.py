"""What a guided step is made of, and which team of ranks computes which of it: integers.

A part is what can be computed apart. Where each branch of guidance has a cache of its own, a branch is a part; where
staggered blocks share one (MAGI-1), a branch that sees history is, and so is each block of the one that sees none:

    text      history and text
    history   history and the null text; it writes what the cache keeps of the block that has just finished
    alone     each block for itself, with the null text

Parts go to teams largest first, each to the team that has least. A team runs its parts of a branch in one pass. One
that has not drawn `history` runs the finished block by itself, which sees nothing of the others: so every team's cache
is the same, and no keys are sent. All teams make equally many passes, because between passes rank 0 says whether the
block goes on; whoever has fewer runs the oldest block alone once more, for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine.stages import Weights

ALONE, HISTORY, TEXT = range(3)  # branches, as in `Weights`


class Part(NamedTuple):
    """Of one branch, the active blocks (by number, oldest first) whose velocities it finds."""

    branch: int
    blocks: tuple[int, ...]


def deal(sizes: Sequence[int], teams: int) -> list[list[int]]:
    """The numbers of the parts that each team computes, ascending; parts are as much work as they find tensors."""
    owned: list[list[int]] = [[] for _ in range(teams)]
    loads = [0] * teams
    for part in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        team = loads.index(min(loads))
        owned[team].append(part)
        loads[team] += sizes[part]
    return [sorted(each) for each in owned]


def parts(weights: Sequence[Weights], *, skip: bool) -> list[Part]:
    """Of a step of blocks, oldest first, that weigh their branches so, in the order of branches above.

    With `skip` a block is left out of the branches that it neither needs nor is seen in.
    """
    with_history = [Part(branch, _needed([w[branch] for w in weights], skip)) for branch in (TEXT, HISTORY)]
    alone = [Part(ALONE, (i,)) for i, w in enumerate(weights) if w[ALONE] or not skip]
    return [each for each in (*with_history, *alone) if each.blocks]


def passes(wanted: Sequence[Part], teams: int, *, clean: bool) -> list[list[Part]]:
    """What each team runs, one pass for each entry. `clean`: whether a block that has just finished goes along.

    What a team finds in its passes is, in this order, what its parts ask for; then comes what is not used.
    """
    dealt = deal([len(part.blocks) for part in wanted], teams)
    found = [_together([wanted[i] for i in own], clean=clean) for own in dealt]
    most = max(map(len, found))
    return [own + [Part(ALONE, (0,))] * (most - len(own)) for own in found]


def _needed(weights: Sequence[float], skip: bool) -> tuple[int, ...]:
    """Blocks that take part in a branch with history: younger ones see older ones, never the reverse."""
    return tuple(range(max((i + 1 for i, w in enumerate(weights) if w or not skip), default=0)))


def _together(own: Sequence[Part], *, clean: bool) -> list[Part]:
    """Parts of a branch in one; of history there is one wherever the cache is written."""
    branches = {part.branch for part in own} | ({HISTORY} if clean else set())
    return [Part(b, tuple(i for part in own if part.branch == b for i in part.blocks)) for b in sorted(branches)[::-1]]
