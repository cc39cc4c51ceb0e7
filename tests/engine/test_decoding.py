"""Blocks are decoded in order beside the denoiser, reach playout, and a failure is reported and hurts nothing else."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.decoder import decode
from engine.decoding import Decoded, Decoding, Job
from engine.generator import Generator
from engine.models import Conditioning, State
from engine.playout import Playout
from engine.world import MOST_UNSHOWN, World
from tests.toy_model import ToyDecoder, ToyModel, toy_world

SIZE = (16, 16)


class Gate(ToyDecoder):
    """A decoder that waits to be let on, and breaks when told to."""

    def __init__(self) -> None:
        self.entered, self.go_on, self.broken = threading.Event(), threading.Event(), False

    def decode(self, latents: Tensor, conditioning: Conditioning, state: State) -> tuple[Tensor, State]:
        self.entered.set()
        self.go_on.wait(30)
        if self.broken:
            raise RuntimeError("out of order")
        return super().decode(latents, conditioning, state)


class Bench:
    def __init__(self) -> None:
        self.model, self.gate = ToyModel(size=SIZE), Gate()
        self.model.decoder = self.gate
        self.world: World = toy_world(self.model, "window=6")
        self.generator = Generator(self.model)
        self.playout = Playout(lambda event: True, {"h264": "libx264"}, now=lambda: 50.0)
        self.playout.open("w", (SIZE[1], SIZE[0]), 8.0, 0.5)
        self.woken = threading.Semaphore(0)
        self.decoding = Decoding(self.playout, self.woken.release, threads=1, niceness=0)
        self.decoding.start()

    def put(self) -> Job:
        job = Job("w", self.world, self.generator.next_block(self.world), denoise_s=0.1)
        self.decoding.put(job)
        return job

    def finished(self, count: int) -> list[Decoded]:
        results: list[Decoded] = []
        while len(results) < count:
            assert self.woken.acquire(timeout=30)
            results += self.decoding.results()
        return results


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.gate.go_on.set()
    bench.decoding.close()


def test_blocks_are_decoded_in_order_and_shown_at_their_media_time(bench: Bench) -> None:
    bench.gate.go_on.set()
    jobs = []
    results = []
    for _ in range(3):
        jobs.append(bench.put())
        results += bench.finished(1)
    assert [r.job for r in results] == jobs and all(r.pictures == 4 and not r.error for r in results)
    assert [r.slack_s for r in results] == pytest.approx([0.0, 0.5, 1.0]), "the clock starts with the first"


def test_what_is_decoded_here_is_what_is_decoded_alone(bench: Bench) -> None:
    bench.gate.go_on.set()
    for _ in range(3):
        bench.put()
        bench.finished(1)
    alone_model = ToyModel(size=SIZE)
    alone = toy_world(alone_model, "window=6")
    generator = Generator(alone_model)
    for _ in range(3):
        decode(alone, generator.next_block(alone))
    assert torch.equal(alone.shown.memory, bench.world.shown.memory)


@pytest.mark.parametrize("behind", [0, 1, 2])
def test_a_copy_made_before_the_last_blocks_are_decoded_is_shown_as_the_world_would_be(behind: int) -> None:
    model = ToyModel(size=SIZE)
    world, twin_of_snapshot = toy_world(model, "window=6"), toy_world(model, "window=6")
    generator = Generator(model)
    blocks = [generator.next_block(world) for _ in range(4)]
    pictures = [decode(world, block) for block in blocks[: 4 - behind]]
    twin = world.fork()
    twin_of_snapshot.restore(world.snapshot())
    pictures += [decode(world, block) for block in blocks[4 - behind :]]
    for _ in range(2):
        expected = decode(world, generator.next_block(world))
        for other in (twin, twin_of_snapshot):
            assert np.array_equal(decode(other, generator.next_block(other)), expected)
    alone = toy_world(model, "window=6")
    assert all(np.array_equal(decode(alone, generator.next_block(alone)), shown) for shown in pictures)


def test_a_fork_made_while_a_block_is_being_decoded_goes_on_from_its_end(bench: Bench) -> None:
    bench.put()
    assert bench.gate.entered.wait(30)
    twin = bench.world.fork()
    bench.gate.go_on.set()
    assert not bench.finished(1)[0].error
    expected = decode(bench.world, bench.generator.next_block(bench.world))
    assert np.array_equal(decode(twin, bench.generator.next_block(twin)), expected)


def test_a_world_that_nobody_shows_holds_few_of_its_blocks() -> None:
    model = ToyModel(size=SIZE)
    world, generator = toy_world(model, "window=6"), Generator(model)
    for _ in range(MOST_UNSHOWN + 8):
        newest = generator.next_block(world)
    assert len(world.unshown) == MOST_UNSHOWN and world.unshown[-1].latents is newest.latents
    decode(world, newest)
    generator.next_block(world)
    assert len(world.unshown) == 1


def test_one_block_may_wait_while_another_is_decoded(bench: Bench) -> None:
    assert bench.decoding.has_room and bench.decoding.free_in_s(2.0) == 0.0
    bench.put()
    assert bench.gate.entered.wait(30)
    assert bench.decoding.has_room
    assert 0.0 <= bench.decoding.free_in_s(1000.0) <= 1000.0
    bench.put()
    assert not bench.decoding.has_room
    assert bench.decoding.free_in_s(1000.0) > 1000.0
    bench.gate.go_on.set()
    assert len(bench.finished(2)) == 2


def test_a_block_that_cannot_be_decoded_is_reported_and_the_thread_goes_on(bench: Bench) -> None:
    bench.gate.go_on.set()
    bench.gate.broken = True
    bench.put()
    assert bench.finished(1)[0].error == "RuntimeError: out of order"
    bench.gate.broken = False
    bench.put()
    assert bench.finished(1)[0].error == ""


def test_closing_leaves_waiting_blocks_undone_and_ends_the_thread(bench: Bench) -> None:
    threads = threading.active_count()
    bench.put()
    assert bench.gate.entered.wait(30)
    bench.put()
    closing = threading.Timer(0.05, bench.gate.go_on.set)
    closing.start()
    bench.decoding.close()
    closing.join()
    assert threading.active_count() == threads - 1
    assert len(bench.decoding.results()) == 1
