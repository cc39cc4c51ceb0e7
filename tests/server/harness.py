"""A real server (uvicorn, sockets) with the scripted engine, inside the test's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import websockets

from server.routes.context import Core
from server.serve import make_server
from server.session import Session
from server.settings import EngineSettings, Limits, Settings

ROOT = Path(__file__).parents[2]
SCRIPT = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tests.server.scripted_engine import main; main()"
ENGINE = EngineSettings(
    command=(sys.executable, "-c", SCRIPT), ping_every_s=0.1, deadline_s=2.0, backoff_s=0.05, stop_s=2.0
)

LIMITS = Limits(requests_per_s=1000, sessions=64)


@dataclasses.dataclass
class Live:
    core: Core
    port: int
    http: httpx.AsyncClient

    @property
    def base(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def create(self, **fields: Any) -> dict[str, Any]:
        answer = await self.http.post("/v1/sessions", json=fields)
        assert answer.status_code == 201, answer.text
        body: dict[str, Any] = answer.json()
        return body

    async def world(self, **fields: Any) -> str:
        """The id of a new session whose first picture is out."""
        id: str = (await self.create(**fields))["id"]
        await until(lambda: self.session(id).state == "running")
        return id

    async def show(self, id: str) -> dict[str, Any]:
        body: dict[str, Any] = (await self.http.get(f"/v1/sessions/{id}")).json()
        return body

    def session(self, id: str) -> Session:
        return self.core.sessions.get(id)

    def ws(self, id: str, query: str = "", **options: Any) -> websockets.connect:
        return websockets.connect(f"ws://{self.base}/v1/sessions/{id}/ws{query}", close_timeout=1, **options)


@contextlib.asynccontextmanager
async def live(settings: Settings, ready_s: float = 10.0) -> AsyncIterator[Live]:
    server = make_server(settings)
    task = asyncio.create_task(server.serve())
    try:
        await until(lambda: server.started or task.done())
        if task.done():
            task.result()
        port = server.servers[0].sockets[0].getsockname()[1]
        core: Core = server._core
        await until(lambda: core.link.ready, ready_s)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as http:
            yield Live(core, port, http)
    finally:
        server.should_exit = True
        await task


async def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait for a condition; failing says which one."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


async def event(socket: Any, type: str, seconds: float = 10.0, **fields: Any) -> dict[str, Any]:
    """The next event of a type (with these fields) on a session's WebSocket."""
    async with asyncio.timeout(seconds):
        while True:
            message: dict[str, Any] = json.loads(await socket.recv())
            if message["type"] == type and all(message.get(name) == value for name, value in fields.items()):
                return message


def settings_with(folder: Path, **changes: Any) -> Settings:
    return Settings(port=0, engine=ENGINE, record_dir=folder / "recordings", limits=LIMITS, **changes)
