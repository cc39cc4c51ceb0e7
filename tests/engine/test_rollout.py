"""A roll-out is the whole of a world, decoded without a seam, and says what is wrong before it computes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engine.decoder import Pictures
from engine.models import presets
from engine.protocol import ActionState, PromptChange
from engine.rollout import Request, Rollout
from engine.signals import SignalError
from tests.toy_model import TOY


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(presets.PRESETS, "toy", TOY)


def pictures(seconds: float, *prompts: PromptChange, seed: int = 0, kv: str = "") -> Pictures:
    request = Request("toy", (PromptChange(0.0, "a"), *prompts), seconds, seed, kv=kv)
    with Rollout.open(request) as rollout:
        return np.concatenate([part.pictures for part in rollout])


def test_a_roll_out_has_exactly_the_length_asked_for() -> None:
    assert [len(pictures(seconds)) for seconds in (0.01, 1.0, 1.3)] == [1, 8, 10]


def test_the_same_request_gives_the_same_pictures_and_a_longer_one_begins_with_them() -> None:
    short = pictures(2.0, seed=3)
    assert np.array_equal(short, pictures(2.0, seed=3))
    assert np.array_equal(short, pictures(4.0, seed=3)[: len(short)])
    assert not np.array_equal(short, pictures(2.0, seed=4))


def test_a_prompt_changes_the_pictures_from_its_time_on() -> None:
    control, steered = pictures(3.0), pictures(3.0, PromptChange(1.5, "b"))
    assert np.array_equal(control[:12], steered[:12])
    assert not np.array_equal(control[12:16], steered[12:16])


def test_a_held_key_is_renewed_until_it_is_let_go() -> None:
    held = ((1.0, ActionState(keys=("right",))), (4.0, ActionState()))
    with Rollout.open(Request("toy", (PromptChange(0.0, "a"),), 6.0, actions=held)) as rollout:
        blocks = len([*rollout])
        assert blocks == 12 and rollout.world.motion == (6.0,)


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (Request("toy", (PromptChange(0.0, "a"),), 0.0), "more than 0"),
        (Request("toy", (PromptChange(0.0, "a"),), float("nan")), "got nan"),
        (Request("toy", (PromptChange(0.0, "a"), PromptChange(9.0, "b")), 5.0), "before the end at 5 s"),
        (Request("toy", (PromptChange(0.0, "a"),), 1.0, actions=((0.0, ActionState(keys=("fly",))),)), "got 'fly'"),
        (Request("toy", (PromptChange(0.0, "a"),), 1.0, kv="window=2 sink=1"), "at least 3"),
        (Request("toy", (PromptChange(0.0, "a"),), 1.0, steps=0), "1 to 1000, got 0"),
        (Request("unheard-of", (PromptChange(0.0, "a"),), 1.0), "got 'unheard-of'"),
    ],
)
def test_what_cannot_be_made_is_said_before_anything_is_computed(request_: Request, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Rollout.open(request_)


def test_times_out_of_order_are_refused() -> None:
    with pytest.raises(SignalError, match="rising times"):
        pictures(5.0, PromptChange(3.0, "b"), PromptChange(2.0, "c"))


def test_a_world_that_grows_has_room_to_its_end(tmp_path: Path) -> None:
    assert len(pictures(8.0, kv="full")) == 64
