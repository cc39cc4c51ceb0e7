"""What rank 0 tells the other ranks: orders, in the order in which all ranks carry them out.

Rank 0 alone hears the server and reads the clock; what it decides becomes an order before it does it itself. Knows no
transport and no worlds.
"""

from __future__ import annotations

import msgspec

from engine.protocol import ActionState, PromptChange, WorldSpec


class OpenWorld(msgspec.Struct, frozen=True, tag="open"):
    """Open a world. `block_of` names no block yet."""

    world: str
    spec: WorldSpec


class Prompted(msgspec.Struct, frozen=True, tag="prompt"):
    world: str
    change: PromptChange


class Acted(msgspec.Struct, frozen=True, tag="action"):
    world: str
    state: ActionState


class MakeBlock(msgspec.Struct, frozen=True, tag="block"):
    """Make the next block of these worlds; `block` is the first one's, which the others must agree on."""

    worlds: tuple[str, ...]
    block: int


class CloseWorld(msgspec.Struct, frozen=True, tag="close"):
    world: str


class Wait(msgspec.Struct, frozen=True, tag="wait"):
    """Nothing to do: a sign of life, since no rank waits for ever."""


class End(msgspec.Struct, frozen=True, tag="end"):
    """The group is done."""


Order = OpenWorld | Prompted | Acted | MakeBlock | CloseWorld | Wait | End

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)


def encode(order: Order) -> bytes:
    return _encoder.encode(order)


def decode(data: bytes) -> Order:
    return _decoder.decode(data)
