"""The drift meters of all worlds: a thread of its own that looks at three neighbouring pictures every few seconds.

What a look costs is measured, and the thread rests until it has kept to its share of a core; pictures offered
meanwhile are passed over, never queued. Knows no clock but its own and no link; `lvbench/live.py` knows what drift is.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf

import torch
import torch.nn.functional as F

from engine.decoder import Pictures
from engine.generator import Block
from engine.lvbench.live import THUMBNAIL_LINES, LiveDrift, ThumbnailsWrong
from engine.profiler import span

log = logging.getLogger(__name__)

EVERY_S = 3.0  # of media time, between two looks at a world
SETTLE_S = 3.0  # of media time, until a new prompt has had its way
SHARE = 0.02  # of a core, for the meters of all worlds together
BURST = 3


@dataclass
class _Meter:
    live: LiveDrift = field(default_factory=LiveDrift)
    next_s: float = 0.0  # media time from which on it may be looked at again
    metrics: dict[str, float] = field(default_factory=dict)
    stale: bool = False  # what it compares with is not wanted any more


@dataclass(frozen=True)
class _Look:
    world: str
    meter: _Meter
    pictures: Pictures
    block: int


class DriftMeters:
    """One thread, started by `start` and ended by `close`; everything else may be called from any other."""

    def __init__(
        self,
        now: Callable[[], float] = time.monotonic,
        spent: Callable[[], float] = time.thread_time,
    ) -> None:
        """`spent` tells the calling thread's processor seconds."""
        self._now, self._spent = now, spent
        self._meters: dict[str, _Meter] = {}
        self._looks: queue.Queue[_Look | None] = queue.Queue(maxsize=1)
        self._rested_s = 0.0  # when the next look may be taken
        self._thread = threading.Thread(target=self._run, name="drift", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        with suppress(queue.Empty):
            self._looks.get_nowait()
        self._looks.put(None)
        if self._thread.is_alive():
            self._thread.join()

    def offer(self, world: str, block: Block, media_s: float, pictures: Pictures) -> bool:
        """Let the thread look at a block's first pictures; whether it will. Costs the caller nothing.

        What a new prompt makes is meant to look different: it becomes the new reference.
        """
        meter = self._meters.setdefault(world, _Meter())
        if block.began_prompt and block.index:
            meter.stale, meter.next_s, meter.metrics = True, media_s + SETTLE_S, {}
        if len(pictures) < BURST or media_s < meter.next_s or self._now() < self._rested_s:
            return False
        try:
            self._looks.put_nowait(_Look(world, meter, pictures[:BURST], block.index))
        except queue.Full:
            return False
        meter.next_s = media_s + EVERY_S
        return True

    def metrics(self, world: str) -> dict[str, float]:
        """A world's drift as of the last look; empty while its reference is being taken."""
        meter = self._meters.get(world)
        return {} if meter is None else meter.metrics

    def forget(self, world: str) -> None:
        self._meters.pop(world, None)

    def _run(self) -> None:
        torch.set_num_threads(1)
        while (look := self._looks.get()) is not None:
            began_s = self._spent()
            try:
                self._take(look)
            except Exception:  # a thread's main loop: this world loses its meter, the others keep theirs
                log.exception("world %s: the drift meter failed", look.world)
                look.meter.next_s = inf
            self._rested_s = self._now() + (self._spent() - began_s) / SHARE

    def _take(self, look: _Look) -> None:
        meter = look.meter
        if meter.stale:
            meter.stale = False
            meter.live.reset()
        try:
            with span("drift", world=look.world, block=look.block):
                reading = meter.live.observe(list(thumbnails(look.pictures)))
        except ThumbnailsWrong as error:  # pictures too small to judge stay so
            log.info("world %s has no drift meter: %s", look.world, error)
            meter.next_s = inf
            return
        if reading is not None and not meter.stale:
            meter.metrics = reading.as_metrics()


def thumbnails(pictures: Pictures) -> Pictures:
    """Pictures (N, H, W, 3) averaged down to `THUMBNAIL_LINES` along the shorter side; smaller ones as they are."""
    height, width = pictures.shape[1:3]
    scale = THUMBNAIL_LINES / min(height, width)
    if scale >= 1.0:
        return pictures
    size = (round(height * scale), round(width * scale))
    planes = torch.from_numpy(pictures).permute(0, 3, 1, 2).float()  # (N, 3, H, W)
    small = F.interpolate(planes, size=size, mode="area").round().to(torch.uint8)
    return small.permute(0, 2, 3, 1).contiguous().numpy()
