"""A session's own time: what the engine says of its worlds, one after the other, told as one story.

The engine numbers a world's blocks and times from 0. When a world had to be opened again because the engine died, what
came before (`Origin`) is added, so that the session's clock, its packets and its events go on. Two times run side by
side: media time is a picture's place in the story, `pts` is when it was due to be shown, stalls and pauses included.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

import msgspec

from engine.protocol import CLOCK_HZ, BlockDone, Packet, SignalApplied, SignalRefused, Stats, WorldSpec
from server import messages
from server.encodings import Encodings
from server.history import History
from server.metrics import Metrics
from server.steering import RENEWAL, Steering

REOPENS, REOPENS_WITHIN_S = 3, 600.0
SHIFTS_KEPT = 64
SHIFT_MS = 2.0  # more than rounding makes


@dataclass(frozen=True)
class Origin:
    """What came before the present world's first block."""

    block: int = 0
    media_ms: int = 0
    pts: int | None = 0  # None: the first packet decides, by the time that has passed


class Worldline:
    def __init__(self, spec: WorldSpec, history: History, encodings: Encodings, metrics: Metrics) -> None:
        self._history = history
        self._encodings = encodings
        self._metrics = metrics
        self._origin = Origin()
        self._next_pts = 0
        self._last_packet_s = 0.0
        self._shown: deque[tuple[int, int]] = deque(maxlen=SHIFTS_KEPT)
        self.spec = spec
        self.steering = Steering(spec)
        self.block = 0
        self.media_ms = 0
        self.stats: Stats | None = None
        self.restarts_ms: list[int] = []
        self._lost_s: list[float] = []

    def world_ms(self, media_ms: int | None) -> int | None:
        """Session time → the present world's time; None of a time that nobody can have seen yet."""
        if media_ms is None or media_ms > self.media_ms:
            return None
        return max(0, media_ms - self._origin.media_ms)

    def media_ms_at(self, pts: int) -> int | None:
        """Media time of the picture that was on the screen at `pts`; None before the first or too long ago."""
        earlier = [(shown_pts, media_ms) for shown_pts, media_ms in self._shown if shown_pts <= pts]
        if not earlier:
            return None
        shown_pts, media_ms = earlier[-1]
        return min(self.media_ms, media_ms + 1000 * (pts - shown_pts) // CLOCK_HZ)

    def at(self, world_ms: int) -> None:
        """The present world has reached this time."""
        self.media_ms = max(self.media_ms, self._origin.media_ms + world_ms)

    def on_packet(self, event: Packet) -> None:
        now_s = asyncio.get_running_loop().time()
        event = self._ours(event, now_s)
        self._last_packet_s = now_s
        self._next_pts = max(self._next_pts, event.pts + event.duration)
        self.media_ms = max(self.media_ms, event.media_ms)
        self._note_shift(event)
        self._encodings.publish(event)
        for shown in self.steering.shown(event):
            latency_s = now_s - shown.received_s
            if shown.applied.signal == "prompt":
                self._metrics.prompt_seconds.observe(latency_s)
            self._history.append(
                messages.SignalShown(
                    id=shown.id,
                    block=event.block,
                    media_ms=event.media_ms,
                    pts=event.pts,
                    latency_ms=round(latency_s * 1000, 1),
                )
            )

    def on_block(self, event: BlockDone) -> None:
        self.block = event.block + self._origin.block
        self._metrics.observe_block(event.phases_ms, event.frames, event.due_in_ms)
        self._history.append(
            messages.Block(
                block=self.block,
                media_ms=event.media_ms + self._origin.media_ms,
                frames=event.frames,
                phases_ms=event.phases_ms,
                due_in_ms=event.due_in_ms,
            )
        )

    def on_applied(self, event: SignalApplied) -> None:
        if event.id == RENEWAL:
            return
        event = msgspec.structs.replace(event, block=event.block + self._origin.block)
        self._history.append(self.steering.applied(event, event.media_ms + self._origin.media_ms))

    def on_refused(self, event: SignalRefused) -> None:
        id = self.steering.refused(event.id)
        self._history.append(messages.Error(id=id, code="signal-refused", message=event.message))

    def on_stats(self, event: Stats, viewers: int) -> None:
        block, media_ms = event.block + self._origin.block, event.media_ms + self._origin.media_ms
        self.stats = stats = msgspec.structs.replace(event, block=block, media_ms=media_ms)
        self._history.append(
            messages.Stats(
                fps=stats.fps,
                real_time_factor=stats.real_time_factor,
                lead_ms=stats.lead_ms,
                reserve_ms=stats.reserve_ms,
                late_blocks=stats.late_blocks,
                stretched_ms=stats.stretched_ms,
                viewers=viewers,
                kv_bytes=stats.kv_bytes,
                bitrate=stats.bitrate,
                block=block,
                media_ms=media_ms,
                metrics=stats.metrics,
            )
        )

    def lost(self) -> None:
        """The engine, and with it the present world, is gone."""
        now_s = asyncio.get_running_loop().time()
        self.restarts_ms.append(self.media_ms)
        self._lost_s = [lost_s for lost_s in self._lost_s if now_s - lost_s < REOPENS_WITHIN_S] + [now_s]

    @property
    def lost_too_often(self) -> bool:
        """Opening it again and again may be what kills the engine."""
        return len(self._lost_s) > REOPENS

    def continued(self, first_block: int, first_media_ms: int) -> None:
        """The world opened now does not begin at 0: it goes on from a snapshot, and the story goes on with it."""
        origin = self._origin
        self._origin = Origin(origin.block - first_block, origin.media_ms - first_media_ms, origin.pts)

    def reopen(self) -> WorldSpec:
        """The world to open in place of the lost one; its first picture follows the last one that left."""
        self._origin = Origin(self.block + 1, self.media_ms, None)
        return self.steering.spec_from(self.spec, self.media_ms / 1000)

    def _note_shift(self, event: Packet) -> None:
        """Remember where the two times begin to run at another distance: after a stall or a pause."""
        if self._shown:
            pts, media_ms = self._shown[-1]
            if abs((event.pts - pts) * 1000 / CLOCK_HZ - (event.media_ms - media_ms)) < SHIFT_MS:
                return
        self._shown.append((event.pts, event.media_ms))

    def _ours(self, event: Packet, now_s: float) -> Packet:
        """A packet in the session's own numbers. Its time runs with the wall clock, also over the loss of a world."""
        origin = self._origin
        if origin.pts is None:
            passed = max(0, round((now_s - self._last_packet_s) * CLOCK_HZ) - event.duration)
            origin = self._origin = Origin(origin.block, origin.media_ms, self._next_pts + passed - event.pts)
        if origin == Origin():
            return event
        return msgspec.structs.replace(
            event,
            pts=event.pts + (origin.pts or 0),
            block=event.block + origin.block,
            media_ms=event.media_ms + origin.media_ms,
        )
