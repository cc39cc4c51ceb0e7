"""The camera of `tiny-world`: actions become a walk around the ring, and a named place a jump to it.

Everything here is plain numbers: the motion of a world is a tuple of floats that goes in with one block and comes out
with the next, so a block can be made again. Knows no pictures and no weights.
"""

from dataclasses import astuple, dataclass, replace
from typing import Final

from engine.models.tiny.planet import (
    CIRCUMFERENCE,
    EASE,
    FRAMES_PER_LATENT,
    TOP_SPEED,
    place_centre,
)
from engine.protocol import ActionState

KEYS: Final = ("left", "right", "fast")
VALUES: Final = ("pan",)
FAST: Final = 2.0
"""Pan is at half speed unless `fast` is held; `pan` is analogue in [-1, 1] and may use the whole range."""


@dataclass(frozen=True)
class Motion:
    """Where a world's camera is. `left_behind` is the camera of the scene that a jump is leaving."""

    camera: float
    left_behind: float
    velocity: float = 0.0  # pixels of ground per frame
    facing: float = 1.0
    arrivals: float = 0.0  # how many of the prompts' places have been gone to

    @classmethod
    def start(cls, place: str, arrivals: int) -> "Motion":
        """In front of a place's landmark, standing still."""
        centre = place_centre(place)
        return cls(centre, centre, arrivals=float(arrivals))

    @classmethod
    def of(cls, values: tuple[float, ...]) -> "Motion":
        return cls(*values)

    def values(self) -> tuple[float, ...]:
        return astuple(self)

    def jumped(self, place: str, arrivals: int) -> "Motion":
        """The camera put in front of `place`; the scene it leaves keeps moving on under its old camera."""
        return replace(self, camera=place_centre(place), left_behind=self.camera, arrivals=float(arrivals))


@dataclass(frozen=True)
class Step:
    """One latent frame of a walk: the motion at its end, and the camera's shift at each of its pictures."""

    motion: Motion
    travel: tuple[float, ...]


def wanted_pan(action: ActionState) -> float:
    """The pan asked for, in [-1, 1]: arrow keys at half speed, at full speed with `fast`; `pan` says it exactly."""
    keys = ("right" in action.keys) - ("left" in action.keys)
    pan = keys * 0.5 * (FAST if "fast" in action.keys else 1.0) + action.values.get("pan", 0.0)
    return max(-1.0, min(1.0, pan))


def walk(motion: Motion, action: ActionState, latents: int) -> list[Step]:
    """`latents` latent frames of walking under one action."""
    pan, steps = wanted_pan(action), []
    for _ in range(latents):
        velocity, gone, travel = motion.velocity, 0.0, []
        for _ in range(FRAMES_PER_LATENT):
            velocity += (pan * TOP_SPEED - velocity) * EASE
            gone += velocity
            travel.append(gone)
        facing = motion.facing if abs(velocity) <= 0.3 else (1.0 if velocity > 0 else -1.0)
        motion = replace(
            motion,
            camera=(motion.camera + gone) % CIRCUMFERENCE,
            left_behind=(motion.left_behind + gone) % CIRCUMFERENCE,
            velocity=velocity,
            facing=facing,
        )
        steps.append(Step(motion, tuple(travel)))
    return steps
