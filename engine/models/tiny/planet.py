"""The fixed facts of the little planet that `tiny-world` knows: sizes, clocks, layers and places.

The model, its decoder, its camera and the renderer it was trained on all agree on these numbers. Nothing here
knows how anything looks: that is in the weights.
"""

from typing import Final

WIDTH: Final = 256
HEIGHT: Final = 144
FPS: Final = 16
FRAMES_PER_LATENT: Final = 4
LATENTS_PER_SECOND: Final = FPS // FRAMES_PER_LATENT
LATENTS_PER_BLOCK: Final = 2

PATCH: Final = 16
ROWS: Final = HEIGHT // PATCH
COLUMNS: Final = WIDTH // PATCH
CHANNELS: Final = 64

CIRCUMFERENCE: Final = 4096
"""Length of the ring in pixels of ground."""
LAYER_PERIODS: Final = (640, 1280, 2560, 4096)
"""Periods in pixels of the far, mid, near and ground layers; a layer's parallax is its period / CIRCUMFERENCE."""
LAYER_PARALLAX: Final = tuple(period / CIRCUMFERENCE for period in LAYER_PERIODS)
CLOUD_PERIOD: Final = 512
CLOUD_PARALLAX: Final = CLOUD_PERIOD / CIRCUMFERENCE
CLOUD_SPEED: Final = 8.0
"""Pixels per second that clouds drift by themselves."""

CLOCK_PERIOD: Final = 64.0
"""Seconds after which everything that moves by itself repeats."""
PHASE_PERIOD: Final = 8.0
"""The same for everything but the clouds."""
TOP_SPEED: Final = 4.0
"""Pixels of ground per frame at full pan."""
EASE: Final = 0.25
"""Share of the difference to the wanted speed that is made up in each frame."""
DISSOLVE_LATENTS: Final = 4
"""Latent frames (1 s) over which one scene dissolves into the next."""

RAIN_SHIFT: Final = (-3.96, 18.0)
SNOW_SHIFT: Final = (0.0, 2.25)
"""Pixels (x, y) that rain and snow fall in one frame."""
PRECIPITATION_COLOUR: Final = (0.92, 0.95, 1.0)

PLANES: Final = ("front", "ground", "near", "boat", "mid", "far", "cloud", "sky")
"""What a pixel can belong to, nearest first; each moves over the screen as one piece."""

PLACES: Final = ("beach", "city", "forest", "mountains", "snow", "desert")
TIMES: Final = ("dawn", "day", "sunset", "night")
WEATHERS: Final = ("clear", "cloudy", "rain", "storm", "snow")
SUBJECTS: Final = ("none", "boat", "car", "walker", "birds", "balloon")
ZONE: Final = CIRCUMFERENCE / len(PLACES)


def place_centre(place: str) -> float:
    """Camera position in pixels of ground at which `place` and its landmark fill the picture."""
    return (PLACES.index(place) + 0.5) * ZONE


def place_at(camera: float) -> str:
    """The place in the middle of the picture of a camera at `camera` pixels."""
    return PLACES[int(camera % CIRCUMFERENCE / ZONE) % len(PLACES)]


def plane_shift(plane: str, camera_shift: float, frames: float) -> float:
    """Pixels by which `plane` moves to the left while the camera moves by `camera_shift` in `frames` frames."""
    if plane in ("front", "boat", "sky"):
        return 0.0
    if plane == "cloud":
        return CLOUD_PARALLAX * camera_shift + CLOUD_SPEED * frames / FPS
    return LAYER_PARALLAX[("far", "mid", "near", "ground").index(plane)] * camera_shift
