"""When the engine is full, what it leaves behind, and how its process ends."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from engine.__main__ import main
from engine.config import EngineConfig
from engine.decoder import Pictures, decode
from engine.generator import Block
from engine.journal import load, replay
from engine.link import INBOX_COMMANDS
from engine.loader import load as load_model
from engine.loader import plan
from engine.loop import Engine
from engine.models import presets
from engine.protocol import (
    ActionState,
    BlockDone,
    Close,
    Log,
    Opened,
    Packet,
    Pause,
    PromptChange,
    Refused,
    Resume,
    Shutdown,
    Steer,
    WorldChanged,
)
from engine.world import World
from tests import toy_preset
from tests.engine_process import EngineProcess, EngineThread

PERIOD_MS, PICTURE_MS, BLOCK = 500, 125, 4


# ------------------------------------------------------------------------------------- how it is full, how it ends


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(presets.PRESETS, "toy", toy_preset.PRESET)


@pytest.mark.usefixtures("toy")
@pytest.mark.parametrize(
    ("settings", "word"),
    [({"max_load": 1e-6}, "of the time"), ({"max_load": 16, "kv_budget_bytes": 1_500_000}, "KV budget")],
)
def test_a_world_that_would_spoil_the_others_is_refused_as_busy(settings: dict[str, Any], word: str) -> None:
    with EngineThread(**settings) as engine:
        engine.open("first")
        engine.wait_for(BlockDone, lambda b: b.block == 1)
        engine.open("second")
        refused = engine.wait_for(Refused)
        assert refused.world == "second" and refused.busy and refused.retry_after_s > 0 and word in refused.message
        engine.send(Close("first"))
        engine.wait_for(WorldChanged, lambda e: e.state == "ended")
        engine.open("second")
        engine.wait_for(Opened, lambda e: e.world == "second")
        engine.send(Shutdown())
        engine.drain()
        assert engine.ended() == 0


@pytest.mark.usefixtures("toy")
def test_a_world_that_was_lived_is_replayed_bit_for_bit_from_its_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paused, steered at moments of no particular kind, beside another world: its latents are what its journal says."""
    lived: list[Tensor] = []

    def kept(world: World, block: Block, name: str | None = None) -> Pictures:
        if name == "w":
            lived.append(block.latents.clone())
        return decode(world, block, name)

    monkeypatch.setattr("engine.decoding.decode", kept)
    with EngineThread(journal_dir=tmp_path, max_load=16) as engine:
        engine.open("w", prompts=(PromptChange(0.0, "a"), PromptChange(1.5, "c")), seed=4)
        engine.open("other", seed=5)
        for block, steer in ((1, {"action": ActionState(keys=("right",))}), (2, {"prompt": PromptChange(0.0, "b")})):
            engine.wait_for(Packet, lambda p: p.world == "w" and p.block == block)  # noqa: B023
            engine.send(Steer(f"s{block}", "w", **steer), Pause("w"), Resume("w"))
        engine.wait_for(Packet, lambda p: p.world == "w" and p.block == 6)
        engine.send(Shutdown())
        engine.drain()
        assert engine.ended() == 0
        journal = load(tmp_path / "w.jsonl")
        assert len(journal.changes) == 2 and len(lived) >= 7
        again: list[Tensor] = []
        loaded = load_model("toy", EngineConfig(0), lambda: None)
        world = plan(loaded, journal.opening.spec, None).open()
        for _ in replay(journal, world, len(lived), lambda: again.append(loaded.generator.next_block(world).latents)):
            pass
        assert all(torch.equal(a, b) for a, b in zip(lived, again, strict=True))


@pytest.mark.usefixtures("toy")
def test_told_to_shut_down_it_ends_its_worlds_and_itself() -> None:
    threads = threading.active_count()
    with EngineThread() as engine:
        engine.open("w")
        engine.wait_for(Packet)
        engine.send(Shutdown())
        engine.drain()
        assert engine.ended() == 0
        last = engine.of(WorldChanged)[-1]
        assert (last.state, last.reason) == ("ended", "the engine stops")
        assert threading.active_count() == threads, "who starts a thread ends it"


@pytest.mark.usefixtures("toy")
@pytest.mark.parametrize("prompt", ["a", "slow"])
def test_a_server_that_goes_away_ends_it_even_in_the_middle_of_a_block(
    prompt: str, caplog: pytest.LogCaptureFixture
) -> None:
    with EngineThread() as engine:
        engine.open("w", prompt)
        engine.wait_for(Opened)
        with caplog.at_level("INFO"):
            engine.sock.close()
            assert engine.ended() == 0
        assert "the engine ends" in caplog.text


def test_commands_that_wait_for_the_end_of_a_block_are_bounded() -> None:
    link = Mock(**{"receive.return_value": [Steer("s", "nobody")] * INBOX_COMMANDS})
    loop = Engine(EngineConfig(0), link, Mock(failures=()), niceness=0)
    for _ in range(5):
        loop.pulse()
    assert link.receive.call_count == 1, "what does not fit waits in the link, whose inbox is bounded"
    loop.turn()
    assert link.send.call_count >= INBOX_COMMANDS, "none was lost"
    loop.pulse()
    assert link.receive.call_count == 3


@pytest.mark.usefixtures("toy")
def test_malformed_bytes_end_it_with_a_clear_line(caplog: pytest.LogCaptureFixture) -> None:
    with EngineThread() as engine:
        engine.greeting()
        engine.sock.sendall(b"\0\0\0\x09not a msg")
        engine.drain()
        assert engine.ended() == 3
        assert "no protocol of ours" in caplog.text


def test_a_model_that_cannot_be_loaded_is_named_and_ends_it(caplog: pytest.LogCaptureFixture) -> None:
    with EngineThread(models=("nothing",)) as engine:
        engine.drain()
        assert engine.ended() == 4
        assert "'nothing'" in engine.of(Log)[0].text and "'nothing'" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--nice", "99"], "nice: expected 0 to 19, got 99"), (["--fd", "987"], "Bad file descriptor")],
)
def test_wrong_settings_stop_the_start_and_are_named(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["engine", "--fd", "0", *arguments])
    assert main() == 2
    assert words in capsys.readouterr().err


def test_a_process_that_was_stopped_goes_on_without_a_burst_and_one_that_is_killed_is_noticed(tmp_path: Path) -> None:
    with EngineProcess(tmp_path) as engine:
        engine.greeting()
        engine.open("w")
        engine.wait_for(Packet, lambda p: p.block == 1)
        os.kill(engine.process.pid, signal.SIGSTOP)
        engine.read_for(2.0)
        mark = len(engine.events)
        os.kill(engine.process.pid, signal.SIGCONT)
        engine.wait_for(Packet, lambda p: p.block == 4)
        packets = engine.of(Packet)
        assert [p.media_ms for p in packets] == [PICTURE_MS * i for i in range(len(packets))]
        stalled = engine.wait_for(Packet, after=mark)
        before = packets[packets.index(stalled) - 1]
        assert stalled.pts - before.pts > 90_000, "the clock has moved on"
        os.kill(engine.process.pid, signal.SIGKILL)
        assert engine.ended() == -signal.SIGKILL
