"""AMF0, the value format of RTMP commands: what a publisher needs of it.

Source: Adobe, "Action Message Format - AMF 0", 2007.
"""

from __future__ import annotations

import struct
from typing import TypeAlias

Value: TypeAlias = "float | bool | str | dict[str, Value] | list[Value] | None"

NUMBER, BOOLEAN, STRING, OBJECT, NULL, UNDEFINED, ECMA_ARRAY, OBJECT_END, STRICT_ARRAY, DATE, LONG_STRING = (
    0, 1, 2, 3, 5, 6, 8, 9, 10, 11, 12,
)  # fmt: skip
MAX_DEPTH = 16


class AmfError(ValueError):
    """The bytes are not AMF0."""


def encode(*values: Value) -> bytes:
    return b"".join(_encode(value) for value in values)


def decode(data: bytes) -> list[Value]:
    """All values in `data`; raises AmfError."""
    values: list[Value] = []
    at = 0
    try:
        while at < len(data):
            value, at = _decode(data, at, 0)
            values.append(value)
    except (IndexError, struct.error, UnicodeDecodeError) as error:
        raise AmfError(f"AMF0 broken at byte {at} of {len(data)}") from error
    return values


def _encode(value: Value) -> bytes:
    if value is None:
        return bytes([NULL])
    if isinstance(value, bool):
        return bytes([BOOLEAN, value])
    if isinstance(value, int | float):
        return bytes([NUMBER]) + struct.pack(">d", value)
    if isinstance(value, str):
        raw = value.encode()
        return bytes([STRING]) + struct.pack(">H", len(raw)) + raw
    assert isinstance(value, dict), "a publisher sends no arrays"
    fields = b"".join(_name(name) + _encode(item) for name, item in value.items())
    return bytes([OBJECT]) + fields + b"\x00\x00" + bytes([OBJECT_END])


def _name(name: str) -> bytes:
    raw = name.encode()
    return struct.pack(">H", len(raw)) + raw


def _decode(data: bytes, at: int, depth: int) -> tuple[Value, int]:
    if depth > MAX_DEPTH:
        raise AmfError(f"AMF0 nested deeper than {MAX_DEPTH}")
    marker, at = data[at], at + 1
    if marker == NUMBER:
        return struct.unpack_from(">d", data, at)[0], at + 8
    if marker == BOOLEAN:
        return bool(data[at]), at + 1
    if marker == STRING:
        return _text(data, at, 2)
    if marker == LONG_STRING:
        return _text(data, at, 4)
    if marker in (NULL, UNDEFINED):
        return None, at
    if marker == OBJECT:
        return _fields(data, at, depth)
    if marker == ECMA_ARRAY:
        return _fields(data, at + 4, depth)
    if marker == STRICT_ARRAY:
        return _items(data, at, depth)
    if marker == DATE:
        return struct.unpack_from(">d", data, at)[0], at + 10
    raise AmfError(f"AMF0 type {marker} is not known")


def _text(data: bytes, at: int, width: int) -> tuple[str, int]:
    size = int.from_bytes(data[at : at + width], "big")
    at += width
    if at + size > len(data):
        raise AmfError(f"AMF0 text of {size} bytes, {len(data) - at} are left")
    return data[at : at + size].decode(), at + size


def _fields(data: bytes, at: int, depth: int) -> tuple[Value, int]:
    fields: dict[str, Value] = {}
    while data[at : at + 3] != bytes([0, 0, OBJECT_END]):
        name, at = _text(data, at, 2)
        fields[name], at = _decode(data, at, depth + 1)
    return fields, at + 3


def _items(data: bytes, at: int, depth: int) -> tuple[Value, int]:
    count: int = struct.unpack_from(">I", data, at)[0]
    at += 4
    items: list[Value] = []
    for _ in range(count):
        value, at = _decode(data, at, depth + 1)
        items.append(value)
    return items, at
