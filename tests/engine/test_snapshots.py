"""A world that was lost goes on from its last snapshot as if nothing had happened."""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from engine import snapshots
from engine.decoder import decode
from engine.generator import Generator
from engine.protocol import ActionState, PromptChange
from engine.samplers import FlowODE, Linear
from engine.snapshots import SnapshotError
from engine.world import World
from tests.toy_model import HOLD_RIGHT, ToyModel, toy_world

model = ToyModel()
generator = Generator(model)


def lived(kv: str = "window=6 sink=1") -> World:
    world = toy_world(model, kv, seed=5)
    world.act(HOLD_RIGHT)
    for block in range(5):
        decode(world, generator.next_block(world))
        if block == 2:
            world.steer(PromptChange(0.0, "b", "blend", 4))
    return world


@pytest.mark.parametrize("kv", ["full", "window=6 sink=1", "window=6 store=int8", "window=4 topk=1 offload=host"])
def test_a_world_goes_on_bit_for_bit(kv: str, tmp_path: Path) -> None:
    world = lived(kv)
    snapshots.save(world, tmp_path / "w")
    again = toy_world(model, kv, seed=5)
    snapshots.resume(again, tmp_path / "w")
    for _ in range(4):
        a, b = generator.next_block(world), generator.next_block(again)
        assert torch.equal(a.latents, b.latents)
        assert (decode(world, a) == decode(again, b)).all()


def test_a_guided_world_goes_on_with_both_of_its_pasts(tmp_path: Path) -> None:
    sampler = FlowODE(Linear(), (1.0, 0.5), guidance=3.0)
    world, again = (toy_world(model, "window=6", sampler=sampler) for _ in range(2))
    for _ in range(3):
        generator.next_block(world)
    snapshots.save(world, tmp_path / "w")
    snapshots.resume(again, tmp_path / "w")
    assert torch.equal(generator.next_block(world).latents, generator.next_block(again).latents)


def test_another_world_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    snapshots.save(lived(), tmp_path / "w")
    for other in (toy_world(model, "window=6 sink=1", seed=6), toy_world(model, "full", seed=5)):
        with pytest.raises(SnapshotError, match="of the same model, seed and cache"):
            snapshots.resume(other, tmp_path / "w")
        assert (other.block, other.caches[0].held) == (0, [])


class Danger:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("executed",)


def test_a_damaged_or_hostile_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "noise").write_bytes(b"\x00" * 100)
    torch.save({"model": Danger()}, tmp_path / "danger")
    snapshots.save(lived(), tmp_path / "short")
    whole = (tmp_path / "short").read_bytes()
    (tmp_path / "short").write_bytes(whole[: len(whole) // 2])
    for name in ("noise", "danger", "short", "missing"):
        with pytest.raises(SnapshotError, match=f"{name}: cannot be read"):
            snapshots.resume(toy_world(model, "window=6 sink=1", seed=5), tmp_path / name)
    assert capsys.readouterr().out == ""


def test_a_file_that_cannot_be_written_leaves_the_one_before(tmp_path: Path) -> None:
    world = lived()
    snapshots.save(world, tmp_path / "w")
    before = (tmp_path / "w").read_bytes()
    (tmp_path / "w.partial").mkdir()
    with pytest.raises(OSError):
        snapshots.save(world, tmp_path / "w")
    assert (tmp_path / "w").read_bytes() == before


def test_what_is_too_large_to_write_in_passing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    world = lived()
    assert snapshots.worth_saving(world)
    monkeypatch.setattr(snapshots, "MOST_BYTES", 10)
    assert not snapshots.worth_saving(world)


def test_actions_and_scheduled_prompts_come_along(tmp_path: Path) -> None:
    world = toy_world(model, prompts=(PromptChange(0.0, "a"), PromptChange(9.0, "later")))
    world.act(ActionState(keys=("left",)))
    generator.next_block(world)
    snapshots.save(world, tmp_path / "w")
    again = toy_world(model, prompts=world.spec.prompts)
    snapshots.resume(again, tmp_path / "w")
    assert again.actions.states == world.actions.states
    assert [s.change for s in again.prompts.switches] == [s.change for s in world.prompts.switches]


@pytest.mark.parametrize("content", [b"", b"x" * 10, b"PK\x03\x04" * 40], ids=["empty", "noise", "half a zip"])
def test_a_file_that_is_damaged_or_empty_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "w").write_bytes(content)
    with pytest.raises(SnapshotError, match="w: cannot be read: ."):
        snapshots.resume(toy_world(model), tmp_path / "w")


def test_a_file_with_bytes_wrong_anywhere_is_refused_or_whole_where_it_counts(tmp_path: Path) -> None:
    snapshots.save(lived(), tmp_path / "w")
    whole, numbers = bytearray((tmp_path / "w").read_bytes()), random.Random(0)
    for _ in range(60):
        damaged = bytearray(whole)
        for _ in range(4):
            damaged[numbers.randrange(len(whole))] = numbers.randrange(256)
        (tmp_path / "w").write_bytes(damaged)
        with suppress(SnapshotError):
            snapshots.resume(toy_world(model, "window=6 sink=1", seed=5), tmp_path / "w")


def test_other_tensors_are_no_world(tmp_path: Path) -> None:
    torch.save([torch.zeros(1)], tmp_path / "w")
    with pytest.raises(SnapshotError, match="expected the state of a world, got list"):
        snapshots.resume(toy_world(model), tmp_path / "w")
