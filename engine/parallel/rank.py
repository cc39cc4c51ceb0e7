"""A started rank: `python -m engine.parallel.rank`, never called by people.

It runs one function, `target(member)`, which joins the others with `member.join()`. It does not outlive its parent: the
kernel kills it when the parent dies, and a thread that sends beats ends it when nobody hears them any more.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import NoReturn

from torch._C._distributed_c10d import TCPStore

from engine.parallel.launch import BEAT, BEATS, HOST, LOST_A_PEER, say_ready, wait_ready
from engine.parallel.mesh import ExchangeFailed, Meeting, Mesh

logger = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1
ORPHANED = 76


@dataclass
class Member:
    """What a target is given: which rank it is, and the way to the others."""

    rank: int
    ranks: int
    port: int
    device: str
    patience_s: float
    argument: str
    mesh: Mesh | None = field(default=None, init=False)

    def join(self) -> Mesh:
        """Wait until every rank is ready, then meet. Raises ExchangeFailed."""
        store = TCPStore(HOST, self.port, None, False)
        say_ready(store, self.rank)
        wait_ready(store, self.ranks)
        device = f"cuda:{self.rank}" if self.device.startswith("cuda") else self.device
        self.mesh = Mesh.join(Meeting(self.rank, self.ranks, store, device, 2 * self.patience_s))
        return self.mesh


def main() -> NoReturn:
    arguments = _parser().parse_args()
    _die_with(arguments.parent)
    logging.basicConfig(level=logging.INFO, format=f"%(levelname)s rank {arguments.rank} %(name)s: %(message)s")
    member = Member(
        arguments.rank, arguments.ranks, arguments.port, arguments.device, arguments.patience, arguments.argument
    )
    pipe = socket.socket(fileno=arguments.fd)
    threading.Thread(target=_beat, args=(member, pipe), name="beat", daemon=True).start()
    status = _run(member, arguments.target)
    logging.shutdown()
    sys.stdout.flush()
    os._exit(status)  # a long farewell without a beat would be taken for a hang


def _run(member: Member, target: str) -> int:
    module, _, function = target.partition(":")
    try:
        getattr(importlib.import_module(module), function)(member)
        if member.mesh is not None:
            member.mesh.close()
    except ExchangeFailed as error:
        logger.error("%s", error)
        return LOST_A_PEER
    except Exception:  # a process's main function
        logger.exception("this rank ends")
        return 1
    return 0


def _beat(member: Member, pipe: socket.socket) -> None:
    """Say how far this rank is, as long as somebody listens."""
    while True:
        try:
            pipe.send(BEAT.pack(member.mesh.exchanges if member.mesh else 0))
        except OSError:
            os._exit(ORPHANED)
        time.sleep(member.patience_s / BEATS / 2)


def _die_with(parent: int) -> None:
    """Let the kernel kill this process when its parent dies, even while it is stopped (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(ORPHANED)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m engine.parallel.rank", allow_abbrev=False)
    for name in ("rank", "ranks", "port", "fd", "parent"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--patience", type=float, required=True)
    for name in ("target", "argument", "device"):
        parser.add_argument(f"--{name}", required=True)
    return parser


if __name__ == "__main__":
    main()
