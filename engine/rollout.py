"""A world made from start to end without a clock: what `inferix generate`, the benchmarks and the evaluation run.

    with Rollout.open(Request(model="tiny-world", prompts=(PromptChange(0, "a beach"),), seconds=10)) as rollout:
        for part in rollout:
            part.pictures        # (N, H, W, 3) uint8

Blocks are decoded in a second thread while the next one is denoised. Knows no files: see `movie.py`.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from engine import recipe
from engine.accelerator import Gauges
from engine.decoder import Pictures, decode
from engine.generator import Block, Generator
from engine.guidance import ALL_BRANCHES
from engine.layers.attention import choose
from engine.models import BlockModel, presets
from engine.models.presets import LoadOptions, Preset
from engine.parallel.cache import Spread
from engine.profiler import boundary, fact, gauge, span
from engine.protocol import ActionState, PromptChange, WorldSpec
from engine.signals import SignalError, check_action
from engine.start import MAX_START_S, begin
from engine.usage import rss_bytes
from engine.world import World

WORLD = "rollout"  # the world's name in the profiler


@dataclass(frozen=True)
class Request:
    """What to make. `actions` are (media second, state) with rising times; each holds until the next."""

    model: str
    prompts: tuple[PromptChange, ...]
    seconds: float
    seed: int = 0
    actions: tuple[tuple[float, ActionState], ...] = ()
    kv: str = ""
    steps: int | None = None
    start: Path | None = None  # a picture or a clip that the world begins with
    load: LoadOptions = field(default_factory=LoadOptions)

    def check(self) -> None:
        """Raise SignalError on a length or times that cannot be; prompts themselves are checked by the world."""
        if not 0 < self.seconds <= 86_400:
            raise SignalError(f"seconds: expected more than 0 and at most a day, got {self.seconds:g}")
        for change in self.prompts:
            if change.at_s >= self.seconds:
                raise SignalError(f"prompt at {change.at_s:g} s: expected a time before the end at {self.seconds:g} s")
        for (before_s, _), (at_s, _) in pairwise(self.actions):
            if at_s <= before_s:
                raise SignalError(f"actions: expected rising times, got {at_s:g} s after {before_s:g} s")
        if self.actions and not self.actions[-1][0] < self.seconds:
            last_s = self.actions[-1][0]
            raise SignalError(f"action at {last_s:g} s: expected a time before the end at {self.seconds:g} s")


@dataclass(frozen=True)
class Part:
    """One block, made and decoded."""

    block: Block
    pictures: Pictures
    made_s: float  # seconds its making took, decoding included
    kv_bytes: dict[str, int]


class Rollout:
    """One world from its first block to its last. Iterate once; closing it gives everything back."""

    def __init__(self, request: Request, model: BlockModel, preset: Preset, spread: Spread | None = None) -> None:
        """`spread`: over ranks, each of which makes the same roll-out.

        Raises SignalError, PolicyError, RecipeError, CacheFull or StartError: no block has been made by then.
        """
        request.check()
        self.request, self.model, self.preset = request, model, preset
        g = model.geometry
        self.total_pictures = max(1, round(request.seconds * g.fps))
        rule = recipe.kv_policy(preset, request.kv)
        sampler = recipe.sampler(preset, request.steps)
        self._accelerator = Gauges(model.device)
        attention = choose(request.load.attention, model.device, model.dtype)
        fact("attention", f"{attention.name} ({attention.reason})")
        longest_s = max(request.seconds, MAX_START_S if request.start else 0)  # all of a clip to begin with is read
        frames = g.frames_per_block * (2 + math.ceil(longest_s / g.block_s))
        caches = recipe.caches(model, preset, rule, sampler, frames, attention.attend, spread)
        start = str(request.start) if request.start else None
        spec = WorldSpec(
            request.model, request.prompts, request.seed, kv=str(rule), steps=request.steps, start_picture=start
        )
        self.world = World(spec, model, sampler, caches, branching=spread.branching if spread else ALL_BRANCHES)
        for _, state in request.actions:
            check_action(state, model.action_keys, model.action_values)
        self.generator: Generator = recipe.generator(model, preset)
        self._given = deque(begin(self.generator, self.world))  # blocks that the world began with, to be shown first
        self._decoding = ThreadPoolExecutor(1, thread_name_prefix="decode")

    @classmethod
    def open(cls, request: Request) -> Rollout:
        """Load the model and open the world. Also raises what `presets.load` does."""
        request.check()
        return cls(request, presets.load(request.model, request.load), presets.find(request.model))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._decoding.shutdown(wait=True, cancel_futures=True)
        self.world.close()

    def __iter__(self) -> Iterator[Part]:
        """Every block in order; the last one is cut to the length asked for."""
        left, waiting = self.total_pictures, None
        while left > 0:
            more = bool(self._given) or self._pictures_begun() < self.total_pictures
            begun = self._begin() if more else None
            if waiting is not None:
                part = self._finish(waiting, left)
                left -= len(part.pictures)
                yield part
            waiting = begun

    def run_unseen(self) -> None:
        """Make every block and decode none: what a rank does beside the one that shows the world."""
        while self._pictures_begun() < self.total_pictures:
            self._act()
            self.generator.next_block(self.world)

    def decode(self, block: Block) -> Pictures:
        """Decode a block that was made outside of the iteration, in this thread."""
        return decode(self.world, block)

    def _decode(self, block: Block) -> Pictures:
        pictures = decode(self.world, block, WORLD)
        for tier, count in self.kv_bytes().items():
            gauge(f"kv_{tier}_bytes", count, world=WORLD, block=block.index)
        for name, value in {"rss_bytes": rss_bytes(), **self._accelerator.read()}.items():
            gauge(name, value, world=WORLD, block=block.index)
        return pictures

    def kv_bytes(self) -> dict[str, int]:
        """Bytes of the world's pages by tier."""
        sums = {"device": 0, "host": 0}
        for cache in self.world.caches:
            for tier, count in cache.bytes_by_tier().items():
                sums[tier] += count
        return sums

    def _pictures_begun(self) -> int:
        return self.model.geometry.pictures_before(self.world.start)

    def _begin(self) -> tuple[Block, float, Future[Pictures]]:
        began = time.perf_counter()
        if self._given:
            block = self._given.popleft()
            return block, began, self._decoding.submit(self._decode, block)
        self._act()
        with span("block", world=WORLD, block=self.world.block):
            block = self.generator.next_block(self.world)
        boundary("block", world=WORLD, block=block.index)
        return block, began, self._decoding.submit(self._decode, block)

    def _finish(self, waiting: tuple[Block, float, Future[Pictures]], left: int) -> Part:
        block, began, decoding = waiting
        pictures = decoding.result()[:left]
        return Part(block, pictures, time.perf_counter() - began, self.kv_bytes())

    def _act(self) -> None:
        """Renew the action that is in force at the next block: nobody lets go of a key that a script holds."""
        now = self.world.media_s()
        due = [state for at_s, state in self.request.actions if at_s <= now + 1e-6]
        if due:
            self.world.act(due[-1])


def use_threads(count: int) -> None:
    """Threads torch computes with in this process."""
    torch.set_num_threads(count)
