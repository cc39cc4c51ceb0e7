"""Whatever a command asks for, the engine says no in words and goes on with the worlds it has."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.models import presets
from engine.protocol import (
    ActionState,
    BlockDone,
    Open,
    Opened,
    PromptChange,
    Refused,
    SignalRefused,
    Steer,
    WantProfile,
    WorldSpec,
)
from engine.running import Running
from tests.engine_process import EngineProcess, EngineThread
from tests.toy_preset import PRESET

A = (PromptChange(0.0, "a"),)
SPECS = {
    "a window of all there is": WorldSpec("toy", A, kv=f"window={10**30}"),
    "a range of all there is": WorldSpec("toy", A, kv=f"window=6 range=0:{10**18}"),
    "frames that never come, and no word": WorldSpec("toy", A, kv="frames="),
    "a sink wider than memory": WorldSpec("toy", A, kv=f"window=0 sink={10**15}"),
    "a number no number": WorldSpec("toy", A, kv="window=0x10"),
    "no prompt": WorldSpec("toy", ()),
    "a prompt of blanks": WorldSpec("toy", (PromptChange(0.0, " \n\t"),)),
    "a prompt at no time": WorldSpec("toy", (*A, PromptChange(float("nan"), "b"))),
    "a prompt at the end of time": WorldSpec("toy", (*A, PromptChange(float("inf"), "b"))),
    "a prompt after the end of time": WorldSpec("toy", (*A, PromptChange(1e300, "b"))),
    "a blend over no blocks": WorldSpec("toy", (*A, PromptChange(1.0, "b", "blend", -(2**62)))),
    "no steps": WorldSpec("toy", A, steps=0),
    "steps without end": WorldSpec("toy", A, steps=2**62),
    "a lead backwards": WorldSpec("toy", A, lead_ms=-1),
    "a size of no number": WorldSpec("toy", A, fps=float("nan")),
    "another model": WorldSpec("[/red]", A),
    "a file that is none": WorldSpec("toy", A, start_picture="/dev/zero"),
    "a file of secrets": WorldSpec("toy", A, start_picture="/etc/passwd"),
    "a folder": WorldSpec("toy", A, start_picture="/"),
    "a name with a nought": WorldSpec("toy", A, start_picture="a\0b"),
}
SEEDS = (-1, 0, 2**63 - 1, -(2**63))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    with EngineProcess(tmp_path_factory.mktemp("engine")) as process:
        process.greeting()
        process.send(Open("good", "good", WorldSpec("toy", A)))
        process.wait_for(Opened)
        yield process


def lives(engine: EngineProcess) -> None:
    """The world that was there before goes on."""
    assert engine.process.poll() is None, engine.said()
    last = engine.of(BlockDone)[-1].block if engine.of(BlockDone) else -1
    engine.wait_for(BlockDone, lambda event: event.world == "good" and event.block > last)


@pytest.mark.parametrize("what", SPECS)
def test_a_world_that_cannot_be_is_refused(engine: EngineProcess, what: str) -> None:
    engine.send(Open(what, "w", SPECS[what]))
    refused = engine.wait_for(Refused, lambda event: event.id == what)
    assert refused.message and not refused.busy
    lives(engine)


@pytest.mark.parametrize("name", ["", "../w", "a/b", ".hidden", "a\0b", "x" * 200, "good", "ü", "a\nb"])
def test_a_name_that_is_no_name_is_refused(engine: EngineProcess, name: str) -> None:
    engine.send(Open(f"named {name}", name, WorldSpec("toy", A)))
    engine.wait_for(Refused, lambda event: event.id == f"named {name}")
    lives(engine)


@pytest.mark.parametrize(
    "command",
    [
        Steer("s1", "nobody", prompt=PromptChange(0, "b")),
        Steer("s2", "good", prompt=PromptChange(0, "")),
        Steer("s3", "good", prompt=PromptChange(0, "b", "blend", 0)),
        Steer("s4", "good", action=ActionState(("left",), {"pan": float("nan")})),
        Steer("s5", "good", action=ActionState(("[/red]",))),
        Steer("s6", "good", prompt=PromptChange(0, "b"), action=ActionState(("jump",))),
    ],
    ids=lambda command: command.id,
)
def test_a_signal_that_cannot_be_is_refused(engine: EngineProcess, command: Steer) -> None:
    engine.send(command)
    engine.wait_for(SignalRefused, lambda event: event.id == command.id)
    lives(engine)


def test_seeds_are_any_number(engine: EngineProcess) -> None:
    for seed in SEEDS:
        engine.send(Open(f"seed {seed}", f"seed{seed % 1000}", WorldSpec("toy", A, seed)))
        engine.wait_for(Opened, lambda event, seed=seed: event.id == f"seed {seed}")  # type: ignore[misc]
    lives(engine)


@pytest.mark.parametrize("blocks", [0, -5, 2**62])
def test_a_profile_of_any_length_is_answered(engine: EngineProcess, blocks: int) -> None:
    engine.send(WantProfile(f"p{blocks}", "good", blocks))
    lives(engine)


def test_a_world_whose_opening_breaks_is_refused_and_others_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: object) -> None:
        raise TypeError("a model's own mistake")

    monkeypatch.setitem(presets.PRESETS, "toy", PRESET)
    with EngineThread() as engine:
        engine.greeting()
        with monkeypatch.context() as patch:
            patch.setattr(Running, "open", broken)
            engine.send(Open("broken", "w", WorldSpec("toy", A)))
            assert engine.wait_for(Refused).message == "TypeError: a model's own mistake"
        engine.open("w")
        engine.wait_for(BlockDone)


def test_a_pipe_is_no_picture(engine: EngineProcess, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    engine.send(Open("pipe", "pipe", WorldSpec("toy", A, start_picture=str(tmp_path / "pipe"))))
    engine.wait_for(Refused, lambda event: event.id == "pipe")
    lives(engine)
