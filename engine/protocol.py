"""What crosses between the server and the engine: commands one way, events the other, and their codec.

Knows no torch, no sockets and no HTTP; it is all that `server/` may import from `engine`. Messages are frozen structs
tagged by name. There are no replies: the outcome of a command is an event that carries the command's `id`.

On the wire a message is a 4-byte big-endian length followed by its MessagePack bytes (see `Framer`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, TypeVar

import msgspec

MAX_MESSAGE_BYTES = 32 * 1024 * 1024
MAX_PROMPT_CHARS = 2000
T = TypeVar("T")
CLOCK_HZ = 90_000  # media times and packet timestamps, as in RTP
ACTION_HOLD_S = 2.0  # an action that is not renewed for this long is released

Signal = Literal["prompt", "action"]
PromptMode = Literal["auto", "cut", "blend", "recache"]  # auto: the way the model is best at
Codec = Literal["h264", "vp8"]
WorldState = Literal["starting", "running", "paused", "stopping", "ended", "failed"]


class ProtocolError(ValueError):
    """The bytes are not a message of this protocol."""


class Message(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base of everything that crosses the link."""


# ---------------------------------------------------------------------------------------------------- values


class PromptChange(Message, frozen=True):
    """A prompt taking effect at `at_s` seconds of media time; `over_blocks` is the length of a blend."""

    at_s: float
    text: str
    mode: PromptMode = "auto"
    over_blocks: int = 4


class ActionState(Message, frozen=True):
    """Keys held now and analogue values in [-1, 1], both by the names the model declares."""

    keys: tuple[str, ...] = ()
    values: dict[str, float] = {}


class WorldSpec(Message, frozen=True):
    """All that decides what a world will be: with the journal of its signals, enough to make it again."""

    model: str
    prompts: tuple[PromptChange, ...]
    seed: int = 0
    width: int | None = None  # None: the model's own
    height: int | None = None
    fps: float | None = None
    steps: int | None = None
    kv: str = ""  # a KV policy in its declarative form; "": the model's preset
    lead_ms: int | None = None  # None: as small as the model's block allows
    start_picture: str | None = None  # path of a picture or MP4 that begins the world


class ModelCard(Message, frozen=True):
    """What a viewer or a client needs to know of a model that the engine has loaded."""

    name: str
    width: int
    height: int
    fps: float
    frames_per_block: int  # pictures of video, in steady state
    signals: tuple[Signal, ...]
    action_keys: tuple[str, ...] = ()
    action_values: tuple[str, ...] = ()
    suggestions: tuple[str, ...] = ()
    digest: str = ""


# -------------------------------------------------------------------------------------------------- commands


class Open(Message, frozen=True):
    """Start a world. Answered by `Opened` or `Refused`, both with `id`.

    With `continues`, the name of a world that was lost with an earlier engine, it goes on from that one's last snapshot
    if there is one; times in `spec` then count from there.
    """

    id: str
    world: str
    spec: WorldSpec
    continues: str = ""


class Steer(Message, frozen=True):
    """Change one signal of a world from its next block on; answered by `SignalApplied` or `SignalRefused`."""

    id: str
    world: str
    prompt: PromptChange | None = None  # at_s is ignored: it applies to the next block
    action: ActionState | None = None
    seen_ms: int | None = None  # media time the sender was looking at


class Pause(Message, frozen=True):
    world: str


class Resume(Message, frozen=True):
    world: str


class Close(Message, frozen=True):
    """End a world; answered by `WorldChanged` with state `ended`."""

    world: str
    reason: str = "closed"


class Encode(Message, frozen=True):
    """Turn one encoding of a world on or off. H.264 is on from the start."""

    world: str
    codec: Codec
    on: bool = True


class WantKeyframe(Message, frozen=True):
    """The next frame of this encoding should be a keyframe (a viewer joined or lost one)."""

    world: str
    codec: Codec


class WantBitrate(Message, frozen=True):
    world: str
    codec: Codec
    bits_per_second: int


class WantProfile(Message, frozen=True):
    """Ask for the profile of the last `blocks` blocks; answered by `Profile`."""

    id: str
    world: str
    blocks: int = 32
    trace: bool = False


class Ping(Message, frozen=True):
    """Heartbeat; answered at once, between steps, by `Pong`."""

    n: int


class Shutdown(Message, frozen=True):
    """End every world, then exit 0."""


Command = Open | Steer | Pause | Resume | Close | Encode | WantKeyframe | WantBitrate | WantProfile | Ping | Shutdown

# ---------------------------------------------------------------------------------------------------- events


