"""One WHEP viewer: an RTCPeerConnection that gets a session's packets as they are, nothing decoded or encoded again.

    offer ──► answer ──► connecting ──► connected ──► gone (DELETE, DTLS close, ICE failure, silence, never connected)

Cleaning up is ours: aiortc neither gives up a viewer that never comes nor survives being closed while it connects.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from datetime import datetime
from fractions import Fraction
from typing import Any, Literal

import aioice.ice
import av
from aiortc import (
    MediaStreamTrack,
    RTCConfiguration,
    RTCIceServer,
    RTCPeerConnection,
    RTCRtpSender,
    RTCRtpTransceiver,
    RTCSessionDescription,
)
from aiortc.mediastreams import MediaStreamError
from aiortc.rtp import RtcpPsfbPacket, unpack_remb_fci

from engine.protocol import CLOCK_HZ, Codec
from server.broadcast import Broadcast, BroadcastOver, Subscription
from server.congestion import Path, Report
from server.problems import Problem
from server.schemas import PeerView
from server.sdp import advertise, clean_offer, has_candidates
from server.settings import IceSettings

log = logging.getLogger(__name__)

TIME_BASE = Fraction(1, CLOCK_HZ)
PLI, FIR, REMB = 1, 4, 15  # payload-specific feedback formats
SETTLE_S = 5.0
CHECK_EVERY_S = 1.0
PeerState = Literal["connecting", "connected", "closed"]

_usual_addresses = aioice.ice.get_host_addresses


def gather_on(*, loopback: bool) -> None:
    """Which of this machine's addresses go into answers; loopback, where asked for or where there is no other."""

    def addresses(use_ipv4: bool, use_ipv6: bool) -> list[str]:
        found: list[str] = _usual_addresses(use_ipv4, use_ipv6)
        return [*(["127.0.0.1"] if use_ipv4 and (loopback or not found) else []), *found]

    aioice.ice.get_host_addresses = addresses


class PacketTrack(MediaStreamTrack):
    """A video track whose pictures are already encoded. Takes its place in the broadcast at the first `recv`, which is
    when the viewer is connected: before that packets would only grow old.
    """

    kind = "video"

    def __init__(self, broadcast: Broadcast) -> None:
        super().__init__()
        self._broadcast = broadcast
        self._last_pts: int | None = None
        self.subscription: Subscription | None = None
        self.sender: RTCRtpSender | None = None
        self.sent_bytes = 0
        self.rtp_origin: int | None = None

    async def recv(self) -> av.Packet[Any]:
        if self.readyState != "live":
            raise MediaStreamError
        if self.subscription is None:
            self.subscription = self._broadcast.subscribe("whep")
        self._note_origin()
        try:
            packet = await self.subscription.get()
        except BroadcastOver as error:
            raise MediaStreamError from error
        out = av.Packet(packet.data)
        out.pts = out.dts = packet.pts
        out.time_base = TIME_BASE
        self.sent_bytes += len(packet.data)
        self._last_pts = packet.pts
        return out

    def stop(self) -> None:
        super().stop()
        if self.subscription is not None:
            self.subscription.close()

    def _note_origin(self) -> None:
        """aiortc adds a random origin to our pts and tells nobody; after the first packet it can be read off."""
        if self.rtp_origin is None and self._last_pts is not None:
            timestamp = getattr(self.sender, "_RTCRtpSender__rtp_timestamp", None)
            if isinstance(timestamp, int):
                self.rtp_origin = (timestamp - self._last_pts) % 2**32


