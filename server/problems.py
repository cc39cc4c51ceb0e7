"""Every error a caller can see: one exception, answered as RFC 9457 problem details or as a WebSocket `error`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FieldError:
    where: str
    message: str


class Problem(Exception):
    """What went wrong, in words for the caller: `detail` says what was expected and what came."""

    def __init__(
        self,
        status: int,
        code: str,
        detail: str,
        *,
        retry_after_s: float | None = None,
        errors: tuple[FieldError, ...] = (),
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.code = code
        self.detail = detail
        self.retry_after_s = retry_after_s
        self.errors = errors

    def body(self) -> dict[str, object]:
        body: dict[str, object] = {
            "type": f"urn:inferix:problem:{self.code}",
            "title": self.code.replace("-", " ").capitalize(),
            "status": self.status,
            "detail": self.detail,
            "code": self.code,
        }
        if self.errors:
            body["errors"] = [{"where": error.where, "message": error.message} for error in self.errors]
        return body


def session_not_found(session_id: str) -> Problem:
    return Problem(404, "session-not-found", f"there is no session {session_id[:64]!r}")


def session_over(session_id: str, state: str, reason: str) -> Problem:
    return Problem(409, "session-over", f"session {session_id} is {state}" + (f": {reason}" if reason else ""))


def engine_not_ready(why: str) -> Problem:
    return Problem(503, "engine-not-ready", why, retry_after_s=2)
