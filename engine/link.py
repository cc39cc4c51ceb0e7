"""The engine's end of the link: commands come in by one thread, events go out by another, and nobody waits for either.

    socket ──► reader ──► inbox ──► loop            loop, playout, decoding ──► outbox ──► writer ──► socket
                  └────► playout (keyframes and bit rates, which cannot wait for a block)

Both queues are bounded. A full inbox stops the reading, so the server feels it. A full outbox first loses pictures
that are no keyframes, then all keyframes but the newest of each stream, then telemetry; what a world's state depends
on is never lost: a server that leaves thousands of those unread is taken for dead. Knows no world and no torch.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from engine.profiler import span
from engine.protocol import (
    BlockDone,
    Command,
    Event,
    Framer,
    Log,
    Packet,
    ProtocolError,
    Stats,
    WantBitrate,
    WantKeyframe,
    decode_command,
    frame,
)

log = logging.getLogger(__name__)

READ_BYTES = 64 * 1024
WRITE_BYTES = 256 * 1024
INBOX_COMMANDS = 1024
PACKET_BYTES = 8 << 20  # of encoded pictures waiting: many seconds of them
TELEMETRY_EVENTS = 512
STATE_EVENTS = 16384
FLUSH_S = 2.0

Telemetry = BlockDone | Stats | Log


class LinkClosed(ConnectionError):
    """The server is gone: its end of the socket is closed."""


class LinkStalled(ConnectionError):
    """The server has stopped reading."""


@dataclass(frozen=True)
class _Waiting:
    data: bytes
    stream: tuple[str, str] | None = None  # (world, codec) of a packet
    keyframe: bool = False
    telemetry: bool = False


class Outbox:
    """Events waiting to be written, in order, within bounds. Not locked: the link does that."""

    def __init__(
        self, packet_bytes: int = PACKET_BYTES, telemetry: int = TELEMETRY_EVENTS, state: int = STATE_EVENTS
    ) -> None:
        self.packet_bytes_allowed, self.telemetry_allowed, self.state_allowed = packet_bytes, telemetry, state
        self.packet_bytes = self.dropped = self._telemetry = self._state = 0
        self._waiting: deque[_Waiting] = deque()
        self._broken: set[tuple[str, str]] = set()  # streams that need a keyframe before anything else
        self._behind = False  # whether pictures had to go since the outbox was last empty

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, event: Event) -> bool:
        """Queue an event; False when it was dropped (then a packet's stream needs a keyframe to go on)."""
        if isinstance(event, Packet):
            return self._put_packet(event)
        item = _Waiting(frame(event), telemetry=isinstance(event, Telemetry))
        if item.telemetry:
            self._telemetry += 1
            if self._telemetry > self.telemetry_allowed:
                self._drop(lambda old: old.telemetry, at_most=1)
        else:
            self._state += 1
            if self._state > self.state_allowed:
                raise LinkStalled(f"the server has left {self.state_allowed} events unread")
        self._waiting.append(item)
        return True

    def take(self, most_bytes: int) -> bytes:
        """Remove and join what goes out next: at least one message if there is any."""
        parts: list[bytes] = []
        size = 0
        while self._waiting and (not parts or size + len(self._waiting[0].data) <= most_bytes):
            item = self._waiting.popleft()
            self._forget(item)
            parts.append(item.data)
            size += len(item.data)
        self._behind = self._behind and bool(self._waiting)
        return b"".join(parts)

    def _put_packet(self, packet: Packet) -> bool:
        item = _Waiting(frame(packet), (packet.world, packet.codec), packet.keyframe)
        if self.packet_bytes + len(item.data) > self.packet_bytes_allowed:
            self._make_room(item)
        if item.stream in self._broken and not item.keyframe:
            self.dropped += 1
            return False
        if item.stream is not None:
            self._broken.discard(item.stream)
        self.packet_bytes += len(item.data)
        self._waiting.append(item)
        return True

    def _make_room(self, item: _Waiting) -> None:
        if not self._behind:
            log.warning("the server reads too slowly: pictures are dropped until it has caught up")
        self._behind = True
        self._broken |= {w.stream for w in self._waiting if w.stream is not None} | {item.stream or ("", "")}
        self._drop(lambda old: old.stream is not None and not old.keyframe)
        if item.keyframe:
            self._drop(lambda old: old.stream == item.stream)

    def _drop(self, which: Callable[[_Waiting], bool], at_most: int | None = None) -> None:
        kept: deque[_Waiting] = deque()
        for item in self._waiting:
            if which(item) and at_most != 0:
                self._forget(item)
                self.dropped += 1
                at_most = None if at_most is None else at_most - 1
            else:
                kept.append(item)
        self._waiting = kept

    def _forget(self, item: _Waiting) -> None:
        if item.stream is not None:
            self.packet_bytes -= len(item.data)
        elif item.telemetry:
            self._telemetry -= 1
        else:
            self._state -= 1


class Link:
    """One connected stream socket, with the two threads that serve it."""

    def __init__(self, sock: socket.socket, urgent: Callable[[WantKeyframe | WantBitrate], None]) -> None:
        """`urgent` is called by the reader for the commands that must not wait for the loop."""
        sock.setblocking(True)
        self._sock, self._urgent = sock, urgent
        self._inbox: deque[Command] = deque()
        self._inbox_changed = threading.Condition()
        self._woken = False
        self._ended: Exception | None = None  # why no more commands will come
        self._outbox = Outbox()
        self._outbox_changed = threading.Condition()
        self._closing = False
        self._threads = [
            threading.Thread(target=self._read, name="link-reader", daemon=True),
            threading.Thread(target=self._write, name="link-writer", daemon=True),
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Write what is waiting, as far as the server takes it within `FLUSH_S`, and end both threads."""
        with self._outbox_changed:
            self._closing = True
            self._outbox_changed.notify()
        self._threads[1].join(FLUSH_S)
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the other end is gone already
        with self._inbox_changed:
            self._inbox.clear()
            self._inbox_changed.notify_all()
        for thread in self._threads:
            thread.join(FLUSH_S)
        self._sock.close()

    # -------------------------------------------------------------------------------------------- loop

    def receive(self, timeout_s: float) -> list[Command]:
        """All commands that have come, after waiting for one (or for `wake`) for at most `timeout_s`.

        Raises LinkClosed or ProtocolError once all that came before the end has been handed out.
        """
        with self._inbox_changed:
            if not self._inbox and not self._woken and self._ended is None:
                self._inbox_changed.wait(timeout_s)
            self._woken = False
            commands = list(self._inbox)
            self._inbox.clear()
            self._inbox_changed.notify_all()
            if not commands and self._ended is not None:
                raise self._ended
            return commands

    def wake(self) -> None:
        """Let a waiting `receive` return: something else has happened."""
        with self._inbox_changed:
            self._woken = True
            self._inbox_changed.notify_all()

    def send(self, event: Event) -> bool:
        """Queue an event without blocking, from any thread; False when it was dropped for want of room."""
        with self._outbox_changed:
            if self._closing:
                return False
            try:
                kept = self._outbox.put(event)
            except LinkStalled as error:
                self._end(error)
                return False
            self._outbox_changed.notify()
            return kept

    @property
    def dropped(self) -> int:
        return self._outbox.dropped

    # ----------------------------------------------------------------------------------------- threads

    def _read(self) -> None:
        try:
            for command in self._commands():
                if isinstance(command, WantKeyframe | WantBitrate):
                    self._urgent(command)
                else:
                    self._deliver(command)
            self._end(LinkClosed("the server closed the link"))
        except ProtocolError as error:
            self._end(error)
        except OSError as error:
            self._end(LinkClosed(f"the link broke: {error}"))

    def _commands(self) -> Iterator[Command]:
        framer = Framer()
        while data := self._sock.recv(READ_BYTES):
            for body in framer.feed(data):
                yield decode_command(body)

    def _deliver(self, command: Command) -> None:
        with self._inbox_changed:
            self._inbox_changed.wait_for(lambda: len(self._inbox) < INBOX_COMMANDS)
            self._inbox.append(command)
            self._inbox_changed.notify_all()

    def _write(self) -> None:
        while True:
            with self._outbox_changed:
                self._outbox_changed.wait_for(lambda: len(self._outbox) or self._closing)
                data = self._outbox.take(WRITE_BYTES)
            if not data:
                return
            try:
                with span("socket write"):
                    self._sock.sendall(data)
            except OSError as error:
                self._end(LinkClosed(f"the link broke: {error}"))
                return

    def _end(self, reason: Exception) -> None:
        with self._inbox_changed:
            self._ended = self._ended or reason
            self._inbox_changed.notify_all()
