"""Benchmarks of a live server: they start one, watch it from outside, end it, and count what they claim to count."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.bench.browser import BrowserFailed, photons
from engine.bench.live import ServerFailed, serving, watch
from engine.bench.serve import _counter, _quantile, percentile, underruns
from engine.commands import bench
from tests.server.harness import until
from tests.toy_preset import install

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The toy is an installed model for processes started from here, on a machine that may be busy."""
    (tmp_path / "site").mkdir()
    install(tmp_path / "site")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'site'}{os.pathsep}{ROOT}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("INFERIX_MAX_LOAD", "16")


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return bench.run(parser.parse_args(words))


def result(path: Path) -> tuple[list[dict[str, Any]], str]:
    """(rows by column, notes in one line)"""
    said = json.loads(path.read_text())
    return [dict(zip(said["columns"], row, strict=True)) for row in said["rows"]], " ".join(said["notes"])


def test_the_serve_benchmark_measures_a_server_under_viewers(tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    words = ["--model", "toy", "--viewers", "2,0", "--seconds", "2", "--prompts", "1", "--json", str(out)]
    assert run("serve", *words) == 0
    rows, notes = result(out)
    assert [row["viewers"] for row in rows] == [0, 2]
    assert rows[0]["pictures/s each"] is None and rows[0]["underruns each"] is None and rows[0]["% per viewer"] is None
    assert rows[1]["pictures/s each"] > 0 and rows[1]["join ms p50"] > 0 and rows[1]["underruns each"] >= 0
    assert all(0 <= row["blocks in time"] <= 1 and row["server % of a core"] >= 0 for row in rows)
    assert "leaving the server" in notes and "browser" not in notes
    figures = json.loads(out.read_text())["figures"]
    assert figures["prompt_to_packet_ms_p95"] >= figures["prompt_to_packet_ms_p50"] > 0
    assert "prompt_to_photon_ms_p50" not in figures


def test_the_sessions_benchmark_counts_worlds_until_one_too_many(tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    assert run("sessions", "--model", "toy", "--most", "2", "--seconds", "1", "--json", str(out)) == 0
    rows, notes = result(out)
    assert [row["worlds"] for row in rows] == [1, 2] and "2 worlds were not refused" in notes
    assert all(row["slowest, of its rate"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("words", "said"), [(["--viewers", "1,x"], "'1,x'"), (["--prompts", "0"], "at least 1, got '0'")]
)
def test_what_cannot_be_measured_is_said(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run("serve", *words)
    assert said in capsys.readouterr().err


async def test_a_server_is_measured_from_outside_and_ended() -> None:
    async with serving("toy", "--pause-after-s", "600") as server:
        pid = server.pid
        session = (await server.create("toy", seed=1)).raise_for_status().json()
        viewer = await watch(server, session["id"])
        await until(lambda: len(viewer.arrived_s) > 4, 60)
        assert viewer.arrived_s == sorted(viewer.arrived_s) and viewer.joined_s > 0
        assert server.cpu_s() > 0 and 0 < server.up_s <= server.ready_s
        assert _counter(await server.metrics(), "inferix_blocks_total") > 0
        assert (await server.show(session["id"]))["viewers"] == 1
        await viewer.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_server_that_does_not_come_up_is_said_to_have_failed() -> None:
    with pytest.raises(ServerFailed, match="ended with status"):
        async with serving("toy", "--no-such-option"):
            raise AssertionError("it cannot be up")


@pytest.mark.browser
async def test_prompts_are_seen_in_a_real_browser() -> None:
    pytest.importorskip("playwright.async_api", reason="playwright is not installed")
    if not any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))):
        pytest.skip("there is no chromium on this machine")
    async with serving("toy", "--pause-after-s", "600") as server:
        session = (await server.create("toy", prompt="a")).raise_for_status().json()
        found = await photons(f"{str(server.http.base_url).rstrip('/')}/s/{session['id']}", 2)
    assert len(found.ms) == 2 and all(0 < ms < 60_000 for ms in found.ms) and "Chromium" in found.browser


async def test_without_a_browser_the_benchmark_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "playwright.async_api", None)
    with pytest.raises(BrowserFailed, match="playwright is not installed"):
        await photons("http://127.0.0.1:1/", 1)


@pytest.mark.parametrize(
    ("arrived_s", "count"),
    [([i / 8 for i in range(17)], 0), ([0.0, 0.125, 1.0, 1.125, 2.0], 2), ([], 1), ([1.9, 2.0], 1)],
)
def test_an_underrun_is_a_wait_of_three_pictures(arrived_s: list[float], count: int) -> None:
    assert underruns(arrived_s, 0.0, 2.0, fps=8.0) == count


def test_percentiles_and_histograms_are_read_as_they_are_meant() -> None:
    values = [float(v) for v in range(100, 0, -1)]
    assert (percentile(values, 0.5), percentile(values, 0.95), percentile([7.0], 0.95)) == (50.0, 95.0, 7.0)
    text = 'x_bucket{le="0.1"} 5.0\nx_bucket{le="0.5"} 99.0\nx_bucket{le="+Inf"} 100.0\n'
    assert _quantile(text, "x", 0.05) == 0.1 and _quantile(text, "x", 0.99) == 0.5 and _quantile(text, "x", 1.0) > 1e9
