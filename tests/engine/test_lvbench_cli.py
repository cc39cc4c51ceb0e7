import argparse
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from engine.lvbench import cli
from engine.lvbench.judge import Method, judge_video
from engine.lvbench.measures import DIMENSIONS, VBENCH
from engine.lvbench.report import SetsMixed, render
from engine.models import presets
from tests.engine.lvbench_clips import noise, write_video
from tests.toy_preset import PRESET

Run = tuple[int, dict[str, Any], str]


@pytest.fixture(scope="module")
def video(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_video(tmp_path_factory.mktemp("clip") / "a & b.mp4", noise(18, 32, 48))


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    def with_words(*words: object) -> Run:
        parser = argparse.ArgumentParser()
        cli.add_arguments(parser)
        status = cli.run(parser.parse_args([str(word) for word in words]))
        said = capsys.readouterr()
        return status, json.loads(said.out.splitlines()[-1]) if said.out else {}, " ".join(said.err.split())

    return with_words


def test_the_json_is_what_is_promised(run: Any, video: Path) -> None:
    status, said, _ = run(video, "--parts", 3, "--json")
    [judged] = said["videos"]
    assert status == 0 and judged["path"] == str(video) and judged["measures"] == "classic"
    assert set(judged["vde"]) == set(judged["vde_mean"]) == set(judged["curves"]) == set(DIMENSIONS)
    assert set(judged["vbench"]) == set(VBENCH)
    assert all(len(curve) == 3 for curve in judged["curves"].values())
    assert judged["vde"]["clarity"] == pytest.approx(3 * judged["vde_mean"]["clarity"])  # weights 2 + 1


def test_what_cannot_be_judged_is_listed_and_the_rest_goes_on(run: Any, video: Path, tmp_path: Path) -> None:
    report = tmp_path / "out.html"
    status, said, told = run(tmp_path / "none.mp4", video, "--parts", 3, "--json", "--report", report)
    assert status == 1 and len(said["videos"]) == 1
    assert "expected a video file, got nothing there" in said["skipped"][0]["reason"] and "skipped" in told
    assert "Left out" in report.read_text(encoding="utf-8")


def test_a_name_that_looks_like_markup_is_a_name(run: Any, video: Path, tmp_path: Path) -> None:
    path = tmp_path / "[" / "red].mp4"
    path.parent.mkdir()
    path.write_bytes(video.read_bytes())
    status, said, _ = run(path, "--json", "--parts", "2")
    assert (status, said["videos"][0]["path"]) == (0, str(path))


def test_a_name_that_is_no_text_is_judged_told_and_reported(run: Any, video: Path, tmp_path: Path) -> None:
    name, report = tmp_path / os.fsdecode(b"\xff.mp4"), tmp_path / "out.html"
    name.write_bytes(video.read_bytes())
    status, said, told = run(name, tmp_path / os.fsdecode(b"\xfe.mp4"), "--parts", 3, "--json", "--report", report)
    assert status == 1 and len(said["videos"]) == len(said["skipped"]) == 1 and "?.mp4" in told
    assert "?.mp4" in report.read_text(encoding="utf-8")


def test_jobs_change_nothing_but_the_time(run: Any, video: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.mp4"
    broken.write_bytes(b"-")
    alone = run(video, broken, video, "--parts", 3, "--json")
    together = run(video, broken, video, "--parts", 3, "--json", "--jobs", 2)
    assert alone[:2] == together[:2]


def test_the_page_stands_alone_and_shows_every_dimension(video: Path) -> None:
    page = render([judge_video(video, Method(parts=3))])
    assert "a &amp; b.mp4" in page and "a & b.mp4" not in page
    assert page.count("<article>") == page.count("<svg viewBox") == 5
    assert page.count("data:image/jpeg;base64,") == 10
    assert not re.findall(r'(?:src|href)="(?!data:)', page)


def test_two_methods_never_share_a_page(video: Path) -> None:
    with pytest.raises(SetsMixed, match="expected verdicts of one method"):
        render([judge_video(video, Method(parts=3)), judge_video(video, Method(parts=2))])


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "expected a VIDEO, --session, --dataset or --model, got none"),
        (["x.mp4", "--parts", "1"], "expected at least 2 parts, got 1"),
        (["x.mp4", "--jobs", "0"], "--jobs: expected 1 or more, got 0"),
        (["x.mp4", "--report", "/nowhere/x.html"], "--report: cannot write /nowhere/x.html"),
        (["manifest"], "manifest: expected one folder of videos, got []"),
        (["manifest", "/nowhere"], "expected a folder of videos, got none"),
        (["--dataset", "/nowhere"], "expected a manifest.jsonl, got none"),
        (["--model", "toy"], "expected either --prompts or --dataset, got both or none"),
        (["--model", "toy", "--prompts", "/nowhere"], "expected a file of prompts"),
        (["--session", "x", "--token-file", "/nowhere"], "--token-file: expected a file with a token"),
        (["x.mp4", "--parts", "100000000000"], "parts: expected at most 1000, got 100000000000"),
    ],
)
def test_wrong_arguments_are_told_in_a_line(run: Any, words: list[str], reason: str) -> None:
    status, said, told = run(*words)
    assert (status, said) == (2, {}) and reason in told


