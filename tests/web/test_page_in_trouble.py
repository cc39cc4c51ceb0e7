"""What goes wrong is named with what to do, and what can heal heals by itself."""

from __future__ import annotations

from typing import Any

import pytest

from tests.web.fake_server import FakeServer
from tests.web.looking import say, wait_moving, wait_playing

pytestmark = pytest.mark.browser

NO_SOCKETS = """() => { window.WebSocket = class {
  constructor() { setTimeout(() => this.onclose({ code: 1006 }), 50); }
  close() {}
}; }"""


def test_a_lost_socket_comes_back_and_nothing_that_happened_is_missed(fake: FakeServer, page: Any) -> None:
    page.goto(fake.address)
    wait_playing(page)
    fake.drop_sockets()
    fake.call(lambda: fake.world().steer({"type": "prompt", "id": "meanwhile", "text": "snow meanwhile"}))
    page.wait_for_selector("#story li.applied >> text=snow meanwhile", timeout=15_000)
    wait_playing(page)
    say(page, "night falls")
    page.wait_for_selector("#story li.applied >> text=night falls", timeout=10_000)


def test_a_prompt_without_an_answer_is_sent_again_after_the_socket_came_back(fake: FakeServer, page: Any) -> None:
    page.goto(fake.address)
    wait_playing(page)
    fake.is_deaf = True
    say(page, "night falls")
    page.wait_for_selector("#story li.sent")
    page.wait_for_timeout(200)
    fake.is_deaf = False
    fake.drop_sockets()
    page.wait_for_selector("#story li.applied >> text=night falls", timeout=15_000)
    ids = {message["id"] for message in fake.heard if message["type"] == "prompt"}
    assert len(ids) == 1


def test_a_prompt_that_cannot_be_sent_stays_in_the_box(fake: FakeServer, page: Any) -> None:
    page.goto(fake.address)
    wait_playing(page)
    page.evaluate(NO_SOCKETS)
    fake.drop_sockets()
    page.wait_for_selector("#status-text >> text=Steering is cut off")
    say(page, "night falls")
    assert page.input_value("#prompt") == "night falls"
    assert "Not sent" in page.inner_text("#prompt-note")


def test_a_lost_picture_comes_back_by_itself(fake: FakeServer, page: Any) -> None:
    page.goto(fake.address)
    wait_playing(page)
    first = list(fake.world().peers)
    fake.drop_peers()
    page.wait_for_function(
        "(n) => document.body.dataset.phase === 'playing' && document.querySelector('#watching').textContent === n",
        arg="1 watching",
        timeout=40_000,
    )
    wait_moving(page, tries=250)
    assert list(fake.world().peers) != first


def test_a_server_that_died_is_named_and_the_world_begins_again_when_it_is_back(fake: FakeServer, page: Any) -> None:
    page.goto(fake.address)
    wait_playing(page)
    say(page, "a red sunset")
    page.wait_for_selector("#story li.applied >> text=a red sunset", timeout=10_000)
    fake.stop()
    page.wait_for_selector("#notice-title >> text=The server is out of reach", timeout=20_000)
    fake.start()
    wait_playing(page)
    wait_moving(page)
    assert fake.world().prompt == "a red sunset"


def test_a_full_engine_is_named_and_tried_again(fake: FakeServer, page: Any) -> None:
    fake.refusals["POST sessions"] = (503, "capacity", "two worlds at full rate are all this machine can hold", 2)
    page.goto(fake.address)
    page.wait_for_selector("#notice-text >> text=/Two worlds at full rate.* Trying again in \\d s/")
    del fake.refusals["POST sessions"]
    wait_playing(page)


def test_a_place_in_the_queue_is_told_and_the_world_starts_by_itself(fake: FakeServer, page: Any) -> None:
    fake.starts_in_queue = True
    page.goto(fake.address)
    page.wait_for_selector("#notice-text >> text=You are number 2 in line")
    assert not fake.world().peers
    fake.call(lambda: fake.world().change("running"))
    wait_playing(page)


