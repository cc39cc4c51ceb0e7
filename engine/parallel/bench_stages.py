"""Trials of `inferix bench parallel --preset`: a step of blocks in flight on every layout, measured, predicted, chosen.

A published architecture with random weights makes a world in mid-course on each layout: every block shared by token and
head, blocks dealt out, branches of guidance dealt out, or several of these. A stage of the world is timed, and a row is
a step of it in the mean: the slowest rank's time, the best of several stages. Predicted are the layers alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from engine import recipe
from engine.bench import magi
from engine.generator import Generator
from engine.models import presets
from engine.models.magi_model import MagiModel
from engine.models.presets import Preset, UnknownModel
from engine.parallel.bench_calls import Row, seconds
from engine.parallel.cache import Spread
from engine.parallel.choose import Machine, grids
from engine.parallel.mesh import Mesh
from engine.parallel.passes import PAST_BLOCKS, Layers, Step, choose_for_steps, predict_step, steps_of
from engine.parallel.probe import measure as measure_machine
from engine.parallel.split import Layout, teams_for
from engine.protocol import PromptChange, WorldSpec
from engine.stages import Plan
from engine.staggered import StaggeredSampler
from engine.world import World


@dataclass(frozen=True)
class Stages:
    """What is measured."""

    ranks: tuple[int, ...] = (2, 4)
    preset: str = "magi-1-4.5b-distill"
    scale: str = "tiny"
    steps: int | None = None  # of a block; None: the preset's
    repeats: int = 7
    device: str = "cpu"

    @property
    def note(self) -> str:
        return (
            f"{self.preset} at scale {self.scale}; a step in the mean of a stage of {self.plan.steps_per_stage}, all "
            f"layers, the slowest rank's time, best of {self.repeats}; frames: those that the cache keeps"
        )

    @property
    def plan(self) -> Plan:
        """Raises UnknownModel or RecipeError."""
        sampler = recipe.sampler(presets.find(self.preset), self.steps)
        if not isinstance(sampler, StaggeredSampler):
            raise UnknownModel(f"preset: expected one of the MAGI-1 family, got {self.preset!r}")
        return sampler.plan

    def rows(self, mesh: Mesh) -> Iterator[Row]:
        """All ranks call it together."""
        preset, model = magi.build(replace(presets.find(self.preset), sampler=self.plan), self.scale, mesh.device)
        kv, heads, window = model.geometry.kv, model.network.config.heads, recipe.kv_policy(preset).window
        machine, layers = measure_machine(mesh, heads, kv.head_dim, model.dtype), _layers(model)
        steps = steps_of(self.plan, preset.frames_per_block, window)
        possible = _layouts(mesh.ranks, model, self.plan, steps)
        chosen, _ = choose_for_steps(possible, steps, layers, machine)
        trials = [Trial(mesh, preset, model, layout, machine) for layout in possible]
        for _ in range(self.repeats + 1):  # in turn, so that what disturbs one disturbs all
            for trial in trials:
                trial.run()
        for trial in trials:
            taken_s, sent = min(trial.taken_s[1:]) / len(steps), trial.sent_bytes() // len(steps)
            stage_s = kv.layers * sum(predict_step(trial.layout, step, layers, machine) for step in steps)
            way = trial.layout
            yield Row(mesh.ranks, window or 0, str(way), taken_s, stage_s / len(steps), sent, way == chosen)


class Trial:
    """A world in mid-course on one layout, to be moved on by a block again and again."""

    def __init__(self, mesh: Mesh, preset: Preset, model: MagiModel, layout: Layout, machine: Machine) -> None:
        self.layout, self._mesh, self._sent = layout, mesh, 0
        self.taken_s: list[float] = []
        spread = Spread.over(mesh.grid(layout), model.geometry.kv, machine, beside=_layers(model).beside)
        sampler, rule = StaggeredSampler(preset.sampler), recipe.kv_policy(preset)
        caches = recipe.caches(model, preset, rule, sampler, spread=spread)
        spec = WorldSpec(preset.name, (PromptChange(0.0, "a"),))
        quick = StaggeredSampler(replace(sampler.plan, steps=sampler.plan.window))
        self._world = World(spec, model, quick, caches, branching=spread.branching)
        self._generator = Generator(model, "none")
        for _ in range(PAST_BLOCKS):
            self._generator.next_block(self._world)
        self._world.sampler = sampler

    def run(self) -> None:
        self.taken_s.append(seconds(self._mesh, self._make_a_block))

    def _make_a_block(self) -> None:
        before = sum(self._mesh.sent_bytes.values())
        self._generator.next_block(self._world)
        self._sent = sum(self._mesh.sent_bytes.values()) - before

    def sent_bytes(self) -> int:
        """Of the last block, over all ranks."""
        total = torch.tensor([self._sent], dtype=torch.int64, device=self._mesh.device)
        return int(self._mesh.everyone.sum(total, "count"))


def _layouts(ranks: int, model: MagiModel, plan: Plan, steps: Sequence[Step]) -> list[Layout]:
    """All that there is enough to share for."""
    rule, most = StaggeredSampler(plan), max(len(step.blocks.spans) for step in steps)
    cfg = teams_for(rule.branches, rule.caches)
    found = grids(ranks, model.geometry.kv, model.network.config.heads, pipeline=True, cfg=cfg)
    return [each for each in found if each.pipeline <= most]


def _layers(model: MagiModel) -> Layers:
    parameters = sum(p.numel() for name, p in model.network.named_parameters() if ".layers." in name)
    return Layers.of(model.geometry.kv, model.network.config.heads, parameters, model.dtype.itemsize)
