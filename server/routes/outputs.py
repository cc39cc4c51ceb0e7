"""Outputs: pushes and recordings; the recording's file, the journal, the profile."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Literal

import anyio
from fastapi import APIRouter, Body, Header, Query, Request, Response
from fastapi.responses import StreamingResponse

from server.problems import Problem
from server.routes.context import Caller, CoreDep, problems, session_for
from server.schemas import JournalView, OutputRequest, OutputView
from server.views import journal_view

router = APIRouter(prefix="/v1/sessions/{id}", tags=["outputs"])
READ_BYTES = 256 * 1024
Range = Annotated[str | None, Header(max_length=100)]


@router.post("/outputs", status_code=201, responses=problems(404, 409, 503), response_model_exclude_none=True)
async def add(
    id: str, body: Annotated[OutputRequest, Body()], response: Response, core: CoreDep, caller: Caller
) -> OutputView:
    """Push to a media server, or record."""
    session = session_for(core, caller, id, "player")
    session.require_alive()
    output = await session.outputs.add(body)
    session.somebody_came()
    response.headers["Location"] = f"/v1/sessions/{id}/outputs/{output.id}"
    return output.view()


@router.get("/outputs/{output}", responses=problems(404), response_model_exclude_none=True)
async def show(id: str, output: str, core: CoreDep, caller: Caller) -> OutputView:
    return session_for(core, caller, id, "viewer").outputs.get(output).view()


@router.delete("/outputs/{output}", responses=problems(404), response_model_exclude_none=True)
async def remove(id: str, output: str, core: CoreDep, caller: Caller) -> OutputView:
    """Close it properly; the answer comes when that is done."""
    session = session_for(core, caller, id, "player")
    return (await session.outputs.remove(output)).view()


@router.get("/journal", responses=problems(404))
async def journal(id: str, core: CoreDep, caller: Caller) -> JournalView:
    """All that decided this world."""
    return journal_view(session_for(core, caller, id, "viewer"))


@router.get("/profile", responses=problems(404, 409, 503))
async def profile(
    id: str,
    core: CoreDep,
    caller: Caller,
    blocks: Annotated[int, Query(ge=1, le=4096)] = 32,
    format: Literal["json", "trace"] = "json",
) -> Response:
    """Where the time of the last blocks went; as a trace for Perfetto with `format=trace`."""
    session = session_for(core, caller, id, "viewer")
    body = await core.sessions.profiles.ask(session, blocks, trace=format == "trace")
    return Response(body, media_type="application/json")


@router.get(
    "/recording.mp4",
    response_class=Response,
    responses={**problems(404, 416), 200: {"content": {"video/mp4": {}}}, 206: {"content": {"video/mp4": {}}}},
)
async def recording(
    id: str,
    request: Request,
    core: CoreDep,
    caller: Caller,
    output: Annotated[str | None, Query(max_length=64)] = None,
    range: Range = None,
) -> Response:
    """What is written so far, also while it grows."""
    session = session_for(core, caller, id, "viewer")
    recorder = session.outputs.recording(output)
    if recorder is None or not recorder.path.is_file():
        raise Problem(404, "no-recording", "this session has no recording, or nothing is written yet")
    size = recorder.path.stat().st_size
    start, end = _range_of(range, size)
    headers = {
        "Content-Length": str(end - start),
        "Accept-Ranges": "bytes",
        "Content-Disposition": f'attachment; filename="inferix-{id}.mp4"',
        "Cache-Control": "no-store",
    }
    if range is not None:
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
    return StreamingResponse(
        _read(recorder.path, start, end),
        status_code=200 if range is None else 206,
        headers=headers,
        media_type="video/mp4",
    )


def _range_of(header: str | None, size: int) -> tuple[int, int]:
    """The half-open span of one byte range; everything when there is no header."""
    if header is None:
        return 0, size
    match = re.fullmatch(r"bytes=(\d{0,19})-(\d{0,19})", header.strip())
    if match is None or match.groups() == ("", ""):
        raise Problem(416, "bad-range", f"expected bytes=<first>-[<last>], got {header[:100]!r}")
    first, last = match.groups()
    if not first:
        start, end = max(0, size - int(last)), size
    else:
        start, end = int(first), min(size, int(last) + 1) if last else size
    if start >= end:
        raise Problem(416, "bad-range", f"expected a range inside {size} bytes, got {header[:100]!r}")
    return start, end


async def _read(path: Path, start: int, end: int) -> AsyncIterator[bytes]:
    async with await anyio.open_file(path, "rb") as file:
        await file.seek(start)
        while start < end:
            data = await file.read(min(READ_BYTES, end - start))
            if not data:
                return
            start += len(data)
            yield data
