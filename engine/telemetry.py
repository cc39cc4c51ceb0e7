"""What the engine tells of its work: each block when it is done, and about once a second how all worlds are doing.

The same figures go to the profiler as gauges. Nothing here decides anything. Knows no commands and no schedule.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch

from engine import profiler
from engine.accelerator import Gauges
from engine.decoding import Decoded
from engine.drift import DriftMeters
from engine.link import Link
from engine.playout import Playout
from engine.protocol import BlockDone
from engine.running import Running
from engine.usage import Usage

STATS_EVERY_S = 1.0


class Telemetry:
    """Ends by `close` what `start` has started: the thread of the drift meters."""

    def __init__(self, link: Link, playout: Playout) -> None:
        self._link, self._playout = link, playout
        self._drift = DriftMeters()
        self._usage, self._accelerator = Usage(), Gauges()
        self._reported_s = time.monotonic()

    def start(self, device: torch.device) -> None:
        self._accelerator = Gauges(device)
        self._drift.start()

    def close(self) -> None:
        self._drift.close()

    @property
    def rss_bytes(self) -> int:
        return self._usage.rss_bytes

    def done(self, running: Running, result: Decoded) -> None:
        """A block of a world is decoded."""
        job, commit_s = result.job, result.job.commit_s
        id, index, media_s = job.id, job.block.index, running.world.media_s(job.block.index)
        phases_s = {"denoise": job.denoise_s - commit_s, "commit": commit_s, "decode": result.decode_s}
        phases_ms = {name: 1000 * seconds for name, seconds in phases_s.items()}
        due_in_ms = 1000 * result.slack_s
        self._drift.offer(id, job.block, media_s, result.first)
        self._link.send(BlockDone(id, index, round(1000 * media_s), result.pictures, phases_ms, due_in_ms))
        profiler.count("late_blocks", float(due_in_ms < 0))
        profiler.count("blocks")
        profiler.gauge("due_in_ms", due_in_ms, world=id, block=index)
        for tier, size in running.kv_bytes.items():
            profiler.gauge(f"kv_{tier}_bytes", size, world=id, block=index)

    def report(self, worlds: Iterable[Running]) -> None:
        """Stats of every world, if the last ones are old enough."""
        now_s = time.monotonic()
        if now_s - self._reported_s < STATS_EVERY_S:
            return
        self._reported_s = now_s
        self._usage.read()
        profiler.gauge("rss_bytes", self._usage.rss_bytes)
        profiler.gauge("cpu_share", self._usage.cpu_share)
        profiler.gauge("packets_dropped", self._link.dropped)
        for name, value in self._accelerator.read().items():
            profiler.gauge(name, value)
        for running in worlds:
            figures = self._playout.figures(running.id)
            if figures is not None:
                self._link.send(running.stats(figures, self._drift.metrics(running.id)))

    def forget(self, world: str) -> None:
        self._drift.forget(world)
        if (recorded := profiler.active()) is not None:
            recorded.forget(world)
