"""Profiles asked of the engine: a question with an id, an answer some time later, a limit to the waiting."""

from __future__ import annotations

import asyncio
import secrets

from engine.protocol import Profile, WantProfile
from server.problems import Problem, engine_not_ready
from server.session import Session

PROFILE_S = 10.0


class Profiles:
    def __init__(self) -> None:
        self._asked: dict[str, asyncio.Future[bytes]] = {}

    async def ask(self, session: Session, blocks: int, *, trace: bool) -> bytes:
        """The engine's account of a world's last blocks, JSON; raises Problem."""
        session.require_alive()
        id = f"profile-{secrets.token_hex(6)}"
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._asked[id] = answer
        try:
            session.send(WantProfile(id, session.world, blocks, trace))
            async with asyncio.timeout(PROFILE_S):
                return await answer
        except TimeoutError as error:
            raise Problem(503, "engine-timeout", f"no profile within {PROFILE_S:g} s", retry_after_s=5) from error
        finally:
            del self._asked[id]

    def answered(self, event: Profile) -> None:
        answer = self._asked.get(event.id)
        if answer is not None and not answer.done():
            answer.set_result(event.body)

    def refused(self, id: str, why: str) -> bool:
        """Whether this id was one of ours; whoever asked is told."""
        answer = self._asked.get(id)
        if answer is not None and not answer.done():
            answer.set_exception(engine_not_ready(why))
        return answer is not None
