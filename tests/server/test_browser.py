"""The page that is served, in a real browser, on a real server: joined-up once; the page has tests of its own."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.server.harness import Live, until
from tests.server.scripted_engine import TICKS

playwright = pytest.importorskip("playwright.async_api", reason="playwright is not installed")
CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
]

BRIGHT_COLUMN = """async () => {
  const video = document.querySelector("video");
  if (!video || video.readyState < 2) return null;
  const canvas = new OffscreenCanvas(video.videoWidth, video.videoHeight);
  const context = canvas.getContext("2d");
  context.drawImage(video, 0, 0);
  const { data, width } = context.getImageData(0, 0, canvas.width, canvas.height);
  const row = width * 4 * 40;
  let best = 0;
  for (let x = 0; x < width; x++) if (data[row + x * 4] > data[row + best * 4]) best = x;
  return data[row + best * 4] > 150 ? best : null;
}"""


SHOWN = """() => new Promise((resolve) => document.querySelector("video").requestVideoFrameCallback(
  (now, metadata) => resolve(metadata.rtpTimestamp)))"""


@pytest_asyncio.fixture(loop_scope="session")
async def browser() -> AsyncIterator[Any]:
    async with playwright.async_playwright() as started:
        browser = await started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        await browser.close()


async def columns(page: Any, count: int) -> set[int]:
    """Where the bright bar is, read from the video's pixels, until it was seen in so many places."""
    seen: set[int] = set()
    for _ in range(200):
        column = await page.evaluate(BRIGHT_COLUMN)
        if column is not None:
            seen.add(column)
        if len(seen) >= count:
            break
        await page.wait_for_timeout(50)
    return seen


async def test_two_tabs_see_the_picture_move_from_one_encoding(server: Live, browser: Any) -> None:
    session = server.session((await server.create())["id"])
    address = f"http://{server.base}/s/{session.id}"
    one, two = await browser.new_page(), await browser.new_page()
    errors: list[str] = []
    one.on("pageerror", lambda error: errors.append(str(error)))
    for page in (one, two):
        await page.goto(address)
    assert len(await columns(one, 4)) >= 4
    assert len(await columns(two, 4)) >= 4
    assert len(session.viewers) == 2 and len(session.encodings.h264) == 2 and len(session.encodings.vp8) == 0
    [first, _] = [peer.view() for peer in session.viewers]
    shown_pts = (await one.evaluate(SHOWN) - first.rtp_origin) % 2**32
    assert shown_pts % TICKS == 0 and 0 < shown_pts <= session.line._next_pts
    await two.close(run_before_unload=True)
    await until(lambda: len(session.viewers) == 1, 20)
    await one.close()
    assert errors == []
