"""Who computes which branch of classifier-free guidance.

A process that is alone computes all of them, each with a cache of its own. Ranks may share them out
(engine/parallel/guidance.py): each then has the caches of its own branches and hears what the others have found.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from engine.models import State


class Branching(Protocol):
    """Which branches are this process's own, and how it learns of the others."""

    def mine(self, branches: int) -> range:
        """Of the `branches` of a sampler, conditional first. Raises ValueError where they cannot be shared out."""
        ...

    def gather(self, found: list[Tensor]) -> list[Tensor]:
        """From one tensor for each branch of one's own to one for each branch; all of the same shape."""
        ...

    def collect(self, states: list[State]) -> list[State]:
        """The same of what snapshots hold."""
        ...


class AllBranches:
    """They are all one's own."""

    def mine(self, branches: int) -> range:
        return range(branches)

    def gather(self, found: list[Tensor]) -> list[Tensor]:
        return found

    def collect(self, states: list[State]) -> list[State]:
        return states


ALL_BRANCHES = AllBranches()
