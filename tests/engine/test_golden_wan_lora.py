"""Adapters merged on load, against the reference that applies them beside the layers."""

from __future__ import annotations

import pytest
import torch

from engine.models import Prompt
from engine.models.wan import OwnFrames, WanConditioning
from engine.weights import merge_lora, plain_names
from tests.golden_wan import Case, cases, close, per_frame, transformer

pytestmark = pytest.mark.golden


@pytest.mark.parametrize("case", cases("adapters"))
def test_merged_adapters_give_the_references_flow(case: Case) -> None:
    inputs, expected = case.tensors("inputs"), case.tensors("expected")
    base = case.tensors("base_weights")
    adapters = plain_names(case.tensors("lora_weights"), "adapters")
    assert len(adapters) == case.config["num_lora_tensors"]
    merged = merge_lora(base, adapters, case.config["alpha"] / case.config["rank"])
    x = per_frame(inputs["x"])
    conditioning = WanConditioning(Prompt("", inputs["context"]))
    for weights, name in ((base, "flow_base"), (merged, "flow_with_lora")):
        conditioning.prompt.cross.clear()
        model = transformer(case.config["model"], weights)
        close(per_frame(model(x, inputs["t"], conditioning, OwnFrames())), expected[name])
    for name in [name for name in expected if name.startswith("merged")]:
        close(merged[name.removeprefix("merged.")], expected[name])
    assert not torch.equal(expected["flow_base"], expected["flow_with_lora"])
