"""Models by name, loaded with what their worlds need: sampler, policy, caches, and the card that viewers see.

Knows no link and no clock.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor

from engine import recipe
from engine.config import EngineConfig
from engine.decoder import decode
from engine.generator import Generator
from engine.guidance import ALL_BRANCHES
from engine.kvcache.policy import Policy
from engine.kvcache.pool import PageFormat
from engine.layers.attention import Attention, choose
from engine.models import BlockModel, Conditioning, Context, presets
from engine.parallel.cache import Spread
from engine.protocol import ModelCard, PromptChange, WorldSpec
from engine.samplers import Sampler
from engine.world import World

log = logging.getLogger(__name__)

MOST_LEAD_MS = 30_000
UNBOUNDED_CACHE_BYTES = 1 << 30  # for a world whose policy lets its cache grow, where no budget is set


class DeviceUnavailable(ValueError):
    """A device that this machine lacks, or that torch cannot compute on here."""


class SpecError(ValueError):
    """A world that cannot be opened as asked; the message says what was expected and what came."""


@dataclass(frozen=True)
class Loaded:
    """One model, ready for worlds."""

    preset: presets.Preset
    model: BlockModel
    watched: Watched  # the same, as its engine sees it
    generator: Generator
    attend: Attention
    attention: str  # which backend that is
    digest: str
    spread: Spread | None = None  # of its worlds over ranks
    world: Callable[..., World] = World  # what opens one, with the arguments of `World`

    @property
    def card(self) -> ModelCard:
        g, m = self.model.geometry, self.model
        pictures = g.frames_per_block * g.pictures_per_frame
        return ModelCard(
            name=self.preset.name,
            width=g.width,
            height=g.height,
            fps=g.fps,
            frames_per_block=pictures,
            signals=m.signals,
            action_keys=m.action_keys,
            action_values=m.action_values,
            suggestions=m.suggestions,
            digest=self.digest,
        )


@dataclass(frozen=True)
class Plan:
    """A world that could be opened: what it needs before anything is allocated."""

    loaded: Loaded
    spec: WorldSpec
    sampler: Sampler
    policy: Policy
    cache_bytes: int
    kind: str  # worlds of one kind cost the same

    def open(self) -> World:
        """Raises SignalError on prompts that cannot be, CacheFull if the budget does not hold one block."""
        form = PageFormat(self.loaded.model.geometry.kv, self.loaded.model.dtype, self.policy.store)
        frames = self.cache_bytes // (form.page_bytes * self.sampler.caches)
        grown = frames - self.loaded.model.geometry.frames_per_block
        model, preset, attend = self.loaded.model, self.loaded.preset, self.loaded.attend
        caches = recipe.caches(model, preset, self.policy, self.sampler, grown, attend, self.loaded.spread)
        spread = self.loaded.spread
        branching = spread.branching if spread else ALL_BRANCHES
        return self.loaded.world(self.spec, model, self.sampler, caches, branching=branching)


def load(name: str, config: EngineConfig, pulse: Callable[[], None]) -> Loaded:
    """The model of this name. `pulse` is called before each of its forward passes.

    Raises UnknownModel, DeviceUnavailable, MissingFiles, WeightsError or another ValueError.
    """
    preset = presets.find(name)
    options = presets.LoadOptions(
        device=device_named(config.device),
        folder=config.weights_dir,
        decoder=cast(Literal["full", "tiny"], config.decoder),
        keep_text_encoder=config.keep_text_encoder,
        compile=config.compile,
    )
    bare = presets.load(name, options)
    attention = choose("auto", bare.device, bare.dtype)
    watched = Watched(bare, pulse)
    model = cast(BlockModel, watched)
    generator = recipe.generator(model, preset)
    return Loaded(preset, model, watched, generator, attention.attend, attention.name, bare.digest())


def plan(loaded: Loaded, spec: WorldSpec, budget_bytes: int | None) -> Plan:
    """What a world would need. Raises SpecError, RecipeError or PolicyError."""
    g = loaded.model.geometry
    asked = {"width": (spec.width, g.width), "height": (spec.height, g.height), "fps": (spec.fps, g.fps)}
    for name, (wanted, made) in asked.items():
        if wanted is not None and wanted != made:
            raise SpecError(f"{name}: {loaded.preset.name} makes {made:g}, got {wanted:g}")
    if spec.lead_ms is not None and not 0 <= spec.lead_ms <= MOST_LEAD_MS:
        raise SpecError(f"lead_ms: expected 0 to {MOST_LEAD_MS}, got {spec.lead_ms}")
    sampler = recipe.sampler(loaded.preset, spec.steps)
    policy = recipe.kv_policy(loaded.preset, spec.kv)
    form = PageFormat(g.kv, loaded.model.dtype, policy.store)
    most = policy.most_held(g.frames_per_block)
    each = form.page_bytes * sampler.caches
    frames = (budget_bytes or UNBOUNDED_CACHE_BYTES) // each if most is None else most
    frames += recipe.recache_room(loaded.preset, frames) if most is not None else 0
    if most is None and frames < 2 * g.frames_per_block:
        least = 2 * each * g.frames_per_block
        raise SpecError(f"KV budget: expected at least {least} bytes for two blocks, got {budget_bytes}")
    kind = f"{loaded.preset.name} steps={spec.steps or 'preset'} kv={policy}"
    return Plan(loaded, spec, sampler, policy, frames * each, kind)


def warm_up(loaded: Loaded, budget_bytes: int | None) -> tuple[str, dict[str, float]]:
    """Two blocks that nobody sees: what is slow only once is over. The kind, and what the second cost by stage."""
    text = loaded.model.suggestions[0] if loaded.model.suggestions else "a world"
    wanted = plan(loaded, WorldSpec(loaded.preset.name, (PromptChange(0.0, text),)), budget_bytes)
    world = wanted.open()
    try:
        for _ in range(2):
            began_s = time.monotonic()
            loaded.watched.begin()
            block = loaded.generator.next_block(world)
            made_s = time.monotonic()
            decode(world, block)
            stages_s = {"denoise": made_s - began_s, "decode": time.monotonic() - made_s}
    finally:
        world.close()
    log.info("%s is warm: %s", loaded.preset.name, ", ".join(f"{k} {1000 * v:.0f} ms" for k, v in stages_s.items()))
    return wanted.kind, stages_s


class Watched:
    """A model that lets its engine breathe: `pulse` is called before each forward pass. All else shows through."""

    def __init__(self, model: BlockModel, pulse: Callable[[], None]) -> None:
        self._model, self.pulse = model, pulse
        self.commit_s = 0.0  # spent in clean passes since `begin`

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def begin(self) -> None:
        """A new block begins."""
        self.commit_s = 0.0

    def forward(self, x: Tensor, t: Tensor, conditioning: Conditioning, context: Context) -> Tensor:
        self.pulse()
        began_s = time.monotonic()
        out = self._model.forward(x, t, conditioning, context)
        if getattr(context, "clean", False):
            self.commit_s += time.monotonic() - began_s
        return out


def device_named(name: str) -> str:
    """What `auto`, `cpu`, `cuda` or `cuda:N` means here. Raises DeviceUnavailable."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    there = ["cpu", *(["cuda"] if count else []), *(f"cuda:{i}" for i in range(count))]
    if name == "auto":
        return "cuda" if count else "cpu"
    if name not in there:
        raise DeviceUnavailable(f"device: expected auto, {', '.join(there)}; got {name!r}")
    return name
