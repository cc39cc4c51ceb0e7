"""`inferix train`: the command line of the recipe, the export and the evaluation. Knows no mathematics.

inferix train tiny-world --stage all --hours 6 --out runs/a
inferix train export --run runs/a --out engine/models/tiny/weights
inferix train evaluate --json
"""

import argparse
import json
import logging
import os
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.logging import RichHandler
from rich.table import Table

from engine.models.tiny.model import WEIGHTS
from engine.training.options import ALIASES, PARTS, SIZES, STAGES, EvaluationOptions, TrainingOptions
from engine.weights import WeightsError

if TYPE_CHECKING:
    from engine.training.trials import Finding

NEEDED = ("numba", "cv2")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments behind `inferix train`."""
    commands = parser.add_subparsers(dest="train_command", required=True)
    train = commands.add_parser("tiny-world", help="train the shipped world; goes on where an earlier run stopped")
    train.add_argument("--stage", choices=("all", *STAGES, *ALIASES), default="all")
    train.add_argument("--hours", type=float, default=6.0, help="time for all stages, or for the one asked for")
    train.add_argument("--steps", type=int, help="steps of the stage, instead of what --hours gives")
    train.add_argument("--out", type=Path, required=True, help="folder of the run: clips, checkpoints, log, sheets")
    train.add_argument("--start", type=Path, help="folder of exported weights that a new run begins with")
    train.add_argument("--seed", type=int, default=0)
    train.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    train.add_argument("--preset", choices=tuple(SIZES), default="cpu")
    train.add_argument("--threads", type=int, default=os.cpu_count(), help="CPU threads of the trainer; all cores")
    save = commands.add_parser("export", help="write the newest averaged weights of a run as fp16 safetensors")
    save.add_argument("--run", type=Path, required=True)
    save.add_argument("--out", type=Path, default=WEIGHTS)
    check = commands.add_parser("evaluate", help="measure weights against the exact truth")
    check.add_argument("--weights", type=Path, default=WEIGHTS)
    check.add_argument("--clips", type=int, default=200, help="clips of the attribute test")
    check.add_argument("--minutes", type=float, default=2.0, help="length of the drift test")
    check.add_argument(
        "--only", nargs="*", choices=PARTS, default=[], help="names of the parts to measure; all if none is named"
    )
    check.add_argument("--sheet", type=Path, help="write a PNG of generated pictures above true ones")
    check.add_argument("--json", action="store_true")
    check.add_argument("--threads", type=int, default=1)


def run(args: argparse.Namespace) -> int:
    """Runs what was asked for; 0 if it went well."""
    console = Console(stderr=True)
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[RichHandler(console=console)])
    lacking = [name for name in NEEDED if find_spec(name) is None]
    if lacking:
        console.print(f"error: this needs {' and '.join(lacking)}: pip install 'inferix-live[train]'", markup=False)
        return 2
    try:
        return {"tiny-world": _train, "export": _export, "evaluate": _evaluate}[args.train_command](args, console)
    except WeightsError as error:
        console.print(f"error: {error}", markup=False)
        return 2


def _train(args: argparse.Namespace, console: Console) -> int:
    from engine.training.recipe import run_training  # needs the train extra

    del console
    torch.set_num_threads(args.threads)
    asked = (args.stage, args.hours, args.seed, args.device, args.preset, args.steps, args.start)
    run_training(TrainingOptions(args.out, *asked))
    return 0


def _export(args: argparse.Namespace, console: Console) -> int:
    from engine.training.export import NothingTrained, export  # needs the train extra

    try:
        written = export(args.run, args.out)
    except NothingTrained as error:
        console.print(f"error: {error}", markup=False)
        return 2
    for name, size in written.items():
        console.print(f"{args.out / name}: {size / 1e6:.1f} MB")
    return 0


def _evaluate(args: argparse.Namespace, console: Console) -> int:
    from engine.training.evaluate import evaluate  # needs the train extra

    del console
    torch.set_num_threads(args.threads)
    options = EvaluationOptions(args.weights, args.clips, args.minutes, tuple(args.only), args.sheet)
    findings = list(evaluate(options))
    if args.json:
        print(json.dumps([asdict(finding) for finding in findings]))
    else:
        Console().print(_table(findings))
    return 0


def _table(findings: "list[Finding]") -> Table:
    table = Table("part", "measure", "value", "unit")
    for finding in findings:
        for name, value in finding.values.items():
            table.add_row(finding.part, name, f"{value:.3f}", finding.unit)
    return table
