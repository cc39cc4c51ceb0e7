"""The benchmark of a published architecture says what it measured, of the preset and scale asked for."""

from __future__ import annotations

import argparse

import pytest

from engine.bench import model as bench
from engine.models.presets import UnknownModel
from engine.models.wan import WanConfig


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args(words)


@pytest.fixture(autouse=True)
def smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    small = WanConfig(dim=48, ffn_dim=32, num_heads=2, num_layers=2, text_dim=8, text_len=4, freq_dim=8)
    monkeypatch.setattr(bench, "SCALES", {"tiny": bench.Scale(small, 64, 32)})


@pytest.mark.parametrize("preset", ["self-forcing-1.3b", "causvid-1.3b", "longlive-infinity-1.3b"])
def test_each_block_is_held_against_its_own_products(preset: str) -> None:
    result = bench.measure(arguments("--preset", preset, "--scale", "tiny", "--blocks", "2"))
    assert [row[0] for row in result.rows] == [0, 1]
    assert all(isinstance(row[3], float) and row[3] > 0 for row in result.rows)
    assert "2 layers of 48, 8 tokens per frame" in result.model


def test_bytes_moved_in_steady_state_are_the_blocks_own() -> None:
    result = bench.measure(arguments("--scale", "tiny", "--blocks", "5", "--kv", "window=6"))
    moved = [row[4] for row in result.rows]
    own = int(next(note for note in result.notes if "own keys" in note).split(" are ")[1].split(" ")[0])
    assert moved[2:] == [5 * own] * 3  # four steps and the clean pass; nothing is gathered, nothing shifted


def test_other_families_are_refused() -> None:
    with pytest.raises(UnknownModel, match="expected one of the Wan2.1 .* family, got 'tiny-world'"):
        bench.measure(arguments("--preset", "tiny-world", "--scale", "tiny"))
