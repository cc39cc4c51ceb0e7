"""Checkpoints: every published form loads the same, every mistake is named, and nothing is ever half loaded."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from engine.weights import WeightsError, assign, check, digest, merge_lora, plain_names, read, renamed


def small() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(value.shape) for name, value in small().state_dict().items()}


def same(got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    return got.keys() == expected.keys() and all(torch.equal(got[name], expected[name]) for name in expected)


# ---------------------------------------------------------------------------------------------------- reading


@pytest.mark.parametrize("container", ["generator_ema", "generator", "model", "state_dict", None])
@pytest.mark.parametrize("prefix", ["", "model.", "model._fsdp_wrapped_module.", "module._orig_mod."])
def test_a_pickle_is_read_whatever_wraps_it(
    tmp_path: Path, tensors: dict[str, Tensor], container: str | None, prefix: str
) -> None:
    state = {prefix + name: value for name, value in tensors.items()}
    torch.save({container: state, "step": 3} if container else state, tmp_path / "model.pt")
    assert same(read(tmp_path / "model.pt"), tensors)


def test_wrappers_in_the_middle_of_a_name_are_taken_out(tensors: dict[str, Tensor]) -> None:
    wrapped = {name.replace(".", "._checkpoint_wrapped_module."): value for name, value in tensors.items()}
    assert same(plain_names(wrapped, "test"), tensors)


def test_averaged_weights_win_unless_others_are_asked_for(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    other = {name: value + 1 for name, value in tensors.items()}
    torch.save({"generator": other, "critic": other, "generator_ema": tensors}, tmp_path / "model.pt")
    assert same(read(tmp_path / "model.pt"), tensors)
    assert same(read(tmp_path / "model.pt", "generator"), other)
    with pytest.raises(WeightsError, match="expected an entry generator_lora, got generator, critic, generator_ema"):
        read(tmp_path / "model.pt", "generator_lora")


def test_parts_of_a_discriminator_are_left_out(tensors: dict[str, Tensor]) -> None:
    extra = {"_cls_pred_branch.0.weight": torch.zeros(1), "_register_tokens": torch.zeros(1)}
    assert same(plain_names({**tensors, **extra}, "test"), tensors)


def test_two_tensors_that_become_one_name_are_an_error(tensors: dict[str, Tensor]) -> None:
    with pytest.raises(
        WeightsError, match=r"expected one tensor called 0\.weight, got two \(one as model\.0\.weight\)"
    ):
        plain_names({**tensors, "model.0.weight": torch.zeros(1)}, "test")


def test_shards_are_joined_and_a_missing_one_is_named(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    names = sorted(tensors)
    shards = {"a-1.safetensors": names[:2], "a-2.safetensors": names[2:]}
    for shard, inside in shards.items():
        save_file({name: tensors[name] for name in inside}, tmp_path / shard)
    where = {name: shard for shard, inside in shards.items() for name in inside}
    (tmp_path / "a.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    assert same(read(tmp_path), tensors)
    (tmp_path / "a-2.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"expected the shard a-2\.safetensors"):
        read(tmp_path)
    save_file({names[2]: tensors[names[2]]}, tmp_path / "a-2.safetensors")
    with pytest.raises(WeightsError, match=rf"1 tensors are in no shard \({names[3]}\)"):
        read(tmp_path)


def test_a_folder_with_one_checkpoint_is_that_checkpoint(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    with pytest.raises(WeightsError, match=r"expected a \.safetensors, \.pth or \.pt file, got none"):
        read(tmp_path)
    save_file(tensors, tmp_path / "a.safetensors")
    assert same(read(tmp_path), tensors)
    save_file(tensors, tmp_path / "b.safetensors")
    with pytest.raises(WeightsError, match=r"expected one checkpoint, got 2 \(a\.safetensors, b\.safetensors\)"):
        read(tmp_path)


# --------------------------------------------------------------------------------------------------- mistakes


class Loud:
    """A pickle that would run something."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("pickled-code-ran",)


def test_code_in_a_pickle_is_refused_and_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"0.weight": Loud()}, tmp_path / "zip.pt")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps({"0.weight": Loud()}))
    for name in ("zip.pt", "plain.pt"):
        with pytest.raises(WeightsError, match=rf"{name}: expected"):
            read(tmp_path / name)
    assert not (tmp_path / "pickled-code-ran").exists()


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors"])
@pytest.mark.parametrize("kept", [0, 20, 500])
def test_a_file_that_is_cut_off_is_named(tmp_path: Path, tensors: dict[str, Tensor], name: str, kept: int) -> None:
    path = tmp_path / name
    (torch.save if name.endswith("pt") else save_file)(tensors, path)
    assert path.stat().st_size > 500 or name.endswith("safetensors")
    path.write_bytes(path.read_bytes()[: min(kept, path.stat().st_size - 8)])
    with pytest.raises(WeightsError, match=rf"{name}: expected .*got"):
        read(path)


@pytest.mark.parametrize("content", [[1, 2], {"a": 1}, {"generator": {"a": 1}}, {}])
def test_a_pickle_of_something_else_is_named(tmp_path: Path, content: object) -> None:
    torch.save(content, tmp_path / "model.pt")
    with pytest.raises(WeightsError, match="expected"):
        read(tmp_path / "model.pt")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="there is no such file"):
        read(tmp_path / "model.pt")


