"""A golden roll-out as a world of the engine: the case's values become a preset's row, its stored noise the world's.

Nothing here computes anything a user's world would not: generator, cache, sampler and model are the engine's.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from engine import recipe
from engine.generator import Generator
from engine.models import Conditioning, Context, Geometry, KVGeometry, LatentShape
from engine.models.presets import FewStep, Preset, Sizes
from engine.models.wan_model import WanModel
from engine.models.wan_vae import VaeConfig, WanDecoder, WanVae
from engine.noise import Noise, Purpose, Shape
from engine.protocol import PromptChange, PromptMode, WorldSpec
from engine.samplers import FewStep as FewStepSampler
from engine.samplers import to_clean
from engine.world import World
from tests.golden_wan import TOLERANCE, Case, close, transformer


@dataclass(frozen=True)
class Call:
    """One call of the model: (1, F) times, and latents and flow (1, F, C, H, W)."""

    t: Tensor
    x: Tensor
    flow: Tensor


@dataclass(eq=False)
class Recorded(WanModel):
    """The model, writing down its calls."""

    calls: list[Call] = field(default_factory=list)

    def forward(self, x: Tensor, t: Tensor, conditioning: Conditioning, context: Context) -> Tensor:
        flow = super().forward(x, t, conditioning, context)
        self.calls.append(Call(t.clone(), x.clone(), flow.clone()))
        return flow


class Watched(Generator):
    """The generator, keeping what the cache holds after each time the past was computed again."""

    after_recache: list[list[tuple[Tensor, Tensor]]]

    def _recache(self, world: World) -> None:
        super()._recache(world)
        self.after_recache.append([held(world, layer) for layer in range(self.model.geometry.kv.layers)])


def preset_of(case: Case) -> Preset:
    """The row that this case would be."""
    run, shape = case.config["run"], case.config["latent_shape"]
    window = run.get("local_attn_size", -1)
    words = ["full" if window == -1 else f"window={window}", f"sink={run.get('sink_size', 0)}"]
    if run.get("use_infinite_attention"):
        words.append("positions=window")
    steps = tuple(run["denoising_step_list"][: len(facts_of(case))])  # CausVid's lists end in a 0 that is not a step
    spec = FewStep(steps, run["timestep_shift"], run["warp_denoising_step"], float(run.get("context_noise", 0)))
    config = case.config["model"]
    heads = config["num_heads"]
    sizes = Sizes(
        0, config["num_layers"], heads, config["dim"] // heads, case.config["tokens_per_frame"], config["dim"], 0
    )
    return Preset(
        name=case.path.name,
        family="wan2.1",
        about="",
        loader="",
        architecture="",
        sampler=spec,
        kv=" ".join(words),
        width=shape["width"] * 8,
        height=shape["height"] * 8,
        fps=16.0,
        first_pictures=1,
        frames_per_block=run["num_frame_per_block"],
        sizes=sizes,
        switch=("recache", 1) if "global_sink" in run else ("cut", 1),
        recache="joint-keep-sink" if run.get("global_sink") else "joint",
        first_block_frames=1 if run.get("independent_first_frame") else None,
    )


def facts_of(case: Case) -> list[float]:
    """The times that the reference fed to the network, as far as the case says."""
    config, run = case.config, case.config["run"]
    times: list[float] | None = config.get("warped_denoising_steps") or config.get("effective_denoising_steps")
    if times is None:
        assert not run["warp_denoising_step"], "a case whose steps are warped says to what"
        times = [float(step) for step in run["denoising_step_list"] if step]
    return times


def few_step(rolled: Rollout) -> FewStepSampler:
    sampler = rolled.world.sampler
    assert isinstance(sampler, FewStepSampler)
    return sampler


def geometry_of(case: Case, preset: Preset) -> Geometry:
    shape, sizes = case.config["latent_shape"], preset.sizes
    return Geometry(
        latent=LatentShape(shape["channels"], shape["height"], shape["width"]),
        kv=KVGeometry(sizes.layers, sizes.kv_heads, sizes.head_dim, sizes.tokens_per_frame),
        frames_per_block=preset.frames_per_block,
        pictures_per_frame=4,
        width=preset.width,
        height=preset.height,
        fps=preset.fps,
        first_pictures=1,
        first_block_frames=preset.first_block_frames,
    )


@dataclass(eq=False)
class Rollout:
    """A world of a case, and how far it has come."""

    preset: Preset
    model: Recorded
    generator: Watched
    world: World
    latents: list[Tensor] = field(default_factory=list)  # (F, C, H, W) by block

    def run(self, frames: int, switches: Mapping[int, tuple[str, PromptMode]]) -> None:
        """Blocks until there are `frames` latent frames; a switch takes effect at the first block from its key on."""
        waiting = sorted(switches.items())
        while self.world.start < frames:
            while waiting and self.world.start >= waiting[0][0]:
                text, mode = waiting.pop(0)[1]
                self.world.steer(PromptChange(0.0, text, mode))
            self.latents.append(self.generator.next_block(self.world).latents)

    def prefill(self, latents: Tensor) -> None:
        self.latents += [block.latents for block in self.generator.prefill(self.world, latents)]

    @property
    def video(self) -> Tensor:
        """(1, F, C, H, W)"""
        return torch.cat(self.latents)[None]


def rollout(case: Case, prompts: Mapping[str, Tensor], noise: Noise, frames: int) -> Rollout:
    """A world of a case under its prompt "0", with room for `frames` latent frames; `prompts`: embeddings by text."""
    preset = preset_of(case)
    model = Recorded(
        name=case.path.name,
        geometry=geometry_of(case, preset),
        network=transformer(case.config["model"], case.tensors("weights")),
        text=prompts.__getitem__,
        decoder=WanDecoder(WanVae(VaeConfig(dim=1))),
    )
    generator = Watched(model, preset.recache)
    generator.after_recache = []
    sampler = recipe.sampler(preset)
    caches = recipe.caches(model, preset, recipe.kv_policy(preset), sampler, frames)
    world = World(WorldSpec(preset.name, (PromptChange(0.0, "0"),)), model, sampler, caches, noise)
    rolled = Rollout(preset, model, generator, world)
    assert list(few_step(rolled).times) == facts_of(case)
    return rolled


def stored_noise(
    geometry: Geometry,
    initial: Tensor,
    renoise: Tensor | Sequence[Tensor],
    draws: int,
    given: int = 0,
    skipped: int = 0,
) -> Noise:
    """The noise of a case as a world's stream.

    initial (1, F, C, H, W) begins at frame `skipped`; renoise begins at frame `given`, the first that is generated, as
    [blocks, steps - 1, 1, F, C, H, W] or one draw after the other, `draws` for each block.
    """
    before = next(block for block in itertools.count() if geometry.block_start(block) >= given)

    def draw(purpose: Purpose, block: int, step: int, shape: Shape) -> Tensor:
        if purpose == "initial":
            at = geometry.block_start(block) - skipped
            return initial[0, at : at + shape[0]]
        if isinstance(renoise, Tensor):
            return renoise[block - before, step, 0]
        return renoise[(block - before) * draws + step][0]

    return draw


def held(world: World, layer: int) -> tuple[Tensor, Tensor]:
    """Keys and values (1, tokens, heads, head_dim) that the world's cache holds, oldest first."""
    cache = world.caches[0]
    k, v = cache.select(layer, cache.held)
    return k.flatten(0, 1)[None], v.flatten(0, 1)[None]


