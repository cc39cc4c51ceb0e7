"""`inferix bench NAME`: measurements of this machine, a page for people and JSON beside it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from engine.bench.live import ServerFailed
from engine.commands.generate import BAD_INPUT, Refusals
from engine.commands.refusal import refuse

BENCHES = {
    "engine": ("engine.bench.engine", "blocks, phases, real-time factor, floor of a step"),
    "memory": ("engine.bench.memory", "growth of the cache under each policy"),
    "profiler": ("engine.bench.profiler", "what the profiler costs"),
    "model": ("engine.bench.model", "a published architecture at a small scale, against its own products"),
    "parallel": ("engine.parallel.bench", "strategies over ranks, predicted and measured"),
    "serve": ("engine.bench.serve", "a live server under viewers"),
    "sessions": ("engine.bench.sessions", "how many worlds at full rate"),
}
"""Name -> module with `add_arguments(parser)` and `measure(args) -> Result`, and what it measures."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    about = "; ".join(f"{name}: {said}" for name, (_, said) in BENCHES.items())
    parser.add_argument("bench", choices=BENCHES, metavar="NAME", help=about)
    parser.add_argument("options", nargs=argparse.REMAINDER, help="options of that benchmark; NAME --help lists them")


def run(args: argparse.Namespace) -> int:
    """Measure and print; 2 on input that cannot be."""
    module, about = BENCHES[args.bench]
    parser = argparse.ArgumentParser(prog=f"inferix bench {args.bench}", description=about)
    _attribute(module, "add_arguments")(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result as JSON")
    options, console = parser.parse_args(args.options), Console()
    try:
        result = _attribute(module, "measure")(options)
        if options.json is not None:
            options.json.write_bytes(msgspec.json.format(msgspec.json.encode(result.json()), indent=1))
    except (*Refusals, ServerFailed, OSError) as error:
        refuse(console, f"bench {args.bench}", error)
        return BAD_INPUT
    result.print(console)
    return 0


def _attribute(module: str, name: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(import_module(module), name)
    return found
