from __future__ import annotations

import json

from tests.server.harness import Live, event, until


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
