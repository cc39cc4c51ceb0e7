"""What no prompt says is tied to the noise of the block that has nothing else to tell it by."""

from __future__ import annotations

from itertools import combinations, product
from typing import cast

import numpy as np
import torch

from engine.models.tiny.network import CHOOSING, Scenes, TinyNetwork
from engine.models.tiny.planet import SUBJECTS
from engine.training.data import LIVERY, NOW, WEIGHT, Array, painted
from engine.training.forcing import Whole, coupled
from engine.training.options import ALIASES, SHARE, STAGES
from engine.training.recipe import RUNNERS
from engine.training.run import Chance
from engine.training.transformer import (
    OWN_SHAPES,
    TransformerData,
    corner,
    draw_noise,
    drawn,
    few_step_losses,
    openings,
)


def clip(livery: int, subjects: tuple[str, ...]) -> Array:
    """Signals (F, 13): one subject after another, a block each, without a dissolve."""
    signals = np.zeros((2 * len(subjects), 13), np.float32)
    signals[:, WEIGHT], signals[:, LIVERY] = 1, livery
    signals[:, NOW.stop - 1] = np.repeat([SUBJECTS.index(subject) for subject in subjects], 2)
    return signals


def said(noise: torch.Tensor) -> list[int]:
    """The livery that the corner of each block of a clip (F, C, 9, 16) says."""
    corners = noise[:, list(CHOOSING), 0, 0].reshape(-1, 2, len(CHOOSING)).sum(1)
    return [int(first) + 2 * int(second) for first, second in corners > 0]


def test_what_is_painted_is_known_from_the_signals() -> None:
    signals = clip(0, ("none", "car", "birds", "balloon"))
    assert painted(signals)[::2].tolist() == [False, True, False, True]
    signals[2:4, WEIGHT] = 0.0  # still all of the scene before, in which there is nobody
    assert painted(signals)[::2].tolist() == [False, False, False, True]


def test_a_block_opens_a_clip_or_shows_the_first_paint() -> None:
    clips = np.stack([clip(0, ("none", "none", "car", "car")), clip(0, ("boat", "none", "car", "car"))])
    assert openings(clips).tolist() == [[True, False, True, False], [True, False, False, False]]


def test_only_pure_noise_of_an_opening_block_says_the_livery() -> None:
    for livery in range(4):
        signals = np.stack([clip(livery, ("car", "car", "car"))] * 64)
        noise = draw_noise(signals, torch.ones(64, 6), Chance.of(0, "pure", livery))
        heard = [said(one) for one in noise]
        assert {first for first, _, _ in heard} == {livery}
        assert {second for _, second, _ in heard} == {0, 1, 2, 3}
        later = draw_noise(signals, torch.full((64, 6), 0.9), Chance.of(0, "later", livery))
        assert {said(one)[0] for one in later} == {0, 1, 2, 3}


def predicted(network: TinyNetwork, noise: torch.Tensor) -> torch.Tensor:
    at = torch.zeros(1, 2)
    words = network.embed_words(torch.zeros(1, 1, 3, dtype=torch.long))
    cross = network.cross_kv(torch.cat([words, words], -2))
    given = network.recall(Scenes(at, at, at + 1, at, at, at), words, words, cross)
    return network.predict(noise, torch.ones(1, 2), given, Whole())


@torch.no_grad()
def test_a_first_step_knows_of_its_noise_what_that_chooses_and_nothing_else() -> None:
    torch.manual_seed(0)
    network = TinyNetwork(table=4, hidden=8, images=2)
    torch.nn.init.normal_(network.out.weight)
    noise, other = torch.randn(2, 1, 2, 64, 9, 16)
    along = corner()
    choices = 2.0 * torch.tensor(list(product((0, 1), repeat=len(CHOOSING)))) - 1
    answers = [predicted(network, coupled(noise, signs[None], along)) for signs in choices]
    again = [predicted(network, coupled(other, signs[None], along)) for signs in choices]
    assert all(torch.equal(one, same) for one, same in zip(answers, again, strict=True))
    assert all(((one - two).square().amin((0, 2)) > 0).all() for one, two in combinations(answers, 2))


class Noise:
    """Stands for clips: nobody in them, latents of noise."""

    scale = 1

    def __init__(self) -> None:
        self.taken: list[tuple[int, ...]] = []

    def take(self, chance: Chance, frames: int, batch: int) -> tuple[Array, torch.Tensor]:
        self.taken.append((frames, batch))
        return np.stack([clip(0, ("none",) * (frames // 2))] * batch), chance.normal(batch, frames, 64, 9, 16)


def test_few_steps_are_learned_in_beginnings_and_in_whole_clips() -> None:
    torch.manual_seed(0)
    network, data = TinyNetwork(table=4, hidden=8, images=2), Noise()
    first = {drawn(OWN_SHAPES, Chance.of(0, "few-step", step)): step for step in range(9)}
    assert first.keys() == OWN_SHAPES.keys()
    for step in first.values():
        losses = few_step_losses(network, cast(TransformerData, data), Chance.of(0, "few-step", step))
        losses["loss"].backward()  # type: ignore[no-untyped-call]
    assert data.taken == list(first)
    assert network.out.weight.grad is not None and network.out.weight.grad.abs().sum() > 0


def test_every_stage_can_be_run_and_has_its_share_of_the_time() -> None:
    assert tuple(RUNNERS) == STAGES
    assert set(SHARE) == set(STAGES) - {"codec", "clips"} and abs(sum(SHARE.values()) - 1) < 1e-9
    assert all(stage in STAGES for stages in ALIASES.values() for stage in stages)
