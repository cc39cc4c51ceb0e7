"""Where the golden tensors of MAGI-1 are, and how a case is read: everything comes from its folder.

The folder is INFERIX_GOLDEN_MAGI, else ../shared/golden_magi beside the checkout, else the subset in
tests/data/golden_magi. Weights, configurations and texts are turned into ours here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from engine.kvcache.cache import KVCache
from engine.kvcache.policy import parse
from engine.kvcache.pool import PageFormat, PagePool
from engine.models import Geometry, KVGeometry, LatentShape, Prompt
from engine.models.magi import MagiConfig, MagiTransformer
from engine.models.magi_model import MagiModel
from engine.models.magi_text import Row, SpecialTokens, TokenFlags, caption_row
from engine.models.magi_vae import MagiVAE, MagiVAEConfig
from engine.noise import Noise, Purpose
from engine.protocol import PromptChange, WorldSpec
from engine.stages import Distilled, Guided, Plan
from engine.staggered import StaggeredSampler
from engine.world import World

ROOT = Path(__file__).parent.parent
torch.set_num_threads(1)  # tensors this small only make threads wait for one another


def _folder() -> Path:
    if named := os.environ.get("INFERIX_GOLDEN_MAGI"):
        return Path(named)
    beside = ROOT.parent / "shared" / "golden_magi"
    return beside if beside.is_dir() else ROOT / "tests" / "data" / "golden_magi"


GOLDEN = _folder()


def cases(*groups: str) -> list[Any]:
    """Parameters for pytest: (group, name) of every case (JSON with tensors beside it); or one skipped, with why."""
    files = [p for group in groups for p in sorted((GOLDEN / group).glob("*.json")) if p.stem != "weights"]
    found = [pytest.param(p.parent.name, p.stem, id=p.stem) for p in files if p.with_suffix(".safetensors").is_file()]
    reason = f"no golden case of {', '.join(groups)} in {GOLDEN}"
    return found or [pytest.param("", "", id=groups[0], marks=pytest.mark.skip(reason=reason))]


def load_case(group: str, name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Configuration and tensors of one case."""
    return json.loads((GOLDEN / group / f"{name}.json").read_text()), load_file(GOLDEN / group / f"{name}.safetensors")


def error(got: Tensor, want: Tensor) -> float:
    """max |a - b| / std(golden)"""
    assert got.shape == want.shape, f"expected shape {tuple(want.shape)}, got {tuple(got.shape)}"
    return float((got.double() - want.double()).abs().max() / want.double().std())


def config_of(fields: dict[str, Any]) -> MagiConfig:
    duplicated = fields["half_channel_vae"]
    return MagiConfig(
        layers=fields["num_layers"],
        hidden=fields["hidden_size"],
        ffn=fields["ffn_hidden_size"],
        heads=fields["num_attention_heads"],
        kv_heads=fields["num_query_groups"],
        head_dim=fields["kv_channels"],
        latent_channels=fields["in_channels"] // (2 if duplicated else 1),
        duplicate_channels=duplicated,
        rescale=fields["x_rescale_factor"],
        gated=fields["gated_linear_unit"],
        caption_channels=fields["caption_channels"],
        caption_tokens=fields["caption_max_length"],
        eps=fields["layernorm_epsilon"],
    )


def transformer(config: dict[str, Any], weights: str) -> MagiTransformer:
    model = MagiTransformer(config_of(config["model_config"]))
    model.load_state_dict(load_file(GOLDEN / weights), strict=True)
    return model.eval().requires_grad_(False)


def prompts(y: Tensor, mask: Tensor) -> tuple[Prompt, ...]:
    """One prompt per stored row, of the positions that count."""
    return tuple(Prompt("", row[0][keep[0] > 0][None]) for row, keep in zip(y, mask, strict=True))


def distil(case: dict[str, Any]) -> float | None:
    """The second scalar of the distilled models' time embedding."""
    steps, interval = int(case["num_steps"]), int(case["distill_interval"])
    if not case["config"]["engine_config"]["distill"]:
        return None
    return 8 / interval if steps == 12 else steps / 2


