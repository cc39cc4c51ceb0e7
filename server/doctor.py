"""`inferix doctor`: what this machine has and lacks for a live server; every failure names what to do.

Checks what a server process can check. What a model needs of a GPU is the engine's to say (`inferix models check`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import resource
import shutil
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import aioice.ice
import av
import numpy as np
from aioice import stun
from rich.console import Console
from rich.markup import escape

from server import __version__
from server.routes.pages import web_folder

Verdict = Literal["ok", "warn", "fail"]
MARKS = {"ok": "[green]ok  [/green]", "warn": "[yellow]warn[/yellow]", "fail": "[red]FAIL[/red]"}
STUN_S = 3.0


@dataclass(frozen=True)
class Finding:
    what: str
    verdict: Verdict
    detail: str
    fix: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--port", type=int, default=8000, help="the port the server will want")
    parser.add_argument("--record-dir", type=Path, default=Path("recordings"))
    parser.add_argument("--stun", metavar="HOST:PORT", help="also ask this STUN server for our public address")
    parser.add_argument("--json", action="store_true", help="print one JSON object last")


def run(args: argparse.Namespace) -> int:
    findings = examine(args.port, args.record_dir, args.stun)
    console = Console(stderr=args.json)
    for finding in findings:
        text = escape(f"{finding.what}: {finding.detail}")
        console.print(f"{MARKS[finding.verdict]} {text}", highlight=False, soft_wrap=True)
        if finding.fix:
            console.print(f"     → {escape(finding.fix)}", highlight=False, soft_wrap=True)
    failed = any(finding.verdict == "fail" for finding in findings)
    if args.json:
        print(json.dumps({"ok": not failed, "findings": [asdict(finding) for finding in findings]}))
    return 1 if failed else 0


def examine(port: int, record_dir: Path, stun_server: str | None) -> list[Finding]:
    checks: list[Callable[[], Finding]] = [
        _machine,
        lambda: _encoder("H.264", ("h264_nvenc", "libx264")),
        lambda: _encoder("VP8", ("libvpx",)),
        lambda: _encoder("AAC", ("aac",)),
        _engine,
        _page,
        _addresses,
        _port_range,
        lambda: _free_port(port),
        lambda: _disk(record_dir),
        _files,
    ]
    findings = [check() for check in checks]
    if stun_server is not None:
        findings.append(asyncio.run(_stun(stun_server)))
    return findings


def _machine() -> Finding:
    python = f"Python {platform.python_version()}"
    return Finding("machine", "ok", f"Inferix {__version__}, {python}, {platform.machine()}, {os.cpu_count()} cores")


def _encoder(what: str, names: tuple[str, ...]) -> Finding:
    """Presence means nothing: an encoder counts when it has encoded."""
    errors = []
    for name in names:
        try:
            _encode_once(name)
        except Exception as error:  # each encoder library fails in its own way
            errors.append(f"{name}: {error}")
        else:
            return Finding(f"{what} encoder", "ok", name)
    return Finding(
        f"{what} encoder", "fail", "; ".join(errors), "reinstall PyAV from its wheel: pip install --force av"
    )


def _encode_once(name: str) -> None:
    context = av.CodecContext.create(name, "w")
    if isinstance(context, av.AudioCodecContext):
        context.sample_rate, context.layout, context.format = 44_100, "stereo", "fltp"
        sound = av.AudioFrame.from_ndarray(np.zeros((2, 1024), np.float32), format="fltp", layout="stereo")
        sound.sample_rate = 44_100
        context.encode(sound)
        context.encode(None)
        return
    assert isinstance(context, av.VideoCodecContext)
    context.width, context.height, context.pix_fmt, context.time_base = 256, 144, "yuv420p", Fraction(1, 25)
    context.encode(
        av.VideoFrame.from_ndarray(np.zeros((144, 256, 3), np.uint8), format="rgb24").reformat(format="yuv420p")
    )
    context.encode(None)


def _engine() -> Finding:
    missing = [name for name in ("engine", "torch") if find_spec(name) is None]
    if missing:
        return Finding("engine", "fail", f"{', '.join(missing)} cannot be imported", "pip install inferix-live")
    return Finding("engine", "ok", "engine and torch can be imported")


def _page() -> Finding:
    page = web_folder() / "index.html"
    if page.is_file():
        return Finding("page", "ok", str(page.parent))
    return Finding("page", "fail", f"{page} is missing", "install the wheel or run from a checkout")


def _addresses() -> Finding:
    found = aioice.ice.get_host_addresses(True, True)
    if found:
        return Finding("addresses", "ok", ", ".join(found))
    return Finding(
        "addresses", "warn", "none but loopback: only browsers on this machine can watch", "bring a network up"
    )


def _port_range() -> Finding:
    try:
        low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    except OSError:
        return Finding("media ports", "warn", "unknown", "WebRTC needs inbound UDP; see docs/networking.md")
    return Finding("media ports", "ok", f"UDP {low}-{high} (each viewer takes one per address); see docs/networking.md")


def _free_port(port: int) -> Finding:
    if not 0 <= port <= 65535:
        return Finding("port", "fail", f"expected 0 to 65535, got {port}", "choose another --port")
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            return Finding(
                "port", "fail", f"{port}: {error.strerror}", "stop what uses it, or serve with another --port"
            )
    return Finding("port", "ok", f"{port} is free")


def _disk(folder: Path) -> Finding:
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    free_gib = shutil.disk_usage(existing).free / 1024**3
    if not os.access(existing, os.W_OK):
        return Finding("recordings", "warn", f"{existing} cannot be written", "give another --record-dir")
    verdict: Verdict = "ok" if free_gib > 1 else "warn"
    return Finding(
        "recordings", verdict, f"{free_gib:.1f} GiB free in {existing}", "" if verdict == "ok" else "make room"
    )


def _files() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 1024:
        return Finding("open files", "warn", f"limit {soft}", "ulimit -n 4096: every viewer takes a few")
    return Finding("open files", "ok", f"limit {soft}")


async def _stun(server: str) -> Finding:
    """A STUN binding request, as a browser would send it."""
    host, _, port = server.partition(":")
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[stun.Message] = loop.create_future()
    try:
        transport, _ = await loop.create_datagram_endpoint(
            lambda: _StunProtocol(answer), remote_addr=(host, int(port or 3478)), family=socket.AF_INET
        )
        try:
            request = stun.Message(message_method=stun.Method.BINDING, message_class=stun.Class.REQUEST)
            transport.sendto(bytes(request))
            async with asyncio.timeout(STUN_S):
                address = (await answer).attributes["XOR-MAPPED-ADDRESS"]
        finally:
            transport.close()
    except (OSError, ValueError, KeyError, TimeoutError) as error:
        reason = str(error) or f"no answer within {STUN_S:g} s"
        return Finding(
            "stun", "fail", f"{server}: {reason}", "UDP out is blocked, or use another server; see docs/networking.md"
        )
    return Finding("stun", "ok", f"our public address is {address[0]}", f"serve with --advertise-address {address[0]}")


class _StunProtocol(asyncio.DatagramProtocol):
    def __init__(self, answer: asyncio.Future[stun.Message]) -> None:
        self._answer = answer

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        try:
            message = stun.parse_message(data)
        except ValueError:
            return
        if not self._answer.done():
            self._answer.set_result(message)

    def error_received(self, exc: Exception) -> None:
        if not self._answer.done():
            self._answer.set_exception(exc)
