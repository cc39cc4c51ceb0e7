"""The benchmark of ranks puts every way to share in a table: measured, predicted, one of them chosen."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from engine.commands import bench
from engine.parallel.passes import steps_of
from engine.parts import parts
from engine.stages import Guided, Plan


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return bench.run(parser.parse_args(["parallel", *words]))


def rows_of(tmp_path: Path, *words: str) -> list[dict[str, Any]]:
    out = tmp_path / "r.json"
    assert run("--ranks", "2", "--repeats", "1", *words, "--json", str(out)) == 0
    said = json.loads(out.read_text())
    return [dict(zip(said["columns"], row, strict=True)) for row in said["rows"]]


def test_a_call_is_measured_with_every_strategy(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "--kv-frames", "3,6", "--tokens", "8")
    assert [(row["frames"], row["strategy"]) for row in rows] == [
        (frames, strategy) for frames in (3, 6) for strategy in ("pass-kv 2", "pass-q 2", "ulysses 2")
    ]
    assert all(row["ms"] > 0 and row["predicted"] > 0 and row["sent KiB"] > 0 for row in rows)
    assert [sum(row[""] == "◄" for row in rows if row["frames"] == frames) for frames in (3, 6)] == [1, 1]


def test_a_step_of_blocks_in_flight_is_measured_on_every_layout(tmp_path: Path) -> None:
    rows = {row["strategy"]: row for row in rows_of(tmp_path, "--preset", "magi-1-4.5b", "--steps", "4")}
    one = "ulysses=1 ring=1"
    assert rows.keys() == {"ulysses=1 ring=2", "ulysses=2 ring=1", f"{one} pipeline=2", f"{one} cfg=2"}
    assert all(row["ms"] > 0 and row["predicted"] > 0 and row["frames"] == 30 for row in rows.values())
    assert sum(row[""] == "◄" for row in rows.values()) == 1
    (step,) = steps_of(Plan(4, Guided()), 6, 30)
    velocities = sum(len(part.blocks) for part in parts(step.weights, skip=True))
    assert rows[f"{one} cfg=2"]["sent KiB"] == velocities * 6 * 16 * 8 * 8 * 4 // 1024


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--preset", "self-forcing-1.3b"], "preset: expected one of the MAGI-1 family, got 'self-forcing-1.3b'"),
        (["--preset", "magi-1-24b", "--steps", "3"], "expected a multiple of the window of 4 blocks, got 3"),
    ],
)
def test_what_has_no_blocks_in_flight_is_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*words) == 2
    assert said in " ".join(capsys.readouterr().out.split())
