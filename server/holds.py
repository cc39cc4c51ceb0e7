"""Keys held without a connection: released by a timer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Holds:
    def __init__(self, release: Callable[[str], None]) -> None:
        self._release = release
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def release_after(self, connection: str, seconds: float) -> None:
        """A later call for the same holder replaces an earlier one."""
        self._cancel(connection)
        self._timers[connection] = asyncio.get_running_loop().call_later(seconds, self._due, connection)

    def close(self) -> None:
        for connection in list(self._timers):
            self._cancel(connection)

    def _due(self, connection: str) -> None:
        self._timers.pop(connection, None)
        self._release(connection)

    def _cancel(self, connection: str) -> None:
        timer = self._timers.pop(connection, None)
        if timer is not None:
            timer.cancel()
