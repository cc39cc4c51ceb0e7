"""What is due for one session when a second has passed: slow viewers, held keys, pauses, limits."""

from __future__ import annotations

import contextlib

from server.problems import Problem
from server.session import NOBODY, Session

STOPPING_S = 10.0  # for the engine to say that a world has ended


def keep_up(session: Session, now_s: float, pause_after_s: float) -> None:
    session.viewers.balance()
    session.helm.renew()
    session.encodings.spare()
    if session.watched:
        session.somebody_came()
    limits, alone_s = session.limits, now_s - session.watched_s
    if session.state == "stopping":
        if now_s - session.changed_s > STOPPING_S:
            session.change("ended", session.reason)
    elif now_s - session.born_s > limits.lifetime_s:
        session.stop(f"its lifetime of {limits.lifetime_s:g} s is over")
    elif min(alone_s, now_s - session.helm.used_s) > limits.idle_s and session.state != "queued":
        session.stop(f"nobody was there for {limits.idle_s:g} s")
    elif alone_s > pause_after_s and session.state == "running" and not session.pause_reason:
        with contextlib.suppress(Problem):
            session.pause(NOBODY)
