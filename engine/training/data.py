"""Clips of the little planet: what happened in each latent frame (its signals) and its latents, in shards on disk.

A clip is one short walk with at most one change of scene. Clip number i of a seed is always the same, so shards can be
made by any number of processes, or again after a kill. Knows the codec only as a linear map.
"""

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from engine.models.tiny.planet import (
    CHANNELS,
    CIRCUMFERENCE,
    CLOCK_PERIOD,
    COLUMNS,
    DISSOLVE_LATENTS,
    EASE,
    FPS,
    FRAMES_PER_LATENT,
    LATENTS_PER_BLOCK,
    PHASE_PERIOD,
    ROWS,
    SUBJECTS,
    TIMES,
    TOP_SPEED,
    WEATHERS,
)
from engine.training.codec import LinearCodec
from engine.training.lighting import LIVERIES, PAINTED, light_vector
from engine.training.renderer import STRIKES, Frame, render

logger = logging.getLogger(__name__)

Array: TypeAlias = npt.NDArray[np.float32]

CLIP_LATENTS: Final = 8
SHARD_CLIPS: Final = 2000
SHARD_FRAMES: Final = SHARD_CLIPS * CLIP_LATENTS
SIGNALS: Final = (
    *("camera_before", "camera", "weight", "clock", "velocity", "facing"),
    *("time_before", "weather_before", "subject_before", "time", "weather", "subject", "livery"),
)
"""Columns of the signal array: two scenes (before, now), how far one has dissolved into the other, and the motion."""
CAMERA_BEFORE, CAMERA, WEIGHT, CLOCK, VELOCITY, FACING = range(6)
BEFORE, NOW, LIVERY = slice(6, 9), slice(9, 12), 12


def smooth(x: float) -> float:
    """0 to 1 with flat ends."""
    x = min(1.0, max(0.0, x))
    return x * x * (3 - 2 * x)


