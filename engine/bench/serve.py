"""`inferix bench serve`: a live server under viewers, from outside: pictures, joins, processor time, steering."""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import time
from typing import Any

import websockets

from engine.bench.live import Server, Viewer, serving, watch
from engine.bench.result import Cell, Result, spread


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="tiny-world")
    parser.add_argument("--viewers", default="0,1,4,16", help="numbers of viewers, rising (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=10.0, help="measured at each number (default: %(default)s)")
    parser.add_argument(
        "--prompts", type=int, default=5, help="prompts sent to measure steering (default: %(default)s)"
    )


def measure(args: argparse.Namespace) -> Result:
    return asyncio.run(_measure(args))


async def _measure(args: argparse.Namespace) -> Result:
    counts = sorted({int(word) for word in args.viewers.split(",")})
    async with serving(args.model, "--max-viewers", str(max(counts) + 1), "--pause-after-s", "600") as server:
        began = time.monotonic()
        answer = (await server.create(args.model, seed=1)).raise_for_status().json()
        session, fps = answer["id"], float(answer["fps"])
        first = await watch(server, session)
        first_s = time.monotonic() - began
        await first.close()
        viewers: list[Viewer] = []
        rows = [await _at(server, session, viewers, count, args.seconds) for count in counts]
        steering = await _steer(server, session, args.prompts)
        lag = _quantile(await server.metrics(), "inferix_event_loop_lag_seconds", 0.99)
        stats = (await server.show(session))["stats"]
        for viewer in viewers:
            await viewer.close()
    base = rows[0]
    table: list[tuple[Cell, ...]] = [
        (count, pictures, pictures / made if made else None, joins, cpu, (cpu - base[4]) / count if count else None)
        for count, pictures, made, joins, cpu in rows
    ]
    notes = (
        f"server up in {server.up_s:.1f} s, engine ready in {server.ready_s:.1f} s, a picture {first_s:.1f} s later",
        f"the model's rate is {fps:g} pictures a second; real-time factor {stats['real_time_factor']:.2f}, "
        f"{stats['late_blocks']} late blocks, clock stretched {stats['stretched_ms']:.0f} ms in all",
        f"from a prompt to the first picture under it leaving the server: {steering} ms",
        f"event loop late by {lag * 1e3:.1f} ms or less in 99 of 100 looks",
    )
    columns = ("viewers", "pictures/s each", "of those made", "join ms p50", "server % of a core", "% per viewer")
    return Result("serve", columns, tuple(table), notes, args.model)


async def _at(
    server: Server, session: str, viewers: list[Viewer], count: int, seconds: float
) -> tuple[int, float, float, float, float]:
    """(viewers, pictures a second each, made a second, median join in ms, % of a core)"""
    joins = []
    while len(viewers) < count:
        viewers.append(await watch(server, session))
        joins.append(viewers[-1].joined_s * 1e3)
    made, cpu, began = await _pictures(server, session), server.cpu_s(), time.monotonic()
    await asyncio.sleep(seconds)
    spent = time.monotonic() - began
    made = (await _pictures(server, session) - made) / spent
    cpu = (server.cpu_s() - cpu) / spent * 100
    each = [sum(began <= at < began + spent for at in viewer.arrived_s) / spent for viewer in viewers]
    return count, statistics.mean(each) if each else 0.0, made, statistics.median(joins) if joins else 0.0, cpu


async def _pictures(server: Server, session: str) -> float:
    """Pictures released so far."""
    shown = await server.show(session)
    return float(shown["media_ms"]) / 1e3 * float(shown["fps"])


async def _steer(server: Server, session: str, prompts: int) -> str:
    """Latencies in ms, from the message's arrival to the first picture made under it leaving."""
    latencies: list[float] = []
    url = str(server.http.base_url).replace("http", "ws", 1).rstrip("/")
    async with websockets.connect(f"{url}/v1/sessions/{session}/ws") as socket:
        for i in range(prompts):
            text = ("a thunderstorm arrives", "the sky clears")[i % 2]
            await socket.send(json.dumps({"type": "prompt", "id": f"bench-{i}", "text": text}))
            latencies.append((await _event(socket, "signal.shown", f"bench-{i}"))["latency_ms"])
    return spread(latencies)


async def _event(socket: websockets.ClientConnection, kind: str, id: str) -> dict[str, Any]:
    async with asyncio.timeout(30):
        while True:
            event: dict[str, Any] = json.loads(await socket.recv())
            if event["type"] == kind and event.get("id") == id:
                return event


def _quantile(metrics: str, name: str, q: float) -> float:
    """The upper bound of the histogram bucket that holds the quantile."""
    found = re.findall(rf'^{name}_bucket{{le="([^"]+)"}} (\S+)$', metrics, re.M)
    buckets = [(float(bound), float(count)) for bound, count in found]
    total = buckets[-1][1] if buckets else 0.0
    return next((bound for bound, count in buckets if total and count >= q * total), float("nan"))
