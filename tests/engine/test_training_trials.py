"""Trials against the truth: what nobody told the model is taken as the whole clip shows it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.models import BlockSignals
from engine.models.tiny.decoder import KeyframeDecoder
from engine.models.tiny.model import TinyModel
from engine.models.tiny.network import TinyNetwork
from engine.training.data import LIVERY, draw_clock, walk
from engine.training.lighting import LIVERIES
from engine.training.renderer import STRIKES
from engine.training.trials import Seen, kept_livery, livery_of, rates_of
from engine.training.truth import true_pictures


@pytest.fixture(scope="module")
def model() -> TinyModel:
    torch.manual_seed(0)
    return TinyModel(TinyNetwork(table=4, hidden=8, images=2), KeyframeDecoder((8, 8, 8, 8)))


def shown(model: TinyModel, text: str, liveries: tuple[int, ...]) -> list[Seen]:
    """Blocks that look exactly like the truth in these liveries, one after another."""
    prompt, blocks = model.encode(text, None), list[Seen]()
    motion: tuple[float, ...] = ()
    for block, livery in enumerate(liveries):
        signals = BlockSignals(block, 2 * block, 2, prompt, motion=motion)
        pictures = (true_pictures(signals, livery) * 255 + 0.5).astype(np.uint8)
        blocks.append(Seen(signals, pictures))
        motion = model.condition(signals).motion
    return blocks


def test_the_livery_of_a_world_is_the_one_that_fits_all_of_it(model: TinyModel) -> None:
    for livery in range(len(LIVERIES)):
        blocks = shown(model, "a balloon over the desert by day", (livery,) * 2)
        assert livery_of(blocks) == livery and kept_livery(blocks) == 1
        assert min(rates_of(blocks)) > 50  # nothing is lost but the rounding to 8 bits


def test_a_world_that_changes_its_mind_is_wrong_where_it_did(model: TinyModel) -> None:
    blocks = shown(model, "a car in the city by day", (1, 1, 2))
    assert livery_of(blocks) == 1 and kept_livery(blocks) == pytest.approx(2 / 3)
    first, later = rates_of(blocks)
    assert first > 50 > later


def test_where_nothing_is_painted_there_is_no_livery_to_choose(model: TinyModel) -> None:
    blocks = shown(model, "birds over the forest by day", (3,))
    assert not blocks[0].painted and livery_of(blocks) == 0 and rates_of(blocks * 2)[0] > 50


def test_a_clip_has_one_livery_and_all_are_drawn() -> None:
    clips = [walk(np.random.default_rng(i))[:, LIVERY] for i in range(60)]
    assert all((clip == clip[0]).all() for clip in clips)
    assert {int(clip[0]) for clip in clips} == set(range(len(LIVERIES)))


def test_half_of_all_storms_show_a_strike_and_other_weather_begins_anywhere() -> None:
    def strikes(storm: bool) -> float:
        starts = [draw_clock(np.random.default_rng(i), storm) for i in range(400)]
        moments = np.array(starts)[:, None] + np.arange(1, 9) / 4
        lit = [(s <= moments % 8) & (moments % 8 < s + 0.5) for s in STRIKES]
        return float(np.any(lit, (0, 2)).mean())

    assert strikes(storm=True) > strikes(storm=False) + 0.15