def test_a_token_is_asked_for_and_kept_for_the_visit(fake: FakeServer, page: Any) -> None:
    fake.token = "correct"
    page.goto(fake.address)
    page.wait_for_selector("#notice-title >> text=This server asks for a token")
    page.fill("#token", "wrong")
    page.press("#token", "Enter")
    page.wait_for_selector("#notice-title >> text=does not know this token")
    page.fill("#token", "correct")
    page.press("#token", "Enter")
    wait_playing(page)
    page.reload()
    wait_playing(page)


def test_a_browser_without_a_common_codec_is_told_so(fake: FakeServer, page: Any) -> None:
    fake.refusals["POST whep"] = (406, "no-common-codec", "neither H.264 nor VP8", 0)
    page.goto(fake.address)
    page.wait_for_selector("#notice-text >> text=It plays neither H.264 nor VP8")


def test_a_world_that_ended_says_why_and_another_can_be_started(fake: FakeServer, page: Any) -> None:
    page.goto(fake.address)
    wait_playing(page)
    fake.call(lambda: fake.world().end("its hour was over"))
    page.wait_for_selector("#notice-text >> text=Its hour was over.")
    page.click("#notice-actions >> text=Start a new world")
    wait_playing(page)
    assert fake.world().state == "running"


def test_an_engine_that_starts_again_is_named_while_the_picture_stands(fake: FakeServer, page: Any) -> None:
    page.goto(fake.address)
    wait_playing(page)
    fake.call(lambda: fake.world().change("starting", "the engine stopped with signal 9"))
    page.wait_for_selector("#notice-text >> text=The engine stopped with signal 9.")
    fake.call(lambda: fake.world().change("running"))
    wait_playing(page)
    wait_moving(page)


def test_an_address_of_a_world_that_is_no_more_leads_on(fake: FakeServer, page: Any) -> None:
    page.goto(f"{fake.address}/s/longgone")
    page.wait_for_selector("#notice-title >> text=This world is no more")
    page.click("#notice-actions >> text=Start a new world")
    wait_playing(page)


def test_a_viewer_waits_where_nothing_is_on(fake: FakeServer, page: Any) -> None:
    fake.role = "viewer"
    page.goto(fake.address)
    page.wait_for_selector("#notice-title >> text=Nothing is on right now")
    assert page.locator("#notice-actions >> text=Start a new world").count() == 0


def test_a_picture_that_no_udp_brings_is_named_with_what_to_do(fake: FakeServer, page: Any) -> None:
    fake.hides_media = True
    page.goto(fake.address)
    page.wait_for_selector("#notice-title >> text=The picture does not get through", timeout=60_000)
    assert "lets no UDP through" in page.inner_text("#notice-text")
    fake.hides_media = False
    wait_playing(page, 60_000)
    wait_moving(page)


def test_a_world_that_ended_with_its_server_begins_again_with_the_next(fake: FakeServer, page: Any) -> None:
    page.goto(fake.address)
    wait_playing(page)
    say(page, "a red sunset")
    page.wait_for_selector("#story li.applied >> text=a red sunset", timeout=10_000)
    fake.call(lambda: fake.world().end("the server stops"))
    fake.drop_sockets(1000)
    fake.stop()
    page.wait_for_selector("#notice-title >> text=The server does not answer", timeout=20_000)
    fake.start()
    wait_playing(page)
    assert fake.world().prompt == "a red sunset"


def test_who_goes_elsewhere_from_the_queue_gives_up_the_place(fake: FakeServer, page: Any) -> None:
    page.goto(fake.address)
    wait_playing(page)
    fake.starts_in_queue = True
    page.click("#reseed")
    page.wait_for_selector("#notice-text >> text=in line")
    waiting = fake.world()
    fake.starts_in_queue = False
    fake.call(lambda: fake.add("snow elsewhere"))
    page.click("#notice-actions >> text=Watch another world")
    page.click("#world-list >> text=snow elsewhere")
    wait_playing(page)
    assert waiting.state == "ended"
