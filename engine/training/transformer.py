"""Trains the transformer on clips: full context, teacher-forced blocks, then its own past in few steps.

Each of the three is a losses function over the same clips; `forcing` has the reusable pieces. The target is always the
true clip: this world has one right answer for every camera, clock, caption and livery, and the livery is tied to the
first block's noise, so its few-step stage needs no teacher.
"""

from collections.abc import Mapping
from typing import Final, TypeVar

import numpy as np
import torch
from torch import Tensor

from engine.models.tiny.network import CHOOSING, Given, TinyNetwork, to_latents, to_tokens
from engine.models.tiny.planet import CHANNELS, COLUMNS, LATENTS_PER_BLOCK, ROWS
from engine.training.data import BEFORE, CLIP_LATENTS, LIVERY, NOW, SHARD_CLIPS, Array, Clips, painted
from engine.training.forcing import (
    Rolling,
    TeacherForcing,
    Whole,
    coupled,
    noised,
    own_clip,
    renoised,
    teacher_forced,
)
from engine.training.memory import choose_words, scenes_of
from engine.training.optimiser import Optimiser
from engine.training.run import Chance

T = TypeVar("T")
WINDOW_BLOCKS: Final = 3
CONTEXT_NOISE: Final = 0.3
SHAPES: Final = {(2, 16, 1): 0.5, (4, 4, 2): 0.1, (8, 2, 2): 0.4}
"""Latent frames, clips and noisy copies of a batch, and how often each is drawn; the first is a world's first block."""
OWN_SHAPES: Final = {(2, 16): 0.3, (8, 4): 0.7}
"""Latent frames and clips of a batch of the few-step stage, and how often each is drawn."""
OWN_RATE: Final = 0.3
"""Learning rates of the few-step stage, as a share of those before: its batches show few clips, and it only mends."""
SCHEDULES: Final = ((1.0,), (1.0, 0.0025), (1.0, 0.005, 0.00125), (1.0, 0.0074, 0.0025, 0.0008))
"""Times of the sampler with one to four steps (its shift is 0.0025). The first step has chosen all there is to choose;
what noise a later one must take out again is in its way."""
STEP_TIMES: Final = SCHEDULES[0]
"""Those that it ships with."""
OWN_SCHEDULES: Final = {times: len(times) / sum(map(len, SCHEDULES)) for times in SCHEDULES}
"""How often each is drawn in the few-step stage: of its steps, the first and one more are learned in a batch."""
CONTEXT_TIME: Final = 0.15
"""Noise in what a running world shows of the past."""
OWN_SHARE: Final = 0.8
"""How often the past is the network's own and not the true one."""
PAINTED_SHARE: Final = 0.8
"""How many clips are of those that show something in a livery; of all clips it is little more than half."""
MEMORY_PARTS: Final = ("memory", "words", "slots", "text", "pool", "motion", "phase")


