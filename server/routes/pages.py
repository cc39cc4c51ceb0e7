"""The page and its files. Everything is local: no CDN, no inline script."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter, Request, Response
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route
from starlette.staticfiles import StaticFiles

from server.problems import Problem

router = APIRouter(include_in_schema=False)
POLICY = (
    "default-src 'self'; img-src 'self' data: blob:; media-src 'self' blob:; style-src 'self' 'unsafe-inline'; "
    "connect-src 'self' ws: wss:; frame-ancestors 'none'; base-uri 'none'"
)


def web_folder() -> Path:
    """Inside the package where it was installed from a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "web"
    return installed if installed.is_dir() else package.parent / "web"


_files = StaticFiles(directory=web_folder(), check_dir=False)


@router.get("/")
async def page(request: Request) -> Response:
    return await _file("index.html", request)


@router.get("/s/{id}")
async def session_page(id: str, request: Request) -> Response:
    return await _file("index.html", request)


@router.get("/{path:path}")
async def file(path: str, request: Request) -> Response:
    allowed = _methods_of(request)
    if allowed:
        raise HTTPException(405, headers={"Allow": ", ".join(sorted(allowed))})
    return await _file(path, request)


async def _file(path: str, request: Request) -> Response:
    if "\x00" in path:
        raise Problem(404, "not-found", "there is nothing at this address")
    response = await _files.get_response(path, request.scope)
    response.headers["Cache-Control"] = "no-cache"
    response.headers["Content-Security-Policy"] = POLICY
    return response


def _methods_of(request: Request) -> set[str]:
    """Other methods the API has at this address."""
    methods: set[str] = set()
    for route in request.app.routes:
        if isinstance(route, Route) and route.matches(request.scope)[0] is Match.PARTIAL:
            methods |= route.methods or set()
    return methods
