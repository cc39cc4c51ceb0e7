"""`inferix plan`: what a model, a KV policy and a length will need, before anything is loaded."""

from __future__ import annotations

import argparse
from contextlib import suppress

import msgspec
import torch
from rich.console import Console
from rich.table import Table

from engine.commands.refusal import refuse
from engine.config import parse_bytes
from engine.kvcache.policy import PolicyError
from engine.models import presets
from engine.models.presets import UnknownModel
from engine.parallel.choose import grids
from engine.parallel.memory import RankMemory, model_of, per_rank
from engine.parallel.split import Layout, SplitError, teams_for
from engine.plan import Plan, PlanError, size
from engine.recipe import sampler

CURVE_POINTS, CURVE_ROWS = 48, 8
BAD_INPUT = 2
MOST_RANKS = 256
OTHERS = ("", "full", "window=0", "full store=int8", "topk=2 offload=host")
"""Policies shown beside the one asked for, the model's own first."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="tiny-world", help="a name of `inferix models list` (default: %(default)s)")
    parser.add_argument("--kv", default="", help="KV policy, as in 'window=12 sink=3 store=int8'")
    parser.add_argument("--seconds", type=float, default=60.0, help="length of a world (default: %(default)s)")
    parser.add_argument("--budget", type=_bytes, help="bytes for all caches, as in 8g: how many worlds fit?")
    parser.add_argument("--ranks", type=int, default=1, help="ranks to share a world: what does each need?")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="keys are bfloat16 on cuda, float32 on cpu"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the plan; 2 on input that cannot be."""
    console, told = Console(), Console(stderr=args.json)
    try:
        if not 0 < args.seconds <= 1e7:
            raise PlanError(f"seconds: expected more than 0, got {args.seconds:g}")
        preset = presets.find(args.model)
        plan = Plan.of(preset, args.kv, element_bytes=2 if args.device == "cuda" else 4)
        worlds = None if args.budget is None else plan.worlds_in(args.budget, args.seconds)
        ranks = _ranks(plan, args.seconds, args.ranks) if args.ranks != 1 else {}
    except (PlanError, PolicyError, UnknownModel, SplitError) as error:
        refuse(told, "plan", error)
        return BAD_INPUT
    if args.json:
        facts = _facts(plan, args.seconds, worlds) | {"ranks": {str(way): found for way, found in ranks.items()}}
        console.out(msgspec.json.encode(facts).decode(), highlight=False)
    else:
        _print(console, plan, args.seconds, worlds, args.budget)
        _print_ranks(console, ranks)
    return 0


def _facts(plan: Plan, seconds: float, worlds: int | None) -> dict[str, object]:
    needs = plan.needs()
    return {
        "model": plan.preset.name,
        "kv": str(plan.rule),
        "seconds": seconds,
        "page_bytes": plan.page_bytes,
        "block_bytes": plan.block_bytes,
        "world_bytes": plan.world_bytes(seconds),
        "host_bytes": plan.host_bytes(seconds),
        "network_bytes": needs.network,
        "decoder_bytes": needs.decoder,
        "working_bytes": needs.working,
        "worlds": worlds,
        "curve": plan.curve(seconds, CURVE_POINTS),
    }


def _print(console: Console, plan: Plan, seconds: float, worlds: int | None, budget: int | None) -> None:
    needs = plan.needs()
    table = Table(title=f"{plan.preset.name}, {plan.rule}, {seconds:g} s", show_header=False)
    rows = [
        ("a page (one latent frame, all layers)", size(plan.page_bytes)),
        (f"a block ({plan.block_s:.2f} s of video)", size(plan.block_bytes)),
        ("the pages of a world at its end, with room to compute them again", size(plan.world_bytes(seconds))),
        ("its pages in host memory", size(plan.host_bytes(seconds))),
        ("weights of the network", size(needs.network)),
        ("weights of the decoder", size(needs.decoder)),
        ("activations of a block, about", size(needs.working)),
    ]
    if worlds is not None and budget is not None:
        rows.append((f"worlds in a budget of {size(budget)}", str(worlds)))
    for row in rows:
        table.add_row(*row)
    console.print(table)
    console.print(_drawing(plan.curve(seconds, CURVE_POINTS)), highlight=False)
    _compare(console, plan, seconds)


def _ranks(plan: Plan, seconds: float, ranks: int) -> dict[Layout, list[RankMemory]]:
    """Every rank's bytes, by the ways in which so many can share this model's worlds."""
    if not 1 <= ranks <= MOST_RANKS:
        raise PlanError(f"ranks: expected 1 to {MOST_RANKS}, got {ranks}")
    model, dtype = model_of(plan.preset), torch.bfloat16 if plan.element_bytes == 2 else torch.float32
    frames, found = plan.held_frames(seconds), {}
    rule = sampler(plan.preset)
    cfg = teams_for(rule.branches, rule.caches)
    for layout in grids(ranks, model.kv, model.heads, pipeline=model.in_flight > 1, cfg=cfg):
        found[layout] = per_rank(model, layout, plan.rule, dtype, frames, rule.caches)
    return found


def _print_ranks(console: Console, ranks: dict[Layout, list[RankMemory]]) -> None:
    if not ranks:
        return
    columns = ("ranks", "network", "encoders, decoder", "cache", "activations", "together")
    table = Table(*columns, title="the rank that needs most of each")
    for layout, found in ranks.items():
        most = max(found, key=lambda memory: memory.total)
        cells = (most.weights, most.beside, most.cache, most.activations, most.total)
        table.add_row(str(layout), *(size(count) for count in cells))
    console.print(table)


def _drawing(curve: list[tuple[float, int]]) -> str:
    """The growth curve in characters, the largest value beside it."""
    most = max(count for _, count in curve)
    heights = [round(count / most * CURVE_ROWS) for _, count in curve]
    lines = ["".join("█" if height >= row else " " for height in heights) for row in range(CURVE_ROWS, 0, -1)]
    lines[0] += f"  {size(most)}"
    return "\n".join([*lines, "─" * len(curve), f"0 s{curve[-1][0]:>{len(curve) - 5}g} s"])


def _compare(console: Console, plan: Plan, seconds: float) -> None:
    table = Table("policy", "pages at the end", "in host memory", title="the same world under other policies")
    others: dict[str, Plan] = {str(plan.rule): plan}
    for text in OTHERS:
        with suppress(PolicyError):
            other = Plan.of(plan.preset, text, element_bytes=plan.element_bytes)
            others.setdefault(str(other.rule), other)
    for other in others.values():
        table.add_row(str(other.rule), size(other.world_bytes(seconds)), size(other.host_bytes(seconds)))
    console.print(table)


def _bytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected bytes as in 512m or 8g, got {text!r}") from None
