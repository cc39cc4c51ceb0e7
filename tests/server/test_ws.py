from __future__ import annotations

import asyncio
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import websockets
from hypothesis import given
from hypothesis import strategies as st

from server.link import EngineUnavailable
from server.messages import MAX_MESSAGE_BYTES, ActionDown, MessageError, PromptDown, parse
from server.settings import Settings
from tests.server.harness import Live, event, live, until

DOCS = Path(__file__).parents[2] / "docs" / "api.md"
EXAMPLES = re.findall(r"```json (ws-down|ws-up)\n(.*?)```", DOCS.read_text(), re.DOTALL)


async def say(socket: Any, **message: Any) -> None:
    await socket.send(json.dumps(message))


async def test_events_are_numbered_and_a_dropped_connection_goes_on_where_it_was(server: Live) -> None:
    id = await server.world()
    async with server.ws(id) as socket:
        await event(socket, "welcome")
        first = [json.loads(await socket.recv())["seq"] for _ in range(3)]
    assert first == list(range(first[0], first[0] + 3))
    await asyncio.sleep(0.6)
    async with server.ws(id, f"?after={first[-1]}") as socket:
        assert not (await event(socket, "welcome"))["gap"]
        assert json.loads(await socket.recv())["seq"] == first[-1] + 1


async def test_a_reader_that_was_away_too_long_is_told(server: Live) -> None:
    id = await server.world()
    async with server.ws(id, "?after=999999") as socket:
        assert (await event(socket, "welcome"))["gap"]
    with pytest.raises(websockets.ConnectionClosed):
        async with server.ws(id, "?after=minus") as socket:
            await socket.recv()


async def test_wrong_messages_are_answered_and_change_nothing(server: Live) -> None:
    id = await server.world()
    async with server.ws(id) as socket:
        await event(socket, "welcome")
        for text, code, answered in [
            ("{", "not-json", None),
            ("[]", "invalid", None),
            ('{"type":"prompt","id":"a","text":"  "}', "invalid", "a"),
            ('{"type":"prompt","text":"x"}', "invalid", None),
            ('{"type":"dance","id":"b"}', "invalid", "b"),
            ('{"type":"action","id":"c","keys":["fly"]}', "invalid", "c"),
            ('{"type":"action","id":"d","values":{"zoom":1.5}}', "invalid", "d"),
            ('{"type":"pause","id":"e","extra":1}', "invalid", "e"),
        ]:
            await socket.send(text)
            error = await event(socket, "error")
            assert (error["code"], error["id"]) == (code, answered), text
        await socket.send(b"binary")
        assert (await event(socket, "error"))["code"] == "not-json"
        await say(socket, type="ping", id="t")
        assert (await event(socket, "pong"))["id"] == "t"
    assert server.session(id).state == "running"
    assert len((await server.show(id))["prompts"]) == 1


async def test_a_message_too_large_closes_the_connection(server: Live) -> None:
    id = await server.world()
    async with server.ws(id) as socket:
        await socket.send("x" * (MAX_MESSAGE_BYTES + 1))
        with pytest.raises(websockets.ConnectionClosed) as closed:
            while True:
                await socket.recv()
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1009


async def test_a_refused_signal_is_an_error_with_its_id(server: Live) -> None:
    id = await server.world()
    async with server.ws(id) as socket:
        await say(socket, type="prompt", id="p", text="!refuse")
        error = await event(socket, "error", id="p")
        assert (error["code"], error["message"]) == ("signal-refused", "ordered to refuse")
    assert (await server.show(id))["prompts"][-1]["state"] == "refused"


async def test_keys_add_up_and_are_released_when_their_connection_goes(server: Live) -> None:
    id = await server.world()
    async with server.ws(id) as one:
        async with server.ws(id) as two:
            await say(one, type="action", id="a1", keys=["left"])
            await event(one, "signal.applied", id="a1")
            await say(two, type="action", id="a2", keys=["right"], values={"zoom": 0.5})
            applied = await event(one, "signal.applied", id="a2")
            assert applied["understood"] == ["left", "right"]
            assert (await server.show(id))["action"] == {"keys": ["left", "right"], "values": {"zoom": 0.5}}
        released = await event(one, "signal.applied")
        assert released["understood"] == ["left"]
    await until(lambda: not server.session(id).line.steering.held().keys)


