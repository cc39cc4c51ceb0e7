"""One self-contained HTML page of what a profiler has recorded, for people who did not write the engine.

The page itself is `report.html`; this fills in its data. Knows no world: facts are handed in.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import msgspec

from engine.profiler import Profiler
from engine.trace import chrome_trace, snapshot

MEMORY = ("rss_bytes", "device_reserved_bytes", "device_allocated_bytes", "kv_device_bytes", "kv_host_bytes")
"""Gauges drawn as memory over time."""


def write_report(
    path: Path, profiler: Profiler, world: str, what: str, facts: Sequence[tuple[str, str]], block_ms: float, where: str
) -> None:
    """Write the page. `block_ms`: how long a block's video plays; `where`: machine and versions. Raises OSError."""
    recorded = snapshot(profiler, world, blocks=1_000_000)
    memory = {
        name: [((s.at_ns - profiler.started_ns) / 1e9, s.value) for s in profiler.samples.copy() if s.name == name]
        for name in MEMORY
    }
    data = {
        "what": what,
        "facts": list(facts),
        "block_ms": block_ms,
        "where": ". ".join([where, *(f"{name}: {value}" for name, value in profiler.facts.items())]),
        "blocks": recorded["blocks"],
        "memory": memory,
    }
    # the data stands inside a script element: nothing in it may look like that element's end
    text = msgspec.json.encode(data).decode().replace("</", "<\\/")
    page = files("engine").joinpath("report.html").read_text(encoding="utf-8")
    path.write_text(page.replace("/*DATA*/", text), encoding="utf-8")


def write_trace(path: Path, profiler: Profiler) -> None:
    """Write a trace for ui.perfetto.dev or chrome://tracing. Raises OSError."""
    path.write_bytes(msgspec.json.encode(chrome_trace(profiler)))
