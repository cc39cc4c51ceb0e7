"""Steering over HTTP, for callers without a WebSocket."""

from __future__ import annotations

from fastapi import APIRouter

from engine.protocol import ActionState, PromptChange
from server.routes.context import Caller, CoreDep, problems, session_for
from server.schemas import Accepted, ActionRequest, PromptRequest

router = APIRouter(prefix="/v1/sessions/{id}", tags=["steering"])


@router.post("/prompt", status_code=202, responses=problems(404, 409, 503))
async def prompt(id: str, body: PromptRequest, core: CoreDep, caller: Caller) -> Accepted:
    """A prompt for the next block; what became of it is an event with this id."""
    session = session_for(core, caller, id, "player")
    change = PromptChange(0.0, body.text, body.mode, body.over_blocks)
    return Accepted(id=session.helm.prompt(body.id, change, body.seen_ms))


@router.post("/action", status_code=202, responses=problems(404, 409, 503))
async def action(id: str, body: ActionRequest, core: CoreDep, caller: Caller) -> Accepted:
    """Keys and values held for `hold_ms`: a request has no connection whose end could release them."""
    session = session_for(core, caller, id, "player")
    connection = f"http:{caller.name}"
    accepted = session.helm.action(body.id, connection, ActionState(body.keys, body.values), body.seen_ms)
    session.holds.release_after(connection, body.hold_ms / 1000)
    return Accepted(id=accepted)
