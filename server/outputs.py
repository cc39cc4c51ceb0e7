"""Where a session's packets go beside its viewers: pushes and recordings, each a task of its own."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Sequence
from pathlib import Path

from server.broadcast import Broadcast
from server.metrics import Metrics
from server.problems import Problem, session_over
from server.recorder import SUFFIX, Recorder, RecordingFile
from server.rtmp import Picture, RtmpPush
from server.schemas import OutputView, RecordingRequest, RtmpRequest
from server.settings import Settings
from server.targets import AllowRule, TargetDenied, TargetError, parse_target

log = logging.getLogger(__name__)

Output = RtmpPush | Recorder
AnyOutput = RtmpRequest | RecordingRequest


class Outputs:
    def __init__(
        self,
        session_id: str,
        broadcast: Broadcast,
        changed: Callable[[OutputView], None],
        *,
        settings: Settings,
        metrics: Metrics,
    ) -> None:
        self._session_id = session_id
        self._broadcast = broadcast
        self._changed = changed
        self._settings = settings
        self._metrics = metrics
        self._rule = AllowRule(settings.rtmp_allow, loopback=settings.listens_on_loopback_only)
        self._outputs: dict[str, Output] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._count = 0
        self._over = False
        self.picture = Picture()

    @property
    def active(self) -> bool:
        return any(output.active for output in self._outputs.values())

    def views(self) -> tuple[OutputView, ...]:
        return tuple(output.view() for output in self._outputs.values())

    def get(self, id: str) -> Output:
        if id not in self._outputs:
            raise Problem(404, "output-not-found", f"this session has no output {id[:64]!r}")
        return self._outputs[id]

    def recording(self, id: str | None = None) -> Recorder | None:
        """The newest recording, or the one with this id."""
        for output in reversed(self._outputs.values()):
            if isinstance(output, Recorder) and id in (None, output.id):
                return output
        return None

    async def check(self, requests: Sequence[AnyOutput]) -> None:
        """Raise Problem when these outputs could not all be started now; nothing has been."""
        self._require_room(requests)
        for request in requests:
            if isinstance(request, RecordingRequest):
                self._folder()
            else:
                await self._require_target(request)

    async def add(self, request: AnyOutput) -> Output:
        """A new output, already at work; raises Problem."""
        await self.check([request])
        return self.start(request)

    def start(self, request: AnyOutput) -> Output:
        """An output that was checked, put to work; raises Problem when that has become impossible since."""
        if self._over:
            raise session_over(self._session_id, "over", "")
        self._require_room([request])
        output = self._recorder() if isinstance(request, RecordingRequest) else self._push(request)
        self._forget_oldest()
        self._outputs[output.id] = output
        self._tasks[output.id] = asyncio.create_task(self._live(output))
        return output

    async def remove(self, id: str) -> Output:
        """Close one output properly and wait for it."""
        output = self.get(id)
        output.stop()
        task = self._tasks.get(id)
        if task is not None:
            await asyncio.wait([task])
        return output

    def end(self) -> None:
        """Those at work stop, and no more are taken."""
        self._over = True
        for output in self._outputs.values():
            output.stop()

    async def close(self) -> None:
        self.end()
        await asyncio.gather(*self._tasks.values())

    async def _live(self, output: Output) -> None:
        try:
            await output.run()
        except Exception:  # one output's trouble is nobody else's
            log.exception("output %s failed", output.id)
        finally:
            self._tasks.pop(output.id, None)

    def _require_room(self, requests: Sequence[AnyOutput]) -> None:
        active = [output for output in self._outputs.values() if output.active]
        if len(active) + len(requests) > self._settings.limits.outputs:
            raise Problem(409, "wrong-state", f"a session has at most {self._settings.limits.outputs} outputs")
        recordings = sum(isinstance(request, RecordingRequest) for request in requests)
        running = [output.id for output in active if isinstance(output, Recorder)]
        if recordings and running:
            raise Problem(409, "recording-already", f"recording {running[0]} is still running")
        if recordings > 1:
            raise Problem(409, "recording-already", f"a session has one recording at a time, got {recordings}")

    async def _require_target(self, request: RtmpRequest) -> None:
        try:
            await self._rule.addresses(parse_target(request.url, request.key))
        except TargetDenied as error:
            raise Problem(403, "target-not-allowed", str(error)) from error
        except TargetError as error:
            raise Problem(422, "bad-target", str(error)) from error
        except (OSError, TimeoutError) as error:
            log.info("an output's host is not known yet: %s", error)  # it may be by the time it matters

    def _folder(self) -> Path:
        """Where recordings go, made if need be; raises Problem where there is no such place."""
        folder = self._settings.record_dir
        if folder is None:
            raise Problem(503, "recording-off", "this server was started without a folder for recordings")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Problem(
                503, "recording-off", f"the folder for recordings cannot be used: {error.strerror}"
            ) from error
        return folder

    def _recorder(self) -> Recorder:
        id = self._next_id()
        path = self._folder() / f"{self._session_id}-{id}{SUFFIX}"
        return Recorder(id, path, self._broadcast, self._open, self._changed)

    def _open(self, path: Path) -> RecordingFile:
        picture = self.picture
        return RecordingFile(path, picture.width, picture.height, picture.fps, self._settings.limits)

    def _push(self, request: RtmpRequest) -> RtmpPush:
        return RtmpPush(
            self._next_id(),
            parse_target(request.url, request.key),
            self._broadcast,
            self.picture,
            self._changed,
            audio=request.audio,
            rule=self._rule,
            tls=_tls(self._settings.rtmp_ca_file),
            metrics=self._metrics,
        )

    def _next_id(self) -> str:
        self._count += 1
        return f"o{self._count}"

    def _forget_oldest(self) -> None:
        """Outputs that are over stay readable, up to twice as many as may run."""
        over = [id for id, output in self._outputs.items() if not output.active]
        for id in over[: max(0, len(self._outputs) - 2 * self._settings.limits.outputs + 1)]:
            del self._outputs[id]


def _tls(ca_file: Path | None) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if ca_file is not None:
        context.load_verify_locations(ca_file)
    return context
