"""The page against the real server and the real engine with the shipped world: seen, steered, shared, survived."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.web.looking import entry, pixels, say, wait_moving, wait_playing

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
WEIGHTS = ROOT / "engine" / "models" / "tiny" / "weights" / "world.safetensors"
SERVE = [sys.executable, "-m", "server", "serve", "--model", "tiny-world", "--port", "0"]
PATIENT_MS = 90_000  # the machine may be busy with other tests


class Served:
    """`inferix serve` as a process of its own, and what it says about itself."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.log = folder / "serve.log"
        with self.log.open("w") as log:
            command = [*SERVE, "--record-dir", str(folder), *options]
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        self.address = self._address()

    def engine_pid(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return next(int(pid) for pid in children if b"--fd" in Path(f"/proc/{pid}/cmdline").read_bytes())

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    def _address(self) -> str:
        for _ in range(600):
            found = re.search(r"Inferix is at (http://\S+:\d+)/", self.log.read_text())
            if found:
                return found[1]
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.1)
        self.process.kill()
        raise AssertionError(f"the server did not say where it is: {self.log.read_text()}")


@pytest.fixture(scope="module")
def served(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server for all; it must end with 0. Asks for the browser first, so that nothing is started without one."""
    if not WEIGHTS.exists():
        pytest.skip(f"the shipped world is not in this checkout: {WEIGHTS.relative_to(ROOT)}")
    server = Served(tmp_path_factory.mktemp("served"))
    yield server
    assert server.stop() == 0, server.log.read_text()


@pytest.fixture
def live(served: Served, page: Any) -> Any:
    """A page on which the world plays."""
    page.goto(served.address)
    wait_playing(page, PATIENT_MS)
    return page


def sessions(page: Any, served: Served) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = page.request.get(f"{served.address}/v1/sessions").json()["sessions"]
    return [session for session in found if session["state"] in ("starting", "running", "paused")]


def test_the_picture_of_the_real_world_moves_while_a_key_is_held(live: Any) -> None:
    live.focus("#stage")
    live.keyboard.down("ArrowRight")
    wait_moving(live, tries=400)
    live.keyboard.up("ArrowRight")


def test_a_prompt_is_applied_by_the_engine_and_its_way_to_the_screen_is_measured(live: Any, served: Served) -> None:
    before = pixels(live)
    say(live, "night falls over the city")
    live.wait_for_selector("#story li.applied[aria-current] >> text=night falls over the city", timeout=PATIENT_MS)
    live.wait_for_selector("#stat-prompt[data-value]", timeout=PATIENT_MS)
    assert float(live.get_attribute("#stat-prompt", "data-value")) > 0
    block = re.search(r"block (\d+)", entry(live, "night falls over the city").inner_text())
    prompts = sessions(live, served)[0]["prompts"]
    applied = next(prompt for prompt in prompts if prompt["text"] == "night falls over the city")
    assert block and int(block[1]) == applied["block"]
    live.wait_for_timeout(4000)
    assert sum(abs(a - b) > 12 for a, b in zip(before, pixels(live), strict=True)) > 200


def test_the_strip_shows_what_engine_and_browser_measure(live: Any) -> None:
    for cell in ("fps", "speed", "bitrate", "loss", "memory"):
        live.wait_for_selector(f"#stat-{cell}[data-value]", timeout=PATIENT_MS)
    live.click("#inside summary")
    live.wait_for_selector("#legend >> text=denoise", timeout=PATIENT_MS)


def test_a_second_tab_is_a_second_viewer_of_the_same_world(live: Any, served: Served) -> None:
    other = live.context.new_page()
    other.goto(served.address)
    wait_playing(other, PATIENT_MS)
    live.wait_for_selector("#watching >> text=2 watching", timeout=PATIENT_MS)
    assert other.url == live.url
    assert [session["viewers"] for session in sessions(live, served)] == [2]
    other.close()
    live.wait_for_selector("#watching >> text=1 watching", timeout=PATIENT_MS)


def test_a_shared_link_shows_the_world_to_a_spectator_who_cannot_steer(live: Any, browser: Any) -> None:
    live.click("#open-share")
    live.wait_for_function("() => document.querySelector('#watch-link').value.includes('access=')")
    spectator = browser.new_page()
    spectator.goto(live.input_value("#watch-link"))
    wait_playing(spectator, PATIENT_MS)
    assert spectator.is_visible("text=You are watching")
    assert not spectator.is_visible("#say")
    spectator.close()


def test_pause_and_resume_reach_the_engine(live: Any, served: Served) -> None:
    live.click("#pause")
    live.wait_for_selector("body[data-phase=paused]", timeout=PATIENT_MS)
    assert sessions(live, served)[0]["reason"] == "asked"
    live.click("#pause")
    wait_playing(live, PATIENT_MS)


def test_viewers_are_told_when_the_engine_dies_and_see_the_world_go_on(live: Any, served: Served) -> None:
    os.kill(served.engine_pid(), signal.SIGKILL)
    live.wait_for_selector("#notice-title >> text=The engine is starting again", timeout=PATIENT_MS)
    wait_playing(live, PATIENT_MS)
    live.focus("#stage")
    live.keyboard.down("ArrowRight")
    wait_moving(live, tries=600)
    live.keyboard.up("ArrowRight")


def test_a_world_that_two_ranks_share_plays_and_is_steered_in_a_browser(page: Any, tmp_path: Path) -> None:
    if not WEIGHTS.exists():
        pytest.skip(f"the shipped world is not in this checkout: {WEIGHTS.relative_to(ROOT)}")
    server = Served(tmp_path, "--ranks", "2")
    try:
        page.goto(server.address)
        wait_playing(page, PATIENT_MS)
        say(page, "it snows at night")
        page.wait_for_selector("#story li.applied[aria-current] >> text=it snows at night", timeout=PATIENT_MS)
        page.focus("#stage")
        page.keyboard.down("ArrowRight")
        wait_moving(page, tries=400)
        page.keyboard.up("ArrowRight")
    finally:
        assert server.stop() == 0, server.log.read_text()
