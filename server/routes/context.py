"""What every handler needs: the application's parts and who is calling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Request
from pydantic import BaseModel
from starlette.requests import HTTPConnection

from server.admission import IdempotencyKeys
from server.auth import Access, Credentials, Identity, Role
from server.link import EngineLink
from server.metrics import Metrics
from server.problems import Problem
from server.session import Session
from server.sessions import Sessions
from server.settings import Settings

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


@dataclass(frozen=True)
class Core:
    """The application, put together in `app.py`."""

    settings: Settings
    link: EngineLink
    sessions: Sessions
    access: Access
    metrics: Metrics
    keys: IdempotencyKeys


class ProblemField(BaseModel):
    where: str
    message: str


class ProblemView(BaseModel):
    """RFC 9457 problem details."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    errors: list[ProblemField] = []


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The errors an operation documents, beside those every operation has."""
    content = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/ProblemView"}}}
    everywhere = (400, 401, 403, 413, 422, 429)
    return {status: {"description": "Problem", "content": content} for status in sorted({*everywhere, *statuses})}


def core_of(connection: HTTPConnection) -> Core:
    core: Core = connection.app.state.core
    return core


def credentials_of(connection: HTTPConnection) -> Credentials:
    """However the caller carries its token: header, `access` in the address, or the second subprotocol."""
    headers = connection.headers
    scheme, _, token = headers.get("authorization", "").partition(" ")
    bearer: str | None = token.strip() if scheme.lower() == "bearer" else None
    for protocol in headers.get("sec-websocket-protocol", "").split(","):
        if protocol.strip().startswith("bearer."):
            bearer = bearer or protocol.strip().removeprefix("bearer.")
    return Credentials(
        bearer=bearer or connection.query_params.get("access"),
        client_host=connection.client.host if connection.client else "",
        host_header=headers.get("host", ""),
        forwarded="forwarded" in headers or "x-forwarded-for" in headers,
    )


async def get_core(request: Request) -> Core:
    return core_of(request)


async def get_caller(request: Request) -> Identity:
    """Who calls; raises Problem 401, 403 (origin), 415 or 429 before the handler sees anything."""
    access = core_of(request).access
    access.check_origin(request.headers.get("origin"), request.headers.get("host", ""))
    identity = access.identify(credentials_of(request))
    if request.method not in SAFE_METHODS:
        access.check_rate(identity)
        _require_json(request)
    return identity


CoreDep = Annotated[Core, Depends(get_core)]
Caller = Annotated[Identity, Depends(get_caller)]


def session_for(core: Core, caller: Identity, id: str, role: Role) -> Session:
    """The session, if the caller may see it (viewer) or steer it (player: its own); raises Problem."""
    if role == "viewer":
        core.access.require(caller, role, session=id)
        return core.sessions.get(id)
    core.access.require(caller, role, session=id)
    session = core.sessions.get(id)
    core.access.require_owner(caller, id, session.owner)
    return session


def _require_json(request: Request) -> None:
    """A form on a foreign page can post text; it cannot post JSON unasked. WHEP has its own type, checked there."""
    has_body = request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if has_body and kind not in ("application/json", "application/sdp"):
        raise Problem(415, "wrong-media-type", f"expected Content-Type application/json, got {kind[:80]!r}")
