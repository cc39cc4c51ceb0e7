"""An engine process at the end of a real socket, for tests: what a server sees of it, without a server."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from engine.__main__ import serve
from engine.config import EngineConfig
from engine.protocol import Command, Event, Framer, Hello, Open, PromptChange, WorldSpec, decode_event, frame
from tests.toy_preset import install

E = TypeVar("E", bound=Event)
ROOT = Path(__file__).parents[1]
PATIENCE_S = 60.0  # with a machine that does other things; no test passes or fails by it


class EngineEnd:
    """The server's end of a link; every event is kept with its time of arrival."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.sock.settimeout(PATIENCE_S)
        self.events: list[tuple[float, Event]] = []
        self._framer = Framer()

    def said(self) -> str:
        """What the engine wrote into its log."""
        return ""

    def send(self, *commands: Command) -> None:
        self.sock.sendall(b"".join(map(frame, commands)))

    def greeting(self) -> Hello:
        return self.wait_for(Hello)

    def open(self, world: str, prompt: str = "a", **spec: object) -> None:
        arguments = {"model": "toy", "prompts": (PromptChange(0.0, prompt),)} | spec
        self.send(Open(f"open-{world}", world, WorldSpec(**arguments)))  # type: ignore[arg-type]

    def wait_for(self, kind: type[E], where: Callable[[E], bool] = lambda event: True, after: int = 0) -> E:
        """The first event of a kind that fits, from number `after` on; reads on until it comes."""
        at = after
        while True:
            for _, event in self.events[at:]:
                if isinstance(event, kind) and where(event):
                    return event
            at = len(self.events)
            if not self._read():
                raise EOFError(f"the engine ended before a {kind.__name__} came; it said:\n{self.said()}")

    def read_for(self, seconds: float) -> None:
        """Read whatever comes for a while."""
        until_s = time.monotonic() + seconds
        while (left_s := until_s - time.monotonic()) > 0:
            self.sock.settimeout(left_s)
            try:
                if not self._read():
                    break
            except TimeoutError:
                break
        self.sock.settimeout(PATIENCE_S)

    def drain(self) -> None:
        """Read until the engine closes the link."""
        while self._read():
            pass

    def of(self, kind: type[E], where: Callable[[E], bool] = lambda event: True) -> list[E]:
        return [event for _, event in self.events if isinstance(event, kind) and where(event)]

    def times(self, kind: type[E], where: Callable[[E], bool] = lambda event: True) -> list[float]:
        return [at_s for at_s, event in self.events if isinstance(event, kind) and where(event)]

    def _read(self) -> bool:
        try:
            data = self.sock.recv(1 << 16)
        except ConnectionResetError:
            return False
        now_s = time.monotonic()
        self.events += [(now_s, decode_event(body)) for body in self._framer.feed(data)]
        return bool(data)


class EngineProcess(EngineEnd):
    """`python -m engine` with the toy installed."""

    def __init__(self, folder: Path, *arguments: str, model: str = "toy") -> None:
        install(folder)
        ours, theirs = socket.socketpair()
        super().__init__(ours)
        environ = {k: v for k, v in os.environ.items() if not k.startswith("INFERIX_")}
        environ |= {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
        self.log = folder / "engine.log"
        command = [sys.executable, "-m", "engine", "--fd", str(theirs.fileno()), "--model", model, *arguments]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], env=environ, cwd=ROOT, stdout=log, stderr=log
            )
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.sock.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def said(self) -> str:
        return self.log.read_text()

    def ended(self) -> int:
        """The exit code, once the engine has closed the link."""
        self.drain()
        return self.process.wait(PATIENCE_S)


class EngineThread(EngineEnd):
    """The same without its process: `serve` in a thread, for how it ends."""

    def __init__(self, **settings: Any) -> None:
        ours, theirs = socket.socketpair()
        super().__init__(ours)
        every_day: dict[str, Any] = {"models": ("toy",), "nice": 0, "warm_up": False}
        config = EngineConfig(theirs.fileno(), **(every_day | settings))
        self._code: list[int] = []
        self._thread = threading.Thread(target=lambda: self._code.append(serve(config, theirs)), name="engine")
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.sock.close()  # which ends it, if nothing else has
        self._thread.join()

    def ended(self) -> int:
        """What the process would have ended with."""
        self._thread.join(PATIENCE_S)
        return self._code[0]
