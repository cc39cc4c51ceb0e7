"""From a prompt to the picture of it on a screen, measured by the page itself in a real browser.

The page stamps the moment of sending, the server says which frame is the first under the prompt, and the browser says
when it showed that frame: `inferix:photon` on the document carries the difference. Needs playwright and a Chromium.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PATIENCE_MS = 60_000
PROMPTS = ("a thunderstorm arrives", "the sky clears")
NAMES = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = ("--no-sandbox", "--disable-gpu", "--autoplay-policy=no-user-gesture-required", "--mute-audio")
PLAYING = "() => { const v = document.querySelector('video'); return v && v.readyState >= 2 && v.currentTime > 0; }"
LISTEN = """() => { window.photon = null; document.addEventListener("inferix:photon",
  (event) => { window.photon = event.detail; }, { once: true }); }"""


class BrowserFailed(RuntimeError):
    """There is no browser to measure in, or the page did not do there what it should; the message says which."""


@dataclass(frozen=True)
class Photons:
    """Milliseconds of each prompt, and which browser showed them."""

    ms: tuple[float, ...]
    browser: str


async def photons(page_url: str, prompts: int) -> Photons:
    """Open a session's page, say `prompts` prompts one after another, and wait for each to be seen.

    Raises BrowserFailed.
    """
    try:
        from playwright.async_api import Error, async_playwright  # optional: only this measurement needs it
    except ImportError:
        raise BrowserFailed("playwright is not installed") from None
    async with async_playwright() as playwright:
        executable = next((path for name in NAMES if (path := shutil.which(name))), None)
        if executable is None and not Path(playwright.chromium.executable_path).exists():
            raise BrowserFailed("there is no chromium on this machine")
        try:
            browser = await playwright.chromium.launch(executable_path=executable, args=ARGUMENTS)
        except Error as error:
            raise BrowserFailed(f"chromium does not start: {error.message}") from error
        try:
            page = await browser.new_page(viewport={"width": 1280, "height": 860})
            await page.goto(page_url)
            await page.wait_for_function(PLAYING, timeout=PATIENCE_MS)
            seen = [await _say(page, PROMPTS[i % 2]) for i in range(prompts)]
            return Photons(tuple(seen), f"Chromium {browser.version}, headless")
        except Error as error:
            raise BrowserFailed(f"the page: {error.message}") from error
        finally:
            await browser.close()


async def _say(page: Any, text: str) -> float:
    """Send one prompt as a person would; milliseconds until its first picture was shown."""
    await page.evaluate(LISTEN)
    await page.fill("#prompt", text)
    await page.press("#prompt", "Enter")
    await page.wait_for_function("() => window.photon", timeout=PATIENCE_MS)
    return float(await page.evaluate("() => window.photon.ms"))
