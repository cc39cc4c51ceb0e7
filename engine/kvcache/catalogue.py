"""The blocks of the past and what each frame's keys are like on average: what top-k selection chooses from.

Knows which frames are held, and not where.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor


class Catalogue:
    """`blocks`: those of which frames are held, oldest first, of `frames_per_block` frames at most."""

    def __init__(self, frames_per_block: int) -> None:
        self.blocks: list[range] = []
        self._frames_per_block = frames_per_block
        self._held: set[int] = set()
        self._summaries: dict[int, Tensor] = {}  # frame -> mean key per head (layers, heads, head_dim)

    def add(self, stored: range, summaries: Mapping[int, Tensor]) -> None:
        """Frames that are held from now on; some may have been before."""
        self._held.update(stored)
        self._summaries.update(summaries)
        self.blocks = [*self.blocks, *self._pieces(stored)]

    def forget(self, frames: Iterable[int]) -> None:
        """Frames that are held no more."""
        for frame in frames:
            self._held.discard(frame)
            self._summaries.pop(frame, None)
        self.blocks = [block for block in self.blocks if any(f in self._held for f in block)]

    def candidates(self, visible: Sequence[int]) -> list[range]:
        """Blocks that are held whole and of which nothing is visible."""
        shown = set(visible)
        return [block for block in self.blocks if all(f in self._held and f not in shown for f in block)]

    def summary(self, frame: int) -> Tensor:
        """Mean key per head, (layers, heads, head_dim)."""
        return self._summaries[frame]

    def copy(self) -> Catalogue:
        twin = copy.copy(self)
        twin._held, twin._summaries = set(self._held), dict(self._summaries)
        return twin

    def snapshot(self) -> dict[str, Tensor]:
        """All of it but which frames are held, as tensors."""
        blocks = [(block.start, block.stop) for block in self.blocks]
        state = {"blocks": torch.tensor(blocks, dtype=torch.int64).view(-1, 2)}
        if self._summaries:
            state["summaries"] = torch.stack([self._summaries[f] for f in sorted(self._held)])
        return state

    def restore(self, state: Mapping[str, Tensor], held: Sequence[int], device: torch.device) -> None:
        """Become what `snapshot` was taken of; `held`: oldest first."""
        self.blocks = [range(int(a), int(b)) for a, b in state["blocks"]]
        self._held = set(held)
        if "summaries" in state:
            self._summaries = dict(zip(held, state["summaries"].to(device), strict=True))

    def _pieces(self, stored: range) -> list[range]:
        """What of `stored` lies in no known block (a re-cache stores old ones again), `frames_per_block` at a time."""
        pieces: list[range] = []
        near = [b for b in self.blocks if b.start < stored.stop and stored.start < b.stop]
        for frame in stored:
            if any(frame in block for block in near):
                continue
            if pieces and pieces[-1].stop == frame and len(pieces[-1]) < self._frames_per_block:
                pieces[-1] = range(pieces[-1].start, frame + 1)
            else:
                pieces.append(range(frame, frame + 1))
        return pieces
