"""All sessions: made, admitted, given the engine's events, paused, ended and forgotten.

create ──► Open ──► Opened ──► the session lives          every event of the engine ──► its session
               └──► Refused ─► 503, or the queue          every second ──► pauses, limits, queue, gauges
"""

from __future__ import annotations

import asyncio
import base64
import collections
import contextlib
import logging
import secrets
from collections.abc import Iterator, Sequence

from engine.protocol import (
    BlockDone,
    Close,
    Event,
    Hello,
    Log,
    Open,
    Opened,
    Packet,
    Pong,
    Profile,
    Refused,
    SignalApplied,
    SignalRefused,
    Stats,
    WorldChanged,
    WorldSpec,
)
from server.admission import require_room
from server.auth import Identity
from server.gauges import measure
from server.link import EngineDown, EngineLink, EngineUnavailable
from server.metrics import Metrics
from server.outputs import AnyOutput
from server.problems import Problem, engine_not_ready, session_not_found
from server.profiles import Profiles
from server.schemas import LimitsView
from server.session import Session
from server.settings import Settings
from server.upkeep import keep_up
from server.waiting import Waiting

log = logging.getLogger(__name__)

KEPT_OVER = 200
KEPT_OVER_S = 3600.0
TICK_S = 1.0
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class Sessions:
    def __init__(self, settings: Settings, link: EngineLink, metrics: Metrics) -> None:
        self._settings = settings
        self._limits = settings.limits
        self._link = link
        self._metrics = metrics
        self._sessions: collections.OrderedDict[str, Session] = collections.OrderedDict()
        self._waiting = Waiting(settings.limits.queued)
        self._closing: set[asyncio.Task[None]] = set()
        self._closed: set[str] = set()
        self.profiles = Profiles()
        self.draining = False

    def __iter__(self) -> Iterator[Session]:
        return iter(self._sessions.values())

    def get(self, id: str) -> Session:
        if id not in self._sessions:
            raise session_not_found(id)
        return self._sessions[id]

    def living(self, owner: str | None = None) -> list[Session]:
        return [one for one in self if not one.over and owner in (None, one.owner)]

    # ---------------------------------------------------------------------------------------------- create and stop

    async def create(
        self, owner: Identity, spec: WorldSpec, limits: LimitsView, outputs: Sequence[AnyOutput], *, queue: bool
    ) -> Session:
        """A session whose world the engine has taken (or which is queued, if asked); raises Problem."""
        self._require_room(owner)
        session = Session(
            _new_id(), owner.name, spec, limits, settings=self._settings, metrics=self._metrics, send=self._link.send
        )
        await session.outputs.check(outputs)
        self._require_room(owner)  # others may have come while names were looked up
        self._sessions[session.id] = session
        try:
            if queue and len(self._waiting):
                raise Problem(503, "capacity", "others are waiting already")
            await self._open_and_wait(session)
        except Problem as problem:
            if queue and problem.code in ("capacity", "engine-not-ready") and len(self._waiting) < self._limits.queued:
                self._waiting.add(session, problem.detail)
            else:
                await self._undo(session, problem)
                raise
        except asyncio.CancelledError:  # the caller went away while we waited
            self.stop(session, "nobody waited for it")
            raise
        self._start_outputs(session, outputs)
        return session

    def stop(self, session: Session, reason: str) -> None:
        session.stop(reason)
        self._after_end(session)

    async def drain(self, reason: str) -> None:
        """End every session: worlds told, viewers let go, pushes and recordings closed. Within the drain limit."""
        self.draining = True
        for session in self.living():
            session.stop(reason)
            session.change("ended", reason)
            self._after_end(session)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.drain_s):
                await asyncio.gather(*self._closing)

    # ---------------------------------------------------------------------------------------------- the two loops

    async def follow_engine(self) -> None:
        """Give every event to its session, for as long as the link lives."""
        async with contextlib.aclosing(self._link.events()) as events:
            async for event in events:
                try:
                    self._on_event(event)
                except Exception:  # an event we cannot handle must not end all sessions
                    log.exception("event %s", type(event).__name__)

    async def keep_time(self) -> None:
        """Every second: what is due for each session, and the gauges."""
        loop = asyncio.get_running_loop()
        due_s = loop.time() + TICK_S
        while True:
            await asyncio.sleep(max(0.0, due_s - loop.time()))
            self._metrics.loop_lag_seconds.observe(max(0.0, loop.time() - due_s))
            due_s = loop.time() + TICK_S
            try:
                self._tick(loop.time())
            except Exception:  # one session's trouble must not stop the clock of all
                log.exception("tick")

    # ---------------------------------------------------------------------------------------------- events

    def _on_event(self, event: Event | EngineDown) -> None:
        if isinstance(event, Packet):
            session = self._session_of(event.world)
            if session is not None:
                session.line.on_packet(event)
        elif isinstance(event, EngineDown):
            self._on_down(event)
        elif isinstance(event, Hello):
            self._on_hello()
        elif isinstance(event, Profile):
            self.profiles.answered(event)
        elif isinstance(event, Log):
            log.log(LEVELS.get(event.level, logging.INFO), "engine: %s", event.text)
        elif not isinstance(event, Pong):  # those stay in the link
            self._on_world(event)

    def _on_world(
        self, event: Opened | Refused | WorldChanged | BlockDone | SignalApplied | SignalRefused | Stats
    ) -> None:
        session = self._session_of(event.world)
        if session is None or session.over:
            if isinstance(event, Opened):  # nobody wants it any more
                with contextlib.suppress(EngineUnavailable):
                    self._link.send(Close(event.world, "nobody wants it any more"))
            return
        match event:
            case Opened():
                session.on_opened(event)
            case Refused():
                self._on_refused(session, event)
            case WorldChanged():
                session.on_changed(event)
                self._after_end(session)
            case BlockDone():
                session.line.on_block(event)
            case SignalApplied():
                session.line.on_applied(event)
            case SignalRefused():
                session.line.on_refused(event)
            case Stats():
                session.line.on_stats(event, len(session.viewers))

    def _on_down(self, event: EngineDown) -> None:
        self._metrics.engine_restarts.inc()
        for session in self.living():
            session.on_engine_down(event.reason)
            self._after_end(session)

    def _on_hello(self) -> None:
        """A new engine: worlds that were lost are opened again, oldest first; then the queue."""
        for session in self.living():
            if session.state == "starting" and session.generation > 0:
                self._try_open(session)
        self._waiting.hurry()

    def _on_refused(self, session: Session, event: Refused) -> None:
        if event.id != session.world:  # a command other than Open
            if not self.profiles.refused(event.id, event.message):
                log.warning("session %s: the engine refused %s: %s", session.id, event.id, event.message)
            return
        if event.busy:
            self._metrics.refused.inc()
            problem = Problem(503, "capacity", event.message, retry_after_s=max(1.0, event.retry_after_s))
        else:
            problem = Problem(422, "invalid", event.message)
        if session.awaited:
            session.outcome.set_exception(problem)
        elif session in self._waiting and event.busy:
            self._waiting.refused(event.retry_after_s)
        else:
            session.change("failed", event.message)
            self._after_end(session)

    # ---------------------------------------------------------------------------------------------- opening

    def _require_room(self, owner: Identity) -> None:
        if self.draining:
            raise Problem(503, "stopping", "the server is stopping")
        require_room(len(self.living()), len(self.living(owner.name)), owner, self._limits)

    async def _open_and_wait(self, session: Session) -> None:
        if not self._link.ready:
            raise engine_not_ready(f"the engine is {self._link.state}" + _colon(self._link.reason))
        self._open(session)
        session.awaited = True
        try:
            async with asyncio.timeout(self._limits.open_s):
                await asyncio.shield(session.outcome)
        except TimeoutError:  # slow is not wrong: the session says `starting`
            log.info("session %s: no word from the engine within %g s", session.id, self._limits.open_s)
        finally:
            session.awaited = False

    def _open(self, session: Session) -> None:
        """Raises Problem 503 when the engine cannot be told."""
        lost = session.world if session.opened is not None else ""
        spec = session.next_world()
        session.send(Open(session.world, session.world, spec, lost))

    def _try_open(self, session: Session) -> None:
        try:
            self._open(session)
        except Problem as problem:
            log.warning("session %s: not opened: %s", session.id, problem.detail)

    async def _undo(self, session: Session, problem: Problem) -> None:
        """Nothing was made: the session was never there."""
        del self._sessions[session.id]
        session.change("failed", problem.detail)
        await session.close()

    def _start_outputs(self, session: Session, outputs: Sequence[AnyOutput]) -> None:
        """All of them, or the session ends: who is told that nothing was made leaves nothing running."""
        try:
            for output in outputs:
                session.outputs.start(output)
        except Exception as error:
            self.stop(session, f"an output could not be started: {error}")
            raise

    # ---------------------------------------------------------------------------------------------- time

    def _tick(self, now_s: float) -> None:
        for session in self.living():
            keep_up(session, now_s, self._limits.pause_after_s)
            self._after_end(session)
        if self._link.ready:
            self._waiting.serve(self._try_open)
        self._forget_old(now_s)
        measure(self._metrics, self.living(), self._link, len(self._waiting))

    def _after_end(self, session: Session) -> None:
        """Close what an ended session still has; once."""
        if not session.over or session.id in self._closed:
            return
        self._closed.add(session.id)
        task = asyncio.create_task(_close(session))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        self._waiting.discard(session)
        self._waiting.hurry()

    def _forget_old(self, now_s: float) -> None:
        over = [session for session in self if session.over]
        for session in over:
            if now_s - session.changed_s > KEPT_OVER_S or len(over) - KEPT_OVER > over.index(session):
                del self._sessions[session.id]
                self._closed.discard(session.id)

    def _session_of(self, world: str) -> Session | None:
        session = self._sessions.get(world.rpartition(".")[0])
        return session if session is not None and session.world == world else None


async def _close(session: Session) -> None:
    try:
        await session.close()
    except Exception:  # what one session cannot close must not keep the others from it
        log.exception("session %s could not be closed", session.id)


def _new_id() -> str:
    """80 random bits, easy to read out."""
    return base64.b32encode(secrets.token_bytes(10)).decode().lower()


def _colon(reason: str) -> str:
    return f": {reason}" if reason else ""
