"""From what was asked for to how a model's worlds are spread: the grid chosen by measurement where none was named.

Every rank computes it and comes to the same, because what was measured is the same on all. Knows no processes.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import cast

from engine.models import BlockModel
from engine.models.presets import Preset
from engine.parallel.cache import Spread
from engine.parallel.choose import Call, Machine, Mode, choose_layout
from engine.parallel.mesh import Mesh
from engine.parallel.probe import measure
from engine.parallel.split import Layout, SplitError
from engine.recipe import kv_policy

logger = logging.getLogger(__name__)

GROWTH_BLOCKS = (1, 2, 4, 8, 16, 32)  # at which a cache that grows is looked at


@dataclass(frozen=True)
class Wish:
    """How many ranks, and as far as somebody cared to say, how they share."""

    ranks: int = 1
    ulysses: int | None = None
    ring: int | None = None
    exchange: str = "auto"  # or a ring's mode
    share_decoding: bool = True  # where the model's decoder can be shared

    def __post_init__(self) -> None:
        parts = [part for part in (self.ulysses, self.ring) if part is not None]
        if self.ranks < 1 or any(part < 1 or self.ranks % part for part in parts):
            raise SplitError(f"ulysses, ring: expected numbers that divide the {self.ranks} ranks, got {parts}")
        if len(parts) == 2 and parts[0] * parts[1] != self.ranks:
            raise SplitError(f"ulysses x ring: expected {self.ranks}, the ranks; got {parts[0]} x {parts[1]}")

    def spread(self, mesh: Mesh, preset: Preset, model: BlockModel) -> Spread:
        """All ranks call it together. Raises SplitError where ranks, tokens and heads do not go together."""
        kv = model.geometry.kv
        machine = measure(mesh, kv.heads, kv.head_dim, model.dtype)
        mode = None if self.exchange == "auto" else cast(Mode, self.exchange)
        return Spread.over(mesh.grid(self._layout(machine, preset, model)), kv, machine, mode)

    def _layout(self, machine: Machine, preset: Preset, model: BlockModel) -> Layout:
        if self.ulysses is not None:
            return Layout(self.ulysses, self.ranks // self.ulysses)
        if self.ring is not None:
            return Layout(self.ranks // self.ring, self.ring)
        choice = choose_layout(machine, self.ranks, calls(preset, model))
        logger.info("%s: %s (%s)", preset.name, choice.strategy.layout, choice.reason)
        return choice.strategy.layout


def calls(preset: Preset, model: BlockModel) -> list[Call]:
    """The calls of attention that a world of the preset's own policy makes: in its steady state, or as it grows."""
    frames, heads = preset.frames_per_block, max(preset.sizes.kv_heads, preset.sizes.dim // preset.sizes.head_dim)
    most = kv_policy(preset).most_read(frames)
    lengths = [n * frames for n in GROWTH_BLOCKS] if most is None else [most]
    return [Call(model.geometry.kv, heads, frames, length, model.dtype.itemsize) for length in lengths]
