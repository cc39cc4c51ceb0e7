"""Who computes which part of a guided step, and how all learn what was found.

A process that is alone computes everything. Ranks may share the parts out (engine/parallel/guidance.py): each then has
the caches that its own parts read, and hears what the others have found.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from engine.models import State


class Branching:
    """All parts are this process's own."""

    teams, index = 1, 0  # how many share the parts, and which of them this is

    def mine(self, branches: int, caches: int) -> Sequence[int]:
        """Of a world's caches, those that are kept here; its sampler has so many branches of guidance.

        Raises ValueError where these cannot be shared out.
        """
        return range(caches)

    def gather(self, found: Sequence[Tensor], sizes: Sequence[int], like: Tensor) -> list[Tensor]:
        """From the tensors of one's own parts to those of all parts, in the order of parts.

        `sizes`: how many each part finds; `like`: a tensor of their shape and type. What comes behind one's own is
        ignored.
        """
        return list(found[: sum(sizes)])

    def collect(self, states: list[State], caches: int) -> list[State]:
        """From what snapshots hold of one's own caches to that of all of a world's caches."""
        return states


ALL_BRANCHES = Branching()
