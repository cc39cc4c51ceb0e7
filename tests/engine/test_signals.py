"""Signals have a value at every block, and asking for it changes nothing."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.models import Prompt
from engine.protocol import MAX_PROMPT_CHARS, ActionState, PromptChange
from engine.signals import MOST_WAIT, ActionTrack, PromptTrack, PromptValue, SignalError, check_action, check_prompt


def track(*changes: tuple[int, PromptChange]) -> PromptTrack:
    made = PromptTrack(lambda text, before: Prompt(f"{before.text if before else ''}{text}", torch.zeros(1, 1, 1)))
    for block, change in changes:
        made.change(block, change)
    return made


def test_a_cut_takes_effect_at_its_block() -> None:
    prompts = track((0, PromptChange(0, "a", "cut")), (3, PromptChange(0, "b", "cut")))
    values = [prompts.at(block) for block in range(5)]
    assert [v.prompt.text for v in values] == ["a", "a", "a", "ab", "ab"]
    assert [v.began for v in values] == [True, False, False, True, False]
    assert all(v.before is None and v.weight == 1 for v in values)


def test_a_blend_rises_over_its_blocks() -> None:
    prompts = track((0, PromptChange(0, "a", "cut")), (2, PromptChange(0, "b", "blend", 4)))
    weights = [(v.weight, v.before and v.before.text) for v in map(prompts.at, range(1, 7))]
    assert weights == [(1.0, None), (0.25, "a"), (0.5, "a"), (0.75, "a"), (1.0, "a"), (1.0, None)]


def test_a_blend_that_is_replaced_before_it_is_seen_is_no_scene_to_come_from() -> None:
    blends = [(3, PromptChange(0, text, "blend", 4)) for text in ("b", "c", "d")]
    prompts = track((0, PromptChange(0, "a", "cut")), *blends)
    value = prompts.at(3)
    assert (value.prompt.text, value.before and value.before.text, value.weight) == ("abcd", "a", 0.25)
    after_a_cut = track((0, PromptChange(0, "a", "cut")), (3, PromptChange(0, "b", "cut")), blends[1]).at(3)
    assert (after_a_cut.prompt.text, after_a_cut.before and after_a_cut.before.text) == ("abc", "ab")
    prompts.forget_before(4)
    assert len(prompts.switches) == 2 and prompts.at(4).before is value.before


def test_a_blend_that_interrupts_another_waits_until_it_has_hurried_to_its_end() -> None:
    prompts = track((0, PromptChange(0, "a", "cut")), (2, PromptChange(0, "b", "blend", 8)))
    assert prompts.change(4, PromptChange(0, "c", "blend", 2)) == 6
    seen = [(v.prompt.text, v.before and v.before.text, v.weight_start, v.weight) for v in map(prompts.at, range(3, 8))]
    assert seen == [
        ("ab", "a", 0.125, 0.25),
        ("ab", "a", 0.25, 0.625),
        ("ab", "a", 0.625, 1.0),
        ("abc", "ab", 0.0, 0.5),
        ("abc", "ab", 0.5, 1.0),
    ]
    usual = track((0, PromptChange(0, "a", "cut")), (2, PromptChange(0, "b", "blend", 2)))
    assert usual.change(3, PromptChange(0, "c", "blend", 2)) == 4 and usual.at(3).weight == 1.0


def test_of_prompts_that_wait_for_a_blend_the_newest_is_seen_and_knows_the_others() -> None:
    prompts = track((0, PromptChange(0, "a", "cut")), (2, PromptChange(0, "b", "blend", 2)))
    assert [prompts.change(3, PromptChange(0, text, "blend", 2)) for text in "cd"] == [4, 4]
    value = prompts.at(4)
    assert (value.prompt.text, value.before and value.before.text) == ("abcd", "ab")
    assert prompts.change(3, PromptChange(0, "e", "cut")) == 3, "a cut waits for nothing"
    value = prompts.at(3)
    assert (value.prompt.text, value.before) == ("abcde", None) and not prompts.at(4).began


BLENDS = st.integers(1, 5).map(lambda over: PromptChange(0, "x", "blend", over))
COMING = st.lists(st.tuples(st.integers(0, 3), st.one_of(st.just(PromptChange(0, "x", "cut")), BLENDS)), max_size=8)


@settings(deadline=None)
@given(COMING, COMING)
def test_whatever_interrupts_what_the_picture_goes_on_where_it_was(
    scheduled: list[tuple[int, PromptChange]], live: list[tuple[int, PromptChange]]
) -> None:
    """Prompts with the blocks since the one before: some are known from the start, some come as the world goes on."""
    forgetful, whole = (track((0, PromptChange(0, "a", "cut")), *timed(scheduled)) for _ in range(2))
    cuts = {block for block, change in (*timed(scheduled), *timed(live)) if change.mode == "cut"}
    screen = {"a": 1.0}
    for block in range(60):
        for change in (change for at, change in timed(live) if at == block):
            begins = forgetful.change(block, change)
            assert block <= begins <= block + MOST_WAIT and begins == whole.change(block, change)
        value = forgetful.at(block)
        remembered = whole.at(block)
        assert (value.prompt.text, value.weight) == (remembered.prompt.text, remembered.weight)
        assert block in {0, *cuts} or mix(value, value.weight_start) == screen
        screen = mix(value, value.weight)
        forgetful.forget_before(block + 1)
        forgetful = forgetful.copy()
    assert len(forgetful.switches) <= 2 and len(screen) == 1


def timed(coming: list[tuple[int, PromptChange]]) -> list[tuple[int, PromptChange]]:
    return [(sum(since for since, _ in coming[: i + 1]), change) for i, (_, change) in enumerate(coming)]


def mix(value: PromptValue, weight: float) -> dict[str, float]:
    """What is on the screen, by share."""
    before = value.before or value.prompt
    both = Counter({before.text: 1 - weight}) + Counter({value.prompt.text: weight})
    return {text: share for text, share in both.items() if share}


def test_a_prompt_is_encoded_once() -> None:
    prompts = track((0, PromptChange(0, "a", "cut")))
    assert prompts.at(0).prompt is prompts.at(9).prompt


def test_what_is_forgotten_changes_no_later_block() -> None:
    changes = [
        (0, PromptChange(0, "a", "cut")),
        (2, PromptChange(0, "b", "blend", 4)),
        (5, PromptChange(0, "c", "cut")),
    ]
    whole, short = track(*changes), track(*changes)
    for block in range(9):
        short.forget_before(block)
        a, b = whole.at(block), short.at(block)
        assert (a.prompt.text, a.weight, a.began) == (b.prompt.text, b.weight, b.began)
    assert len(short.switches) < len(whole.switches)


def test_a_prompt_given_live_takes_effect_before_those_of_the_schedule() -> None:
    changes = [(0, PromptChange(0, "a", "cut")), (8, PromptChange(0, "z", "cut"))]
    scheduled = track(*changes)
    assert scheduled.at(9).prompt.text == "az"
    scheduled.change(3, PromptChange(0, "b", "cut"))
    assert [scheduled.at(block).prompt.text for block in (2, 3, 7, 8)] == ["a", "ab", "ab", "abz"]
    assert scheduled.at(3).began and scheduled.at(8).began


def test_the_newest_action_wins_and_is_released_when_not_renewed() -> None:
    actions = ActionTrack(hold_blocks=3)
    actions.change(1, ActionState(keys=("left",)))
    actions.change(1, ActionState(keys=("right",)))
    assert [actions.at(b).keys for b in range(6)] == [(), ("right",), ("right",), ("right",), (), ()]
    actions.change(3, ActionState(keys=("right",)))
    assert [actions.at(b).keys for b in range(4, 7)] == [("right",), ("right",), ()]


@pytest.mark.parametrize("text", ["", "  \n", "x" * (MAX_PROMPT_CHARS + 1)])
def test_a_prompt_that_cannot_be_says_what_was_expected(text: str) -> None:
    with pytest.raises(SignalError, match="expected .* got"):
        check_prompt(text)


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (ActionState(keys=("jump",)), "got 'jump'"),
        (ActionState(values={"fly": 1.0}), "got 'fly'"),
        (ActionState(values={"pan": 2.0}), r"in \[-1, 1\], got 2.0"),
        (ActionState(values={"pan": float("nan")}), "got nan"),
    ],
)
def test_an_action_the_model_does_not_know_is_refused(state: ActionState, said: str) -> None:
    with pytest.raises(SignalError, match=said):
        check_action(state, ("left",), ("pan",))
