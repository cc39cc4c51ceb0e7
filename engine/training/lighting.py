"""Light, weather and subject of a moment of the little planet, as one vector of floats.

Knows how a time of day and a weather look; does not know the map (painting) or how pixels are made (renderer).
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.models.tiny.planet import SUBJECTS

Vector = npt.NDArray[np.float32]
Colour = tuple[float, float, float]

# Places of the fields in the vector; plain integers so that compiled code sees constants.
SKY_TOP, SKY_MIDDLE, SKY_LOW, AMBIENT, SUN_COLOUR, CLOUD_COLOUR = 0, 3, 6, 9, 12, 15
SUN_HEIGHT, SUN, MOON, STARS, LAMPS = 18, 19, 20, 21, 22
CLOUDS, OVERCAST, DIM, RAIN, SNOW, FOG, LIGHTNING, SETTLED = 23, 24, 25, 26, 27, 28, 29, 30
BOAT, CAR, WALKER, BIRDS, BALLOON = 31, 32, 33, 34, 35
PAINT = 36
SIZE = 39

LIVERIES: tuple[Colour, ...] = ((0.90, 0.20, 0.16), (0.16, 0.40, 0.86), (0.96, 0.74, 0.16), (0.20, 0.62, 0.34))
"""What boat, car, walker and balloon of a world are painted in. Nobody tells the model: only a world's past knows."""
PAINTED = ("boat", "car", "walker", "balloon")


@dataclass(frozen=True)
class Daylight:
    top: Colour
    middle: Colour
    low: Colour
    ambient: Colour
    sun_height: float
    sun_colour: Colour
    lamps: float
    sun: float = 1.0
    moon: float = 0.0
    stars: float = 0.0


@dataclass(frozen=True)
class Weather:
    clouds: float
    cloud_colour: Colour
    overcast: float = 0.0
    dim: float = 0.0
    rain: float = 0.0
    snow: float = 0.0
    fog: float = 0.0
    lightning: float = 0.0


DAYLIGHT = {
    "dawn": Daylight(
        (0.36, 0.46, 0.72), (0.88, 0.66, 0.70), (1.0, 0.86, 0.68), (0.97, 0.86, 0.88), 0.52, (1.0, 0.9, 0.72), 0.25
    ),
    "day": Daylight(
        (0.18, 0.46, 0.84), (0.42, 0.70, 0.94), (0.80, 0.92, 0.98), (1.0, 1.0, 1.0), 0.2, (1.0, 0.98, 0.86), 0.0
    ),
    "sunset": Daylight(
        (0.24, 0.18, 0.46), (0.90, 0.42, 0.40), (1.0, 0.72, 0.36), (1.0, 0.76, 0.66), 0.47, (1.0, 0.8, 0.45), 0.6
    ),
    "night": Daylight(
        (0.03, 0.05, 0.15), (0.08, 0.13, 0.30), (0.20, 0.28, 0.48), (0.36, 0.43, 0.66), 0.8, (1.0, 0.6, 0.4), 1.0
    ),
}
NIGHT_SKY = {"night": (0.0, 1.0, 1.0)}
WEATHER = {
    "clear": Weather(0.22, (1.0, 1.0, 1.0)),
    "cloudy": Weather(0.72, (0.92, 0.93, 0.97), overcast=0.35, dim=0.10, fog=0.05),
    "rain": Weather(0.92, (0.58, 0.62, 0.70), overcast=0.75, dim=0.26, rain=1.0, fog=0.28),
    "storm": Weather(1.0, (0.34, 0.36, 0.44), overcast=0.95, dim=0.46, rain=1.0, fog=0.14, lightning=1.0),
    "snow": Weather(0.8, (0.80, 0.84, 0.90), overcast=0.55, dim=0.16, snow=1.0, fog=0.12),
}


def light_vector(time: str, weather: str, subject: str, livery: int = 0) -> Vector:
    """The state vector (SIZE,) of one time of day, weather and subject in one of the LIVERIES."""
    vector = np.zeros(SIZE, np.float32)
    day, sky = DAYLIGHT[time], WEATHER[weather]
    colours = ((SKY_TOP, day.top), (SKY_MIDDLE, day.middle), (SKY_LOW, day.low), (AMBIENT, day.ambient))
    for start, colour in (*colours, (SUN_COLOUR, day.sun_colour), (CLOUD_COLOUR, sky.cloud_colour)):
        vector[start : start + 3] = colour
    sun, moon, stars = NIGHT_SKY.get(time, (day.sun, day.moon, day.stars))
    vector[SUN_HEIGHT : LAMPS + 1] = (day.sun_height, sun, moon, stars, max(day.lamps, sky.dim * 1.2))
    vector[CLOUDS : SETTLED + 1] = (
        *(sky.clouds, sky.overcast, sky.dim, sky.rain, sky.snow, sky.fog, sky.lightning),
        sky.snow,
    )
    vector[PAINT : PAINT + 3] = LIVERIES[livery]
    if subject != "none":
        vector[BOAT + SUBJECTS.index(subject) - 1] = 1.0
    return vector
