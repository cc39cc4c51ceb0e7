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
    cache_bytes: int  # of pages on the device
    host_bytes: int  # of pages that wait in host memory, at most
    kind: str  # worlds of one kind cost the same

    def open(self) -> World:
        """Raises SignalError on prompts that cannot be, CacheFull if the memory cannot be had."""
        model, preset, spread = self.loaded.model, self.loaded.preset, self.loaded.spread
        attend = self.loaded.attend
        caches = recipe.caches(model, preset, self.policy, self.sampler, attend=attend, spread=spread)
        branching = spread.branching if spread else ALL_BRANCHES
        return self.loaded.world(self.spec, model, self.sampler, caches, branching=branching)


def load(name: str, config: EngineConfig, pulse: Callable[[], None]) -> Loaded:
    """The model of this name. `pulse` is called before each of its forward passes.

    Raises UnknownModel, SpecError, DeviceUnavailable, MissingFiles, WeightsError or another ValueError.
    """
    preset = presets.find(name)
    ends(recipe.kv_policy(preset), preset.frames_per_block)
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


def plan(loaded: Loaded, spec: WorldSpec, budget_bytes: int | None, host_budget_bytes: int | None = None) -> Plan:
    """What a world would need. Raises SpecError, RecipeError or PolicyError.

    The budgets are those of all worlds together: for pages on the device, and for those that wait in host memory.
    """
    g = loaded.model.geometry
    asked = {"width": (spec.width, g.width), "height": (spec.height, g.height), "fps": (spec.fps, g.fps)}
    for name, (wanted, made) in asked.items():
        if wanted is not None and wanted != made:
            raise SpecError(f"{name}: {loaded.preset.name} makes {made:g}, got {wanted:g}")
    if spec.lead_ms is not None and not 0 <= spec.lead_ms <= MOST_LEAD_MS:
        raise SpecError(f"lead_ms: expected 0 to {MOST_LEAD_MS}, got {spec.lead_ms}")
    sampler = recipe.sampler(loaded.preset, spec.steps)
    policy = recipe.kv_policy(loaded.preset, spec.kv)
    kept, held = ends(policy, g.frames_per_block)
    each = PageFormat(g.kv, loaded.model.dtype, policy.store).page_bytes * sampler.caches
    cache_bytes = (held + recipe.recache_room(loaded.preset, held)) * each
    host_bytes = kept * each if policy.offload == "host" else 0
    for name, size, budget in (
        ("KV budget", cache_bytes, budget_bytes),
        ("host budget", host_bytes, host_budget_bytes),
    ):
        if budget is not None and size > budget:
            raise SpecError(f"{name}: expected a world of at most {budget} bytes ({budget // each} frames), got {size}")
    kind = f"{loaded.preset.name} steps={spec.steps or 'preset'} kv={policy}"
    return Plan(loaded, spec, sampler, policy, cache_bytes, host_bytes, kind)


def ends(policy: Policy, frames_per_block: int) -> tuple[int, int]:
    """The most frames kept, and of those on the device. Raises SpecError if that grows: a live world has no end."""
    kept, held = policy.most_kept(frames_per_block), policy.most_held(frames_per_block)
    if kept is None or held is None:
        wanted = "window=N" if policy.window is None else f"remember=N beside topk={policy.topk}"
        raise SpecError(f"kv: expected {wanted}, since a live world has no end; got {policy}, which keeps every frame")
    return kept, held


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
