"""Scene memory: what the little planet looks like at a camera, a clock and a light, before any diffusion.

Five learned one-dimensional tables (a vector per two pixels of map) are read, for each of the picture's 16 columns, at
the column's place in each parallax layer; a small network per column turns what it read into nine latents. It costs a
small part of the transformer and holds most of the map. It sees no past frame and no noise.
"""

import math
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.models.tiny.planet import (
    CHANNELS,
    CIRCUMFERENCE,
    CLOUD_PARALLAX,
    CLOUD_PERIOD,
    CLOUD_SPEED,
    COLUMNS,
    LATENTS_PER_SECOND,
    LAYER_PARALLAX,
    LAYER_PERIODS,
    PATCH,
    PHASE_PERIOD,
    ROWS,
    WIDTH,
)

SPACING: Final = 2
"""Pixels of map per table entry."""
COLUMN: Final = ROWS * CHANNELS
CAMERA_WAVES: Final = (1, 2, 4, 8, 64, 128)
MOTION: Final = 2 * len(CAMERA_WAVES) + 2
PHASES: Final = int(PHASE_PERIOD * LATENTS_PER_SECOND)
"""Latent frames after which everything but the clouds is where it was."""


class SceneMemory(nn.Module):
    """(camera, clock, light) -> the mean of the latents there, and what was read of the map."""

    def __init__(self, table: int = 64, hidden: int = 768, images: int = 40, light: int = 256) -> None:
        super().__init__()
        periods = (*LAYER_PERIODS, CLOUD_PERIOD)
        self.tables = nn.ParameterList(nn.Parameter(torch.randn(p // SPACING, table) * 0.3) for p in periods)
        read = len(periods) * table
        self.linear = nn.Parameter(torch.zeros(read, COLUMN))
        self.gate = nn.Linear(light, read)
        self.average = nn.Parameter(torch.zeros(COLUMNS, COLUMN))
        self.images = nn.Parameter(torch.zeros(images, COLUMNS, COLUMN))
        self.image_weights = nn.Sequential(nn.Linear(light, 192), nn.SiLU(), nn.Linear(192, images))
        self.place = nn.Parameter(torch.randn(COLUMNS, hidden) * 0.1)
        self.into = nn.Linear(read, hidden)
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(2))
        self.out = nn.Linear(hidden, COLUMN)
        self.modulate = nn.Sequential(nn.Linear(light, 128), nn.SiLU(), nn.Linear(128, 6 * hidden))
        self._start()

    def _start(self) -> None:
        nn.init.normal_(self.gate.weight, std=0.003)
        nn.init.ones_(self.gate.bias)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)
        last = self.modulate[2]
        assert isinstance(last, nn.Linear)
        nn.init.normal_(last.weight, std=0.05)
        nn.init.zeros_(last.bias)

    def forward(self, camera: Tensor, clock: Tensor, light: Tensor) -> tuple[Tensor, Tensor]:
        """(N,), (N,), (N, light) -> mean (N, 16, 9 * C) and what was read (N, 16, 5 * table)."""
        read = self.look_up(camera, clock)
        light = F.silu(light)
        scale_1, shift_1, scale_2, shift_2, scale_3, shift_3 = self.modulate(light)[:, None].chunk(6, -1)
        h = F.gelu((self.into(read) + self.place) * (1 + scale_1) + shift_1, approximate="tanh")
        for layer, scale, shift in zip(self.layers, (scale_2, scale_3), (shift_2, shift_3), strict=True):
            h = h + F.gelu(layer(F.layer_norm(h, h.shape[-1:])) * (1 + scale) + shift, approximate="tanh")
        mean = self.out(h) + (read * self.gate(light)[:, None]) @ self.linear
        images = (self.image_weights(light) @ self.images.flatten(1)).unflatten(1, (COLUMNS, COLUMN))
        return mean + self.average + images, read

    def look_up(self, camera: Tensor, clock: Tensor) -> Tensor:
        """(N,), (N,) -> (N, 16, 5 * table), linearly interpolated."""
        found = []
        for table, place in zip(self.tables, map_places(camera, clock), strict=True):
            u = place / SPACING
            left = u.floor()
            share = (u - left).unsqueeze(-1)
            index, size = left.long(), table.shape[0]
            found.append(
                F.embedding(index % size, table) * (1 - share) + F.embedding((index + 1) % size, table) * share
            )
        return torch.cat(found, -1)


def map_places(camera: Tensor, clock: Tensor) -> list[Tensor]:
    """Where the middle of each column is in each layer, in pixels of that layer's map: five tensors (N, 16)."""
    middle = torch.arange(COLUMNS, device=camera.device) * PATCH + PATCH / 2 - WIDTH / 2
    places = [
        torch.remainder(camera[:, None] * parallax + middle, period)
        for parallax, period in zip(LAYER_PARALLAX, LAYER_PERIODS, strict=True)
    ]
    drift = camera[:, None] * CLOUD_PARALLAX + CLOUD_SPEED * clock[:, None] + middle + WIDTH / 2
    return [*places, torch.remainder(drift, CLOUD_PERIOD)]


def motion_features(camera: Tensor, velocity: Tensor, facing: Tensor) -> Tensor:
    """Camera as waves, velocity and facing as they are: (...,) -> (..., MOTION)."""
    angles = torch.stack([camera * (2 * math.pi / CIRCUMFERENCE * k) for k in CAMERA_WAVES], -1)
    return torch.cat([angles.cos(), angles.sin(), velocity[..., None] / 4, facing[..., None]], -1)


def phase_of(clock: Tensor) -> Tensor:
    """Seconds (...,) -> which of the PHASES this is."""
    return (clock * LATENTS_PER_SECOND).round().long() % PHASES
