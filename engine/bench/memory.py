"""`inferix bench memory`: how a world's cache and the process grow with length under each policy."""

from __future__ import annotations

import argparse

from engine.bench.result import Cell, Result, count
from engine.models.presets import LoadOptions
from engine.protocol import PromptChange
from engine.rollout import Request, Rollout, use_threads
from engine.usage import rss_bytes

POLICIES = ("", "full", "full store=int8", "full store=int4", "topk=2 offload=host")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="tiny-world")
    parser.add_argument("--kv", action="append", help="a policy to measure; may be given several times")
    parser.add_argument("--blocks", type=count, default=64, help="length of each world (default: %(default)s)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=count, default=1)


def measure(args: argparse.Namespace) -> Result:
    """One world per policy; bytes at a quarter, half and the whole of its length."""
    use_threads(args.threads)
    rows = [_grow(args, kv) for kv in args.kv or POLICIES]
    columns = (
        "policy",
        "device at 1/4",
        "at 1/2",
        "at the end",
        "host at the end",
        "copied per block",
        "gathered per block",
    )
    notes = (
        f"bytes, after {args.blocks} blocks; copied: written into pages; gathered: brought together because pages do "
        "not lie in one run or not as they are read",
        "resident memory of the process from 1/2 to the end, by policy: "
        + ", ".join(f"{r[0]}: {r[-1]:+d} KiB" for r in rows),
    )
    return Result("memory", columns, tuple(row[:-1] for row in rows), notes, args.model)


def _grow(args: argparse.Namespace, kv: str) -> tuple[Cell, ...]:
    prompts = (PromptChange(0.0, "a sunny beach with a sailing boat"),)
    seconds = 1e4
    request = Request(args.model, prompts, seconds, kv=kv, load=LoadOptions(device=args.device))
    with Rollout.open(request) as rollout:
        at: dict[int, dict[str, int]] = {}
        resident = 0
        for block in range(1, args.blocks + 1):
            before = _traffic(rollout)
            rollout.decode(rollout.generator.next_block(rollout.world))
            at[block] = rollout.kv_bytes()
            resident = rss_bytes() if block == args.blocks // 2 else resident
        copied, gathered = (after - b for after, b in zip(_traffic(rollout), before, strict=True))
        grown = (rss_bytes() - resident) // 1024
        marks = (args.blocks // 4, args.blocks // 2, args.blocks)
        device = [at[max(1, mark)]["device"] for mark in marks]
        policy = str(rollout.world.caches[0].policy)
    return (policy, *device, at[args.blocks]["host"], copied, gathered, grown)


def _traffic(rollout: Rollout) -> tuple[int, int]:
    caches = rollout.world.caches
    return sum(c.copied_bytes for c in caches), sum(c.gathered_bytes for c in caches)
