"""An engine of two ranks as its server sees it: worlds, signals, and the end when a rank is lost."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import numpy as np
import pytest

from engine.config import ConfigError, EngineConfig
from engine.parallel.together import opened
from engine.parallel.wish import Wish
from engine.protocol import (
    ActionState,
    BlockDone,
    Close,
    Encode,
    Log,
    Packet,
    PromptChange,
    Refused,
    Shutdown,
    SignalApplied,
    Steer,
    WorldChanged,
)
from engine.rollout import Request
from tests import small_magi
from tests.engine_process import ROOT, EngineProcess
from tests.parallel_models import shipped
from tests.toy_preset import install


def test_two_ranks_stream_worlds_as_one_and_end_with_the_one_that_is_lost(tmp_path: Path) -> None:
    with EngineProcess(tmp_path, "--ranks", "2", "--ulysses", "2", "--nice", "0") as engine:
        engine.greeting()
        engine.open("a")
        engine.open("b", prompt="another")
        engine.open("c", prompt=" ")
        engine.wait_for(Refused, lambda e: e.world == "c")
        engine.send(Encode("a", "h264", True))
        engine.send(Steer("s1", "a", prompt=PromptChange(0.0, "a storm", "recache")))
        engine.send(Steer("s2", "b", action=ActionState(keys=("right",))))
        engine.wait_for(SignalApplied, lambda e: e.id == "s1")
        engine.wait_for(SignalApplied, lambda e: e.id == "s2")
        for world in ("a", "b"):
            engine.wait_for(BlockDone, lambda e, world=world: e.world == world and e.block == 3)  # type: ignore[misc]
        engine.wait_for(Packet, lambda e: e.world == "a")
        engine.send(Close("b"))
        engine.wait_for(WorldChanged, lambda e: e.world == "b" and e.state == "ended")
        os.kill(other_rank(engine), signal.SIGKILL)
        said = engine.wait_for(Log, lambda e: "rank" in e.text)
        assert "rank 1 of 2 died (SIGKILL)" in said.text
        assert engine.ended() == 5


def test_two_ranks_end_when_they_are_told(tmp_path: Path) -> None:
    with EngineProcess(tmp_path, "--ranks", "2", "--ring", "2", "--exchange", "pass-q", "--nice", "0") as engine:
        engine.greeting()
        engine.open("a")
        engine.wait_for(BlockDone, lambda e: e.block == 4)
        rank = other_rank(engine)
        engine.send(Shutdown())
        assert engine.ended() == 0
        assert not Path(f"/proc/{rank}").exists()


@pytest.mark.skipif(not shipped(), reason="the shipped model's weights are not in the tree")
def test_a_roll_out_on_two_ranks_is_that_of_one() -> None:
    prompts = (PromptChange(0.0, "a sunny beach"), PromptChange(0.6, "a storm at night", "cut"))
    request = Request("tiny-world", prompts, seconds=1.0)
    made, pages = [], []
    for ranks in (1, 2):
        with opened(request, Wish(ranks)) as rollout:
            parts = list(rollout)
        made.append(np.concatenate([part.pictures for part in parts]).astype(int))
        pages.append(parts[-1].kv_bytes["device"])
    assert pages[0] == 2 * pages[1]
    assert made[0].shape == made[1].shape
    assert abs(made[0] - made[1]).max() <= 1  # of 255: what 1e-5 may do to a rounding


@pytest.mark.parametrize("share", [True, False])
def test_a_roll_out_is_the_same_however_it_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: bool
) -> None:
    install(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    request = Request("toy", (PromptChange(0.0, "a beach"),), seconds=3.0)
    made = []
    for wish in (Wish(1), Wish(2, share_decoding=share)):
        with opened(request, wish) as rollout:
            made.append(np.concatenate([part.pictures for part in rollout]).astype(int))
            shared = type(rollout.model.decoder).__name__ == "JoiningDecoder"
    assert shared == share
    assert made[0].shape == made[1].shape
    assert abs(made[0] - made[1]).max() <= 1


def test_a_guided_roll_out_on_a_team_for_each_branch_is_that_of_one_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_magi.install(tmp_path, "GUIDED_PRESET")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    prompts = (PromptChange(0.0, "a beach"), PromptChange(0.5, "a city at night"))
    request, made = Request("small-magi", prompts, seconds=1.5), []
    for wish in (Wish(1), Wish(3, cfg=3)):
        with opened(request, wish) as rollout:
            made.append(np.concatenate([part.pictures for part in rollout]).astype(int))
            teams = rollout.world.branching.teams
    assert teams == 3
    assert made[0].shape == made[1].shape
    assert abs(made[0] - made[1]).max() <= 1


def other_rank(engine: EngineProcess) -> int:
    """The process of rank 1: the only child of the engine's that is one."""
    children = Path(f"/proc/{engine.process.pid}/task/{engine.process.pid}/children").read_text().split()
    found = [pid for pid in map(int, children) if b"engine.parallel.rank" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    (rank,) = found
    return rank


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ranks", "4", "--ulysses", "3"], "ulysses: expected a number that divides the 4 ranks, got 3"),
        (["--ranks", "4", "--ulysses", "2", "--ring", "4"], "ulysses x ring: expected 4, the ranks, got 8"),
        (["--ranks", "0"], "ranks: expected 1 to 256, got 0"),
        (["--exchange", "both"], "exchange: expected one of auto, pass-kv, pass-q, got 'both'"),
    ],
)
def test_ranks_that_do_not_add_up_stop_the_start(arguments: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        EngineConfig.read(["--fd", "3", *arguments], {})
