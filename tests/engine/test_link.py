"""The engine's end of the link: nothing blocks, every queue is bounded, and the end is noticed and named."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.link import INBOX_COMMANDS, Link, LinkClosed, LinkStalled, Outbox
from engine.protocol import (
    BlockDone,
    Codec,
    Command,
    Event,
    Framer,
    Packet,
    Ping,
    Pong,
    ProtocolError,
    WantKeyframe,
    WorldChanged,
    decode_event,
    frame,
)


def packet(world: str = "w", *, keyframe: bool = False, size: int = 100, pts: int = 0, codec: Codec = "h264") -> Packet:
    return Packet(world, codec, bytes(size), pts, 5625, keyframe, 0)


def block(index: int) -> BlockDone:
    return BlockDone("w", index, 0, 12, {}, 0.0)


def drain(outbox: Outbox) -> list[Event]:
    framer = Framer()
    events: list[Event] = []
    while data := outbox.take(1000):
        events += [decode_event(body) for body in framer.feed(data)]
    return events


# ------------------------------------------------------------------------------------------------- outbox


def test_events_go_out_in_order() -> None:
    outbox = Outbox()
    events: list[Event] = [packet(keyframe=True), block(0), packet(), WorldChanged("w", "paused"), Pong(1, 2, 3)]
    assert all(outbox.put(e) for e in events)
    assert drain(outbox) == events
    assert len(outbox) == 0 and outbox.packet_bytes == 0


def test_a_full_outbox_drops_what_is_no_keyframe_first() -> None:
    outbox = Outbox(packet_bytes=3000)
    outbox.put(packet(keyframe=True, size=1000))
    outbox.put(WorldChanged("w", "paused"))
    assert outbox.put(packet(size=1000, pts=1))
    assert not outbox.put(packet(size=1000, pts=2)), "dropped: what it builds on is gone"
    kinds = drain(outbox)
    assert kinds == [packet(keyframe=True, size=1000), WorldChanged("w", "paused")]


def test_after_a_drop_a_stream_goes_on_with_a_keyframe_only() -> None:
    outbox = Outbox(packet_bytes=3000)
    for pts in range(4):
        outbox.put(packet(size=1000, pts=pts, keyframe=pts == 0))
    drain(outbox)
    assert not outbox.put(packet(pts=5))
    assert outbox.put(packet(pts=6, keyframe=True))
    assert outbox.put(packet(pts=7))
    assert [e.pts for e in drain(outbox) if isinstance(e, Packet)] == [6, 7]


def test_a_newer_keyframe_replaces_an_older_one_that_waits() -> None:
    outbox = Outbox(packet_bytes=1500)
    for pts in range(20):
        assert outbox.put(packet(size=1000, pts=pts, keyframe=True))
    assert [e.pts for e in drain(outbox) if isinstance(e, Packet)] == [19]


def test_old_telemetry_makes_room_and_state_does_not() -> None:
    outbox = Outbox(telemetry=3, state=4)
    for i in range(6):
        outbox.put(block(i))
    for _ in range(4):
        outbox.put(WorldChanged("w", "paused"))
    with pytest.raises(LinkStalled, match="4 events unread"):
        outbox.put(WorldChanged("w", "running"))
    events = drain(outbox)
    assert [e.block for e in events if isinstance(e, BlockDone)] == [3, 4, 5]
    assert events.count(WorldChanged("w", "paused")) == 4


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("ab"), st.booleans(), st.integers(10, 900), st.booleans()), max_size=60))
def test_what_comes_out_of_a_stream_can_always_be_decoded(steps: list[tuple[str, bool, int, bool]]) -> None:
    """Within each stream every delta follows the picture before it, and the bound holds at every moment."""
    outbox = Outbox(packet_bytes=2000)
    out: list[Event] = []
    made = {"a": 0, "b": 0}
    for world, keyframe, size, take in steps:
        outbox.put(packet(world, keyframe=keyframe or made[world] == 0, size=size, pts=made[world]))
        made[world] += 1
        assert outbox.packet_bytes <= 2000 + 2 * 1000, "the newest keyframe of each stream may stay above the bound"
        if take:
            out += [decode_event(body) for body in Framer().feed(outbox.take(1))]
    out += drain(outbox)
    for world in "ab":
        stream = [e for e in out if isinstance(e, Packet) and e.world == world]
        for before, after in zip([None, *stream], stream, strict=False):
            assert after.keyframe or (before is not None and after.pts == before.pts + 1)


# --------------------------------------------------------------------------------------------------- link


class Server:
    """The other end, in the test's own thread."""

    def __init__(self) -> None:
        self.sock, theirs = socket.socketpair()
        self.sock.settimeout(10)
        self.urgent: list[Command] = []
        self.link = Link(theirs, self.urgent.append)
        self.link.start()
        self._framer = Framer()

    def send(self, *commands: Command) -> None:
        self.sock.sendall(b"".join(map(frame, commands)))

    def events(self, count: int) -> list[Event]:
        found: list[Event] = []
        while len(found) < count:
            found += [decode_event(b) for b in self._framer.feed(self.sock.recv(65536))]
        return found


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.sock.close()
    server.link.close()


