"""Real H.264 packets of a moving bar, without an engine."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from engine.protocol import Packet
from tests.server.scripted_engine import HEIGHT, TICKS, WIDTH, Encoder


def packets(count: int, keyframe_every: int = 40, world: str = "w.1") -> Iterator[Packet]:
    encoder = Encoder("h264")
    for n in range(count):
        encoder.wants_keyframe = n % keyframe_every == 0
        picture = np.full((HEIGHT, WIDTH, 3), 40, np.uint8)
        picture[:, n * 4 % WIDTH :][:, :12] = (220, 180, 60)
        for data, keyframe in encoder.encode(picture, n * TICKS):
            yield Packet(world, "h264", data, n * TICKS, TICKS, keyframe, n // 5)
