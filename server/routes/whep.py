"""WHEP: an offer comes in, an answer goes out, packets follow."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from server.problems import Problem
from server.routes.context import Caller, CoreDep, problems, session_for
from server.schemas import IceServer, PeerView
from server.settings import IceSettings

router = APIRouter(prefix="/v1/sessions/{id}", tags=["watching"])
SDP = "application/sdp"
OFFER = {"requestBody": {"required": True, "content": {SDP: {"schema": {"type": "string"}}}}}


@router.post(
    "/whep",
    status_code=201,
    response_class=Response,
    openapi_extra=OFFER,
    responses={**problems(404, 406, 409, 415, 503), 201: {"content": {SDP: {"schema": {"type": "string"}}}}},
)
async def offer(id: str, request: Request, core: CoreDep, caller: Caller) -> Response:
    """Watch: the body is an SDP offer, the answer has all candidates."""
    session = session_for(core, caller, id, "viewer")
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != SDP:
        raise Problem(415, "wrong-media-type", f"expected Content-Type {SDP}, got {kind[:80]!r}")
    text = (await request.body()).decode(errors="replace")
    session.require_alive()
    peer, answer = await session.viewers.join(text)
    session.somebody_came()
    headers = {"Location": f"/v1/sessions/{id}/whep/{peer.id}"}
    response = Response(answer, 201, headers, SDP)
    for server in ice_servers(core.settings.ice):
        response.headers.append("Link", _link(server))
    return response


@router.options("/whep", status_code=204, response_class=Response, responses=problems())
async def options(id: str, core: CoreDep, caller: Caller) -> Response:
    response = Response(status_code=204, headers={"Accept-Post": SDP, "Allow": "OPTIONS, POST"})
    for server in ice_servers(core.settings.ice):
        response.headers.append("Link", _link(server))
    return response


@router.delete("/whep/{peer}", responses=problems(404), response_class=Response)
async def leave(id: str, peer: str, core: CoreDep, caller: Caller) -> Response:
    session_for(core, caller, id, "viewer").viewers.leave(peer)
    return Response(status_code=200)


@router.get("/peers/{peer}", responses=problems(404))
async def show(id: str, peer: str, core: CoreDep, caller: Caller) -> PeerView:
    """How one viewer is doing, and the number that ties its RTP clock to ours."""
    return session_for(core, caller, id, "viewer").viewers.get(peer).view()


def ice_servers(ice: IceSettings) -> tuple[IceServer, ...]:
    servers = [IceServer(urls=ice.stun_url)] if ice.stun_url else []
    if ice.turn_url:
        servers.append(IceServer(urls=ice.turn_url, username=ice.turn_user, credential=ice.turn_password))
    return tuple(servers)


def _link(server: IceServer) -> str:
    """RFC 9725's way to tell a player its ICE servers."""
    link = f'<{server.urls}>; rel="ice-server"'
    if server.username:
        link += f'; username="{server.username}"; credential="{server.credential}"; credential-type="password"'
    return link