class Hello(Message, frozen=True):
    """First event of an engine: it is up, with these models."""

    version: str
    device: str
    models: tuple[ModelCard, ...]
    encoders: dict[str, str] = {}  # codec -> the encoder that the probe chose


class Opened(Message, frozen=True):
    """The world is there. Its first block is `first_block`, later than 0 when it continues another."""

    id: str
    world: str
    card: ModelCard
    width: int
    height: int
    fps: float
    lead_ms: int
    first_block: int = 0
    first_media_ms: int = 0


class Refused(Message, frozen=True):
    """A command that could not be carried out; nothing has changed.

    `busy` says that the engine's measured capacity is spent and when another try makes sense.
    """

    id: str
    world: str
    message: str
    busy: bool = False
    retry_after_s: float = 0.0


class WorldChanged(Message, frozen=True):
    """A world's state. `media_ms` is the media time of the last frame released."""

    world: str
    state: WorldState
    reason: str = ""
    media_ms: int = 0


class Packet(Message, frozen=True):
    """One encoded picture. H.264 data is Annex B.

    `media_ms` is the picture's media time: its place in the world, the same in every replay. `pts` (90 kHz) is when it
    was due to be shown, counted from the world's first frame: media time plus all stalls and pauses until then, so it
    runs with the wall clock. A picture is sent twice only when a keyframe is wanted while nothing new comes.
    """

    world: str
    codec: Codec
    data: bytes
    pts: int
    duration: int
    keyframe: bool
    block: int
    media_ms: int = 0


class BlockDone(Message, frozen=True):
    """One block was generated. Times in ms by phase, which do not overlap: `denoise`, `commit` (the clean pass),
    `decode`, …; `due_in_ms` < 0 means late.
    """

    world: str
    block: int
    media_ms: int
    frames: int
    phases_ms: dict[str, float]
    due_in_ms: float


class SignalApplied(Message, frozen=True):
    """The command `id` is in force from `block` on, whose first frame is shown at `media_ms`."""

    id: str
    world: str
    signal: Signal
    block: int
    media_ms: int
    understood: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    text: str = ""


class SignalRefused(Message, frozen=True):
    id: str
    world: str
    message: str


class Stats(Message, frozen=True):
    """About once a second and world."""

    world: str
    fps: float  # frames released per second
    real_time_factor: float  # media seconds made per second spent making them
    lead_ms: float
    reserve_ms: float
    late_blocks: int
    stretched_ms: float  # how far the media clock has been moved on by stalls, in all
    kv_bytes: dict[str, int]  # by tier
    bitrate: int
    block: int
    media_ms: int
    metrics: dict[str, float] = {}  # custom metrics and drift


class Profile(Message, frozen=True):
    id: str
    world: str
    body: bytes  # JSON


class Pong(Message, frozen=True):
    n: int
    rss_bytes: int
    worlds: int


class Log(Message, frozen=True):
    level: str
    text: str


Event = (
    Hello
    | Opened
    | Refused
    | WorldChanged
    | Packet
    | BlockDone
    | SignalApplied
    | SignalRefused
    | Stats
    | Profile
    | Pong
    | Log
)

# ----------------------------------------------------------------------------------------------------- codec

_encoder = msgspec.msgpack.Encoder()
_commands: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_events: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)


def frame(message: Command | Event) -> bytes:
    """The bytes of one message on the wire, length prefix included."""
    body = _encoder.encode(message)
    if len(body) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"message of {len(body)} bytes, at most {MAX_MESSAGE_BYTES} are allowed")
    return len(body).to_bytes(4, "big") + body


def decode_command(body: bytes) -> Command:
    return _decode(_commands, body)


def decode_event(body: bytes) -> Event:
    return _decode(_events, body)


class Framer:
    """Cuts a byte stream into message bodies; bytes may arrive in pieces of any size."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the bodies completed by `data`; raise ProtocolError on a length no message has."""
        self._buffer += data
        while len(self._buffer) >= 4:
            size = int.from_bytes(self._buffer[:4], "big")
            if size > MAX_MESSAGE_BYTES:
                raise ProtocolError(f"message of {size} bytes announced, at most {MAX_MESSAGE_BYTES} are allowed")
            if len(self._buffer) < 4 + size:
                return
            body = bytes(self._buffer[4 : 4 + size])
            del self._buffer[: 4 + size]
            yield body


def _decode(decoder: msgspec.msgpack.Decoder[T], body: bytes) -> T:
    try:
        return decoder.decode(body)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"not a message of this protocol: {error}") from error
