"""What rank 0 tells the other ranks: orders, in the order in which all ranks carry them out.

Rank 0 alone hears the server and reads the clock; what it decides becomes an order. Worlds are named by number. Knows
no transport.
"""

from __future__ import annotations

import io
from typing import Any

import msgspec
import torch

from engine.protocol import ActionState, PromptChange, WorldSpec


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of the orders."""

    world: int = 0


class OpenWorld(Message, frozen=True):
    spec: WorldSpec | None = None


class CloseWorld(Message, frozen=True):
    pass


class ForkWorld(Message, frozen=True):
    twin: int = 0


class Prompted(Message, frozen=True):
    change: PromptChange | None = None


class Acted(Message, frozen=True):
    state: ActionState | None = None


class MakeBlocks(Message, frozen=True):
    """The next block of some worlds in one batch. `extra`: what they were opened with besides, before the first."""

    worlds: tuple[int, ...] = ()
    extra: bytes = b""


class Prefill(Message, frozen=True):
    """Given latents are the first blocks of a world."""

    latents: bytes = b""


class Snapshot(Message, frozen=True):
    """Take part in gathering a world's cache."""


class Restore(Message, frozen=True):
    state: bytes = b""


class Beat(Message, frozen=True):
    """Nothing: a message that cannot be sent to a rank that is gone."""


class End(Message, frozen=True):
    """The group is done."""


Order = OpenWorld | CloseWorld | ForkWorld | Prompted | Acted | MakeBlocks | Prefill | Snapshot | Restore | Beat | End

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)


def encode(order: Order) -> bytes:
    return _encoder.encode(order)


def decode(data: bytes) -> Order:
    return _decoder.decode(data)


def packed(state: object) -> bytes:
    """A tree of tensors and of the engine's own objects as bytes, from rank to rank of one program only."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def unpacked(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)
