"""One world as its viewers see it: the pictures waiting for their time, the encodings, and the facts about both.

Every method is handed the time; the thread that calls them in the right order is playout's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from engine.clock import MediaClock, Reserve
from engine.encoder import Encoded, Picture, VideoEncoder
from engine.protocol import CLOCK_HZ, Codec

KEYFRAME_GAP_S = 0.25  # between keyframes that were asked for: each is ten times a picture, and goes to everybody
BITRATE_GAP_S = 1.0  # between changes of rate: each begins with a keyframe
MAX_WAITING_S = 60.0  # of pictures in one world; the scheduler's lead keeps them far below
LATE_PICTURES = 1.0  # picture periods that a release may be late before the clock is moved on
QUIET_PICTURES = 2.0  # picture periods without a new picture after which a wanted keyframe shows the last one again


@dataclass(frozen=True)
class Pictures:
    """One block, ready to be shown."""

    block: int
    media_s: float  # of the first picture
    pictures: Sequence[Picture]
    early_s: float = 0.0  # how much earlier than without a reserve its making began


@dataclass(frozen=True)
class Due:
    """One picture waiting for its time."""

    block: int
    media_s: float
    picture: Picture


@dataclass(frozen=True)
class Figures:
    """What one world's playout has to say of itself."""

    media_ms: int
    block: int
    fps: float
    reserve_ms: float
    late_blocks: int
    stretched_ms: float
    bitrate: int
    release_late_ms: float  # worst of the last pictures


@dataclass
class Encoding:
    """One codec of one world. The encoder is made, used and closed by the playout thread alone."""

    codec: Codec
    name: str
    bits_per_second: int
    keyframe: bool = True  # wanted with the next picture
    keyframe_s: float = -inf  # when one was last made
    bitrate_s: float = -inf  # when the rate was last changed
    encoder: VideoEncoder | None = None

    def encode(self, screen: Screen, picture: Picture, pts: int, now_s: float) -> list[Encoded]:
        if self.encoder is None:
            self.encoder = VideoEncoder(self.name, screen.width, screen.height, screen.fps, self.bits_per_second)
        if now_s >= self.bitrate_s + BITRATE_GAP_S and self.encoder.set_bitrate(self.bits_per_second):
            self.bitrate_s = now_s
        packets = self.encoder.encode(picture, pts, keyframe=self.keyframe_due_s <= now_s)
        if any(packet.keyframe for packet in packets):
            self.keyframe, self.keyframe_s = False, now_s
        return packets

    @property
    def keyframe_due_s(self) -> float:
        """From when on the keyframe that is wanted may be made; infinity when none is wanted."""
        return self.keyframe_s + KEYFRAME_GAP_S if self.keyframe else inf


@dataclass
class Screen:
    """One world as its viewers see it."""

    world: str
    width: int
    height: int
    fps: float
    reserve: Reserve
    clock: MediaClock = field(default_factory=MediaClock)
    waiting: deque[Due] = field(default_factory=deque)
    encodings: dict[Codec, Encoding] = field(default_factory=dict)
    shown: Due | None = None
    pts: int = -1
    late_blocks: int = 0
    released_s: deque[float] = field(default_factory=lambda: deque(maxlen=64))
    late_s: deque[float] = field(default_factory=lambda: deque(maxlen=256))
    sent: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=256))

    def add(self, block: Pictures, now_s: float) -> float:
        """Queue a block's pictures; seconds until its first is due, negative when it came too late."""
        if len(self.waiting) + len(block.pictures) > MAX_WAITING_S * self.fps:
            raise OverflowError(f"expected at most {MAX_WAITING_S:.0f} s of pictures waiting in {self.world}")
        if not self.clock.started:
            self.clock.start(now_s - block.media_s)
        due_s = self.clock.due_s(block.media_s, now_s)
        if not self.clock.paused:
            self.reserve.note(now_s - due_s + block.early_s)
        if now_s > due_s:
            self.late_blocks += 1
            self.clock.stretch(now_s - due_s)
        for i, picture in enumerate(block.pictures):
            self.waiting.append(Due(block.block, block.media_s + i / self.fps, picture))
        return due_s - now_s

    def next_s(self, now_s: float) -> float:
        """When this world next needs the thread; infinity when only a new block or command can tell."""
        if self.clock.paused or not self.waiting:
            return self._again_s()
        return self.clock.due_s(self.waiting[0].media_s, now_s)

    def release(self, now_s: float) -> tuple[Due, int] | None:
        """The picture whose time has come, and its pts; None when there is none."""
        if self.clock.paused or not self.waiting:
            return None
        due_s = self.clock.due_s(self.waiting[0].media_s, now_s)
        if due_s > now_s:
            return None
        self.late_s.append(now_s - due_s)
        if now_s - due_s > LATE_PICTURES / self.fps:
            self.clock.stretch(now_s - due_s)
            due_s = now_s
        self.shown = self.waiting.popleft()
        self.released_s.append(now_s)
        return self.shown, self._next_pts(due_s)

    def again(self, now_s: float) -> tuple[Due, int] | None:
        """The last picture once more, when somebody needs a keyframe and nothing new comes."""
        if self.shown is None or now_s < self._again_s():
            return None
        return self.shown, self._next_pts(now_s)

    def figures(self, now_s: float) -> Figures:
        recent = [at_s for at_s in self.released_s if now_s - at_s <= 2.0]
        span_s = now_s - recent[0] if len(recent) > 1 else 0.0
        sent = [size for at_s, size in self.sent if now_s - at_s <= 2.0]
        return Figures(
            media_ms=0 if self.shown is None else round(1000 * self.shown.media_s),
            block=-1 if self.shown is None else self.shown.block,
            fps=(len(recent) - 1) / span_s if span_s > 0 else 0.0,
            reserve_ms=1000 * self.reserve.seconds,
            late_blocks=self.late_blocks,
            stretched_ms=1000 * self.clock.stretched_s,
            bitrate=8 * sum(sent) // 2,
            release_late_ms=1000 * max(self.late_s, default=0.0),
        )

    def _again_s(self) -> float:
        """When the last picture is to be sent again; infinity when nobody needs it or a new one is on its way."""
        moving = self.waiting and not self.clock.paused
        if self.shown is None or moving:
            return inf
        quiet_s = -inf if self.clock.paused else self.released_s[-1] + QUIET_PICTURES / self.fps
        return max(quiet_s, min((e.keyframe_due_s for e in self.encodings.values()), default=inf))

    def _next_pts(self, due_s: float) -> int:
        self.pts = max(self.pts + 1, round(self.clock.shown_s(due_s) * CLOCK_HZ))
        return self.pts
