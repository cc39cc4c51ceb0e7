"""MAGI-1's presets at their real sizes on the meta device, and the timetables, against what was published."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from engine.branches import Call, StaggeredModel, Step
from engine.kvcache import policy
from engine.kvcache.staged import StagedBlock
from engine.models.magi import MagiTransformer
from engine.models.magi_load import ARCHITECTURES, TOKENS_SHA256
from engine.models.magi_model import geometry
from engine.models.magi_vae import LATENT_SCALE, MagiVAE, MagiVAEConfig
from engine.models.presets import PRESETS, Preset
from engine.stages import Distilled, Guided, Plan
from engine.staggered import Flight, StaggeredSampler
from engine.world import World
from tests.golden_magi import GOLDEN
from tests.small_magi import small_model, small_preset, small_world

KEYS, TABLES = GOLDEN / "keys", GOLDEN / "magi_schedule" / "tables.json"
LISTS = {
    "4.5b": "magi_4.5B_base",
    "24b": "magi_24B_base",
    "4.5b-fp8": "magi_4.5B_distill_quant",
    "24b-fp8": "magi_24B_distill_quant",
}
MAGI = [preset for preset in PRESETS.values() if preset.family == "magi-1"]
pytestmark = [
    pytest.mark.golden,
    pytest.mark.skipif(not KEYS.is_dir() or not TABLES.is_file(), reason=f"no key lists or timetables in {GOLDEN}"),
]


def listed(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((KEYS / f"{name}.json").read_text())
    return found


def shapes(module: nn.Module) -> dict[str, list[int]]:
    return {name: list(value.shape) for name, value in module.state_dict().items()}


def transformer(architecture: str) -> MagiTransformer:
    with torch.device("meta"):
        return MagiTransformer(ARCHITECTURES[architecture].network, torch.bfloat16)


@pytest.mark.parametrize("architecture", [a for a, name in LISTS.items() if (KEYS / f"{name}.json").is_file()])
def test_a_transformer_has_the_published_names_and_shapes(architecture: str) -> None:
    want = listed(LISTS[architecture])
    network = transformer(architecture)
    assert shapes(network) == {name: shape for name, (shape, _) in want.items()}
    held = {name: value.dtype for name, value in network.state_dict().items()}
    eights = {name for name, (_, dtype) in want.items() if dtype == "float8_e4m3fn"}
    assert {name for name, dtype in held.items() if dtype == torch.float8_e4m3fn} == eights


@pytest.mark.parametrize(
    "architecture", [a for a, name in LISTS.items() if (KEYS / f"{name}.runtime_dtype.json").is_file()]
)
def test_weights_are_held_in_the_precision_the_published_program_runs_them_in(architecture: str) -> None:
    want = {name: dtype for name, (_, dtype) in listed(f"{LISTS[architecture]}.runtime_dtype").items()}
    held = transformer(architecture).state_dict()
    assert {name: str(value.dtype).removeprefix("torch.") for name, value in held.items()} == want


def test_the_autoencoder_has_the_published_names_and_shapes() -> None:
    with torch.device("meta"):
        vae = MagiVAE(MagiVAEConfig())
    assert shapes(vae) == {name: shape for name, (shape, _) in listed("magi_vae").items()}
    fields = listed("magi_vae_config")["ddconfig"]
    assert (fields["video_size"], fields["video_length"], fields["embed_dim"]) == (256, 16, vae.config.width)


@pytest.mark.parametrize("preset", MAGI, ids=lambda preset: preset.name)
def test_a_preset_has_the_published_hyper_parameters(preset: Preset) -> None:
    repository_folder = preset.files[0].path.removesuffix("*")
    variant = next(v for v in listed("variants").values() if v["hf_folder"].endswith(repository_folder))
    config = ARCHITECTURES[preset.architecture].network
    assert (config.layers, config.hidden, config.ffn, config.gated) == (
        variant["layers"],
        variant["hidden"],
        variant["ffn"],
        variant["gated_mlp"],
    )
    assert (config.heads, config.kv_heads, config.head_dim) == (
        variant["q_heads"],
        variant["kv_heads"],
        variant["head_dim"],
    )
    assert (config.input_channels, config.latent_channels) == (variant["model_in_channels"], variant["latent_channels"])
    assert (config.rescale, config.condition, config.fp8) == (
        variant["x_rescale"],
        variant["cond_hidden"],
        variant["fp8"],
    )
    plan = preset.sampler
    assert (plan.steps, plan.window, list(plan.reaches)) == (
        variant["num_steps"],
        variant["window_size"],
        variant["noise2clean_kvrange"],
    )
    assert (plan.clean_reach, plan.clean_t, plan.pattern) == (
        variant["clean_chunk_kvrange"],
        variant["clean_t"],
        variant["shortcut_mode"],
    )
    assert (
        isinstance(plan.guidance, Distilled)
        == variant["distill"]
        == (StaggeredSampler(plan).plan.distil(0) is not None)
    )
    if isinstance(plan.guidance, Guided):
        scales = (plan.guidance.starts, plan.guidance.history, plan.guidance.text)
        assert [list(s) for s in scales] == [variant[n] for n in ("cfg_t_range", "prev_chunk_scales", "text_scales")]
    else:
        assert plan.guidance.nearly_clean == variant["nearly_clean_threshold"]
    kv = geometry(config, MagiVAEConfig(), preset, preset.width, preset.height).kv
    assert kv.tokens * preset.frames_per_block == variant["tokens_per_chunk"]
    block_bytes = 2 * 2 * kv.layers * kv.heads * kv.head_dim * kv.tokens * preset.frames_per_block
    assert block_bytes == variant["kv_bytes_per_chunk_bf16"]
    assert [preset.height, preset.width] == variant["default_size_hw"] and preset.fps == variant["fps"]
    assert LATENT_SCALE == variant["vae_scale_factor"]
    assert (preset.sizes.tokens_per_frame, preset.sizes.layers) == (kv.tokens, kv.layers)
    if not config.fp8:
        assert sum(p.numel() for p in transformer(preset.architecture).parameters()) == preset.sizes.parameters
    window = policy.parse(preset.kv).window
    assert window == max(plan.reaches) * preset.frames_per_block, "nothing that is read is ever let go of"


def test_time_grids_are_the_references_to_the_last_bit() -> None:
    for key, table in json.loads(TABLES.read_text())["timesteps_fp32"].items():
        steps, pattern = key.split("|")
        plan = Plan(int(steps), Distilled(), window=1, reaches=(1,), pattern=pattern)
        assert list(plan.times) == table["t"], key
        assert [plan.interval(i) for i in range(plan.steps)] == table["interval"], key


@dataclass(frozen=True)
class Timetable(StaggeredSampler):
    """Notes which blocks each step moves on, and at which step of their way; computes nothing."""

    seen: list[list[tuple[int, int]]] = field(default_factory=list)

    def step(self, model: StaggeredModel, world: World, call: Call, staged: StagedBlock | None) -> Step:
        self.seen.append([(entry.block, self.plan.times.index(entry.t)) for entry in call.active])
        return Step(tuple(torch.zeros_like(entry.latents) for entry in call.active), 0)


def test_blocks_start_and_end_at_the_references_stages() -> None:
    model = small_model()
    for table in json.loads(TABLES.read_text())["stage_sequences"]:
        first, blocks, window = table["chunk_offset"], table["chunk_num"], table["window_size"]
        plan = Plan(window, Distilled(), window=window, reaches=(1,))
        sampler = Timetable(plan, blocks)
        _, world = small_world(small_preset(plan), model)
        world.block, world.in_flight = first, vars(Flight(stage=first, first=first))
        while world.block < blocks:
            sampler.advance(model, [world], [])
            world.block += 1
        assert [stage[0][0] for stage in sampler.seen] == table["chunk_start"]
        assert [stage[-1][0] + 1 for stage in sampler.seen] == table["chunk_end"]
        assert [stage[-1][1] for stage in sampler.seen] == table["t_start"]
        assert [stage[0][1] + 1 for stage in sampler.seen] == table["t_end"]


def test_the_special_tokens_are_known_by_their_hash() -> None:
    facts = GOLDEN / "magi_text" / "special_tokens_facts.json"
    if not facts.is_file():
        pytest.skip(f"no facts about the special tokens in {GOLDEN}")
    assert json.loads(facts.read_text())["sha256"] == TOKENS_SHA256
