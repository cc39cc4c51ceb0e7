"""The second computing thread: decodes one block while the next one is denoised, and hands its pictures to playout.

Blocks of a world are decoded in the order in which they were made. At most one waits while another is decoded, so a
slow decoder holds the denoiser back and not memory. Knows no link, no schedule and no signals.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field

import numpy as np
import torch

from engine.decoder import Pictures as Frames
from engine.decoder import decode
from engine.drift import BURST
from engine.generator import Block
from engine.playout import Playout
from engine.screen import Pictures
from engine.world import World

log = logging.getLogger(__name__)

MOST_RESULTS = 1024  # never reached: the loop collects them between blocks


@dataclass(frozen=True)
class Job:
    """A block on its way to the screen."""

    id: str
    world: World
    block: Block
    denoise_s: float  # the clean pass included
    commit_s: float = 0.0  # the clean pass
    early_s: float = 0.0  # how much earlier than without a reserve it was begun


@dataclass(frozen=True)
class Decoded:
    """What became of a job: how long it took and how early it was, or why it failed."""

    job: Job
    pictures: int = 0
    first: Frames = field(default_factory=lambda: np.empty((0, 0, 0, 3), np.uint8))  # its first pictures, three at most
    decode_s: float = 0.0
    slack_s: float = 0.0  # until its first picture is due; negative when late
    error: str = ""
    lost: ConnectionError | None = None  # with this rank, or one that shares its work: not this world's failure


class Decoding:
    """One thread, started by `start` and ended by `close`."""

    def __init__(self, playout: Playout, wake: Callable[[], None], threads: int, niceness: int) -> None:
        """`wake` is called whenever there is a new result."""
        self._playout, self._wake, self._threads, self._niceness = playout, wake, threads, niceness
        self._jobs: queue.Queue[Job | None] = queue.Queue(maxsize=2)
        self._results: deque[Decoded] = deque(maxlen=MOST_RESULTS)
        self._began_s: float | None = None  # when the job in hand was begun
        self._thread = threading.Thread(target=self._run, name="decode", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the thread after the block it is decoding."""
        with suppress(queue.Empty):
            while True:
                self._jobs.get_nowait()
        self._jobs.put(None)
        if self._thread.is_alive():
            self._thread.join()

    @property
    def has_room(self) -> bool:
        return self._jobs.empty()

    def free_in_s(self, typical_s: float) -> float:
        """How long until it has nothing to do, if each block takes `typical_s`."""
        began_s = self._began_s
        in_hand_s = 0.0 if began_s is None else max(0.0, began_s + typical_s - time.monotonic())
        return in_hand_s + self._jobs.qsize() * typical_s

    def put(self, job: Job) -> None:
        """Hand over a block; only while `has_room`."""
        self._jobs.put_nowait(job)

    def results(self) -> list[Decoded]:
        """What has been finished since the last call."""
        found = []
        while self._results:
            found.append(self._results.popleft())
        return found

    def _run(self) -> None:
        set_niceness(self._niceness)
        torch.set_num_threads(self._threads)
        with own_stream():
            while (job := self._jobs.get()) is not None:
                self._results.append(self._decoded(job))
                self._wake()

    def _decoded(self, job: Job) -> Decoded:
        self._began_s = began_s = time.monotonic()
        try:
            pictures = decode(job.world, job.block, job.id)
            spent_s = time.monotonic() - began_s
            g, end = job.world.model.geometry, job.block.start + job.block.latents.shape[0]
            expected = g.pictures_before(end) - g.pictures_before(job.block.start)
            if len(pictures) != expected:
                raise ValueError(f"decoder: expected {expected} pictures of a block, got {len(pictures)}")
            media_s = g.pictures_before(job.block.start) / g.fps
            shown = Pictures(job.block.index, media_s, list(pictures), job.early_s)
            return Decoded(job, len(pictures), pictures[:BURST], spent_s, self._playout.add(job.id, shown))
        except ConnectionError as error:
            return Decoded(job, lost=error)
        except Exception as error:  # a thread's main loop: the world fails, the thread goes on
            log.exception("world %s: block %d could not be decoded", job.id, job.block.index)
            return Decoded(job, error=f"{type(error).__name__}: {error}")
        finally:
            self._began_s = None


def own_stream(device: torch.device | None = None) -> AbstractContextManager[object]:
    """On an accelerator (the current one), a queue of its own: decoding must not wait behind the next block's steps."""
    if not torch.cuda.is_available() or (device is not None and device.type != "cuda"):
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]


def set_niceness(niceness: int) -> None:
    """Let the calling thread, and the threads it starts from now on, give way to other processes."""
    if hasattr(os, "setpriority"):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
