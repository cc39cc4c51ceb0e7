"""A Wan preset from its published files to pictures: small networks in files of the published forms."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from engine import recipe
from engine.decoder import decode
from engine.models import BlockSignals, presets
from engine.models.files import MissingFiles
from engine.models.presets import LoadOptions, Preset
from engine.models.taehv import Taehv
from engine.models.umt5 import UMT5Sizes, build, official_names
from engine.models.wan import WanTransformer
from engine.models.wan_model import ARCHITECTURES, Architecture, SizeError, WanModel, verify
from engine.models.wan_names import transformer_names, vae_names
from engine.models.wan_vae import WanVae
from engine.protocol import PromptChange, WorldSpec
from engine.weights import WeightsError
from engine.world import World
from tests.small_wan import CONFIG, VAE, random_weights

pytest.importorskip("transformers", reason="the text encoder needs transformers (the models extra)")
pytest.importorskip("ftfy", reason="cleaning needs ftfy (the models extra)")
TEXT = UMT5Sizes(vocabulary=12, dim=CONFIG.text_dim, attention_dim=8, ffn_dim=10, heads=2, layers=2)


@pytest.fixture(autouse=True)
def small_architecture(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(ARCHITECTURES, "t2v-1.3b", Architecture(replace(CONFIG, text_len=16), VAE, TEXT))
    yield


def state(module: nn.Module) -> dict[str, Tensor]:
    random_weights(module)
    return module.state_dict()


def network() -> dict[str, Tensor]:
    return state(WanTransformer(replace(CONFIG, text_len=16)))


def text_state() -> dict[str, Tensor]:
    module = build(TEXT).to_empty(device="cpu")
    weights = state(module)
    return {official: weights[theirs].clone() for theirs, official in official_names(TEXT.layers).items()}


def write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({"<pad>": 0, "</s>": 1, "<unk>": 2, "a": 3, "red": 4, "fox": 5}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    wrap: Any = PreTrainedTokenizerFast  # untyped
    wrap(tokenizer_object=words, pad_token="<pad>", eos_token="</s>").save_pretrained(folder)


def publish(root: Path, preset: Preset) -> None:
    """Files as the publishers name and wrap them."""
    for file in preset.files:
        path = root / file.repo / file.path.replace("/*", "")
        path.parent.mkdir(parents=True, exist_ok=True)
        if file.part == "transformer":
            torch.save({"generator_ema": {f"model.{k}": v for k, v in network().items()}}, path)
        elif file.part == "lora":
            torch.save({"generator_lora": adapters()}, path)
        elif file.part == "decoder":
            torch.save(state(WanVae(VAE)), path)
        elif file.part == "text_encoder":
            torch.save(text_state(), path)
        elif file.part == "tiny_decoder":
            torch.save(state(Taehv()), path)
        else:
            write_tokenizer(path)


def adapters() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    names = [f"blocks.{i}.{layer}" for i in range(2) for layer in ("self_attn.q", "cross_attn.o")]
    sides = {"A": (2, CONFIG.dim), "B": (CONFIG.dim, 2)}
    return {
        f"base_model.model.{name}.lora_{side}.weight": torch.randn(shape, generator=generator)
        for name in names
        for side, shape in sides.items()
    }


def loaded(name: str, root: Path, **options: object) -> WanModel:
    values = LoadOptions(folder=root, width=32, height=32)
    model = presets.load(name, replace(values, **options))  # type: ignore[arg-type]
    assert isinstance(model, WanModel)
    return model


@pytest.mark.parametrize("name", ["self-forcing-1.3b", "causvid-1.3b", "longlive-1.3b", "longlive-infinity-1.3b"])
def test_a_preset_goes_from_published_files_to_pictures(tmp_path: Path, name: str) -> None:
    preset = presets.find(name)
    publish(tmp_path, preset)
    verify(preset, {file.part: tmp_path / file.repo / file.path.replace("/*", "") for file in preset.files})
    model = loaded(name, tmp_path)
    sampler = recipe.sampler(preset)
    caches = recipe.caches(model, preset, recipe.kv_policy(preset), sampler)
    prompts = (PromptChange(0.0, "a red fox"), PromptChange(0.5, "a fox", "auto"))
    world = World(WorldSpec(name, prompts), model, sampler, caches)
    generator, counts = recipe.generator(model, preset), []
    for _ in range(3):
        counts.append(decode(world, generator.next_block(world)).shape)
    assert counts == [(9, 32, 32, 3), (12, 32, 32, 3), (12, 32, 32, 3)]
    assert world.prompts.at(1).change.mode == preset.switch[0]


def test_adapters_change_the_network_and_its_digest(tmp_path: Path) -> None:
    publish(tmp_path, presets.find("longlive-1.3b"))
    model = loaded("longlive-1.3b", tmp_path)
    base = network()
    changed = {k for k, v in model.network.state_dict().items() if not torch.equal(v, base[k])}
    assert changed == {f"blocks.{i}.{layer}.weight" for i in range(2) for layer in ("self_attn.q", "cross_attn.o")}
    publish(tmp_path, presets.find("self-forcing-1.3b"))
    assert model.digest() != loaded("self-forcing-1.3b", tmp_path).digest()


def test_prompts_are_padded_and_the_text_encoder_is_kept_or_freed(tmp_path: Path) -> None:
    publish(tmp_path, presets.find("self-forcing-1.3b"))
    keeping, freeing = (loaded("self-forcing-1.3b", tmp_path, keep_text_encoder=keep) for keep in (True, False))
    prompts = [model.encode("a red fox", None) for model in (keeping, freeing)]
    assert torch.equal(prompts[0].embedding, prompts[1].embedding)
    assert prompts[0].embedding.shape == (1, 16, CONFIG.text_dim)
    assert prompts[0].embedding[0, 0].any() and not prompts[0].embedding[0, 8:].any()
    assert keeping.text._module is not None and freeing.text._module is None  # type: ignore[attr-defined]


@pytest.mark.parametrize("keep", [True, False])
def test_a_wrong_text_encoder_is_found_on_load_and_not_at_the_first_prompt(tmp_path: Path, keep: bool) -> None:
    preset = presets.find("self-forcing-1.3b")
    publish(tmp_path, preset)
    file = next(file for file in preset.files if file.part == "text_encoder")
    torch.save({"norm.weight": torch.zeros(CONFIG.text_dim)}, tmp_path / file.repo / file.path)
    with pytest.raises(WeightsError, match="text encoder: expected .* missing"):
        loaded(preset.name, tmp_path, keep_text_encoder=keep)


def test_the_tiny_decoder_gives_as_many_pictures(tmp_path: Path) -> None:
    publish(tmp_path, presets.find("self-forcing-1.3b"))
    model = loaded("self-forcing-1.3b", tmp_path, decoder="tiny")
    conditioning = model.condition(BlockSignals(0, 0, 3, model.encode("a", None)))
    pictures, state = model.decoder.decode(torch.zeros(3, 16, 4, 4), conditioning, None)
    more, _ = model.decoder.decode(torch.zeros(3, 16, 4, 4), conditioning, state)
    assert (pictures.shape, more.shape) == ((9, 32, 32, 3), (12, 32, 32, 3))


def test_folders_of_diffusers_load_as_well(tmp_path: Path) -> None:
    preset = presets.find("wan2.1-1.3b")
    publish(tmp_path, preset)
    transformer, decoder = preset.files[0], preset.files[1]
    sizes = ARCHITECTURES["t2v-1.3b"]
    weights = network()
    theirs = {old: weights[new] for old, new in transformer_names(sizes.network).items()}
    save_file(theirs, tmp_path / transformer.repo / transformer.path)
    autoencoder = state(WanVae(VAE))
    theirs = {old: autoencoder[new] for old, new in vae_names(VAE).items() if new in autoencoder}
    torch.save(theirs, tmp_path / decoder.repo / decoder.path)
    model = loaded("wan2.1-1.3b", tmp_path)
    assert all(torch.equal(value, weights[name]) for name, value in model.network.state_dict().items())


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    preset = presets.find("self-forcing-1.3b")
    with pytest.raises(MissingFiles, match=r"self_forcing_dmd\.pt"):
        loaded(preset.name, tmp_path)
    publish(tmp_path, preset)
    with pytest.raises(SizeError, match="expected multiples of 16, got 40x32"):
        loaded(preset.name, tmp_path, width=40)
    with pytest.raises(WeightsError, match="dtype: expected float32, bfloat16 or float16, got 'floaty'"):
        loaded(preset.name, tmp_path, dtype="floaty")
    torch.save({"generator": {"model.x": torch.zeros(1)}}, tmp_path / preset.files[0].repo / preset.files[0].path)
    with pytest.raises(WeightsError, match=r"self_forcing_dmd\.pt: expected \d+ tensors, got 1"):
        loaded(preset.name, tmp_path)


def test_a_model_can_be_loaded_in_half_precision(tmp_path: Path) -> None:
    publish(tmp_path, presets.find("self-forcing-1.3b"))
    model = loaded("self-forcing-1.3b", tmp_path, dtype="bfloat16")
    assert {p.dtype for p in model.network.parameters()} == {model.dtype} == {torch.bfloat16}
