"""The random stream of a world: a draw is a function of (seed, block, step, purpose), never of what was drawn before.

So a replay, a fork, another batch or a restart sees the same noise. Made on the CPU with a counter-based generator
(Philox), whatever the device. Knows nothing of what the noise is for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

Purpose = Literal["initial", "renoise", "context"]
Shape: TypeAlias = tuple[int, ...]

Noise: TypeAlias = Callable[[Purpose, int, int, Shape], Tensor]
"""(purpose, block, step, shape) -> standard normal numbers, float32 on the CPU."""


def stream(seed: int) -> Noise:
    """The noise of the world with this seed."""

    def draw(purpose: Purpose, block: int, step: int, shape: Shape) -> Tensor:
        name = f"{seed}/{block}/{step}/{purpose}".encode()
        key = int.from_bytes(hashlib.blake2b(name, digest_size=16).digest(), "little")
        generator = np.random.Generator(np.random.Philox(key=key))
        return torch.from_numpy(generator.standard_normal(shape, dtype=np.float32))

    return draw
