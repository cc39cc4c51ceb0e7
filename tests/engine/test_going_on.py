"""A world outlives its engine: another one goes on from the snapshot, where the world was, not from the beginning."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from engine.protocol import BlockDone, Close, Open, Opened, PromptChange, Refused, SignalApplied, Steer, WorldSpec
from tests.engine_process import EngineProcess


def spec(*prompts: PromptChange) -> WorldSpec:
    return WorldSpec("toy", prompts or (PromptChange(0.0, "a"),), seed=3)


def engine_with(folder: Path, name: str = "second") -> EngineProcess:
    """An engine that keeps its worlds in `folder`."""
    (folder / name).mkdir()
    return EngineProcess(folder / name, "--journal-dir", str(folder))


def killed_after_a_snapshot(worlds: Path) -> int:
    """Run the world `w` until it was saved, and kill its engine; the last block it made."""
    with engine_with(worlds, "first") as engine:
        engine.greeting()
        engine.send(Open("open", "w", spec()))
        engine.wait_for(Opened)
        while not (worlds / "w.snapshot").exists():
            engine.read_for(0.2)
            assert engine.process.poll() is None, engine.said()
        last = engine.of(BlockDone)[-1].block
        os.kill(engine.process.pid, signal.SIGKILL)
        engine.ended()
    return last


def test_a_killed_world_goes_on_and_its_snapshot_goes_when_it_ends(tmp_path: Path) -> None:
    last = killed_after_a_snapshot(tmp_path)
    assert last > 2
    with engine_with(tmp_path) as engine:
        engine.greeting()
        wanted = spec(PromptChange(0.0, "another"), PromptChange(1.5, "later"))
        engine.send(Open("again", "w2", wanted, continues="w"))
        opened = engine.wait_for(Opened)
        assert 0 < opened.first_block <= last + 3 and opened.first_media_ms == 500 * opened.first_block
        first = engine.wait_for(BlockDone)
        assert (first.block, first.media_ms) == (opened.first_block, opened.first_media_ms)
        later = engine.wait_for(SignalApplied, lambda event: event.text == "later")
        assert later.media_ms >= opened.first_media_ms + 1500
        assert not (tmp_path / "w.snapshot").exists(), "used once"
        while not (tmp_path / "w2.snapshot").exists():
            engine.read_for(0.2)
        engine.send(Close("w2"))
        while (tmp_path / "w2.snapshot").exists():
            engine.read_for(0.1)


def test_a_lost_world_without_a_usable_snapshot_begins_anew(tmp_path: Path) -> None:
    (tmp_path / "broken.snapshot").write_bytes(b"nothing")
    with engine_with(tmp_path) as engine:
        engine.greeting()
        for lost in ("broken", "never-was"):
            engine.send(Open(lost, f"after-{lost}", spec(), continues=lost))
            assert engine.wait_for(Opened, lambda event, lost=lost: event.id == lost).first_block == 0  # type: ignore[misc]
        assert "is not continued" in engine.said()
        engine.send(Open("bad", "w", spec(), continues="../../etc/passwd"))
        assert "expected a name" in engine.wait_for(Refused).message


def test_steering_goes_on_where_it_was(tmp_path: Path) -> None:
    killed_after_a_snapshot(tmp_path)
    with engine_with(tmp_path) as engine:
        engine.greeting()
        engine.send(Open("again", "w2", spec(), continues="w"))
        opened = engine.wait_for(Opened)
        engine.wait_for(BlockDone)
        engine.send(Steer("p", "w2", prompt=PromptChange(0.0, "b")))
        applied = engine.wait_for(SignalApplied, lambda event: event.id == "p")
        assert applied.block > opened.first_block
        assert applied.media_ms == 500 * applied.block
