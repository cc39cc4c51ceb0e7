"""The shipped weights: they fit in the package, and what is asked for can be seen in the numbers of the picture."""

from __future__ import annotations

import numpy as np
import pytest

from engine.decoder import Pictures
from engine.models.presets import find
from engine.models.tiny.model import WEIGHTS, TinyModel, load_from
from engine.protocol import ActionState, PromptChange
from engine.rollout import Request, Rollout


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return load_from(WEIGHTS)


def show(model: TinyModel, prompt: str, action: ActionState | None = None, seconds: float = 0.5) -> Pictures:
    actions = () if action is None else ((0.0, action),)
    request = Request("tiny-world", (PromptChange(0, prompt),), seconds, actions=actions)
    with Rollout(request, model, find("tiny-world")) as rollout:
        return np.concatenate([part.pictures for part in rollout])


def test_the_weights_are_at_most_25_megabytes() -> None:
    assert 0 < sum(path.stat().st_size for path in WEIGHTS.glob("*.safetensors")) <= 25_000_000


def test_day_is_brighter_than_night(model: TinyModel) -> None:
    assert show(model, "beach by day").mean() > 1.5 * show(model, "beach at night").mean()


def test_snow_covers_the_arctic_and_not_the_forest(model: TinyModel) -> None:
    ground = slice(110, 125)
    assert show(model, "arctic by day")[-1, ground].mean() > 1.3 * show(model, "forest by day")[-1, ground].mean()


def test_panning_right_moves_the_road_to_the_left(model: TinyModel) -> None:
    pan = ActionState(values={"pan": 1.0})
    pictures = show(model, "city by day", pan, 1.5).astype(np.float32)[-8:, 129:140].mean(-1)
    before, after = pictures[0], pictures[1]
    errors = {d: float(np.abs(before[:, 12 + d : 244 + d] - after[:, 12:244]).mean()) for d in range(-8, 9)}
    assert min(errors, key=errors.__getitem__) == 4


def test_the_same_request_makes_the_same_pictures(model: TinyModel) -> None:
    assert np.array_equal(show(model, "a rainy evening in the city"), show(model, "a rainy evening in the city"))


def test_a_dissolve_that_interrupts_another_is_no_faster_than_any_other(model: TinyModel) -> None:
    def largest_step(second: PromptChange, *third: PromptChange) -> float:
        request = Request("tiny-world", (PromptChange(0, "beach by day"), second, *third), 2.8)
        with Rollout(request, model, find("tiny-world")) as rollout:
            pictures = np.concatenate([part.pictures for part in rollout]).astype(np.float32)
        return float(np.abs(np.diff(pictures, axis=0)).mean((1, 2, 3)).max())

    plain = largest_step(PromptChange(0.5, "night", "blend", 2))
    interrupted = largest_step(PromptChange(0.5, "night", "blend", 4), PromptChange(1.0, "a sunny day", "blend", 2))
    assert interrupted < 1.2 * plain
