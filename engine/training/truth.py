"""What a world of `tiny-world` should have shown: the exact picture for every picture it made, and judges of it.

The judge is a small classifier that has only ever seen rendered pictures; it says place, time, weather and subject.
Knows no model but the arithmetic of the camera.
"""

from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.models import BlockSignals
from engine.models.tiny.camera import walk
from engine.models.tiny.model import TinyPrompt, dissolve, motion_at
from engine.models.tiny.planet import (
    CHANNELS,
    CLOCK_PERIOD,
    COLUMNS,
    FPS,
    FRAMES_PER_LATENT,
    PLACES,
    ROWS,
    SUBJECTS,
    TIMES,
    WEATHERS,
    place_centre,
)
from engine.training.codec import LinearCodec
from engine.training.data import Array, draw_scene, show
from engine.training.lighting import LIVERIES, light_vector
from engine.training.renderer import render

Pictures: TypeAlias = npt.NDArray[np.uint8]
HEADS: Final = {"place": PLACES, "time": TIMES, "weather": WEATHERS, "subject": SUBJECTS}


def true_pictures(signals: BlockSignals, livery: int = 0, *, last: bool = False) -> Array:
    """The pictures (N, 144, 256, 3) in [0, 1] of the block that these signals make, or its last one alone."""
    rows = true_rows(signals, livery)
    return np.stack([show(row).picture() for row in (rows[-1:] if last else rows)])


def true_rows(signals: BlockSignals, livery: int = 0) -> Array:
    """Signal rows (pictures, 13), as in `data.SIGNALS`, of every picture of a block."""
    prompt, before = signals.prompt, signals.before or signals.prompt
    assert isinstance(prompt, TinyPrompt) and isinstance(before, TinyPrompt)
    scenes = [[HEADS[s].index(p.caption.value(s)) for s in ("time", "weather", "subject")] for p in (before, prompt)]
    motion, rows = motion_at(signals, prompt), []
    last = signals.weight_start**2 * (3 - 2 * signals.weight_start)
    for i, (step, weight) in enumerate(
        zip(walk(motion, signals.action, signals.frames), dissolve(signals), strict=True)
    ):
        for k, gone in enumerate(step.travel, 1):
            clock = ((signals.start + i) * FRAMES_PER_LATENT + k) / FPS % CLOCK_PERIOD
            share = last + (weight - last) * k / FRAMES_PER_LATENT
            cameras = (motion.left_behind + gone, motion.camera + gone)
            motion_now = (clock, step.motion.velocity, step.motion.facing)
            rows.append([*cameras, share, *motion_now, *scenes[0], *scenes[1], livery])
        motion, last = step.motion, weight
    return np.array(rows, np.float32)


def psnr(made: Pictures, true: Array) -> Array:
    """Peak signal-to-noise ratio of each picture, dB."""
    error = ((made / np.float32(255) - true) ** 2).mean((1, 2, 3))
    return np.asarray(-10 * np.log10(error + 1e-10), np.float32)


@dataclass(frozen=True)
class Verdict:
    place: str
    time: str
    weather: str
    subject: str


class Judge(nn.Module):
    """Pictures to place, time, weather and subject, by their principal components."""

    def __init__(self, codec: LinearCodec) -> None:
        super().__init__()
        self.codec = codec
        self.body = nn.Sequential(
            *(nn.Conv2d(CHANNELS, 64, 3, padding=1), nn.SiLU(), nn.Conv2d(64, 32, 3, padding=1), nn.SiLU()),
            *(nn.Flatten(), nn.Linear(32 * ROWS * COLUMNS, 128), nn.SiLU()),
        )
        self.heads = nn.ModuleDict({name: nn.Linear(128, len(values)) for name, values in HEADS.items()})

    def forward(self, latents: Tensor) -> dict[str, Tensor]:
        h = self.body(latents)
        return {name: head(h) for name, head in self.heads.items()}

    @torch.no_grad()
    def verdicts(self, pictures: Pictures) -> list[Verdict]:
        latents = torch.from_numpy(self.codec.encode(np.asarray(pictures / 255, np.float32)))
        answers = {name: logits.argmax(1).tolist() for name, logits in self(latents).items()}
        named = {name: [HEADS[name][i] for i in indices] for name, indices in answers.items()}
        return [Verdict(*values) for values in zip(*(named[name] for name in HEADS), strict=True)]


def train_judge(codec: LinearCodec, frames: int = 4000, epochs: int = 12, seed: int = 5) -> tuple[Judge, float]:
    """A judge trained on rendered frames only, and the share of held-out renders it reads right in every respect."""
    numbers = np.random.default_rng(seed)
    torch.manual_seed(seed)
    latents, labels = _examples(codec, frames + 400, numbers)
    judge = Judge(codec)
    optimiser = torch.optim.AdamW(judge.parameters(), lr=1e-3, weight_decay=1e-3)
    noise = torch.Generator().manual_seed(seed)
    for epoch in range(epochs):
        for group in optimiser.param_groups:
            group["lr"] = 1e-3 * (1 - epoch / epochs)
        for picks in np.array_split(numbers.permutation(frames), frames // 50):
            x = latents[picks] + 0.25 * torch.randn(latents[picks].shape, generator=noise)
            answers = judge(x)
            loss = sum((F.cross_entropy(answers[n], labels[n][picks]) for n in HEADS), torch.zeros(()))
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
    with torch.no_grad():
        answers = judge(latents[frames:])
    right = torch.stack([answers[n].argmax(1) == labels[n][frames:] for n in HEADS]).all(0)
    return judge.eval(), float(right.float().mean())


def _examples(codec: LinearCodec, count: int, numbers: np.random.Generator) -> tuple[Tensor, dict[str, Tensor]]:
    latents, rows = [], []
    for _ in range(count):
        time, weather, subject = draw_scene(numbers)
        place = 0 if subject == SUBJECTS.index("boat") else int(numbers.integers(len(PLACES)))
        reach = 60 if subject == SUBJECTS.index("boat") else 200
        camera = place_centre(PLACES[place]) + numbers.uniform(-reach, reach)
        livery = int(numbers.integers(len(LIVERIES)))
        vector = light_vector(TIMES[time], WEATHERS[weather], SUBJECTS[subject], livery)
        frame = render(vector, camera, float(numbers.integers(0, 1024)) / 16, float(numbers.choice([-1, 1])))
        latents.append(codec.encode(frame.picture()[None])[0])
        rows.append((place, time, weather, subject))
    columns = torch.tensor(rows).T
    return torch.from_numpy(np.stack(latents)), dict(zip(HEADS, columns, strict=True))


def codec_of(basis: Tensor, mean: Tensor) -> LinearCodec:
    """The linear codec that a decoder carries: its rows are orthogonal, so the encoder is their scaled transpose."""
    into = (basis / basis.square().sum(1, keepdim=True)).T
    return LinearCodec(mean.numpy(), into.contiguous().numpy(), basis.numpy())
