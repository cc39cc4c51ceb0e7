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


_OTHERS = {"switch_frame_indices", "switch_before_block", "effective_denoising_steps"}
KINDS: Mapping[str, Callable[[Mapping[str, Any]], bool]] = {
    "text network, one pass": lambda c: c.get("model_type") == "t2v",
    "image network, one pass": lambda c: c.get("model_type") == "i2v",
    "causal network, two passes": lambda c: "second_frames" in c,
    "adapters": lambda c: "rank" in c,
    "autoencoder": lambda c: "video_shape" in c,
    "text encoder": lambda c: "seq_len" in c and "lengths" in c,
    "roll-out in segments": lambda c: "num_rollout" in c,
    "CausVid roll-out": lambda c: "effective_denoising_steps" in c and "num_rollout" not in c,
    "LongLive roll-out": lambda c: "switch_frame_indices" in c,
    "roll-out with a prompt switch": lambda c: "switch_before_block" in c,
    "Self-Forcing roll-out": lambda c: {"run", "calls"} <= set(c) and not _OTHERS & set(c),
}
"""What a case checks, told by what its configuration holds and not by its name."""


def cases(kind: str) -> list[Any]:
    """Parameters for pytest: every case of this kind in the folder, or one that is skipped and says why."""
    found = [
        pytest.param(case, id=f"{case.path.name}-{case.variant or 'only'}")
        for case in _all_cases()
        if KINDS[kind](case.config)
    ]
    if found:
        return found
    return [pytest.param(None, id=kind, marks=pytest.mark.skip(reason=f"no golden case ({kind}) in {folder()}"))]


def _all_cases() -> Iterator[Case]:
    """A folder's configuration is a case, or holds several by name."""
    for file in sorted(folder().glob("*/config.json")):
        config = json.loads(file.read_text())
        alone = any(check(config) for check in KINDS.values())
        for name, part in {"": config}.items() if alone else config.items():
            if isinstance(part, dict) and any(check(part) for check in KINDS.values()):
                yield Case(file.parent, name, part)


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
