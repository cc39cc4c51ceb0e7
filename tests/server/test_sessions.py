from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal

import pytest

from server.link import EngineUnavailable
from server.outputs import Outputs
from server.session import NOBODY
from server.settings import Limits, Settings
from server.targets import AllowRule, Target
from tests.server.harness import Live, event, live, until
from tests.server.watcher import watching

PUSH = {"kind": "rtmp", "url": "rtmp://127.0.0.1:1/live", "key": "k"}


class Lookups:
    """Host names are looked up for as long as the test likes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked = 0
        self.done = asyncio.Event()
        monkeypatch.setattr(AllowRule, "addresses", lambda rule, target: self._addresses(target))

    async def _addresses(self, target: Target) -> list[str]:
        self.asked += 1
        await self.done.wait()
        return [target.host]


async def test_a_session_runs_is_steered_and_ends(server: Live) -> None:
    body = await server.create(prompt="a bar", seed=3)
    id = body["id"]
    assert (body["seed"], body["width"], body["model"]) == (3, 128, "scripted")
    async with server.ws(id) as socket:
        welcome = await event(socket, "welcome")
        assert welcome["can_steer"] and welcome["session"]["id"] == id
        await socket.send(json.dumps({"type": "prompt", "id": "p1", "text": "rain", "mode": "blend"}))
        await event(socket, "ack", id="p1")
        applied = await event(socket, "signal.applied", id="p1")
        shown = await event(socket, "signal.shown", id="p1")
        assert (applied["text"], applied["mode"]) == ("rain", "blend")
        assert shown["block"] == applied["block"] and shown["media_ms"] == applied["media_ms"]
        assert (await server.http.delete(f"/v1/sessions/{id}")).status_code == 200
        await event(socket, "state", state="ended")
    await until(lambda: server.session(id).history.over)
    assert (await server.show(id))["prompt"] == "rain"
    again = await server.http.delete(f"/v1/sessions/{id}")
    assert (again.status_code, again.json()["state"]) == (200, "ended")
    refused = await server.http.post(f"/v1/sessions/{id}/prompt", json={"text": "more"})
    assert (refused.status_code, refused.json()["code"]) == (409, "session-over")


async def test_a_schedule_is_told_as_it_comes_into_force(server: Live) -> None:
    body = await server.create(prompt="first", prompts=[{"at": "0.5s", "text": "second", "mode": "blend"}])
    assert (body["prompts"][1]["state"], body["prompts"][1]["at_s"]) == ("scheduled", 0.5)
    async with server.ws(body["id"], "?after=0") as socket:
        await event(socket, "signal.applied", text="first")
        await event(socket, "signal.applied", text="second")
    body = await server.show(body["id"])
    assert [(one["text"], one["state"], one["media_ms"]) for one in body["prompts"]] == [
        ("first", "applied", 0),
        ("second", "applied", 500),
    ]
    journal = (await server.http.get(body["urls"]["journal"])).json()
    assert [one["text"] for one in journal["signals"]] == ["first", "second"]
    assert journal["spec"]["seed"] == body["seed"]


async def test_the_same_key_makes_the_same_session(server: Live) -> None:
    async def post(key: str, seed: int) -> tuple[int, str]:
        answer = await server.http.post("/v1/sessions", json={"seed": seed}, headers={"Idempotency-Key": key})
        return answer.status_code, answer.json().get("id", answer.json().get("code"))

    answers = await asyncio.gather(*(post("k1", 5) for _ in range(3)))
    assert len(set(answers)) == 1 and answers[0][0] == 201
    assert len(server.core.sessions.living()) == 1
    assert await post("k1", 6) == (422, "idempotency-key-reused")
    assert (await post("k2", 5))[1] != answers[0][1]


async def test_a_key_whose_request_failed_may_be_used_again(server: Live) -> None:
    for width, status in ((64, 422), (64, 422)):
        answer = await server.http.post("/v1/sessions", json={"width": width}, headers={"Idempotency-Key": "k"})
        assert answer.status_code == status
    assert not server.core.sessions.living()


async def test_a_full_engine_refuses_with_its_reason_and_queues_if_asked(settings: Settings) -> None:
    engine = dataclasses.replace(settings.engine, extra=("--worlds", "1"))
    async with live(dataclasses.replace(settings, engine=engine)) as server:
        first = await server.create()
        refused = await server.http.post("/v1/sessions", json={})
        assert (refused.status_code, refused.json()["code"]) == (503, "capacity")
        assert refused.json()["detail"] == "1 worlds are all it can do"
        assert int(refused.headers["retry-after"]) >= 1
        assert len(list(server.core.sessions)) == 1
        second = await server.create(queue=True)
        third = await server.create(queue=True)
        assert (second["state"], second["queue_position"], third["queue_position"]) == ("queued", 1, 2)
        assert (await server.http.post(f"/v1/sessions/{second['id']}/prompt", json={"text": "x"})).status_code == 503
        async with server.ws(third["id"]) as socket:
            await server.http.delete(f"/v1/sessions/{first['id']}")
            await event(socket, "state", queue_position=1)
            await until(lambda: server.session(second["id"]).state == "running")
            await server.http.delete(f"/v1/sessions/{second['id']}")
            await event(socket, "state", state="running")


async def test_a_queued_session_can_be_given_up(settings: Settings) -> None:
    engine = dataclasses.replace(settings.engine, extra=("--worlds", "1"))
    async with live(dataclasses.replace(settings, engine=engine)) as server:
        await server.create()
        second = await server.create(queue=True)
        assert (await server.http.delete(f"/v1/sessions/{second['id']}")).json()["state"] == "ended"
        third = await server.create(queue=True)
        assert third["queue_position"] == 1


async def test_a_session_whose_outputs_cannot_be_started_ends(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(outputs: Outputs, request: object) -> None:
        raise OSError("no certificates")

    monkeypatch.setattr(Outputs, "start", broken)
    known = set(server.core.sessions)
    refused = await server.http.post("/v1/sessions", json={"record": True})
    assert refused.status_code == 500
    [session] = set(server.core.sessions) - known
    await until(lambda: session.state == "ended")
    assert session.reason == "an output could not be started: no certificates"


async def test_pause_and_resume(server: Live) -> None:
    id = (await server.create())["id"]
    session = server.session(id)
    await server.http.post(f"/v1/sessions/{id}/pause")
    await until(lambda: session.state == "paused")
    assert session.reason == "asked"
    media_ms = session.line.media_ms
    await asyncio.sleep(0.3)
    assert session.line.media_ms == media_ms
    await server.http.post(f"/v1/sessions/{id}/resume")
    await until(lambda: session.line.media_ms > media_ms)


async def test_a_world_takes_signals_and_a_pause_before_its_first_picture(server: Live) -> None:
    id = (await server.create(prompt="!late"))["id"]
    session = server.session(id)
    assert session.state == "starting"
    assert (await server.http.post(f"/v1/sessions/{id}/prompt", json={"text": "rain"})).status_code == 202
    async with server.ws(id, "?after=0") as socket:
        assert (await event(socket, "signal.applied", text="rain"))["block"] == 0
    id = (await server.create(prompt="!late"))["id"]
    assert server.session(id).state == "starting"
    await server.http.post(f"/v1/sessions/{id}/pause")
    await until(lambda: server.session(id).state == "paused")
    await server.http.post(f"/v1/sessions/{id}/resume")
    await until(lambda: server.session(id).line.media_ms > 0)


async def test_an_unwatched_world_pauses_and_goes_on_when_somebody_comes(settings: Settings) -> None:
    settings = dataclasses.replace(settings, limits=Limits(pause_after_s=0.1))
    async with live(settings) as server:
        session = server.session((await server.create())["id"])
        await until(lambda: session.state == "paused")
        assert session.reason == "nobody is watching"
        async with watching(server.http, session.id) as watcher:
            await watcher.frames(3)
            assert session.state == "running"
            await asyncio.sleep(2.2)
            assert session.state == "running"
        await until(lambda: session.state == "paused")
        await server.http.post(f"/v1/sessions/{session.id}/pause")
        async with watching(server.http, session.id):
            await asyncio.sleep(0.3)
            assert (session.state, session.reason) == ("paused", "asked")


@pytest.mark.parametrize(
    ("limits", "reason"),
    [({"lifetime_s": 0.5}, "its lifetime of 0.5 s is over"), ({"idle_s": 0.5}, "nobody was there for 0.5 s")],
)
async def test_limits_end_a_session_and_say_so(server: Live, limits: dict[str, float], reason: str) -> None:
    session = server.session((await server.create(limits=limits))["id"])
    await until(lambda: session.state == "ended")
    assert session.reason == reason


async def test_a_request_cannot_raise_the_limits(server: Live) -> None:
    body = await server.create(limits={"lifetime_s": 1e8})
    assert body["limits"]["lifetime_s"] == server.core.settings.limits.lifetime_s


async def test_one_world_failing_ends_that_session_alone(server: Live) -> None:
    bad, good = [server.session((await server.create())["id"]) for _ in range(2)]
    await server.http.post(f"/v1/sessions/{bad.id}/prompt", json={"text": "!fail"})
    await until(lambda: bad.state == "failed")
    assert bad.reason == "ordered to fail"
    media_ms = good.line.media_ms
    await until(lambda: good.line.media_ms > media_ms)


async def test_wrong_requests_say_what_was_expected(server: Live) -> None:
    async def problem(**fields: object) -> tuple[int, str, str]:
        answer = await server.http.post("/v1/sessions", json=fields)
        assert answer.headers["content-type"] == "application/problem+json"
        body = answer.json()
        return answer.status_code, body["code"], body["detail"]

    assert await problem(model="other") == (422, "model-unknown", "model: expected one of scripted, got 'other'")
    assert (await problem(prompt="x" * 2001))[:2] == (422, "invalid")
    assert "steps" in (await problem(steps=0))[2]
    assert (await problem(unknown=1))[:2] == (422, "invalid")
    assert (await problem(width=64)) == (422, "invalid", "width: expected 128, got 64")
    assert (await problem(prompt="a", prompts=[{"at": 0, "text": "b"}]))[:2] == (422, "invalid")
    not_json = await server.http.post("/v1/sessions", content="{", headers={"Content-Type": "application/json"})
    assert (not_json.status_code, not_json.json()["code"]) == (400, "bad-request")
    form = await server.http.post("/v1/sessions", data={"prompt": "x"})
    assert (form.status_code, form.json()["code"]) == (415, "wrong-media-type")
    large = await server.http.post("/v1/sessions", content=b" " * 70_000, headers={"Content-Type": "application/json"})
    assert (large.status_code, large.json()["code"]) == (413, "body-too-large")
    assert (await server.http.get("/v1/sessions/none")).json()["code"] == "session-not-found"
    assert (await server.http.put("/v1/sessions")).headers["allow"]
    assert (await server.http.get("/v1/nothing")).status_code == 404


async def test_the_server_limits_sessions(settings: Settings) -> None:
    async with live(dataclasses.replace(settings, limits=Limits(sessions=1))) as server:
        await server.create()
        answer = await server.http.post("/v1/sessions", json={})
        assert (answer.status_code, answer.json()["code"]) == (503, "capacity")


async def test_sessions_asked_for_at_once_are_limited_too(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.core.sessions, "_limits", Limits(sessions=1))
    lookups = Lookups(monkeypatch)
    asked = [asyncio.create_task(server.http.post("/v1/sessions", json={"outputs": [PUSH]})) for _ in range(3)]
    await until(lambda: lookups.asked == 3)
    lookups.done.set()
    answers = await asyncio.gather(*asked)
    assert sorted(answer.status_code for answer in answers) == [201, 503, 503]
    assert len(server.core.sessions.living()) == 1


async def test_a_session_that_ends_while_an_output_is_looked_up_takes_it_no_more(
    server: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = server.session(await server.world())
    lookups = Lookups(monkeypatch)
    asked = asyncio.create_task(server.http.post(f"/v1/sessions/{session.id}/outputs", json=PUSH))
    await until(lambda: lookups.asked == 1)
    await server.http.delete(f"/v1/sessions/{session.id}")
    await until(lambda: session.over)
    lookups.done.set()
    answer = await asked
    assert (answer.status_code, answer.json()["code"]) == (409, "session-over")
    assert not session.outputs.views()


@pytest.mark.parametrize("is_killed", [False, True])
async def test_who_comes_while_the_engine_cannot_be_told_is_let_in_and_ends_the_pause(
    server: Live, monkeypatch: pytest.MonkeyPatch, is_killed: bool
) -> None:
    def away(command: object) -> None:
        raise EngineUnavailable("the engine does not keep up")

    session = server.session(await server.world())
    session.pause(NOBODY)
    await until(lambda: session.state == "paused")
    with monkeypatch.context() as patch:
        patch.setattr(session, "_send", away)
        answer = await server.http.post(f"/v1/sessions/{session.id}/outputs", json=PUSH)
        assert answer.status_code == 201, answer.text
        async with watching(server.http, session.id):
            assert len(session.viewers) == 1
        if is_killed:
            assert server.core.link.pid is not None
            os.kill(server.core.link.pid, signal.SIGKILL)
    await until(lambda: session.state == "running", 60)


async def test_the_profile_comes_from_the_engine(server: Live) -> None:
    id = (await server.create())["id"]
    answer = await server.http.get(f"/v1/sessions/{id}/profile?blocks=7&format=trace")
    assert answer.json() == {"blocks": 7, "trace": True}


async def test_models_and_health(server: Live) -> None:
    models = (await server.http.get("/v1/models")).json()
    assert models["engine"]["state"] == "ready" and models["models"][0]["action_keys"] == ["left", "right"]
    assert (await server.http.get("/healthz")).json()["status"] == "ok"
    assert (await server.http.get("/readyz")).status_code == 200
    me = (await server.http.get("/v1/me")).json()
    assert (me["role"], me["tokens"], me["ice_servers"]) == ("admin", False, [])
