"""Where the time goes: spans, counters, gauges and measures of your own, cheap enough to leave on.

    with span("step", step=3): ...          # inherits world and block from the span around it
    @profiled("encode prompt")
    def encode(...): ...                    # no other change

    add_hook("sharpness", lambda at: {"sharpness": measure()})      # runs at each block boundary

Off, a span is one test of a global and a shared object that does nothing. On, it is two readings of the clock and one
append to a ring. On an accelerator pairs of events are recorded beside the clock's times and read when somebody asks,
so nothing on the path waits for the device. Knows no torch (events are handed in), no world and no model; `trace.py`
turns what was recorded into JSON and traces.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple, ParamSpec, Protocol, TypeVar

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")
RING_SPANS = 16384
RING_SAMPLES = 8192

Boundary = Literal["block", "step"]


class DeviceEvent(Protocol):
    """A mark in an accelerator's queue, such as `torch.cuda.Event(enable_timing=True)`."""

    def record(self) -> None: ...

    def query(self) -> bool: ...

    def elapsed_time(self, end_event: Any, /) -> float: ...


class Place(NamedTuple):
    """What a span or a sample belongs to; None where it belongs to no one in particular."""

    world: str | None = None
    block: int | None = None
    step: int | None = None

    def within(self, outer: Place) -> Place:
        """This place, with what it leaves open taken from the one around it."""
        return Place(
            outer.world if self.world is None else self.world,
            outer.block if self.block is None else self.block,
            outer.step if self.step is None else self.step,
        )


NOWHERE = Place()
Hook = Callable[[Place], Mapping[str, float]]


class Span(NamedTuple):
    """One stretch of time that has ended. Times are of `time.perf_counter_ns`."""

    name: str
    start_ns: int
    end_ns: int
    place: Place
    thread: str
    depth: int
    failed: bool = False
    events: tuple[DeviceEvent, DeviceEvent] | None = None

    @property
    def ms(self) -> float:
        return (self.end_ns - self.start_ns) / 1e6

    @property
    def device_ms(self) -> float | None:
        """Time on the accelerator; None without one, or while it has not got that far."""
        if self.events is None or not self.events[1].query():
            return None
        return self.events[0].elapsed_time(self.events[1])


class Sample(NamedTuple):
    """The value of a gauge or of a measure at one moment."""

    name: str
    value: float
    at_ns: int
    place: Place


class Profiler:
    """What one engine has recorded. Any thread may record and read."""

    def __init__(
        self,
        spans: int = RING_SPANS,
        device_event: Callable[[], DeviceEvent] | None = None,
        annotate: Callable[[str], AbstractContextManager[object]] | None = None,
    ) -> None:
        """`annotate` opens what another profiler is to see of a span by this name."""
        self.spans: deque[Span] = deque(maxlen=spans)
        self.samples: deque[Sample] = deque(maxlen=RING_SAMPLES)
        self.counters: dict[str, float] = {}
        self.gauges: dict[tuple[str, str | None], float] = {}  # (name, world) -> last value
        self.facts: dict[str, str] = {}
        self.annotate = annotate
        self.started_ns = time.perf_counter_ns()
        self._device_event = device_event
        self._lock = threading.Lock()
        self._open = threading.local()

    @property
    def place(self) -> Place:
        """Where the innermost open span of this thread is."""
        stack: list[Place] = getattr(self._open, "stack", [])
        return stack[-1] if stack else NOWHERE

    def span(self, name: str, place: Place) -> AbstractContextManager[None]:
        return _OpenSpan(self, name, place)

    def count(self, name: str, by: float) -> None:
        with self._lock:
            self.counters[name] = self.counters.get(name, 0.0) + by

    def gauge(self, name: str, value: float, place: Place) -> None:
        place = place.within(self.place)
        if not math.isfinite(value):  # JSON has no word for it
            return self.count(f"not finite: {name}", 1)
        with self._lock:
            self.gauges[name, place.world] = value
        self.samples.append(Sample(name, value, time.perf_counter_ns(), place))

    def values(self, world: str) -> dict[str, float]:
        """The last values of a world's gauges, and of those that belong to no world."""
        with self._lock:
            return {name: value for (name, owner), value in self.gauges.items() if owner in (None, world)}

    def forget(self, world: str) -> None:
        """Drop the gauges of a world that is gone; its spans leave with the ring."""
        with self._lock:
            self.gauges = {key: value for key, value in self.gauges.items() if key[1] != world}

    def enter(self, place: Place) -> tuple[Place, int, DeviceEvent | None]:
        stack = self._stack()
        stack.append(place.within(stack[-1] if stack else NOWHERE))
        return stack[-1], len(stack) - 1, self._mark()

    def leave(self) -> DeviceEvent | None:
        self._stack().pop()
        return self._mark()

    def _stack(self) -> list[Place]:
        if not hasattr(self._open, "stack"):
            self._open.stack = []
        stack: list[Place] = self._open.stack
        return stack

    def _mark(self) -> DeviceEvent | None:
        if self._device_event is None:
            return None
        event = self._device_event()
        event.record()
        return event


