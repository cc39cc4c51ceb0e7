"""Modules of the page that are pure: what they answer for what they are given, in a real browser's JavaScript."""

from __future__ import annotations

from typing import Any

import pytest

from server.settings import Limits
from tests.web.fake_server import FakeServer

pytestmark = pytest.mark.browser


@pytest.fixture
def blank(fake: FakeServer, page: Any) -> Any:
    """A page of the server's origin on which nothing runs."""
    page.goto(f"{fake.address}/favicon.svg")
    return page


def test_prompt_to_photon_survives_the_wrap_of_rtp_timestamps(blank: Any) -> None:
    measured = blank.evaluate("""async () => {
      const { Photon } = await import("/photon.js");
      const out = [];
      const photon = new Photon((m) => out.push(m));
      photon.setOrigin(2 ** 32 - 9000);
      photon.sent("p", "prompt", 100);
      photon.shown("p", 18000);                     // arrives at (2**32 - 9000 + 18000) mod 2**32 = 9000
      const frames = [[2 ** 32 - 9000, 150], [2 ** 32 - 3375, 212], [3375, 275], [9000, 337], [14625, 400]];
      for (const [rtp, at] of frames) photon.frame(rtp, at);
      return out;
    }""")
    assert measured == [{"id": "p", "kind": "prompt", "ms": 237}]


def test_prompt_to_photon_finds_a_frame_that_came_before_the_news_of_it(blank: Any) -> None:
    measured = blank.evaluate("""async () => {
      const { Photon } = await import("/photon.js");
      const out = [];
      const photon = new Photon((m) => out.push(m.ms));
      photon.sent("p", "prompt", 0);
      for (let i = 0; i < 20; i++) photon.frame(5000 + i * 5625, i * 62.5);
      photon.setOrigin(5000);
      photon.shown("p", 10 * 5625);
      photon.shown("somebody else's", 0);
      return out;
    }""")
    assert measured == [625]


def test_prompt_to_photon_forgets_what_an_old_connection_showed(blank: Any) -> None:
    measured = blank.evaluate("""async () => {
      const { Photon } = await import("/photon.js");
      const out = [];
      const photon = new Photon((m) => out.push(m.ms));
      photon.setOrigin(0);
      photon.sent("p", "prompt", 0);
      photon.forget();
      photon.setOrigin(77);
      photon.frame(9_000_000, 50);
      photon.shown("p", 0);
      return [out, photon.pts()];
    }""")
    assert measured[0] == []
    assert measured[1] == 9_000_000 - 77


SITUATION = {
    "opening": {"step": "done", "fault": None, "retryAt": 0},
    "session": {"state": "running", "reason": ""},
    "socket": {"state": "open", "why": "", "retryAt": 0},
    "picture": {"state": "playing", "fault": None, "retryAt": 0, "failures": 0},
    "now": 1000,
    "host": "worlds.example",
    "engine": {"state": "ready", "reason": ""},
    "mayCreate": True,
    "isMoving": True,
}

NO_MEDIA = {
    "state": "waiting",
    "retryAt": 4500,
    "failures": 2,
    "fault": {"code": "no-media", "message": "no picture within 12 s"},
}


