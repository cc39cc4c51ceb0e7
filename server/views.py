"""How sessions look from outside: one function from the server's record to its JSON."""

from __future__ import annotations

import msgspec

from server.link import EngineLink
from server.schemas import EngineView, JournalView, ModelsView, ModelView, SessionView, StatsView, Urls
from server.session import Session


def session_view(session: Session, max_viewers: int) -> SessionView:
    opened, line = session.opened, session.line
    card = opened.card if opened else None
    recording = session.outputs.recording()
    current = line.steering.current
    return SessionView(
        id=session.id,
        model=line.spec.model,
        state=session.state,
        reason=session.reason,
        owner=session.owner,
        created_at=session.created_at,
        seed=line.spec.seed,
        width=opened.width if opened else line.spec.width,
        height=opened.height if opened else line.spec.height,
        fps=opened.fps if opened else line.spec.fps,
        lead_ms=opened.lead_ms if opened else line.spec.lead_ms,
        frames_per_block=card.frames_per_block if card else None,
        signals=card.signals if card else (),
        action_keys=card.action_keys if card else (),
        action_values=card.action_values if card else (),
        suggestions=card.suggestions if card else (),
        digest=card.digest if card else "",
        prompt=current.change.text if current else "",
        prompts=line.steering.prompt_views(),
        action=line.steering.action_view(),
        media_ms=line.media_ms,
        block=line.block,
        viewers=len(session.viewers),
        max_viewers=max_viewers,
        queue_position=session.queue_position,
        restarts=len(line.restarts_ms),
        outputs=session.outputs.views(),
        recording=recording.view() if recording else None,
        limits=session.limits,
        stats=_stats(session),
        seq=session.history.last_seq,
        urls=_urls(session.id),
    )


def journal_view(session: Session) -> JournalView:
    line = session.line
    return JournalView(
        model=line.spec.model,
        digest=session.opened.card.digest if session.opened else "",
        spec=msgspec.to_builtins(line.spec),
        signals=tuple(line.steering.journal),
        truncated=line.steering.journal_truncated,
        restarts=tuple(line.restarts_ms),
    )


def models_view(link: EngineLink) -> ModelsView:
    hello = link.hello
    return ModelsView(
        engine=EngineView(
            state=link.state,
            version=hello.version if hello else "",
            device=hello.device if hello else "",
            encoders=hello.encoders if hello else {},
            restarts=link.restarts,
            reason=link.reason,
        ),
        models=tuple(
            ModelView.model_validate(msgspec.structs.asdict(card)) for card in (hello.models if hello else ())
        ),
    )


def _stats(session: Session) -> StatsView | None:
    stats = session.line.stats
    return StatsView.model_validate(msgspec.structs.asdict(stats)) if stats else None


def _urls(id: str) -> Urls:
    base = f"/v1/sessions/{id}"
    return Urls(
        self=base,
        ws=f"{base}/ws",
        whep=f"{base}/whep",
        page=f"/s/{id}",
        recording=f"{base}/recording.mp4",
        journal=f"{base}/journal",
        profile=f"{base}/profile",
    )
