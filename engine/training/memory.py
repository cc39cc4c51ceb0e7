"""Trains the scene memory: tables in closed form first, then everything that makes the mean, by gradient.

Frames in a dissolve are left out here: a dissolve is linear in latents, so the mean of the two scenes is exact.
"""

import logging
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from engine.models.tiny.memory import COLUMN, SPACING, SceneMemory, map_places
from engine.models.tiny.network import Scenes, TinyNetwork, latents_to_columns
from engine.models.tiny.planet import CLOUD_PERIOD, COLUMNS, LAYER_PERIODS, SUBJECTS, TIMES, WEATHERS
from engine.models.tiny.text import MEANING, SEEN_SLOTS, VOCABULARY
from engine.training.data import CAMERA, CAMERA_BEFORE, CLOCK, FACING, NOW, VELOCITY, WEIGHT, Clips
from engine.training.optimiser import Optimiser
from engine.training.run import Chance

logger = logging.getLogger(__name__)
Array = npt.NDArray[np.float32]

VALUES: Final = {"time": TIMES, "weather": WEATHERS, "subject": SUBJECTS}
SYNONYMS: Final = [
    [[VOCABULARY[p] for p, meaning in MEANING.items() if meaning == (slot, value)] for value in VALUES[slot]]
    for slot in SEEN_SLOTS
]
"""SYNONYMS[slot][value]: rows of the word table that say it."""


def choose_words(scene: Array, numbers: np.random.Generator) -> Tensor:
    """Scenes (..., 3) of time, weather, subject -> a random phrase for each, as word ids."""
    ids = [SYNONYMS[i % 3][int(v)] for i, v in enumerate(scene.reshape(-1))]
    return torch.tensor([row[numbers.integers(len(row))] for row in ids]).reshape(scene.shape)


def scenes_of(signals: Array, device: torch.device | str = "cpu") -> Scenes:
    """Signals (B, F, 12) -> the model's view of them."""
    columns = (CAMERA_BEFORE, CAMERA, WEIGHT, CLOCK, VELOCITY, FACING)
    return Scenes(*(torch.from_numpy(np.ascontiguousarray(signals[..., c])).to(device) for c in columns))


class MemoryFrames:
    """The frames of some clips that show one scene only."""

    def __init__(self, clips: Clips, shards: range) -> None:
        self.clips = clips
        parts = [np.argwhere(clips.shards[i].signals[..., WEIGHT] >= 1.0) for i in shards]
        self.where = [(i, part) for i, part in zip(shards, parts, strict=True)]

    def take(self, numbers: np.random.Generator, count: int) -> tuple[Array, Tensor]:
        """`count` random frames: signals (count, 1, 12) and latents as columns (count, 16, 9 * C)."""
        signals, latents = [], []
        for _ in range(count):
            shard, places = self.where[numbers.integers(len(self.where))]
            clip, frame = places[numbers.integers(len(places))]
            signals.append(self.clips.shards[shard].signals[clip, frame])
            latents.append(self.clips.shards[shard].latents[clip, frame])
        stacked = torch.from_numpy(np.stack(latents).astype(np.float32))
        return np.stack(signals)[:, None], latents_to_columns(stacked)


def memory_losses(network: TinyNetwork, frames: MemoryFrames, batch: int, chance: Chance) -> dict[str, Tensor]:
    signals, target = frames.take(chance.numbers, batch)
    return {"loss": (recall_frames(network, signals, chance.numbers) - target.to(chance.device)).square().mean()}


def recall_frames(network: TinyNetwork, signals: Array, numbers: np.random.Generator) -> Tensor:
    """The mean (N, 16, 9 * C) of frames that show one scene each; signals (N, 1, 12)."""
    device = next(network.parameters()).device
    words = network.embed_words(choose_words(signals[..., NOW], numbers).to(device))
    scenes = scenes_of(signals, device)
    light = network.light(scenes.camera, scenes, words)
    mean: Tensor = network.memory(scenes.camera[:, 0], scenes.clock[:, 0], light[:, 0])[0]
    return mean


def memory_optimiser(network: TinyNetwork, scale: float = 1.0) -> Optimiser:
    memory = network.memory
    linears = [layer.weight for layer in memory.layers if isinstance(layer, nn.Linear)]
    matrices = [memory.into.weight, *linears]
    slow = [memory.linear, memory.images, memory.average]
    taken = {id(p) for p in (*matrices, *slow)}
    modules = (memory, network.words, network.text, network.pool, network.motion, network.phase)
    fast = [p for module in modules for p in module.parameters() if id(p) not in taken] + [network.slots]
    groups = [{"params": fast, "lr": 2e-3 * scale}, {"params": slow, "lr": 4e-4 * scale}]
    return Optimiser(matrices, groups, 0.02 * scale)


