"""Sessions that asked to wait for room: in order, each told where it stands, the first tried again and again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from server.problems import Problem
from server.session import Session

TRY_EVERY_S = 15.0  # when the engine said nothing about when


class Waiting:
    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._sessions: list[Session] = []
        self._not_before_s = 0.0

    def __len__(self) -> int:
        return len(self._sessions)

    def __contains__(self, session: Session) -> bool:
        return session in self._sessions

    def add(self, session: Session, why: str) -> None:
        """Raises Problem when the queue itself is full."""
        if len(self._sessions) >= self._limit:
            raise Problem(503, "capacity", f"{len(self._sessions)} sessions wait already", retry_after_s=30)
        self._sessions.append(session)
        session.generation = 0
        session.queue_position = len(self._sessions)
        session.change("queued", why)

    def discard(self, session: Session) -> None:
        if session in self._sessions:
            self._sessions.remove(session)

    def hurry(self) -> None:
        """Somebody left or the engine is new: the first may try at once."""
        self._not_before_s = 0.0

    def refused(self, retry_after_s: float) -> None:
        self._not_before_s = asyncio.get_running_loop().time() + max(1.0, retry_after_s)

    def serve(self, open_world: Callable[[Session], None]) -> None:
        """Let the first try when it is time; tell the others when they have moved up."""
        now_s = asyncio.get_running_loop().time()
        self._sessions = [session for session in self._sessions if not session.over and session.opened is None]
        if self._sessions and now_s >= self._not_before_s:
            self._not_before_s = now_s + TRY_EVERY_S
            open_world(self._sessions[0])
        for position, session in enumerate(self._sessions, 1):
            if session.queue_position != position:
                session.queue_position = position
                session.tell_state()
