"""Ranks as processes: started, watched, and ended together.

    with Group.start(4, "engine.parallel.follower:run", argument) as group:     # ranks 1, 2, 3; the caller is rank 0
        mesh = group.join()
        with group.guarded():            # a failed exchange becomes RankLost, which names the rank
            ...

Each started rank sends a beat with the number of exchanges it has begun. One whose process ends is lost at once; one
that is silent for `patience_s` hangs; when all are alive and an exchange still does not come about within twice that,
the rank that has begun the fewest is the one the others wait for. Then all are killed and the rank is named. A rank
whose parent is gone ends itself (rank.py). Ranks on several machines are torchrun's to start and to watch: see
torchrun.py.
"""

from __future__ import annotations

import datetime
import logging
import math
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from torch._C._distributed_c10d import TCPStore

from engine.parallel.mesh import ExchangeFailed, Meeting, Mesh
from engine.parallel.split import SplitError

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
PATIENCE_S = 10.0
READY_S = 600.0  # that loading a model may take
VERDICT_S = 1.0  # between the first sign that a rank is lost and saying which
BEATS = 5  # in the time of patience
BEAT = struct.Struct("<Q")  # exchanges begun
LOST_A_PEER = 75  # exit status of a rank that could not exchange: not the one to blame while there is another


class RankLost(ConnectionError):
    """A rank died or hangs, and with it the group; the message names it."""


@dataclass
class Rank:
    """A started rank, as its parent sees it."""

    number: int
    process: subprocess.Popen[bytes]
    pipe: socket.socket
    silent_s: float = -math.inf  # watched without a beat; until the first one it is loading
    exchanges: int = 0
    open: bool = True  # its pipe