@torch.no_grad()
def measure_memory(network: TinyNetwork, frames: MemoryFrames, count: int = 1024) -> float:
    """Squared error of the mean over held-out frames relative to their variance."""
    chance = Chance.of(0, "measure", 0)
    signals, target = frames.take(chance.numbers, count)
    mean = recall_frames(network, signals, chance.numbers).cpu()
    return float((mean - target).square().mean() / target.var())


@torch.no_grad()
def fit_tables(memory: SceneMemory, frames: MemoryFrames, sweeps: int = 4) -> None:
    """Starts the tables in closed form: latents minus the mean of their light are a sum of one function per layer.

    Back-fitting, once for day and once for night; the tables take the strongest directions of what was found.
    """
    signals, target = frames.take(np.random.default_rng(17), 9000)
    row = signals[:, 0]
    time, weather, subject = (row[:, NOW][:, i].astype(int) for i in range(3))
    groups = (np.isin(time, (0, 1)) & (weather < 3), (time == 3) & (weather < 3))
    sizes = [round(memory.tables[0].shape[1] * share) for share in (0.625, 0.375)]
    found = [_backfit(row[g], target[torch.from_numpy(g)], time[g] * 5 + weather[g], sweeps) for g in groups]
    for layer in range(len(memory.tables)):
        tables, directions = [], []
        for group, size in zip(found, sizes, strict=True):
            left, power, right = torch.linalg.svd(group[layer], full_matrices=False)
            scale = group[layer].shape[0] ** 0.5
            tables.append(left[:, :size] * scale)
            directions.append(right[:size] * power[:size, None] / scale)
        memory.tables[layer].copy_(torch.cat(tables, 1))
        width = memory.tables[layer].shape[1]
        memory.linear[layer * width : (layer + 1) * width] = torch.cat(directions) * 0.7
    _fit_images(memory, target, time * 5 + weather, subject)


def _backfit(signals: Array, target: Tensor, light: npt.NDArray[np.int64], sweeps: int) -> list[Tensor]:
    residual = target.clone()
    for k in np.unique(light):
        here = torch.from_numpy(light == k)
        residual[here] -= residual[here].mean(0)
    camera, clock = (torch.from_numpy(np.ascontiguousarray(signals[:, c])) for c in (CAMERA, CLOCK))
    sizes = [period // SPACING for period in (*LAYER_PERIODS, CLOUD_PERIOD)]
    places = [
        (place / SPACING).round().long().flatten() % size
        for place, size in zip(map_places(camera, clock), sizes, strict=True)
    ]
    rows = residual.reshape(-1, COLUMN)
    tables = [torch.zeros(size, COLUMN) for size in sizes]
    for _ in range(sweeps):
        for layer in (3, 2, 1, 0, 4):
            rows += tables[layer][places[layer]]
            seen = torch.zeros(sizes[layer]).index_add_(0, places[layer], torch.ones(len(rows)))
            total = torch.zeros(sizes[layer], COLUMN).index_add_(0, places[layer], rows)
            tables[layer] = _blur(total) / (_blur(seen[:, None]) + 4.0)
            rows -= tables[layer][places[layer]]
    logger.info("closed form leaves %.3f of the variance", float(rows.var() / target.var()))
    return tables


def _blur(x: Tensor) -> Tensor:
    """Shares what is seldom seen with the neighbours on the ring: weights 1, 2, 1."""
    return x + 0.5 * (x.roll(1, 0) + x.roll(-1, 0))


def _fit_images(
    memory: SceneMemory, target: Tensor, light: npt.NDArray[np.int64], subject: npt.NDArray[np.int64]
) -> None:
    """Mean pictures of each light, and what each subject adds, as the strongest directions."""
    means = [target[torch.from_numpy(light == k)].mean(0) for k in range(20)]
    nobody = target[torch.from_numpy(subject == 0)].mean(0)
    means += [target[torch.from_numpy(subject == k)].mean(0) - nobody for k in range(1, 6)]
    stacked = torch.stack(means)
    memory.average.copy_(stacked[:20].mean(0))
    stacked[:20] -= memory.average
    _, power, basis = torch.linalg.svd(stacked.flatten(1), full_matrices=False)
    count = min(len(power), len(memory.images))
    memory.images[:count] = (basis * power[:, None] / 5)[:count].unflatten(1, (COLUMNS, COLUMN))
