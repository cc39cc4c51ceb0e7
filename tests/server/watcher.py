"""A viewer made with aiortc: offers over WHEP, decodes what comes."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
from aiortc import RTCConfiguration, RTCPeerConnection, RTCRtpReceiver, RTCSessionDescription


@contextlib.asynccontextmanager
async def watching(http: httpx.AsyncClient, session_id: str, codec: str = "H264") -> AsyncIterator[Watcher]:
    watcher = Watcher(http, codec)
    try:
        await watcher.join(session_id)
        yield watcher
    finally:
        await watcher.pc.close()


class Watcher:
    def __init__(self, http: httpx.AsyncClient, codec: str = "H264") -> None:
        self._http = http
        self.pc = RTCPeerConnection(RTCConfiguration(iceServers=[]))
        transceiver = self.pc.addTransceiver("video", direction="recvonly")
        known = RTCRtpReceiver.getCapabilities("video")
        assert known is not None
        transceiver.setCodecPreferences([one for one in known.codecs if one.mimeType == f"video/{codec}"])
        self._receiver = transceiver.receiver
        self.location = ""

    @property
    def peer(self) -> str:
        return self.location.rpartition("/")[2]

    async def offer(self) -> str:
        await self.pc.setLocalDescription(await self.pc.createOffer())
        return str(self.pc.localDescription.sdp)

    async def join(self, session_id: str) -> httpx.Response:
        answer = await self._http.post(
            f"/v1/sessions/{session_id}/whep",
            content=await self.offer(),
            headers={"Content-Type": "application/sdp"},
        )
        assert answer.status_code == 201, answer.text
        self.location = answer.headers["Location"]
        await self.pc.setRemoteDescription(RTCSessionDescription(answer.text, "answer"))
        return answer

    async def frames(self, count: int) -> list[Any]:
        return [await self._receiver.track.recv() for _ in range(count)]
