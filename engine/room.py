"""Whether one more world fits: into the time there is to compute, and into the memory set aside for caches.

Counts what the worlds at hand may come to need, not what they hold now: none of them is to run out later. Knows no
link, and opens nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from engine.loader import Plan
from engine.scheduler import RETRY_AFTER_S, Admission, Scheduler


@dataclass(frozen=True)
class Room:
    """What all worlds together may take, in bytes of pages; None: whatever they need."""

    scheduler: Scheduler
    device_bytes: int | None
    host_bytes: int | None

    def admit(self, wanted: Plan, others: Collection[Plan]) -> Admission:
        """Whether there is room for a world beside the others, and if not, why."""
        admission = self.scheduler.admit(wanted.kind, wanted.loaded.model.geometry.block_s)
        if not admission.admitted:
            return admission
        held = sum(plan.cache_bytes for plan in others)
        hosted = sum(plan.host_bytes for plan in others)
        reason = _lacks("KV budget", wanted.cache_bytes, held, self.device_bytes) or _lacks(
            "host budget", wanted.host_bytes, hosted, self.host_bytes
        )
        return Admission(not reason, reason, RETRY_AFTER_S if reason else 0.0)


def _lacks(name: str, wanted: int, held: int, budget: int | None) -> str:
    """Why so many bytes do not fit beside those held; "" if they do."""
    if budget is None or held + wanted <= budget:
        return ""
    return f"{name}: {wanted} bytes wanted, {budget - held} of {budget} are left"
