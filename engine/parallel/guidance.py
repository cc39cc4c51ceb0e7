"""The branches of classifier-free guidance on ranks of their own (CFG parallel).

    rank = branch * (ulysses x ring) + rank within the team

Each branch has its own past, so its cache is on its own ranks only: half the pages, half the rows of a pass, and no
exchange but one: after each step every rank sends the flow that its branch has found to the same rank of the other
branch. With a block of F latent frames of C x H x W numbers of e bytes in b worlds, over all n ranks and g branches

    n (g - 1) b F C H W e      a step

which is as much as a single layer's queries or less. Knows no sampler and no attention.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.models import State
from engine.parallel.mesh import Axis, as_bytes
from engine.parallel.plan import packed, unpacked
from engine.parallel.split import SplitError


class SharedBranches:
    """One branch is this rank's own."""

    def __init__(self, axis: Axis) -> None:
        """`axis`: the ranks at the same place in each branch, by branch."""
        self._axis = axis

    def mine(self, branches: int) -> range:
        if branches != self._axis.size:
            raise SplitError(
                f"cfg: expected as many groups of ranks as the sampler has branches of guidance with a cache of their "
                f"own, {branches}; got {self._axis.size}"
            )
        return range(self._axis.index, self._axis.index + 1)

    def gather(self, found: list[Tensor]) -> list[Tensor]:
        (own,) = found
        data = as_bytes(own)
        received = self._axis.gather(data, [len(data)] * self._axis.size, "cfg")
        return [part.view(own.dtype).view(own.shape) for part in received]

    def collect(self, states: list[State]) -> list[State]:
        (own,) = states
        data = torch.frombuffer(bytearray(packed(own)), dtype=torch.uint8).to(self._axis.mesh.device)
        size = torch.tensor([len(data)], dtype=torch.int64, device=data.device)
        sizes = [
            int(part.view(torch.int64)) for part in self._axis.gather(as_bytes(size), [8] * self._axis.size, "snapshot")
        ]
        return [unpacked(bytes(part.cpu().numpy())) for part in self._axis.gather(data, sizes, "snapshot")]
