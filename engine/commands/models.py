"""`inferix models list | info | pull | check`: which models there are, what they take, whether their files are right.

Nothing is fetched before disk and device memory have been said.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from engine import hub
from engine.commands.refusal import refuse
from engine.hub import Found, HubUnavailable
from engine.kvcache.policy import PolicyError
from engine.models import presets
from engine.models.files import MissingFiles, Part
from engine.models.presets import Preset, UnknownModel
from engine.plan import Needs, Plan
from engine.weights import WeightsError

BAD_INPUT = 2
PLAIN: dict[str, Any] = {"highlight": False, "markup": False, "soft_wrap": True}  # how paths and hashes are printed
Refusals = (UnknownModel, PolicyError, MissingFiles, WeightsError, HubUnavailable)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    add = actions.add_parser
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--folder", type=Path, help=f"where published files lie (default: {hub.DEFAULT_FOLDER})")
    common.add_argument("--json", action="store_true", help="print one JSON object last, and nothing else on stdout")
    named = argparse.ArgumentParser(add_help=False, parents=[common])
    named.add_argument("name", help="a name of `inferix models list`")
    named.add_argument("--kv", default="", help="KV policy to count memory for, as in 'window=12 sink=3 store=int8'")
    named.add_argument("--tiny-decoder", action="store_true", help="with the tiny decoder in place of the full one")
    add("list", parents=[common], help="the models by name")
    add("info", parents=[named], help="one model: steps, window, files, and the memory it takes")
    add("pull", parents=[named], help="fetch a model's published files")
    check = add("check", parents=[named], help="whether a model's files are there, whole, and the right ones")
    check.add_argument("--no-hash", action="store_true", help="do not read every byte for its SHA-256")


def run(args: argparse.Namespace) -> int:
    """0 when all is well, 1 when a check fails, 2 on input that cannot be."""
    console = Console(stderr=args.json)
    actions: dict[str, Callable[[argparse.Namespace, Console], int]] = {
        "list": _list,
        "info": _info,
        "pull": _pull,
        "check": _check,
    }
    try:
        return actions[args.action](args, console)
    except Refusals as error:
        refuse(console, f"models {args.action}", error)
        return BAD_INPUT


def _list(args: argparse.Namespace, console: Console) -> int:
    table = Table("model", "what it is", "size", "picture", "files", box=None)
    rows = []
    for preset in presets.PRESETS.values():
        there = _is_there(preset, args.folder)
        state = "shipped" if not preset.files else "here" if there else "to pull"
        table.add_row(preset.name, preset.about, _count(preset.sizes.parameters), _picture(preset), state)
        rows.append({"name": preset.name, "family": preset.family, "about": preset.about, "files": state})
    console.print(table)
    return _json(args, {"models": rows})


def _info(args: argparse.Namespace, console: Console) -> int:
    preset = presets.find(args.name)
    needs = Plan.of(preset, args.kv).needs(tiny=args.tiny_decoder)
    _describe(preset, needs, args, console)
    for file in preset.files:
        console.print(
            f"  {file.part:13} {file.repo}/{file.path}  ({_bytes(file.bytes)})", highlight=False, soft_wrap=True
        )
    return _json(args, {"name": preset.name, "kv": args.kv or preset.kv, "needs": _needs_of(needs)})


def _pull(args: argparse.Namespace, console: Console) -> int:
    preset = presets.find(args.name)
    needs = Plan.of(preset, args.kv).needs(tiny=args.tiny_decoder)
    _describe(preset, needs, args, console)
    fetched = hub.pull(preset, args.folder, tiny=args.tiny_decoder)
    console.print(f"{preset.name}: {f'{len(fetched)} parts fetched' if fetched else 'everything is here'}")
    return _json(args, {"name": preset.name, "needs": _needs_of(needs), "fetched": [str(path) for path in fetched]})


def _check(args: argparse.Namespace, console: Console) -> int:
    preset = presets.find(args.name)
    wanted = [f for f in hub.check(preset, args.folder, hashes=not args.no_hash) if _counts(f, args)]
    for found in wanted:
        where = str(found.path) if found.path else f"missing: {found.file.repo}/{found.file.path}"
        said = " is not what was published" if found.differs else ""
        console.print(f"{found.file.part:13} {where} {_bytes(found.bytes)} {found.sha256}{said}", **PLAIN)
    missing = [found.file for found in wanted if not found.path]
    whole = not missing and not any(found.differs for found in wanted)
    if missing:
        console.print(hub.layout(args.folder or hub.DEFAULT_FOLDER, missing), **PLAIN)
    elif whole and preset.files:
        verify(preset, hub.locate(preset, args.folder, tiny=args.tiny_decoder))
        console.print(f"{preset.name}: every name and shape is as expected", **PLAIN)
    files = [
        {
            "part": found.file.part,
            "path": str(found.path or ""),
            "bytes": found.bytes,
            "sha256": found.sha256,
            "published_sha256": found.published_sha256,
        }
        for found in wanted
    ]
    _json(args, {"name": preset.name, "whole": whole, "files": files})
    return 0 if whole else 1


def verify(preset: Preset, files: dict[Part, Path]) -> None:
    """Hold a model's files against the names and shapes its code expects. Raises WeightsError."""
    module = importlib.import_module(preset.loader.partition(":")[0])
    check: Callable[[Preset, dict[Part, Path]], None] | None = getattr(module, "verify", None)
    if check is not None:
        check(preset, files)


def _describe(preset: Preset, needs: Needs, args: argparse.Namespace, console: Console) -> None:
    kv = args.kv or preset.kv
    growing = f" (and {_bytes(needs.kv_per_second)} more with every second)" if needs.kv_per_second else ""
    lines = (
        f"{preset.name}: {preset.about}",
        f"  {_count(preset.sizes.parameters)} parameters, {_picture(preset)}, KV {kv}",
        f"  disk: {_bytes(needs.disk)}",
        f"  device memory: about {_bytes(needs.device)} = network {_bytes(needs.network)} + cache of one world "
        f"{_bytes(needs.kv)}{growing} + decoder {_bytes(needs.decoder)} + working "
        f"{_bytes(needs.working)}; "
        f"{_bytes(needs.text_encoder)} more while the text encoder stays loaded",
        f"  licence: {preset.licence or 'not stated'}",
        *([f"  note: {preset.note}"] if preset.note else []),
    )
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _is_there(preset: Preset, folder: Path | None) -> bool:
    try:
        hub.locate(preset, folder)
    except MissingFiles:
        return False
    return True


def _counts(found: Found, args: argparse.Namespace) -> bool:
    return found.file.part != "tiny_decoder" or bool(args.tiny_decoder)


def _needs_of(needs: Needs) -> dict[str, float]:
    return {f"{name}_bytes": getattr(needs, name) for name in (*needs.__dataclass_fields__, "device")}


def _json(args: argparse.Namespace, value: dict[str, Any]) -> int:
    if args.json:
        Console(soft_wrap=True).out(msgspec.json.encode(value).decode(), highlight=False)
    return 0


def _picture(preset: Preset) -> str:
    return f"{preset.width}x{preset.height} at {preset.fps:g} fps"


def _bytes(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.1f}B" if parameters >= 1e9 else f"{parameters / 1e6:.0f}M"
