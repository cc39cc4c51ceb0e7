"""A world's media clock and the reserve its late blocks have taught: arithmetic on times handed in, nothing else.

Knows no thread and reads no clock, so a test can let an hour pass in a line.
"""

from __future__ import annotations

from collections import deque

LATENESS_BLOCKS = 128  # that the reserve is learnt from


class MediaClock:
    """Where a world's media time lies on the monotonic clock. Stalls and pauses move it on, nothing moves it back."""

    def __init__(self) -> None:
        self._first_s: float | None = None  # when media time 0 was due
        self._origin_s = 0.0  # when media time 0 would be due after all stalls and pauses until now
        self._paused_at_s: float | None = None
        self.stretched_s = 0.0  # by stalls, in all

    @property
    def started(self) -> bool:
        return self._first_s is not None

    @property
    def paused(self) -> bool:
        return self._paused_at_s is not None

    def start(self, now_s: float) -> None:
        self._first_s = self._origin_s = now_s
        if self._paused_at_s is not None:
            self._paused_at_s = now_s

    def due_s(self, media_s: float, now_s: float) -> float:
        """When `media_s` is to be shown; while paused, when it would be if the world went on now."""
        pause_s = 0.0 if self._paused_at_s is None else now_s - self._paused_at_s
        return self._origin_s + media_s + pause_s

    def shown_s(self, at_s: float) -> float:
        """Seconds from the first picture to `at_s`."""
        return at_s - self._first_s if self._first_s is not None else 0.0

    def stretch(self, by_s: float) -> None:
        self._origin_s += by_s
        self.stretched_s += by_s

    def pause(self, now_s: float) -> None:
        if self._paused_at_s is None:
            self._paused_at_s = now_s

    def resume(self, now_s: float) -> None:
        if self._paused_at_s is not None:
            self._origin_s += now_s - self._paused_at_s
            self._paused_at_s = None


class Reserve:
    """How much earlier blocks must begin so that about 99 in 100 are not late."""

    def __init__(self, most_s: float) -> None:
        self.most_s = most_s
        self._late_s: deque[float] = deque(maxlen=LATENESS_BLOCKS)

    def note(self, late_s: float) -> None:
        """`late_s`: how late a block would have come without any reserve; negative when early."""
        self._late_s.append(max(0.0, late_s))

    @property
    def seconds(self) -> float:
        """The 99th percentile (below 100 blocks the second largest: one stall is no habit), bounded."""
        if len(self._late_s) < 2:
            return 0.0
        return min(self.most_s, sorted(self._late_s)[int(0.99 * (len(self._late_s) - 1))])
