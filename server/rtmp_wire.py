"""RTMP as a publisher speaks it, over asyncio: handshake, chunks, connect, publish, media messages.

Source: Adobe, "Real-Time Messaging Protocol (RTMP) specification 1.0", 2012. Every wait has a deadline, and what a
server may say is bounded: a publisher is told little, so one that says much means no good. Knows no sessions and no
media: messages are bytes with a type and a timestamp.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
import struct
from dataclasses import dataclass, field
from time import monotonic

from server.amf0 import AmfError, Value, decode, encode

CONNECT_S = 5.0
WRITE_S = 3.0  # for a stalled reader, after the write buffer is full
WRITE_BUFFER_BYTES = 256 * 1024
CHUNK_BYTES = 4096
MAX_MESSAGE_BYTES = 16 * 1024  # the longest in use, the answer to `connect`, has a few hundred
MAX_BYTES_PER_S, MAX_CHUNKS_PER_S = 64 * 1024, 1000
SET_CHUNK_SIZE, ABORT, ACK, USER_CONTROL, WINDOW_SIZE, PEER_BANDWIDTH = 1, 2, 3, 4, 5, 6
AUDIO, VIDEO, DATA, COMMAND = 8, 9, 18, 20
PING, PONG = 6, 7
EXTENDED = 0xFFFFFF


class RtmpError(Exception):
    """The server said no, broke the protocol, was silent or went away; the message is its own text if it has one."""


@dataclass(frozen=True)
class Message:
    kind: int
    payload: bytes


@dataclass
class _ChunkStream:
    """What later chunks of one chunk stream leave out because earlier ones said it."""

    kind: int = 0
    size: int = 0
    extended: bool = False
    payload: bytearray = field(default_factory=bytearray)


class _Quota:
    """How much of what a server says is read within a second."""

    def __init__(self) -> None:
        self._since_s = float("-inf")
        self._chunks = self._bytes = 0

    def take(self, size: int) -> None:
        """Count a chunk of so many bytes; raises RtmpError when it is too much."""
        now_s = monotonic()
        if now_s - self._since_s >= 1:
            self._since_s, self._chunks, self._bytes = now_s, 0, 0
        self._chunks += 1
        self._bytes += size
        if self._chunks > MAX_CHUNKS_PER_S:
            raise RtmpError(f"the server sent more than {MAX_CHUNKS_PER_S} chunks within a second")
        if self._bytes > MAX_BYTES_PER_S:
            raise RtmpError(f"the server sent more than {MAX_BYTES_PER_S} bytes within a second")


class RtmpConnection:
    """One connection that publishes one stream. Used by one writer and one reader task."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._streams: dict[int, _ChunkStream] = {}
        self._quota = _Quota()
        self._their_chunk_bytes = 128
        self._window_bytes = 0
        self._received_bytes = 0
        self._acked_bytes = 0
        self._transaction = 0
        self._stream_id = 0
        self._key = ""
        self.sent_bytes = 0
        writer.transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)

    @classmethod
    async def open(cls, address: str, port: int, tls: ssl.SSLContext | None, server_name: str) -> RtmpConnection:
        """Connect and shake hands; raises OSError, RtmpError or TimeoutError."""
        async with asyncio.timeout(CONNECT_S):
            reader, writer = await asyncio.open_connection(
                address, port, ssl=tls, server_hostname=server_name if tls else None
            )
            connection = cls(reader, writer)
            try:
                await connection._shake_hands()
            except BaseException:
                connection.abort()
                raise
            return connection

    async def publish(self, app: str, tc_url: str, key: str) -> None:
        """Get as far as `NetStream.Publish.Start`; raises RtmpError with the server's reason."""
        self._key = key
        async with asyncio.timeout(CONNECT_S):
            self._send(2, Message(SET_CHUNK_SIZE, struct.pack(">I", CHUNK_BYTES)))
            description: Value = {
                "app": app,
                "type": "nonprivate",
                "flashVer": "FMLE/3.0 (compatible; Inferix)",
                "tcUrl": tc_url,
            }
            await self._call("connect", description)
            self._command("releaseStream", None, key)
            self._command("FCPublish", None, key)
            self._stream_id = _stream_number(await self._call("createStream", None))
            self._command("publish", None, key, "live", stream=self._stream_id)
            while not await self._published():
                pass

    async def send(self, kind: int, timestamp_ms: int, payload: bytes) -> None:
        """One media message; raises TimeoutError when the server does not read, ConnectionError when it is gone."""
        self._send(4 if kind == AUDIO else 6, Message(kind, payload), timestamp_ms, self._stream_id)
        await self._drain()

    async def listen(self) -> None:
        """Answer what the server asks while we publish; raises RtmpError when it ends the stream."""
        while True:
            message = await self._receive("while publishing")
            if message.kind == COMMAND:
                _raise_on_error(_command_of(message))

    async def close(self) -> None:
        """Say that the stream is over, then go."""
        try:
            self._command("FCUnpublish", None, self._key)
            self._command("deleteStream", None, float(self._stream_id))
            async with asyncio.timeout(WRITE_S):
                await self._writer.drain()
                self._writer.close()
                await self._writer.wait_closed()
        except (OSError, TimeoutError):
            pass
        finally:
            self.abort()

    def abort(self) -> None:
        self._writer.transport.abort()

    async def _shake_hands(self) -> None:
        ours = struct.pack(">II", 0, 0) + os.urandom(1528)
        self._writer.write(b"\x03" + ours)
        answer = await self._read(1 + 1536, "during the handshake")
        if answer[0] != 3:
            raise RtmpError(f"expected RTMP version 3 in the handshake, got {answer[0]}")
        self._writer.write(answer[1:])
        await self._read(1536, "during the handshake")

    async def _call(self, name: str, *arguments: Value) -> Value:
        """A command with a result; returns the last value of it."""
        transaction = self._command(name, *arguments)
        while True:
            message = await self._receive(f"after {name}")
            if message.kind != COMMAND:
                continue
            values = _command_of(message)
            _raise_on_error(values)
            if values[0] == "_result" and values[1:2] == [float(transaction)]:
                return values[-1]

    async def _published(self) -> bool:
        message = await self._receive("after publish")
        if message.kind != COMMAND:
            return False
        values = _command_of(message)
        _raise_on_error(values)
        status = values[-1]
        return values[0] == "onStatus" and isinstance(status, dict) and status.get("code") == "NetStream.Publish.Start"

    def _command(self, name: str, *arguments: Value, stream: int = 0) -> int:
        self._transaction += 1
        self._send(3, Message(COMMAND, encode(name, float(self._transaction), *arguments)), 0, stream)
        return self._transaction

    def _send(self, chunk_stream: int, message: Message, timestamp_ms: int = 0, stream: int = 0) -> None:
        timestamp_ms %= 2**32
        extra = struct.pack(">I", timestamp_ms) if timestamp_ms >= EXTENDED else b""
        head = min(timestamp_ms, EXTENDED).to_bytes(3, "big") + len(message.payload).to_bytes(3, "big")
        parts = [bytes([chunk_stream]) + head + bytes([message.kind]) + struct.pack("<I", stream) + extra]
        for at in range(0, len(message.payload), CHUNK_BYTES):
            if at:
                parts.append(bytes([0xC0 | chunk_stream]) + extra)
            parts.append(message.payload[at : at + CHUNK_BYTES])
        data = b"".join(parts)
        self.sent_bytes += len(data)
        self._writer.write(data)

    async def _drain(self) -> None:
        async with asyncio.timeout(WRITE_S):
            await self._writer.drain()

    async def _receive(self, when: str) -> Message:
        """The next message that is not about the connection itself."""
        while True:
            message = await self._read_chunk(when)
            await self._drain()
            await asyncio.sleep(0)  # reading what has arrived already does not wait, and others want their turn
            if message is not None and not self._housekeeping(message):
                return message

    async def _read_chunk(self, when: str) -> Message | None:
        """Read one chunk; the message it completes, if it does."""
        first = (await self._read(1, when))[0]
        format, number = first >> 6, first & 0x3F
        if number < 2:
            number = 64 + int.from_bytes(await self._read(number + 1, when), "little")
        stream = self._streams.setdefault(number, _ChunkStream())
        if len(self._streams) > 64:
            raise RtmpError("the server opened more than 64 chunk streams")
        header = await self._read((11, 7, 3, 0)[format], when)
        if format <= 1:
            stream.size, stream.kind = int.from_bytes(header[3:6], "big"), header[6]
            stream.payload.clear()
            if stream.size > MAX_MESSAGE_BYTES:
                raise RtmpError(
                    f"the server announced a message of {stream.size} bytes, at most {MAX_MESSAGE_BYTES} are read"
                )
        if format <= 2:
            stream.extended = int.from_bytes(header[:3], "big") == EXTENDED
        if stream.extended:
            await self._read(4, when)
        count = min(self._their_chunk_bytes, stream.size - len(stream.payload))
        self._quota.take(count)
        stream.payload += await self._read(count, when)
        if len(stream.payload) < stream.size:
            return None
        message = Message(stream.kind, bytes(stream.payload))
        stream.payload.clear()
        return message

    def _housekeeping(self, message: Message) -> bool:
        payload = message.payload
        if message.kind == SET_CHUNK_SIZE and len(payload) >= 4:
            self._their_chunk_bytes = max(1, int.from_bytes(payload[:4], "big") & 0x7FFFFFFF)
        elif message.kind == WINDOW_SIZE and len(payload) >= 4:
            self._window_bytes = int.from_bytes(payload[:4], "big")
        elif message.kind == USER_CONTROL and payload[:2] == struct.pack(">H", PING):
            self._send(2, Message(USER_CONTROL, struct.pack(">H", PONG) + payload[2:6]))
        return message.kind in (SET_CHUNK_SIZE, ABORT, ACK, USER_CONTROL, WINDOW_SIZE, PEER_BANDWIDTH)

    async def _read(self, count: int, when: str) -> bytes:
        try:
            data = await self._reader.readexactly(count)
        except asyncio.IncompleteReadError as error:
            raise RtmpError(f"the server closed the connection {when}") from error
        self._received_bytes += count
        if self._window_bytes and self._received_bytes - self._acked_bytes >= self._window_bytes:
            self._acked_bytes = self._received_bytes
            self._send(2, Message(ACK, struct.pack(">I", self._received_bytes % 2**32)))
        return data


def _command_of(message: Message) -> list[Value]:
    try:
        values = decode(message.payload)
    except AmfError as error:
        raise RtmpError(f"the server sent a command that cannot be read: {error}") from error
    return values or [None]


def _stream_number(answer: Value) -> int:
    """What `createStream` gave; 1 where that is no number."""
    if not isinstance(answer, float):
        return 1
    if not 0 <= answer < 2**32:
        raise RtmpError(f"expected the number of a stream, got {answer}")
    return int(answer)


def _raise_on_error(values: list[Value]) -> None:
    """`_error` and `onStatus` of level error carry the server's reason."""
    status = values[-1] if isinstance(values[-1], dict) else {}
    failed = values[0] == "_error" or (values[0] == "onStatus" and status.get("level") == "error")
    if not failed and values[0] != "close":
        return
    parts: list[str] = []
    for name in ("code", "description"):
        with contextlib.suppress(KeyError):
            parts.append(str(status[name]))
    raise RtmpError(": ".join(parts) or "the server refused without a reason")
