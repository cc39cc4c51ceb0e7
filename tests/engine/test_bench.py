"""Benchmarks run, say where and how they measured, and count what they claim to count."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from engine.bench.engine import own_ms
from engine.bench.floor import Floor, Shape, record
from engine.commands import bench
from engine.models import presets
from engine.profiler import Place, Span
from tests.toy_model import TOY


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(presets.PRESETS, "toy", TOY)


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return bench.run(parser.parse_args(words))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["engine", "--blocks", "4"], "its own products alone"),
        (["memory", "--blocks", "8", "--kv", "full", "--kv", "window=6 sink=1"], "gathered per block"),
        (["profiler", "--pairs", "3"], "a span when off"),
    ],
)
def test_a_benchmark_says_what_it_measured_and_where(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    threads = torch.get_num_threads()
    assert run(*words, "--model", "toy", "--json", str(tmp_path / "r.json")) == 0
    torch.set_num_threads(threads)
    text = " ".join(capsys.readouterr().out.split())
    result = json.loads((tmp_path / "r.json").read_text())
    assert said in text or said in " ".join(result["columns"])
    assert result["model"] == "toy" and result["machine"]["torch"] == torch.__version__ and result["rows"]


def test_the_memory_benchmark_counts_a_windows_pages_and_copies_of_the_block_alone(tmp_path: Path) -> None:
    run("memory", "--model", "toy", "--blocks", "8", "--kv", "window=6 sink=1", "--json", str(tmp_path / "r.json"))
    columns = json.loads((tmp_path / "r.json").read_text())["columns"]
    row = dict(zip(columns, json.loads((tmp_path / "r.json").read_text())["rows"][0], strict=True))
    page = 2 * 2 * 512 * 2 * 8 * 4
    assert row["device at 1/4"] == row["at the end"] == 6 * page
    assert row["copied per block"] == 3 * 2 * page, "two steps and the clean pass"
    assert row["gathered per block"] == 0


def test_nested_phases_count_once() -> None:
    def ended(name: str, depth: int, begin_ms: int, end_ms: int, block: int = 0) -> Span:
        return Span(name, begin_ms * 10**6, end_ms * 10**6, Place("w", block), "t", depth)

    spans = [ended("gather", 2, 1, 3), ended("step", 1, 1, 8), ended("step", 1, 8, 9), ended("block", 0, 0, 10)]
    spans += [ended("decode", 0, 10, 14), ended("step", 1, 21, 25, 1), ended("block", 0, 20, 26, 1)]
    own = own_ms(spans)
    assert own == {"gather": [2.0], "step": [6.0, 4.0], "between phases": [2.0, 2.0], "decode": [4.0]}
    assert sum(map(sum, own.values())) == 10 + 4 + 6


def test_the_floor_is_made_of_the_products_of_the_step() -> None:
    a, b, q = torch.randn(8, 16), torch.randn(16, 4), torch.randn(1, 2, 5, 8)
    with torch.inference_mode():
        ops = record(lambda: (F.gelu(a @ b), F.scaled_dot_product_attention(q, q, q), a + 1))
    assert [op.name for op in ops] == ["matmul", "scaled_dot_product_attention"]
    assert Floor(ops).seconds() > 0


def test_the_floor_has_tensors_of_its_own_for_each_that_the_step_has() -> None:
    x, layers = torch.randn(3, 4), [torch.randn(4, 4) for _ in range(2)]
    ops = record(lambda: [x @ w for _ in range(2) for w in layers])
    inputs = [{a.place for a in op.arguments if isinstance(a, Shape)} for op in ops]
    assert len(ops) == 4 and inputs[0] == inputs[2] != inputs[1] == inputs[3]
    assert Floor(ops).seconds() > 0


def test_the_floor_can_be_made_of_tensors_that_are_expanded() -> None:
    a, b = torch.randn(8, 1).expand(8, 16), torch.randn(16, 4)
    with torch.inference_mode():
        [op] = record(lambda: a @ b)
    shape = op.arguments[0]
    assert isinstance(shape, Shape) and shape.make().stride() == a.stride()
    assert Floor([op]).seconds() > 0


@pytest.mark.parametrize(
    "words", [["engine", "--blocks", "-3"], ["memory", "--threads", "0"], ["profiler", "--pairs", "x"]]
)
def test_a_number_that_cannot_be_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(*words)
    assert "expected a whole number of 1 or more" in capsys.readouterr().err


def test_an_unknown_model_is_one_clear_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("engine", "--model", "nothing") == 2
    assert "got 'nothing'" in capsys.readouterr().out