class _OpenSpan(AbstractContextManager[None]):
    """A span that has not ended; an exception ends it and goes on its way."""

    __slots__ = ("_annotation", "_began", "_name", "_opened", "_place", "_profiler")

    def __init__(self, profiler: Profiler, name: str, place: Place) -> None:
        self._profiler, self._name, self._place = profiler, name, place
        self._annotation = None if profiler.annotate is None else profiler.annotate(name)

    def __enter__(self) -> None:
        if self._annotation is not None:
            self._annotation.__enter__()
        self._opened = self._profiler.enter(self._place)
        self._began = time.perf_counter_ns()

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        ended = time.perf_counter_ns()
        place, depth, first = self._opened
        last = self._profiler.leave()
        events = (first, last) if first is not None and last is not None else None
        thread = threading.current_thread().name
        span = Span(self._name, self._began, ended, place, thread, depth, kind is not None, events)
        self._profiler.spans.append(span)
        if self._annotation is not None:
            self._annotation.__exit__(kind, *error)  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------- what others call

_active: Profiler | None = None
_hooks: dict[str, tuple[Boundary, Hook]] = {}
_OFF: AbstractContextManager[None] = nullcontext()


def enable(profiler: Profiler) -> None:
    """Record into `profiler` from now on."""
    global _active
    _active = profiler


def disable() -> None:
    """Record nothing from now on."""
    global _active
    _active = None


def active() -> Profiler | None:
    return _active


def span(
    name: str, *, world: str | None = None, block: int | None = None, step: int | None = None
) -> AbstractContextManager[None]:
    """Time what happens inside. What is not said is taken from the span around it."""
    return _OFF if _active is None else _active.span(name, Place(world, block, step))


def profiled(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Time every call of a function."""

    def wrap(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def timed(*args: P.args, **kwargs: P.kwargs) -> R:
            if _active is None:
                return function(*args, **kwargs)
            with _active.span(name, NOWHERE):
                return function(*args, **kwargs)

        return timed

    return wrap


def count(name: str, by: float = 1.0) -> None:
    """Add to a counter."""
    if _active is not None:
        _active.count(name, by)


def gauge(name: str, value: float, *, world: str | None = None, block: int | None = None) -> None:
    """Note the present value of something."""
    if _active is not None:
        _active.gauge(name, value, Place(world, block))


def fact(name: str, value: str) -> None:
    """Say something of the run that is no number: which of several ways was chosen."""
    if _active is not None:
        _active.facts[name] = value


def add_hook(name: str, hook: Hook, at: Boundary = "block") -> None:
    """Call `hook` at every block or step boundary; the numbers it returns are recorded by their names.

    It runs in the thread that computes, so what it costs the world waits for. One that raises is taken out and
    counted as `hook failed: NAME`.
    """
    if name in _hooks:
        raise ValueError(f"hook: expected a new name, got {name!r} again")
    _hooks[name] = (at, hook)


def hooks() -> list[str]:
    """Names of the hooks in place."""
    return list(_hooks)


def remove_hook(name: str) -> None:
    _hooks.pop(name, None)


def boundary(at: Boundary, *, world: str | None = None, block: int | None = None, step: int | None = None) -> None:
    """A block or a step has ended: run the hooks that wait for it."""
    if _active is None or not _hooks:
        return
    place = Place(world, block, step).within(_active.place)
    for name, (wanted, hook) in list(_hooks.items()):
        if wanted == at:
            _run_hook(_active, name, hook, place)


def _run_hook(profiler: Profiler, name: str, hook: Hook, place: Place) -> None:
    try:
        with profiler.span(f"hook {name}", place):
            values = dict(hook(place))
            for key, value in values.items():
                profiler.gauge(key, float(value), place)
    except Exception:  # somebody else's code: it may fail, the world goes on
        log.exception("hook %s failed and is taken out", name)
        profiler.count(f"hook failed: {name}", 1)
        remove_hook(name)
