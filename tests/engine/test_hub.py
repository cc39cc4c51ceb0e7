"""Where published files lie, what they need, and what the models command says about them."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from engine import hub, recipe
from engine.commands import models
from engine.kvcache.policy import parse
from engine.kvcache.pool import PageFormat
from engine.models import KVGeometry, presets
from engine.models.presets import File, LoadOptions, MissingFiles, Preset, UnknownModel

PRESET = presets.find("longlive-1.3b")


def command(*words: str) -> int:
    parser = argparse.ArgumentParser()
    models.add_arguments(parser)
    return models.run(parser.parse_args(words))


def put(root: Path, file: File, name: str | None = None) -> Path:
    """A published file of a few bytes."""
    path = root / file.repo / (name or file.path.replace("*", "part"))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x")
    return path


def test_every_missing_file_is_named_with_the_place_it_is_expected_at(tmp_path: Path) -> None:
    put(tmp_path, PRESET.files[0])
    with pytest.raises(MissingFiles) as caught:
        hub.locate(PRESET, tmp_path)
    text = str(caught.value)
    assert str(tmp_path / PRESET.files[0].repo / PRESET.files[0].path) not in text
    for file in (file for file in PRESET.files[1:] if file.part != "tiny_decoder"):
        assert str(tmp_path / file.repo / file.path) in text


def test_files_are_found_by_part_and_patterns_by_index_or_folder(tmp_path: Path) -> None:
    for file in PRESET.files:
        put(tmp_path, file)
    found = hub.locate(PRESET, tmp_path)
    assert found["transformer"].name == "longlive_base.pt" and found["tokenizer"].is_dir()
    sharded = next(f for f in presets.find("wan2.1-14b").files if f.part == "transformer")
    put(tmp_path, sharded, "diffusion_pytorch_model-00001-of-00006.safetensors")
    index = put(tmp_path, sharded, "diffusion_pytorch_model.safetensors.index.json")
    assert hub.path(tmp_path, sharded) == index
    (tmp_path / presets.TINY_DECODER.repo / presets.TINY_DECODER.path).unlink()
    assert "tiny_decoder" not in hub.locate(PRESET, tmp_path)
    with pytest.raises(MissingFiles, match="tiny_decoder"):
        hub.locate(PRESET, tmp_path, tiny=True)


@pytest.mark.parametrize("preset", presets.PRESETS.values(), ids=lambda preset: preset.name)
def test_memory_is_counted_as_the_cache_will_take_it(preset: Preset) -> None:
    s = preset.sizes
    form = PageFormat(KVGeometry(s.layers, s.kv_heads, s.head_dim, s.tokens_per_frame), torch.bfloat16)
    held = parse(preset.kv).most_held(preset.frames_per_block)
    assert held is not None, "a preset's worlds have a bounded cache"
    caches = recipe.sampler(preset).caches
    assert hub.needs(preset).kv == form.page_bytes * (held + preset.recache_room(held)) * caches
    assert hub.needs(preset, "store=int8").kv * 2 == hub.needs(preset).kv
    assert hub.needs(preset).device > hub.needs(preset, "store=int4").device > 0


def test_without_a_network_pull_names_the_layout_that_would_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub_constants = pytest.importorskip("huggingface_hub.constants", reason="pull needs huggingface_hub")
    monkeypatch.setattr(hub_constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(hub.HubUnavailable) as caught:
        hub.pull(PRESET, tmp_path)
    wanted = [file for file in PRESET.files if file.part != "tiny_decoder"]
    assert all(str(tmp_path / file.repo / file.path) in str(caught.value) for file in wanted)
    for file in PRESET.files:
        put(tmp_path, file)
    assert hub.pull(PRESET, tmp_path) == []


def test_memory_is_said_before_anything_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []

    def fetch(preset: Preset, folder: Path | None, *, tiny: bool) -> list[Path]:
        said.append(capsys.readouterr().out)
        raise hub.HubUnavailable("no network here")

    monkeypatch.setattr(hub, "pull", fetch)
    assert command("pull", "longlive-1.3b", "--folder", str(tmp_path)) == 2
    assert "disk: 19.0 GB" in said[0] and "device memory: about" in said[0]
    assert "no network here" in capsys.readouterr().out


def test_models_are_listed_and_described(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert command("list", "--folder", str(tmp_path), "--json") == 0
    listed = json.loads(capsys.readouterr().out)
    assert {row["name"] for row in listed["models"]} == set(presets.PRESETS)
    assert command("info", "self-forcing-1.3b", "--kv", "window=6", "--json") == 0
    info = json.loads(capsys.readouterr().out)
    assert info["needs"]["kv_bytes"] == hub.needs(presets.find("self-forcing-1.3b"), "window=6").kv
    assert command("info", "self-forcing-1.3b") == 0
    assert "window=21" in capsys.readouterr().out


def test_wrong_names_and_policies_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("info", "longlive") == 2
    assert "expected one of" in capsys.readouterr().out
    assert command("info", "longlive-1.3b", "--kv", "windows=3") == 2
    assert "windows=3" in capsys.readouterr().out
    with pytest.raises(UnknownModel, match="got 'nothing'"):
        presets.load("nothing", LoadOptions())


def test_check_hashes_what_is_there_and_says_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(tmp_path, PRESET.files[0])
    assert command("check", "longlive-1.3b", "--folder", str(tmp_path), "--json") == 1
    report = msgspec.json.decode(capsys.readouterr().out)
    first, second = report["files"][:2]
    assert first["sha256"] == "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"
    assert not report["whole"] and second["path"] == ""


def test_check_holds_files_against_the_published_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for file in PRESET.files:
        put(tmp_path, file)
    save_file({"patch_embedding.bias": torch.zeros(3)}, put(tmp_path, PRESET.files[0]))
    assert command("check", "longlive-1.3b", "--folder", str(tmp_path), "--no-hash") == 2
    assert "longlive_base.pt: expected" in capsys.readouterr().out


def test_a_file_that_is_not_what_the_hub_published_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = put(tmp_path, PRESET.files[0])
    note = tmp_path / PRESET.files[0].repo / ".cache/huggingface/download" / f"{PRESET.files[0].path}.metadata"
    note.parent.mkdir(parents=True)
    right = "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"
    for tag, differs in ((right, False), ("0" * 64, True), ("an-etag-of-a-small-file", False)):
        note.write_text(f"commit\n{tag}\n1700000000.0\n")
        found = next(f for f in hub.check(PRESET, tmp_path) if f.path == path)
        assert found.differs is differs
    note.write_text(f"commit\n{'0' * 64}\n1700000000.0\n")
    assert command("check", "longlive-1.3b", "--folder", str(tmp_path)) == 1
    assert "is not what was published" in capsys.readouterr().out


def test_the_page_of_models_states_every_row_with_its_memory() -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    for preset in presets.PRESETS.values():
        if preset.family == "wan2.1":
            needs = hub.needs(preset)
            (row,) = [line for line in page.splitlines() if line.startswith(f"| `{preset.name}` |")]
            assert f"| `{preset.kv}` | {needs.disk / 1e9:.1f} GB | {needs.device / 1e9:.1f} GB |" in row
            assert preset.files[0].repo in row and preset.files[0].path in row
