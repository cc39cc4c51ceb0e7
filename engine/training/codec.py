"""The linear keyframe codec: 16x16 patches to 64 principal components, in closed form.

It is both the encoder (training only) and what the decoder starts from. Large components are kept larger
(sd ** 0.6), so that diffusion decides them first. Knows pictures, not where they come from.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save_file

from engine.models.tiny.planet import CHANNELS, COLUMNS, PATCH, ROWS

Array = npt.NDArray[np.float32]
FLATTEN = 0.6


@dataclass(frozen=True)
class LinearCodec:
    """mean (768,), into (768, C), out (C, 768): latents = (patches - mean) @ into; patches = latents @ out + mean."""

    mean: Array
    into: Array
    out: Array

    def encode(self, pictures: Array) -> Array:
        """(N, 144, 256, 3) in [0, 1] -> (N, C, 9, 16)."""
        latents = (to_patches(pictures) - self.mean) @ self.into  # (N, 144, C)
        flat = np.ascontiguousarray(latents.transpose(0, 2, 1), np.float32)
        return flat.reshape(len(pictures), -1, ROWS, COLUMNS)

    def decode(self, latents: Array) -> Array:
        """(N, C, 9, 16) -> (N, 144, 256, 3): the best linear reconstruction."""
        flat = latents.reshape(len(latents), latents.shape[1], -1).transpose(0, 2, 1)
        return from_patches(flat @ self.out + self.mean)

    def save(self, path: Path) -> None:
        save_file({"mean": self.mean, "into": self.into, "out": self.out}, path)

    @classmethod
    def load(cls, path: Path) -> "LinearCodec":
        return cls(**load_file(path))


def fit(pictures: Array, channels: int = CHANNELS) -> LinearCodec:
    """Principal components of the patches of `pictures` (N, 144, 256, 3)."""
    patches = to_patches(pictures).reshape(-1, 3 * PATCH * PATCH)
    mean = patches.mean(0)
    centred = patches - mean
    power, basis = np.linalg.eigh(centred.T @ centred / len(centred))
    deviation = np.sqrt(power[::-1][:channels])
    basis = basis[:, ::-1][:, :channels]
    scale = (deviation / deviation.mean()) ** FLATTEN
    scale /= math.sqrt(float((scale**2).mean()))
    into, out = basis / deviation * scale, (basis * deviation / scale).T
    return LinearCodec(mean, np.ascontiguousarray(into), np.ascontiguousarray(out))


def to_patches(pictures: Array) -> Array:
    """(N, 144, 256, 3) -> (N, 144 patches, 768)."""
    tiles = pictures.reshape(-1, ROWS, PATCH, COLUMNS, PATCH, 3).transpose(0, 1, 3, 2, 4, 5)
    return tiles.reshape(len(pictures), ROWS * COLUMNS, -1)


def from_patches(patches: Array) -> Array:
    tiles = patches.reshape(-1, ROWS, COLUMNS, PATCH, PATCH, 3).transpose(0, 1, 3, 2, 4, 5)
    return np.ascontiguousarray(tiles).reshape(len(patches), ROWS * PATCH, COLUMNS * PATCH, 3)
