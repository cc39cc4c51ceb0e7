"""A measure of one's own is five lines, as the documentation shows it, and stands beside the built-in ones."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import pytest

from engine import hooks, profiler
from engine.__main__ import main
from engine.commands import generate
from engine.models import presets
from tests.toy_model import TOY

PAGE = Path(__file__).parents[2] / "docs" / "profiling.md"


def example() -> str:
    """The file that the documentation shows."""
    return re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.S | re.M)[0]  # type: ignore[no-any-return]


@pytest.fixture
def load_py(tmp_path: Path) -> Path:
    path = tmp_path / "load.py"
    path.write_text(example())
    return path


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    generate.add_arguments(parser)
    return generate.run(parser.parse_args(["--model", "toy", "--prompt", "a", "--seconds", "1", *words]))


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(presets.PRESETS, "toy", TOY)


def test_the_documented_measure_is_five_lines() -> None:
    assert len(example().splitlines()) == 5


def test_the_documented_measure_stands_in_the_page_and_in_the_trace(load_py: Path, tmp_path: Path) -> None:
    page, trace = tmp_path / "p.html", tmp_path / "p.json"
    words = ["-o", str(tmp_path / "w.mp4"), "--hooks", str(load_py)]
    assert run(*words, "--profile", str(page)) == 0
    data = json.loads(page.read_text().split('id="data">')[1].split("</script>")[0])
    assert all(block["metrics"]["machine_load"] >= 0 for block in data["blocks"])
    assert run(*words, "--profile", str(trace)) == 0
    curve = [e for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "C" and "machine_load" in e["name"]]
    assert len(curve) == len(data["blocks"]) == 2
    assert profiler.hooks() == [], "a run leaves no hook behind"


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("nothing.py", None, "expected a Python file"),
        ("load.txt", "", "expected a Python file"),
        ("empty.py", "x = 1", "got no hook"),
        ("broken.py", "1 / 0", "ZeroDivisionError"),
    ],
)
def test_a_file_that_adds_no_hook_is_one_clear_line(
    name: str, text: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    with pytest.raises(hooks.HooksWrong, match=said):
        hooks.load(path)
    out = tmp_path / "w.mp4"
    assert run("-o", str(out), "--hooks", str(path), "--profile", str(tmp_path / "p.html")) == 2
    assert said in " ".join(capsys.readouterr().out.split()) and not out.exists()


def test_hooks_without_a_profile_are_refused(load_py: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("-o", str(tmp_path / "w.mp4"), "--hooks", str(load_py)) == 2
    assert "expected --profile" in " ".join(capsys.readouterr().out.split())


def test_an_engine_does_not_start_with_hooks_that_are_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.py").write_text("")
    monkeypatch.setattr("engine.__main__.socket.socket", lambda fileno: argparse.Namespace(getpeername=lambda: None))
    monkeypatch.setattr("sys.argv", ["engine", "--fd", "0", "--hooks", str(tmp_path / "empty.py")])
    assert main() == 2 and "got no hook" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["engine", "--fd", "0", "--hooks", str(tmp_path / "none.py")])
    assert main() == 2 and "expected an existing file" in capsys.readouterr().err
