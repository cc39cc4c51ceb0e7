"""From a preset's values to what makes its worlds: sampler, KV policy, generator, caches.

The one place where rows of the table meet the machinery. Knows no clock, no scheduling and no link.
"""

from __future__ import annotations

from dataclasses import replace

from engine.generator import Generator
from engine.kvcache import policy
from engine.kvcache.cache import KVCache
from engine.kvcache.policy import Policy
from engine.kvcache.pool import PageFormat, PagePool
from engine.kvcache.staggered import check_policy
from engine.layers.attention import Attention, sdpa
from engine.models import BlockModel, presets
from engine.models.presets import Preset
from engine.parallel.cache import Spread
from engine.samplers import FewStep, FlowODE, Sampler, ShiftedFlow
from engine.stages import Plan, PlanError
from engine.staggered import StaggeredSampler


class RecipeError(ValueError):
    """A value that a preset's sampler cannot work with."""


def sampler(preset: Preset, steps: int | None = None) -> Sampler:
    """The sampler of a preset, with another number of steps where asked for. Raises RecipeError."""
    if steps is not None and not 1 <= steps <= 1000:
        raise RecipeError(f"steps: expected 1 to 1000, got {steps}")
    match preset.sampler:
        case presets.FewStep() as spec:
            schedule = ShiftedFlow(spec.shift)
            counted = spec.steps if steps is None else evenly(steps)
            times = schedule.warp(counted) if spec.warp or steps is not None else tuple(map(float, counted))
            return FewStep(schedule, times, context_time=spec.context_time, noise_context=spec.noise_context)
        case presets.Flow() as spec:
            schedule = ShiftedFlow(spec.shift)
            return FlowODE(schedule, schedule.warp(evenly(steps or spec.steps)), spec.guidance)
        case Plan() as plan:
            return StaggeredSampler(_with_steps(plan, steps))
    raise RecipeError(f"{preset.name}: expected a sampler of the table, got {type(preset.sampler).__name__}")


def _with_steps(plan: Plan, steps: int | None) -> Plan:
    try:
        return plan if steps is None else replace(plan, steps=steps)
    except PlanError as error:
        raise RecipeError(str(error)) from error


def evenly(steps: int) -> tuple[int, ...]:
    """`steps` positions counted from 1000 down, 0 left out."""
    return tuple(round(1000 * (steps - i) / steps) for i in range(steps))


def kv_policy(preset: Preset, text: str = "") -> Policy:
    """The preset's policy with the words of `text` in place of its own. Raises PolicyError."""
    rule = policy.parse(text, policy.parse(preset.kv)).check(preset.frames_per_block)
    if isinstance(preset.sampler, Plan):
        check_policy(rule)
    return rule


def generator(model: BlockModel, preset: Preset) -> Generator:
    return Generator(model, preset.recache)


def caches(
    model: BlockModel,
    preset: Preset,
    rule: Policy,
    sampler: Sampler,
    most_frames: int = 0,
    attend: Attention = sdpa,
    spread: Spread | None = None,
) -> tuple[KVCache, ...]:
    """Caches for one world with a pool of their own, as many as its sampler needs; or a rank's `spread` of them.

    Raises SplitError where a spread shares out branches of guidance that the sampler does not have.

    A policy that lets the cache grow needs `most_frames`, the latent frames the world will ever have.
    """
    per_block = model.geometry.frames_per_block
    held, needed = rule.most_held(per_block), most_frames + per_block
    held = needed if held is None else min(held, needed) if most_frames else held
    form = PageFormat(spread.kv if spread else model.geometry.kv, model.dtype, rule.store)
    count = len(spread.branching.mine(sampler.branches, sampler.caches)) if spread else sampler.caches
    pool = PagePool(form, (held + recache_room(preset, held)) * count, model.device)
    make = spread.cache if spread else KVCache
    return tuple(make(pool, rule, per_block, attend) for _ in range(count))


def recache_room(preset: Preset, held: int) -> int:
    """Pages a world needs beside the `held` ones while its past is computed again."""
    return preset.recache_room(held)
