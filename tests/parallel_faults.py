"""What ranks do in the tests of failure: exchange, or make a world, without end, until one does as it was told."""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import cast

import torch

from engine.generator import Generator
from engine.loader import Watched
from engine.models import BlockModel
from engine.parallel.cache import Spread
from engine.parallel.launch import Group
from engine.parallel.rank import Member
from engine.parallel.split import Layout
from tests.parallel_cases import open_world
from tests.parallel_models import MODELS, SAMPLERS

BEFORE = 5  # exchanges that go well


def work(member: Member) -> None:
    """`argument`: JSON of the folder where each rank leaves its process id, and of what rank 1 does, and when."""
    told = json.loads(member.argument)
    torch.set_num_threads(1)
    mesh = member.join()
    Path(told["folder"], f"{member.rank}.pid").write_text(str(os.getpid()))
    count = 0
    while told["fault"] != "none" or count < BEFORE:
        mesh.wait_for_all()
        count += 1
        if count == BEFORE and member.rank == 1:
            fail(told["fault"])


def share_branches(member: Member) -> None:
    """A guided world of staggered blocks, a branch for each rank; the last does as it is told before its sixth pass."""
    told = json.loads(member.argument)
    torch.set_num_threads(1)
    mesh, model = member.join(), MODELS["magi"]()
    Path(told["folder"], f"{member.rank}.pid").write_text(str(os.getpid()))
    spread = Spread.over(mesh.grid(Layout(cfg=member.ranks)), model.geometry.kv, mode="pass-q")
    passes = itertools.count(1)

    def pulse() -> None:
        if next(passes) > BEFORE and member.rank == member.ranks - 1:
            fail(told["fault"])

    watched = cast(BlockModel, Watched(model, pulse))
    world = open_world(watched, "window=9", SAMPLERS["staggered"], spread)
    while True:
        Generator(watched, "none").next_block(world)


def fail(fault: str) -> None:
    match fault:
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "stuck":
            time.sleep(600)
        case "broken":
            raise ValueError("one rank only")


def main() -> None:
    """Start ranks and watch them for ever, to be killed."""
    told = json.dumps({"folder": sys.argv[1], "fault": "never"})
    with Group.start(2, "tests.parallel_faults:work", told, first=0) as group:
        group.wait()


if __name__ == "__main__":
    main()
