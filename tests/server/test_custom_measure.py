"""The measure that the documentation shows, in a real engine behind a real server, seen from every side."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from pathlib import Path

import pytest

from server.settings import EngineSettings
from tests.server.harness import ROOT, event, live, settings_with, until
from tests.toy_preset import install


async def test_a_measure_of_ones_own_reaches_profile_trace_stats_and_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    example = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "profiling.md").read_text(), re.S | re.M)[0]
    (tmp_path / "load.py").write_text(example)
    install(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    engine = EngineSettings(
        command=(sys.executable, "-m", "engine"),
        models=("toy",),
        device="cpu",
        extra=(f"--hooks={tmp_path / 'load.py'}", "--max-load=16"),
    )
    async with live(dataclasses.replace(settings_with(tmp_path), engine=engine), ready_s=60) as server:
        id = (await server.create(prompt="a"))["id"]
        async with server.ws(id, "?after=0") as socket:
            await event(socket, "block", 60, block=2)
            while "machine_load" not in (stats := await event(socket, "stats", 60))["metrics"]:
                pass
            assert stats["metrics"]["machine_load"] >= 0
        value = server.core.metrics.registry.get_sample_value
        await until(lambda: value("inferix_world_metric", {"name": "machine_load"}) is not None)
        text = (await server.http.get("/metrics")).text
        assert re.search(r'^inferix_world_metric\{name="machine_load"\} \d', text, re.M)
        profile = (await server.http.get(f"/v1/sessions/{id}/profile?blocks=4")).json()
        assert all(block["metrics"]["machine_load"] >= 0 for block in profile["blocks"][:-1])
        trace = (await server.http.get(f"/v1/sessions/{id}/profile?blocks=4&format=trace")).json()
        assert any(e["ph"] == "C" and e["name"].startswith("machine_load") for e in trace["traceEvents"])
