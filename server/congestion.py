"""When a viewer gets more than its network carries, and what to do: integers and thresholds, no I/O.

A receiver's estimate (REMB) alone says little: it only ever sees what we send. Loss together with an estimate below
what we send is the sign. When most viewers show it, the world's bitrate goes down for all; a single slow viewer gets
keyframes only.
"""

from __future__ import annotations

from dataclasses import dataclass

LOSS = 0.05
REMB_SHARE = 0.85
POOR_REPORTS = 3
KEYFRAMES_ONLY_S = 10.0
LOWER_EVERY_S, LOWER_BY = 3.0, 0.75
RAISE_AFTER_S, RAISE_EVERY_S, RAISE_BY = 10.0, 3.0, 1.15
FLOOR_BPS = 100_000


@dataclass(frozen=True)
class Report:
    """What is known of one viewer's path over the last second or so."""

    fraction_lost: float
    remb_bps: int | None
    sent_bps: float


class Path:
    """One viewer: poor after several poor reports in a row, good again after one good one."""

    def __init__(self) -> None:
        self._poor_reports = 0
        self.restricted_until_s = 0.0

    @property
    def poor(self) -> bool:
        return self._poor_reports >= POOR_REPORTS

    def feed(self, report: Report) -> None:
        below = report.remb_bps is None or report.remb_bps < REMB_SHARE * report.sent_bps
        lossy = report.fraction_lost > LOSS
        self._poor_reports = self._poor_reports + 1 if lossy and below and report.sent_bps > 0 else 0


class Rate:
    """One encoding: what bitrate to ask for, given how many of its viewers have a poor path."""

    def __init__(self) -> None:
        self._base_bps: float | None = None  # before we lowered anything
        self._now_bps = 0.0
        self._changed_s = float("-inf")
        self._poor_s = float("-inf")

    def next(self, poor: int, viewers: int, sent_bps: float, now_s: float) -> int | None:
        """The bitrate to ask for now, None to leave it."""
        if poor * 2 > viewers:
            self._poor_s = now_s
            if now_s - self._changed_s >= LOWER_EVERY_S and sent_bps > 0:
                self._base_bps = self._base_bps or max(sent_bps, FLOOR_BPS)
                return self._set(max(FLOOR_BPS, LOWER_BY * (self._now_bps or sent_bps)), now_s)
            return None
        if self._base_bps is None or now_s - self._poor_s < RAISE_AFTER_S or now_s - self._changed_s < RAISE_EVERY_S:
            return None
        raised_bps = RAISE_BY * self._now_bps
        if raised_bps < self._base_bps:
            return self._set(raised_bps, now_s)
        base_bps, self._base_bps = self._base_bps, None
        bps = self._set(base_bps, now_s)
        self._now_bps = 0.0
        return bps

    def _set(self, bps: float, now_s: float) -> int:
        self._now_bps, self._changed_s = bps, now_s
        return round(bps)
