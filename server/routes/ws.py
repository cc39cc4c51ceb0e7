"""A session's WebSocket: steering down, events up, resumable by number.

Two tasks per connection: one follows the session's history at its own pace, one takes messages. Whichever ends first
ends both; then the keys that were held through it are released.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Coroutine
from typing import Any

import msgspec
from fastapi import APIRouter, WebSocket, WebSocketDisconnect

from engine.protocol import ActionState, PromptChange
from server import messages
from server.auth import Identity, Rates
from server.history import HistoryGap
from server.messages import MessageError, encode, parse
from server.problems import Problem
from server.routes.context import Core, core_of, credentials_of, session_for
from server.session import Session
from server.views import session_view

log = logging.getLogger(__name__)
router = APIRouter()

PROTOCOL = "inferix.v1"
MESSAGES_PER_S = 60.0
OVER, RESTART, TRY_AGAIN = 1000, 1012, 1013
CLOSE_CODES = {401: 4401, 403: 4403, 404: 4404, 422: 1008}
_numbers = itertools.count(1)


@router.websocket("/v1/sessions/{id}/ws")
async def connect(websocket: WebSocket, id: str) -> None:
    core = core_of(websocket)
    try:
        core.access.check_origin(websocket.headers.get("origin"), websocket.headers.get("host", ""))
    except Problem:
        await websocket.close(4403)  # not accepted yet: the browser of a foreign page learns nothing
        return
    offered = [name.strip() for name in websocket.headers.get("sec-websocket-protocol", "").split(",")]
    await websocket.accept(PROTOCOL if PROTOCOL in offered else None)
    try:
        identity = core.access.identify(credentials_of(websocket))
        session = session_for(core, identity, id, "viewer")
        after = _after(websocket.query_params.get("after"))
    except Problem as problem:
        await websocket.close(CLOSE_CODES.get(problem.status, TRY_AGAIN), problem.detail[:120])
        return
    if session.listeners >= core.settings.limits.listeners:
        await websocket.close(TRY_AGAIN, "too many connections to this session")
        return
    session.listeners += 1
    try:
        await Conversation(websocket, core, session, identity).run(after)
    finally:
        session.listeners -= 1


class Conversation:
    """One connection, from `welcome` to its close."""

    def __init__(self, websocket: WebSocket, core: Core, session: Session, identity: Identity) -> None:
        self._websocket = websocket
        self._core = core
        self._session = session
        self._identity = identity
        self._connection = f"ws:{next(_numbers)}"
        self._rates = Rates(MESSAGES_PER_S)
        self._lock = asyncio.Lock()  # both tasks send

    async def run(self, after: int | None) -> None:
        history = self._session.history
        gap = after is not None and not history.covers(after)
        start = history.last_seq if after is None or gap else after
        try:
            await self._send(self._welcome(gap=gap))
            code = await _first_of(self._tell(start), self._listen())
            await self._websocket.close(code)
        except (WebSocketDisconnect, RuntimeError):  # starlette's word for a send after the other side is gone
            pass
        finally:
            self._session.helm.release(self._connection)

    async def _tell(self, after: int) -> int:
        """Every event, as fast as this connection takes them; returns the close code."""
        try:
            async with contextlib.aclosing(self._session.history.follow(after)) as events:
                async for text in events:
                    await self._send_text(text)
        except HistoryGap:
            return TRY_AGAIN
        return RESTART if self._core.sessions.draining else OVER

    async def _listen(self) -> int:
        while True:
            frame = await self._websocket.receive()
            if frame["type"] == "websocket.disconnect":
                raise WebSocketDisconnect(frame.get("code", 1006))
            await self._send(self._answer(frame.get("text")))

    def _answer(self, text: str | None) -> messages.Up:
        """Take one message; what to say to this connection alone."""
        id: str | None = None
        try:
            if self._rates.take("") > 0:
                raise Problem(429, "too-fast", f"at most {MESSAGES_PER_S:g} messages a second")
            if text is None:
                raise MessageError("not-json", "expected a text frame with a JSON object, got a binary one", None)
            message = parse(text)
            id = message.id
            if isinstance(message, messages.PingDown):
                return messages.Pong(seq=self._seq, id=id)
            return messages.Ack(seq=self._seq, id=self._act(message))
        except MessageError as error:
            return messages.Error(seq=self._seq, id=error.id, code=error.code, message=str(error))
        except Problem as problem:
            return messages.Error(seq=self._seq, id=id, code=problem.code, message=problem.detail)

    def _act(self, message: messages.AnyDown) -> str:
        """Raises Problem; returns the id under which the outcome will be told."""
        session = self._session
        self._core.access.require_owner(self._identity, session.id, session.owner)
        match message:
            case messages.PromptDown():
                change = PromptChange(0.0, message.text, message.mode, message.over_blocks)
                return session.helm.prompt(message.id, change, _seen_ms(message, session))
            case messages.ActionDown():
                state = ActionState(message.keys, message.values)
                return session.helm.action(message.id, self._connection, state, _seen_ms(message, session))
            case messages.PauseDown():
                session.pause()
            case messages.ResumeDown():
                session.resume()
        return message.id or ""

    def _welcome(self, *, gap: bool) -> messages.Welcome:
        try:
            self._core.access.require_owner(self._identity, self._session.id, self._session.owner)
            can_steer = True
        except Problem:
            can_steer = False
        view = session_view(self._session, self._core.settings.limits.viewers)
        return messages.Welcome(
            seq=self._seq,
            role=self._identity.role,
            can_steer=can_steer,
            gap=gap,
            session=msgspec.Raw(view.model_dump_json().encode()),
        )

    @property
    def _seq(self) -> int:
        return self._session.history.last_seq

    async def _send(self, message: messages.Up) -> None:
        await self._send_text(encode(message))

    async def _send_text(self, text: str) -> None:
        async with self._lock:
            await self._websocket.send_text(text)


def _seen_ms(message: messages.PromptDown | messages.ActionDown, session: Session) -> int | None:
    """Media time of what the sender was looking at; a player of the stream knows only when it was shown."""
    return message.seen_ms if message.seen_pts is None else session.line.media_ms_at(message.seen_pts)


def _after(text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 16:
        raise Problem(422, "invalid", f"after: expected a number, got {text[:40]!r}")
    return int(text)


async def _first_of(*jobs: Coroutine[Any, Any, int]) -> int:
    """Run all until one ends; its result or exception is the result."""
    tasks = [asyncio.create_task(job) for job in jobs]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(iter(done)).result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
