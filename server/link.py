"""The server's end of the link: one engine process, started, watched and restarted.

    start ──► Hello ──► events … ──► EOF / exit / silence ──► EngineDown ──► back-off ──► start …

Where torchrun has started the ranks it starts them again, all of them: then the first engine is the last.

Commands go out through `send`, which never waits: what is not yet written is bounded, and a command that does not fit
is refused (or, where losing it does no harm, dropped). Events come in through `events`, an endless iterator for one
reader; the socket's own buffers hold the engine back when that reader is slow.

Knows no sessions and no HTTP: what an event means is the reader's business.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import os
import signal
import socket
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Literal

from engine.protocol import (
    Command,
    Event,
    Framer,
    Hello,
    Ping,
    Pong,
    ProtocolError,
    Shutdown,
    WantBitrate,
    WantKeyframe,
    decode_event,
    frame,
)
from server.settings import EngineSettings

log = logging.getLogger(__name__)

EngineState = Literal["starting", "ready", "down", "stopped"]

UNSENT_LIMIT_BYTES = 1024 * 1024
READ_BYTES = 256 * 1024
LAST_WORDS = 20  # lines of the engine's own output kept to explain its death
LAST_GASP_S = 1.0
HEALTHY_S = 60.0  # an engine that lived this long starts the back-off afresh


class EngineUnavailable(Exception):
    """The engine cannot take a command now; the message says why."""


@dataclass(frozen=True)
class EngineDown:
    """The engine process is gone (or could not start); it will be started again after `retry_in_s`."""

    reason: str
    retry_in_s: float


@dataclass
class _Child:
    """One engine process and our end of its socket."""

    process: asyncio.subprocess.Process
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    born_s: float
    last_words: collections.deque[str] = field(default_factory=lambda: collections.deque(maxlen=LAST_WORDS))
    unanswered: int = 0
    greeted: bool = False
    killed_because: str = ""


class EngineLink:
    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._child: _Child | None = None
        self._stopping = asyncio.Event()
        self._finished = asyncio.Event()
        self._finished.set()
        self.state: EngineState = "starting"
        self.reason = ""
        self.hello: Hello | None = None
        self.restarts = 0
        self.abandoned = False  # the engine is gone, and is not ours to start again
        self.rss_bytes = 0

    @property
    def ready(self) -> bool:
        return self.state == "ready"

    @property
    def unsent_bytes(self) -> int:
        return self._child.writer.transport.get_write_buffer_size() if self._child else 0

    @property
    def pid(self) -> int | None:
        return self._child.process.pid if self._child else None

    def send(self, command: Command) -> None:
        """Put one command on its way; raise EngineUnavailable when there is no engine or it does not keep up."""
        if self._child is None or not self.ready:
            raise EngineUnavailable(f"the engine is {self.state}" + (f": {self.reason}" if self.reason else ""))
        if self.unsent_bytes > UNSENT_LIMIT_BYTES:
            if isinstance(command, WantKeyframe | WantBitrate | Ping):
                return
            raise EngineUnavailable(f"the engine does not keep up: {self.unsent_bytes} bytes of commands wait for it")
        self._child.writer.write(frame(command))

    async def events(self) -> AsyncGenerator[Event | EngineDown, None]:
        """Run engines, one after the other, until `close`; yield what they say and when they die."""
        self._finished.clear()
        backoff_s = self._settings.backoff_s
        try:
            while not self._stopping.is_set():
                born_s = asyncio.get_running_loop().time()
                async with contextlib.aclosing(self._one_life()) as life:
                    async for event in life:
                        yield event
                if self._stopping.is_set():
                    return
                if self._settings.torchrun:
                    self.abandoned = True
                    log.error("engine down: %s; torchrun is to start all ranks again", self.reason)
                    return
                if asyncio.get_running_loop().time() - born_s > HEALTHY_S:
                    backoff_s = self._settings.backoff_s
                self.restarts += 1
                log.warning("engine down: %s; next start in %.1f s", self.reason, backoff_s)
                yield EngineDown(self.reason, backoff_s)
                await _wait(self._stopping, backoff_s)
                backoff_s = min(2 * backoff_s, self._settings.backoff_max_s)
        finally:
            self.state = "stopped"
            self._finished.set()

    async def close(self) -> None:
        """Ask the engine to end, wait, then kill what is left; `events` ends."""
        self._stopping.set()
        child = self._child
        if child is not None and self.ready:
            with contextlib.suppress(EngineUnavailable):
                self.send(Shutdown())
        elif child is not None:
            self._kill(child, "the server stops")
        if not await _wait(self._finished, self._settings.stop_s) and child is not None:
            self._kill(child, f"did not end within {self._settings.stop_s:g} s of being asked to")
            await self._finished.wait()

    async def _one_life(self) -> AsyncGenerator[Event, None]:
        """Start one engine, yield its events until it is gone, leave its reason of death in `reason`."""
        self.state = "starting"
        try:
            child = await self._start()
        except OSError as error:
            self.state, self.reason = "down", f"the engine could not be started: {error}"
            return
        self._child = child
        tasks = [asyncio.create_task(job) for job in (self._listen(child), self._heartbeat(child), self._reap(child))]
        try:
            async with contextlib.aclosing(self._read(child)) as events:
                async for event in events:
                    yield event
        finally:
            await self._bury(child)
            await _cancel(tasks)
            child.writer.close()
            self._child = None
            self.state, self.reason = "down", _cause_of_death(child)

    async def _start(self) -> _Child:
        ours, theirs = socket.socketpair()
        try:
            process = await asyncio.create_subprocess_exec(
                *self._settings.argv(theirs.fileno()),
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches us alone; ranks die with their group
                limit=READ_BYTES,
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()  # or its EOF would never reach us
        ours.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=ours, limit=READ_BYTES)
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, process.pid, self._settings.nice)
        log.info("engine started, pid %d", process.pid)
        return _Child(process, reader, writer, born_s=asyncio.get_running_loop().time())

    async def _read(self, child: _Child) -> AsyncGenerator[Event, None]:
        framer = Framer()
        while data := await _read_some(child.reader):
            try:
                for body in framer.feed(data):
                    event = decode_event(body)
                    self._note(child, event)
                    if not isinstance(event, Pong):
                        yield event
            except ProtocolError as error:
                self._kill(child, f"it broke the protocol: {error}")
                return

    def _note(self, child: _Child, event: Event) -> None:
        if isinstance(event, Hello):
            self.hello, self.state, self.reason = event, "ready", ""
            child.greeted = True
            child.unanswered = 0
            log.info("engine ready: %s on %s", ", ".join(card.name for card in event.models), event.device)
        elif isinstance(event, Pong):
            child.unanswered = 0
            self.rss_bytes = event.rss_bytes

    async def _heartbeat(self, child: _Child) -> None:
        """Kill a silent engine. Counts unanswered pings, not seconds: if *we* were stopped, it is not to blame."""
        every_s = self._settings.ping_every_s
        n = 0
        while True:
            await asyncio.sleep(every_s)
            limit_s = self._settings.deadline_s if child.greeted else self._settings.start_s
            if child.unanswered * every_s >= limit_s:
                what = "no answer to a ping" if child.greeted else "no greeting"
                self._kill(child, f"{what} for {limit_s:g} s")
                return
            child.unanswered += 1
            if child.greeted:
                n += 1
                child.writer.write(frame(Ping(n)))

    async def _listen(self, child: _Child) -> None:
        """The engine's own output becomes our log."""
        assert child.process.stdout is not None
        while True:
            try:
                line = await child.process.stdout.readline()
            except ValueError:  # a line longer than the limit; the reader has dropped it
                continue
            if not line:
                return
            text = line.decode(errors="replace").rstrip()
            child.last_words.append(text)
            log.info("engine: %s", text)

    async def _reap(self, child: _Child) -> None:
        """End the reading even when a grandchild still holds the socket."""
        await child.process.wait()
        await asyncio.sleep(0.2)
        child.writer.transport.abort()

    async def _bury(self, child: _Child) -> None:
        """The socket has ended: let the process end by itself for a moment, then end it and what it left behind."""
        try:
            async with asyncio.timeout(LAST_GASP_S):
                await child.process.wait()
        except TimeoutError:
            self._kill(child, "it closed its link and did not end")
        self._kill(child, "")
        await child.process.wait()

    def _kill(self, child: _Child, reason: str) -> None:
        child.killed_because = child.killed_because or reason
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.process.pid, signal.SIGKILL)


def _cause_of_death(child: _Child) -> str:
    code = child.process.returncode
    if child.killed_because:
        return f"the engine was killed: {child.killed_because}"
    if code is not None and code < 0:
        return f"the engine was ended by {signal.Signals(-code).name}"
    last = next((line for line in reversed(child.last_words) if line.strip()), "")
    return f"the engine ended with exit code {code}" + (f": {last[:300]}" if last and code else "")


async def _read_some(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read(READ_BYTES)
    except ConnectionError:
        return b""


async def _wait(event: asyncio.Event, timeout_s: float) -> bool:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
