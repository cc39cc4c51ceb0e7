"""RTMP's formats without a network: AMF0, FLV tags, targets."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.amf0 import AmfError, decode, encode
from server.flv import FlvMuxer
from server.rtmp_wire import RtmpConnection, RtmpError
from server.targets import AllowRule, TargetError, parse_target
from tests.server.packets import packets

VALUES = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.dictionaries(st.text(min_size=1, max_size=10), inner, max_size=4),
    max_leaves=8,
)


@given(st.lists(VALUES, max_size=4))
def test_amf0_comes_back_as_it_went(values: list[object]) -> None:
    assert decode(encode(*values)) == values  # type: ignore[arg-type]


@given(st.binary(max_size=100))
def test_no_bytes_break_the_amf0_reader(data: bytes) -> None:
    try:
        decode(data)
    except AmfError:
        pass


@pytest.mark.parametrize("silent_audio", [True, False])
def test_tags_are_whole_and_their_times_begin_at_zero(silent_audio: bool) -> None:
    muxer = FlvMuxer(128, 80, 20, silent_audio=silent_audio)
    given = list(packets(45))
    tags = [tag for packet in given[5:] for tag in (muxer.mux(packet) if packet.pts >= given[40].pts else ())]
    muxer.close()
    video = [tag for tag in tags if tag.kind == 9]
    assert [tag.timestamp_ms for tag in video] == [0, 0, 50, 100, 150, 200]  # the first is the decoder configuration
    assert video[0].payload[:2] == b"\x17\x00" and video[1].payload[:2] == b"\x17\x01"
    audio = [tag for tag in tags if tag.kind == 8]
    assert bool(audio) is silent_audio
    if silent_audio:
        assert audio[0].payload[:2] == b"\xaf\x00"
        assert audio[-1].timestamp_ms > 150


def test_a_video_tag_never_waits_for_the_next_packet() -> None:
    muxer = FlvMuxer(128, 80, 20, silent_audio=True)
    for n, packet in enumerate(packets(20)):
        pictures = [tag for tag in muxer.mux(packet) if tag.kind == 9 and tag.payload[1] == 1]
        assert len(pictures) == 1, n
    muxer.close()


@pytest.mark.parametrize(
    ("url", "key", "app", "found"),
    [
        ("rtmp://h/live", "k", "live", "k"),
        ("rtmp://h/live/k", "", "live", "k"),
        ("rtmp://h:19350/a/b/k?x=1", "", "a/b", "k?x=1"),
        ("rtmps://h/app/", "k", "app", "k"),
    ],
)
def test_targets_are_taken_apart(url: str, key: str, app: str, found: str) -> None:
    target = parse_target(url, key)
    assert (target.app, target.key) == (app, found)
    assert found not in target.shown and found not in repr(target)


@pytest.mark.parametrize(
    ("url", "key", "said", "shown"),
    [
        ("rtmp://h/live", "cam?token=S3C", "token S3C has expired for cam", "token ••• has expired for •••"),
        ("rtmp://h/live", "cam?a=S3C&b=S3CRET", "S3CRET, S3C", "•••, •••"),
        ("rtmp://h/live", "cam?S3C", "no S3C here", "no ••• here"),
        ("rtmp://h/live", "cam?token=S%2FC", "S/C or S%2FC", "••• or •••"),
        ("rtmp://h/live?auth=S3C", "cam", "live?auth=S3C", "live?auth=•••"),
        ("rtmp://h/live", "?token=S3C", "denied", "denied"),
        ("rtmp://h/live", "cam?token=", "denied", "denied"),
    ],
)
def test_no_secret_of_a_target_is_told(url: str, key: str, said: str, shown: str) -> None:
    target = parse_target(url, key)
    assert target.hide(said) == shown
    assert target.shown == "rtmp://h/live/•••" and "S3C" not in repr(target)


@pytest.mark.parametrize("host", ["live..example.com", ".example.com", f"{'a' * 64}.com"])
def test_a_host_that_no_name_can_be_is_refused(host: str) -> None:
    with pytest.raises(TargetError, match="expected a host name"):
        parse_target(f"rtmp://{host}/live", "k")


@given(st.text(max_size=60), st.text(max_size=10))
def test_no_address_breaks_the_reader(url: str, key: str) -> None:
    try:
        parse_target(f"rtmp://{url}", key)
    except TargetError as error:
        assert str(error)


@pytest.mark.parametrize(
    ("address", "patterns", "allowed"),
    [
        ("8.8.8.8", (), True),
        ("127.0.0.1", (), False),
        ("10.1.2.3", (), False),
        ("10.1.2.3", ("10.0.0.0/8",), True),
        ("10.1.2.3", ("media.lan",), True),
        ("169.254.169.254", ("169.254.0.0/16", "media.lan"), False),
        ("169.254.169.254", ("169.254.169.254",), True),
        ("::ffff:127.0.0.1", (), False),
        ("64:ff9b::a9fe:a9fe", ("::/0",), False),
        ("2002:7f00:1::", (), False),
        ("fe80::1", ("fe80::/10",), False),
        ("fd00:ec2::254", ("fd00::/8",), False),
        ("100.100.100.200", ("100.64.0.0/10",), False),
        ("0.0.0.0", (), False),
        ("224.0.0.1", (), False),
        ("2606:4700::1111", (), True),
    ],
)
def test_where_a_push_may_go(address: str, patterns: tuple[str, ...], allowed: bool) -> None:
    assert AllowRule(patterns, loopback=False).allows("media.lan", address) is allowed


def test_loopback_is_for_servers_that_only_listen_there() -> None:
    assert AllowRule((), loopback=True).allows("localhost", "127.0.0.1")
    assert not AllowRule((), loopback=True).allows("localhost", "192.168.0.1")


async def hear(data: bytes, drain: Callable[[], Awaitable[object]]) -> None:
    """What a publishing connection makes of this, all of it there at once, from a server that then hangs up."""
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    await RtmpConnection(reader, Mock(drain=drain)).listen()


async def at_once() -> None:
    """An empty write buffer."""


async def test_others_go_on_while_much_is_read_at_once() -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    others = asyncio.create_task(count())
    with pytest.raises(RtmpError, match="closed the connection"):
        await hear(EMPTY_MESSAGE + b"\xc3" * 500, at_once)
    others.cancel()
    assert turns >= 500


async def test_more_bytes_than_a_publisher_needs_are_refused() -> None:
    with pytest.raises(RtmpError, match="more than 65536 bytes within a second"):
        await hear((b"\x03\0\0\0\0\0\x80\x12\0\0\0\0" + bytes(128)) * 600, at_once)


async def test_what_arrives_slowly_is_heard_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = itertools.count(0, 0.01)
    monkeypatch.setattr("server.rtmp_wire.monotonic", lambda: next(now_s))
    with pytest.raises(RtmpError, match="closed the connection"):
        await hear(EMPTY_MESSAGE + b"\xc3" * 3000, at_once)


async def test_a_ping_is_not_answered_without_end_to_who_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.rtmp_wire.WRITE_S", 0.05)
    ping = b"\x02\0\0\0\0\0\6\x04\0\0\0\0" + b"\0\6\0\0\0\1"
    with pytest.raises(TimeoutError):
        await hear(ping, asyncio.Event().wait)


EMPTY_MESSAGE = b"\x03" + bytes(11)
