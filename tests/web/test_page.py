"""The page as a visitor sees it: it plays, it can be steered, everybody can use it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.web.fake_server import FakeServer
from tests.web.looking import brightness, entry, pixels, say, wait_moving, wait_playing

pytestmark = pytest.mark.browser


def actions(fake: FakeServer) -> list[list[str]]:
    """The held keys the server was told, one list per change."""
    told: list[list[str]] = []
    for message in fake.heard:
        if message["type"] == "action" and (not told or told[-1] != message["keys"]):
            told.append(message["keys"])
    return told


def test_the_world_plays_at_once_without_a_click(fake: FakeServer, page: Any) -> None:
    page.goto(fake.address)
    wait_playing(page)
    wait_moving(page)
    assert page.url == f"{fake.address}/s/{fake.world().id}"
    assert page.inner_text("#status-text") == "Live"


def test_a_prompt_is_shown_as_sent_then_as_applied_with_its_block_and_changes_the_picture(
    fake: FakeServer, page: Any
) -> None:
    page.goto(fake.address)
    wait_playing(page)
    bright = brightness(page)
    say(page, "night falls on extraordinary hills")
    assert page.input_value("#prompt") == ""
    page.wait_for_selector("#story li.applied[aria-current] >> text=night falls", timeout=10_000)
    applied = next(event for event in fake.world().events if event["type"] == "signal.applied")
    minutes, seconds = divmod(applied["media_ms"] // 1000, 60)
    assert f"{minutes}:{seconds:02} · block {applied['block']}" in entry(page, "night falls").inner_text()
    assert "not understood: extraordinary" in entry(page, "night falls").inner_text()
    page.wait_for_timeout(3000)
    assert brightness(page) < bright * 0.6


def test_prompt_to_photon_is_measured_by_the_frame_on_the_screen(fake: FakeServer, page: Any) -> None:
    page.goto(fake.address)
    wait_playing(page)
    say(page, "a red sunset")
    page.wait_for_selector("#stat-prompt[data-value]", timeout=10_000)
    measured_ms = float(page.get_attribute("#stat-prompt", "data-value"))
    shown = next(event for event in fake.world().events if event["type"] == "signal.shown")
    assert measured_ms > shown["latency_ms"]  # the picture is seen after it has left the server


def test_a_suggestion_sends_its_words(fake: FakeServer, page: Any) -> None:
    page.goto(fake.address)
    wait_playing(page)
    page.click("#suggestions button >> text=a red sunset")
    page.wait_for_selector("#story li.applied >> text=a red sunset", timeout=10_000)


def test_a_refused_prompt_says_why_and_changes_nothing(fake: FakeServer, page: Any) -> None:
    page.goto(fake.address)
    wait_playing(page)
    say(page, "refuse me")
    page.wait_for_selector("#story li.refused")
    assert page.inner_text("#prompt-note") == "the engine refuses this prompt"
    assert page.locator("#story li[aria-current]").inner_text().startswith("a sunny day")


def test_a_prompt_of_somebody_else_appears_in_the_timeline(fake: FakeServer, page: Any) -> None:
    page.goto(fake.address)
    wait_playing(page)
    fake.call(lambda: fake.world().steer({"type": "prompt", "id": "theirs", "text": "snow by another hand"}))
    page.wait_for_selector("#story li.applied >> text=snow by another hand", timeout=10_000)


def test_a_key_is_held_until_it_is_let_go(fake: FakeServer, page: Any) -> None:
    page.goto(fake.address)
    wait_playing(page)
    page.keyboard.down("ArrowRight")
    page.wait_for_selector(".key.held")
    page.keyboard.up("ArrowRight")
    page.keyboard.press("a")
    page.wait_for_timeout(300)
    assert actions(fake) == [["right"], [], ["left"], []]


def test_held_keys_are_let_go_when_the_window_loses_the_focus(fake: FakeServer, page: Any) -> None:
    page.goto(fake.address)
    wait_playing(page)
    page.keyboard.down("ArrowRight")
    page.evaluate("() => { window.dispatchEvent(new Event('blur')); }")
    page.wait_for_timeout(300)
    assert actions(fake) == [["right"], []]


def test_arrows_steer_from_an_empty_prompt_box_and_move_the_cursor_in_a_full_one(fake: FakeServer, page: Any) -> None:
    page.goto(fake.address)
    wait_playing(page)
    page.focus("#prompt")
    page.keyboard.press("ArrowLeft")
    page.keyboard.type("as dawn")
    page.keyboard.press("ArrowLeft")
    page.wait_for_timeout(300)
    assert actions(fake) == [["left"], []]
    assert page.input_value("#prompt") == "as dawn"


def test_a_button_on_the_page_holds_its_key_under_pointer_and_keyboard(fake: FakeServer, page: Any) -> None:
    page.goto(fake.address)
    wait_playing(page)
    page.hover(".key[data-key=right]")
    page.mouse.down()
    page.wait_for_timeout(200)
    page.mouse.up()
    page.focus(".key[data-key=left]")
    page.keyboard.press("Space")
    page.wait_for_timeout(300)
    assert actions(fake) == [["right"], [], ["left"], []]


def test_a_held_key_moves_the_camera(fake: FakeServer, page: Any) -> None:
    page.goto(fake.address)
    wait_playing(page)
    start = fake.world()._landscape.camera_px
    page.keyboard.down("d")
    page.wait_for_timeout(2500)
    page.keyboard.up("d")
    assert fake.world()._landscape.camera_px > start + 60


def test_pause_stops_the_picture_and_resume_goes_on(fake: FakeServer, page: Any) -> None:
    page.goto(fake.address)
    wait_playing(page)
    page.click("#pause")
    page.wait_for_selector("body[data-phase=paused]")
    page.wait_for_timeout(500)
    still = pixels(page)
    page.wait_for_timeout(600)
    assert pixels(page) == still
    assert page.get_attribute("#pause", "aria-label") == "Resume"
    page.keyboard.press("Escape")
    page.focus("#stage")
    page.keyboard.press("p")
    wait_playing(page)
    wait_moving(page)


def test_another_seed_takes_the_place_of_a_world_nobody_else_sees(fake: FakeServer, page: Any) -> None:
    page.goto(fake.address)
    wait_playing(page)
    first = fake.world()
    page.click("#reseed")
    page.wait_for_function("(id) => !location.pathname.endsWith(id)", arg=first.id)
    wait_playing(page)
    assert (first.state, fake.world().state) == ("ended", "running")
    assert fake.world().prompt == first.prompt


def test_a_second_tab_is_a_second_viewer_of_the_same_world(fake: FakeServer, page: Any) -> None:
    page.goto(fake.address)
    wait_playing(page)
    other = page.context.new_page()
    other.goto(fake.address)
    wait_playing(other)
    wait_moving(other)
    page.wait_for_selector("#watching >> text=2 watching")
    assert len(fake.worlds) == 1
    other.close()
    page.wait_for_selector("#watching >> text=1 watching")


def test_leaving_the_page_tells_the_server_at_once(fake: FakeServer, page: Any) -> None:
    page.goto(fake.address)
    wait_playing(page)
    peers = list(fake.world().peers)
    page.goto("about:blank")
    page.wait_for_timeout(500)
    assert fake.deleted_peers == peers


def test_a_spectator_sees_the_world_and_nothing_to_steer_it_with(fake: FakeServer, page: Any, browser: Any) -> None:
    page.goto(fake.address)
    wait_playing(page)
    fake.heard.clear()
    fake.role = "viewer"
    other = browser.new_page()
    other.goto(f"{fake.address}/s/{fake.world().id}?access=v1.viewer")
    wait_playing(other)
    wait_moving(other)
    assert other.is_visible("text=You are watching")
    assert not [part for part in ("#say", "#keys", "#pause", "#reseed", "#open-outputs") if other.is_visible(part)]
    assert other.url.endswith("?access=v1.viewer")
    other.keyboard.press("ArrowRight")
    other.wait_for_timeout(300)
    assert [message for message in fake.heard if message["type"] != "ping"] == []
    other.close()


def test_the_list_of_worlds_shows_who_watches_and_leads_into_them(fake: FakeServer, page: Any) -> None:
    page.goto(fake.address)
    wait_playing(page)
    first = fake.world().id
    page.click("#open-worlds")
    page.wait_for_selector("#world-list >> text=1 watching")
    page.fill("#new-prompt", "snow covers the hills")
    page.fill("#new-seed", "41")
    page.click("#new-world button[type=submit]")
    page.wait_for_function("(id) => !location.pathname.endsWith(id)", arg=first)
    wait_playing(page)
    assert (fake.world().prompt, fake.world().seed) == ("snow covers the hills", 41)
    page.click("#open-worlds")
    page.click("#world-list >> text=a sunny day")
    page.wait_for_function("(id) => location.pathname.endsWith(id)", arg=first)
    wait_playing(page)


def test_a_push_shows_its_state_and_forgets_its_key(fake: FakeServer, page: Any) -> None:
    page.goto(fake.address)
    wait_playing(page)
    page.click("#open-outputs")
    page.fill("#push-url", "rtmp://live.example.com/app")
    page.fill("#push-key", "s3cret")
    page.click("#push button[type=submit]")
    page.wait_for_selector("#output-list >> text=connecting")
    retrying = fake.world().outputs["o0"] | {"state": "retrying", "reason": "connection refused"}
    fake.call(lambda: fake.world().tell({"type": "output", "output": retrying}))
    page.wait_for_selector("#output-list >> text=trying again: connection refused")
    assert page.input_value("#push-key") == ""
    assert "s3cret" not in page.content()
    page.fill("#push-url", "rtmp://169.254.1.1/app")
    page.click("#push button[type=submit]")
    page.wait_for_selector("#push-note >> text=is not a place this server sends to")
    page.click("#output-list button")
    page.wait_for_selector("#output-list li", state="detached")


def test_a_push_that_is_answered_after_we_went_elsewhere_is_not_shown_there(fake: FakeServer, page: Any) -> None:
    page.goto(fake.address)
    wait_playing(page)
    shown = page.evaluate("""async () => {
      const { Outputs } = await import("/outputs.js");
      const parts = [...document.querySelectorAll("[id]")].map((element) => [element.id, element.cloneNode(true)]);
      let answer;
      const api = { credentials: {}, post: () => new Promise((resolve) => (answer = resolve)) };
      const outputs = new Outputs(Object.fromEntries(parts), api);
      const world = (id) => ({ id, urls: { self: id, recording: id }, outputs: [], recording: null });
      const shown = [];
      for (const now of ["first", "second"]) {
        outputs.load(world("first"));
        outputs.page.push.onsubmit(new Event("submit"));
        outputs.load(world(now));
        answer({ id: "o1", kind: "rtmp", state: "live", target: "rtmp://live.example.com/app" });
        await new Promise((resolve) => setTimeout(resolve));
        shown.push(outputs.isUsed());
      }
      return shown;
    }""")
    assert shown == [True, False]


def test_a_recording_is_started_stopped_and_offered(fake: FakeServer, page: Any) -> None:
    page.goto(fake.address)
    wait_playing(page)
    page.click("#open-outputs")
    page.click("#record-toggle")
    page.wait_for_selector("#record-toggle >> text=Stop recording")
    assert page.get_attribute("#recording", "href") == f"/v1/sessions/{fake.world().id}/recording.mp4"
    page.click("#record-toggle")
    page.wait_for_selector("#recording-note >> text=Finished")


def test_share_links_are_made_by_the_server(fake: FakeServer, page: Any) -> None:
    page.goto(fake.address)
    wait_playing(page)
    page.click("#open-share")
    page.wait_for_function("() => document.querySelector('#play-link').value !== ''")
    assert page.input_value("#watch-link") == f"{fake.address}/s/{fake.world().id}?access=v1.viewer"
    assert page.input_value("#play-link").endswith("?access=v1.player")


def test_the_strip_and_the_waterfall_tell_what_was_measured(fake: FakeServer, page: Any) -> None:
    page.goto(fake.address)
    wait_playing(page)
    for cell in ("fps", "speed", "bitrate", "loss", "memory", "drift"):
        page.wait_for_selector(f"#stat-{cell}[data-value]", timeout=15_000)
    assert not page.is_visible("#stat-key")  # nothing was measured, so nothing is claimed
    page.click("#inside summary")
    page.wait_for_function("() => document.querySelector('#waterfall').ariaLabel.includes('step 1')")
    assert page.locator("#legend li").all_inner_texts() == [
        "encode prompt",
        "step 1",
        "step 2",
        "cache write",
        "decode",
    ]
    assert "sharpness" in page.inner_text("#metrics")
    assert "clarity 0.08" in page.get_attribute("#stat-drift", "title")


def test_everything_comes_from_the_server_itself(fake: FakeServer, page: Any) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(fake.address)
    wait_playing(page)
    assert asked and all(url.startswith(fake.address) for url in asked)