def test_a_manifest_is_built_and_its_videos_are_judged(run: Any, tmp_path: Path) -> None:
    write_video(tmp_path / "v.mp4", noise(12, 32, 32))
    write_video(tmp_path / "w.mp4", noise(2, 32, 32))
    (tmp_path / "captions.csv").write_text("video,start_s,end_s,text\nv.mp4,0,1,a\nw.mp4,0,1,b\n", encoding="utf-8")
    status, said, told = run("manifest", tmp_path, "--parts", 3, "--json")
    assert (status, said["videos"]) == (1, 1) and "expected at least 9 frames, got 2" in told
    status, said, _ = run("--dataset", tmp_path, "--parts", 3, "--json")
    assert status == 0 and [Path(judged["path"]).name for judged in said["videos"]] == ["v.mp4"]


class _Recordings(BaseHTTPRequestHandler):
    video: Path

    def do_GET(self) -> None:
        known = self.path == "/v1/sessions/abc/recording.mp4" and self.headers["Authorization"] == "Bearer secret"
        body = self.video.read_bytes() if known else b'{"detail": "no such session"}'
        self.send_response(200 if known else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server(video: Path) -> Iterator[str]:
    _Recordings.video = video
    with ThreadingHTTPServer(("127.0.0.1", 0), _Recordings) as httpd:
        thread = threading.Thread(target=httpd.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{httpd.server_port}"
        httpd.shutdown()
        thread.join()


def test_a_sessions_recording_is_fetched_and_judged(run: Any, server: str, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n", encoding="utf-8")
    words = ("--server", server, "--token-file", token, "--parts", 3, "--json")
    status, said, _ = run("--session", "abc", *words)
    assert status == 0 and said["videos"][0]["path"] == "session abc"
    status, _, told = run("--session", "other", *words)
    assert status == 2 and "expected a recording, got 404" in told and "no such session" in told


def test_a_server_that_is_not_there_is_told(run: Any) -> None:
    status, _, told = run("--session", "abc", "--server", "http://127.0.0.1:9")
    assert status == 2 and "expected an answer, got" in told


def test_worlds_are_made_and_judged(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(presets.PRESETS, "toy", PRESET)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("# two worlds\nred\n\nblue\n", encoding="utf-8")
    words = ("--model", "toy", "--prompts", prompts, "--seconds", 2, "--parts", 3, "--json")
    status, said, _ = run(*words)
    assert status == 0 and [judged["path"] for judged in said["videos"]] == ["red", "blue"]
    assert [judged["frames"] for judged in said["videos"]] == [16, 16]
    status, said, _ = run(*words, "--keep", tmp_path / "kept")
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["001.mp4", "002.mp4"]
    status, _, told = run("--model", "no-such", *words[2:])
    assert status == 2 and "no-such" in told


def test_a_data_sets_captions_steer_the_worlds_made(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(presets.PRESETS, "toy", PRESET)
    line = {"video": "v.mp4", "captions": ["one", "two"]}
    (tmp_path / "manifest.jsonl").write_text(json.dumps(line), encoding="utf-8")
    status, said, _ = run("--model", "toy", "--dataset", tmp_path, "--seconds", 4, "--parts", 3, "--json")
    assert status == 0 and said["videos"][0]["path"] == "v" and said["videos"][0]["frames"] == 32


def test_judging_does_not_load_torch() -> None:
    code = "import sys, engine.lvbench.cli, engine.lvbench.classic; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
