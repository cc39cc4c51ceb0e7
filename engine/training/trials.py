"""Worlds rolled out by the engine's own generator and decoder, held against what they should have shown.

What a world's boat, car, walker or balloon is painted in is for the world to choose and to keep: the truth of a trial
is painted in the livery that fits the whole of it best, so a world that changes its mind half way is wrong.
"""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from engine.decoder import Pictures, decode
from engine.models import BlockSignals
from engine.models.presets import find
from engine.models.tiny.model import TinyModel, TinyPrompt
from engine.protocol import ActionState, PromptChange
from engine.rollout import Request, Rollout
from engine.training.data import Array
from engine.training.lighting import LIVERIES, PAINTED
from engine.training.truth import psnr, true_pictures

BLOCK_S: Final = 0.5


@dataclass(frozen=True)
class Finding:
    part: str
    unit: str
    values: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Seen:
    """One block as it was shown: its signals and its pictures (8, 144, 256, 3) uint8."""

    signals: BlockSignals
    pictures: Pictures

    def true(self, livery: int) -> Array:
        """What it should have been, float in [0, 1]."""
        return true_pictures(self.signals, livery)

    def psnr(self, livery: int) -> float:
        """Mean over the block's pictures, dB."""
        return float(psnr(self.pictures, self.true(livery)).mean())

    def fit(self) -> Array:
        """The error of the block's last picture in every livery (len(LIVERIES),)."""
        found = [true_pictures(self.signals, livery, last=True) for livery in range(len(LIVERIES))]
        return np.array([np.square(self.pictures[-1:] / np.float32(255) - true).mean() for true in found], np.float32)

    @property
    def painted(self) -> bool:
        """Whether anything in a livery may be in the picture."""
        prompts = (self.signals.prompt, self.signals.before)
        return any(isinstance(p, TinyPrompt) and p.caption.value("subject") in PAINTED for p in prompts)


@dataclass(frozen=True)
class Trial:
    """A prompt track and what is done in it, for a model with so many steps and such a memory."""

    model: TinyModel
    prompts: tuple[PromptChange, ...]
    seconds: float
    actions: tuple[tuple[float, ActionState], ...] = ()
    seed: int = 0
    kv: str = ""
    steps: int | None = None

    def blocks(self) -> Iterator[Seen]:
        request = Request("tiny-world", self.prompts, self.seconds, self.seed, self.actions, self.kv, self.steps)
        with Rollout(request, self.model, find("tiny-world")) as rollout:
            world = rollout.world
            while world.media_s() < self.seconds - 1e-6:
                due = [state for at_s, state in self.actions if at_s <= world.media_s() + 1e-6]
                if due:
                    world.act(due[-1])
                signals, _ = world.signals()
                yield Seen(signals, decode(world, rollout.generator.next_block(world)))


def livery_of(blocks: list[Seen]) -> int:
    """The livery that fits all of these blocks best."""
    painted = [block for block in blocks if block.painted]
    return int(np.sum([block.fit() for block in painted], 0).argmin()) if painted else 0


def rates_of(blocks: list[Seen]) -> tuple[float, float]:
    """Mean PSNR of the first block and of all later ones, dB."""
    livery = livery_of(blocks)
    rates = [block.psnr(livery) for block in blocks]
    return rates[0], float(np.mean(rates[1:]))


def kept_livery(blocks: list[Seen]) -> float:
    """Share of the blocks that on their own say the same livery as all of them together."""
    whole = livery_of(blocks)
    return float(np.mean([livery_of([block]) == whole for block in blocks]))


def memory_alone(model: TinyModel) -> TinyModel:
    """The same model with a transformer that adds nothing."""
    network = deepcopy(model.network)
    network.out.weight.data.zero_()
    network.out.bias.data.zero_()
    return TinyModel(network, model.decoder.network)
