"""`inferix generate` as a user meets it: files that play, and one clear line when something is wrong."""

from __future__ import annotations

import argparse
import json
import resource
import signal
import subprocess
import sys
from pathlib import Path

import av
import numpy as np
import pytest

from engine import profiler
from engine.commands import generate
from engine.models import presets
from engine.movie import Movie, OutputError, contact_sheet, write_png
from engine.protocol import MAX_PROMPT_CHARS, PromptChange
from engine.signals import SignalError
from tests.toy_model import TOY


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(presets.PRESETS, "toy", TOY)


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    generate.add_arguments(parser)
    return generate.run(parser.parse_args(["--model", "toy", *words]))


def frames(path: Path) -> int:
    with av.open(str(path)) as container:
        return sum(1 for _ in container.decode(video=0))


def test_a_world_becomes_a_file_that_plays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, sheet, folder = tmp_path / "w.mp4", tmp_path / "s.png", tmp_path / "frames"
    words = ["--prompt", "a", "--at", "1s: b", "--seconds", "2", "--seed", "7", "-o", str(out), "--json"]
    assert run(*words, "--sheet", str(sheet), "--frames-dir", str(folder)) == 0
    said = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert (said["frames"], said["fps"], said["seconds"], said["seed"], said["model"]) == (16, 8.0, 2.0, 7, "toy")
    assert frames(out) == 16 and len([*folder.iterdir()]) == 16
    assert frames(sheet) == 1
    assert run(*words) == 0
    assert json.loads(capsys.readouterr().out.strip().splitlines()[-1])["digest"] == said["digest"]


