"""What the tests of the page look at: the pixels of the video, its state, its numbers."""

from __future__ import annotations

from typing import Any

PIXELS = """() => {
  const video = document.querySelector("#video");
  const canvas = document.createElement("canvas");
  canvas.width = 64; canvas.height = 36;
  const pen = canvas.getContext("2d");
  pen.drawImage(video, 0, 0, 64, 36);
  return Array.from(pen.getImageData(0, 0, 64, 36).data);
}"""


def wait_playing(page: Any, timeout_ms: int = 30_000) -> None:
    page.wait_for_selector("body[data-phase=playing]", timeout=timeout_ms)


def pixels(page: Any) -> list[int]:
    """RGBA values of the picture on the screen, 64 by 36."""
    return list(page.evaluate(PIXELS))


def brightness(page: Any) -> float:
    values = pixels(page)
    return sum(values[i] + values[i + 1] + values[i + 2] for i in range(0, len(values), 4)) / (len(values) / 4 * 3)


def wait_moving(page: Any, tries: int = 100) -> None:
    """Until two looks at the picture differ clearly in some pixels; fails when it stands still."""
    before = pixels(page)
    for _ in range(tries):
        page.wait_for_timeout(100)
        after = pixels(page)
        if sum(abs(a - b) > 12 for a, b in zip(before, after, strict=True)) > 6:
            return
    raise AssertionError("the picture does not move")


def say(page: Any, prompt: str) -> None:
    page.fill("#prompt", prompt)
    page.press("#prompt", "Enter")


def entry(page: Any, prompt: str) -> Any:
    """The prompt's part of the timeline."""
    return page.locator("#story li", has_text=prompt)
