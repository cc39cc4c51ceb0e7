"""A session's events: numbered from 1, the newest kept, followed by any number of readers at their own pace.

A reader holds a number, not a queue: a slow one costs nothing, and one that fell too far behind is told so.
"""

from __future__ import annotations

import asyncio
import collections
import itertools
from collections.abc import AsyncGenerator

import msgspec

from server.messages import Up, encode

KEPT_EVENTS = 512


class HistoryGap(Exception):
    """Events between the reader's number and the oldest kept one are gone."""


class History:
    def __init__(self, kept: int = KEPT_EVENTS) -> None:
        self._events: collections.deque[tuple[int, str]] = collections.deque(maxlen=kept)
        self._news = asyncio.Event()
        self.last_seq = 0
        self.over = False

    def append(self, event: Up) -> None:
        self.last_seq += 1
        self._events.append((self.last_seq, encode(msgspec.structs.replace(event, seq=self.last_seq))))
        self._wake()

    def close(self) -> None:
        """No more events will come: readers end after the last one."""
        self.over = True
        self._wake()

    def covers(self, after: int) -> bool:
        """Whether everything after this number is still here (and the number was ever given out)."""
        oldest = self._events[0][0] if self._events else self.last_seq + 1
        return oldest - 1 <= after <= self.last_seq

    async def follow(self, after: int) -> AsyncGenerator[str, None]:
        """Every event after number `after`, as text, until the history is closed; raises HistoryGap."""
        while True:
            if not self.covers(after):
                raise HistoryGap(f"events after {after} are no longer kept")
            news = self._news
            missed = list(itertools.islice(reversed(self._events), self.last_seq - after))
            for seq, text in reversed(missed):
                yield text
                after = seq
            if after < self.last_seq:
                continue
            if self.over:
                return
            await news.wait()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
