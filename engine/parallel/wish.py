"""From what was asked for to how a model's worlds are spread: the grid chosen by measurement where none was named.

Every rank computes it and comes to the same, because what was measured is the same on all. Knows no processes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

from engine.models import BlockModel
from engine.models.presets import Preset
from engine.parallel.cache import Spread
from engine.parallel.choose import Call, Machine, Mode, choose_layout, grids
from engine.parallel.mesh import Mesh
from engine.parallel.passes import Layers, choose_for_steps, steps_of
from engine.parallel.probe import measure
from engine.parallel.split import Layout, SplitError, check_teams, teams_for
from engine.recipe import kv_policy, sampler
from engine.stages import Plan

logger = logging.getLogger(__name__)

GROWTH_BLOCKS = (1, 2, 4, 8, 16, 32)  # at which a cache that grows is looked at


@dataclass(frozen=True)
class Wish:
    """How many ranks, and as far as somebody cared to say, how they share."""

    ranks: int = 1
    ulysses: int | None = None
    ring: int | None = None
    exchange: str = "auto"  # or a ring's mode
    pipeline: int | None = None  # teams that blocks in flight are dealt out to; not given: 1 where the others are
    cfg: int | None = None  # that share the branches of guidance; not given: where it goes, or pays
    share_decoding: bool = True  # where the model's decoder can be shared

    def __post_init__(self) -> None:
        given = {name: n for name in ("ulysses", "ring", "pipeline", "cfg") if (n := getattr(self, name)) is not None}
        product, said = math.prod(given.values()), " x ".join(map(str, given.values()))
        if self.ranks < 1:
            raise SplitError(f"ranks: expected at least 1, got {self.ranks}")
        if any(n < 1 for n in given.values()) or self.ranks % product:
            raise SplitError(f"{', '.join(given)}: expected numbers that divide the {self.ranks} ranks, got {said}")
        if {"ulysses", "ring"} <= given.keys() and product != self.ranks:
            raise SplitError(f"{' x '.join(given)}: expected {self.ranks}, the ranks; got {said}")

    def spread(self, mesh: Mesh, preset: Preset, model: BlockModel) -> Spread:
        """All ranks call it together. Raises SplitError where ranks, tokens, heads and blocks do not go together."""
        kv = model.geometry.kv
        machine = measure(mesh, kv.heads, kv.head_dim, model.dtype)
        mode = None if self.exchange == "auto" else cast(Mode, self.exchange)
        grid = mesh.grid(self.layout(machine, preset, model))
        return Spread.over(grid, kv, machine, mode, layers_of(preset, model).beside)

    def groups(self, branches: int, caches: int) -> list[int]:
        """How many teams may share a sampler's branches of guidance; of several numbers the cost of a step decides.

        Where each branch has a cache it has a team wherever that goes: its ranks have fewer pages and send the others
        one flow a step, while ranks that share a branch exchange in every layer. Where branches share a cache each team
        keeps all of it. Raises SplitError if there are no such branches for the teams asked for.
        """
        if self.cfg is not None:
            check_teams(self.cfg, branches, caches)
            return [self.cfg]
        fixed = math.prod(n or 1 for n in (self.ulysses, self.ring, self.pipeline))
        fits = [n for n in teams_for(branches, caches) if self.ranks % (n * fixed) == 0]
        return fits if caches == 1 else fits[-1:]

    def layout(self, machine: Machine, preset: Preset, model: BlockModel) -> Layout:
        """The grid asked for, or of those that are left the fastest by the cost model. Raises SplitError."""
        plan = preset.sampler if isinstance(preset.sampler, Plan) else None
        steps = steps_of(plan, preset.frames_per_block, kv_policy(preset).window) if plan else []
        self._check_pipeline(preset, max((len(each.blocks.spans) for each in steps), default=1))
        rule, kv, heads = sampler(preset), model.geometry.kv, heads_of(preset)
        cfg = self.groups(rule.branches, rule.caches)
        allowed = self._allowed(grids(self.ranks, kv, heads, pipeline=bool(plan), cfg=cfg))
        if len(allowed) < 2:
            return allowed[0] if allowed else self._asked_for(cfg[-1])
        if steps:
            best, reason = choose_for_steps(allowed, steps, layers_of(preset, model), machine)
        else:
            choice = choose_layout(machine, self.ranks // cfg[0], calls(preset, model))
            best, reason = replace(choice.strategy.layout, cfg=cfg[0]), choice.reason
        logger.info("%s: %s (%s)", preset.name, best, reason)
        return best

    def _check_pipeline(self, preset: Preset, blocks: int) -> None:
        """`blocks`: of the fullest pass."""
        if self.pipeline is None or self.pipeline <= blocks:
            return
        if blocks == 1:
            raise SplitError(
                f"pipeline: expected a model with several blocks in flight (MAGI-1), got {preset.name}, which makes "
                "one at a time: its ranks share by --ulysses and --ring"
            )
        raise SplitError(f"pipeline: expected at most {blocks}, the blocks of a pass; got {self.pipeline}")

    def _allowed(self, fitting: Sequence[Layout]) -> list[Layout]:
        """Grids that have what was asked for; of several teams only where they were, or where nothing was."""
        nothing = (self.ulysses, self.ring, self.pipeline) == (None, None, None)
        wanted = (self.ulysses, self.ring, self.pipeline if self.pipeline or nothing else 1)
        sizes = ((each.ulysses, each.ring, each.pipeline) for each in fitting)
        return [
            each
            for each, got in zip(fitting, sizes, strict=True)
            if all(w is None or w == n for w, n in zip(wanted, got, strict=True))
        ]

    def _asked_for(self, cfg: int) -> Layout:
        """A grid that does not fit, for its own error."""
        teams = (self.pipeline or 1) * cfg
        ulysses = self.ulysses or self.ranks // teams // (self.ring or 1)
        return Layout(ulysses, self.ranks // teams // ulysses, self.pipeline or 1, cfg)


def layers_of(preset: Preset, model: BlockModel) -> Layers:
    return Layers.of(model.geometry.kv, heads_of(preset), preset.sizes.parameters, model.dtype.itemsize)


def heads_of(preset: Preset) -> int:
    """Of queries."""
    return max(preset.sizes.kv_heads, preset.sizes.dim // preset.sizes.head_dim)


def calls(preset: Preset, model: BlockModel) -> list[Call]:
    """The calls of attention that a world of the preset's own policy makes: in its steady state, or as it grows."""
    frames, heads = preset.frames_per_block, heads_of(preset)
    most = kv_policy(preset).most_read(frames)
    lengths = [n * frames for n in GROWTH_BLOCKS] if most is None else [most]
    return [Call(model.geometry.kv, heads, frames, length, model.dtype.itemsize) for length in lengths]
