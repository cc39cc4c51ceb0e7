"""MAGI-1's text against the public implementation: cleaning, special tokens per block, T5's wiring, float8 linears."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import T5Config, T5EncoderModel

from engine.models.magi_fp8 import Fp8Linear, SmoothFp8Linear
from engine.models.magi_text import Row, T5Caption, clean_twice, null_row
from tests.golden_magi import GOLDEN, error, flags_of, special_tokens, text_rows

pytestmark = pytest.mark.golden
TEXT = GOLDEN / "magi_text"


def listed(name: str) -> list[Any]:
    """The cases in one file, or one that is skipped and says why."""
    path = TEXT / f"{name}.json"
    found: list[Any] = json.loads(path.read_text()) if path.is_file() else []
    return found or [pytest.param({"name": name}, marks=pytest.mark.skip(reason=f"no {name} in {TEXT}"))]


def tensors(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        pytest.skip(f"no {path.name} in {path.parent}")
    return load_file(path)


@pytest.mark.parametrize("pair", listed("caption_cleaning"))
def test_captions_are_cleaned_as_in_the_reference(pair: tuple[str, str]) -> None:
    before, after = pair
    assert clean_twice(before) == after


@pytest.mark.parametrize("case", listed("build_y"), ids=lambda c: str(c["name"]))
def test_each_block_gets_its_special_tokens_in_order(case: dict[str, object]) -> None:
    data, name = tensors(TEXT / "build_y.safetensors"), case["name"]
    caption = data[f"{name}.caption"][0, 0]
    valid, flags, tokens = int(str(case["caption_valid_tokens"])), flags_of(case), special_tokens()
    padded = torch.cat([caption, caption.new_zeros(800 - len(caption), caption.shape[1])])
    row = Row(padded, torch.arange(800) < valid)
    prefix, blocks = int(str(case["clean_prefix_chunks"])), int(str(case["chunk_num"]))
    null = null_row(data["null_caption_embedding"], flags, tokens)
    hidden = Row(null.embedding, torch.zeros_like(null.mask))  # blocks of the prefix read no text
    rows = [[hidden] * prefix + text_rows(row, null, flags, tokens, blocks - prefix), [null] * blocks]
    want_y, want_mask = data[f"{name}.y"], data[f"{name}.mask"]
    kept = want_y.shape[2]
    assert torch.equal(stack(rows, "embedding")[:, :, :kept], want_y)
    assert torch.equal(stack(rows, "mask")[:, :, :kept].float(), want_mask)


def stack(rows: list[list[Row]], name: str) -> Tensor:
    return torch.stack([torch.stack([getattr(r, name) for r in line]) for line in rows])


def test_t5_hidden_states_equal_the_reference_with_and_without_padding() -> None:
    data = tensors(TEXT / "t5_tiny.safetensors")
    config = json.loads((TEXT / "t5_tiny.json").read_text())
    model: Any = T5EncoderModel(T5Config(**config))
    weights = {k.removeprefix("weights."): v for k, v in data.items() if k.startswith("weights.")}
    weights["encoder.embed_tokens.weight"] = weights["shared.weight"]
    model.load_state_dict(weights, strict=True)
    encoder, valid = T5Caption(model.eval(), None), int(data["attention_mask"].sum())
    padded = encoder.hidden(data["input_ids"], data["attention_mask"])
    alone = encoder.hidden(data["input_ids"][:, :valid])
    assert error(padded, data["last_hidden_state"]) < 5e-5
    assert error(alone, data["last_hidden_state"][:, :valid]) < 5e-5


@pytest.mark.parametrize(("kind", "layer"), [("per_tensor", Fp8Linear), ("per_channel", SmoothFp8Linear)])
def test_float8_linears_round_and_multiply_as_in_the_reference(kind: str, layer: type[Fp8Linear]) -> None:
    data = tensors(GOLDEN / "magi_fp8_linear" / "linear.safetensors")
    parts = {k.removeprefix(f"{kind}."): v for k, v in data.items() if k.startswith(kind)}
    outputs, inputs = parts["weight"].shape[1:]
    linear = layer(inputs, outputs)
    linear.load_state_dict({k: v for k, v in parts.items() if "scale" in k or k == "weight"}, strict=True)
    assert torch.equal(linear.quantise(parts["x"]).view(torch.uint8), parts["x_fp8"].view(torch.uint8))
    assert error(linear(parts["x"].float()), parts["out_fp32"]) < 1e-5
    assert torch.equal(linear(parts["x"]), parts["out_bf16"])
