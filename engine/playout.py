"""Shows all worlds: one thread that releases each picture at its time, encodes it then, and sends the packet.

    blocks ──► waiting pictures ──(due)──► encoders, one per codec ──► packets

The thread never computes anything but encodings, and it is started before the computing threads give way to other
processes, so it stays on time while they work.

A block that comes late moves its world's clock on by what it was late: nothing is dropped, nothing is sent in a
burst. How late blocks come is remembered, and about its 99th percentile is the reserve by which the scheduler lets
blocks begin earlier. Keyframes and bit rates are taken between pictures. Knows no model and no socket.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from engine.clock import Reserve
from engine.encoder import EncoderError, choose_encoder, default_bitrate
from engine.profiler import span
from engine.protocol import CLOCK_HZ, Codec, Event, Packet, WorldChanged
from engine.screen import Due, Encoding, Figures, Pictures, Screen

log = logging.getLogger(__name__)

RESERVE_BLOCKS = 0.5  # the reserve's bound, in block periods


class Playout:
    """Shows all worlds. Every method may be called from any thread."""

    def __init__(
        self,
        send: Callable[[Event], bool],
        encoders: dict[Codec, str],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`send` takes an event without blocking and says whether it was kept; `encoders` names one per codec."""
        self._send, self._encoders, self._now = send, encoders, now
        self._screens: dict[str, Screen] = {}
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="playout", daemon=True)
        self.failures: deque[tuple[str, str]] = deque(maxlen=256)  # (world, reason), for the loop to pick up

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    # ------------------------------------------------------------------------------------------- worlds

    def open(self, world: str, size: tuple[int, int], fps: float, period_s: float) -> None:
        """Begin to show a world of `size` (width, height); its clock starts with its first picture."""
        reserve = Reserve(RESERVE_BLOCKS * period_s)
        with self._changed:
            self._screens[world] = Screen(world, *size, fps, reserve)
        self.encode(world, "h264", on=True)

    def remove(self, world: str) -> int:
        """Show no more of a world; media time in ms of its last picture."""
        with self._changed:
            screen = self._screens.pop(world, None)
        return screen.figures(self._now()).media_ms if screen else 0

    def add(self, world: str, block: Pictures) -> float:
        """Queue a block; seconds until it is due, negative when it is late. A world that is gone swallows it."""
        with self._changed:
            screen = self._screens.get(world)
            if screen is None:
                return 0.0
            slack_s = screen.add(block, self._now())
            self._changed.notify()
            return slack_s

    def pause(self, world: str) -> None:
        self._with(world, lambda screen: screen.clock.pause(self._now()))

    def resume(self, world: str) -> None:
        self._with(world, lambda screen: screen.clock.resume(self._now()))

    def due_s(self, world: str, media_s: float) -> float | None:
        """When `media_s` is due on the monotonic clock; None before the first picture."""
        with self._changed:
            screen = self._screens.get(world)
            now_s = self._now()
            return screen.clock.due_s(media_s, now_s) if screen and screen.clock.started else None

    def figures(self, world: str) -> Figures | None:
        with self._changed:
            screen = self._screens.get(world)
            return screen.figures(self._now()) if screen else None

    # ---------------------------------------------------------------------------------------- encodings

    def encode(self, world: str, codec: Codec, *, on: bool) -> None:
        self._with(world, lambda screen: self._switch(screen, codec, on))

    def keyframe(self, world: str, codec: Codec) -> None:
        self._with(world, lambda screen: _want_keyframe(screen, codec))

    def bitrate(self, world: str, codec: Codec, bits_per_second: int) -> None:
        self._with(world, lambda screen: _want_bitrate(screen, codec, bits_per_second))

    def _switch(self, screen: Screen, codec: Codec, on: bool) -> None:
        if on and codec not in screen.encodings:
            rate = default_bitrate(screen.width, screen.height, screen.fps)
            screen.encodings[codec] = Encoding(codec, self._encoders[codec], rate)
        elif not on:
            screen.encodings.pop(codec, None)

    def _with(self, world: str, change: Callable[[Screen], object]) -> None:
        with self._changed:
            screen = self._screens.get(world)
            if screen is not None:
                change(screen)
                self._changed.notify()

    # ------------------------------------------------------------------------------------------- thread

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._closing:
                    return
                now_s = self._now()
                wait_s = min((s.next_s(now_s) for s in self._screens.values()), default=float("inf")) - now_s
                if wait_s > 0:
                    self._changed.wait(min(wait_s, 1.0))
                    continue
            self.turn(self._now())

    def turn(self, now_s: float) -> None:
        """Release every picture whose time has come, one of each world at most."""
        with self._changed:
            screens = list(self._screens.values())
        for screen in screens:
            with self._changed:
                first = screen.shown is None
                due = screen.release(now_s) or screen.again(now_s)
                encodings = list(screen.encodings.values())
            if due is None:
                continue
            if first:
                self._send(WorldChanged(screen.world, "running"))
            for encoding in encodings:
                self._show(screen, encoding, *due, now_s)

    def _show(self, screen: Screen, encoding: Encoding, due: Due, pts: int, now_s: float) -> None:
        try:
            with span("encode", world=screen.world, block=due.block):
                packets = encoding.encode(screen, due.picture, pts, now_s)
        except EncoderError as error:
            self._fall_back(screen, encoding, str(error))
            return
        with self._changed:
            screen.sent.extend((now_s, len(p.data)) for p in packets)
        ticks, media_ms = round(CLOCK_HZ / screen.fps), round(1000 * due.media_s)
        for p in packets:
            packet = Packet(screen.world, encoding.codec, p.data, p.pts, ticks, p.keyframe, due.block, media_ms)
            with span("send", world=screen.world, block=due.block):
                kept = self._send(packet)
            if not kept:
                encoding.keyframe = True  # what follows cannot be decoded without the picture that was dropped

    def _fall_back(self, screen: Screen, encoding: Encoding, reason: str) -> None:
        """A hardware encoder may die under us (a driver, a session limit); libx264 does not."""
        software = choose_encoder(encoding.codec, "libx264")
        if encoding.name == software:
            self.failures.append((screen.world, reason))
            self.encode(screen.world, encoding.codec, on=False)
            return
        log.warning("world %s goes on with %s: %s", screen.world, software, reason)
        encoding.name, encoding.encoder, encoding.keyframe = software, None, True


def _want_keyframe(screen: Screen, codec: Codec) -> None:
    if codec in screen.encodings:
        screen.encodings[codec].keyframe = True


def _want_bitrate(screen: Screen, codec: Codec, bits_per_second: int) -> None:
    if codec in screen.encodings:
        screen.encodings[codec].bits_per_second = bits_per_second
