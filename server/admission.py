"""From a request to a spec, whether one more is too many, and the memory of requests already answered. No engine."""

from __future__ import annotations

import asyncio
import collections
import hashlib
import secrets
from dataclasses import dataclass

from engine.protocol import Hello, ModelCard, PromptChange, WorldSpec
from server.auth import Identity
from server.problems import Problem, engine_not_ready
from server.schemas import LimitsView, SessionRequest
from server.settings import Limits

KEYS_KEPT = 1000
KEY_LIVES_S = 3600.0


def spec_of(request: SessionRequest, hello: Hello | None) -> WorldSpec:
    """The world asked for; raises Problem when the engine has no such model or no prompt can be found."""
    card = _card_of(request.model, hello)
    changes = [PromptChange(one.at, one.text, one.mode, one.over_blocks) for one in request.prompts]
    if request.prompt is not None:
        changes.append(PromptChange(0.0, request.prompt))
    changes.sort(key=lambda change: change.at_s)
    if not changes or changes[0].at_s > 0:
        changes.insert(0, PromptChange(0.0, _first_suggestion(card)))
    elif len(changes) > 1 and changes[1].at_s <= 0:
        raise Problem(422, "invalid", "prompts: expected one prompt at 0 (`prompt` is one), got more")
    return WorldSpec(
        model=card.name,
        prompts=tuple(changes),
        seed=secrets.randbelow(2**31) if request.seed is None else request.seed,
        width=request.width,
        height=request.height,
        fps=request.fps,
        steps=request.steps,
        kv=request.kv,
        lead_ms=request.lead_ms,
    )


def limits_of(request: SessionRequest, limits: Limits) -> LimitsView:
    """A request may lower the server's limits, never raise them."""
    asked = request.limits
    return LimitsView(
        lifetime_s=min(limits.lifetime_s, asked.lifetime_s or limits.lifetime_s),
        idle_s=min(limits.idle_s, asked.idle_s or limits.idle_s),
    )


def require_room(living: int, own: int, owner: Identity, limits: Limits) -> None:
    """Raises Problem when one more session beside those `living`, `own` of them the owner's, is too many."""
    if living >= limits.sessions:
        raise Problem(503, "capacity", f"the server's {limits.sessions} sessions are taken", retry_after_s=30)
    if own >= limits.sessions_per_token and owner.role != "admin":
        detail = f"you have {limits.sessions_per_token} sessions already"
        raise Problem(429, "too-many-sessions", detail, retry_after_s=30)


def _card_of(name: str | None, hello: Hello | None) -> ModelCard:
    if hello is None:
        raise engine_not_ready("the engine is starting and has not said what it can do")
    names = [card.name for card in hello.models]
    if name is None and len(names) == 1:
        return hello.models[0]
    if name is None:
        raise Problem(422, "model-unknown", f"model: expected one of {', '.join(names) or 'none'}, got nothing")
    for card in hello.models:
        if card.name == name:
            return card
    raise Problem(422, "model-unknown", f"model: expected one of {', '.join(names) or 'none'}, got {name!r}")


def _first_suggestion(card: ModelCard) -> str:
    return card.suggestions[0] if card.suggestions else "a world"


@dataclass
class _Answered:
    digest: bytes
    session: asyncio.Future[str]
    born_s: float


class IdempotencyKeys:
    """The same key and body: the same session. Bounded in number and time."""

    def __init__(self) -> None:
        self._answers: collections.OrderedDict[tuple[str, str], _Answered] = collections.OrderedDict()

    def claim(self, caller: str, key: str, body: bytes) -> asyncio.Future[str] | None:
        """The session's id of an earlier request with this key (perhaps still to come); None: it is ours to make.

        Raises Problem 422 when the key was used for something else.
        """
        loop = asyncio.get_running_loop()
        self._expire(loop.time())
        digest = hashlib.sha256(body).digest()
        known = self._answers.get((caller, key))
        if known is not None and known.digest != digest:
            raise Problem(422, "idempotency-key-reused", f"the key {key!r} was used for another request")
        if known is not None:
            return known.session
        self._answers[caller, key] = _Answered(digest, loop.create_future(), loop.time())
        return None

    def made(self, caller: str, key: str, session_id: str) -> None:
        self._answers[caller, key].session.set_result(session_id)

    def failed(self, caller: str, key: str, problem: BaseException) -> None:
        """Nothing was made: the next request with this key tries again."""
        future = self._answers.pop((caller, key)).session
        future.set_exception(problem)
        future.exception()  # nobody may be waiting

    def _expire(self, now_s: float) -> None:
        while self._answers:
            key, oldest = next(iter(self._answers.items()))
            old = now_s - oldest.born_s > KEY_LIVES_S or len(self._answers) >= KEYS_KEPT
            if not old or not oldest.session.done():
                return
            del self._answers[key]
