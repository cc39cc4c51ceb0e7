"""`inferix bench parallel`: ways for ranks to share a world, measured, predicted and chosen, in one table.

    by strategy, ranks and cache length: a call of attention                 (bench_calls.py)
    by layout and ranks, with `--preset`: a step of blocks in flight         (bench_stages.py)

Predictions are made from what probe.py measures on the same ranks. With `--link-mbit` all of it runs in a network
namespace of its own whose loopback is shaped to that rate (Linux, as root): machines on a slow link, except that all
ranks share the one link and its latency is the loopback's.

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
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from engine.bench import magi
from engine.bench.result import Cell, Result
from engine.parallel.bench_calls import Calls, Row
from engine.parallel.bench_stages import Stages
from engine.parallel.launch import Group
from engine.parallel.mesh import Meeting, Mesh
from engine.parallel.rank import Member
from engine.parallel.split import SplitError

COLUMNS = ("ranks", "frames", "strategy", "ms", "predicted", "sent KiB", "", "above best")
SHAPED = (
    "ip link set lo up mtu 1500 && tc qdisc add dev lo root tbf rate {mbit}mbit burst 32kb latency 200ms && exec {run}"
)
GROUP_S = 600.0

Trials = Calls | Stages


def add_arguments(parser: argparse.ArgumentParser) -> None:
    given, staggered = Calls(), Stages()
    parser.add_argument("--ranks", type=_numbers, default=given.ranks, help="numbers of ranks, as in 1,2,4")
    parser.add_argument("--kv-frames", type=_numbers, default=given.kv_frames, help="lengths of the cache in frames")
    for name in ("tokens", "heads", "kv_heads", "head_dim", "q_frames", "repeats"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(given, name))
    parser.add_argument("--device", choices=("cpu", "cuda"), default=given.device)
    parser.add_argument("--preset", help="a row of the MAGI-1 family: steps of its blocks in flight, not calls")
    parser.add_argument("--scale", choices=magi.SCALES, default=staggered.scale, help="of it (default: %(default)s)")
    parser.add_argument("--steps", type=int, help="of its blocks (default: the preset's)")
    parser.add_argument("--link-mbit", type=int, help="shape the link between ranks to this rate (Linux, as root)")


def measure(args: argparse.Namespace) -> Result:
    """The table. Raises UnknownModel, RecipeError, SplitError, OSError or RankLost."""
    given: Trials = Stages() if args.preset else Calls()
    trials = replace(given, **{name: getattr(args, name) for name in vars(given)})
    note = trials.note
    rows = run(trials) if args.link_mbit is None else _shaped(trials, args.link_mbit)
    link = "loopback" if args.link_mbit is None else f"loopback shaped to {args.link_mbit} Mbit/s"
    name = f"one {'step of blocks in flight' if args.preset else 'call of attention'} over ranks, {link}"
    return Result(name, COLUMNS, tuple(_cells(rows)), tuple(_notes(note, rows)))


def run(trials: Trials) -> list[Row]:
    """Every way on every number of ranks: one group after another."""
    return [row for ranks in trials.ranks for row in _run_group(trials, ranks)]


def work(member: Member) -> None:
    """What a rank does: every trial; rank 0 writes down the rows."""
    told = json.loads(member.argument)
    trials = _told(told["trials"])
    torch.set_num_threads(1)
    rows = list(trials.rows(mesh := member.join()))
    if mesh.rank == 0:
        Path(told["into"]).write_text(json.dumps([asdict(row) for row in rows]))


def _run_group(trials: Trials, ranks: int) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        into = Path(folder, "rows.json")
        told = json.dumps({"trials": asdict(trials), "into": str(into)})
        with Group.start(ranks, "engine.parallel.bench:work", told, first=0, device=trials.device) as group:
            group.wait(GROUP_S)
        return [Row(**row) for row in json.loads(into.read_text())]


def _cells(rows: list[Row]) -> Iterator[tuple[Cell, ...]]:
    for row in rows:
        times = (round(1e3 * row.measured_s, 3), round(1e3 * row.predicted_s, 3))
        above = f"{row.measured_s / _best(rows, row) - 1:.0%}"
        yield row.ranks, row.kv_frames, row.strategy, *times, row.sent_bytes // 1024, "◄" * row.chosen, above


def _best(rows: list[Row], like: Row) -> float:
    return min(r.measured_s for r in rows if (r.ranks, r.kv_frames) == (like.ranks, like.kv_frames))


def _notes(what: str, rows: list[Row]) -> Iterator[str]:
    yield what
    above = [row.measured_s / _best(rows, row) - 1 for row in rows if row.chosen]
    yield f"◄ chosen: in the median {statistics.median(above):.0%} above the fastest measured, {max(above):.0%} at most"
    yield "ranks that share cores, as on one CPU, gain little: what can be compared here is strategy with strategy"


def _shaped(trials: Trials, mbit: int) -> list[Row]:
    """The same in a network namespace with a slow loopback."""
    if mbit < 1:
        raise SplitError(f"link-mbit: expected at least 1, got {mbit}")
    if shutil.which("unshare") is None or shutil.which("tc") is None:
        raise OSError("link-mbit: expected unshare and tc (util-linux, iproute2) on the path")
    script = SHAPED.format(mbit=mbit, run='"$0" -m engine.parallel.bench "$1"')
    command = ["unshare", "-n", "sh", "-c", script, sys.executable, json.dumps(asdict(trials))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"link-mbit: a shaped network namespace cannot be had: {done.stderr.strip()[-300:]}")
    return [Row(**row) for row in json.loads(done.stdout)]


def _told(values: dict[str, Any]) -> Trials:
    values |= {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    return Stages(**values) if "preset" in values else Calls(**values)


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected numbers as in 1,2,4; got {text!r}") from None


def main() -> None:
    """Rows as JSON on standard output: inside a shaped namespace, or as one of torchrun's ranks."""
    trials = _told(json.loads(sys.argv[1]))
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        sys.stdout.write(json.dumps([asdict(row) for row in run(trials)]))
        return
    torch.set_num_threads(1)
    with Mesh.join(Meeting.from_torchrun(trials.device)) as mesh:
        rows = [asdict(row) for row in trials.rows(mesh)]
        if mesh.rank == 0:
            sys.stdout.write(json.dumps(rows))


if __name__ == "__main__":
    main()
