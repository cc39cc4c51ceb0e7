"""`inferix bench serve`: a live server under viewers, from outside: pictures, joins, processor time, steering."""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import websockets

from engine.bench.browser import PROMPTS, BrowserFailed, Photons, photons
from engine.bench.live import Server, Viewer, serving, watch
from engine.bench.result import Cell, Result

UNDERRUN_PICTURES = 3.0  # picture periods without a new one: what an eye takes for a stop

COLUMNS = (
    "viewers",
    "pictures/s each",
    "of those made",
    "blocks in time",
    "underruns each",
    "join ms p50",
    "server % of a core",
    "% per viewer",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="tiny-world")
    parser.add_argument(
        "--viewers", type=_counts, default="0,1,4,16", help="numbers of viewers, rising (default: %(default)s)"
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="measured at each number (default: %(default)s)")
    parser.add_argument(
        "--prompts", type=_at_least_one, default=5, help="prompts sent to measure steering (default: %(default)s)"
    )
    parser.add_argument(
        "--browser", action="store_true", help="also measure from prompt to picture in a headless Chromium"
    )


def _at_least_one(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, got {text!r}")
    return int(text)


def _counts(text: str) -> list[int]:
    """Numbers, each once, rising."""
    words = text.split(",")
    if not all(word.isascii() and word.isdigit() for word in words):
        raise argparse.ArgumentTypeError(f"expected numbers as in 0,1,4, got {text!r}")
    return sorted({int(word) for word in words})


def measure(args: argparse.Namespace) -> Result:
    return asyncio.run(_measure(args))


@dataclass(frozen=True)
class _Level:
    """What was measured with one number of viewers."""

    viewers: int
    pictures: float  # per second and viewer
    made: float  # per second
    in_time: float | None  # share of blocks
    underruns: float | None  # per viewer
    join_ms: float | None
    cpu: float  # % of a core

    def row(self, alone: float) -> tuple[Cell, ...]:
        """`alone`: what the server takes with the first number of viewers."""
        shares = (self.pictures / self.made if self.made and self.viewers else None, self.in_time, self.underruns)
        each = (self.cpu - alone) / self.viewers if self.viewers else None
        return (self.viewers, self.pictures if self.viewers else None, *shares, self.join_ms, self.cpu, each)


async def _measure(args: argparse.Namespace) -> Result:
    counts: list[int] = args.viewers
    async with serving(args.model, "--max-viewers", str(max(counts) + 2), "--pause-after-s", "600") as server:
        began = time.monotonic()
        answer = (await server.create(args.model, seed=1)).raise_for_status().json()
        session, fps = answer["id"], float(answer["fps"])
        first = await watch(server, session)
        first_s = time.monotonic() - began
        await first.close()
        viewers: list[Viewer] = []
        levels = [await _at(server, session, viewers, count, args.seconds, fps) for count in counts]
        left_ms = await _steer(server, session, args.prompts)
        lag = _quantile(await server.metrics(), "inferix_event_loop_lag_seconds", 0.99)
        stats = (await server.show(session))["stats"]
        for viewer in viewers:
            await viewer.close()
        shown = await _seen(server, session, args.prompts) if args.browser else None
    notes = (
        f"server up in {server.up_s:.1f} s, engine ready in {server.ready_s:.1f} s, a picture {first_s:.1f} s later",
        f"the model's rate is {fps:g} pictures a second; real-time factor {stats['real_time_factor']:.2f}, "
        f"{stats['late_blocks']} late blocks, clock stretched {stats['stretched_ms']:.0f} ms in all",
        f"an underrun is {UNDERRUN_PICTURES:g} picture periods or more in which a viewer got no new picture",
        f"from a prompt to the first picture under it leaving the server: {_said(left_ms)}",
        *_notes_of(shown),
        f"event loop late by {lag * 1e3:.1f} ms or less in 99 of 100 looks",
    )
    figures = {"first_picture_s": first_s, "event_loop_lag_p99_s": lag} | _figures("prompt_to_packet_ms", left_ms)
    if isinstance(shown, Photons):
        figures |= _figures("prompt_to_photon_ms", shown.ms)
    return Result("serve", COLUMNS, tuple(level.row(levels[0].cpu) for level in levels), notes, args.model, figures)


async def _at(server: Server, session: str, viewers: list[Viewer], count: int, seconds: float, fps: float) -> _Level:
    joins = []
    while len(viewers) < count:
        viewers.append(await watch(server, session))
        joins.append(viewers[-1].joined_s * 1e3)
    made, blocks, late = await _progress(server, session)
    cpu, began = server.cpu_s(), time.monotonic()
    await asyncio.sleep(seconds)
    spent = time.monotonic() - began
    made_then, blocks_then, late_then = await _progress(server, session)
    blocks, late = blocks_then - blocks, late_then - late
    seen = [[at for at in viewer.arrived_s if began <= at < began + spent] for viewer in viewers]
    return _Level(
        count,
        statistics.mean(len(times) / spent for times in seen) if seen else 0.0,
        (made_then - made) / spent,
        1 - late / blocks if blocks else None,
        statistics.mean(underruns(times, began, began + spent, fps) for times in seen) if seen else None,
        statistics.median(joins) if joins else None,
        (server.cpu_s() - cpu) / spent * 100,
    )


def underruns(arrived_s: Sequence[float], began_s: float, ended_s: float, fps: float) -> int:
    """How often a viewer waited `UNDERRUN_PICTURES` periods or more for the next picture."""
    times = [began_s, *arrived_s, ended_s]
    return sum(b - a >= UNDERRUN_PICTURES / fps for a, b in zip(times, times[1:], strict=False))


async def _progress(server: Server, session: str) -> tuple[float, float, float]:
    """Pictures released, blocks made and blocks that came late, so far."""
    shown, metrics = await server.show(session), await server.metrics()
    pictures = float(shown["media_ms"]) / 1e3 * float(shown["fps"])
    return pictures, _counter(metrics, "inferix_blocks_total"), _counter(metrics, "inferix_deadline_misses_total")


async def _steer(server: Server, session: str, prompts: int) -> list[float]:
    """Latencies in ms, from the message's arrival to the first picture made under it leaving."""
    latencies: list[float] = []
    url = str(server.http.base_url).replace("http", "ws", 1).rstrip("/")
    async with websockets.connect(f"{url}/v1/sessions/{session}/ws") as socket:
        for i in range(prompts):
            await socket.send(json.dumps({"type": "prompt", "id": f"bench-{i}", "text": PROMPTS[i % 2]}))
            latencies.append((await _event(socket, "signal.shown", f"bench-{i}"))["latency_ms"])
    return latencies


async def _seen(server: Server, session: str, prompts: int) -> Photons | BrowserFailed:
    """From a prompt to its picture on a browser's screen, or why that could not be measured."""
    try:
        return await photons(f"{str(server.http.base_url).rstrip('/')}/s/{session}", prompts)
    except BrowserFailed as error:
        return error


def _notes_of(shown: Photons | BrowserFailed | None) -> tuple[str, ...]:
    if shown is None:
        return ()
    if isinstance(shown, BrowserFailed):
        return (f"from a prompt to its picture in a browser: left out, {shown}",)
    return (f"from a prompt to its picture in a browser: {_said(shown.ms)} ({shown.browser})",)


def _said(ms: Sequence[float]) -> str:
    return f"p50 {percentile(ms, 0.5):.0f} ms, p95 {percentile(ms, 0.95):.0f} ms of {len(ms)} prompts"


def _figures(name: str, values: Sequence[float]) -> dict[str, float]:
    return {f"{name}_p50": percentile(values, 0.5), f"{name}_p95": percentile(values, 0.95)}


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that `share` of all do not exceed."""
    ordered = sorted(values)
    return next(v for i, v in enumerate(ordered, start=1) if i >= share * len(ordered))


async def _event(socket: websockets.ClientConnection, kind: str, id: str) -> dict[str, Any]:
    async with asyncio.timeout(30):
        while True:
            event: dict[str, Any] = json.loads(await socket.recv())
            if event["type"] == kind and event.get("id") == id:
                return event


def _counter(metrics: str, name: str) -> float:
    found = re.search(rf"^{name} (\S+)$", metrics, re.M)
    return float(found[1]) if found else 0.0


def _quantile(metrics: str, name: str, q: float) -> float:
    """The upper bound of the histogram bucket that holds the quantile."""
    found = re.findall(rf'^{name}_bucket{{le="([^"]+)"}} (\S+)$', metrics, re.M)
    buckets = [(float(bound), float(count)) for bound, count in found]
    total = buckets[-1][1] if buckets else 0.0
    return next((bound for bound, count in buckets if total and count >= q * total), float("nan"))
