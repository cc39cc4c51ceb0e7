"""One session: the server's record of one world, its owner, its viewers and outputs, and its state.

queued ──► starting ──► running ◄──► paused ──► stopping ──► ended          failed from anywhere
              ▲ engine died │            │
              └─────────────┴────────────┘
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

import msgspec

from engine.protocol import Close, Command, Opened, Pause, Resume, WorldChanged, WorldSpec
from server import messages
from server.encodings import Encodings
from server.helm import Helm
from server.history import History
from server.holds import Holds
from server.link import EngineUnavailable
from server.metrics import Metrics
from server.outputs import Outputs
from server.problems import Problem, engine_not_ready, session_over
from server.schemas import LimitsView, OutputView, SessionState, now
from server.settings import Settings
from server.viewers import Viewers
from server.worldline import Worldline

log = logging.getLogger(__name__)

FINAL = frozenset({"ended", "failed"})
ASKED = "asked"
NOBODY = "nobody is watching"


class Session:
    def __init__(
        self,
        id: str,
        owner: str,
        spec: WorldSpec,
        limits: LimitsView,
        *,
        settings: Settings,
        metrics: Metrics,
        send: Callable[[Command], None],
    ) -> None:
        self._send = send
        self._loop = asyncio.get_running_loop()
        self.id = id
        self.owner = owner
        self.limits = limits
        self.created_at = now()
        self.state: SessionState = "starting"
        self.reason = ""
        self.opened: Opened | None = None
        self.outcome: asyncio.Future[None] = self._loop.create_future()  # of the first request to open
        self.awaited = False  # somebody is waiting for the outcome and will tell the caller
        self.queue_position: int | None = None
        self.generation = 0  # worlds asked for so far
        self.pause_reason = ""
        self.listeners = 0  # WebSockets
        self.born_s = self.watched_s = self.changed_s = self._loop.time()
        self.history = History()
        self.helm = Helm(self)
        self.holds = Holds(self.helm.release)
        self.encodings = Encodings(self.try_send, metrics)
        self.line = Worldline(spec, self.history, self.encodings, metrics)
        self.outputs = Outputs(id, self.encodings.h264, self._output_changed, settings=settings, metrics=metrics)
        self.viewers = Viewers(
            self.encodings, self._viewers_changed, ice=settings.ice, limit=settings.limits.viewers, metrics=metrics
        )

    @property
    def world(self) -> str:
        """The present world's name; what is said of an earlier one does not concern us any more."""
        return f"{self.id}.{self.generation}"

    @property
    def has_world(self) -> bool:
        """Whether the engine has opened the present world: from then on it takes commands, before its first picture."""
        return self.opened is not None and self.opened.world == self.world and self.state != "stopping"

    @property
    def over(self) -> bool:
        return self.state in FINAL

    @property
    def watched(self) -> bool:
        return len(self.viewers) > 0 or self.outputs.active

    # ---------------------------------------------------------------------------------------------- from people

    def require_alive(self) -> None:
        if self.over or self.state == "stopping":
            raise session_over(self.id, self.state, self.reason)

    def pause(self, reason: str = ASKED) -> None:
        self.require_alive()
        if self.state == "queued":
            raise Problem(409, "wrong-state", "expected a session that has begun, this one is queued")
        if self.state == "paused" and reason == ASKED:
            self.change("paused", ASKED)
        elif self.state != "paused" and self.has_world:
            self.send(Pause(self.world))
        self.pause_reason = reason

    def resume(self) -> None:
        self.require_alive()
        if self.pause_reason and self.has_world:
            self.send(Resume(self.world))
        self.pause_reason = ""
        self.watched_s = self._loop.time()

    def somebody_came(self) -> None:
        """A viewer or an output: an unwatched pause is over, at once or as soon as the engine can be told."""
        self.watched_s = self._loop.time()
        if self.pause_reason == NOBODY:
            with contextlib.suppress(Problem):
                self.resume()

    def send(self, command: Command) -> None:
        """A command about this world; raises Problem 503 when the engine cannot take it."""
        try:
            self._send(command)
        except EngineUnavailable as error:
            raise engine_not_ready(str(error)) from error

    def try_send(self, command: Command) -> None:
        """A command whose loss does no harm: an engine that cannot take it has lost the world anyway."""
        try:
            self._send(command)
        except EngineUnavailable as error:
            log.debug("session %s: %s not sent: %s", self.id, type(command).__name__, error)

    # ---------------------------------------------------------------------------------------------- from the engine

    def on_opened(self, event: Opened) -> None:
        self.opened = event
        self.line.continued(event.first_block, event.first_media_ms)
        if self.state == "queued":
            self.change("starting")
        picture = self.outputs.picture
        picture.width, picture.height, picture.fps = event.width, event.height, event.fps
        self._settle()
        self.encodings.use(self.world)
        self.helm.renew()
        if self.watched:
            self.somebody_came()
        if self.pause_reason:
            self.try_send(Pause(self.world))

    def on_changed(self, event: WorldChanged) -> None:
        self.line.at(event.media_ms)
        ends = event.state in ("ended", "failed")
        if self.state == "stopping" and not ends:
            return
        reason = event.reason
        if event.state == "paused":
            reason = self.pause_reason or reason
        elif ends:
            reason = reason or self.reason
        self.change(event.state, reason)

    def on_engine_down(self, reason: str) -> None:
        """The world is gone: whoever waits for it is told; a session that lives goes back to starting."""
        self.encodings.use(None)
        self._settle(engine_not_ready(reason))
        if self.state == "stopping":
            self.change("ended", self.reason)
        elif not self.over and self.state != "queued":
            self.line.lost()
            if self.line.lost_too_often:
                self.change("failed", f"the engine was lost too often: {reason}")
            else:
                self.change("starting", f"the engine was lost and is being started again: {reason}")

    def next_world(self) -> WorldSpec:
        """What to open now: the world as asked for, or what follows the one that was lost."""
        self.generation += 1
        return self.line.spec if self.opened is None else self.line.reopen()

    # ---------------------------------------------------------------------------------------------- its state

    def change(self, state: SessionState, reason: str = "") -> None:
        """Enter a state and tell everybody; final ones close everything the session has."""
        if self.over or (state, reason) == (self.state, self.reason):
            return
        self.state, self.reason = state, reason
        self.changed_s = self._loop.time()
        if state != "queued":
            self.queue_position = None
        log.info("session %s: %s%s", self.id, state, f" ({reason})" if reason else "")
        self.tell_state()
        if self.over:
            self._settle(session_over(self.id, state, reason))
            self.encodings.close()
            self.viewers.end()
            self.outputs.end()

    def tell_state(self) -> None:
        self.history.append(
            messages.State(
                state=self.state,
                reason=self.reason,
                media_ms=self.line.media_ms,
                queue_position=self.queue_position,
            )
        )

    def stop(self, reason: str) -> None:
        """End it, whatever it is doing; the second time nothing more happens."""
        if self.over or self.state == "stopping":
            return
        if self.state == "queued" or self.generation == 0:
            self.change("ended", reason)
            return
        self.change("stopping", reason)
        try:
            self._send(Close(self.world, reason))
        except EngineUnavailable:
            self.change("ended", reason)

    async def close(self) -> None:
        """Everything the session started has ended: recordings are whole, pushes and viewers are closed."""
        self.encodings.close()
        self.holds.close()
        await asyncio.gather(self.outputs.close(), self.viewers.close())
        self.history.close()

    def _settle(self, problem: Problem | None = None) -> None:
        if self.outcome.done():
            return
        if problem is None:
            self.outcome.set_result(None)
            return
        self.outcome.set_exception(problem)
        self.outcome.exception()  # nobody may be waiting any more, which is no error

    def _viewers_changed(self) -> None:
        self.watched_s = self._loop.time()
        if not self.history.over:
            self.history.append(messages.Viewers(viewers=len(self.viewers)))

    def _output_changed(self, view: OutputView) -> None:
        self.watched_s = self._loop.time()
        if not self.history.over:
            self.history.append(messages.Output(output=msgspec.Raw(view.model_dump_json(exclude_none=True).encode())))
