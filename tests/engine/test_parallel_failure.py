"""A rank that dies or hangs ends its group within a bounded time and is named; nothing is left behind."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.parallel.launch import Group, RankLost

PATIENCE_S = 5.0
LIMIT_S = 120.0  # generous: what bounds the end of a group is its patience, not this
FAULTS = {
    "killed": r"rank 1 of 2 died \(SIGKILL\)",
    "broken": r"rank 1 of 2 died \(exit status 1\)",
    "stopped": r"rank 1 of 2 hangs: silent for",
    "stuck": r"rank 1 of 2 hangs: it has begun 5 exchanges, others 6",
}


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Group, Path]]]:
    """One group for each fault, all started at once."""
    made: dict[str, tuple[Group, Path]] = {}
    for fault in (*FAULTS, "none"):
        folder = tmp_path_factory.mktemp(fault)
        told = json.dumps({"folder": str(folder), "fault": fault})
        group = Group.start(2, "tests.parallel_faults:work", told, first=0, patience_s=PATIENCE_S)
        made[fault] = group, folder
    yield made
    for group, _ in made.values():
        group.close()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_lost_rank_ends_the_group_and_is_named(groups: dict[str, tuple[Group, Path]], fault: str) -> None:
    group, folder = groups[fault]
    with pytest.raises(RankLost, match=FAULTS[fault]):
        group.wait(LIMIT_S)
    assert all(member.process.poll() is not None for member in group.members)
    with pytest.raises(RankLost, match=FAULTS[fault]):
        group.check()
    assert not [pid for pid in pids(folder) if alive(pid)]


@pytest.mark.parametrize(
    ("fault", "said"),
    [("killed", r"rank 2 of 3 died \(SIGKILL\)"), ("stuck", r"rank 2 of 3 hangs: it has begun \d+ exchanges, others")],
)
def test_a_team_that_is_lost_in_the_midst_of_a_step_is_named(tmp_path: Path, fault: str, said: str) -> None:
    told = json.dumps({"folder": str(tmp_path), "fault": fault})
    target = "tests.parallel_faults:share_branches"
    with Group.start(3, target, told, first=0, patience_s=2 * PATIENCE_S) as group:
        with pytest.raises(RankLost, match=said):
            group.wait(LIMIT_S)
    assert len(pids(tmp_path)) == 3
    assert not [pid for pid in pids(tmp_path) if alive(pid)]


def test_ranks_that_are_done_are_not_lost(groups: dict[str, tuple[Group, Path]]) -> None:
    group, _ = groups["none"]
    group.wait(LIMIT_S)
    group.check()
    port = group.port
    group.close()
    with socket.socket() as again:
        again.bind(("127.0.0.1", port))


def test_ranks_do_not_outlive_their_parent(tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-m", "tests.parallel_faults", str(tmp_path)])
    try:
        eventually(lambda: len(pids(tmp_path)) == 2)
    finally:
        parent.kill()
        parent.wait()
    eventually(lambda: not [pid for pid in pids(tmp_path) if alive(pid)])


def pids(folder: Path) -> list[int]:
    return [int(text) for text in (path.read_text() for path in folder.glob("*.pid")) if text]


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits for its parent to look does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def eventually(true: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not true():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
