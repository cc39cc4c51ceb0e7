"""Ranks that torchrun has started, on one machine or several: how they meet, and what rank 0 does for them.

torchrun watches the processes it has started and ends all when one is lost. The engine of rank 0 is a child of one of
them, its server. So it beats: every few seconds it tells the others something, which fails when one of them is gone;
then it ends, its server ends, and torchrun starts the group again or gives up.
"""

from __future__ import annotations

import datetime
import time
from dataclasses import replace

from torch.distributed.rendezvous import rendezvous

from engine.config import EngineConfig
from engine.parallel.launch import READY_S, say_ready, wait_ready
from engine.parallel.mesh import Meeting, Mesh, named
from engine.parallel.plan import Beat, encode
from engine.parallel.split import SplitError

BEAT_S = 5.0


class Torchrun:
    """This process's place among them."""

    def __init__(self, config: EngineConfig, device: str) -> None:
        """`device`: "cuda" or "cpu". Raises SplitError where torchrun has not started this process, or not so many."""
        self.meeting = Meeting.from_torchrun(device)
        if self.meeting.ranks != config.ranks:
            raise SplitError(f"ranks: expected {self.meeting.ranks}, which torchrun has started, got {config.ranks}")
        self._mesh: Mesh | None = None
        self._beaten_s = time.monotonic()

    @property
    def rank(self) -> int:
        return self.meeting.rank

    def join(self) -> Mesh:
        """Wait until every rank is ready, then meet. Raises ExchangeFailed."""
        with named("start"):
            store, rank, ranks = next(iter(rendezvous("env://", timeout=datetime.timedelta(seconds=READY_S))))
            say_ready(store, rank)
            wait_ready(store, ranks)
        self._mesh = Mesh.join(replace(self.meeting, store=store))
        return self._mesh

    def check(self) -> None:
        """Beat, if it is time. To be called between two things done to worlds. Raises ExchangeFailed."""
        now_s = time.monotonic()
        if self._mesh is not None and now_s - self._beaten_s > BEAT_S:
            self._beaten_s = now_s
            self._mesh.tell(encode(Beat()))

    def close(self) -> None:
        if self._mesh is not None:
            self._mesh.close()
            self._mesh = None