# ---------------------------------------------------------------------------------------------------- loading


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_weights_are_cast_on_load(tensors: dict[str, Tensor], stored: torch.dtype, wanted: torch.dtype) -> None:
    module = small()
    kept = {name: value.to(stored) for name, value in tensors.items()}
    assign(module, kept, "cpu", wanted)
    for name, value in module.state_dict().items():
        assert value.dtype == wanted and torch.equal(value, kept[name].to(wanted))
    assert not any(p.requires_grad for p in module.parameters()) and not module.training


def test_a_wrong_checkpoint_names_three_keys_and_loads_nothing(tensors: dict[str, Tensor]) -> None:
    mistakes: dict[str, dict[str, Tensor]] = {
        r"expected 4 tensors, got 3: 1 missing \(0\.bias\)": {k: v for k, v in tensors.items() if k != "0.bias"},
        r"expected 4 tensors, got 5: 1 unexpected \(2\.bias\)": {**tensors, "2.bias": torch.zeros(2)},
        r"4 missing \(0\.weight, 0\.bias, 1\.weight …\), 1 unexpected \(x\)": {"x": torch.zeros(1)},
        r"1 tensors have another shape \(1\.weight: expected \[2, 4\], got \[4, 2\]\)": {
            **tensors,
            "1.weight": torch.zeros(4, 2),
        },
        r"expected floating-point tensors, got 0\.bias is torch\.int64": {**tensors, "0.bias": torch.arange(4)},
    }
    for message, wrong in mistakes.items():
        module = small()
        with pytest.raises(WeightsError, match=message):
            assign(module, wrong, "cpu", torch.float32, "file.pt")
        assert all(p.is_meta for p in module.parameters())


def test_names_that_a_map_does_not_have_are_an_error(tensors: dict[str, Tensor]) -> None:
    names = {name: f"new.{name}" for name in tensors}
    assert same(renamed(tensors, names, "test"), {f"new.{name}": value for name, value in tensors.items()})
    with pytest.raises(WeightsError, match=r"1 names are not of the expected kind \(odd\)"):
        renamed({**tensors, "odd": torch.zeros(1)}, names, "test")


def test_check_accepts_what_is_right(tensors: dict[str, Tensor]) -> None:
    check(tensors, {name: tuple(value.shape) for name, value in tensors.items()}, "test")


def test_the_digest_follows_every_bit(tensors: dict[str, Tensor]) -> None:
    modules = []
    for change in (0.0, 0.0, 1e-7):
        module = small()
        assign(module, {**tensors, "0.bias": tensors["0.bias"] * (1 + change)}, "cpu", torch.float32)
        modules.append(digest(module))
    assert modules[0] == modules[1] != modules[2]


# ------------------------------------------------------------------------------------------------------- LoRA


def adapters(outputs: int = 4, inputs: int = 3, rank: int = 2) -> dict[str, Tensor]:
    return {"0.lora_A.weight": torch.randn(rank, inputs), "0.lora_B.weight": torch.randn(outputs, rank)}


def test_adapters_are_added_to_the_weights_they_were_made_for(tensors: dict[str, Tensor]) -> None:
    lora = adapters()
    merged = merge_lora(tensors, lora, 0.5)
    expected = tensors["0.weight"] + 0.5 * lora["0.lora_B.weight"] @ lora["0.lora_A.weight"]
    assert torch.allclose(merged["0.weight"], expected)
    assert same(
        {k: v for k, v in merged.items() if k != "0.weight"}, {k: v for k, v in tensors.items() if k != "0.weight"}
    )
    halves = merge_lora({name: value.bfloat16() for name, value in tensors.items()}, lora, 0.5)
    assert halves["0.weight"].dtype == torch.bfloat16


def test_adapters_of_another_base_are_refused(tensors: dict[str, Tensor]) -> None:
    before = {name: value.clone() for name, value in tensors.items()}
    mistakes = {
        r"adapters of another base: 0\.weight: expected \[4, 3\], got \[4, 5\]": adapters(inputs=5),
        r"adapters for 1 layers that this model lacks \(7\.weight\)": {
            name.replace("0.", "7."): value for name, value in adapters().items()
        },
        r"expected pairs of lora_A and lora_B, got half of 0\.weight": {"0.lora_A.weight": torch.zeros(2, 3)},
        r"expected names ending in \.lora_A\.weight or \.lora_B\.weight, got 0\.weight": {"0.weight": torch.zeros(1)},
        r"expected pairs of lora_A and lora_B, got half of none": {},
    }
    for message, lora in mistakes.items():
        with pytest.raises(WeightsError, match=message):
            merge_lora(tensors, lora)
    assert same(tensors, before)


@pytest.mark.parametrize(
    "index", ["", "[]", "null", '{"weight_map": null}', '{"weight_map": ["a"]}', '{"weight_map": {"a": 5}}', "{}"]
)
def test_an_index_that_is_none_is_refused(index: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(index)
    with pytest.raises(WeightsError, match="expected an index with a weight_map"):
        read(path)
    path.write_text('{"weight_map": {}}')
    with pytest.raises(WeightsError, match="expected tensors in its weight_map, got none"):
        read(path)