async def test_keys_pressed_over_http_are_released_by_time(server: Live) -> None:
    id = await server.world()
    async with server.ws(id) as socket:
        answer = await server.http.post(f"/v1/sessions/{id}/action", json={"keys": ["left"], "hold_ms": 600})
        assert answer.status_code == 202
        assert (await event(socket, "signal.applied", signal="action"))["understood"] == ["left"]
        assert (await event(socket, "signal.applied", signal="action"))["understood"] == []


async def test_a_key_held_by_two_is_up_when_both_are_gone(server: Live) -> None:
    id = await server.world()
    steering = server.session(id).line.steering
    async with server.ws(id) as one:
        async with server.ws(id) as two:
            for socket, name in ((one, "a1"), (two, "a2")):
                await say(socket, type="action", id=name, keys=["left"])
                await event(socket, "ack", id=name)
        await until(lambda: len(steering._held) == 1)
        await say(one, type="action", id="a3", keys=[])
        await event(one, "ack", id="a3")
        assert steering.held().keys == ()


def away(command: object) -> None:
    raise EngineUnavailable("the engine is down")


async def test_a_key_that_could_not_be_pressed_is_not_held(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    session = server.session(await server.world())
    monkeypatch.setattr(session, "_send", away)
    answer = await server.http.post(f"/v1/sessions/{session.id}/action", json={"keys": ["left"], "hold_ms": 100})
    assert (answer.status_code, answer.json()["code"]) == (503, "engine-not-ready")
    assert session.line.steering.held().keys == ()


@pytest.mark.parametrize("change", [{"_send": away}, {"opened": None}])
async def test_a_key_let_go_while_the_engine_is_away_stays_up(
    server: Live, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    session = server.session(await server.world())
    async with server.ws(session.id) as socket:
        await say(socket, type="action", id="a1", keys=["left", "right"])
        await event(socket, "signal.applied", id="a1")
        for name, value in change.items():
            monkeypatch.setattr(session, name, value)
        await say(socket, type="action", id="a2", keys=["right"])
        assert (await event(socket, "error", id="a2"))["code"] == "engine-not-ready"
        assert session.line.steering.held().keys == ("right",)


async def test_a_prompt_that_could_not_be_sent_again_is_still_the_one_in_force(
    server: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = server.session(await server.world())
    async with server.ws(session.id) as socket:
        await say(socket, type="prompt", id="p1", text="rain")
        await event(socket, "signal.applied", id="p1")
        monkeypatch.setattr(session, "_send", away)
        await say(socket, type="prompt", id="p1", text="rain")
        assert (await event(socket, "error", id="p1"))["code"] == "engine-not-ready"
    assert (await server.show(session.id))["prompt"] == "rain"


async def test_prompts_apply_in_order_and_of_actions_the_newest_wins(server: Live) -> None:
    id = await server.world()
    async with server.ws(id) as socket:
        for n in range(4):
            await say(socket, type="prompt", id=f"p{n}", text=f"text {n}")
        order: list[str] = []
        while order[-1:] != ["p3"]:
            order.append((await event(socket, "signal.applied", signal="prompt"))["id"])
        assert [id for id in order if id.startswith("p")] == ["p0", "p1", "p2", "p3"]  # the world's first may come late
    assert (await server.show(id))["prompt"] == "text 3"


async def test_too_many_waiting_prompts_and_reused_ids_are_refused(server: Live) -> None:
    id = await server.world()
    await server.http.post(f"/v1/sessions/{id}/pause")
    await until(lambda: server.session(id).state == "paused")
    codes = []
    for n in range(33):
        answer = await server.http.post(f"/v1/sessions/{id}/prompt", json={"text": "x", "id": f"p{n}"})
        codes.append(answer.json().get("code"))
    assert codes == [None] * 32 + ["too-many-prompts"]
    again = await server.http.post(f"/v1/sessions/{id}/action", json={"keys": [], "id": "p3"})
    assert (again.status_code, again.json()["code"]) == (409, "id-in-use")


async def test_too_many_messages_are_refused(server: Live) -> None:
    id = await server.world()
    async with server.ws(id) as socket:
        for _ in range(200):
            await say(socket, type="ping")
        assert (await event(socket, "error"))["code"] == "too-fast"


async def test_viewers_pings_and_the_end_of_a_session(server: Live) -> None:
    id = await server.world()
    async with server.ws(id) as socket:
        await event(socket, "welcome")
        await server.http.delete(f"/v1/sessions/{id}")
        await event(socket, "state", state="ended", reason="stopped")
        with pytest.raises(websockets.ConnectionClosed) as closed:
            await socket.recv()
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1000


async def test_a_session_has_a_bounded_number_of_listeners(settings: Settings) -> None:
    limits = dataclasses.replace(settings.limits, listeners=1)
    async with live(dataclasses.replace(settings, limits=limits)) as server:
        id = await server.world()
        async with server.ws(id) as one:
            await event(one, "welcome")
            async with server.ws(id) as two:
                with pytest.raises(websockets.ConnectionClosed) as closed:
                    await two.recv()
                assert closed.value.rcvd is not None and closed.value.rcvd.code == 1013
        await until(lambda: server.session(id).listeners == 0)
        async with server.ws(id) as three:
            await event(three, "welcome")


async def test_unknown_sessions_close_with_their_code(server: Live) -> None:
    async with server.ws("nobody") as socket:
        with pytest.raises(websockets.ConnectionClosed) as closed:
            await socket.recv()
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 4404


async def test_the_documented_examples_are_what_is_said(server: Live) -> None:
    """Down examples parse; up examples have exactly the fields of what a running session says."""
    for kind, text in EXAMPLES:
        if kind == "ws-down":
            parse(text)
    wanted = {
        message["type"]: set(message) for message in (json.loads(text) for kind, text in EXAMPLES if kind == "ws-up")
    }
    said: dict[str, set[str]] = {}
    id = await server.world()
    async with server.ws(id, "?after=0") as socket:
        await say(socket, type="prompt", id="p", text="rain", mode="blend")
        await say(socket, type="ping", id="t-1")
        await socket.send("{")
        await server.http.post(f"/v1/sessions/{id}/outputs", json={"kind": "recording"})
        async with asyncio.timeout(10):
            while set(wanted) - set(said) - {"viewers"}:
                message = json.loads(await socket.recv())
                said.setdefault(message["type"], set(message))
    assert {type: wanted[type] for type in said} == said


@given(st.text(max_size=200) | st.binary(max_size=200).map(lambda data: data.decode("utf-8", "surrogateescape")))
def test_no_text_breaks_the_parser(text: str) -> None:
    try:
        parse(text)
    except MessageError as error:
        assert error.code in ("not-json", "invalid", "message-too-large")


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=12,
)
FIELDS = st.sampled_from(["type", "id", "text", "mode", "keys", "values", "over_blocks", "seen_ms", "x"])
TYPES = st.fixed_dictionaries({"type": st.sampled_from(["prompt", "action", "pause", "resume", "ping"]) | JSON})


@given(TYPES, st.dictionaries(FIELDS, JSON, max_size=6))
def test_no_message_breaks_the_parser(base: dict[str, Any], more: dict[str, Any]) -> None:
    try:
        message = parse(json.dumps(more | base))
    except MessageError as error:
        assert error.code in ("not-json", "invalid")
        return
    if isinstance(message, PromptDown):
        assert 0 < len(message.text) <= 2000 and 1 <= message.over_blocks <= 64
    if isinstance(message, ActionDown):
        assert all(-1 <= value <= 1 for value in message.values.values())


async def test_held_keys_are_renewed_and_saying_them_again_is_no_news(server: Live) -> None:
    """The engine lets go of what nobody renews; people hear of changes only."""
    session = server.session((await server.create())["id"])
    async with server.ws(session.id) as socket:
        await say(socket, type="action", id="a1", keys=["left"])
        await event(socket, "signal.applied", id="a1")
        renewed_s = session.line.steering._renewed_s
        await say(socket, type="action", keys=["left"])
        await until(lambda: session.line.steering._renewed_s > renewed_s)
        renewed_s = session.line.steering._renewed_s
        await until(lambda: session.line.steering._renewed_s >= renewed_s + 1)
        await say(socket, type="action", id="a2", keys=[])
        applied = await event(socket, "signal.applied")
        assert (applied["id"], applied["understood"]) == ("a2", [])
    assert [entry.id for entry in session.line.steering.journal if entry.signal == "action"] == ["a1", "a2"]
