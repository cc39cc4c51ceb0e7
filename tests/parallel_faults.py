"""What ranks do in the tests of failure: exchange without end, until one of them does as it was told."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch

from engine.parallel.launch import Group
from engine.parallel.rank import Member

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
