"""Where the golden tensors of the Wan family are, and how a case is read: everything comes from its folder.

The folder is INFERIX_GOLDEN, else ../shared/golden beside the checkout, else the subset in tests/data/golden.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from engine.models.wan import WanConfig, WanTransformer
from engine.models.wan_vae import VaeConfig, WanVae

ROOT = Path(__file__).parent.parent
TOLERANCE = 1e-4
PIXEL_TOLERANCE = 2e-4


def folder() -> Path:
    """The golden folder in use."""
    if named := os.environ.get("INFERIX_GOLDEN"):
        return Path(named)
    beside = ROOT.parent / "shared" / "golden"
    return beside if beside.is_dir() else ROOT / "tests" / "data" / "golden"


@dataclass(frozen=True)
class Case:
    """One variant of one case: its folder, its name ("" where the folder has one only) and its part of config.json."""

    path: Path
    variant: str
    config: Mapping[str, Any]

    def tensors(self, kind: str) -> dict[str, Tensor]:
        """`inputs`, `expected`, `weights` …: the variant's own file where there is one, else the folder's."""
        names = (f"{kind}_{self.variant}", f"{self.variant}_{kind}", kind) if self.variant else (kind,)
        for name in names:
            if (file := self.path / f"{name}.safetensors").exists():
                return load_file(file)
        raise FileNotFoundError(f"{self.path}: expected one of {', '.join(names)} (.safetensors)")


def cases(name: str, wanted: Callable[[Mapping[str, Any]], bool] = bool) -> list[Any]:
    """Parameters for pytest: the variants of every folder of this name whose configuration is `wanted`.

    If there are none, one that is skipped and says why.
    """
    found = [
        pytest.param(case, id=f"{case.path.name}-{case.variant or 'only'}")
        for case in _cases(name)
        if wanted(case.config)
    ]
    if found:
        return found
    return [pytest.param(None, id=name, marks=pytest.mark.skip(reason=f"no golden case {name} in {folder()}"))]


def _cases(name: str) -> Iterator[Case]:
    for file in sorted(folder().glob(f"{name}*/config.json")):
        config = json.loads(file.read_text())
        variants = [
            k for k, v in config.items() if k != "model" and isinstance(v, dict) and ("model_type" in v or "run" in v)
        ]
        if not variants:
            yield Case(file.parent, "", config)
        for variant in variants:
            yield Case(file.parent, variant, config[variant])


def transformer(model: Mapping[str, Any], weights: Mapping[str, Tensor]) -> WanTransformer:
    """The network of a case in float32, its weights loaded strictly."""
    module = WanTransformer(WanConfig.of(model))
    module.load_state_dict(dict(weights), strict=True)
    return module.eval().requires_grad_(False)


def close(got: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    """Equal within the stated tolerance, with a message that says by how much it is not."""
    assert got.shape == expected.shape, f"shape: expected {tuple(expected.shape)}, got {tuple(got.shape)}"
    error = (got.double() - expected.double()).abs().max().item()
    assert error <= tolerance, f"max abs error {error:.3g} > {tolerance:.3g}"


def per_frame(latents: Tensor) -> Tensor:
    """(B, C, F, H, W) <-> (B, F, C, H, W)."""
    return latents.transpose(1, 2)


def vae(config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> WanVae:
    """The autoencoder of a case in float32, its weights loaded strictly."""
    sizes = VaeConfig(
        dim=config["dim"],
        z_dim=config["z_dim"],
        dim_mult=tuple(config["dim_mult"]),
        num_res_blocks=config["num_res_blocks"],
        temporal_down=tuple(config["temperal_downsample"]),  # as the reference spells it
    )
    module = WanVae(sizes)
    module.load_state_dict(dict(weights), strict=True)
    return module.eval().requires_grad_(False)
