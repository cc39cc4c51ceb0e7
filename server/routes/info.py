"""Who am I, what can the engine do, is everything well."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter, Response
from pydantic import BaseModel

from server import __version__
from server.problems import engine_not_ready
from server.routes.context import Caller, CoreDep, problems
from server.routes.whep import ice_servers
from server.schemas import MeView, ModelsView
from server.views import models_view

router = APIRouter(tags=["server"])
TEXT: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}


class Health(BaseModel):
    status: Literal["ok"] = "ok"
    version: str = __version__


@router.get("/v1/me", responses=problems())
async def me(core: CoreDep, caller: Caller) -> MeView:
    return MeView(
        role=caller.role,
        name=caller.name,
        tokens=core.access.has_tokens,
        session=caller.session,
        sessions=len(core.sessions.living(caller.name)),
        max_sessions=core.settings.limits.sessions_per_token,
        ice_servers=ice_servers(core.settings.ice),
    )


@router.get("/v1/models", responses=problems())
async def models(core: CoreDep, caller: Caller) -> ModelsView:
    return models_view(core.link)


@router.get("/healthz")
async def healthz() -> Health:
    """The server lives."""
    return Health()


@router.get("/readyz", responses=problems(503))
async def readyz(core: CoreDep) -> Health:
    """The engine can take worlds."""
    if core.sessions.draining:
        raise engine_not_ready("the server is stopping")
    if not core.link.ready:
        reason = f": {core.link.reason}" if core.link.reason else ""
        raise engine_not_ready(f"the engine is {core.link.state}{reason}")
    return Health()


@router.get("/metrics", response_class=Response, responses={**problems(), **TEXT})
async def metrics(core: CoreDep, caller: Caller) -> Response:
    core.access.require(caller, "viewer")
    return Response(core.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")
