"""Trains the keyframe decoder on rendered frames: picture, planes, rain and snow.

First on true latents with a little noise, then on what the model itself predicts (`degrade`), so that it learns to make
clean pictures of imperfect latents. Knows nothing of sequences: what moves between keyframes is exact by construction.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.models.tiny.decoder import KeyframeDecoder, with_precipitation
from engine.models.tiny.planet import PLANES
from engine.training.codec import LinearCodec
from engine.training.data import show, walk
from engine.training.optimiser import Optimiser
from engine.training.run import Chance

Array: TypeAlias = npt.NDArray[np.float32]
Degrade: TypeAlias = Callable[[Array, Tensor, Chance], Tensor]
"""(signals (B, 12), true latents (B, C, 9, 16), chance) -> latents as the model would make them."""
NOISE: Final = 0.2


@dataclass(frozen=True)
class Lesson:
    """A batch of rendered frames, channels first."""

    signals: Array
    latents: Tensor  # (B, C, 9, 16)
    picture: Tensor  # (B, 3, H, W)
    base: Tensor  # (B, 3, H, W)
    planes: Tensor  # (B, H, W) int64
    rain: Tensor  # (B, H, W)
    snow: Tensor  # (B, H, W)


def render_lesson(codec: LinearCodec, batch: int, numbers: np.random.Generator) -> Lesson:
    signals = np.stack([walk(numbers, 2)[int(numbers.integers(2))] for _ in range(batch)])
    frames = [show(row) for row in signals]
    pictures = np.stack([frame.picture() for frame in frames])

    def stack(arrays: list[Array]) -> Tensor:
        return torch.from_numpy(np.stack(arrays))

    return Lesson(
        signals,
        torch.from_numpy(codec.encode(pictures)),
        torch.from_numpy(pictures).permute(0, 3, 1, 2),
        stack([f.base for f in frames]).permute(0, 3, 1, 2),
        torch.from_numpy(np.stack([f.planes for f in frames])).long(),
        stack([f.rain for f in frames]),
        stack([f.snow for f in frames]),
    )


def add_noise(signals: Array, latents: Tensor, chance: Chance) -> Tensor:
    del signals
    return latents + chance.uniform(len(latents), 1, 1, 1) * NOISE * chance.normal(*latents.shape)


def decoder_losses(
    decoder: KeyframeDecoder, codec: LinearCodec, batch: int, degrade: Degrade, chance: Chance
) -> dict[str, Tensor]:
    lesson = render_lesson(codec, batch, chance.numbers)
    out = decoder(degrade(lesson.signals, lesson.latents, chance))
    base, falling = out[:, :3], out[:, -2:].sigmoid()
    picture = with_precipitation(base, falling[:, 0], falling[:, 1])
    seen = picture_loss(picture, lesson.picture)
    planes = F.cross_entropy(out[:, 3 : 3 + len(PLANES)], lesson.planes)
    covers = (falling - torch.stack([lesson.rain, lesson.snow], 1)).abs().mean()
    loss = seen + 0.5 * picture_loss(base, lesson.base) + 0.1 * planes + 0.5 * covers
    l1 = (picture - lesson.picture).abs().mean()
    return {"loss": loss, "l1": l1, "planes": planes, "falling": covers}


def picture_loss(picture: Tensor, truth: Tensor) -> Tensor:
    """Absolute and squared error, and the absolute error of both gradients: keeps edges."""
    error = picture - truth
    across, down = error[..., 1:] - error[..., :-1], error[..., 1:, :] - error[..., :-1, :]
    return error.abs().mean() + 4 * error.square().mean() + across.abs().mean() + down.abs().mean()


def new_decoder(codec: LinearCodec) -> KeyframeDecoder:
    """A decoder that begins as the linear reconstruction."""
    decoder = KeyframeDecoder()
    with torch.no_grad():
        decoder.mean.copy_(torch.from_numpy(codec.mean))
        decoder.basis.copy_(torch.from_numpy(codec.out))
    return decoder.to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


def decoder_optimiser(decoder: KeyframeDecoder, scale: float = 1.0) -> Optimiser:
    kernels = [m.weight for m in decoder.body.modules() if isinstance(m, nn.Conv2d)] + [decoder.into.weight]
    head = list(decoder.out.parameters())
    taken = {id(p) for p in (*kernels, *head)}
    rest = [p for p in decoder.parameters() if id(p) not in taken]
    groups = [{"params": rest, "lr": 6e-4 * scale}, {"params": head, "lr": 3e-3 * scale}]
    return Optimiser(kernels, groups, 0.005 * scale)


@torch.no_grad()
def measure_decoder(decoder: KeyframeDecoder, lessons: list[Lesson]) -> str:
    """PSNR and absolute error over held-out frames, beside the linear reconstruction."""
    report = []
    for name in ("decoder", "linear"):
        squared, absolute, right = [], [], []
        for lesson in lessons:
            out = decoder(lesson.latents)
            falling = out[:, -2:].sigmoid()
            picture = with_precipitation(out[:, :3], falling[:, 0], falling[:, 1])
            picture = decoder.linear(lesson.latents) if name == "linear" else picture
            error = picture.clamp(0, 1) - lesson.picture
            squared.append(float(error.square().mean()))
            absolute.append(float(error.abs().mean()))
            right.append(float((out[:, 3 : 3 + len(PLANES)].argmax(1) == lesson.planes).float().mean()))
        psnr = -10 * math.log10(float(np.mean(squared)))
        report.append(f"{name} {psnr:.2f} dB l1 {np.mean(absolute):.4f} planes {np.mean(right):.3f}")
    return " | ".join(report)
