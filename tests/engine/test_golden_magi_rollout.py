"""Whole MAGI-1 roll-outs through generator, world, cache and sampler, against the public implementation's.

Compared: every emitted block, every call of the model (times, ranges, texts), every velocity, some states between
steps, raw branches where stored, and what the cache holds in the end.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.branches import Call, StaggeredModel, Step
from engine.generator import Generator
from engine.kvcache.staged import StagedBlock
from engine.kvcache.staggered import StaggeredContext
from engine.models.magi import MagiConditioning
from engine.models.magi_model import MagiModel
from engine.stages import Guided
from engine.staggered import StaggeredSampler
from engine.world import World
from tests.golden_magi import cases, error, injected, load_case, model_of, plan_of, world_of

pytestmark = pytest.mark.golden
TOLERANCE = 1e-4
ULP = 1.2e-7  # of a time near 1
CASES = cases("magi_rollout", "magi_prefix")


@dataclass
class ModelCall:
    """One call of the network, as the trace describes it."""

    x: Tensor
    t: Tensor
    dropped: tuple[bool, ...]
    texts: list[int]
    start: int | None  # block; None: blocks as a batch
    ranges: list[list[int]]  # in tokens
    out: Tensor


@dataclass
class Log:
    calls: list[ModelCall] = field(default_factory=list)
    steps: list[tuple[Call, Step, list[ModelCall]]] = field(default_factory=list)


@dataclass(frozen=True)
class Recording(StaggeredSampler):
    """The sampler, with a record of what each step asked and got."""

    log: Log = field(default_factory=Log)

    def step(self, model: StaggeredModel, world: World, call: Call, staged: StagedBlock | None) -> Step:
        before = len(self.log.calls)
        done = super().step(model, world, call, staged)
        self.log.steps.append((call, done, self.log.calls[before:]))
        return done


def listen(model: MagiModel, log: Log) -> None:
    """Note every call of the model's network."""

    def note(module: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
        x, t, conditioning, context = args
        assert isinstance(conditioning, MagiConditioning)
        staggered = context if isinstance(context, StaggeredContext) else None
        per_frame, width = model.geometry.kv.tokens, model.geometry.frames_per_block
        spans = staggered.spans if staggered else []
        ranges = [[s.first * per_frame, s.end * per_frame] for s in spans]
        start = staggered.start // width if staggered else None
        texts = [p.embedding.shape[1] for p in conditioning.prompts]
        log.calls.append(ModelCall(x, t, conditioning.dropped, texts, start, ranges, out))

    model.network.register_forward_hook(note)


def stored(latents: Tensor) -> Tensor:
    """(F, C, H, W) as the fixtures have it: (1, C, F, H, W)"""
    return latents.transpose(0, 1)[None]


@pytest.mark.parametrize(("group", "name"), CASES)
def test_a_roll_out_equals_the_reference_call_by_call(group: str, name: str) -> None:
    case, data = load_case(group, name)
    model, width = model_of(case, data), case["config"]["runtime_config"]["chunk_width"]
    sampler = Recording(plan_of(case), blocks=case["chunk_num"], skip=False)
    listen(model, sampler.log)
    world = world_of(model, sampler, injected(data["noise"], width))
    generator, errors = Generator(model), {}
    if case["prefix_latent_frames"]:
        generator.prefill(world, data["prefix_latent"][0].transpose(0, 1))
    prefix_calls = len(sampler.log.calls)
    assert world.block == case["prefix_latent_frames"] // width
    for i, frames in enumerate(case["emitted_chunk_frames"]):
        block = generator.next_block(world)
        assert block.latents.shape[0] == frames
        errors[f"chunk{i:02d}"] = error(stored(block.latents), data[f"chunk{i:02d}"])
    assert len(sampler.log.steps) == case["total_denoise_steps"]
    before = [entry for entry in case["trace"] if entry["kind"] != "denoise"]
    assert len(before) == (prefix_calls > 0)
    if before:
        compare_prefix(before[0], sampler.log.calls[0], data, errors)
    for number, (entry, step) in enumerate(zip(case["trace"][len(before) :], sampler.log.steps, strict=True)):
        compare_calls(entry, step[2], model.geometry.kv.tokens * width)
        compare_step(f"step{number + len(before):03d}", step, data, errors)
    compare_states(sampler, data, errors)
    compare_cache(world, data, errors)
    compare_texts(model, world, case, data)
    assert (torch.tensor(sampler.plan.times) - data["timesteps"]).abs().max() <= ULP
    assert max(errors.values()) < TOLERANCE, {k: e for k, e in errors.items() if e >= TOLERANCE}


def compare_prefix(entry: dict[str, Any], call: ModelCall, data: dict[str, Tensor], errors: dict[str, float]) -> None:
    """Of the reference's branches only the one that fills the cache matters, and it is the only one we compute."""
    writer = next(c for c in entry["model_calls"] if c["update_kv_cache"])
    assert call.ranges == writer["kv_range"] and list(call.dropped) == writer["caption_dropped"]
    assert (call.t - torch.tensor([entry["timestep"]])).abs().max() <= ULP
    errors["prefix x"] = error(call.x.transpose(1, 2), data["step000.model_x"])


def compare_calls(entry: dict[str, Any], calls: list[ModelCall], tokens: int) -> None:
    assert len(calls) == len(entry["model_calls"])
    assert (calls[0].t[0, : len(entry["timestep"])] - torch.tensor(entry["timestep"])).abs().max() <= ULP
    for ours, theirs in zip(calls, entry["model_calls"], strict=True):
        assert list(ours.dropped) == theirs["caption_dropped"] and ours.texts == theirs["text_tokens"]
        assert ours.x.shape[:2] == (theirs["batch"], theirs["latent_frames"])
        assert (ours.t - torch.tensor(theirs["t"])).abs().max() < 1e-6
        if ours.start is not None:
            assert ours.start == theirs["slice_point"] and ours.ranges == theirs["kv_range"]
        else:
            assert theirs["kv_range"] == [[i * tokens, (i + 1) * tokens] for i in range(theirs["batch"])]


def compare_step(
    key: str, step: tuple[Call, Step, list[ModelCall]], data: dict[str, Tensor], errors: dict[str, float]
) -> None:
    call, done, calls = step
    if f"{key}.model_x" in data:
        errors[f"{key}.x"] = error(stored(torch.cat([e.latents for e in call.entries])), data[f"{key}.model_x"])
        velocity = stored(torch.cat(done.velocities))
        errors[f"{key}.v"] = error(velocity, data[f"{key}.velocity"][:, :, -velocity.shape[2] :])
    for i, branch in enumerate(calls):
        if f"{key}.branch{i}" in data:
            errors[f"{key}.branch{i}"] = error(branch.out.transpose(1, 2), data[f"{key}.branch{i}"])


def compare_states(sampler: Recording, data: dict[str, Tensor], errors: dict[str, float]) -> None:
    """The whole video's latents after some Euler steps: noise where nothing has begun."""
    state, times = data["noise"].clone(), sampler.plan.times
    following = dict(zip(times, times[1:], strict=False))
    for number, (call, done, _) in enumerate(sampler.log.steps):
        for entry, v in zip(call.active, done.velocities, strict=True):
            frames = slice(entry.block * len(v), (entry.block + 1) * len(v))
            state[0, :, frames] = (entry.latents + v * (following[entry.t] - entry.t)).transpose(0, 1)
        key = f"after_denoise_step{number:03d}.x"
        if key in data:
            errors[key] = error(state, data[key])


def compare_cache(world: World, data: dict[str, Tensor], errors: dict[str, float]) -> None:
    for key, want in data.items():
        if key.startswith("cache.final.layer"):
            k, v = world.caches[0].between(int(key.removeprefix("cache.final.layer")), 0, len(world.caches[0].held))
            errors[key] = error(torch.cat([k, v], -1).flatten(0, 1), want)


def compare_texts(model: MagiModel, world: World, case: dict[str, Any], data: dict[str, Tensor]) -> None:
    """What each generated block read."""
    if "y" not in data:
        return
    prompt, blocks = world.signals()[0].prompt, case["chunk_num"]
    for block in range(case["prefix_latent_frames"] // model.geometry.frames_per_block, blocks):
        kept = data["emb_masks"][0, block] > 0
        assert torch.equal(model.text(prompt, blocks - block).embedding[0], data["y"][0, block][kept])
        assert torch.equal(model.null.embedding[0], data["y"][1, block][data["emb_masks"][1, block] > 0])


@pytest.mark.parametrize(("group", "name"), CASES)
def test_work_of_zero_weight_is_left_out_and_nothing_changes(group: str, name: str) -> None:
    case, data = load_case(group, name)
    if not isinstance(plan_of(case).guidance, Guided):
        pytest.skip("a distilled model has one branch")
    model, width = model_of(case, data), case["config"]["runtime_config"]["chunk_width"]
    worlds = [
        world_of(model, StaggeredSampler(plan_of(case), case["chunk_num"], skip), injected(data["noise"], width))
        for skip in (True, False)
    ]
    generator = Generator(model)
    for world in worlds:
        if case["prefix_latent_frames"]:
            generator.prefill(world, data["prefix_latent"][0].transpose(0, 1))
    for i in range(len(case["emitted_chunk_frames"])):
        spared, full = (generator.next_block(world).latents for world in worlds)
        assert error(spared, full) < 1e-5
        assert error(stored(spared), data[f"chunk{i:02d}"]) < TOLERANCE
    (run, skipped), (all_run, none) = (world.sampler.counts(world) for world in worlds)  # type: ignore[attr-defined]
    assert none == 0 and run + skipped == all_run
    plan = plan_of(case)
    assert skipped > 0 or all(plan.weights(t).unconditional for t in plan.times[:-1])


@pytest.mark.parametrize(("group", "name"), CASES)
def test_the_smallest_window_that_holds_every_range_changes_nothing(group: str, name: str) -> None:
    case, data = load_case(group, name)
    model, plan = model_of(case, data), plan_of(case)
    width = case["config"]["runtime_config"]["chunk_width"]
    frames = max((*plan.reaches, plan.clean_reach)) * width if plan.reaches else case["chunk_num"] * width
    world = world_of(
        model,
        StaggeredSampler(plan, case["chunk_num"]),
        injected(data["noise"], width),
        f"window={frames} offload=host",
        pages=frames,
    )
    generator, cache = Generator(model), world.caches[0]
    if case["prefix_latent_frames"]:
        generator.prefill(world, data["prefix_latent"][0].transpose(0, 1))
    for i in range(len(case["emitted_chunk_frames"])):
        assert error(stored(generator.next_block(world).latents), data[f"chunk{i:02d}"]) < TOLERANCE
        assert len(cache.held) <= frames
    assert cache.host.frames == cache.held
