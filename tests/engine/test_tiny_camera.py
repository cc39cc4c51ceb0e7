"""The camera of tiny-world is an exact function of the actions."""

import pytest

from engine.models.tiny.camera import Motion, walk, wanted_pan
from engine.models.tiny.planet import CIRCUMFERENCE, TOP_SPEED, place_at, place_centre
from engine.protocol import ActionState

RIGHT = ActionState(keys=("right", "fast"))


def test_holding_a_key_reaches_full_speed_and_turns_the_walker() -> None:
    step = walk(Motion.start("city", 0), RIGHT, 12)[-1]
    assert step.motion.velocity == pytest.approx(TOP_SPEED, rel=1e-3)
    assert step.motion.facing == 1.0
    assert step.travel[-1] == pytest.approx(4 * TOP_SPEED, rel=1e-3)


def test_the_walk_does_not_depend_on_how_it_is_cut_into_blocks() -> None:
    whole = walk(Motion.start("snow", 0), RIGHT, 6)
    motion, parts = Motion.start("snow", 0), []
    for _ in range(3):
        parts += walk(motion, RIGHT, 2)
        motion = Motion.of(parts[-1].motion.values())
    assert parts == whole


def test_travel_is_how_far_the_camera_moved_since_the_last_keyframe() -> None:
    start = Motion.start("forest", 0)
    step = walk(start, RIGHT, 1)[0]
    assert step.motion.camera - start.camera == pytest.approx(step.travel[-1])


def test_the_ring_closes() -> None:
    motion = Motion(CIRCUMFERENCE - 1.0, 0.0, velocity=TOP_SPEED)
    assert walk(motion, RIGHT, 1)[0].motion.camera == pytest.approx(15.0)


def test_a_jump_leaves_the_old_scene_under_its_own_camera() -> None:
    motion = Motion(100.0, 100.0, velocity=2.0).jumped("desert", 1)
    after = walk(motion, ActionState(values={"pan": 0.5}), 1)[0].motion
    assert place_at(after.camera) == "desert"
    assert after.left_behind - 100.0 == pytest.approx(after.camera - place_centre("desert"))


@pytest.mark.parametrize(
    ("action", "pan"),
    [
        (ActionState(), 0.0),
        (ActionState(keys=("left",)), -0.5),
        (ActionState(keys=("left", "right")), 0.0),
        (ActionState(keys=("right", "fast"), values={"pan": 1.0}), 1.0),
    ],
)
def test_keys_and_values_add_up_to_a_pan(action: ActionState, pan: float) -> None:
    assert wanted_pan(action) == pan