def test_a_gif_plays_too(tmp_path: Path) -> None:
    assert run("--prompt", "a", "--seconds", "1", "-o", str(tmp_path / "w.gif")) == 0
    assert frames(tmp_path / "w.gif") == 8


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--prompt", ""], "expected some text"),
        (["--prompt", "x" * (MAX_PROMPT_CHARS + 1)], f"at most {MAX_PROMPT_CHARS} characters"),
        (["--prompt", "a", "--at", "storm"], "expected 'SECONDS: TEXT'"),
        (["--prompt", "a", "--at", "1.2.3s: b"], "expected seconds"),
        (["--prompt", "a", "--at", "3s: b", "--at", "2s: c"], "rising times"),
        (["--prompt", "a", "--at", "99s: b"], "before the end"),
        (["--prompt", "a", "--at", f"0.2s blend {'9' * 5000}: b"], "expected 'SECONDS: TEXT'"),
        (["--prompt", "a", "--sheet", "s" * 300 + ".png"], "sheet: cannot write"),
        (["--prompt", "a", "--hold", "0s: jump"], "got 'jump'"),
        (["--prompt", "a", "--kv", "window=2 sink=1"], "at least 3"),
        (["--prompt", "a", "-o", "/nowhere/w.mp4"], "cannot write /nowhere/w.mp4"),
        (["--prompt", "a", "-o", "world.avi"], "ending in .mp4 or .gif"),
        (["--prompt", "a", "--threads", "0"], "1 to 256"),
        (["--prompt", "a\udcff"], r"expected text, got '\udcff' in it"),
        (["--prompt", "a", "--hold", "5s:", "--hold", "2s: right"], "rising times, got 2 s after 5 s"),
        (["--prompt", "a", "--hold", "99s: right"], "action at 99 s: expected a time before the end"),
        (["--prompt", "a", "--kv", "[/red]"], "got '[/red]'"),
        (["--prompt", "a", "--model", "[bold]x"], "got '[bold]x'"),
        (["--prompt", "a", "--device", "tpu"], "device: expected auto, cpu"),
        (["--prompt", "a", "--seconds", "100", "-o", "w.gif"], "at most 600 pictures, got 800"),
        (["--prompt", "a", "--sheet", "/nowhere/s.png"], "sheet: cannot write /nowhere/s.png"),
        (["--prompt", "a", "--sheet", "s.png", "--profile", "./s.png"], "profile: expected another file than"),
        (["--prompt", "a", "--profile", "p.html", "--kv", "x"], "got 'x'"),
    ],
)
def test_bad_input_is_one_clear_line_and_no_file(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(*words) == 2
    text = " ".join(capsys.readouterr().out.split())
    assert said in text and "Traceback" not in text
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("kv", ["window=1000000000000", "window=6 range=0:99999999999999"])
def test_a_policy_far_wider_than_the_video_takes_no_more_than_the_video(
    kv: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--prompt", "a", "--seconds", "2", "-o", str(tmp_path / "w.mp4"), "--json", "--kv"]
    assert run(*words, kv) == 0
    wide = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert run(*words, "full") == 0
    full = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert wide["kv_bytes"] <= full["kv_bytes"]
    assert wide["digest"] == full["digest"], "all of a short past is seen either way"


def test_a_file_to_begin_from_is_not_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clip = tmp_path / "mine.mp4"
    clip.write_bytes(b"precious")
    assert run("--prompt", "a", "--start", str(clip), "-o", str(tmp_path / "." / "mine.mp4")) == 2
    assert "expected another file than that of --start" in " ".join(capsys.readouterr().out.split())
    assert clip.read_bytes() == b"precious"


def test_a_file_is_written_by_one_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "w.mp4"
    with Movie(path, 32, 16, 8.0) as movie:
        movie.add(np.zeros((9, 16, 32, 3), np.uint8))
        with pytest.raises(OutputError, match="is being written by another process"):
            Movie(path, 32, 16, 8.0)
    assert frames(path) == 9
    with Movie(path, 32, 16, 8.0) as movie:
        movie.add(np.zeros((2, 16, 32, 3), np.uint8))
    assert frames(path) == 2


def test_a_name_that_is_no_text_is_still_a_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a [b] \udcff.mp4"
    assert run("--prompt", "[/red]", "--seconds", "1", "-o", str(path), "--json") == 0
    assert json.loads(capsys.readouterr().out)["output"].endswith("/a [b] ?.mp4")
    assert run("--prompt", "a", "--seconds", "1", "-o", str(path)) == 0
    assert "a [b] ?.mp4: 1.0 s" in capsys.readouterr().out


def test_how_a_prompt_takes_over_can_be_said() -> None:
    assert generate.parse_prompt("6s: a: b") == PromptChange(6.0, "a: b")
    assert generate.parse_prompt("1.5 recache: x") == PromptChange(1.5, "x", "recache")
    assert generate.parse_prompt("6s blend 8: x") == PromptChange(6.0, "x", "blend", 8)
    with pytest.raises(SignalError):
        generate.parse_prompt("6s fade: x")


PROGRAM = """
import argparse, sys
from engine.commands import generate
from engine.models import presets
from tests.toy_model import TOY
presets.PRESETS["toy"] = TOY
parser = argparse.ArgumentParser()
generate.add_arguments(parser)
sys.exit(generate.run(parser.parse_args(sys.argv[1:])))
"""


def start(*words: str, limit: int | None = None) -> subprocess.Popen[str]:
    def limited() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    command = [sys.executable, "-c", PROGRAM, "--model", "toy", "--prompt", "a", "--threads", "1", *words]
    return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, preexec_fn=limited)


@pytest.mark.parametrize("wish", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_a_finished_file(tmp_path: Path, wish: signal.Signals) -> None:
    out = tmp_path / "w.mp4"
    process = start("--seconds", "4000", "-o", str(out))
    while not out.exists() or out.stat().st_size < 4000:
        assert process.poll() is None, process.communicate()[0]
    process.send_signal(wish)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and "interrupted: the first" in text
    assert frames(out) > 8


def test_a_disk_that_fills_leaves_what_was_made(tmp_path: Path) -> None:
    out = tmp_path / "w.mp4"
    process = start("--seconds", "120", "-o", str(out), limit=30_000)
    text, _ = process.communicate(timeout=120)
    assert process.returncode == 2 and "stopped" in text, text
    assert frames(out) > 8


def test_a_contact_sheet_holds_every_picture(tmp_path: Path) -> None:
    shades = [np.full((4, 6, 3), shade, np.uint8) for shade in range(0, 70, 10)]
    sheet = contact_sheet(shades, columns=3, gap=1)
    assert sheet.shape == (14, 20, 3)
    assert {int(v) for v in np.unique(sheet)} == {*range(0, 70, 10), 255}
    write_png(tmp_path / "s.png", sheet)
    with av.open(str(tmp_path / "s.png")) as container:
        assert np.array_equal(next(container.decode(video=0)).to_ndarray(format="rgb24"), sheet)


def test_a_gif_too_long_to_hold_says_so(tmp_path: Path) -> None:
    movie = Movie(tmp_path / "w.gif", 8, 8, 8.0)
    with pytest.raises(OutputError, match="at most 600"):
        movie.add(np.zeros((601, 8, 8, 3), np.uint8))
    movie.close()


def test_a_profile_is_one_page_with_every_block_or_a_trace(tmp_path: Path) -> None:
    page, trace = tmp_path / "p.html", tmp_path / "p.json"
    words = ["--prompt", "a </script> of glass", "--seconds", "2", "-o", str(tmp_path / "w.mp4")]
    assert run(*words, "--profile", str(page)) == 0
    text = page.read_text()
    data = json.loads(text.split('id="data">')[1].split("</script>")[0])
    assert [block["block"] for block in data["blocks"]] == [0, 1, 2, 3]
    assert {"step", "clean pass", "decode"} <= {span["name"] for block in data["blocks"] for span in block["spans"]}
    assert len(data["memory"]["kv_device_bytes"]) == 4
    assert run(*words, "--profile", str(trace)) == 0
    assert {"X", "M", "C"} <= {event["ph"] for event in json.loads(trace.read_text())["traceEvents"]}


def test_a_profile_that_cannot_be_written_is_said_before_anything_is_computed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--prompt", "a", "-o", str(tmp_path / "w.mp4"), "--profile", "/nowhere/p.html") == 2
    assert "cannot write /nowhere/p.html" in " ".join(capsys.readouterr().out.split())
    assert not (tmp_path / "w.mp4").exists()


def test_torchs_own_profile_has_the_phases_beside_its_operators(tmp_path: Path) -> None:
    trace = tmp_path / "t.json"
    words = ["--prompt", "a", "--seconds", "1", "-o", str(tmp_path / "w.mp4")]
    assert run(*words, "--torch-profile", str(trace), "--nvtx") == 0, "NVTX is left out where there is no CUDA"
    events = json.loads(trace.read_text())["traceEvents"]
    marked = {event["name"] for event in events if event.get("cat") == "user_annotation"}
    assert {"block", "step", "clean pass", "cache write"} <= marked
    assert any(str(event["name"]).startswith("aten::") for event in events)
    assert profiler.active() is None
