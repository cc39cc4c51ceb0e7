"""Commands refuse in one line that says what was typed, as it was typed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from server.cli import main


@pytest.mark.parametrize(
    "words",
    [
        ["plan", "--kv", "[/red]"],
        ["plan", "--kv", "[/red]", "--json"],
        ["models", "info", "[/red]"],
        ["bench", "engine", "--kv", "[/red]"],
        ["generate", "--prompt", "a", "--kv", "[/red]", "--json"],
        ["serve", "--token-file", "/nowhere/[/red]"],
    ],
    ids=" ".join,
)
def test_what_looks_like_markup_is_said_as_it_is(words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(list(words)) == 2
    said = capsys.readouterr()
    assert "[/red]" in said.out + said.err
    assert not ("--json" in words and said.out), "machines read standard output"


def test_a_budget_without_end_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "--budget", "inf"])
    assert "expected bytes as in 512m or 8g, got 'inf'" in capsys.readouterr().err


def test_a_plan_for_a_window_of_any_width_is_made_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--kv", "window=6 range=0:1000000000000", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kv"].endswith("range=0:1000000000000")


@pytest.mark.parametrize(
    "words",
    [
        ["eval", "--model", "tiny-world", "--prompts", "{file}", "--keep", "{file}"],
        ["eval", "manifest", "{folder}", "--captions", "{file}", "--out", "{folder}/none/x", "--parts", "2"],
        ["models", "check", "self-forcing-1.3b", "--folder", "{folder}/" + "f" * 300],
        ["generate", "--prompt", "a", "--profile", "{folder}/p.html", "--hooks", "{folder}/" + "h" * 300 + ".py"],
    ],
    ids=lambda words: " ".join(words)[:30],
)
def test_a_file_or_folder_that_cannot_be_is_said_in_a_line(
    words: Sequence[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("video,start_s,end_s,text\n")
    assert main([word.format(file=tmp_path / "file", folder=tmp_path) for word in words]) == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith(f"inferix {words[0]}: ") and str(tmp_path) in said and "\n" not in said