class TransformerData:
    """Batches of clips with everything the network is told about them."""

    def __init__(self, clips: Clips, shards: range, scale: int = 1) -> None:
        self.clips, self.scale = clips, scale
        shown = np.concatenate([painted(clips.shards[shard].signals).any(1) for shard in shards])
        self.plain, self.painted = (shards[0] * SHARD_CLIPS + np.flatnonzero(shown == kind) for kind in (False, True))

    def take(self, chance: Chance, frames: int, batch: int) -> tuple[Array, Tensor]:
        numbers = chance.numbers
        kind = numbers.random(batch) < PAINTED_SHARE
        which = np.where(kind, numbers.choice(self.painted, batch), numbers.choice(self.plain, batch))
        start = numbers.integers(0, (CLIP_LATENTS - frames) // LATENTS_PER_BLOCK + 1, batch) * LATENTS_PER_BLOCK
        signals, latents = self.clips.take(which, start, frames)
        return signals, torch.from_numpy(latents).to(chance.device)


def give(network: TinyNetwork, signals: Array, numbers: np.random.Generator) -> Given:
    """Words drawn for the scenes of signals (B, F, 12), the same in a whole clip for the same scene; memory asked."""
    device = network.place.device
    words_before, words = (network.embed_words(ids.to(device)) for ids in _clip_words(signals, numbers))
    cross = network.cross_kv(torch.cat([words_before, words], -2))
    return network.recall(scenes_of(signals, device), words_before, words, cross)


def drawn(shares: Mapping[T, float], chance: Chance) -> T:
    """One of some things, each with its share of all draws."""
    return tuple(shares)[chance.numbers.choice(len(shares), p=tuple(shares.values()))]


def _clip_words(signals: Array, numbers: np.random.Generator) -> tuple[Tensor, Tensor]:
    before, now = choose_words(signals[..., BEFORE], numbers), choose_words(signals[..., NOW], numbers)
    for clip in range(len(signals)):
        said: dict[tuple[float, ...], Tensor] = {}
        for frame in range(signals.shape[1]):
            for scene, ids in ((BEFORE, before), (NOW, now)):
                key = tuple(signals[clip, frame, scene].tolist())
                ids[clip, frame] = said.setdefault(key, ids[clip, frame].clone())
    return before, now


def draw_noise(signals: Array, t: Tensor, chance: Chance) -> Tensor:
    """Noise (B, F, C, 9, 16) for times (B, F). It says the livery where a block has nothing else to tell it by."""
    blocks = (len(t), -1, LATENTS_PER_BLOCK)
    alone = openings(signals).to(t.device) & (t.reshape(blocks) == 1).all(2)
    livery = torch.from_numpy(signals[:, 0, LIVERY]).to(t.device).long()
    signs = 2.0 * torch.stack([livery % 2, livery // 2], -1) - 1
    choice = signs[:, None] * alone[..., None]
    noise = chance.normal(alone.numel(), LATENTS_PER_BLOCK, CHANNELS, ROWS, COLUMNS)
    return coupled(noise, choice.flatten(0, 1), corner().to(t.device)).reshape(*t.shape, CHANNELS, ROWS, COLUMNS)


def openings(signals: Array) -> Tensor:
    """Blocks (B, F / 2) whose livery no block before them shows: the first, or the first with anything painted."""
    shown = torch.from_numpy(painted(signals)).reshape(len(signals), -1, LATENTS_PER_BLOCK).any(2)
    first: Tensor = shown & (shown.cumsum(1) == 1)
    first[:, 0] = True
    return first


def corner() -> Tensor:
    """The directions of a block's noise (2, 2, C, 9, 16) that choose."""
    directions = torch.zeros(len(CHOOSING), LATENTS_PER_BLOCK, CHANNELS, ROWS, COLUMNS)
    for direction, channel in zip(directions, CHOOSING, strict=True):
        direction[:, channel, 0, 0] = LATENTS_PER_BLOCK**-0.5
    return directions


def full_losses(network: TinyNetwork, data: TransformerData, chance: Chance) -> dict[str, Tensor]:
    """The full-context diffusion model: all frames of a clip at one time, all seeing each other."""
    batch = 4 * data.scale
    signals, x = data.take(chance, CLIP_LATENTS, batch)
    given = give(network, signals, chance.numbers)
    t = _times(chance, batch, 1, 1)[:, 0].expand(-1, CLIP_LATENTS)
    answer = network.predict(noised(x, t, draw_noise(signals, t, chance)), t, given, Whole())
    return {"loss": weighted(network, answer, x, t), "error": (answer - x).square().mean()}


def block_losses(network: TinyNetwork, data: TransformerData, chance: Chance) -> dict[str, Tensor]:
    """Teacher forcing: blocks from noise, seeing a noised copy of the true past."""
    frames, clips, copies = drawn(SHAPES, chance)
    batch = clips * data.scale
    signals, x = data.take(chance, frames, batch)
    given = give(network, signals, chance.numbers)
    context_t = (CONTEXT_NOISE * chance.uniform(batch, 1) ** 2).expand(-1, frames)
    clean = (noised(x, context_t, chance.normal(*x.shape)), context_t)
    t = _times(chance, batch, copies, frames // LATENTS_PER_BLOCK).repeat_interleave(LATENTS_PER_BLOCK, 2)
    noise = torch.stack([draw_noise(signals, t[:, copy], chance) for copy in range(copies)], 1)
    noisy = noised(x[:, None].expand_as(noise), t, noise)
    context = TeacherForcing(frames, LATENTS_PER_BLOCK, WINDOW_BLOCKS, copies)
    answer = teacher_forced(network.predict, given, clean, (noisy, t), context)
    error = (answer[:, 0] - x).square().mean()
    return {"loss": weighted(network, answer, x[:, None], t), "error": error}


def few_step_losses(network: TinyNetwork, data: TransformerData, chance: Chance) -> dict[str, Tensor]:
    """As it will be run: the past and the input of later steps are what it made of the clip by itself, from noise."""
    frames, clips = drawn(OWN_SHAPES, chance)
    batch = clips * data.scale
    signals, x = data.take(chance, frames, batch)
    given = give(network, signals, chance.numbers)
    times = drawn(OWN_SCHEDULES, chance)
    start = torch.ones(batch, frames, device=x.device)
    first, written = draw_noise(signals, start, chance), _written(start, chance)
    own = roll(network, given, first, times, written, chance)
    past = own[-1] if chance.numbers.random() < OWN_SHARE else x
    noisy, at = [first], [start]
    if len(times) > 1:
        step = int(chance.numbers.integers(1, len(times)))
        at.append(torch.full_like(start, times[step]))
        noisy.append(renoised(own[step - 1], at[-1], chance.normal(*x.shape)))
    clean = (noised(past, written, chance.normal(*x.shape)), written)
    context = TeacherForcing(frames, LATENTS_PER_BLOCK, WINDOW_BLOCKS, len(at))
    answer = teacher_forced(network.predict, given, clean, (torch.stack(noisy, 1), torch.stack(at, 1)), context)
    errors = [(answer[:, copy] - x).square().mean() for copy in range(len(at))]
    return {"loss": torch.stack(errors).sum() / network.variance.mean(), "first": errors[0], "last": errors[-1]}


def _written(like: Tensor, chance: Chance) -> Tensor:
    """Times of the clean pass (B, F), one for each clip: mostly what a running world uses."""
    spread = CONTEXT_NOISE * chance.uniform(len(like), 1)
    return torch.where(chance.uniform(len(like), 1) < 0.7, CONTEXT_TIME, spread).expand_as(like)


def roll(
    network: TinyNetwork, given: Given, first: Tensor, times: tuple[float, ...], written: Tensor, chance: Chance
) -> list[Tensor]:
    """Clips streamed block by block from the noise `first`: what each step of the sampler answered."""
    noise = [first, *(chance.normal(*first.shape) for _ in times[1:])]
    past = Rolling(LATENTS_PER_BLOCK, WINDOW_BLOCKS)
    return own_clip(network.predict, given, noise, times, (written, chance.normal(*first.shape)), past)


def weighted(network: TinyNetwork, answer: Tensor, target: Tensor, t: Tensor) -> Tensor:
    """Squared error weighted so that each time asks about as much of the network: ((1 - t)^2 r + t^2) / (t^2 r)."""
    r = network.variance.mean()
    weight = (((1 - t) ** 2 * r + t**2) / t.square()).clamp(max=10.0) / r
    return ((answer - target).square().mean((-3, -2, -1)) * weight).mean()


def _times(chance: Chance, batch: int, copies: int, blocks: int) -> Tensor:
    """(batch, copies, blocks): the first copy mostly pure noise, others all over."""
    high = torch.where(chance.uniform(batch, 1, blocks) < 0.7, 1.0, 0.5 + 0.5 * chance.uniform(batch, 1, blocks))
    if copies == 1:
        spread = torch.sigmoid(1.2 * chance.normal(batch, 1, blocks))
        return torch.where(chance.uniform(batch, 1, blocks) < 0.8, high, spread).clamp(min=0.02)
    spread = torch.sigmoid(1.2 * chance.normal(batch, copies - 1, blocks))
    return torch.cat([high, spread], 1).clamp(min=0.02)


def trunk_optimiser(network: TinyNetwork, scale: float = 1.0) -> Optimiser:
    """Everything but the scene memory and the words, which are frozen."""
    for name in MEMORY_PARTS:
        getattr(network, name).requires_grad_(False)
    matrices = [p for name, p in network.layers.named_parameters() if p.dim() == 2 and "bias" not in name]
    taken = {id(p) for p in matrices}
    rest = [p for p in network.parameters() if p.requires_grad and id(p) not in taken]
    return Optimiser(matrices, [{"params": rest, "lr": 5e-4 * scale}], 0.005 * scale)


def begin_transformer(network: TinyNetwork, seed: int) -> None:
    """Everything beside the memory as it is at the start of this seed."""
    torch.manual_seed(seed)
    fresh = TinyNetwork().state_dict()
    network.load_state_dict({k: v for k, v in fresh.items() if not k.startswith(MEMORY_PARTS)}, strict=False)


@torch.no_grad()
def measure_variance(network: TinyNetwork, data: TransformerData) -> None:
    """Sets the residual variance per channel of a token, which preconditions the diffusion."""
    chance, total = Chance.of(0, "variance", 0), torch.zeros_like(network.variance)
    for _ in range(16):
        signals, x = data.take(chance, CLIP_LATENTS, 8)
        total += (to_tokens(x) - give(network, signals, chance.numbers).mean).square().mean((0, 1, 2)) / 16
    network.variance.copy_(total.clamp(min=0.004))


@torch.no_grad()
def measure_blocks(network: TinyNetwork, data: TransformerData, clips: int = 24) -> str:
    """Error by block in clips with something painted, relative to the variance of latents.

    That of the memory alone; of one step with the true past; of clips rolled out by some of the samplers.
    """
    chance = Chance.of(0, "measure", 0)
    signals, x = data.take(chance, CLIP_LATENTS, 6 * clips)
    kept = np.flatnonzero(painted(signals)[:, 0])[:clips]
    signals, x = signals[kept], x[torch.from_numpy(kept)]
    given, start = give(network, signals, chance.numbers), torch.ones(len(x), CLIP_LATENTS, device=x.device)
    first, written = draw_noise(signals, start, chance), torch.full_like(start, CONTEXT_TIME)
    context = TeacherForcing(CLIP_LATENTS, LATENTS_PER_BLOCK, WINDOW_BLOCKS, 1)
    shown, noisy = noised(x, written, chance.normal(*x.shape)), (first[:, None], start[:, None])
    made = {"memory": to_latents(given.mean)}
    made["true past"] = teacher_forced(network.predict, given, (shown, written), noisy, context)[:, 0]
    for times in SCHEDULES:
        made[str(times)] = roll(network, given, first, times, written, chance)[-1]
    return ", ".join(f"{name} {_by_block(answer - x, float(x.var()))}" for name, answer in made.items())


def _by_block(error: Tensor, power: float) -> str:
    blocks = error.square().mean((0, 2, 3, 4)).reshape(-1, LATENTS_PER_BLOCK).mean(1) / power
    return " ".join(f"{float(block):.4f}" for block in blocks)