FLAGS = {
    "PAD_HQ": "quality",
    "PAD_DURATION": "duration",
    "PAD_STATIC": "static",
    "PAD_DYNAMIC": "dynamic",
    "PAD_BORDERNESS": "borderness",
    "PAD_THREE_D_MODEL": "model_3d",
    "PAD_TWO_D_ANIME": "anime_2d",
    "NEG_PROMPT": "negative",
}


def flags_of(case: Mapping[str, Any]) -> TokenFlags:
    """The special tokens that were on, by the names of the reference's switches."""
    on = case["env_flags"]
    return TokenFlags(**{name: switch in on for switch, name in FLAGS.items()})


def special_tokens(path: str = "magi_text/tiny_special_tokens.safetensors") -> SpecialTokens:
    data = load_file(GOLDEN / path)
    return SpecialTokens(data["caption_token"], data["logo_token"], data["other_tokens"])


def text_rows(caption: Row, null: Row, flags: TokenFlags, tokens: SpecialTokens, blocks: int) -> list[Row]:
    """What each generated block reads, when the world ends after `blocks` of them."""
    if not caption.mask.any():
        return [null] * blocks
    return [caption_row(caption, flags, tokens, blocks - i) for i in range(blocks)]


def plan_of(case: Mapping[str, Any]) -> Plan:
    """The timetable of a case."""
    run, engine = case["config"]["runtime_config"], case["config"]["engine_config"]
    scales = (tuple(run[name]) for name in ("cfg_t_range", "prev_chunk_scales", "text_scales"))
    distilled = Distilled(engine["distill_nearly_clean_chunk_threshold"], case.get("prev_chunks_scale", 0.7))
    return Plan(
        steps=run["num_steps"],
        guidance=distilled if engine["distill"] else Guided(*scales),
        window=run["window_size"],
        reaches=tuple(run["noise2clean_kvrange"]),
        clean_reach=run["clean_chunk_kvrange"],
        clean_t=run["clean_t"],
        pattern=engine["shortcut_mode"],
    )


def model_of(case: Mapping[str, Any], data: Mapping[str, Tensor]) -> MagiModel:
    """The case's model behind the engine's contract; every prompt is the case's caption."""
    network = transformer(dict(case["config"]), case["weights"])
    config, channels = network.config, network.config.caption_channels
    latent = LatentShape(*data["noise"].shape[1:2], *data["noise"].shape[3:])
    kv = KVGeometry(config.layers, config.kv_heads, config.head_dim, latent.height * latent.width // 4)
    run = case["config"]["runtime_config"]
    geometry = Geometry(latent, kv, run["chunk_width"], 4, latent.width * 8, latent.height * 8, run["fps"])
    valid, stored = case["caption_valid_tokens"], data["caption_embs"][0, 0]
    padded = torch.cat([stored, stored.new_zeros(config.caption_tokens - len(stored), channels)])
    row = Row(padded, torch.arange(config.caption_tokens) < valid)
    tokens = special_tokens(case["special_tokens"])
    autoencoder = MagiVAE(MagiVAEConfig(z_channels=latent.channels, width=256, depth=1, heads=2))
    return MagiModel("magi", geometry, network, lambda text: row, autoencoder, tokens, flags_of(case))


def injected(noise: Tensor, width: int) -> Noise:
    """The stored noise (1, C, T, H, W), block by block."""

    def draw(purpose: Purpose, block: int, step: int, shape: tuple[int, ...]) -> Tensor:
        part = noise[0].transpose(0, 1)[block * width : (block + 1) * width]
        assert part.shape == shape, f"noise of block {block}: expected {shape}, got {tuple(part.shape)}"
        return part

    return draw


def world_of(
    model: MagiModel, sampler: StaggeredSampler, noise: Noise | None = None, kv: str = "full", pages: int = 256
) -> World:
    form = PageFormat(model.geometry.kv, model.dtype, parse(kv).store)
    cache = KVCache(PagePool(form, pages), parse(kv), model.geometry.frames_per_block)
    spec = WorldSpec("magi", (PromptChange(0.0, "a caption"),))
    return World(spec, model, sampler, (cache,), noise)
