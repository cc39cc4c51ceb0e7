"""The engine's loop: receive, schedule, generate, decode, play out, and begin again.

    turn ─► commands ─► whose block is due first? ─► denoise it here ─► decoding thread ─► playout thread ─► link

Denoising is the only thing that keeps this thread long, so between its steps the loop breathes: it answers pings,
pauses, and notices that the server is gone or that the world in hand is to be closed. What fails for one world ends
that world alone.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections import deque
from collections.abc import Callable

from engine import profiler
from engine.config import EngineConfig
from engine.decoding import Decoded, Decoding, Job
from engine.link import INBOX_COMMANDS, Link
from engine.loader import Loaded, plan, warm_up
from engine.playout import Playout
from engine.protocol import (
    Close,
    Command,
    Encode,
    Hello,
    Open,
    Opened,
    Pause,
    Ping,
    Pong,
    Profile,
    ProtocolError,
    Refused,
    Resume,
    Shutdown,
    SignalRefused,
    Steer,
    WantBitrate,
    WantKeyframe,
    WantProfile,
    WorldChanged,
    WorldState,
)
from engine.room import Room
from engine.running import Running
from engine.scheduler import SPARE, Choice, Scheduler, Turn
from engine.telemetry import Telemetry
from engine.trace import chrome_trace, snapshot

log = logging.getLogger(__name__)

IDLE_S = 0.25  # at most between two looks at what is to be reported


class Abandoned(Exception):
    """The block in hand is not wanted any more; its world is as it was before."""


class Engine:
    """All worlds of one process."""

    def __init__(self, config: EngineConfig, link: Link, playout: Playout, niceness: int) -> None:
        self._config, self._link, self._playout = config, link, playout
        self._decoding = Decoding(playout, link.wake, config.threads, niceness)
        self._telemetry = Telemetry(link, playout)
        self._scheduler = Scheduler(config.max_worlds, config.max_load)
        self._room = Room(self._scheduler, config.kv_budget_bytes, config.host_budget_bytes)
        self._models: dict[str, Loaded] = {}
        self._worlds: dict[str, Running] = {}
        self._deferred: deque[Command] = deque()  # came while a block was made, and must wait for its end
        self._making: str | None = None
        self._ending = False

    def run(self, models: dict[str, Loaded], hello: Hello, check: Callable[[], None] | None = None) -> None:
        """Greet and turn until Shutdown. Raises LinkClosed, LinkStalled or ProtocolError when the link ends first.

        `check` is called at each turn: it raises when what the engine depends on besides is gone.
        """
        self._models = models
        self._decoding.start()
        self._telemetry.start(next(iter(models.values())).model.device)
        try:
            for loaded in models.values() if self._config.warm_up else ():
                kind, stages_s = warm_up(loaded, self._config.kv_budget_bytes)
                self._scheduler.note(kind, stages_s)
            self._link.send(hello)
            while not self._ending:
                if check is not None:
                    check()
                self.turn()
        finally:
            self._decoding.close()
            self._telemetry.close()
            for id in list(self._worlds):
                self._end(id, "ended", "the engine stops")

    def turn(self) -> None:
        """One block at most."""
        self._collect()
        choice = self._choose()
        for command in self._commands(0.0 if choice.world else min(choice.wait_s, IDLE_S)):
            self._obey(command)
        running = self._worlds.get(choice.world or "")
        if running is not None and not running.paused:
            self._make(running, choice.early_s)
        self._telemetry.report(self._worlds.values())

    def pulse(self) -> None:
        """Called between denoising steps: do what cannot wait for the end of the block."""
        full = len(self._deferred) >= INBOX_COMMANDS  # then the link's inbox fills, and the server feels it
        for command in () if full else self._link.receive(0.0):
            if self._can_be_done_at_once(command):
                self._obey(command)
            else:
                self._deferred.append(command)
        if self._making is not None and any(self._ends_block(command) for command in self._deferred):
            raise Abandoned
        self._telemetry.report(self._worlds.values())

    # ----------------------------------------------------------------------------------------- commands

    def _commands(self, timeout_s: float) -> list[Command]:
        deferred = list(self._deferred)
        self._deferred.clear()
        return deferred + self._link.receive(0.0 if deferred else timeout_s)

    def _obey(self, command: Command) -> None:
        match command:
            case Open():
                self._open(command)
            case Steer():
                self._steer(command)
            case Pause(world=id) | Resume(world=id):
                self._pause(id, on=isinstance(command, Pause))
            case Close(world=id, reason=reason):
                self._end(id, "ended", reason)
            case Encode(world=id, codec=codec, on=on):
                self._playout.encode(id, codec, on=on)
            case WantProfile():
                self._link.send(profile(command, known=command.world in self._worlds))
            case Ping(n=n):
                self._link.send(Pong(n, self._telemetry.rss_bytes, len(self._worlds)))
            case Shutdown():
                self._ending = True
            case WantKeyframe() | WantBitrate():
                raise AssertionError("the link hands these to playout")

    def _open(self, command: Open) -> None:
        id, spec = command.world, command.spec
        try:
            if id in self._worlds:
                raise ValueError(f"world: expected a new name, got {id!r} again")
            if spec.model not in self._models:
                raise ValueError(f"model: expected one of {', '.join(self._models)}, got {spec.model!r}")
            wanted = plan(self._models[spec.model], spec, self._room.device_bytes, self._room.host_bytes)
            admission = self._room.admit(wanted, [running.plan for running in self._worlds.values()])
            if not admission.admitted:
                self._link.send(Refused(command.id, id, admission.reason, True, admission.retry_after_s))
                return
            running = Running.open(id, wanted, self._config.journal_dir, command.continues)
        except ConnectionError:  # a rank is lost, and with it all worlds
            raise
        except (ValueError, RuntimeError, OSError) as error:  # a wrong spec; no memory; a journal that cannot be kept
            self._link.send(Refused(command.id, id, str(error)))
            return
        except Exception as error:  # a process's main loop: this world cannot be, the others go on
            log.exception("world %s could not be opened", id)
            self._link.send(Refused(command.id, id, f"{type(error).__name__}: {error}"))
            return
        self._admit(command, running)

    def _admit(self, command: Open, running: Running) -> None:
        id, g, lead_s = running.id, running.world.model.geometry, running.lead_s
        self._worlds[id] = running
        self._playout.open(id, (g.width, g.height), g.fps, running.period_s)
        adaptive = running.spec.lead_ms is None
        self._scheduler.add(Turn(id, running.plan.kind, running.period_s, lead_s, running.opened_s, adaptive))
        card = running.plan.loaded.card
        first = running.world.block - len(running.given)
        first_ms = round(1000 * running.world.media_s(first))
        lead_ms = round(1000 * lead_s)
        self._link.send(Opened(command.id, id, card, g.width, g.height, g.fps, lead_ms, first, first_ms))
        self._link.send(WorldChanged(id, "starting"))
        log.info("world %s opened: %s", id, running.plan.kind)

    def _steer(self, command: Steer) -> None:
        running = self._worlds.get(command.world)
        if running is None:
            self._link.send(SignalRefused(command.id, command.world, f"there is no world {command.world!r}"))
            return
        try:
            for applied in running.steer(command):
                self._link.send(applied)
        except ValueError as error:
            self._link.send(SignalRefused(command.id, command.world, str(error)))
        except ConnectionError:
            raise
        except Exception as error:  # a process's main loop: encoding failed half way, this world cannot go on
            log.exception("world %s failed at a signal", running.id)
            self._end(running.id, "failed", f"{type(error).__name__}: {error}")

    def _pause(self, id: str, *, on: bool) -> None:
        running = self._worlds.get(id)
        if running is None or running.paused == on:
            return
        running.paused = self._scheduler.turns[id].paused = on
        (self._playout.pause if on else self._playout.resume)(id)
        figures = self._playout.figures(id)
        self._link.send(WorldChanged(id, "paused" if on else "running", media_ms=figures.media_ms if figures else 0))

    def _can_be_done_at_once(self, command: Command) -> bool:
        """Whether neither the block in hand nor a command that waits for its end minds."""
        if isinstance(command, Pause | Resume | Encode):
            return command.world in self._worlds and not self._deferred
        return isinstance(command, Ping)

    def _ends_block(self, command: Command) -> bool:
        return isinstance(command, Shutdown) or (isinstance(command, Close) and command.world == self._making)

    # ------------------------------------------------------------------------------------------- blocks

    def _choose(self) -> Choice:
        """Bring the schedule up to what playout knows, then ask it."""
        if not self._decoding.has_room:
            return Choice(None, math.inf)
        for id, turn in self._scheduler.turns.items():
            media_s = self._worlds[id].next_media_s
            due_s = self._playout.due_s(id, media_s)
            turn.due_s = self._worlds[id].opened_s + media_s if due_s is None else due_s
            figures = self._playout.figures(id)
            turn.reserve_s = figures.reserve_ms / 1000 if figures else 0.0
        choice = self._scheduler.choose(time.monotonic())
        wait_s = 0.0 if choice.world is None else self._decoding_behind_s(self._worlds[choice.world].plan.kind)
        return choice if wait_s <= 0 else Choice(None, wait_s)

    def _decoding_behind_s(self, kind: str) -> float:
        """How long a block would only queue up behind others; begun later it knows of more signals."""
        typical = self._scheduler.typical(kind)
        return self._decoding.free_in_s(typical.get("decode", 0.0)) - SPARE * typical.get("denoise", 0.0)

    def _make(self, running: Running, early_s: float) -> None:
        self._making, begun_s = running.id, time.monotonic()
        try:
            block = running.make()
        except Abandoned:
            return
        except (ConnectionError, ProtocolError):
            raise
        except Exception as error:  # a process's main loop: this world fails, the others go on
            log.exception("world %s failed at block %d", running.id, running.world.block)
            self._end(running.id, "failed", f"{type(error).__name__}: {error}")
            return
        finally:
            self._making = None
        if (applied := running.began(block)) is not None:
            self._link.send(applied)
        profiler.boundary("block", world=running.id, block=block.index)
        commit_s = running.plan.loaded.watched.commit_s
        self._decoding.put(Job(running.id, running.world, block, time.monotonic() - begun_s, commit_s, early_s))
        running.save()

    def _collect(self) -> None:
        """What decoding and playout have finished, and what has failed there. Raises what decoding has lost."""
        for result in self._decoding.results():
            if result.lost is not None:
                raise result.lost
            running = self._worlds.get(result.job.id)
            if running is None or running.world is not result.job.world:
                continue  # closed meanwhile
            if result.error:
                self._end(running.id, "failed", result.error)
            else:
                self._done(running, result)
        while self._playout.failures:
            id, reason = self._playout.failures.popleft()
            self._end(id, "failed", reason)

    def _done(self, running: Running, result: Decoded) -> None:
        stages_s = {"denoise": result.job.denoise_s, "decode": result.decode_s}
        running.note(stages_s, result.pictures)
        self._scheduler.note(running.plan.kind, stages_s)
        self._telemetry.done(running, result)

    def _end(self, id: str, state: WorldState, reason: str) -> None:
        running = self._worlds.pop(id, None)
        if running is None:
            return
        self._scheduler.remove(id)
        media_ms = self._playout.remove(id)
        running.close()
        self._telemetry.forget(id)
        self._link.send(WorldChanged(id, state, reason, media_ms))
        log.info("world %s %s: %s", id, state, reason)


def profile(command: WantProfile, *, known: bool) -> Profile | Refused:
    """What was recorded of a world, or why there is nothing."""
    recorded, id = profiler.active(), command.world
    if recorded is None or not known:
        return Refused(command.id, id, f"there is no world {id!r}" if recorded else "profiling is off")
    make = chrome_trace if command.trace else snapshot
    return Profile(command.id, id, json.dumps(make(recorded, id, command.blocks)).encode())