class Group:
    """Some ranks of a group as child processes, and a thread that watches them."""

    def __init__(self, ranks: int, store: TCPStore, patience_s: float, device: str) -> None:
        self.ranks, self.patience_s, self._device = ranks, patience_s, device
        self._store: TCPStore | None = store
        self.members: list[Rank] = []
        self.mesh: Mesh | None = None  # of the caller, where it is rank 0
        self.verdict = ""  # who was lost, and how
        self.port = store.port  # of the rendezvous, on the loopback interface
        self._over = threading.Event()  # every child has ended
        self._closing = False
        self._thread = threading.Thread(target=self._watch, name="ranks", daemon=True)

    @classmethod
    def start(
        cls,
        ranks: int,
        target: str,
        argument: str = "",
        *,
        first: int = 1,
        device: str = "cpu",
        patience_s: float = PATIENCE_S,
    ) -> Self:
        """Start ranks `first` .. `ranks` - 1 in `target` ("module:function", see rank.py).

        With `first` 0 the caller only watches. Call it in a thread that lives as long as the group: ranks die with it.
        """
        if ranks < 1 or not 0 <= first <= 1:
            raise SplitError(f"ranks: expected at least 1, started from 0 or 1 on; got {ranks} from {first} on")
        os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
        group = cls(ranks, TCPStore(HOST, 0, None, True, wait_for_workers=False), patience_s, device)
        try:
            for number in range(first, ranks):
                group.members.append(group._spawn(number, target, argument))
        except OSError:
            group.close()
            raise
        group._thread.start()
        return group

    def join(self) -> Mesh:
        """Become rank 0 of the group, once every rank is ready. Raises RankLost."""
        assert self._store is not None, "join before close"
        say_ready(self._store, 0)
        deadline_s = time.monotonic() + READY_S
        while not self._store.check([f"ready/{rank}" for rank in range(self.ranks)]):
            self.check()
            if time.monotonic() > deadline_s:
                raise RankLost(f"ranks: expected all {self.ranks} to be ready within {READY_S:g} s")
            time.sleep(0.02)
        with self.guarded():
            self.mesh = Mesh.join(Meeting(0, self.ranks, self._store, self._device, 2 * self.patience_s))
        return self.mesh

    def check(self) -> None:
        """Raise RankLost if a rank has been lost."""
        if self.verdict:
            raise RankLost(self.verdict)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Turn the ExchangeFailed of what is inside into a RankLost that says which rank it was."""
        try:
            yield
        except ExchangeFailed as error:
            self._blame_after(str(error))
            raise RankLost(self.verdict) from error

    def wait(self, timeout_s: float | None = None) -> None:
        """Until every started rank has ended by itself. Raises RankLost, or TimeoutError when they have not by then."""
        if not self._over.wait(timeout_s):
            raise TimeoutError(f"ranks: expected them to end within {timeout_s} s")
        self.check()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End what still runs, and give back the port."""
        self._closing = True
        self._kill()
        if self._thread.is_alive():
            self._thread.join()
        for member in self.members:
            member.process.wait()
            member.pipe.close()
        if self.mesh is not None:
            self.mesh.close()
            self.mesh = None
        self._store = None  # and its port

    # ------------------------------------------------------------------------------------------ watching

    def _spawn(self, number: int, target: str, argument: str) -> Rank:
        ours, theirs = socket.socketpair()
        words = {
            "rank": number,
            "ranks": self.ranks,
            "port": self.port,
            "fd": theirs.fileno(),
            "parent": os.getpid(),
            "patience": self.patience_s,
            "device": self._device,
            "target": target,
            "argument": argument,
        }
        command = [sys.executable, "-m", "engine.parallel.rank", *(f"--{name}={word}" for name, word in words.items())]
        try:
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        return Rank(number, process, ours)

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            for member in self.members:
                selector.register(member.pipe, selectors.EVENT_READ, member)
            watched_s, most_s = time.monotonic(), 2 * self.patience_s / BEATS
            while any(member.open for member in self.members):
                ready = selector.select(self.patience_s / BEATS)
                past_s, watched_s = time.monotonic() - watched_s, time.monotonic()
                for member in self.members:
                    member.silent_s += min(past_s, most_s)  # a watcher that was held up itself has not heard silence
                for key, _ in ready:
                    if not self._hear(key.data):
                        selector.unregister(key.fileobj)
                if not self.verdict and not self._closing:
                    self._look()
        for member in self.members:
            member.process.wait()
        if not self.verdict and not self._closing:
            self._look()
        self._over.set()

    def _hear(self, member: Rank) -> bool:
        """Take a member's beats; False when there will be no more."""
        try:
            beats = member.pipe.recv(BEAT.size * 64)
        except ConnectionError:
            beats = b""
        member.open = bool(beats)
        member.silent_s = 0.0
        if len(beats) >= BEAT.size:
            member.exchanges = BEAT.unpack(beats[len(beats) // BEAT.size * BEAT.size - BEAT.size :][: BEAT.size])[0]
        return member.open

    def _look(self) -> None:
        """Judge if a member has ended otherwise than well, or is silent."""
        ended = [m for m in self.members if not m.open and m.process.wait() != 0]
        silent = [m for m in self.members if m.open and m.silent_s > self.patience_s]
        if ended or silent:
            self._judge()

    def _judge(self) -> None:
        """Give the others a moment to show what happened to them, name one, and end them all."""
        deadline_s = time.monotonic() + VERDICT_S
        while time.monotonic() < deadline_s and not any(map(_died, self.members)) and any(map(_gave_up, self.members)):
            time.sleep(0.02)
        if not self.verdict:
            self.verdict = self._name()
            logger.error("%s; the group ends", self.verdict)
        self._kill()

    def _name(self) -> str:
        for member in self.members:
            if _died(member):
                return f"rank {member.number} of {self.ranks} died ({_how(member.process.returncode)})"
        for member in self.members:
            if member.process.poll() is None and member.silent_s > self.patience_s:
                return f"rank {member.number} of {self.ranks} hangs: silent for {member.silent_s:.1f} s"
        begun = {m.number: m.exchanges for m in self.members}
        if self.mesh is not None:
            begun[0] = self.mesh.exchanges
        last = min(begun, key=begun.__getitem__)
        return f"rank {last} of {self.ranks} hangs: it has begun {begun[last]} exchanges, others {max(begun.values())}"

    def _blame_after(self, error: str) -> None:
        """An exchange of rank 0 has failed: wait for the watcher's verdict, or pronounce one."""
        deadline_s = time.monotonic() + 2 * VERDICT_S
        while not self.verdict and time.monotonic() < deadline_s:
            time.sleep(0.02)
        if not self.verdict:
            self.verdict = f"{self._name()} ({error})"
            self._kill()

    def _kill(self) -> None:
        for member in self.members:
            if member.process.poll() is None:
                member.process.kill()


def say_ready(store: TCPStore, rank: int) -> None:
    store.set(f"ready/{rank}", "yes")


def wait_ready(store: TCPStore, ranks: int) -> None:
    """Until all ranks have said so. Raises ExchangeFailed."""
    try:
        store.wait([f"ready/{rank}" for rank in range(ranks)], datetime.timedelta(seconds=READY_S))
    except RuntimeError as error:
        raise ExchangeFailed(f"start: {error}") from error


def _died(member: Rank) -> bool:
    return member.process.poll() not in (None, 0, LOST_A_PEER)


def _gave_up(member: Rank) -> bool:
    return member.process.poll() == LOST_A_PEER


def _how(status: int) -> str:
    return signal.Signals(-status).name if status < 0 else f"exit status {status}"
