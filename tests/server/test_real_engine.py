"""The server with the engine that is shipped: a world is watched, steered, paused, and outlives its engine."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from pathlib import Path

import pytest

from server.settings import EngineSettings
from tests.server.harness import ROOT, event, live, settings_with, until
from tests.server.watcher import watching

WEIGHTS = ROOT / "engine" / "models" / "tiny" / "weights"


@pytest.mark.skipif(not WEIGHTS.is_dir(), reason="the shipped weights are not in this tree")
async def test_the_shipped_world_lives_through_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    engine = EngineSettings(models=("tiny-world",), device="cpu", backoff_s=0.1, extra=("--journal-dir", str(tmp_path)))
    async with live(dataclasses.replace(settings_with(tmp_path), engine=engine), ready_s=120) as server:
        body = await server.create(seed=7)
        session = server.session(body["id"])
        async with server.ws(session.id, "?after=0") as socket, watching(server.http, session.id) as watcher:
            await event(socket, "state", 60, state="running")
            [frame] = await watcher.frames(1)
            assert (frame.width, frame.height) == (body["width"], body["height"])
            await socket.send('{"type":"prompt","id":"p","text":"it snows at night"}')
            applied = await event(socket, "signal.applied", 60, id="p")
            shown = await event(socket, "signal.shown", 60, id="p")
            assert shown["media_ms"] >= applied["media_ms"] and shown["block"] == applied["block"]
            await socket.send(json.dumps({"type": "action", "id": "a", "keys": body["action_keys"][:1]}))
            await event(socket, "signal.applied", 60, id="a")
            stats = await event(socket, "stats", 60)
            assert stats["kv_bytes"] and stats["fps"] > 0
            await server.http.post(f"/v1/sessions/{session.id}/pause")
            await event(socket, "state", 60, state="paused")
            await server.http.post(f"/v1/sessions/{session.id}/resume")
            await event(socket, "state", 60, state="running")
            await until(lambda: any(tmp_path.glob("*.snapshot")), 60)
            block = session.line.block
            assert server.core.link.pid is not None
            os.kill(server.core.link.pid, signal.SIGKILL)
            await event(socket, "state", 60, state="starting")
            await event(socket, "state", 120, state="running")
            await until(lambda: session.line.block > block + 1, 60)
            assert len(await watcher.frames(2)) == 2
            assert session.opened is not None and session.opened.first_block > 0, "it went on, not anew"
            shown = await event(socket, "block", 60)
            assert shown["block"] > block, "the story goes on with it"
        profile = await server.http.get(f"/v1/sessions/{session.id}/profile?blocks=2")
        assert profile.status_code == 200
