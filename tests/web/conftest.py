"""A headless Chromium and a pretended server for the tests of the page; without a browser they are skipped."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.web.fake_server import FakeServer

ARGUMENTS = (
    "--no-sandbox --disable-gpu --disable-background-networking --no-first-run --disable-quic "
    "--autoplay-policy=no-user-gesture-required"
).split()


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    executable = shutil.which("chromium") or shutil.which("chromium-browser")
    if not executable:
        pytest.skip("there is no chromium on this machine")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=executable, args=ARGUMENTS)
        yield chromium
        chromium.close()


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    server = FakeServer()
    server.start()
    yield server
    server.stop()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page that fails its test when a script on it throws."""
    context = browser.new_context(viewport={"width": 1280, "height": 860})
    opened = context.new_page()
    thrown: list[str] = []
    opened.on("pageerror", lambda error: thrown.append(str(error)))
    yield opened
    context.close()
    assert not thrown
