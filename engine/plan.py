"""What a model under a KV policy will need, by arithmetic from its row: nothing is loaded, nothing allocated.

The size of a page is that of `kvcache/pool.py`, which a test holds to what is really allocated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from engine import stages
from engine.kvcache.policy import Policy
from engine.kvcache.pool import PageFormat
from engine.models import KVGeometry
from engine.models.presets import Flow, Preset
from engine.recipe import kv_policy

BF16_BYTES = 2


class PlanError(ValueError):
    """A budget or a length that cannot be planned for."""


@dataclass(frozen=True)
class Needs:
    """What a preset takes, in bytes."""

    disk: int
    network: int  # on the device, in bfloat16
    kv: int  # for one world and all its branches of guidance, with room to compute the past again
    kv_per_second: float  # by which it grows with every second of video; 0 under a policy that forgets
    decoder: int
    text_encoder: int
    working: int  # activations of one block, about

    @property
    def device(self) -> int:
        """With the text encoder freed after each prompt."""
        return self.network + self.kv + self.decoder + self.working


@dataclass(frozen=True)
class Plan:
    """A preset under a policy; sizes in bytes."""

    preset: Preset
    rule: Policy
    element_bytes: int  # of the model's own type: 2 on an accelerator, 4 on a CPU

    @classmethod
    def of(cls, preset: Preset, kv: str = "", *, element_bytes: int = 2) -> Plan:
        """Raises PolicyError."""
        return cls(preset, kv_policy(preset, kv), element_bytes)

    @property
    def page_bytes(self) -> int:
        """One latent frame in all layers, scales included."""
        s, dtype = self.preset.sizes, torch.bfloat16 if self.element_bytes == BF16_BYTES else torch.float32
        kv = KVGeometry(s.layers, s.kv_heads, s.head_dim, s.tokens_per_frame)
        return PageFormat(kv, dtype, self.rule.store).page_bytes

    @property
    def block_bytes(self) -> int:
        return self.page_bytes * self.preset.frames_per_block

    @property
    def block_s(self) -> float:
        p = self.preset
        return p.frames_per_block * p.pictures_per_frame / p.fps

    def made_frames(self, seconds: float) -> int:
        """Latent frames of the blocks that so many seconds of video are made of."""
        p = self.preset
        alone = p.pictures_per_frame if p.first_pictures is None else p.first_pictures
        frames = 1 + math.ceil((seconds * p.fps - alone) / p.pictures_per_frame - 1e-9)
        first = p.first_block_frames or p.frames_per_block
        return first + max(0, math.ceil((frames - first) / p.frames_per_block)) * p.frames_per_block

    def held_frames(self, seconds: float) -> int:
        """Latent frames kept on the device after so many seconds of video, the block being made included."""
        made = self.made_frames(seconds)
        most = self.rule.most_held(self.preset.frames_per_block)
        return made if most is None else min(made, most)

    @property
    def caches(self) -> int:
        """One for each branch of guidance."""
        return 2 if isinstance(self.preset.sampler, Flow) else 1

    def world_bytes(self, seconds: float) -> int:
        """What one world takes of the device after so many seconds, as it is admitted.

        The pages of all its caches, with room to compute the past again.
        """
        held = self.held_frames(seconds)
        return (held + self.preset.recache_room(held)) * self.page_bytes * self.caches

    def host_bytes(self, seconds: float) -> int:
        """Pages that wait in host memory by then."""
        return self._hosted_frames(seconds) * self.page_bytes * self.caches

    def _hosted_frames(self, seconds: float) -> int:
        rule, made = self.rule, self.made_frames(seconds)
        if rule.offload == "none":
            return 0
        if isinstance(self.preset.sampler, stages.Plan):  # a finished block goes there at once
            kept = rule.most_kept(self.preset.frames_per_block)
            return made if kept is None else min(made, kept)
        far = made - self.held_frames(seconds) if rule.topk else 0
        return far if rule.remember is None else min(far, rule.remember)

    def worlds_in(self, budget_bytes: int, seconds: float) -> int:
        """Worlds of this length whose pages fit into a budget. Raises PlanError if not even a block does."""
        if budget_bytes < self.block_bytes:
            raise PlanError(
                f"a budget of {size(budget_bytes)} holds no block of {self.preset.name}: expected at least "
                f"{size(self.block_bytes)}, and {size(self.world_bytes(seconds))} for one world of {seconds:g} s"
            )
        return budget_bytes // self.world_bytes(seconds)

    def curve(self, seconds: float, points: int) -> list[tuple[float, int]]:
        """How one world grows: (seconds, bytes) at evenly spaced times."""
        times = [seconds * (i + 1) / points for i in range(points)]
        return [(t, self.world_bytes(t)) for t in times]

    def needs(self, *, tiny: bool = False) -> Needs:
        """What there is to store, and to hold beside and with the pages; `tiny`: with the tiny decoder's files too."""
        p, s = self.preset, self.preset.sizes
        most = self.rule.most_held(p.frames_per_block)
        first, second = (self.world_bytes(n * self.block_s) for n in (1, 2))
        return Needs(
            disk=sum(f.bytes for f in p.files if tiny or f.part != "tiny_decoder"),
            network=s.parameters * BF16_BYTES,
            kv=first if most is None else self.world_bytes(most * self.block_s),
            kv_per_second=(second - first) / self.block_s if most is None else 0.0,
            decoder=s.decoder_bytes(BF16_BYTES),
            text_encoder=s.text_bytes(BF16_BYTES),
            working=p.frames_per_block * s.tokens_per_frame * (s.ffn_dim + 12 * s.dim) * BF16_BYTES,
        )


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")
