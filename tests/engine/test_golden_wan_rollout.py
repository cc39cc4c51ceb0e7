"""Worlds of the Wan family against the reference's roll-outs, through generator, cache and sampler."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from engine.models.presets import Segments
from engine.protocol import PromptMode
from engine.segments import segments
from tests.golden_rollout import (
    Rollout,
    check_cache,
    check_calls,
    geometry_of,
    held,
    preset_of,
    rollout,
    stored_noise,
)
from tests.golden_wan import PIXEL_TOLERANCE, Case, cases, close, vae

pytestmark = pytest.mark.golden


def draws(inputs: Mapping[str, Tensor]) -> Tensor | list[Tensor]:
    if "renoise" in inputs:
        return inputs["renoise"]
    return [inputs[name] for name in sorted(inputs) if name.startswith("renoise.")]


def started(case: Case, inputs: Mapping[str, Tensor], prompts: Mapping[str, Tensor]) -> tuple[Rollout, int]:
    """The case's world, and how many frames it is to have."""
    preset = preset_of(case)
    initial = inputs.get("initial_latent")
    skipped = 0 if initial is None else initial.shape[1]
    frames = skipped + inputs["noise"].shape[1]
    steps = len(preset.sampler.steps)
    noise = stored_noise(geometry_of(case, preset), inputs["noise"], draws(inputs), steps - 1, skipped, skipped)
    world = rollout(case, prompts, noise, frames)
    if initial is not None:
        world.prefill(initial[0])
    return world, frames


def check_world(world: Rollout, case: Case, expected: Mapping[str, Tensor]) -> None:
    close(world.video, expected["latents"])
    check_calls(world, expected, case.config["calls"])
    layers = world.preset.sizes.layers
    check_cache([held(world.world, layer) for layer in range(layers)], expected, "cache")
    if "crossattn.0.k" in expected:
        prompt = world.world.signals()[0].prompt
        check_cache([prompt.cross[layer] for layer in range(layers)], expected, "crossattn")


@pytest.mark.parametrize("case", cases("Self-Forcing roll-out"))
def test_self_forcing_worlds_are_the_references(case: Case) -> None:
    inputs, expected = case.tensors("inputs"), case.tensors("expected")
    world, frames = started(case, inputs, {"0": inputs["prompt_embeds"]})
    world.run(frames, {})
    check_world(world, case, expected)
    tokens = len(world.world.caches[0].held) * case.config["tokens_per_frame"]
    assert tokens == case.config["calls"][-1]["local_end_index_after"]


@pytest.mark.parametrize("switched", [True, False], ids=["switch", "control"])
@pytest.mark.parametrize("case", cases("roll-out with a prompt switch"))
def test_a_prompt_switch_clears_cross_attention_and_keeps_the_past(case: Case, switched: bool) -> None:
    inputs, expected = case.tensors("inputs"), case.tensors("expected")
    world, frames = started(case, inputs, {"0": inputs["prompt_embeds_a"], "1": inputs["prompt_embeds_b"]})
    at = case.config["switch_before_block"] * case.config["run"]["num_frame_per_block"]
    switches: dict[int, tuple[str, PromptMode]] = {at: ("1", "cut")} if switched else {}
    world.run(frames, switches)
    name = "switch" if switched else "control"
    layers = range(world.preset.sizes.layers)
    close(world.video, expected[f"latents_{name}"])
    check_cache([held(world.world, layer) for layer in layers], expected, f"cache_{name}")
    if switched:
        prompt = world.world.signals()[0].prompt
        check_cache([prompt.cross[layer] for layer in layers], expected, "crossattn_switch")


@pytest.mark.parametrize("case", cases("LongLive roll-out"))
def test_longlive_worlds_are_the_references(case: Case) -> None:
    inputs, expected = case.tensors("inputs"), case.tensors("expected")
    embeds = {name.split(".")[1]: value for name, value in inputs.items() if name.startswith("prompt_embeds.")}
    world, frames = started(case, inputs, embeds)
    indices = case.config["switch_frame_indices"] or []
    world.run(frames, {index: (str(k + 1), "recache") for k, index in enumerate(indices)})
    check_world(world, case, expected)
    recached = [fact for fact in case.config["calls"] if fact["recache"]]
    assert len(world.generator.after_recache) == len(recached)
    for k, got in enumerate(world.generator.after_recache):
        check_cache(got, expected, f"after_recache.{k}")


@pytest.mark.parametrize("case", cases("CausVid roll-out"))
def test_causvid_worlds_are_the_references(case: Case) -> None:
    inputs, expected = case.tensors("inputs"), case.tensors("expected")
    world, frames = started(case, inputs, {"0": inputs["prompt_embeds"]})
    world.run(frames, {})
    check_world(world, case, expected)


@pytest.mark.parametrize("case", cases("roll-out in segments"))
def test_causvid_segments_are_the_references(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, expected = case.tensors("inputs"), case.tensors("expected")
    codec = vae(case.config["vae"], case.tensors("vae_weights"))
    rule = Segments(case.config["frames_per_segment"], case.config["num_overlap_frames"])
    geometry = geometry_of(case, preset_of(case))

    def opened(number: int) -> Rollout:
        given = rule.overlap if number else 0
        noise = stored_noise(geometry, inputs[f"noise.{number}"], inputs[f"renoise.{number}"], 0, given)
        rolled = rollout(case, {"0": inputs["prompt_embeds"]}, noise, rule.frames)
        close_world = rolled.world.close

        def closing() -> None:
            last[:] = [held(rolled.world, layer) for layer in range(rolled.preset.sizes.layers)]
            close_world()

        monkeypatch.setattr(rolled.world, "close", closing)
        return rolled

    last: list[tuple[Tensor, Tensor]] = []  # what the newest world's cache held at its end
    made = segments(opened(0).generator, codec, rule, lambda number: opened(number).world)
    pictures = []
    for number in range(case.config["num_rollout"]):
        segment = next(made)
        close(segment.latents[None], expected[f"segment_latents.{number}"], PIXEL_TOLERANCE)
        close(segment.next_start[None], expected[f"next_start_latents.{number}"], PIXEL_TOLERANCE)
        pictures.append(segment.pictures)
    video = torch.cat(pictures)
    assert len(video) == case.config["output_pixel_frames"]
    close(video, expected["video_0_1"], PIXEL_TOLERANCE)
    check_cache(last, expected, "cache", PIXEL_TOLERANCE)