@pytest.mark.parametrize(
    ("change", "phase", "title", "text"),
    [
        ({}, "playing", None, None),
        ({"isMoving": False}, "late", None, None),
        ({"session": {"state": "paused"}}, "paused", None, None),
        ({"session": {"state": "queued", "queue_position": 1}}, "busy", "Every place is taken", "You are next."),
        (
            {"session": {"state": "queued"}, "engine": {"state": "starting", "reason": ""}},
            "busy",
            "The engine is warming up",
            "starts by itself when it is ready",
        ),
        (
            {"session": {"state": "queued"}, "engine": {"state": "down", "reason": "the weights are missing"}},
            "trouble",
            "The engine does not run",
            "The weights are missing.",
        ),
        ({"picture": NO_MEDIA}, "recovering", "The picture does not get through", "worlds.example lets no UDP through"),
        ({"picture": NO_MEDIA}, "recovering", "The picture does not get through", "Trying again in 4 s."),
        ({"picture": NO_MEDIA | {"failures": 1}}, "recovering", "The picture was lost", "Trying again in 4 s."),
        (
            {"session": {"state": "failed", "reason": "out of memory"}},
            "trouble",
            "This world has broken down",
            "Out of memory.",
        ),
        (
            {"socket": {"state": "closed", "why": "forbidden"}},
            "trouble",
            "You may not watch this world",
            "does not open it",
        ),
        ({"socket": {"state": "waiting", "why": "", "retryAt": 2000}}, "late", None, None),
        (
            {"socket": {"state": "waiting", "why": "", "retryAt": 2000}, "isMoving": False},
            "recovering",
            "The server is out of reach",
            "Trying again in 1 s.",
        ),
        (
            {
                "opening": {"step": "server", "retryAt": 3000, "fault": {"code": "unreachable", "message": ""}},
                "session": None,
            },
            "recovering",
            "The server does not answer",
            "Trying again in 2 s.",
        ),
        (
            {
                "opening": {"step": "world", "retryAt": 0, "fault": {"code": "brand-new-code", "message": "too blue"}},
                "session": None,
            },
            "trouble",
            "The server says no",
            "Too blue.",
        ),
    ],
)
def test_each_trouble_has_a_name_and_an_advice(
    blank: Any, change: dict[str, Any], phase: str, title: str | None, text: str | None
) -> None:
    seen = blank.evaluate(
        "async (situation) => { const { diagnose } = await import('/trouble.js'); return diagnose(situation); }",
        SITUATION | change,
    )
    assert seen["phase"] == phase
    assert (seen["notice"] or {}).get("title") == title
    if text:
        assert text in seen["notice"]["text"]


def test_who_may_not_start_a_world_is_not_offered_to(blank: Any) -> None:
    over = SITUATION | {"session": {"state": "ended", "reason": ""}, "mayCreate": False}
    seen = blank.evaluate("async (situation) => (await import('/trouble.js')).diagnose(situation)", over)
    assert [action["does"] for action in seen["notice"]["actions"]] == ["worlds"]


def test_pauses_between_tries_grow_to_their_bound_and_differ(blank: Any) -> None:
    pauses = blank.evaluate("""async () => {
      const { Backoff } = await import("/connection.js");
      const backoff = new Backoff(500, 10_000);
      return Array.from({ length: 12 }, () => backoff.nextMs());
    }""")
    assert 350 <= pauses[0] <= 500
    assert all(7000 <= pause <= 10_000 for pause in pauses[5:])
    assert len(set(pauses[5:])) > 1


WISHES = """async () => {
  const { Api, Credentials } = await import("/api.js");
  const { Visit } = await import("/visit.js");
  const answers = { "/v1/me": { role: "player", name: "alice" }, "/v1/models": { engine: {}, models: [] } };
  const asked = [];
  let deadlineMs = 0;
  AbortSignal.timeout = (ms) => ((deadlineMs = ms), null);
  window.fetch = async (path, { method, headers }) => {
    if (method !== "POST") return Response.json(answers[path] ?? { sessions: [] });
    asked.push([headers["Idempotency-Key"], deadlineMs]);
    throw new TypeError("the answer is lost");
  };
  const none = () => {};
  const visit = new Visit(new Api(new Credentials()), { onModels: none, onLeave: none, onEnter: none, onChange: none });
  const here = { state: "running", owner: "alice", model: "m", urls: { self: "/v1/sessions/s" } };
  for (const wish of [() => visit.open(), () => visit.start({ seed: 1 }), () => visit.exchange("rain", true)]) {
    visit.session = here;
    await wish();
    await visit.go(visit.choose);
  }
  clearTimeout(visit.retryTimer);
  return asked;
}"""


def test_a_wish_said_again_is_the_same_wish_and_is_given_the_time_the_server_takes(blank: Any) -> None:
    asked = blank.evaluate(WISHES)
    keys = [key for key, _ in asked]
    assert keys[::2] == keys[1::2]
    assert len(set(keys)) == 3
    assert all(deadline_ms > 1000 * Limits().open_s for _, deadline_ms in asked)