def check_cache(
    got: Sequence[tuple[Tensor, Tensor]], expected: Mapping[str, Tensor], name: str, tolerance: float = TOLERANCE
) -> None:
    """The same keys and values, in front of the zeros that the reference's buffer ends with."""
    for layer, pair in enumerate(got):
        for kind, value in zip("kv", pair, strict=True):
            stored = expected[f"{name}.{layer}.{kind}"]
            close(value, stored[:, : value.shape[1]], tolerance)
            assert not stored[:, value.shape[1] :].any(), f"{name}: the reference holds more frames"


def check_calls(rolled: Rollout, expected: Mapping[str, Tensor], facts: Sequence[Mapping[str, Any]]) -> None:
    """Every stored call: its times, latents, flow and clean latents; and of all calls how many frames at what time."""
    schedule = few_step(rolled).schedule
    assert [call.x.shape[1] for call in rolled.model.calls] == [
        fact.get("frames", rolled.preset.frames_per_block) for fact in facts
    ]
    for call, fact in zip(rolled.model.calls, facts, strict=True):
        assert call.t.flatten()[0].item() == fact["timestep"]
    for name in sorted({key.rsplit(".", 1)[0] for key in expected if key.startswith("call.")}):
        call = rolled.model.calls[int(name.split(".")[1])]
        close(call.t, expected[f"{name}.t"].expand_as(call.t), 0.0)  # the reference prefills with one time for all
        close(call.x, expected[f"{name}.x"])
        close(call.flow, expected[f"{name}.flow"])
        sigma = schedule.sigma(call.t.flatten()[0].item())
        close(to_clean(call.x, call.flow, sigma), expected[f"{name}.x0"])
