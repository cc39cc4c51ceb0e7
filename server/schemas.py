"""JSON of the HTTP side: what may be asked for, and how sessions and outputs look. Closed against unknown fields."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

from engine.protocol import PromptMode
from server.messages import Blocks, Id, Keys, MediaMs, PromptText, Values

SessionState = Literal["queued", "starting", "running", "paused", "stopping", "ended", "failed"]
OutputState = Literal["connecting", "live", "retrying", "failed", "stopped"]
PromptState = Literal["scheduled", "waiting", "applied", "refused"]
MAX_SCHEDULED = 64


def _seconds(value: object) -> object:
    """`"4s"` and `"4"` as well as 4."""
    return value.strip().removesuffix("s") if isinstance(value, str) else value


Seconds = Annotated[float, BeforeValidator(_seconds, json_schema_input_type=float | str)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ScheduledPrompt(Body):
    at: Annotated[Seconds, Field(ge=0, le=1e6, allow_inf_nan=False)]
    text: PromptText
    mode: PromptMode = "auto"
    over_blocks: Blocks = 4


class RtmpRequest(Body):
    kind: Literal["rtmp"]
    url: Annotated[str, StringConstraints(min_length=1, max_length=1024)]
    key: Annotated[str, StringConstraints(max_length=512)] = ""
    audio: Literal["silent", "none"] = "silent"


class RecordingRequest(Body):
    kind: Literal["recording"]


OutputRequest = Annotated[RtmpRequest | RecordingRequest, Field(discriminator="kind")]


class LimitsRequest(Body):
    lifetime_s: Annotated[float, Field(gt=0, le=1e9)] | None = None
    idle_s: Annotated[float, Field(gt=0, le=1e9)] | None = None


class SessionRequest(Body):
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        json_schema_extra={
            "examples": [
                {
                    "model": "tiny-world",
                    "prompt": "a red ball rolls over sand",
                    "prompts": [{"at": 4.0, "text": "it begins to rain", "mode": "blend", "over_blocks": 4}],
                    "seed": 7,
                    "record": False,
                }
            ]
        },
    )

    model: Annotated[str, StringConstraints(min_length=1, max_length=200)] | None = None
    prompt: PromptText | None = None
    prompts: Annotated[tuple[ScheduledPrompt, ...], Field(max_length=MAX_SCHEDULED)] = ()
    seed: Annotated[int, Field(ge=0, lt=2**53)] | None = None
    width: Annotated[int, Field(ge=16, le=4096)] | None = None
    height: Annotated[int, Field(ge=16, le=4096)] | None = None
    fps: Annotated[float, Field(gt=0, le=120, allow_inf_nan=False)] | None = None
    steps: Annotated[int, Field(ge=1, le=200)] | None = None
    kv: Annotated[str, StringConstraints(max_length=1000)] = ""
    lead_ms: Annotated[int, Field(ge=0, le=60_000)] | None = None
    outputs: Annotated[tuple[OutputRequest, ...], Field(max_length=8)] = ()
    record: bool = False
    limits: LimitsRequest = LimitsRequest()
    queue: bool = False


class PromptRequest(Body):
    model_config = ConfigDict(
        extra="forbid", frozen=True, json_schema_extra={"examples": [{"text": "it begins to rain", "mode": "blend"}]}
    )

    text: PromptText
    mode: PromptMode = "auto"
    over_blocks: Blocks = 4
    id: Id | None = None
    seen_ms: MediaMs | None = None


class ActionRequest(Body):
    model_config = ConfigDict(
        extra="forbid", frozen=True, json_schema_extra={"examples": [{"keys": ["left"], "hold_ms": 500}]}
    )

    keys: Keys = ()
    values: Values = {}
    id: Id | None = None
    seen_ms: MediaMs | None = None
    hold_ms: Annotated[int, Field(ge=1, le=60_000)] = 1000


class LinkRequest(Body):
    role: Literal["viewer", "player"] = "viewer"
    ttl_s: Annotated[int, Field(ge=60, le=604_800)] = 3600


# ---------------------------------------------------------------------------------------------------- answers


class View(BaseModel):
    model_config = ConfigDict(frozen=True)


class Accepted(View):
    id: str


class LinkView(View):
    url: str
    access: str
    role: str
    expires_at: datetime


class IceServer(View):
    urls: str
    username: str | None = None
    credential: str | None = None


class MeView(View):
    role: str
    name: str
    tokens: bool
    session: str | None
    sessions: int
    max_sessions: int
    ice_servers: tuple[IceServer, ...]


class ModelView(View):
    name: str
    width: int
    height: int
    fps: float
    frames_per_block: int
    signals: tuple[str, ...]
    action_keys: tuple[str, ...]
    action_values: tuple[str, ...]
    suggestions: tuple[str, ...]
    digest: str


class EngineView(View):
    state: Literal["starting", "ready", "down", "stopped"]
    version: str
    device: str
    encoders: dict[str, str]
    restarts: int
    reason: str


class ModelsView(View):
    engine: EngineView
    models: tuple[ModelView, ...]


class PromptView(View):
    id: str
    text: str
    mode: PromptMode
    over_blocks: int
    at_s: float | None
    state: PromptState
    block: int | None = None
    media_ms: int | None = None


class ActionView(View):
    keys: tuple[str, ...] = ()
    values: dict[str, float] = {}


class OutputView(View):
    id: str
    kind: Literal["rtmp", "recording"]
    state: OutputState
    reason: str
    since: datetime
    packets_dropped: int
    target: str | None = None  # rtmp
    audio: str | None = None
    attempts: int | None = None
    bytes_sent: int | None = None
    bytes: int | None = None  # recording
    seconds: float | None = None


class StatsView(View):
    fps: float
    real_time_factor: float
    lead_ms: float
    reserve_ms: float
    late_blocks: int
    stretched_ms: float
    kv_bytes: dict[str, int]
    bitrate: int
    block: int
    media_ms: int
    metrics: dict[str, float]


class LimitsView(View):
    lifetime_s: float
    idle_s: float


class Urls(View):
    self: str
    ws: str
    whep: str
    page: str
    recording: str
    journal: str
    profile: str


class SessionView(View):
    id: str
    model: str
    state: SessionState
    reason: str
    owner: str
    created_at: datetime
    seed: int
    width: int | None
    height: int | None
    fps: float | None
    lead_ms: int | None
    frames_per_block: int | None
    signals: tuple[str, ...]
    action_keys: tuple[str, ...]
    action_values: tuple[str, ...]
    suggestions: tuple[str, ...]
    digest: str
    prompt: str
    prompts: tuple[PromptView, ...]
    action: ActionView
    media_ms: int
    block: int
    viewers: int
    max_viewers: int
    queue_position: int | None
    restarts: int
    outputs: tuple[OutputView, ...]
    recording: OutputView | None
    limits: LimitsView
    stats: StatsView | None
    seq: int
    urls: Urls


class SessionsView(View):
    sessions: tuple[SessionView, ...]


class PeerView(View):
    id: str
    state: str
    codec: str
    rtp_origin: int | None
    keyframes_only: bool
    packets_sent: int
    packets_dropped: int
    fraction_lost: float | None
    round_trip_ms: float | None
    remb_bps: int | None


class JournalEntry(View):
    block: int
    media_ms: int
    signal: Literal["prompt", "action"]
    id: str
    text: str | None = None
    mode: PromptMode | None = None
    over_blocks: int | None = None
    keys: tuple[str, ...] | None = None
    values: dict[str, float] | None = None


class JournalView(View):
    version: Literal[1] = 1
    model: str
    digest: str
    spec: dict[str, Any]
    signals: tuple[JournalEntry, ...]
    truncated: bool
    restarts: tuple[int, ...]


def now() -> datetime:
    return datetime.now(UTC)
