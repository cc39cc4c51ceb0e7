"""A pretended server for the page: the addresses of docs/api.md, a real WebRTC stream, and faults on demand.

It runs uvicorn in a thread of the test's process; `call` runs something on its event loop.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from tests.web.fake_world import FRAMES_PER_BLOCK, SUGGESTIONS, Event, FakePeer, FakeWorld
from tests.web.landscape import FPS, HEIGHT, WIDTH

WEB = Path(__file__).resolve().parents[2] / "web"
POLICY = (
    "default-src 'self'; img-src 'self' data: blob:; media-src 'self' blob:; style-src 'self' 'unsafe-inline'; "
    "connect-src 'self' ws: wss:; frame-ancestors 'none'; base-uri 'none'"
)


class FakeServer:
    """Faults: `refusals` maps `METHOD last-part-of-path` to a problem; the other knobs are named in `__init__`."""

    def __init__(self) -> None:
        self.worlds: dict[str, FakeWorld] = {}
        self.refusals: dict[str, tuple[int, str, str, int]] = {}
        self.token, self.role = "", "admin"
        self.hides_media = False  # answers without a way to the media: as if UDP were blocked
        self.is_deaf = False  # takes messages and does nothing
        self.starts_in_queue = False
        self.sockets: set[WebSocket] = set()
        self.heard: list[Event] = []
        self.deleted_peers: list[str] = []
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.address = f"http://127.0.0.1:{self.port}"
        self._thread: threading.Thread | None = None

    # ------------------------------------------------------------------------------------------- life

    def start(self) -> None:
        config = uvicorn.Config(self._app(), "127.0.0.1", self.port, log_level="error", ws="websockets-sansio")
        config.lifespan, config.timeout_graceful_shutdown = "off", 1
        self._server = uvicorn.Server(config)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="fake-server")
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)

    def stop(self) -> None:
        if not self._thread:
            return
        self.call(self._end_all)
        self._server.should_exit = True
        self._thread.join(10)
        self._thread = None

    def call(self, act: Callable[[], Awaitable[None] | object]) -> None:
        """Run `act` on the server's loop and wait for it."""

        async def run() -> None:
            result = act()
            if isinstance(result, Awaitable):
                await result

        asyncio.run_coroutine_threadsafe(run(), self._loop).result(15)

    def world(self) -> FakeWorld:
        return list(self.worlds.values())[-1]

    def add(self, prompt: str, seed: int = 7) -> FakeWorld:
        """Another world that plays; call it on the server's loop."""
        world = FakeWorld(secrets.token_hex(4), prompt, seed, "alice")
        self.worlds[world.id] = world
        world.start()
        return world

    def drop_sockets(self, code: int = 1012) -> None:
        async def drop() -> None:
            for connection in list(self.sockets):
                await connection.close(code)

        self.call(drop)

    def drop_peers(self) -> None:
        async def drop() -> None:
            for world in self.worlds.values():
                for peer in list(world.peers.values()):
                    await peer.close()

        self.call(drop)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._server.serve())
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    async def _end_all(self) -> None:
        for world in self.worlds.values():
            world.listeners.clear()  # a server that dies says nothing
            await world.end("the server stops")
        self.worlds.clear()

    # ------------------------------------------------------------------------------------------ HTTP

    def _app(self) -> Starlette:
        at = "/v1/sessions/{id}"
        return Starlette(
            routes=[
                Route("/v1/me", self._guard(self._me)),
                Route("/v1/models", self._guard(self._models)),
                Route("/v1/sessions", self._guard(self._list), methods=["GET"]),
                Route("/v1/sessions", self._guard(self._create), methods=["POST"]),
                Route(at, self._guard(self._one), methods=["GET"]),
                Route(at, self._guard(self._end), methods=["DELETE"]),
                Route(at + "/whep", self._guard(self._join), methods=["POST"]),
                Route(at + "/whep/{peer}", self._guard(self._leave), methods=["DELETE"]),
                Route(at + "/peers/{peer}", self._guard(self._peer)),
                Route(at + "/links", self._guard(self._link), methods=["POST"]),
                Route(at + "/outputs", self._guard(self._push), methods=["POST"]),
                Route(at + "/outputs/{output}", self._guard(self._unpush), methods=["DELETE"]),
                WebSocketRoute(at + "/ws", self._socket),
                Route("/s/{id}", self._page),
                Route("/", self._page),
                Route("/{name}", self._page),
            ]
        )

    def _guard(self, act: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def guarded(request: Request) -> Response:
            given = request.headers.get("authorization", "").removeprefix("Bearer ")
            if self.token and given != self.token:
                return _problem(401, "token-unknown" if given else "token-required", "a token is needed")
            what = f"{request.method} {request.url.path.rsplit('/', 1)[-1]}"
            if what in self.refusals:
                status, code, detail, retry_s = self.refusals[what]
                return _problem(status, code, detail, retry_s)
            if "id" in request.path_params and request.path_params["id"] not in self.worlds:
                return _problem(404, "session-not-found", f"there is no session {request.path_params['id']!r}")
            return await act(request)

        return guarded

    async def _me(self, request: Request) -> Response:
        return JSONResponse(
            {"role": self.role, "name": "alice", "tokens": bool(self.token), "session": None, "ice_servers": []}
        )

    async def _models(self, request: Request) -> Response:
        card = {
            "name": "test-world",
            "width": WIDTH,
            "height": HEIGHT,
            "fps": FPS,
            "frames_per_block": FRAMES_PER_BLOCK,
        }
        card |= {"signals": ["prompt", "action"], "action_keys": ["left", "right"], "suggestions": SUGGESTIONS}
        return JSONResponse({"engine": {"state": "ready", "device": "cpu"}, "models": [card]})

    async def _list(self, request: Request) -> Response:
        return JSONResponse({"sessions": [world.record() for world in reversed(self.worlds.values())]})

    async def _create(self, request: Request) -> Response:
        wish = await request.json()
        world = self.add(wish.get("prompt", SUGGESTIONS[0]), wish.get("seed", 7))
        if wish.get("record"):
            world.recording = {"id": "rec", "state": "live", "reason": "", "bytes": 345678, "seconds": 5.2}
        if self.starts_in_queue:
            world.state, world.queue_position = "queued", 2
        return JSONResponse(world.record(), 201)

    async def _one(self, request: Request) -> Response:
        return JSONResponse(self._of(request).record())

    async def _end(self, request: Request) -> Response:
        world = self._of(request)
        await world.end()
        return JSONResponse(world.record())

    async def _join(self, request: Request) -> Response:
        id, offer = secrets.token_hex(4), (await request.body()).decode()
        sdp = _answer_to_nowhere(offer) if self.hides_media else await FakePeer(self._of(request), id).answer(offer)
        return Response(sdp, 201, {"Location": f"{request.url.path}/{id}"}, "application/sdp")

    async def _leave(self, request: Request) -> Response:
        self.deleted_peers.append(request.path_params["peer"])
        peer = self._of(request).peers.get(request.path_params["peer"])
        if peer:
            await peer.close()
        return JSONResponse({})

    async def _peer(self, request: Request) -> Response:
        peer = self._of(request).peers.get(request.path_params["peer"])
        if not peer:
            return _problem(404, "peer-not-found", "no such peer")
        return JSONResponse({"id": peer.id, "state": "connected", "codec": "h264", "rtp_origin": peer.track.rtp_origin})

    async def _link(self, request: Request) -> Response:
        role = (await request.json())["role"]
        return JSONResponse(
            {"url": f"/s/{request.path_params['id']}?access=v1.{role}", "access": f"v1.{role}", "role": role}, 201
        )

    async def _push(self, request: Request) -> Response:
        wish, world = await request.json(), self._of(request)
        if wish["kind"] == "recording":
            world.recording = {
                "id": "rec",
                "kind": "recording",
                "state": "live",
                "reason": "",
                "bytes": 0,
                "seconds": 0.0,
            }
            return JSONResponse(world.recording, 201)
        if "169.254" in wish["url"]:
            return _problem(403, "target-not-allowed", "169.254.169.254 is not a place this server sends to")
        output = {
            "id": f"o{len(world.outputs)}",
            "kind": "rtmp",
            "state": "connecting",
            "reason": "",
            "audio": wish["audio"],
        }
        output |= {"target": wish["url"] + "/•••", "attempts": 1, "bytes_sent": 0, "packets_dropped": 0}
        world.outputs[str(output["id"])] = output
        return JSONResponse(output, 201)

    async def _unpush(self, request: Request) -> Response:
        world = self._of(request)
        if request.path_params["output"] == "rec":
            world.recording = {"id": "rec", "state": "stopped", "reason": "", "bytes": 900_000, "seconds": 12.5}
            return JSONResponse(world.recording)
        return JSONResponse(world.outputs.pop(request.path_params["output"]))

    async def _page(self, request: Request) -> Response:
        file = WEB / (request.path_params.get("name") or "index.html")
        if not file.is_file():
            return _problem(404, "not-found", f"there is no file {file.name!r}")
        return FileResponse(file, headers={"Content-Security-Policy": POLICY, "Cache-Control": "no-cache"})

    def _of(self, request: Request) -> FakeWorld:
        return self.worlds[request.path_params["id"]]

    # ------------------------------------------------------------------------------------- WebSocket

    async def _socket(self, connection: WebSocket) -> None:
        world = self.worlds.get(connection.path_params["id"])
        await connection.accept("inferix.v1")
        if not world:
            return await connection.close(4404)
        events: asyncio.Queue[Event] = asyncio.Queue(maxsize=1024)
        welcome: Event = {"type": "welcome", "seq": world.record()["seq"], "role": self.role, "gap": False}
        await connection.send_text(
            json.dumps(welcome | {"can_steer": self.role != "viewer", "session": world.record()})
        )
        after = int(connection.query_params.get("after", 2**31))
        for event in [e for e in world.events if e["seq"] > after]:
            events.put_nowait(event)
        world.listeners.add(events.put_nowait)
        self.sockets.add(connection)
        sender = asyncio.create_task(_send_all(connection, events))
        try:
            while True:
                self._hear(world, json.loads(await connection.receive_text()), events)
        except (WebSocketDisconnect, RuntimeError):  # gone, or closed by drop_sockets
            pass
        finally:
            world.listeners.discard(events.put_nowait)
            self.sockets.discard(connection)
            sender.cancel()

    def _hear(self, world: FakeWorld, message: Event, events: asyncio.Queue[Event]) -> None:
        self.heard.append(message)
        if self.is_deaf:
            return
        seq = world.record()["seq"]
        if message["type"] == "ping":
            events.put_nowait({"type": "pong", "seq": seq})
        elif message["type"] in ("pause", "resume"):
            world.change("paused" if message["type"] == "pause" else "running", "asked")
        elif message.get("text") == "refuse me":
            error = {"type": "error", "seq": seq, "id": message["id"], "code": "signal-refused"}
            events.put_nowait(error | {"message": "the engine refuses this prompt"})
        else:
            events.put_nowait({"type": "ack", "seq": seq, "id": message.get("id")})
            world.steer(message)


async def _send_all(connection: WebSocket, events: asyncio.Queue[Event]) -> None:
    while True:
        await connection.send_text(json.dumps(await events.get()))


def _answer_to_nowhere(offer: str) -> str:
    """An answer in order, with nobody behind it: what a browser sees where UDP does not pass."""
    payload = re.search(r"a=fmtp:(\d+) .*profile-level-id=42e01f", offer)
    mid = re.search(r"a=mid:(\S+)", offer)
    assert payload and mid
    fingerprint = ":".join(["AB"] * 32)
    lines = f"""v=0\no=- 1 1 IN IP4 0.0.0.0\ns=-\nt=0 0\na=group:BUNDLE {mid[1]}
m=video 9 UDP/TLS/RTP/SAVPF {payload[1]}
c=IN IP4 0.0.0.0\na=mid:{mid[1]}\na=sendonly\na=rtcp-mux\na=setup:passive\na=ice-ufrag:none\na=ice-pwd:{"x" * 24}
a=fingerprint:sha-256 {fingerprint}\na=rtpmap:{payload[1]} H264/90000
a=fmtp:{payload[1]} level-asymmetry-allowed=1;packetization-mode=1;profile-level-id=42e01f\n"""
    return lines.replace("\n", "\r\n")


def _problem(status: int, code: str, detail: str, retry_s: int = 0) -> Response:
    body: dict[str, Any] = {
        "type": f"urn:inferix:problem:{code}",
        "title": code,
        "status": status,
        "detail": detail,
        "code": code,
    }
    headers = {"Retry-After": str(retry_s)} if retry_s else None
    return JSONResponse(body, status, headers, "application/problem+json")
