"""A MAGI-1 world of random weights through the real server and the real engine: streamed, steered, closed."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

from tests import small_magi
from tests.server.harness import ENGINE, ROOT, event, live, settings_with


async def test_a_staggered_world_streams_and_is_steered_like_any_other(tmp_path: Path) -> None:
    small_magi.install(tmp_path)
    places = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]"
    start = f"{places}; from engine.__main__ import main; sys.exit(main())"
    engine = dataclasses.replace(
        ENGINE, command=(sys.executable, "-c", start), models=("small-magi",), deadline_s=60.0, stop_s=20.0
    )
    settings = dataclasses.replace(settings_with(tmp_path), engine=engine)
    async with live(settings, ready_s=120.0) as server:
        session = await server.create(model="small-magi", prompt="a boat")
        async with server.ws(session["id"]) as socket:
            first = await event(socket, "block", 60.0)
            assert first["block"] == 0 and first["frames"] == 8
            await socket.send(json.dumps({"type": "prompt", "id": "p1", "text": "a storm"}))
            applied = await event(socket, "signal.applied", 60.0, id="p1")
            assert applied["block"] >= small_magi.QUICK.window
            await event(socket, "block", 60.0, block=applied["block"])
        assert (await server.show(session["id"]))["state"] in ("running", "starting")
        assert (await server.http.delete(f"/v1/sessions/{session['id']}")).status_code in (200, 202, 204)
