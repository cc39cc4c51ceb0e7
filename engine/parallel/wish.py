"""From what was asked for to how a model's worlds are spread: the grid chosen by measurement where none was named.

Every rank computes it and comes to the same, because what was measured is the same on all. Knows no processes.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from typing import cast

from engine.models import BlockModel
from engine.models.presets import Preset
from engine.parallel.cache import Spread
from engine.parallel.choose import Call, Machine, Mode, choose_layout
from engine.parallel.mesh import Mesh
from engine.parallel.probe import measure
from engine.parallel.split import Layout, SplitError
from engine.recipe import kv_policy, sampler

logger = logging.getLogger(__name__)

GROWTH_BLOCKS = (1, 2, 4, 8, 16, 32)  # at which a cache that grows is looked at


@dataclass(frozen=True)
class Wish:
    """How many ranks, and as far as somebody cared to say, how they share."""

    ranks: int = 1
    ulysses: int | None = None
    ring: int | None = None
    cfg: int | None = None  # groups of ranks, one for each branch of guidance
    exchange: str = "auto"  # or a ring's mode

    def __post_init__(self) -> None:
        parts = [part for part in (self.ulysses, self.ring, self.cfg) if part is not None]
        if self.ranks < 1 or any(part < 1 for part in parts) or self.ranks % math.prod(parts):
            raise SplitError(f"ulysses, ring, cfg: expected numbers that divide the {self.ranks} ranks, got {parts}")
        if self.ulysses and self.ring and math.prod(parts) != self.ranks:
            said = " x ".join(map(str, parts))
            raise SplitError(f"ulysses x ring x cfg: expected {self.ranks}, the ranks; got {said}")

    def spread(self, mesh: Mesh, preset: Preset, model: BlockModel) -> Spread:
        """All ranks call it together. Raises SplitError where ranks, tokens and heads do not go together."""
        kv = model.geometry.kv
        machine = measure(mesh, kv.heads, kv.head_dim, model.dtype)
        mode = None if self.exchange == "auto" else cast(Mode, self.exchange)
        layout = replace(self._grid(machine, preset, model), cfg=self.groups(sampler(preset).branches))
        return Spread.over(mesh.grid(layout), kv, machine, mode)

    def groups(self, branches: int) -> int:
        """How many groups of ranks share a sampler's branches of guidance: one for each, wherever that goes.

        A branch's ranks send the others one flow a step; ranks that share a branch exchange in every layer. Raises
        SplitError if there are no such branches for the groups asked for.
        """
        if self.cfg is not None:
            if self.cfg not in (1, branches):
                what = (
                    f"the {branches} branches of guidance with caches of their own" if branches > 1 else "no guidance"
                )
                raise SplitError(f"cfg: expected 1{f' or {branches}' * (branches > 1)}, for {what}; got {self.cfg}")
            return self.cfg
        fits = self.ranks % (branches * (self.ulysses or 1) * (self.ring or 1)) == 0
        return branches if fits and not (self.ulysses and self.ring) else 1

    def _grid(self, machine: Machine, preset: Preset, model: BlockModel) -> Layout:
        """Of the ranks of one branch."""
        ranks = self.ranks // self.groups(sampler(preset).branches)
        if self.ulysses is not None:
            return Layout(self.ulysses, ranks // self.ulysses)
        if self.ring is not None:
            return Layout(ranks // self.ring, self.ring)
        choice = choose_layout(machine, ranks, calls(preset, model))
        logger.info("%s: %s (%s)", preset.name, choice.strategy.layout, choice.reason)
        return choice.strategy.layout


def calls(preset: Preset, model: BlockModel) -> list[Call]:
    """The calls of attention that a world of the preset's own policy makes: in its steady state, or as it grows."""
    frames, heads = preset.frames_per_block, max(preset.sizes.kv_heads, preset.sizes.dim // preset.sizes.head_dim)
    most = kv_policy(preset).most_read(frames)
    lengths = [n * frames for n in GROWTH_BLOCKS] if most is None else [most]
    return [Call(model.geometry.kv, heads, frames, length, model.dtype.itemsize) for length in lengths]