def walk(random: np.random.Generator, latents: int = CLIP_LATENTS) -> Array:
    """Signals (latents, 13) of one random clip."""
    now = draw_scene(random)
    near_beach = now[2] == SUBJECTS.index("boat") and random.random() < 0.6
    camera = random.uniform(-100, 760) if near_beach else random.uniform(0, CIRCUMFERENCE)
    before, jump, switch = now, 0.0, -99
    if random.random() < 0.45:
        before, switch = change_scene(random, now), LATENTS_PER_BLOCK * int(random.integers(-2, latents // 2))
        jump = random.uniform(0, CIRCUMFERENCE) if random.random() < 0.3 else 0.0
    pan = float(random.choice([-1, -1, -0.5, 0, 0.5, 1, 1]))
    velocity = pan * TOP_SPEED if random.random() < 0.7 else 0.0
    facing = 1.0 if (pan or random.random() - 0.4) > 0 else -1.0
    livery = int(random.integers(len(LIVERIES)))
    start = draw_clock(random, WEATHERS[now[1]] == "storm")
    rows = []
    for i in range(latents):
        if i % LATENTS_PER_BLOCK == 0 and i and random.random() < 0.2:
            pan = float(random.choice([-1, -0.5, 0, 0, 0.5, 1]))
        for _ in range(FRAMES_PER_LATENT):
            velocity += (pan * TOP_SPEED - velocity) * EASE
            camera += velocity
        facing = np.sign(velocity) if abs(velocity) > 0.3 else facing
        clock = (start + (i + 1) * FRAMES_PER_LATENT / FPS) % CLOCK_PERIOD
        old, weight, shown = (
            (now, 1.0, now) if switch == -99 else (before, smooth((i + 1 - switch) / DISSOLVE_LATENTS), now)
        )
        if i < switch:
            weight, shown = 1.0, before
        old_camera, new_camera = (camera - jump, camera) if switch != -99 else (camera, camera)
        if weight == 1.0:
            old, old_camera = shown, new_camera if i >= switch else old_camera
            new_camera = old_camera
        rows.append([old_camera, new_camera, weight, clock, velocity, facing, *old, *shown, livery])
    signals = np.array(rows, np.float32)
    signals[:, :2] %= CIRCUMFERENCE
    return signals


def draw_clock(random: np.random.Generator, storm: bool) -> float:
    """Seconds at which a clip begins; half of all storms show a strike, which otherwise would hardly be seen."""
    start = random.integers(0, int(CLOCK_PERIOD) * 4) / 4
    if storm and random.random() < 0.5:
        strike = STRIKES[random.integers(len(STRIKES))] + random.integers(0, 2) / 4
        start = PHASE_PERIOD * random.integers(0, 8) + strike - random.integers(1, CLIP_LATENTS + 1) / 4
    return float(start % CLOCK_PERIOD)


def draw_scene(random: np.random.Generator) -> tuple[int, int, int]:
    """Time, weather and subject, as indices."""
    weather = random.choice(len(WEATHERS), p=[0.28, 0.15, 0.18, 0.2, 0.19])
    subject = random.choice(len(SUBJECTS), p=[0.3, 0.14, 0.14, 0.14, 0.14, 0.14])
    return int(random.integers(len(TIMES))), int(weather), int(subject)


def change_scene(random: np.random.Generator, scene: tuple[int, int, int]) -> tuple[int, int, int]:
    """A scene that differs from `scene` in one to three things."""
    while True:
        other, keep = draw_scene(random), random.random(3) < 0.5
        mixed = tuple(a if k else b for a, b, k in zip(scene, other, keep, strict=True))
        if mixed != scene:
            return mixed[0], mixed[1], mixed[2]


def painted(signals: Array) -> npt.NDArray[np.bool_]:
    """Whether signals (..., 13) may show anything in a livery: (...)."""
    wears = np.array([subject in PAINTED for subject in SUBJECTS])
    before, now = (wears[signals[..., scene.stop - 1].astype(int)] for scene in (BEFORE, NOW))
    return np.asarray((now & (signals[..., WEIGHT] > 0)) | (before & (signals[..., WEIGHT] < 1)))


def show(signals: Array) -> Frame:
    """The true frame of one row of signals. `picture()` of a frame in a dissolve is made of both scenes' pictures."""
    weight = float(signals[WEIGHT])
    now = _render(signals, signals[CAMERA], signals[NOW])
    if weight >= 1.0:
        return now
    return Dissolve.of(_render(signals, signals[CAMERA_BEFORE], signals[BEFORE]), now, weight)


def _render(signals: Array, camera: float, scene: Array) -> Frame:
    time, weather, subject = (int(i) for i in scene)
    vector = light_vector(TIMES[time], WEATHERS[weather], SUBJECTS[subject], int(signals[LIVERY]))
    return render(vector, float(camera), float(signals[CLOCK]), float(signals[FACING]))


@dataclass
class Dissolve(Frame):
    """A frame between two scenes: everything is mixed, each pixel belongs to what the stronger scene shows there."""

    mixed: Array | None = None

    @classmethod
    def of(cls, before: Frame, now: Frame, weight: float) -> "Dissolve":
        a, b = np.float32(1 - weight), np.float32(weight)
        return cls(
            before.base * a + now.base * b,
            now.planes if weight >= 0.5 else before.planes,
            before.rain * a + now.rain * b,
            before.snow * a + now.snow * b,
            before.picture() * a + now.picture() * b,
        )

    def picture(self) -> Array:
        assert self.mixed is not None
        return self.mixed


@dataclass(frozen=True)
class Shard:
    """Signals (clips, 8, 13) and latents (clips, 8, C, 9, 16) fp16 of SHARD_CLIPS clips, mapped from disk."""

    signals: Array
    latents: npt.NDArray[np.float16]


def make_shard(folder: Path, index: int, seed: int, codec: LinearCodec) -> None:
    """Renders and encodes shard `index` unless it is there already."""
    target = folder / f"latents-{index:03}.npy"
    if target.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    signals = np.zeros((SHARD_CLIPS, CLIP_LATENTS, len(SIGNALS)), np.float32)
    latents = np.zeros((SHARD_CLIPS, CLIP_LATENTS, CHANNELS, ROWS, COLUMNS), np.float16)
    for i in range(SHARD_CLIPS):
        signals[i] = walk(np.random.default_rng((seed, index * SHARD_CLIPS + i)))
        latents[i] = codec.encode(np.stack([show(row).picture() for row in signals[i]]))
    np.save(folder / f"signals-{index:03}.npy", signals)
    partial = folder / f"partial-{index:03}-{os.getpid()}.npy"
    np.save(partial, latents)
    partial.rename(target)
    logger.info("shard %d of clips is ready in %s", index, folder)


def open_shard(folder: Path, index: int) -> Shard:
    return Shard(
        np.load(folder / f"signals-{index:03}.npy"), np.load(folder / f"latents-{index:03}.npy", mmap_mode="r")
    )


@dataclass(frozen=True)
class Clips:
    """Some shards seen as one list of clips."""

    shards: tuple[Shard, ...]

    @classmethod
    def open(cls, folder: Path, indices: range) -> "Clips":
        return cls(tuple(open_shard(folder, i) for i in indices))

    def __len__(self) -> int:
        return len(self.shards) * SHARD_CLIPS

    def take(self, clips: npt.NDArray[np.int64], first: npt.NDArray[np.int64], frames: int) -> tuple[Array, Array]:
        """Signals (n, frames, 12) and latents (n, frames, C, 9, 16) of `frames` latent frames from `first` on."""
        picks = [(self.shards[c // SHARD_CLIPS], c % SHARD_CLIPS, f) for c, f in zip(clips, first, strict=True)]
        signals = np.stack([shard.signals[i, f : f + frames] for shard, i, f in picks])
        return signals, np.stack([shard.latents[i, f : f + frames] for shard, i, f in picks]).astype(np.float32)
