"""The MAGI-1 autoencoder against clips encoded and decoded with the public implementation, tiled and untiled."""

from __future__ import annotations

import json
from typing import Any

import pytest
from safetensors.torch import load_file

from engine.models.magi_vae import MagiVAE, MagiVAEConfig, Tiling, to_pictures
from tests.golden_magi import GOLDEN, cases, error, load_case

pytestmark = pytest.mark.golden
TOLERANCE = 5e-5


def config_of(fields: dict[str, Any]) -> MagiVAEConfig:
    return MagiVAEConfig(
        video_size=fields["video_size"],
        video_length=fields["video_length"],
        patch_size=fields["patch_size"],
        patch_length=fields["patch_length"],
        z_channels=fields["z_chans"],
        width=fields["embed_dim"],
        depth=fields["depth"],
        heads=fields["num_heads"],
        mlp_ratio=fields["mlp_ratio"],
    )


def tiling_of(case: dict[str, Any]) -> Tiling | None:
    if "tile_sample_min_length" not in case:
        return None
    spatial = case["allow_spatial_tiling"]
    height, width = (case[f"tile_sample_min_{side}"] if spatial else None for side in ("height", "width"))
    in_space = case["spatial_tile_overlap_factor"] if spatial else 0.0
    return Tiling(
        (case["tile_sample_min_length"], height, width), (case["temporal_tile_overlap_factor"], in_space, in_space)
    )


def autoencoder(tiling: Tiling | None) -> MagiVAE:
    fields = json.loads((GOLDEN / "magi_vae" / "weights.json").read_text())["ddconfig"]
    vae = MagiVAE(config_of(fields), tiling)
    vae.load_state_dict(load_file(GOLDEN / "magi_vae" / "weights.safetensors"), strict=True)
    return vae.eval().requires_grad_(False)


@pytest.mark.parametrize(("group", "name"), cases("magi_vae"))
def test_clips_encode_and_decode_as_in_the_reference(group: str, name: str) -> None:
    case, data = load_case(group, name)
    vae = autoencoder(tiling_of(case))
    errors = {"latent": error(vae.encode_mean(data["video"]), data["latent"])}
    decoded = vae.decode_video(data["latent"])
    errors["decoded"] = error(decoded, data["decoded"])
    if "moments" in data:
        errors["moments"] = error(vae.encoder(data["video"]), data["moments"])
    assert max(errors.values()) < TOLERANCE, errors
    if "decoded_uint8_TCHW" in data:
        want = data["decoded_uint8_TCHW"].permute(0, 2, 3, 1)
        assert (to_pictures(decoded[0]).int() - want.int()).abs().max() <= 1
