"""A past computed again under a new prompt: what it sees, where it lies, and that a block that fails loses nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from engine.generator import Generator, Recache
from engine.kvcache.staged import Workspace
from engine.protocol import PromptChange
from tests.toy_model import ToyModel, toy_world

model = ToyModel()


RECACHED_BESIDE_OTHERS: list[tuple[Recache, str]] = [
    ("blocks", "window=6 frames=3"),
    ("blocks", "window=6 sink=1"),
    ("blocks", "window=4 range=0:2 topk=1"),
    ("joint", "window=6 frames=3,7"),
    ("joint-keep-sink", "window=6 sink=2 topk=1"),
    ("joint-keep-sink", "window=6 sink=2 range=4:6"),
    ("joint-keep-sink", "window=6 sink=1"),
]


@pytest.mark.parametrize(("rule", "kv"), RECACHED_BESIDE_OTHERS)
def test_a_recache_leaves_every_frame_a_slot_of_its_own_and_all_that_is_read_written(
    rule: Recache, kv: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What memory that was never written holds (0 or 1000) changes nothing."""

    def made(junk: float) -> list[Tensor]:
        def filled(self: Workspace, *args: Any) -> None:
            plain(self, *args)
            self.k.fill_(junk)
            self.v.fill_(junk)

        monkeypatch.setattr(Workspace, "__init__", filled)
        generator, world = Generator(model, rule), toy_world(model, kv)
        for _ in range(8):
            generator.next_block(world)
        world.steer(PromptChange(0, "b", "recache"))
        latents = [generator.next_block(world).latents for _ in range(3)]
        slots = [world.caches[0].slot_of(frame) for frame in world.caches[0].held]
        assert len(set(slots)) == len(slots)
        return latents

    plain = Workspace.__init__
    assert all(torch.equal(a, b) for a, b in zip(made(0.0), made(1e3), strict=True))


@pytest.mark.parametrize("rule", ["blocks", "joint", "joint-keep-sink"])
@pytest.mark.parametrize("blocks", [1, 2, 7])
def test_a_recache_sees_what_it_has_made_anew_and_nothing_fetched_by_content(rule: Recache, blocks: int) -> None:
    model, made = ToyModel(), []
    for kv in ("full", "full topk=2", "window=40 topk=2 offload=host"):
        world = toy_world(model, kv)
        generator = Generator(model, rule)
        for _ in range(blocks):
            generator.next_block(world)
        world.steer(PromptChange(0, "b", "recache"))
        made.append(torch.cat([generator.next_block(world).latents for _ in range(3)]))
    for other in made[1:]:
        torch.testing.assert_close(other, made[0], rtol=0, atol=2e-5)


@pytest.mark.parametrize("fails_at", [2, 4])
@pytest.mark.parametrize("rule", ["blocks", "joint", "joint-keep-sink"])
@pytest.mark.parametrize("kv", ["full", "window=6 sink=1"])
def test_a_block_that_fails_in_or_after_a_recache_can_be_made_again(
    kv: str, rule: Recache, fails_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator, worlds, calls = Generator(model, rule), [toy_world(model, kv) for _ in range(2)], 0
    for world in worlds:
        for _ in range(5):
            generator.next_block(world)
        world.steer(PromptChange(0, "b", "recache"))
    whole = ToyModel.forward

    def failing(*args: Any) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == fails_at:
            raise RuntimeError("out of memory")
        return whole(*args)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="out of memory"):
        patch.setattr(ToyModel, "forward", failing)
        generator.next_block(worlds[0])
    for _ in range(4):
        assert torch.equal(*(generator.next_block(world).latents for world in worlds))
