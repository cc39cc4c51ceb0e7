"""Ranks that torchrun starts on two machines: two network namespaces and a shaped link between them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHAPE = {"kv_frames": [2, 6], "q_frames": 2, "tokens": 8, "repeats": 2}
LIMIT_S = 240.0


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, check=False)


@pytest.fixture
def machines() -> Iterator[list[tuple[str, str]]]:
    """(namespace, interface) of two machines, 10.77.0.1 and 10.77.0.2, with 200 Mbit/s between them."""
    if shutil.which("ip") is None or shutil.which("tc") is None:
        pytest.skip("there is no ip or no tc here")
    made = [(f"inferix{os.getpid()}{side}", f"v{side}") for side in "ab"]
    (a, va), (b, vb) = made
    steps = [["ip", "netns", "add", a], ["ip", "netns", "add", b]]
    steps.append(["ip", "link", "add", va, "netns", a, "type", "veth", "peer", "name", vb, "netns", b])
    for number, (name, interface) in enumerate(made, 1):
        steps.append(["ip", "-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", interface])
        steps += [["ip", "-n", name, "link", "set", each, "up"] for each in (interface, "lo")]
        shape = ["rate", "200mbit", "burst", "32kb", "latency", "200ms"]
        steps.append(["tc", "-n", name, "qdisc", "add", "dev", interface, "root", "tbf", *shape])
    try:
        for step in steps:
            done = command(*step)
            if done.returncode:
                pytest.skip(f"network namespaces cannot be had here: {' '.join(step)}: {done.stderr.strip()}")
        yield made
    finally:
        for name, _ in made:
            command("ip", "netns", "del", name)


def test_two_machines_exchange_under_torchrun(machines: list[tuple[str, str]]) -> None:
    started = []
    for number, (name, interface) in enumerate(machines):
        launcher = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
        launcher += ["--node-rank", str(number), "--master-addr", "10.77.0.1", "--master-port", "29555"]
        words = [
            "ip",
            "netns",
            "exec",
            name,
            sys.executable,
            *launcher,
            "-m",
            "engine.parallel.bench",
            json.dumps(SHAPE),
        ]
        environ = {**os.environ, "GLOO_SOCKET_IFNAME": interface, "OMP_NUM_THREADS": "1"}
        started.append(
            subprocess.Popen(words, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        )
    try:
        said = [process.communicate(timeout=LIMIT_S)[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    rows = json.loads(said[0])
    assert [process.returncode for process in started] == [0, 0]
    assert {row["strategy"] for row in rows} == {"pass-kv 2", "pass-q 2", "ulysses 2"}
    for frames in SHAPE["kv_frames"]:  # type: ignore[attr-defined]
        assert sum(row["chosen"] for row in rows if row["kv_frames"] == frames) == 1
