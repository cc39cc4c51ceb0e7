"""`inferix bench parallel`: one call of attention by strategy, ranks and cache length; measured, predicted, chosen.

Every rank has random keys of its share in a cache of one layer and attends to all of them with its share of a block;
the time of a call is the slowest rank's, the best of several. Predictions are made from what probe.py measures on the
same ranks. With `--link-mbit` all of it runs in a network namespace of its own whose loopback is shaped to that rate
(Linux, as root): machines on a slow link, except that all ranks share the one link and its latency is the loopback's.

Ranks on several machines are torchrun's: `torchrun … -m engine.parallel.bench '{"kv_frames": [3, 24]}'` on each, and
the first prints its rows as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from engine.bench.result import Cell, Result
from engine.kvcache.policy import parse
from engine.kvcache.pool import PageFormat, PagePool
from engine.models import KVGeometry
from engine.parallel.cache import ParallelCache, Spread
from engine.parallel.choose import UNMEASURED, Call, Chooser, Strategy, predict, sent_bytes, strategies
from engine.parallel.launch import Group
from engine.parallel.mesh import Meeting, Mesh
from engine.parallel.probe import measure as measure_machine
from engine.parallel.rank import Member
from engine.parallel.split import SplitError

COLUMNS = ("ranks", "frames", "strategy", "ms", "predicted", "sent KiB", "", "above best")
SHAPED = (
    "ip link set lo up mtu 1500 && tc qdisc add dev lo root tbf rate {mbit}mbit burst 32kb latency 200ms && exec {run}"
)
GROUP_S = 600.0


@dataclass(frozen=True)
class Shape:
    """What is measured."""

    ranks: tuple[int, ...] = (2, 4)
    tokens: int = 96  # of a latent frame
    heads: int = 8
    kv_heads: int = 8
    head_dim: int = 64
    q_frames: int = 3
    kv_frames: tuple[int, ...] = (3, 6, 12, 24, 48)
    repeats: int = 7
    device: str = "cpu"

    @property
    def kv(self) -> KVGeometry:
        return KVGeometry(1, self.kv_heads, self.head_dim, self.tokens)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.device == "cpu" else torch.bfloat16


@dataclass(frozen=True)
class Row:
    """One strategy at one length."""

    ranks: int
    kv_frames: int
    strategy: str
    measured_s: float
    predicted_s: float
    sent_bytes: int
    chosen: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    given = Shape()
    parser.add_argument("--ranks", type=_numbers, default=given.ranks, help="numbers of ranks, as in 1,2,4")
    parser.add_argument("--kv-frames", type=_numbers, default=given.kv_frames, help="lengths of the cache in frames")
    for name in ("tokens", "heads", "kv_heads", "head_dim", "q_frames", "repeats"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(given, name))
    parser.add_argument("--device", choices=("cpu", "cuda"), default=given.device)
    parser.add_argument("--link-mbit", type=int, help="shape the link between ranks to this rate (Linux, as root)")


def measure(args: argparse.Namespace) -> Result:
    """The table. Raises SplitError, OSError or RankLost."""
    shape = Shape(**{name: getattr(args, name) for name in vars(Shape())})
    rows = run(shape) if args.link_mbit is None else _shaped(shape, args.link_mbit)
    link = "loopback" if args.link_mbit is None else f"loopback shaped to {args.link_mbit} Mbit/s"
    name = f"one call of attention over ranks, {link}"
    return Result(name, COLUMNS, tuple(_cells(rows)), tuple(_notes(shape, rows)))


def run(shape: Shape) -> list[Row]:
    """Every strategy on every number of ranks: one group after another."""
    return [row for ranks in shape.ranks for row in _run_group(shape, ranks)]


def work(member: Member) -> None:
    """What a rank does: every call of every strategy; rank 0 writes down the rows."""
    told = json.loads(member.argument)
    shape = _shape_of(told["shape"])
    torch.set_num_threads(1)
    mesh = member.join()
    rows = list(_rows(mesh, shape))
    if mesh.rank == 0:
        Path(told["into"]).write_text(json.dumps([asdict(row) for row in rows]))


def _run_group(shape: Shape, ranks: int) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        into = Path(folder, "rows.json")
        told = json.dumps({"shape": asdict(shape), "into": str(into)})
        with Group.start(ranks, "engine.parallel.bench:work", told, first=0, device=shape.device) as group:
            group.wait(GROUP_S)
        return [Row(**row) for row in json.loads(into.read_text())]


def _rows(mesh: Mesh, shape: Shape) -> Iterator[Row]:
    machine = measure_machine(mesh, shape.heads, shape.head_dim, shape.dtype)
    possible = strategies(mesh.ranks, shape.kv, shape.heads)
    chooser = Chooser(machine, possible)
    for frames in shape.kv_frames:
        call = Call(shape.kv, shape.heads, shape.q_frames, frames, shape.dtype.itemsize)
        chosen = chooser.choose(call).strategy
        with ExitStack() as stack:
            trials = [Trial(mesh, shape, strategy, call, stack) for strategy in possible]
            for _ in range(shape.repeats + 1):  # in turn, so that what disturbs one disturbs all
                for trial in trials:
                    trial.run()
        for trial in trials:
            seconds, predicted = min(trial.taken_s[1:]), predict(trial.strategy, call, machine)
            sent = sent_bytes(trial.strategy, call)
            yield Row(mesh.ranks, frames, str(trial.strategy), seconds, predicted, sent, trial.strategy == chosen)


class Trial:
    """One strategy's call over a cache of random keys, ready to be made again and again."""

    def __init__(self, mesh: Mesh, shape: Shape, strategy: Strategy, call: Call, stack: ExitStack) -> None:
        self.strategy, self._mesh = strategy, mesh
        self.taken_s: list[float] = []
        spread = Spread.over(mesh.grid(strategy.layout), shape.kv, UNMEASURED, strategy.mode)
        pool = PagePool(PageFormat(spread.kv, shape.dtype), call.kv_frames, mesh.device)
        cache = spread.cache(pool, parse("full"), call.q_frames)
        past, mine = call.kv_frames - call.q_frames, len(spread.exchange.split.mine)
        _fill(cache, past)
        self._q, self._k, self._v = (
            torch.randn(1, call.q_frames, mine, n, shape.head_dim, device=mesh.device).to(shape.dtype)
            for n in (shape.heads, shape.kv_heads, shape.kv_heads)
        )
        self._block = stack.enter_context(cache.stage(past, call.q_frames))

    def run(self) -> None:
        """Once; the time it takes is that of the slowest rank."""
        self._mesh.wait_for_all()
        began = time.perf_counter()
        self._block.attend(0, self._q, self._k, self._v, None)
        if self._mesh.device.type == "cuda":
            torch.cuda.synchronize()
        self._mesh.wait_for_all()
        self.taken_s.append(time.perf_counter() - began)


