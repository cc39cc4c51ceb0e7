"""One pretended world: a landscape, its H.264 stream, its viewers and its events, on the running event loop.

A test double for the page: it keeps the contract of docs/api.md towards browsers and makes no video with a model.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from fractions import Fraction
from typing import Any, TypeAlias

import av
from aiortc import MediaStreamTrack, RTCConfiguration, RTCPeerConnection, RTCRtpSender, RTCSessionDescription
from aiortc.mediastreams import MediaStreamError

from tests.web.landscape import FPS, HEIGHT, WIDTH, Landscape

Event = dict[str, Any]
Packet: TypeAlias = "av.Packet[Any]"  # generic for the type checker only
CLOCK = Fraction(1, 90_000)
TICKS = 90_000 // FPS
FRAMES_PER_BLOCK = 12
KEPT_EVENTS = 512


class FakeWorld:
    """A world that plays itself from `start()` until `end()`; `listeners` hear its events."""

    def __init__(self, id: str, prompt: str, seed: int, owner: str) -> None:
        self.id, self.prompt, self.seed, self.owner = id, prompt, seed, owner
        self.state, self.reason, self.restarts = "running", "", 0
        self.queue_position: int | None = None
        self.events: deque[Event] = deque(maxlen=KEPT_EVENTS)
        self.listeners: set[Callable[[Event], None]] = set()
        self.peers: dict[str, FakePeer] = {}
        self.outputs: dict[str, Event] = {}
        self.recording: Event | None = None
        self.prompts: list[Event] = []
        self.frame = 0
        self.waiting: list[Event] = []
        self._seq = 0
        self._landscape = Landscape(seed)
        self._landscape.say(prompt)
        self._encoder = _encoder()
        self._unshown: list[Event] = []
        self._task: asyncio.Task[None] | None = None
        first = {"id": "s0", "text": prompt, "mode": "cut", "over_blocks": 4, "at_s": 0.0, "state": "applied"}
        self.prompts.append(first | {"block": 0, "media_ms": 0})

    def start(self) -> None:
        self._task = asyncio.create_task(self._play())

    async def end(self, reason: str = "closed") -> None:
        self.change("ended", reason)
        if self._task:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        for peer in list(self.peers.values()):
            await peer.close()

    def tell(self, event: Event) -> None:
        self._seq += 1
        numbered = {**event, "seq": self._seq}
        self.events.append(numbered)
        for listener in list(self.listeners):
            listener(numbered)

    def change(self, state: str, reason: str = "") -> None:
        self.state, self.reason = state, reason
        self.tell(self._state())

    def steer(self, message: Event) -> None:
        self.waiting.append({**message, "at": asyncio.get_running_loop().time()})
        if message["type"] == "prompt":
            keep = {key: message[key] for key in ("id", "text")}
            self.prompts.append(keep | {"mode": message.get("mode", "cut"), "at_s": None, "state": "waiting"})

    def record(self) -> Event:
        return {
            "id": self.id, "model": "test-world", "state": self.state, "reason": self.reason, "owner": self.owner,
            "seed": self.seed, "width": WIDTH, "height": HEIGHT, "fps": float(FPS), "lead_ms": 750,
            "frames_per_block": FRAMES_PER_BLOCK, "signals": ["prompt", "action"], "action_keys": ["left", "right"],
            "action_values": [], "suggestions": SUGGESTIONS, "prompt": self.prompt, "prompts": self.prompts,
            "media_ms": self._media_ms(), "block": self.frame // FRAMES_PER_BLOCK, "viewers": len(self.peers),
            "max_viewers": 64, "queue_position": self.queue_position, "restarts": self.restarts,
            "outputs": list(self.outputs.values()), "recording": self.recording, "stats": None, "seq": self._seq,
            "urls": {"self": f"/v1/sessions/{self.id}", "page": f"/s/{self.id}"}
            | {name: f"/v1/sessions/{self.id}/{name}" for name in ("ws", "whep", "journal", "profile")}
            | {"recording": f"/v1/sessions/{self.id}/recording.mp4"},
        }  # fmt: skip

    async def _play(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due = max(due + 1 / FPS, loop.time())
            await asyncio.sleep(due - loop.time())
            if self.state != "running":
                continue
            if self.frame % FRAMES_PER_BLOCK == 0:
                self._begin_block()
            self._release()
            if self.frame % FPS == 0:
                self.tell(self._stats())

    def _begin_block(self) -> None:
        block = self.frame // FRAMES_PER_BLOCK
        spread = 20.0 * (block * 7 % 5)
        phases = {"encode_prompt": 12.0 if self.waiting else 0.5, "step_1": 120 + spread, "step_2": 118.0}
        phases |= {"cache_write": 46.0, "decode": 74.0 + spread / 2}
        due_in_ms = 750 - sum(phases.values())
        self.tell({"type": "block", "block": block, "media_ms": self._media_ms(), "frames": FRAMES_PER_BLOCK}
                  | {"phases_ms": phases, "due_in_ms": due_in_ms})  # fmt: skip
        waiting, self.waiting = self.waiting, []
        for message in waiting:
            self._apply(message, block)

    def _apply(self, message: Event, block: int) -> None:
        applied: Event = {"type": "signal.applied", "id": message.get("id", ""), "signal": message["type"]}
        applied |= {"block": block, "media_ms": self._media_ms(), "text": message.get("text", "")}
        if message["type"] == "prompt":
            understood = self._landscape.say(message["text"])
            ignored = [w for w in message["text"].split() if len(w) > 8 and w.lower() not in understood]
            applied |= {"understood": list(understood), "ignored": ignored, "mode": message.get("mode", "cut")}
            self.prompt = message["text"]
            entry = next(p for p in self.prompts if p["id"] == message["id"])
            entry.update(state="applied", block=block, media_ms=self._media_ms())
        else:
            self._landscape.held = frozenset(message["keys"])
        self.tell(applied)
        self._unshown.append({**applied, "at": message["at"]})

    def _release(self) -> None:
        picture = av.VideoFrame.from_ndarray(self._landscape.next_frame(), format="rgb24")
        picture.pts, picture.time_base = self.frame * TICKS, CLOCK
        wants_key = any(peer.wants_keyframe for peer in self.peers.values())
        picture.pict_type = av.video.frame.PictureType.I if wants_key else av.video.frame.PictureType.NONE
        for packet in self._encoder.encode(picture):
            for peer in self.peers.values():
                peer.offer(bytes(packet), self.frame * TICKS, packet.is_keyframe)
        self._tell_shown()
        self.frame += 1

    def _tell_shown(self) -> None:
        now = asyncio.get_running_loop().time()
        shown, self._unshown = self._unshown, []
        for applied in shown:
            event = {key: applied[key] for key in ("id", "block", "media_ms")}
            self.tell(
                event | {"type": "signal.shown", "pts": self.frame * TICKS, "latency_ms": (now - applied["at"]) * 1e3}
            )

    def _media_ms(self) -> int:
        return self.frame * 1000 // FPS

    def _state(self) -> Event:
        return {"type": "state", "state": self.state, "reason": self.reason, "media_ms": self._media_ms()} | {
            "queue_position": self.queue_position
        }

    def _stats(self) -> Event:
        wave = (self.frame // FPS * 37 % 11) / 11
        return {
            "type": "stats", "fps": 16.0, "real_time_factor": 1.7 + 0.3 * wave, "lead_ms": 700.0, "reserve_ms": 30.0,
            "late_blocks": 0, "stretched_ms": 0.0, "viewers": len(self.peers),
            "kv_bytes": {"device": 9_400_000, "host": min(40_000_000, self.frame * 20_000)}, "bitrate": 400_000,
            "block": self.frame // FRAMES_PER_BLOCK, "media_ms": self._media_ms(),
            "metrics": {"drift": 0.08 + 0.05 * wave, "drift_clarity": 0.08, "sharpness": 0.81},
        }  # fmt: skip


SUGGESTIONS = [
    "a sunny day by the forest", "a thunderstorm arrives", "night falls", "a red sunset", "snow covers the hills",
    "the sky clears",
]  # fmt: skip


class FakePeer:
    """One viewer: packets of the world, passed through aiortc as they are."""

    def __init__(self, world: FakeWorld, id: str) -> None:
        self.world, self.id = world, id
        self.wants_keyframe = True
        self.connection = RTCPeerConnection(RTCConfiguration(iceServers=[]))
        self.track = _PacketTrack()
        transceiver = self.connection.addTransceiver(self.track, direction="sendonly")
        self.track.sender = transceiver.sender
        codecs = RTCRtpSender.getCapabilities("video").codecs
        transceiver.setCodecPreferences([c for c in codecs if c.parameters.get("profile-level-id") == "42e01f"])

    async def answer(self, offer: str) -> str:
        offer = offer.replace("a=setup:actpass", "a=setup:active")
        await self.connection.setRemoteDescription(RTCSessionDescription(offer, "offer"))
        await self.connection.setLocalDescription(await self.connection.createAnswer())
        self.world.peers[self.id] = self
        self.world.tell({"type": "viewers", "viewers": len(self.world.peers)})
        return str(self.connection.localDescription.sdp)

    def offer(self, data: bytes, pts: int, is_keyframe: bool) -> None:
        if self.connection.connectionState != "connected" or (self.wants_keyframe and not is_keyframe):
            return
        self.wants_keyframe = False
        packet = av.Packet(data)
        packet.pts, packet.time_base = pts, CLOCK
        with suppress(asyncio.QueueFull):
            self.track.packets.put_nowait(packet)

    async def close(self) -> None:
        if self.world.peers.pop(self.id, None) is None:
            return
        self.world.tell({"type": "viewers", "viewers": len(self.world.peers)})
        for _ in range(100):  # closing while it connects would leave tasks behind
            if self.connection.connectionState not in ("new", "connecting"):
                break
            await asyncio.sleep(0.05)
        self.track.packets.put_nowait(None)
        await self.connection.close()


class _PacketTrack(MediaStreamTrack):
    kind = "video"

    def __init__(self) -> None:
        super().__init__()
        self.packets: asyncio.Queue[Packet | None] = asyncio.Queue(maxsize=64)
        self.sender: Any = None
        self.rtp_origin: int | None = None
        self._before: int | None = None

    async def recv(self) -> Packet:
        if self._before is not None and self.rtp_origin is None:
            self.rtp_origin = (self.sender._RTCRtpSender__rtp_timestamp - self._before) % 2**32
        packet = await self.packets.get()
        if packet is None:
            raise MediaStreamError
        self._before = packet.pts
        return packet


def _encoder() -> av.VideoCodecContext:
    encoder = av.CodecContext.create("libx264", "w")
    assert isinstance(encoder, av.VideoCodecContext)
    encoder.width, encoder.height, encoder.pix_fmt = WIDTH, HEIGHT, "yuv420p"
    encoder.time_base, encoder.framerate, encoder.thread_count = CLOCK, Fraction(FPS), 1
    encoder.profile, encoder.bit_rate, encoder.gop_size = "Baseline", 500_000, 64
    encoder.options = {"preset": "ultrafast", "tune": "zerolatency", "x264-params": "scenecut=0"}
    return encoder
