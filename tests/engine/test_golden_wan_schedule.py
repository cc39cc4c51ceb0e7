"""The flow-matching tables and conversions against the reference's numbers."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from engine.recipe import evenly
from engine.samplers import ShiftedFlow, add_noise, to_clean
from tests.golden_wan import close, folder

FOLDER = folder() / "schedules"
pytestmark = [
    pytest.mark.golden,
    pytest.mark.skipif(not FOLDER.is_dir(), reason=f"no golden case schedules in {folder()}"),
]


@pytest.fixture(scope="module")
def tables() -> dict[str, Tensor]:
    return load_file(FOLDER / "tables.safetensors")


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    read: dict[str, Any] = json.loads((FOLDER / "tables.json").read_text())
    return read


def shift_of(name: str) -> float:
    return float(name.split(".")[0].removeprefix("shift"))


def test_tables_are_exact(tables: dict[str, Tensor]) -> None:
    names = [name for name in tables if name.startswith("shift") and name.endswith(".sigmas")]
    assert names
    for name in names:
        schedule = ShiftedFlow(shift_of(name))
        assert torch.equal(schedule.sigmas, tables[name])
        assert torch.equal(schedule.timesteps, tables[name.replace("sigmas", "timesteps")])


def test_steps_are_warped_and_looked_up_as_in_the_reference(facts: dict[str, Any]) -> None:
    for name, fact in facts.items():
        if ".warped." not in name:
            continue
        schedule, looked_up = ShiftedFlow(shift_of(name)), facts[name.replace("warped", "lookup")]
        assert list(schedule.warp(fact["unwarped"])) == fact["warped"]
        assert [schedule.sigma(t) for t in fact["unwarped"]] == looked_up["sigma_unwarped"]
        assert [schedule.sigma(t) for t in fact["warped"]] == looked_up["sigma_warped"]


def test_even_steps_are_those_of_a_shorter_table(tables: dict[str, Tensor]) -> None:
    for name in [name for name in tables if name.startswith("steps") and name.endswith("extra1.timesteps")]:
        steps = int(name.split(".")[0].removeprefix("steps"))
        times = torch.tensor(ShiftedFlow(5.0).warp(evenly(steps)))
        assert torch.allclose(times, tables[name], rtol=1e-6, atol=0)


@pytest.mark.parametrize("precision", ["", "_bf16"])
def test_noise_is_added_and_taken_away_as_in_the_reference(
    tables: dict[str, Tensor], facts: dict[str, Any], precision: str
) -> None:
    schedule = ShiftedFlow(facts["conv_shift"])
    dtype = torch.bfloat16 if precision else torch.float32
    x0, noise, flow = (tables[f"conv.{name}"].to(dtype) for name in ("x0", "noise", "flow"))
    noisy = tables["conv.add_noise"].to(dtype)
    for i, t in enumerate(tables["conv.timesteps"].tolist()):
        sigma = schedule.sigma(t)
        assert torch.equal(add_noise(x0[i], noise[i], sigma), tables[f"conv.add_noise{precision}"][i])
        close(to_clean(noisy[i], flow[i], sigma), tables[f"conv.flow_to_x0{precision}"][i], 1e-6)
