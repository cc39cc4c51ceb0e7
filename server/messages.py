"""The WebSocket's messages: what people may send (validated here, once) and what they are told.

Down messages are pydantic models, closed against unknown fields; `parse` is the only way in. Up messages are structs
that carry `seq`; `History` numbers and encodes them.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError
from pydantic_core import from_json

from engine.protocol import MAX_PROMPT_CHARS, PromptMode, Signal

MAX_MESSAGE_BYTES = 16 * 1024
MAX_NAMES = 32  # keys or values in one action

Id = Annotated[str, StringConstraints(min_length=1, max_length=64, pattern=r"^[\x21-\x7e]+$")]
PromptText = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=MAX_PROMPT_CHARS)]
Name = Annotated[str, StringConstraints(min_length=1, max_length=64)]
Keys = Annotated[tuple[Name, ...], Field(max_length=MAX_NAMES)]
Values = Annotated[dict[Name, Annotated[float, Field(ge=-1, le=1, allow_inf_nan=False)]], Field(max_length=MAX_NAMES)]
Blocks = Annotated[int, Field(ge=1, le=64)]
MediaMs = Annotated[int, Field(ge=0, le=2**53)]
Pts = Annotated[int, Field(ge=0, le=2**53)]

# ------------------------------------------------------------------------------------------------------ down


class Down(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class PromptDown(Down):
    type: Literal["prompt"]
    id: Id
    text: PromptText
    mode: PromptMode = "auto"
    over_blocks: Blocks = 4
    seen_ms: MediaMs | None = None
    seen_pts: Pts | None = None


class ActionDown(Down):
    type: Literal["action"]
    id: Id | None = None
    keys: Keys = ()
    values: Values = {}
    seen_ms: MediaMs | None = None
    seen_pts: Pts | None = None


class PauseDown(Down):
    type: Literal["pause"]
    id: Id | None = None


class ResumeDown(Down):
    type: Literal["resume"]
    id: Id | None = None


class PingDown(Down):
    type: Literal["ping"]
    id: Id | None = None


AnyDown = PromptDown | ActionDown | PauseDown | ResumeDown | PingDown
_adapter: TypeAdapter[AnyDown] = TypeAdapter(Annotated[AnyDown, Field(discriminator="type")])


class MessageError(ValueError):
    """A message that cannot be taken; `id` is the one it carried, as far as that could be read."""

    def __init__(self, code: str, message: str, id: str | None) -> None:
        super().__init__(message)
        self.code = code
        self.id = id


def parse(text: str) -> AnyDown:
    """One message from a text frame; raises MessageError for anything else, whatever it is."""
    data = text.encode(errors="surrogatepass")
    if len(data) > MAX_MESSAGE_BYTES:
        raise MessageError("message-too-large", f"at most {MAX_MESSAGE_BYTES} bytes are allowed", None)
    try:
        return _adapter.validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        code = "not-json" if first["type"] == "json_invalid" else "invalid"
        where = ".".join(str(part) for part in first["loc"][1:])
        raise MessageError(code, f"{where}: {first['msg']}" if where else first["msg"], _id_of(data)) from error


def _id_of(data: bytes) -> str | None:
    try:
        message = from_json(data)
    except ValueError:
        return None
    id = message.get("id") if isinstance(message, dict) else None
    return id[:64] if isinstance(id, str) else None


# -------------------------------------------------------------------------------------------------------- up


class Up(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    seq: int = 0


class Welcome(Up, frozen=True, tag="welcome"):
    role: str
    can_steer: bool
    gap: bool
    session: msgspec.Raw


class Ack(Up, frozen=True, tag="ack"):
    id: str


class Pong(Up, frozen=True, tag="pong"):
    id: str | None = None


class Error(Up, frozen=True, tag="error"):
    id: str | None
    code: str
    message: str


class State(Up, frozen=True, tag="state"):
    state: str
    reason: str = ""
    media_ms: int = 0
    queue_position: int | None = None


class Block(Up, frozen=True, tag="block"):
    block: int
    media_ms: int
    frames: int
    phases_ms: dict[str, float]
    due_in_ms: float


class SignalApplied(Up, frozen=True, tag="signal.applied"):
    id: str
    signal: Signal
    block: int
    media_ms: int
    text: str = ""
    understood: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    mode: str = ""


class SignalShown(Up, frozen=True, tag="signal.shown"):
    id: str
    block: int
    media_ms: int
    pts: int
    latency_ms: float


class Stats(Up, frozen=True, tag="stats"):
    fps: float
    real_time_factor: float
    lead_ms: float
    reserve_ms: float
    late_blocks: int
    stretched_ms: float
    viewers: int
    kv_bytes: dict[str, int]
    bitrate: int
    block: int
    media_ms: int
    metrics: dict[str, float]


class Viewers(Up, frozen=True, tag="viewers"):
    viewers: int


class Output(Up, frozen=True, tag="output"):
    output: msgspec.Raw


_encoder = msgspec.json.Encoder()


def encode(message: Up) -> str:
    return _encoder.encode(message).decode()
