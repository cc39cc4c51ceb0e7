"""The numbers that are read off rather than counted: sessions, outputs, cache, queues. Once a second."""

from __future__ import annotations

import collections

from server.link import EngineLink
from server.metrics import Metrics
from server.schemas import SessionState
from server.session import Session

LIVING_STATES: tuple[SessionState, ...] = ("queued", "starting", "running", "paused", "stopping")


def measure(metrics: Metrics, living: list[Session], link: EngineLink, waiting: int) -> None:
    states = collections.Counter(session.state for session in living)
    for state in LIVING_STATES:
        metrics.sessions.labels(state).set(states[state])
    _measure_outputs(metrics, living)
    _measure_worlds(metrics, living)
    metrics.engine_up.set(link.ready)
    metrics.engine_rss_bytes.set(link.rss_bytes)
    metrics.queue_depth.labels("packets").set(sum(session.encodings.queued for session in living))
    metrics.queue_depth.labels("command_bytes").set(link.unsent_bytes)
    metrics.queue_depth.labels("sessions").set(waiting)


def _measure_outputs(metrics: Metrics, living: list[Session]) -> None:
    counts = collections.Counter((view.kind, view.state) for one in living for view in one.outputs.views())
    metrics.outputs.clear()
    for (kind, state), count in counts.items():
        metrics.outputs.labels(kind, state).set(count)


def _measure_worlds(metrics: Metrics, living: list[Session]) -> None:
    stats = [session.line.stats for session in living if session.line.stats is not None]
    metrics.real_time_factor.set(min((one.real_time_factor for one in stats), default=0))
    metrics.cache_bytes.clear()
    for tier in {tier for one in stats for tier in one.kv_bytes}:
        metrics.cache_bytes.labels(tier).set(sum(one.kv_bytes.get(tier, 0) for one in stats))
    metrics.custom.clear()
    for name in sorted({name for one in stats for name in one.metrics})[:64]:
        values = [one.metrics[name] for one in stats if name in one.metrics]
        metrics.custom.labels(name).set(sum(values) / len(values))
