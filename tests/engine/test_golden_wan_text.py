"""The text encoder against the reference's numbers, and the official cleaning of prompts."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from engine.models.umt5 import UMT5Sizes, build, clean, embed, load, official_names
from tests.golden_wan import Case, cases, close, folder

pytest.importorskip("transformers", reason="the text encoder needs transformers (the models extra)")
pytest.importorskip("ftfy", reason="cleaning needs ftfy (the models extra)")


def encoder(case: Case) -> nn.Module:
    sizes = case.config["model"]
    module = build(
        UMT5Sizes(
            vocabulary=sizes["vocab"],
            dim=sizes["dim"],
            attention_dim=sizes["dim_attn"],
            ffn_dim=sizes["dim_ffn"],
            heads=sizes["num_heads"],
            layers=sizes["num_layers"],
            buckets=sizes["num_buckets"],
            max_distance=sizes["max_dist"],
        )
    )
    load(module, case.tensors("weights"), sizes["num_layers"], "cpu", torch.float32)
    return module


@pytest.mark.golden
@pytest.mark.parametrize("case", cases("text encoder"))
def test_masked_prompts_give_the_references_embeddings(case: Case) -> None:
    inputs, expected = case.tensors("inputs"), case.tensors("expected")
    close(embed(encoder(case), inputs["ids"], inputs["mask"]), expected["prompt_embeds"])


@pytest.mark.golden
@pytest.mark.parametrize("case", cases("text encoder"))
def test_a_prompt_without_its_padding_gives_the_same_rows(case: Case) -> None:
    inputs, expected = case.tensors("inputs"), case.tensors("expected")
    module = encoder(case)
    for ids, rows, length in zip(inputs["ids"], expected["prompt_embeds"], case.config["lengths"], strict=True):
        alone = ids[None, :length]
        close(embed(module, alone, torch.ones_like(alone))[0], rows[:length])


@pytest.mark.golden
@pytest.mark.parametrize("case", cases("text encoder"))
def test_names_are_mapped_as_documented(case: Case) -> None:
    documented = json.loads((case.path / "hf_key_map.json").read_text())["map"]
    expected = {}
    for official, theirs in documented.items():
        for i in range(2):
            for name in theirs if isinstance(theirs, list) else [theirs]:
                expected[name.replace("{i}", str(i))] = official.replace("{i}", str(i))
    assert official_names(2) == expected


@pytest.mark.golden
@pytest.mark.skipif(not (folder() / "keys").is_dir(), reason=f"no key lists in {folder()}")
def test_the_published_encoder_has_the_names_and_shapes_that_are_loaded() -> None:
    listed = json.loads((folder() / "keys" / "umt5_xxl_encoder.json").read_text())
    module = build(UMT5Sizes())
    ours = {theirs: list(module.state_dict()[name].shape) for name, theirs in official_names(24).items()}
    assert ours == {name: shape for name, (shape, _) in listed.items()}


def test_prompts_are_cleaned_as_officially() -> None:
    assert clean("  a &amp;amp; b\n\t c  ") == "a & b c"
    assert clean("cafÃ© \u3000 noir") == "café noir"
