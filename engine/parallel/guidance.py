"""The parts of a guided step on teams of ranks (CFG parallel).

    rank = team * (pipeline x ring x ulysses) + rank within the team

Branches that have a past of their own have their cache on their own ranks only: half the pages and half the rows of a
pass for each of two. Branches that share one (MAGI-1) find it whole in every team, which writes it for itself
(engine/parts.py says who runs what). Either way there is one exchange: after each step every rank sends what its team
has found to the same rank of the other teams. With V tensors found in a step, of F latent frames of C x H x W numbers
of e bytes, all n ranks in g teams together send

    n / g (g - 1) V F C H W e      a step

V is g b for b worlds whose g branches have caches of their own; for staggered blocks it counts each active block once
for each branch that it takes part in, 11 in the published guidance's steady state of four blocks. That is as much as a
single layer's queries or less. What one rank adds up is added up by all, in the same order. Knows no sampler and no
attention.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.guidance import Branching
from engine.models import State
from engine.parallel.mesh import Axis, as_bytes
from engine.parallel.plan import packed, unpacked
from engine.parallel.split import check_teams
from engine.parts import deal


class SharedBranches(Branching):
    """Some parts are this rank's team's own."""

    def __init__(self, axis: Axis) -> None:
        """`axis`: the ranks at the same place in each team, by team."""
        self._axis = axis
        self.teams, self.index = axis.size, axis.index

    def mine(self, branches: int, caches: int) -> Sequence[int]:
        check_teams(self.teams, branches, caches)
        return range(1) if caches == 1 else range(self.index, self.index + 1)

    def gather(self, found: Sequence[Tensor], sizes: Sequence[int], like: Tensor) -> list[Tensor]:
        dealt = deal(sizes, self.teams)
        counts = [sum(sizes[i] for i in own) for own in dealt]
        own, size = found[: counts[self.index]], like.numel() * like.element_size()
        data = as_bytes(torch.stack(list(own))) if own else like.new_empty(0, dtype=torch.uint8)
        received = torch.cat(self._axis.gather(data, [size * count for count in counts], "cfg"))
        tensors = received.view(like.dtype).view(-1, *like.shape)
        owners = [part for own in dealt for part in own for _ in range(sizes[part])]
        return [tensors[at] for at in sorted(range(len(owners)), key=owners.__getitem__)]

    def collect(self, states: list[State], caches: int) -> list[State]:
        if len(states) == caches:
            return states
        (own,) = states
        data = torch.frombuffer(bytearray(packed(own)), dtype=torch.uint8).to(self._axis.mesh.device)
        size = torch.tensor([len(data)], dtype=torch.int64, device=data.device)
        sizes = [
            int(part.view(torch.int64)) for part in self._axis.gather(as_bytes(size), [8] * self._axis.size, "snapshot")
        ]
        return [unpacked(bytes(part.cpu().numpy())) for part in self._axis.gather(data, sizes, "snapshot")]
