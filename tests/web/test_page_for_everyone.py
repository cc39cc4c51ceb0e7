"""The page with a keyboard only, for a screen reader, in a small window, in both lights, and without motion."""

from __future__ import annotations

from typing import Any

import pytest

from tests.web.fake_server import FakeServer
from tests.web.looking import wait_playing

pytestmark = pytest.mark.browser

NAMELESS = """() => [...document.querySelectorAll("button, input, select, a, canvas[role], video, summary")]
  .filter((e) => !(e.ariaLabel || e.getAttribute("aria-labelledby") || e.labels?.length || e.textContent.trim()))
  .map((e) => e.outerHTML)"""

FAINT = """() => {
  const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const luminance = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const ground = luminance(rgb(getComputedStyle(document.body).backgroundColor));
  const texts = ["#status-text", "#watching", "#say label", ".chip", ".story button", ".when", ".quiet", ".key"];
  return [...texts, "#stats dt", "#stats dd", "#stats small", "summary"]
    .map((name) => [name, luminance(rgb(getComputedStyle(document.querySelector(name)).color))])
    .map(([name, ink]) => [name, (Math.max(ink, ground) + 0.05) / (Math.min(ink, ground) + 0.05)])
    .filter(([, contrast]) => contrast < 4.5);
}"""


def test_the_keyboard_alone_is_enough(fake: FakeServer, page: Any) -> None:
    page.goto(fake.address)
    wait_playing(page)
    page.keyboard.press("Tab")
    assert page.evaluate("() => document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    page.keyboard.press("Escape")
    page.keyboard.press("/")
    page.keyboard.type("night falls")
    page.keyboard.press("Enter")
    page.wait_for_selector("#story li.applied >> text=night falls", timeout=10_000)
    page.focus("#open-worlds")
    page.keyboard.press("Enter")
    assert page.is_visible("#worlds")
    page.keyboard.press("Escape")
    assert not page.is_visible("#worlds")
    assert page.evaluate("() => document.activeElement.id") == "open-worlds"


def test_every_control_has_a_name_and_changes_are_announced(fake: FakeServer, page: Any) -> None:
    page.goto(fake.address)
    wait_playing(page)
    assert page.evaluate(NAMELESS) == []
    page.fill("#prompt", "a red sunset")
    page.press("#prompt", "Enter")
    page.wait_for_selector("#live >> text=/In force from block \\d+: a red sunset/", state="attached", timeout=10_000)
    assert "a red sunset" in page.get_attribute("#video", "aria-label")
    assert "a red sunset" in page.title()


@pytest.mark.parametrize("light", ["dark", "light"])
def test_text_stands_out_in_both_lights(fake: FakeServer, browser: Any, light: str) -> None:
    page = browser.new_page(color_scheme=light)
    page.goto(fake.address)
    wait_playing(page)
    page.wait_for_selector("#stat-speed[data-value]", timeout=10_000)
    assert page.evaluate(FAINT) == []
    page.close()


@pytest.mark.parametrize("width", [320, 390, 768])
def test_a_small_window_needs_no_sideways_scrolling(fake: FakeServer, browser: Any, width: int) -> None:
    page = browser.new_page(viewport={"width": width, "height": 780})
    page.goto(fake.address)
    wait_playing(page)
    assert page.evaluate("() => document.documentElement.scrollWidth") == width
    assert page.evaluate("() => document.querySelector('#frame').getBoundingClientRect().width") <= width
    for button in ("#pause", "#send", ".key"):
        assert page.locator(button).first.bounding_box()["height"] >= 40
    page.close()


def test_picture_pixels_stay_whole_in_a_large_window(fake: FakeServer, browser: Any) -> None:
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    page.goto(fake.address)
    wait_playing(page)
    width = page.evaluate("() => document.querySelector('#frame').clientWidth")
    rendering = page.evaluate("() => getComputedStyle(document.querySelector('#video')).imageRendering")
    assert width % 256 == 0 and width >= 512
    assert rendering == "pixelated"
    page.close()


def test_nothing_moves_but_the_picture_when_motion_is_unwanted(fake: FakeServer, browser: Any) -> None:
    page = browser.new_page(reduced_motion="reduce")
    page.goto(fake.address)
    wait_playing(page)
    fake.is_deaf = True
    page.fill("#prompt", "never answered")
    page.press("#prompt", "Enter")
    page.wait_for_selector("#story li.sent")
    assert page.evaluate("() => document.getAnimations().length") == 0
    page.close()