class Peer:
    def __init__(self, broadcast: Broadcast, ice: IceSettings) -> None:
        self._ice = ice
        self._broadcast = broadcast
        self._pc = RTCPeerConnection(RTCConfiguration(iceServers=_ice_servers(ice)))
        self._track = PacketTrack(broadcast)
        self._settled = asyncio.Event()
        self._gone = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._heard_s = 0.0
        self._last_report: datetime | None = None
        self._counted = (0, 0.0)  # bytes and time at the last report
        self.id = secrets.token_urlsafe(16)
        self.codec: Codec = broadcast.codec
        self.state: PeerState = "connecting"
        self.why_gone = ""
        self.path = Path()
        self.sent_bps = 0.0
        self.remb_bps: int | None = None
        self.fraction_lost: float | None = None
        self.round_trip_s: float | None = None
        self._pc.on("connectionstatechange", self._on_state)

    async def answer(self, offer: str) -> str:
        """Take the viewer's offer, return the answer with all candidates in it; raises Problem and leaves nothing."""
        try:
            transceiver = self._pc.addTransceiver(self._track, direction="sendonly")
            transceiver.setCodecPreferences(_codecs(self.codec))
            await self._pc.setRemoteDescription(RTCSessionDescription(clean_offer(offer), "offer"))
            self._decline_all_but(transceiver)
            await self._pc.setLocalDescription(await self._pc.createAnswer())
        except Problem:
            await self._abandon()
            raise
        except Exception as error:  # whatever aiortc makes of an offer it cannot read
            await self._abandon()
            log.info("offer not understood: %s: %s", type(error).__name__, error)
            raise Problem(400, "bad-sdp", "the offer could not be understood") from error
        self._track.sender = transceiver.sender
        self._hear_feedback(transceiver.sender)
        answer = str(self._pc.localDescription.sdp)
        if not has_candidates(answer):
            await self._abandon()
            raise Problem(503, "no-address", "no free port for another viewer", retry_after_s=5)
        return advertise(answer, self._ice.advertise)

    async def run(self) -> None:
        """Live until the viewer is gone, then close everything; the reason is in `why_gone`."""
        try:
            deadline_s = self._loop.time() + self._ice.connect_s
            while not await _within(self._gone, CHECK_EVERY_S):
                if self.state == "connected":
                    await self._check()
                elif self._loop.time() > deadline_s:
                    self.leave(f"not connected after {self._ice.connect_s:g} s")
        finally:
            await self._close()

    def leave(self, why: str) -> None:
        """Ask the viewer's task to end."""
        if not self._gone.is_set():
            self.why_gone = why
            self._gone.set()

    def restrict(self, *, keyframes_only: bool) -> None:
        if self._track.subscription is not None:
            self._track.subscription.restrict(keyframes_only=keyframes_only)

    @property
    def keyframes_only(self) -> bool:
        return self._track.subscription is not None and self._track.subscription.keyframes_only

    def view(self) -> PeerView:
        subscription = self._track.subscription
        return PeerView(
            id=self.id,
            state=self.state,
            codec=self.codec,
            rtp_origin=self._track.rtp_origin,
            keyframes_only=self.keyframes_only,
            packets_sent=subscription.sent if subscription is not None else 0,
            packets_dropped=subscription.dropped if subscription is not None else 0,
            fraction_lost=self.fraction_lost,
            round_trip_ms=None if self.round_trip_s is None else round(self.round_trip_s * 1000, 2),
            remb_bps=self.remb_bps,
        )

    def _on_state(self) -> None:
        state = self._pc.connectionState
        if state == "connected":
            self.state = "connected"
            self._heard_s = self._loop.time()
        if state in ("connected", "failed", "closed"):
            self._settled.set()
        if state in ("failed", "closed"):
            self.leave(f"the connection {state}")

    def _decline_all_but(self, ours: RTCRtpTransceiver) -> None:
        """aiortc would decode what the viewer sends on other lines, and keep it for nobody."""
        for transceiver in self._pc.getTransceivers():
            if transceiver is not ours:
                transceiver.direction = "inactive"

    def _hear_feedback(self, sender: RTCRtpSender) -> None:
        """aiortc keeps keyframe requests and bandwidth estimates to itself; listen in on one sender's reports."""
        original = sender._handle_rtcp_packet

        async def listen(packet: Any) -> None:
            if isinstance(packet, RtcpPsfbPacket):
                if packet.fmt in (PLI, FIR):
                    self._broadcast.want_keyframe()
                elif packet.fmt == REMB:
                    with contextlib.suppress(ValueError):
                        self.remb_bps = int(unpack_remb_fci(packet.fci)[0])
            await original(packet)

        sender._handle_rtcp_packet = listen  # type: ignore[method-assign]

    async def _check(self) -> None:
        """Once a second: has it been heard of, and how well does it receive?"""
        now_s = self._loop.time()
        stats = await self._track.sender.getStats() if self._track.sender else {}
        for report in stats.values():
            if report.type == "remote-inbound-rtp":
                self.fraction_lost = report.fractionLost / 256 if report.fractionLost is not None else None
                self.round_trip_s = report.roundTripTime
                if report.timestamp != self._last_report:  # its own clock may jump: only that it changed counts
                    self._last_report, self._heard_s = report.timestamp, now_s
        sent_bytes, then_s = self._counted
        self.sent_bps = 8 * (self._track.sent_bytes - sent_bytes) / max(now_s - then_s, 1e-3)
        self._counted = (self._track.sent_bytes, now_s)
        self.path.feed(Report(self.fraction_lost or 0.0, self.remb_bps, self.sent_bps))
        if not self.sent_bps:  # a paused world sends nothing, so there is nothing to report on
            self._heard_s = now_s
        elif now_s - self._heard_s > self._ice.silent_s:
            self.leave(f"no report for {self._ice.silent_s:g} s")

    async def _close(self) -> None:
        self.state = "closed"
        self._track.stop()
        await _within(self._settled, SETTLE_S)  # closed while connecting, aiortc leaves tasks behind
        await self._abandon()

    async def _abandon(self) -> None:
        self._track.stop()
        await self._pc.close()


def _codecs(codec: Codec) -> list[Any]:
    """What may be negotiated, best first; rtx is what answers lost packets."""
    known = RTCRtpSender.getCapabilities("video").codecs
    wanted = [one for one in known if one.mimeType.lower() == f"video/{codec}"]
    wanted.sort(key=lambda one: one.parameters.get("profile-level-id") != "42e01f")
    return [*wanted, *(one for one in known if one.mimeType == "video/rtx")]


def _ice_servers(ice: IceSettings) -> list[RTCIceServer]:
    """Never aiortc's default: an unreachable STUN server costs every viewer five seconds."""
    servers = []
    if ice.stun_url:
        servers.append(RTCIceServer(urls=ice.stun_url))
    if ice.turn_url:
        servers.append(RTCIceServer(urls=ice.turn_url, username=ice.turn_user, credential=ice.turn_password))
    return servers


async def _within(event: asyncio.Event, timeout_s: float) -> bool:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True