def _fill(cache: ParallelCache, frames: int) -> None:
    """Random keys and values as the past."""
    if not frames:
        return
    form, device = cache.pool.format, cache.pool.device
    with cache.stage(0, frames) as block:
        block.clean = True
        k, v = (torch.randn(1, frames, *form.shape, device=device).to(form.dtype) for _ in range(2))
        block.store(0, k, v)
        block.commit()


def _cells(rows: list[Row]) -> Iterator[tuple[Cell, ...]]:
    for row in rows:
        times = (round(1e3 * row.measured_s, 3), round(1e3 * row.predicted_s, 3))
        above = f"{row.measured_s / _best(rows, row) - 1:.0%}"
        yield row.ranks, row.kv_frames, row.strategy, *times, row.sent_bytes // 1024, "◄" * row.chosen, above


def _best(rows: list[Row], like: Row) -> float:
    return min(r.measured_s for r in rows if (r.ranks, r.kv_frames) == (like.ranks, like.kv_frames))


def _notes(shape: Shape, rows: list[Row]) -> Iterator[str]:
    yield (
        f"frames of keys to {shape.q_frames} of queries, {shape.tokens} tokens each, {shape.heads} heads on "
        f"{shape.kv_heads} of {shape.head_dim}; a call in one layer, the slowest rank's time, best of {shape.repeats}"
    )
    above = [row.measured_s / _best(rows, row) - 1 for row in rows if row.chosen]
    yield f"◄ chosen: in the median {statistics.median(above):.0%} above the fastest measured, {max(above):.0%} at most"
    yield "ranks that share cores, as on one CPU, gain little: what can be compared here is strategy with strategy"


def _shaped(shape: Shape, mbit: int) -> list[Row]:
    """The same in a network namespace with a slow loopback."""
    if mbit < 1:
        raise SplitError(f"link-mbit: expected at least 1, got {mbit}")
    if shutil.which("unshare") is None or shutil.which("tc") is None:
        raise OSError("link-mbit: expected unshare and tc (util-linux, iproute2) on the path")
    script = SHAPED.format(mbit=mbit, run='"$0" -m engine.parallel.bench "$1"')
    command = ["unshare", "-n", "sh", "-c", script, sys.executable, json.dumps(asdict(shape))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"link-mbit: a shaped network namespace cannot be had: {done.stderr.strip()[-300:]}")
    return [Row(**row) for row in json.loads(done.stdout)]


def _shape_of(values: dict[str, Any]) -> Shape:
    tuples = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    return Shape(**(values | tuples))


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected numbers as in 1,2,4; got {text!r}") from None


def main() -> None:
    """Rows as JSON on standard output: inside a shaped namespace, or as one of torchrun's ranks."""
    shape = _shape_of(json.loads(sys.argv[1]))
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        sys.stdout.write(json.dumps([asdict(row) for row in run(shape)]))
        return
    torch.set_num_threads(1)
    with Mesh.join(Meeting.from_torchrun(shape.device)) as mesh:
        rows = [asdict(row) for row in _rows(mesh, shape)]
        if mesh.rank == 0:
            sys.stdout.write(json.dumps(rows))


if __name__ == "__main__":
    main()
