from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest

from engine.protocol import Ping, Steer, WantKeyframe
from server.link import EngineDown, EngineLink, EngineUnavailable
from server.settings import EngineSettings, Settings
from tests.server.harness import ENGINE, Live, event, live, until
from tests.server.watcher import watching


class Following:
    """A link whose events are collected."""

    def __init__(self, settings: EngineSettings) -> None:
        self.link = EngineLink(settings)
        self.events: list[Any] = []

    async def run(self) -> None:
        async with contextlib.aclosing(self.link.events()) as events:
            async for one in events:
                self.events.append(one)

    @property
    def downs(self) -> list[EngineDown]:
        return [one for one in self.events if isinstance(one, EngineDown)]


@contextlib.asynccontextmanager
async def following(**changes: Any) -> AsyncIterator[Following]:
    follow = Following(dataclasses.replace(ENGINE, **changes))
    task = asyncio.create_task(follow.run())
    try:
        yield follow
    finally:
        await follow.link.close()
        await task


async def test_a_killed_engine_is_noticed_at_once_and_started_again() -> None:
    async with following() as follow:
        await until(lambda: follow.link.ready)
        assert follow.link.pid is not None
        os.kill(follow.link.pid, signal.SIGKILL)
        await until(lambda: not follow.link.ready, 1.0)
        with pytest.raises(EngineUnavailable, match="the engine is"):
            follow.link.send(Ping(1))
        await until(lambda: follow.link.ready)
        assert [one.reason for one in follow.downs] == ["the engine was ended by SIGKILL"]
        assert follow.link.restarts == 1


async def test_a_stopped_engine_is_killed_after_its_deadline() -> None:
    async with following(deadline_s=0.5) as follow:
        await until(lambda: follow.link.ready)
        assert follow.link.pid is not None
        os.kill(follow.link.pid, signal.SIGSTOP)
        await until(lambda: len(follow.downs) == 1)
        assert follow.downs[0].reason == "the engine was killed: no answer to a ping for 0.5 s"


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("import sys; print('no such model'); sys.exit(3)", "the engine ended with exit code 3: no such model"),
        ("import os; os.abort()", "the engine was ended by SIGABRT"),
        ("import socket, sys; socket.socket(fileno=int(sys.argv[2])).sendall(b'\\xff' * 8); input()", "protocol"),
        ("import time; time.sleep(60)", "the engine was killed: no greeting for 0.5 s"),
    ],
)
async def test_an_engine_that_does_not_come_up_says_why_and_is_tried_again(script: str, reason: str) -> None:
    async with following(command=(sys.executable, "-c", script), start_s=0.5) as follow:
        await until(lambda: len(follow.downs) >= 2)
        assert reason in follow.downs[0].reason
        assert follow.downs[1].retry_in_s == 2 * follow.downs[0].retry_in_s


async def test_a_missing_program_is_a_reason_too() -> None:
    async with following(command=("/nowhere/engine",)) as follow:
        await until(lambda: len(follow.downs) >= 1)
        assert "could not be started" in follow.downs[0].reason


async def test_commands_an_engine_does_not_read_are_refused_and_wishes_dropped() -> None:
    async with following(deadline_s=60.0, ping_every_s=60.0, stop_s=0.2) as follow:
        await until(lambda: follow.link.ready)
        assert follow.link.pid is not None
        os.kill(follow.link.pid, signal.SIGSTOP)
        with pytest.raises(EngineUnavailable, match="does not keep up"):
            for _ in range(100_000):
                follow.link.send(Steer("x" * 1000, "w"))
        unsent = follow.link.unsent_bytes
        follow.link.send(WantKeyframe("w", "h264"))
        assert follow.link.unsent_bytes == unsent


async def test_the_engine_is_niced_and_leaves_with_its_link() -> None:
    async with following() as follow:
        await until(lambda: follow.link.ready)
        pid = follow.link.pid
        assert pid is not None and os.getpriority(os.PRIO_PROCESS, pid) >= 10
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert follow.link.state == "stopped"


@pytest.mark.parametrize("order", ["!exit 1", "!garbage", "!hang"])
async def test_viewers_stay_while_the_engine_is_replaced_and_see_the_picture_go_on(
    settings: Settings, order: str
) -> None:
    async with live(settings) as server:
        session = server.session((await server.create(prompt="first"))["id"])
        async with server.ws(session.id) as socket, watching(server.http, session.id) as watcher:
            await server.http.post(f"/v1/sessions/{session.id}/prompt", json={"text": "second"})
            await event(socket, "signal.shown")
            await watcher.frames(3)
            before_ms, block = session.line.media_ms, session.line.block
            await server.http.post(f"/v1/sessions/{session.id}/prompt", json={"text": order})
            lost = await event(socket, "state", state="starting")
            assert lost["reason"].startswith("the engine was lost and is being started again: ")
            await event(socket, "state", state="running", seconds=20)
            await until(lambda: session.line.media_ms > before_ms + 300)
            frames = await watcher.frames(5)
            assert all(a.pts < b.pts for a, b in zip(frames, frames[1:], strict=False))
        body = await server.show(session.id)
        assert body["restarts"] == 1 and body["block"] > block
        assert session.line.steering.current is not None
        assert (await server.http.get(f"/v1/sessions/{session.id}/journal")).json()["restarts"] != []


async def test_a_world_that_kills_the_engine_again_and_again_is_given_up(server: Live) -> None:
    session = server.session((await server.create())["id"])
    for _ in range(4):
        await until(lambda: session.state == "running", 20)
        await server.http.post(f"/v1/sessions/{session.id}/prompt", json={"text": "!exit 7"})
        await until(lambda: session.state != "running")
    await until(lambda: session.state == "failed")
    assert "lost too often" in session.reason and "exit code 7" in session.reason


async def test_without_an_engine_requests_say_so_and_the_server_lives(settings: Settings) -> None:
    async with live(settings) as server:
        assert server.core.link.pid is not None
        os.kill(server.core.link.pid, signal.SIGKILL)
        await until(lambda: not server.core.link.ready)
        answer = await server.http.post("/v1/sessions", json={})
        ready = await server.http.get("/readyz")
        if not server.core.link.ready:
            assert (answer.status_code, answer.json()["code"]) == (503, "engine-not-ready")
            assert ready.status_code == 503
        assert (await server.http.get("/healthz")).status_code == 200
        await until(lambda: server.core.link.ready)
        await server.create()
