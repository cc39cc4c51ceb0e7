"""Rank 0 and those who follow it: every world exists on every rank, and all ranks do the same to it in the same order.

    rank 0      LedWorld, LedGenerator: a world and a generator that say what is done to them before it is
    the others  follow(): obey one order after another; never read the clock, never hear the server

Between two passes through the model rank 0 tells in one byte whether the block goes on: where its engine gives up a
block all ranks give it up, and all worlds are as they were. An order that fails on all ranks alike (a full cache) fails
as on one rank; if it fails on one alone, the next exchange does not come about, and the group ends (launch.py).
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from torch import Tensor

from engine.generator import Block, Generator, Recache
from engine.guidance import ALL_BRANCHES, Branching
from engine.kvcache.cache import KVCache
from engine.models import BlockModel, State
from engine.parallel.launch import Group, RankLost
from engine.parallel.mesh import ExchangeFailed, Mesh
from engine.parallel.plan import (
    Acted,
    Beat,
    CloseWorld,
    End,
    ForkWorld,
    MakeBlocks,
    Order,
    Prefill,
    Prompted,
    Restore,
    Snapshot,
    decode,
    encode,
    packed,
    unpacked,
)
from engine.parallel.plan import OpenWorld as Opening
from engine.protocol import ActionState, PromptChange, WorldSpec
from engine.samplers import Sampler
from engine.world import World

logger = logging.getLogger(__name__)

GO_ON, GIVE_UP = b"\x01", b"\x00"
Open = Callable[[WorldSpec], World]


class GivenUp(Exception):
    """Rank 0 does not want the block in hand any more."""


class Crew:
    """Rank 0's way to the others."""

    def __init__(self, mesh: Mesh, group: Group | None = None) -> None:
        """`group`: the ranks, where they are this process's own; torchrun watches over its own."""
        self.mesh, self._group = mesh, group
        self._numbers = itertools.count(1)

    @property
    def lost(self) -> bool:
        """Whether a rank is gone, and the group with it."""
        return self._group is not None and bool(self._group.verdict)

    def new_number(self) -> int:
        return next(self._numbers)

    def tell(self, order: Order) -> None:
        """Raises RankLost."""
        with self.guarded():
            self.mesh.tell(encode(order))

    def watched(self, pulse: Callable[[], None]) -> Callable[[], None]:
        """What runs between passes on rank 0, and the word to the others of how it went."""

        def act() -> None:
            try:
                pulse()
            except BaseException:
                self.mesh.tell(GIVE_UP)
                raise
            self.mesh.tell(GO_ON)

        return act

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Name the rank that an exchange has failed for."""
        if self._group is None:
            yield
            return
        self._group.check()
        with self._group.guarded():
            yield

    def close(self) -> None:
        """Send the others home, and see to it that they go."""
        try:
            if not self.lost:
                self.tell(End())
        finally:
            if self._group is not None:
                self._group.close()


class LedWorld(World):
    """A world of rank 0 that the other ranks have too."""

    def __init__(
        self,
        spec: WorldSpec,
        model: BlockModel,
        sampler: Sampler,
        caches: tuple[KVCache, ...],
        crew: Crew,
        branching: Branching = ALL_BRANCHES,
    ) -> None:
        super().__init__(spec, model, sampler, caches, branching=branching)
        self.crew, self.number = crew, crew.new_number()
        crew.tell(Opening(self.number, spec))

    def steer(self, change: PromptChange) -> int:
        block = super().steer(change)
        self.crew.tell(Prompted(self.number, change))
        return block

    def act(self, state: ActionState) -> int:
        block = super().act(state)
        self.crew.tell(Acted(self.number, state))
        return block

    def fork(self) -> World:
        twin = super().fork()
        assert isinstance(twin, LedWorld)
        twin.number = self.crew.new_number()
        self.crew.tell(ForkWorld(self.number, twin.number))
        return twin

    def snapshot(self, *, decoder: bool = True) -> State:
        self.crew.tell(Snapshot(self.number))
        with self.crew.guarded():
            return super().snapshot(decoder=False)  # parts of its memory may lie on other ranks

    def restore(self, state: State) -> None:
        state = state | {"decoder": None}  # of other bands than this group's, if of bands at all
        self.crew.tell(Restore(self.number, packed(state)))
        super().restore(state)

    def close(self) -> None:
        with suppress(RankLost):
            self.crew.tell(CloseWorld(self.number))
        super().close()


class LedGenerator(Generator):
    """Moves worlds on, on all ranks."""

    def __init__(self, model: BlockModel, recache: Recache, crew: Crew) -> None:
        super().__init__(model, recache)
        self._crew = crew

    def next_block(self, world: World) -> Block:
        return self.next_blocks([world])[0]

    def next_blocks(self, worlds: Sequence[World]) -> list[Block]:
        extra = [world.extra for world in worlds] if worlds[0].block == 0 else None
        numbers = tuple(_number(world) for world in worlds)
        self._crew.tell(MakeBlocks(worlds=numbers, extra=packed(extra) if extra and any(extra) else b""))
        with self._crew.guarded():
            return super().next_blocks(worlds)

    def prefill(self, world: World, latents: Tensor) -> list[Block]:
        self._crew.tell(Prefill(_number(world), packed(latents.cpu())))
        with self._crew.guarded():
            return super().prefill(world, latents)


def _number(world: World) -> int:
    assert isinstance(world, LedWorld), "all worlds of a crew are led"
    return world.number


class Follower:
    """A rank that does as rank 0 says."""

    def __init__(self, mesh: Mesh, open_world: Open, generators: dict[str, Generator]) -> None:
        """`open_world`: as rank 0 opens its worlds; `generators` by model name, their models call `between_passes`."""
        self._mesh, self._open, self._generators = mesh, open_world, generators
        self._worlds: dict[int, World] = {}

    def follow(self) -> None:
        """Until rank 0 says that it is over. Raises ExchangeFailed when it is gone."""
        while not isinstance(order := decode(self._mesh.tell(None)), End):
            try:
                self._obey(order)
            except GivenUp:
                continue
            except ExchangeFailed:
                raise
            except Exception:  # a process's main loop: where rank 0 has failed alike, the world is as it was there too
                logger.exception("%s failed", type(order).__name__)

    def _obey(self, order: Order) -> None:
        match order:
            case Opening(number, spec):
                assert spec is not None
                self._worlds[number] = self._open(spec)
            case Prompted(number, change):
                assert change is not None
                self._worlds[number].steer(change)
            case Acted(number, state):
                assert state is not None
                self._worlds[number].act(state)
            case MakeBlocks():
                self._make(order)
            case Prefill(number, latents):
                world = self._worlds[number]
                self._generators[world.spec.model].prefill(world, unpacked(latents))
            case ForkWorld(number, twin):
                self._worlds[twin] = self._worlds[number].fork()
            case Snapshot(number):
                self._worlds[number].snapshot()
            case Restore(number, state):
                self._worlds[number].restore(unpacked(state))
            case CloseWorld(number):
                self._worlds.pop(number).close()
            case Beat():
                pass

    def _make(self, order: MakeBlocks) -> None:
        worlds = [self._worlds[number] for number in order.worlds]
        extras: list[dict[str, Any]] = unpacked(order.extra) if order.extra else []
        for world, extra in zip(worlds, extras, strict=False):
            world.extra = {name: x.to(world.model.device) for name, x in extra.items()}
        self._generators[worlds[0].spec.model].next_blocks(worlds)


def between_passes(mesh: Mesh) -> None:
    """What runs between passes on a rank that follows. Raises GivenUp when rank 0 has given up the block."""
    if mesh.tell(None) == GIVE_UP:
        raise GivenUp
