"""What a benchmark says: rows of numbers, and what is needed to judge them (machine, versions, model, command)."""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

Cell = str | int | float | bool | None


@dataclass(frozen=True)
class Result:
    """A table, the sentences that read it, and where it was measured."""

    name: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()
    model: str = ""
    figures: dict[str, float] = field(default_factory=dict)  # the notes' numbers, for programs
    machine: dict[str, str] = field(default_factory=lambda: machine())
    command: str = field(default_factory=lambda: shlex.join(["inferix", *sys.argv[1:]]))

    def json(self) -> dict[str, object]:
        return asdict(self)

    def print(self, console: Console) -> None:
        """For people."""
        table = Table(*self.columns, title=self.name + (f", {self.model}" if self.model else ""))
        for row in self.rows:
            table.add_row(*(_said(cell) for cell in row))
        console.print(table)
        for note in self.notes:
            console.print(f"· {note}", highlight=False, markup=False)
        console.print(", ".join(f"{k} {v}" for k, v in self.machine.items()), style="dim", highlight=False)
        console.print(self.command, style="dim", highlight=False, markup=False)


def count(text: str) -> int:
    """How many of something to do, for a parser of arguments: 1 or more."""
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 10**6:
        raise argparse.ArgumentTypeError(f"expected a whole number of 1 or more, got {text!r}")
    return int(text)


def machine() -> dict[str, str]:
    """What the numbers depend on besides the code."""
    facts = {
        "cpu": _cpu(),
        "cores": str(len(os.sched_getaffinity(0))),
        "load": f"{os.getloadavg()[0]:.1f}",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "threads": str(torch.get_num_threads()),
        "inferix": _version("inferix-live"),
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def spread(values: Sequence[float]) -> str:
    """Median and quartiles."""
    if len(values) < 4:
        return f"{statistics.median(values):.3g}"
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.3g} ({low:.3g} to {high:.3g})"


def _said(cell: Cell) -> str:
    return f"{cell:.4g}" if isinstance(cell, float) else "" if cell is None else str(cell)


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"
