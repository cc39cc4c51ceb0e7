"""One session's encodings: H.264 always, VP8 while somebody needs it, and the wishes that go back to the encoder."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from engine.protocol import Codec, Command, Encode, Packet, WantBitrate, WantKeyframe
from server.broadcast import JOIN_GAP_S, Broadcast
from server.metrics import Metrics

VP8_LINGERS_S = 10.0  # a viewer that comes back soon finds the encoder still on


class Encodings:
    def __init__(self, send: Callable[[Command], None], metrics: Metrics) -> None:
        """`send` may lose a command: a world that cannot be told has no encoder either."""
        self._send = send
        self._world: str | None = None
        self._vp8_on = False
        self._vp8_idle_since_s: float | None = None
        self.h264 = Broadcast("h264", self._want_keyframe, metrics)
        self.vp8 = Broadcast("vp8", self._want_keyframe, metrics)

    @property
    def queued(self) -> int:
        return self.h264.queued + self.vp8.queued

    def of(self, codec: Codec) -> Broadcast:
        return self.h264 if codec == "h264" else self.vp8

    def use(self, world: str | None) -> None:
        """The world that makes the packets from now on (None: there is none now)."""
        self._world = world
        self._vp8_on = False
        if len(self.h264):
            self.h264.want_keyframe(JOIN_GAP_S)
        if len(self.vp8):
            self.need("vp8")

    def publish(self, packet: Packet) -> None:
        self.of(packet.codec).publish(packet)

    def need(self, codec: Codec) -> None:
        """Somebody is about to subscribe."""
        if codec == "vp8" and not self._vp8_on and self._world is not None:
            self._send(Encode(self._world, "vp8", on=True))
            self._vp8_on = True
        self._vp8_idle_since_s = None

    def spare(self) -> None:
        """Called now and then: turn VP8 off when nobody has needed it for a while."""
        now_s = asyncio.get_running_loop().time()
        if not self._vp8_on or len(self.vp8) or self._world is None:
            self._vp8_idle_since_s = None
        elif self._vp8_idle_since_s is None:
            self._vp8_idle_since_s = now_s
        elif now_s - self._vp8_idle_since_s > VP8_LINGERS_S:
            self._vp8_on = False
            self._send(Encode(self._world, "vp8", on=False))

    def want_bitrate(self, codec: Codec, bits_per_second: int) -> None:
        if self._world is not None:
            self._send(WantBitrate(self._world, codec, bits_per_second))

    def close(self) -> None:
        self._world = None
        self.h264.close()
        self.vp8.close()

    def _want_keyframe(self, codec: Codec) -> None:
        if self._world is not None:
            self._send(WantKeyframe(self._world, codec))
