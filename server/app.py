"""The application: its parts put together, started and ended in order.

start   engine link and the two loops of `Sessions`
stop    sessions drained (outputs closed, recordings whole), then the engine, then the loops
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from server import __version__
from server.admission import IdempotencyKeys
from server.auth import Access
from server.guards import Answers, BodyLimit, problem_response
from server.link import EngineLink
from server.metrics import Metrics
from server.peer import gather_on
from server.problems import FieldError, Problem
from server.recorder import remove_old
from server.routes import info, outputs, pages, sessions, steer, whep, ws
from server.routes.context import Core, ProblemView
from server.sessions import Sessions
from server.settings import Settings

log = logging.getLogger(__name__)


def create_app(settings: Settings) -> FastAPI:
    """The whole server; raises SettingsError for files that cannot be used."""
    metrics = Metrics()
    link = EngineLink(settings.engine)
    core = Core(
        settings=settings,
        link=link,
        sessions=Sessions(settings, link, metrics),
        access=Access(settings),
        metrics=metrics,
        keys=IdempotencyKeys(),
    )
    app = FastAPI(title="Inferix", version=__version__, lifespan=_lifespan, docs_url=None, redoc_url=None)
    app.state.core = core
    for module in (info, sessions, steer, outputs, whep, ws, pages):
        app.include_router(module.router)
    app.add_exception_handler(Problem, _on_problem)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(Exception, _on_bug)  # type: ignore[arg-type]
    app.add_middleware(BodyLimit, limit_bytes=settings.limits.body_bytes)
    if settings.allow_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.allow_origins),
            allow_methods=["GET", "POST", "DELETE", "OPTIONS"],
            allow_headers=["Authorization", "Content-Type", "Idempotency-Key"],
            expose_headers=["Location", "Link", "Retry-After"],
        )
    app.add_middleware(Answers, metrics=metrics)
    _document_problems(app)
    return app


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    core: Core = app.state.core
    gather_on(loopback=core.settings.listens_on_loopback_only)
    if core.settings.record_dir is not None and core.settings.record_dir.is_dir():
        for path in remove_old(core.settings.record_dir, core.settings.limits.record_keep_days):
            log.info("old recording removed: %s", path.name)
    tasks = [asyncio.create_task(core.sessions.follow_engine()), asyncio.create_task(core.sessions.keep_time())]
    try:
        yield
    finally:
        await core.sessions.drain("the server stops")
        await core.link.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _on_problem(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, Problem)
    return problem_response(error)


async def _on_invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    errors = tuple(FieldError(".".join(str(part) for part in one["loc"]), str(one["msg"])) for one in error.errors())
    detail = "; ".join(f"{one.where}: {one.message}" for one in errors[:3])
    if any(one["type"] == "json_invalid" for one in error.errors()):
        return problem_response(Problem(400, "bad-request", f"the body is not JSON: {detail}"))
    return problem_response(Problem(422, "invalid", detail, errors=errors[:20]))


async def _on_http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    code = HTTPStatus(error.status_code).phrase.lower().replace(" ", "-")
    detail = "there is nothing at this address" if error.status_code == 404 else str(error.detail)
    response = problem_response(Problem(error.status_code, code, detail))
    response.headers.update(error.headers or {})
    return response


async def _on_bug(request: Request, error: Exception) -> Answers:
    """Logged with its trace by the server; the caller learns nothing of our insides. Given outside all middleware."""
    response = problem_response(Problem(500, "internal", "the server made a mistake; its log says more"))
    return Answers(response, request.app.state.core.metrics)


def _document_problems(app: FastAPI) -> None:
    """Give the OpenAPI the one error schema that all operations refer to."""
    build = app.openapi

    def openapi() -> dict[str, object]:
        document = build()
        schema = ProblemView.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        schemas.update(schema.pop("$defs", {}))
        schemas["ProblemView"] = schema
        return document

    app.openapi = openapi  # type: ignore[method-assign]
