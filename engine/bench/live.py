"""A live server of our own to measure, seen only from outside: its HTTP, its pictures, its processor time.

Viewers are aiortc peers in this process that receive, decrypt and count but do not decode. Knows nothing of how the
server is made.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from aiortc import RTCConfiguration, RTCPeerConnection, RTCRtpReceiver, RTCSessionDescription, rtcrtpreceiver
from aiortc.mediastreams import MediaStreamError

READY_S = 120.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class ServerFailed(RuntimeError):
    """The server under measurement did not come up, or went away."""


@dataclass
class Server:
    """A running server process."""

    http: httpx.AsyncClient
    pid: int
    up_s: float  # until it answered at all
    ready_s: float  # until the engine had its models

    def cpu_s(self) -> float:
        """Processor seconds of the server process alone, so far; the engine is another process."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS_PER_S

    async def create(self, model: str, **fields: Any) -> httpx.Response:
        return await self.http.post("/v1/sessions", json={"model": model, **fields})

    async def show(self, id: str) -> dict[str, Any]:
        body: dict[str, Any] = (await self.http.get(f"/v1/sessions/{id}")).raise_for_status().json()
        return body

    async def metrics(self) -> str:
        return (await self.http.get("/metrics")).raise_for_status().text


@contextlib.asynccontextmanager
async def serving(model: str, *options: str) -> AsyncIterator[Server]:
    """Start `inferix serve` on a free port, wait until it is ready, end it afterwards. Raises ServerFailed."""
    port, began = _free_port(), time.monotonic()
    command = ["-m", "server", "serve", "--model", model, "--port", str(port), "--record-dir", "", *options]
    process = await asyncio.create_subprocess_exec(sys.executable, *command, stderr=asyncio.subprocess.DEVNULL)
    try:
        with _undecoded():
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as http:
                up_s = await _answered(http, process, "/healthz", began)
                yield Server(http, process.pid, up_s, await _answered(http, process, "/readyz", began))
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()


async def _answered(http: httpx.AsyncClient, process: asyncio.subprocess.Process, path: str, began: float) -> float:
    while time.monotonic() - began < READY_S:
        if process.returncode is not None:
            raise ServerFailed(f"the server ended with status {process.returncode} before it answered {path}")
        with contextlib.suppress(httpx.TransportError):
            if (await http.get(path)).is_success:
                return time.monotonic() - began
        await asyncio.sleep(0.05)
    raise ServerFailed(f"no answer from {path} in {READY_S:.0f} s")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def _undecoded() -> Iterator[None]:
    """Let aiortc's receivers count pictures instead of decoding them, while this lasts."""
    decode = rtcrtpreceiver.decoder_worker
    rtcrtpreceiver.decoder_worker = _count  # type: ignore[assignment]  # the same call, other names
    try:
        yield
    finally:
        rtcrtpreceiver.decoder_worker = decode


@dataclass
class Viewer:
    """One peer that counts pictures as they arrive whole."""

    pc: RTCPeerConnection
    joined_s: float = 0.0  # from the offer to the first picture
    arrived_s: list[float] = field(default_factory=list)

    async def close(self) -> None:
        await self.pc.close()


def _count(loop: asyncio.AbstractEventLoop, inputs: Any, outputs: Any, failed: threading.Event) -> None:
    """In place of aiortc's decoding thread: tell the loop of each whole picture and throw it away."""
    while (task := inputs.get()) is not None:
        asyncio.run_coroutine_threadsafe(outputs.put(task[1]), loop)
    asyncio.run_coroutine_threadsafe(outputs.put(None), loop)


async def watch(server: Server, session: str) -> Viewer:
    """Join a session of a `serving` server; returns when the first picture has arrived."""
    viewer = Viewer(RTCPeerConnection(RTCConfiguration(iceServers=[])))
    transceiver = viewer.pc.addTransceiver("video", direction="recvonly")
    known = RTCRtpReceiver.getCapabilities("video")
    assert known is not None
    transceiver.setCodecPreferences([c for c in known.codecs if c.mimeType in ("video/H264", "video/rtx")])
    began = time.monotonic()
    await viewer.pc.setLocalDescription(await viewer.pc.createOffer())
    offer = viewer.pc.localDescription.sdp
    headers = {"Content-Type": "application/sdp"}
    answer = await server.http.post(f"/v1/sessions/{session}/whep", content=offer, headers=headers)
    answer.raise_for_status()
    await viewer.pc.setRemoteDescription(RTCSessionDescription(answer.text, "answer"))
    track = transceiver.receiver.track
    await track.recv()
    viewer.joined_s = time.monotonic() - began
    viewer.arrived_s.append(time.monotonic())
    asyncio.get_running_loop().create_task(_keep_counting(viewer, track), name="viewer")
    return viewer


async def _keep_counting(viewer: Viewer, track: Any) -> None:
    with contextlib.suppress(MediaStreamError):  # the viewer was closed
        while True:
            await track.recv()
            viewer.arrived_s.append(time.monotonic())
