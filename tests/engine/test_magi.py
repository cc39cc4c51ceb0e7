"""MAGI-1 from published files to pictures, with small networks in files of the published forms; and what it refuses."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from engine.generator import Generator
from engine.kvcache.deal import Blocks, Deal, Span
from engine.kvcache.staggered import StaggeredContext
from engine.layers.attention import sdpa
from engine.models import BlockSignals, Prompt, magi_load
from engine.models.files import MAGI_REPOSITORY, MissingFiles
from engine.models.magi import MagiConditioning, MagiTransformer, frequencies
from engine.models.magi_load import Architecture, Captions, load, load_transformer, verify
from engine.models.magi_model import SizeError, geometry
from engine.models.magi_text import SpecialTokens, SpecialTokensMissing
from engine.models.magi_vae import MagiVAE, MagiVAEConfig, TileMismatch, Tiling, blend
from engine.models.presets import PRESETS, LoadOptions, Preset
from engine.protocol import PromptChange
from engine.stages import Distilled, Guided, Plan, PlanError
from engine.weights import WeightsError
from tests.small_magi import CONFIG, VAE, random_weights, small_model, small_preset, small_world

transformers = pytest.importorskip("transformers", reason="captions need transformers (the models extra)")
PRESET = replace(PRESETS["magi-1-4.5b-distill"], width=48, height=32, frames_per_block=2, kv="window=10")
CAPTION_CHANNELS = CONFIG.caption_channels


# ------------------------------------------------------------------------------------------------ published files


@pytest.fixture(autouse=True)
def small_architecture(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(magi_load.ARCHITECTURES, "4.5b", Architecture(CONFIG, VAE))
    yield


def state(module: nn.Module) -> dict[str, Tensor]:
    random_weights(module, 0.1)
    return module.state_dict()


def write_t5(folder: Path) -> None:
    """A T5 encoder of a few numbers, and a tokeniser that knows a few letters."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    config = transformers.T5Config(
        vocab_size=16,
        d_model=CAPTION_CHANNELS,
        d_kv=4,
        d_ff=8,
        num_layers=1,
        num_heads=2,
        feed_forward_proj="gated-gelu",
    )
    torch.manual_seed(0)
    transformers.T5EncoderModel(config).save_pretrained(folder)
    words = {word: i for i, word in enumerate(["<pad>", "</s>", "<unk>", "a", "b", "cat", "dog"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )
    fast.save_pretrained(folder)


def write_tokens(folder: Path, channels: int = CAPTION_CHANNELS) -> None:
    generator = np.random.default_rng(0)
    arrays = {
        name: generator.standard_normal((rows, channels))
        for name, rows in (("caption_token", 1), ("logo_token", 1), ("other_tokens", 100))
    }
    np.savez(folder / "special_tokens.npz", **arrays)  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Everything in its place, the transformer in two shards."""
    root = tmp_path / MAGI_REPOSITORY
    places = ("ckpt/magi/4.5B_distill/inference_weight.distill", "ckpt/vae", "ckpt/t5/t5-v1_1-xxl")
    weights, vae, t5 = (root / place for place in places)
    for path in (weights, vae, t5):
        path.mkdir(parents=True)
    tensors = state(MagiTransformer(CONFIG))
    shards: dict[str, dict[str, Tensor]] = {f"model-0000{i}-of-00002.safetensors": {} for i in (1, 2)}
    for i, (name, value) in enumerate(tensors.items()):
        shards[list(shards)[i % 2]][name] = value
    for shard, part in shards.items():
        save_file(part, weights / shard)
    where = {name: shard for shard, part in shards.items() for name in part}
    (weights / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    save_file(state(MagiVAE(VAE)), vae / "diffusion_pytorch_model.safetensors")
    write_t5(t5)
    write_tokens(root)
    return tmp_path


def test_a_preset_goes_from_its_files_to_pictures(folder: Path) -> None:
    model = load(PRESET, LoadOptions(folder=folder))
    preset = replace(small_preset(Plan(4, Distilled(), window=2)), name=PRESET.name)
    generator, world = small_world(preset, model)
    block = generator.next_block(world)
    assert block.latents.shape == (2, 4, 4, 6)
    pictures, after = model.decoder.decode(block.latents, block.conditioning, None)
    assert pictures.shape == (8, 32, 48, 3) and pictures.dtype == torch.uint8 and after is None
    assert len(model.digest()) == 32
    world.close()


def test_a_picture_encodes_to_one_latent_frame_and_a_clip_to_a_quarter_of_its_pictures(folder: Path) -> None:
    encoder = load(PRESET, LoadOptions(folder=folder)).encoder
    for pictures, frames in ((1, 1), (8, 2)):
        assert encoder.encode(torch.full((pictures, 32, 48, 3), 9, dtype=torch.uint8)).shape == (frames, 4, 4, 6)


def test_every_absent_file_is_named(folder: Path) -> None:
    (folder / MAGI_REPOSITORY / "ckpt/vae/diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(MissingFiles, match="ckpt/vae/diffusion_pytorch_model.safetensors"):
        load(PRESET, LoadOptions(folder=folder))


def test_without_the_special_tokens_the_message_says_where_they_come_from(folder: Path) -> None:
    (folder / MAGI_REPOSITORY / "special_tokens.npz").unlink()
    with pytest.raises(SpecialTokensMissing, match="example/assets/special_tokens.npz of the MAGI-1 source repository"):
        load(PRESET, LoadOptions(folder=folder))


def test_special_tokens_of_another_size_are_refused(folder: Path) -> None:
    write_tokens(folder / MAGI_REPOSITORY, CAPTION_CHANNELS + 1)
    with pytest.raises(SpecialTokensMissing, match=r"expected other_tokens >= 17 x 6, got \(100, 7\)"):
        load(PRESET, LoadOptions(folder=folder))


def test_special_tokens_are_rounded_through_half_precision(folder: Path) -> None:
    tokens = SpecialTokens.load(folder / MAGI_REPOSITORY, CAPTION_CHANNELS)
    assert tokens.others.dtype == torch.float32 and torch.equal(tokens.others, tokens.others.half().float())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop("rope.bands"), r"1 missing \(rope.bands\)"),
        (lambda t: t.update(extra=torch.zeros(1)), r"1 unexpected \(extra\)"),
        (lambda t: t.update({"rope.bands": torch.zeros(3)}), r"rope.bands: expected \[1\], got \[3\]"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_and_says_why(tmp_path: Path, change: Any, said: str) -> None:
    tensors = dict(state(MagiTransformer(CONFIG)))
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=said):
        load_transformer(CONFIG, tmp_path, torch.float32, torch.device("cpu"), sdpa)


def test_files_can_be_checked_without_loading_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = folder / MAGI_REPOSITORY
    parts = {
        "transformer": root / "ckpt/magi/4.5B_distill/inference_weight.distill/model.safetensors.index.json",
        "decoder": root / "ckpt/vae/diffusion_pytorch_model.safetensors",
    }
    with pytest.raises(WeightsError, match="expected SHA-256 b54bc664"):
        verify(PRESET, parts)  # type: ignore[arg-type]
    digest = hashlib.sha256((root / "special_tokens.npz").read_bytes()).hexdigest()
    monkeypatch.setattr(magi_load, "TOKENS_SHA256", digest)
    verify(PRESET, parts)  # type: ignore[arg-type]


def test_float8_weights_sit_in_the_inner_layers_and_run(tmp_path: Path) -> None:
    config = replace(CONFIG, layers=3, fp8=True)
    tensors = {name: _filled(name, value) for name, value in MagiTransformer(config).state_dict().items()}
    save_file(tensors, tmp_path / "model.safetensors")
    network = load_transformer(config, tmp_path, torch.float32, torch.device("cpu"), sdpa)
    eights = {name for name, value in network.state_dict().items() if value.dtype == torch.float8_e4m3fn}
    assert eights and all(".layers.1." in name for name in eights)
    model = small_model(replace(PRESET, sampler=Plan(4, Distilled())), config)
    model.network = network
    generator, world = small_world(replace(PRESET, sampler=Plan(4, Distilled())), model)
    assert bool(generator.next_block(world).latents.isfinite().all())


def _filled(name: str, value: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(len(name))
    if "scale" in name:
        return torch.full_like(value, 0.5)
    return (torch.randn(value.shape, generator=generator) * 0.1).to(value.dtype)


def test_loading_in_bfloat16_keeps_what_must_be_exact(folder: Path) -> None:
    model = load(PRESET, LoadOptions(folder=folder, dtype="bfloat16"))
    kinds = {name: value.dtype for name, value in model.network.state_dict().items()}
    attention = "videodit_blocks.layers.0.self_attention"
    assert kinds[f"{attention}.linear_qkv.q.weight"] == torch.bfloat16
    assert kinds[f"{attention}.q_layernorm.weight"] == kinds["x_embedder.weight"] == torch.float32
    generator, world = small_world(replace(small_preset(Plan(4, Distilled(), window=2)), name="b"), model)
    block = generator.next_block(world)
    assert block.latents.dtype == torch.bfloat16 and bool(block.latents.isfinite().all())
    assert world.in_flight["latents"][0].dtype == torch.float32


# ----------------------------------------------------------------------------------------------------------- text


def test_captions_are_cleaned_encoded_and_padded(folder: Path) -> None:
    captions = Captions(folder / MAGI_REPOSITORY / "ckpt/t5/t5-v1_1-xxl", torch.device("cpu"), keep=False)
    row, shouted = captions("a cat"), captions("  A   CAT ")
    assert row.embedding.shape == (800, CAPTION_CHANNELS) and int(row.mask.sum()) == 3  # with the end mark
    assert torch.equal(row.embedding, shouted.embedding)
    assert not torch.equal(row.kept, captions("a dog").kept)


def test_a_text_encoder_that_is_not_whole_is_refused(folder: Path) -> None:
    t5 = folder / MAGI_REPOSITORY / "ckpt/t5/t5-v1_1-xxl"
    config = json.loads((t5 / "config.json").read_text())
    (t5 / "config.json").write_text(json.dumps(config | {"num_layers": 2}))
    with pytest.raises(WeightsError, match=r"tensors of T5's encoder are missing or other \(encoder.block.1"):
        Captions(t5, torch.device("cpu"))("a cat")
    (t5 / "config.json").unlink()
    with pytest.raises(WeightsError, match="expected T5's configuration, weights and tokeniser, got no config.json"):
        Captions(t5, torch.device("cpu"))("a cat")


# ------------------------------------------------------------------------------------------------------ arithmetic


def test_one_block_alone_gives_the_flow_that_the_contract_names() -> None:
    """forward is noise - clean: the other way round than the network's velocity."""
    model, context = small_model(), StaggeredContext(Deal(Blocks(0, 2, (Span(0, 2),))), sdpa)
    prompt = model.encode("a", None)
    conditioning = model.condition(BlockSignals(0, 0, 2, prompt))
    x = torch.randn(1, 2, 4, 4, 6, generator=torch.Generator().manual_seed(0))
    t = torch.full((1, 2), 0.5)
    assert torch.equal(model.forward(x, t, conditioning, context), -model.network(x, t[:, :1], conditioning, context))
    without = model.forward(x, t, model.negative(conditioning), context)
    assert not torch.equal(without, model.forward(x, t, conditioning, context))


def test_a_block_does_not_depend_on_those_after_it() -> None:
    """To the bit: what enters later, with another text, changes no product of an older block's."""
    network = small_model().network
    x = torch.randn(1, 6, 4, 4, 6, generator=torch.Generator().manual_seed(0))
    spans, times = (Span(0, 2), Span(0, 4), Span(0, 6)), torch.tensor([[0.7, 0.4, 0.1]])
    texts = [Prompt("", torch.randn(1, n, CAPTION_CHANNELS)) for n in (5, 5, 5, 9)]
    calls = (MagiConditioning(texts[0], prompts=(texts[0], texts[1], last)) for last in texts[2:])
    same, other = (network(x, times, call, StaggeredContext(Deal(Blocks(0, 2, spans)), sdpa)) for call in calls)
    assert torch.equal(same[:, :4], other[:, :4]) and not torch.equal(same[:, 4:], other[:, 4:])


def test_a_text_of_no_tokens_adds_nothing() -> None:
    network = small_model().network
    empty = Prompt("", torch.zeros(1, 0, CAPTION_CHANNELS))
    x, view = torch.randn(1, 2, 4, 4, 6), StaggeredContext(Deal(Blocks(0, 2, (Span(0, 2),))), sdpa)
    assert bool(network(x, torch.zeros(1, 1), MagiConditioning(empty, prompts=(empty,)), view).isfinite().all())


def test_frequencies_are_within_a_bit_of_the_formula() -> None:
    exact = 10000 ** (-torch.arange(128, dtype=torch.float64) / 128)
    assert (frequencies(torch.device("cpu")).double() / exact - 1).abs().max() < 1e-6


@pytest.mark.parametrize(("spans", "said"), [([(2, 2)], "range of a block"), ([(0, 9)], "range of a block")])
def test_a_range_that_cannot_be_seen_is_refused(spans: list[tuple[int, int]], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        StaggeredContext(Deal(Blocks(0, 2, tuple(Span(*s) for s in spans))), sdpa)
    with pytest.raises(ValueError, match="has no past"):
        StaggeredContext(Deal(Blocks(2, 2, (Span(0, 4),))), sdpa)


@pytest.mark.parametrize(("width", "height"), [(40, 32), (48, 40), (16, 32)])
def test_a_picture_size_the_grid_does_not_fit_is_refused(width: int, height: int) -> None:
    with pytest.raises(SizeError, match=f"expected multiples of 16 from 32 on, got {width}x{height}"):
        geometry(CONFIG, VAE, PRESET, width, height)


@pytest.mark.parametrize(
    "values",
    [
        {"steps": 10},
        {"window": 0},
        {"reaches": (5, 0)},
        {"clean_reach": 0},
        {"pattern": "8,8"},
    ],
)
def test_a_timetable_that_cannot_be_is_refused(values: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"steps": 8, "guidance": Distilled()} | values
    with pytest.raises(PlanError, match=f"{'steps' if 'window' in values else next(iter(values))}: expected"):
        Plan(**arguments)


def test_guidance_that_does_not_fit_together_is_refused() -> None:
    with pytest.raises(PlanError, match="as many scales as ranges"):
        Guided(starts=(0.0, 0.5))


# ---------------------------------------------------------------------------------------------------- autoencoder


def autoencoder(tiling: Tiling | None) -> MagiVAE:
    vae = MagiVAE(VAE, tiling)
    random_weights(vae, 0.05)
    return vae


def test_one_tile_that_covers_everything_is_no_tiling() -> None:
    video = torch.randn(1, 3, 8, 32, 48, generator=torch.Generator().manual_seed(0))
    whole, one = autoencoder(None), autoencoder(Tiling((None, None, None), (0.0, 0.0, 0.0)))
    assert torch.equal(whole.encode_mean(video), one.encode_mean(video))
    latents = whole.encode_mean(video)
    assert torch.equal(whole.decode_video(latents), one.decode_video(latents))


def test_every_latent_frame_of_a_block_is_shown_in_full() -> None:
    """A last tile of one latent frame gives one picture in the published program; a world's clock needs all four."""
    vae, latents = autoencoder(Tiling((8, 32, 32))), torch.randn(3, 4, 4, 6)
    assert vae.decode_video(latents.transpose(0, 1)[None]).shape[2] == 8 + 1
    pictures, _ = vae.decode(latents, MagiConditioning(Prompt("", torch.zeros(1, 1, 6))), None)
    assert len(pictures) == 12


@pytest.mark.parametrize("tiling", [Tiling((10, 32, 32)), Tiling((8, 32, 32), (0.0, 0.3, 0.3))])
def test_tiles_that_cut_patches_are_refused(tiling: Tiling) -> None:
    with pytest.raises(TileMismatch, match="expected tile and stride in multiples of"):
        autoencoder(tiling).encode_mean(torch.zeros(1, 3, 8, 32, 48))


def test_a_clip_that_is_no_multiple_of_the_patch_is_refused() -> None:
    with pytest.raises(TileMismatch, match=r"expected multiples of \(4, 8, 8\), got \(6, 32, 48\)"):
        autoencoder(None).encode_mean(torch.zeros(1, 3, 6, 32, 48))


def test_blending_fades_from_the_one_before_to_the_new_one() -> None:
    before, new = torch.zeros(1, 1, 1, 1, 4), torch.ones(1, 1, 1, 1, 4)
    assert blend(before, new, -1, 2).flatten().tolist() == [0.0, 0.5, 1.0, 1.0]
    assert torch.equal(blend(before, new, -1, 0), new)


def test_real_sizes_decode_a_block_in_two_tiles_of_time() -> None:
    config = MagiVAEConfig(width=256, depth=0, heads=2)
    vae = MagiVAE(config, Tiling((12, None, None), (0.0, 0.0, 0.0)))
    random_weights(vae, 0.05)
    tiles: list[int] = []
    vae.decoder.register_forward_hook(lambda module, args, out: tiles.append(args[0].shape[2]))
    vae.decode_video(torch.zeros(1, 16, 6, 4, 4))
    assert tiles == [3, 3]


def test_the_generator_leaves_a_past_alone_that_knows_no_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    preset: Preset = small_preset()
    generator, world = small_world(preset, small_model(preset))
    generator.next_block(world)
    monkeypatch.setattr(Generator, "_recache", lambda self, world: pytest.fail("nothing is to be computed again"))
    at = world.steer(PromptChange(0.0, "b", "recache"))
    while world.block <= at:
        generator.next_block(world)
