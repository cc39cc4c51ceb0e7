"""What a model under a KV policy will need, by arithmetic from its row: nothing is loaded, nothing allocated.

Knows no torch. The sizes of pages are those of `kvcache/pool.py`, which a test holds to what is really allocated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine import hub
from engine.kvcache import policy
from engine.kvcache.policy import Policy
from engine.models.presets import Preset

STORED_BITS = {"native": None, "fp8": 8, "int8": 8, "int4": 4}
SCALE_BYTES = {"fp8": 4, "int8": 2, "int4": 4}  # int4 keeps a scale and a lowest value, float16 each


class PlanError(ValueError):
    """A budget or a length that cannot be planned for."""


@dataclass(frozen=True)
class Plan:
    """A preset under a policy; sizes in bytes."""

    preset: Preset
    rule: Policy
    element_bytes: int  # of the model's own type: 2 on an accelerator, 4 on a CPU

    @classmethod
    def of(cls, preset: Preset, kv: str = "", *, element_bytes: int = 2) -> Plan:
        """Raises PolicyError."""
        rule = policy.parse(kv, policy.parse(preset.kv)).check(preset.frames_per_block)
        return cls(preset, rule, element_bytes)

    @property
    def page_bytes(self) -> int:
        """One latent frame in all layers, scales included."""
        s, bits = self.preset.sizes, STORED_BITS[self.rule.store]
        numbers = s.tokens_per_frame * s.kv_heads * s.head_dim
        if bits is None:
            return 2 * s.layers * numbers * self.element_bytes
        per_head = 2 if self.rule.store == "fp8" else s.head_dim + s.tokens_per_frame
        return s.layers * (2 * numbers * bits // 8 + per_head * s.kv_heads * SCALE_BYTES[self.rule.store])

    @property
    def block_bytes(self) -> int:
        return self.page_bytes * self.preset.frames_per_block

    @property
    def block_s(self) -> float:
        p = self.preset
        return p.frames_per_block * p.pictures_per_frame / p.fps

    def held_frames(self, seconds: float) -> int:
        """Latent frames kept on the device after so many seconds of video, the block being made included."""
        made = math.ceil(seconds / self.block_s) * self.preset.frames_per_block
        most = self.rule.most_held(self.preset.frames_per_block)
        return made if most is None else min(made, most)

    def world_bytes(self, seconds: float) -> int:
        """Pages of one world after so many seconds."""
        return self.held_frames(seconds) * self.page_bytes

    def host_bytes(self, seconds: float) -> int:
        """Pages that wait in host memory by then."""
        if self.rule.offload == "none" or not self.rule.topk:
            return 0
        made = math.ceil(seconds / self.block_s) * self.preset.frames_per_block
        return (made - self.held_frames(seconds)) * self.page_bytes

    def worlds_in(self, budget_bytes: int, seconds: float) -> int:
        """Worlds of this length whose pages fit into a budget. Raises PlanError if not even a block does."""
        if budget_bytes < self.block_bytes:
            raise PlanError(
                f"a budget of {size(budget_bytes)} holds no block of {self.preset.name}: expected at least "
                f"{size(self.block_bytes)}, and {size(self.world_bytes(seconds))} for one world of {seconds:g} s"
            )
        return budget_bytes // self.world_bytes(seconds)

    def curve(self, seconds: float, points: int) -> list[tuple[float, int]]:
        """How the pages of one world grow: (seconds, bytes) at evenly spaced times."""
        times = [seconds * (i + 1) / points for i in range(points)]
        return [(t, self.world_bytes(t)) for t in times]

    @property
    def needs(self) -> hub.Needs:
        """Weights and activations beside the pages."""
        return hub.needs(self.preset, str(self.rule))


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")
