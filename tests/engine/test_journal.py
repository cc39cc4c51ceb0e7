"""A journal makes the same world again, survives a crash, and says what is wrong with it."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.generator import Generator
from engine.journal import Change, Journal, JournalError, Opening, load, replay, save
from engine.protocol import ActionState, PromptChange
from engine.world import World
from tests.toy_model import ToyModel, toy_world

FULL = "[Errno 27] File too large"
PROMPT = PromptChange(0.0, "b", "cut")
RIGHT = ActionState(keys=("right",))


@contextmanager
def limited(size: int) -> Iterator[None]:
    """No file may grow beyond `size` bytes, as if the disk were full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def lived(blocks: int = 6) -> tuple[Journal, list[Tensor]]:
    """A world that was steered while it ran: its journal and its latents."""
    model = ToyModel()
    world = toy_world(model, "window=6", seed=3)
    journal, generator, latents = Journal(Opening(world.spec, model.digest())), Generator(model), []
    for index in range(blocks):
        if index in (1, 4):
            journal.note(Change(world.block, world.act(RIGHT), action=RIGHT))
        if index == 2:
            journal.note(Change(world.block, world.steer(PROMPT), prompt=PROMPT, id="p"))
        latents.append(generator.next_block(world).latents)
    return journal, latents


def replayed(journal: Journal, blocks: int) -> list[Tensor]:
    model = ToyModel()
    world = toy_world(model, "window=6", seed=journal.opening.spec.seed, prompts=journal.opening.spec.prompts)
    generator = Generator(model)
    latents: list[Tensor] = []
    for _ in replay(journal, world, blocks, lambda: latents.append(generator.next_block(world).latents)):
        pass
    return latents


def test_a_replay_is_the_same_world_bit_for_bit(tmp_path: Path) -> None:
    journal, latents = lived()
    save(journal, tmp_path / "w.jsonl")
    again = replayed(load(tmp_path / "w.jsonl"), len(latents))
    assert all(torch.equal(a, b) for a, b in zip(latents, again, strict=True))
    unsteered = replayed(Journal(journal.opening), len(latents))
    assert torch.equal(latents[0], unsteered[0]) and not torch.equal(latents[1], unsteered[1])


def test_a_blend_that_waited_for_another_waits_again_in_a_replay() -> None:
    model = ToyModel()
    world, generator, latents = toy_world(model, "window=6"), Generator(model), []
    journal = Journal(Opening(world.spec, model.digest()))
    for text in "bcdef":
        change = PromptChange(0.0, text, "blend", 3)
        journal.note(Change(world.block, world.steer(change), prompt=change))
        latents.append(generator.next_block(world).latents)
    assert [change.block for change in journal.changes] == [0, 3, 3, 3, 6]
    again = replayed(journal, len(latents))
    assert all(torch.equal(a, b) for a, b in zip(latents, again, strict=True))


def test_a_journal_on_disk_is_complete_at_every_moment(tmp_path: Path) -> None:
    journal, _ = lived()
    path = tmp_path / "w.jsonl"
    live = Journal(journal.opening, path)
    for change in journal.changes:
        live.note(change)
        assert load(path).changes == live.changes
    live.close()
    assert path.read_bytes() == journal.lines()


def test_a_line_cut_short_by_a_crash_costs_that_line_only(tmp_path: Path) -> None:
    journal, _ = lived()
    path = tmp_path / "w.jsonl"
    path.write_bytes(journal.lines()[:-7])
    assert load(path).changes == journal.changes[:-1]


def test_of_actions_between_two_blocks_the_newest_is_kept(tmp_path: Path) -> None:
    journal = Journal(Opening(toy_world(ToyModel()).spec, "d"), tmp_path / "w.jsonl")
    for keys in (("left",), ("right",), ()):
        journal.note(Change(3, 3, action=ActionState(keys=keys)))
    journal.note(Change(4, 4, action=RIGHT))
    journal.close()
    wanted = [Change(3, 3, action=ActionState()), Change(4, 4, action=RIGHT)]
    assert journal.changes == load(tmp_path / "w.jsonl").changes == wanted


def test_a_disk_that_fills_costs_the_file_its_later_lines_and_the_world_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal, _ = lived()
    path = tmp_path / "w.jsonl"
    live = Journal(journal.opening, path)
    live.note(journal.changes[0])
    with limited(path.stat().st_size + 10):
        live.note(journal.changes[1])
        live.note(journal.changes[2])
        live.close()
    assert live.changes == journal.changes
    assert load(path).changes == journal.changes[:1]
    assert [r.message for r in caplog.records] == [f"a world's journal ends on disk after 2 changes: {FULL}"]


def test_a_journal_without_room_for_its_opening_is_refused(tmp_path: Path) -> None:
    with limited(10), pytest.raises(OSError, match="File too large"):
        Journal(Opening(toy_world(ToyModel()).spec, "d"), tmp_path / "w.jsonl")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", ["opening line"]),
        (b"{}\n", ["line 1", "opening"]),
        (b"junk\n", ["line 1", "junk"]),
    ],
)
def test_what_is_no_journal_is_refused(tmp_path: Path, text: bytes, words: list[str]) -> None:
    (tmp_path / "w").write_bytes(text)
    with pytest.raises(JournalError) as caught:
        load(tmp_path / "w")
    assert all(word in str(caught.value) for word in words)


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    journal, _ = lived()
    rows = journal.lines().split(b"\n")
    rows[2] = b'{"at": "x"}'
    (tmp_path / "w").write_bytes(b"\n".join(rows))
    with pytest.raises(JournalError, match="line 3.*change"):
        load(tmp_path / "w")


def test_another_format_is_refused(tmp_path: Path) -> None:
    journal, _ = lived(1)
    (tmp_path / "w").write_bytes(journal.lines().replace(b'"format":1', b'"format":9'))
    with pytest.raises(JournalError, match="expected format 1, got 9"):
        load(tmp_path / "w")


def test_a_signal_that_would_come_elsewhere_stops_the_replay() -> None:
    journal, _ = lived()
    journal.changes[1] = Change(2, 5, prompt=PROMPT)
    with pytest.raises(JournalError, match="expected a signal for block 5 when block 2 was next, got block 2"):
        replayed(journal, 6)


def test_a_world_is_steerable() -> None:
    world: World = toy_world(ToyModel())
    assert list(replay(Journal(Opening(world.spec, "d")), world, 0, lambda: None)) == []
