"""Sessions: made, listed, looked at, ended, shared."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Header, Request, Response

from server.admission import limits_of, spec_of
from server.problems import Problem
from server.routes.context import Caller, Core, CoreDep, problems, session_for
from server.schemas import LinkRequest, LinkView, RecordingRequest, SessionRequest, SessionsView, SessionView
from server.session import Session
from server.views import session_view

router = APIRouter(prefix="/v1/sessions", tags=["sessions"])
Key = Annotated[str | None, Header(alias="Idempotency-Key", min_length=1, max_length=64)]


@router.post("", status_code=201, responses=problems(404, 409, 503))
async def create(
    body: SessionRequest, request: Request, response: Response, core: CoreDep, caller: Caller, key: Key = None
) -> SessionView:
    """Start a world."""
    core.access.require(caller, "player")
    if key is None:
        session = await _create(body, core, caller)
    else:
        raw = await request.body()
        earlier = core.keys.claim(caller.name, key, raw)
        session = await _create_once(body, core, caller, key) if earlier is None else core.sessions.get(await earlier)
    response.headers["Location"] = f"/v1/sessions/{session.id}"
    return _view(core, session)


@router.get("", responses=problems())
async def index(core: CoreDep, caller: Caller) -> SessionsView:
    """All sessions, newest first."""
    visible = [session for session in core.sessions if caller.session in (None, session.id)]
    return SessionsView(sessions=tuple(_view(core, session) for session in reversed(visible)))


@router.get("/{id}", responses=problems(404))
async def show(id: str, core: CoreDep, caller: Caller) -> SessionView:
    return _view(core, session_for(core, caller, id, "viewer"))


@router.delete("/{id}", responses=problems(404))
async def stop(id: str, core: CoreDep, caller: Caller) -> SessionView:
    """End a world; a second time nothing more happens."""
    session = session_for(core, caller, id, "player")
    core.sessions.stop(session, "stopped")
    return _view(core, session)


@router.post("/{id}/pause", responses=problems(404, 409, 503))
async def pause(id: str, core: CoreDep, caller: Caller) -> SessionView:
    session = session_for(core, caller, id, "player")
    session.pause()
    return _view(core, session)


@router.post("/{id}/resume", responses=problems(404, 409, 503))
async def resume(id: str, core: CoreDep, caller: Caller) -> SessionView:
    session = session_for(core, caller, id, "player")
    session.resume()
    return _view(core, session)


@router.post("/{id}/links", status_code=201, responses=problems(404))
async def share(id: str, body: LinkRequest, core: CoreDep, caller: Caller) -> LinkView:
    """A signed address under which somebody without a token may watch (or play) this one session for a while."""
    session_for(core, caller, id, "player")
    access, expires_s = core.access.sign_link(id, body.role, body.ttl_s)
    return LinkView(
        url=f"/s/{id}?access={access}",
        access=access,
        role=body.role,
        expires_at=datetime.fromtimestamp(int(expires_s), UTC),
    )


async def _create(body: SessionRequest, core: Core, caller: Caller) -> Session:
    outputs = [*body.outputs, *([RecordingRequest(kind="recording")] if body.record else [])]
    spec = spec_of(body, core.link.hello)
    limits = limits_of(body, core.settings.limits)
    return await core.sessions.create(caller, spec, limits, outputs, queue=body.queue)


async def _create_once(body: SessionRequest, core: Core, caller: Caller, key: str) -> Session:
    try:
        session = await _create(body, core, caller)
    except BaseException as error:
        problem = error if isinstance(error, Problem) else Problem(503, "stopping", "the request was given up")
        core.keys.failed(caller.name, key, problem)
        raise
    core.keys.made(caller.name, key, session.id)
    return session


def _view(core: Core, session: Session) -> SessionView:
    return session_view(session, core.settings.limits.viewers)
