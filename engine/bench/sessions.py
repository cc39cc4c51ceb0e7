"""`inferix bench sessions`: how many worlds this machine runs at their full rate, one started after another."""

from __future__ import annotations

import argparse
import asyncio

from engine.bench.live import Server, serving
from engine.bench.result import Cell, Result, count


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="tiny-world")
    parser.add_argument("--most", type=count, default=8, help="worlds to try at most (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=8.0, help="measured at each number (default: %(default)s)")


def measure(args: argparse.Namespace) -> Result:
    return asyncio.run(_measure(args))


async def _measure(args: argparse.Namespace) -> Result:
    rows: list[tuple[Cell, ...]] = []
    refusal = f"{args.most} worlds were not refused"
    async with serving(args.model, "--max-sessions", str(args.most), "--pause-after-s", "3600") as server:
        ids: list[str] = []
        while len(ids) < args.most:
            answer = await server.create(args.model, seed=len(ids))
            if answer.status_code == 503:
                refusal = f"world {len(ids) + 1} was refused: {answer.json()['detail']}"
                break
            ids.append(answer.raise_for_status().json()["id"])
            rows.append(await _with(server, ids, args.seconds))
    columns = ("worlds", "slowest, of its rate", "late blocks in all", "clock stretched ms in all")
    return Result("sessions", columns, tuple(rows), (refusal,), args.model)


async def _with(server: Server, ids: list[str], seconds: float) -> tuple[Cell, ...]:
    """Let the newcomer settle, then measure all of them."""
    await asyncio.sleep(2.0)
    before = [await server.show(id) for id in ids]
    await asyncio.sleep(seconds)
    after = [await server.show(id) for id in ids]
    rates = [(b["media_ms"] - a["media_ms"]) / 1e3 / seconds for a, b in zip(before, after, strict=True)]
    late, stretched = (
        sum(_stat(b, name) - _stat(a, name) for a, b in zip(before, after, strict=True))
        for name in ("late_blocks", "stretched_ms")
    )
    return len(ids), min(rates), late, stretched


def _stat(session: dict[str, object], name: str) -> float:
    stats = session["stats"]
    return float(stats[name]) if isinstance(stats, dict) else 0.0
