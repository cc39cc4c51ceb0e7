"""The command `inferix`: a table of sub-commands, each imported when it is called: `serve` never loads torch."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from server import __version__


@dataclass(frozen=True)
class Command:
    """Where to find `arguments(parser) -> None` and `run(args) -> int`, as `module:name`."""

    help: str
    arguments: str
    run: str


BAD_INPUT = 2

COMMANDS: dict[str, Command] = {
    "serve": Command("run the live server", "server.settings:add_arguments", "server.serve:run"),
    "generate": Command(
        "make a video from prompts", "engine.commands.generate:add_arguments", "engine.commands.generate:run"
    ),
    "plan": Command("say what a model will need", "engine.commands.plan:add_arguments", "engine.commands.plan:run"),
    "models": Command(
        "list, pull and check models", "engine.commands.models:add_arguments", "engine.commands.models:run"
    ),
    "eval": Command("measure the drift of videos", "engine.lvbench.cli:add_arguments", "engine.lvbench.cli:run"),
    "train": Command("train the shipped world", "engine.training.cli:add_arguments", "engine.training.cli:run"),
    "bench": Command("measure this machine", "engine.commands.bench:add_arguments", "engine.commands.bench:run"),
    "doctor": Command("check what this machine has and lacks", "server.doctor:add_arguments", "server.doctor:run"),
}


def main(argv: list[str] | None = None) -> int:
    """Run a command; its exit code. A file that cannot be opened, made or written is said in a line, with code 2."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="inferix", description="Live worlds, block by block.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        sub = commands.add_parser(name, help=command.help, description=command.help)
        if name in argv[:1]:  # only the one that is called is imported
            _load(command.arguments)(sub)
    args = parser.parse_args(argv)
    try:
        code: int = _load(COMMANDS[args.command].run)(args)
    except OSError as error:
        if error.filename is None:
            raise
        said = f"inferix {args.command}: {os.fsdecode(error.filename)}: {error.strerror}\n"
        sys.stderr.write(said.encode(errors="replace").decode())
        return BAD_INPUT
    return code


def _load(where: str) -> Callable[..., Any]:
    module, _, name = where.partition(":")
    loaded: Callable[..., Any] = getattr(import_module(module), name)
    return loaded
