"""`inferix serve`: runs the application until SIGTERM or SIGINT, ends it in order, exits 0.

With --torchrun rank 0 serves, and every other rank becomes an engine that follows. When the engine is lost the server
ends too, with 1, so that torchrun starts all of them again.

Stopping takes at most the drain limit (10 s) for outputs and recordings, 3 s for requests and 5 s for the engine.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import tempfile
from dataclasses import replace

import h11
import uvicorn
from rich.console import Console
from uvicorn.protocols.http.h11_impl import H11Protocol

from server.app import create_app
from server.messages import MAX_MESSAGE_BYTES
from server.routes.context import Core
from server.settings import Settings, SettingsError, from_arguments

log = logging.getLogger(__name__)

REQUESTS_S = 3
HEAD_S = 10.0  # for a request's first line and headers
OTHERS = ("uvicorn", "uvicorn.error", "websockets", "aioice", "aiortc", "asyncio")


class ImpatientProtocol(H11Protocol):
    """HTTP that hangs up on who does not finish a request's head in time, so that no place is held by half of one."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_watching()

    def _watch(self) -> None:
        """Only a head that is not whole leaves h11 idle: a body to come, an answer due and a WebSocket do not."""
        if self.conn.their_state is not h11.IDLE:
            self._stop_watching()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(HEAD_S, self.timeout_keep_alive_handler)

    def _stop_watching(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class DrainingServer(uvicorn.Server):
    """Ends sessions before it closes connections, so that their viewers still hear why."""

    def __init__(self, config: uvicorn.Config, core: Core) -> None:
        super().__init__(config)
        self._core = core

    @property
    def abandoned(self) -> bool:
        """Whether the engine is gone for good."""
        return self._core.link.abandoned

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        for server in self.servers:
            for one in server.sockets:
                address = one.getsockname()
                Console(stderr=True).print(f"Inferix is at [bold]http://{_shown(address[0])}:{address[1]}/[/bold]")

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or self.abandoned

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._core.sessions.drain("the server stops")
        await super().shutdown(sockets=sockets)


def run(args: argparse.Namespace) -> int:
    try:
        settings = from_arguments(args)
        if settings.rank > 0:
            command = settings.engine.argv(fd=0)  # which leads to no server
            os.execv(command[0], command)
        with tempfile.TemporaryDirectory(prefix="inferix-worlds-") as worlds:
            return _serve(settings, worlds)
    except SettingsError as error:
        Console(stderr=True).print(f"cannot start: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 2


def _serve(settings: Settings, worlds: str) -> int:
    """Serve, with a folder where the engine keeps what its worlds go on from when it is lost."""
    extra = ("--journal-dir", worlds, *settings.engine.extra)
    server = make_server(replace(settings, engine=replace(settings.engine, extra=extra)))
    log_format = "%(asctime)s %(levelname).1s %(name)s %(message)s"
    logging.basicConfig(level=settings.log_level.upper(), format=log_format, force=True)
    quiet_others()
    if not settings.listens_on_loopback_only and settings.token_file is None:
        log.warning("no token file: anybody who reaches %s may watch, only this machine may steer", settings.host)
    for one in (signal.SIGTERM, signal.SIGINT):
        signal.signal(one, _already_handled)  # uvicorn raises the signal again when it is done; we exit 0
    server.run()
    return 0 if server.started and not server.abandoned else 1


def quiet_others() -> None:
    """Libraries log addresses and headers at some level, and in those are links and tokens."""
    for name in OTHERS:
        logging.getLogger(name).setLevel(logging.WARNING)


def make_server(settings: Settings) -> DrainingServer:
    app = create_app(settings)
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        http=ImpatientProtocol,
        access_log=False,  # addresses may carry links; metrics count requests
        log_config=None,
        proxy_headers=False,
        server_header=False,
        limit_concurrency=settings.limits.connections,
        ws_max_size=MAX_MESSAGE_BYTES,
        ws_ping_interval=10,
        ws_ping_timeout=10,
        timeout_graceful_shutdown=REQUESTS_S,
    )
    return DrainingServer(config, app.state.core)


def _already_handled(number: int, frame: object) -> None:
    """The signal has done its work."""


def _shown(host: str) -> str:
    if host in ("0.0.0.0", "::"):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host
