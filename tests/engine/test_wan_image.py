"""The image-to-video model: its picture encoder against transformers' CLIP, and a world that follows its picture."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from engine.models import BlockSignals
from engine.models.clip_vision import MEAN, STD, ClipConfig, ClipVision
from engine.models.wan import WanTransformer
from engine.models.wan_model import WanImageModel, geometry
from engine.models.wan_vae import WanDecoder, WanEncoder, WanVae
from engine.movie import write_png
from engine.start import StartError, begin
from tests.golden_wan import folder
from tests.small_wan import CONFIG, VAE, embedding, random_weights, small_preset, small_world

CLIP = ClipConfig(dim=16, mlp_dim=24, heads=2, layers=3, patch=4, picture=8, out_dim=6)
PRESET = small_preset("window=0", 3)


def image_model() -> WanImageModel:
    network = WanTransformer(replace(CONFIG, in_dim=36, clip_dim=CLIP.dim))
    vae, clip = WanVae(VAE), ClipVision(CLIP)
    for module in (network, vae, clip):
        random_weights(module)
    return WanImageModel(
        name="small-i2v",
        geometry=geometry(CONFIG, VAE, PRESET, 32, 32),
        network=network,
        text=embedding,
        decoder=WanDecoder(vae),
        encoder=WanEncoder(vae),
        vae=vae,
        clip=clip,
    )


def test_picture_tokens_are_those_of_transformers_clip() -> None:
    transformers = pytest.importorskip("transformers", reason="equality with CLIP needs transformers (the dev extra)")
    sizes = {"hidden_size": CLIP.dim, "intermediate_size": CLIP.mlp_dim, "num_hidden_layers": CLIP.layers}
    sizes |= {"num_attention_heads": CLIP.heads, "image_size": CLIP.picture, "patch_size": CLIP.patch}
    theirs = transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**sizes, hidden_act="gelu")).eval()
    ours = ClipVision(CLIP)
    random_weights(ours)
    state = ours.state_dict()
    names = {
        "pre_layrnorm": "pre_norm",
        "post_layernorm": "post_norm",
        **{
            f"encoder.layers.{i}.{old}": f"transformer.{i}.{new}"
            for i in range(CLIP.layers)
            for old, new in (
                ("layer_norm1", "norm1"),
                ("layer_norm2", "norm2"),
                ("mlp.fc1", "mlp.0"),
                ("mlp.fc2", "mlp.2"),
                ("self_attn.out_proj", "attn.proj"),
            )
        },
    }
    wanted = {f"{old}.{kind}": state[f"{new}.{kind}"] for old, new in names.items() for kind in ("weight", "bias")}
    for i in range(CLIP.layers):
        for kind in ("weight", "bias"):
            parts = state[f"transformer.{i}.attn.to_qkv.{kind}"].chunk(3)
            for letter, part in zip("qkv", parts, strict=True):
                wanted[f"encoder.layers.{i}.self_attn.{letter}_proj.{kind}"] = part
    wanted["embeddings.class_embedding"] = state["cls_embedding"].flatten()
    wanted["embeddings.patch_embedding.weight"] = state["patch_embedding.weight"]
    wanted["embeddings.position_embedding.weight"] = state["pos_embedding"][0]
    prefix = "vision_model." if any(name.startswith("vision_model.") for name in theirs.state_dict()) else ""
    missing = theirs.load_state_dict({prefix + name: value for name, value in wanted.items()}, strict=False)
    assert not missing.unexpected_keys and all("position_ids" in name for name in missing.missing_keys)
    picture = torch.rand(2, 3, 8, 8) * 2 - 1  # at its own size, so that only the network is compared
    mean, std = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)
    with torch.no_grad():
        expected = theirs(((picture + 1) / 2 - mean) / std, output_hidden_states=True).hidden_states[-2]
        assert (ours(picture) - expected).abs().max() < 1e-5


@pytest.mark.golden
@pytest.mark.skipif(not (folder() / "keys" / "clip_xlm_roberta_vit_h_14.json").is_file(), reason="no key list of CLIP")
def test_the_published_picture_encoder_has_the_names_and_shapes_that_are_loaded() -> None:
    listed = json.loads((folder() / "keys" / "clip_xlm_roberta_vit_h_14.json").read_text())
    with torch.device("meta"):
        ours = {f"visual.{name}": list(value.shape) for name, value in ClipVision().state_dict().items()}
    assert ours == {name: shape for name, (shape, _) in listed.items() if name.startswith("visual.")}


def test_the_first_frame_is_marked_as_given_and_encoded_with_nothing_after_it() -> None:
    model = image_model()
    picture = torch.randint(0, 256, (32, 32, 3), dtype=torch.uint8)
    made = model.picture_conditions(picture)
    assert made["clip"].shape == (1, CLIP.tokens, CLIP.dim)
    assert made["picture"].shape == (1, 3, 20, 4, 4)
    mask, latents = made["picture"].split([4, 16], dim=2)  # type: ignore[no-untyped-call]
    assert bool((mask[:, 0] == 1).all()) and not mask[:, 1:].any()
    assert model.encoder is not None
    assert torch.allclose(latents[0, 0], model.encoder.encode(picture[None])[0], atol=1e-5)


def test_a_world_follows_its_picture(tmp_path: Path) -> None:
    blocks = []
    for level in (20, 200):
        write_png(tmp_path / "a.png", np.full((40, 40, 3), level, np.uint8))
        generator, world = small_world(PRESET, image_model())
        world.spec = msgspec.structs.replace(world.spec, start_picture=str(tmp_path / "a.png"))
        assert begin(generator, world) == [] and world.start == 0
        blocks.append(generator.next_block(world).latents)
    assert not torch.allclose(blocks[0], blocks[1], atol=1e-3)


def test_a_world_without_a_picture_is_refused_and_a_rehearsal_without_one_works() -> None:
    model = image_model()
    generator, world = small_world(PRESET, model)
    with pytest.raises(StartError, match="small-i2v starts from a picture, got none"):
        begin(generator, world)
    assert generator.next_block(world).latents.shape == (3, 16, 4, 4)
    assert model.condition(BlockSignals(0, 0, 3, model.encode("a", None))).picture is not None
