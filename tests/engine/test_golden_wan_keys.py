"""Every preset of the Wan family at its real size on the meta device: the names and shapes of the published files."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

from engine.models.presets import PRESETS, Preset
from engine.models.wan import WanTransformer
from engine.models.wan_model import ARCHITECTURES, geometry
from engine.models.wan_names import transformer_names, vae_names
from engine.models.wan_vae import VaeConfig, WanVae
from engine.weights import WRAPPERS
from tests.golden_wan import folder

KEYS = folder() / "keys"
LISTS = {"t2v-1.3b": "wan2.1_t2v_1.3b_dit", "t2v-14b": "wan2.1_t2v_14b_dit", "i2v-14b": "wan2.1_i2v_14b_dit"}
pytestmark = [
    pytest.mark.golden,
    pytest.mark.skipif(not KEYS.is_dir(), reason=f"no key lists in {folder()}"),
]
WAN = [preset for preset in PRESETS.values() if preset.family == "wan2.1"]


def listed(name: str) -> dict[str, list[int]]:
    read: dict[str, Any] = json.loads((KEYS / f"{name}.json").read_text())
    return {key: shape for key, (shape, _) in read.items()}


def shapes(module: nn.Module) -> dict[str, list[int]]:
    return {name: list(value.shape) for name, value in module.state_dict().items()}


@pytest.mark.parametrize("preset", WAN, ids=lambda preset: preset.name)
def test_a_preset_has_the_published_names_shapes_and_sizes(preset: Preset) -> None:
    config = ARCHITECTURES[preset.architecture].network
    with torch.device("meta"):
        network = WanTransformer(config)
    assert shapes(network) == listed(LISTS[preset.architecture])
    assert sum(p.numel() for p in network.parameters()) == preset.sizes.parameters
    kv = geometry(config, VaeConfig(), preset, preset.width, preset.height).kv
    sizes = preset.sizes
    assert (kv.layers, kv.heads, kv.head_dim) == (sizes.layers, sizes.kv_heads, sizes.head_dim)
    assert (kv.tokens, config.dim, config.ffn_dim) == (sizes.tokens_per_frame, sizes.dim, sizes.ffn_dim)


def test_the_wrapped_generator_is_the_same_network() -> None:
    plain = {
        ".".join(part for part in name.split(".") if part not in WRAPPERS): shape
        for name, shape in listed("generator_1.3b_wrapped").items()
    }
    assert plain == listed("wan2.1_t2v_1.3b_dit")


def test_the_autoencoder_has_the_published_names_and_shapes() -> None:
    with torch.device("meta"):
        vae = WanVae(VaeConfig())
    assert shapes(vae) == listed("wan2.1_vae")
    assert sum(p.numel() for p in vae.parameters()) == WAN[0].sizes.decoder_parameters


def test_adapters_belong_to_layers_of_the_network() -> None:
    base = listed("wan2.1_t2v_1.3b_dit")
    for name, shape in listed("longlive_lora_rank256").items():
        layer, _, side = name.removeprefix("base_model.model.").partition(".lora_")
        outputs, inputs = base[f"{layer}.weight"]
        assert shape == ([256, inputs] if side == "A.weight" else [outputs, 256])


@pytest.mark.parametrize(("kind", "architecture"), [("t2v", "t2v-1.3b"), ("i2v", "i2v-14b")])
def test_names_of_diffusers_are_mapped_as_documented(kind: str, architecture: str) -> None:
    config = ARCHITECTURES[architecture].network
    documented = json.loads((folder() / "diffusers_equivalence" / f"dit_key_map_{kind}.json").read_text())
    expected = {
        theirs.replace("{i}", str(i)): official.replace("{i}", str(i))
        for official, theirs in documented.items()
        for i in range(config.num_layers)
    }
    assert transformer_names(config) == expected


def test_names_of_the_diffusers_autoencoder_are_mapped_as_documented() -> None:
    documented = json.loads((folder() / "diffusers_equivalence" / "vae_key_map.json").read_text())
    ours = vae_names(VaeConfig())
    assert {theirs: ours[theirs] for theirs in documented.values()} == {v: k for k, v in documented.items()}