def receive(link: Link, count: int) -> list[Command]:
    commands: list[Command] = []
    while len(commands) < count:
        commands += link.receive(timeout_s=10)
    return commands


def test_commands_and_events_cross(server: Server) -> None:
    server.send(Ping(1), Ping(2))
    assert receive(server.link, 2) == [Ping(1), Ping(2)]
    server.link.send(Pong(1, 10, 0))
    assert server.events(1) == [Pong(1, 10, 0)]


def test_keyframe_requests_do_not_wait_for_the_loop(server: Server) -> None:
    server.send(WantKeyframe("w", "h264"), Ping(1))
    assert receive(server.link, 1) == [Ping(1)]
    assert server.urgent == [WantKeyframe("w", "h264")]


def test_receive_waits_no_longer_than_it_is_told_and_can_be_woken(server: Server) -> None:
    assert server.link.receive(timeout_s=0.01) == []
    server.link.wake()
    assert server.link.receive(timeout_s=60) == []


def test_the_end_of_the_server_is_noticed_after_its_last_command(server: Server) -> None:
    server.send(Ping(7))
    server.sock.close()
    assert receive(server.link, 1) == [Ping(7)]
    with pytest.raises(LinkClosed, match="closed the link"):
        receive(server.link, 1)


@pytest.mark.parametrize("junk", [b"\xff\xff\xff\xff", b"\0\0\0\x05hello", b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\0"])
def test_malformed_bytes_end_the_link_with_a_protocol_error(server: Server, junk: bytes) -> None:
    server.sock.sendall(junk)
    with pytest.raises(ProtocolError):
        receive(server.link, 1)


def test_an_engine_that_does_not_listen_is_felt_by_the_server_not_by_memory(server: Server) -> None:
    server.sock.setblocking(False)
    sent = 0
    try:
        while sent < 200 * INBOX_COMMANDS:
            sent += server.sock.send(frame(Ping(1)) * 64) // len(frame(Ping(1)))
    except BlockingIOError:
        pass
    assert sent < 200 * INBOX_COMMANDS
    assert len(server.link.receive(timeout_s=10)) <= INBOX_COMMANDS
    assert receive(server.link, sent // 2)


def test_a_server_that_does_not_read_never_blocks_the_engine(server: Server) -> None:
    kept = [server.link.send(packet(keyframe=i == 0, size=60_000, pts=i)) for i in range(1000)]
    assert kept[0] and not kept[-1]
    assert server.link.dropped > 0
    assert server.link.send(WorldChanged("w", "paused"))
    seen = server.events(2)
    while seen[-1] != WorldChanged("w", "paused"):
        seen += server.events(1)
    assert all(isinstance(e, Packet) for e in seen[:-1])


def test_closing_writes_what_waits_and_ends_the_threads(server: Server) -> None:
    before = threading.active_count()
    for i in range(100):
        server.link.send(packet(keyframe=True, size=1000, pts=i))
    server.link.close()
    assert len(server.events(100)) == 100
    assert server.sock.recv(1) == b""
    assert threading.active_count() == before - 2
    assert not server.link.send(Pong(1, 1, 1))
