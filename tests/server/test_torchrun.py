"""A server that torchrun has started with its ranks: it serves on rank 0, and ends with the first rank that is lost."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from server.serve import make_server
from server.settings import Settings, SettingsError, add_arguments, from_arguments
from tests.engine_process import ROOT
from tests.server.harness import until
from tests.toy_preset import install

LIMIT_S = 200.0  # of each step; generous, with a machine that does other things


def settings_of(*words: str, **environment: str) -> Settings:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return from_arguments(parser.parse_args(words), environment)


def test_torchrun_says_how_many_ranks_there_are_and_which_this_is() -> None:
    settings = settings_of("--torchrun", RANK="3", WORLD_SIZE="4")
    assert settings.rank == 3
    argv = settings.engine.argv(0)
    assert argv[argv.index("--ranks") + 1] == "4" and argv[argv.index("--torchrun") + 1] == "on"
    with pytest.raises(SettingsError, match="expected to be started by torchrun, with RANK and WORLD_SIZE"):
        settings_of("--torchrun")


async def test_a_server_under_torchrun_ends_with_its_engine(settings: Settings) -> None:
    server = make_server(
        dataclasses.replace(settings, engine=dataclasses.replace(settings.engine, torchrun=True)),
    )
    task = asyncio.create_task(server.serve())
    await until(lambda: server._core.link.ready)
    assert server._core.link.pid is not None and not server.abandoned
    os.kill(server._core.link.pid, signal.SIGKILL)
    async with asyncio.timeout(LIMIT_S):
        await task
    assert server.abandoned


@pytest.mark.timeout(600)
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="processes are found through /proc")
def test_two_launchers_serve_one_world_and_end_when_a_rank_is_killed(tmp_path: Path) -> None:
    install(tmp_path)
    port, master = free_port(), free_port()
    with ExitStack() as stack:
        first, second = (stack.enter_context(launched(tmp_path, node, master, port)) for node in (0, 1))
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20) as http:
            eventually(lambda: answer(http, "/readyz") == 200, first, second)
            made = http.post("/v1/sessions", json={"model": "toy", "prompt": "a"})
            assert made.status_code == 201, made.text
            at = f"/v1/sessions/{made.json()['id']}"
            eventually(lambda: http.get(at).json()["block"] >= 2, first, second)
            counters = http.get(f"{at}/profile").json()["counters"]
        assert counters["sent_bytes: latents"] > 0  # the pictures of what both have made, both have decoded
        (follower,) = children(second.pid)
        assert b"engine" in Path(f"/proc/{follower}/cmdline").read_bytes().split(b"\0")
        started = [*descendants(first.pid), *descendants(second.pid)]
        os.kill(follower, signal.SIGKILL)
        assert second.wait(LIMIT_S) != 0
        assert first.wait(LIMIT_S) != 0
        eventually(lambda: not any(map(alive, started)))
    for number in (port, master):
        with socket.create_server(("127.0.0.1", number)):
            pass


@contextmanager
def launched(folder: Path, node: int, master: int, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """What one machine of two starts, both of them this one."""
    words = ["--nnodes", "2", "--nproc-per-node", "1", "--node-rank", str(node)]
    words += ["--master-addr", "127.0.0.1", "--master-port", str(master)]
    words += ["-m", "server", "serve", "--torchrun", "--model", "toy", "--device", "cpu", "--port", str(port)]
    environ = {k: v for k, v in os.environ.items() if not k.startswith("INFERIX_")}
    environ |= {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with (folder / f"node{node}.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *words], cwd=ROOT, env=environ, stdout=log, stderr=log
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(LIMIT_S)


def eventually(true: Callable[[], bool], *needed: subprocess.Popen[bytes]) -> None:
    """Wait for something, as long as these processes live."""
    deadline_s = time.monotonic() + LIMIT_S
    while not true():
        assert time.monotonic() < deadline_s
        assert all(process.poll() is None for process in needed)
        time.sleep(0.1)


def answer(http: httpx.Client, path: str) -> int:
    try:
        return http.get(path).status_code
    except httpx.TransportError:
        return 0


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def descendants(pid: int) -> list[int]:
    found = children(pid)
    return found + [each for child in found for each in descendants(child)]


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits for its parent to look does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
        return port
