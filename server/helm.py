"""One session's helm: what people want of its world becomes commands to the engine.

What is held or asked for is noted only once the engine has been told, so that nothing comes back after a restart which
nobody was promised. Keeps no state but the time: prompts and keys are in `steering`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from engine.protocol import ActionState, Opened, PromptChange, Steer
from server.problems import Problem
from server.steering import Steering

if TYPE_CHECKING:
    from server.session import Session


class Helm:
    def __init__(self, session: Session) -> None:
        self._session = session
        self._loop = asyncio.get_running_loop()
        self.used_s = self._loop.time()

    def prompt(self, id: str | None, change: PromptChange, seen_ms: int | None) -> str:
        """Raises Problem; returns the id under which the outcome will be told."""
        self._opened()
        session, seen_ms = self._session, self._session.line.world_ms(seen_ms)
        return self._send(self._steering.prompt(session.world, id, change, seen_ms, self._loop.time()), id)

    def action(self, id: str | None, connection: str, state: ActionState, seen_ms: int | None) -> str:
        """One connection's keys are now these; raises Problem: then it holds no more than before."""
        session, steering = self._session, self._steering
        try:
            _require_known(state, self._opened())
            seen_ms = session.line.world_ms(seen_ms)
            accepted = self._send(steering.action(session.world, id, connection, state, seen_ms, self._loop.time()), id)
        except Problem as problem:
            if problem.code == "engine-not-ready":  # the next engine is to hear of no key that was let go meanwhile
                steering.let_go(connection, state)
            raise
        steering.hold(connection, state)
        return accepted

    def release(self, connection: str) -> None:
        """The connection is gone: its keys are up."""
        session, steering = self._session, self._steering
        if steering.holds(connection):
            session.try_send(steering.action(session.world, None, connection, ActionState(), None, self._loop.time()))
            steering.hold(connection, ActionState())

    def renew(self) -> None:
        """Called every second: keys stay down as long as their connection lives."""
        now_s = self._loop.time()
        if self._steering.renewal_due(now_s):
            self._session.try_send(self._steering.renewal(self._session.world, now_s))

    @property
    def _steering(self) -> Steering:
        return self._session.line.steering

    def _opened(self) -> Opened:
        """What the engine said of the world; raises Problem where nothing can be steered."""
        session = self._session
        session.require_alive()
        if session.opened is None or not session.has_world:
            raise Problem(503, "engine-not-ready", f"the session is {session.state}, try again", retry_after_s=1)
        self.used_s = self._loop.time()
        return session.opened

    def _send(self, steer: Steer, id: str | None) -> str:
        try:
            self._session.send(steer)
        except Problem:
            self._steering.forget(steer)
            raise
        self._steering.sent(steer)
        return id or steer.id


def _require_known(state: ActionState, opened: Opened) -> None:
    """Keys and values are the model's; an unknown one is the sender's mistake, not the engine's problem."""
    card = opened.card
    for kind, names, known in (("key", state.keys, card.action_keys), ("value", state.values, card.action_values)):
        for name in names:
            if name not in known:
                raise Problem(422, "invalid", f"{kind} {name!r}: expected one of {', '.join(known) or 'none'}")
