"""Trains the transformer on clips: full context, then teacher-forced blocks, then its own past in few steps.

Each of the three is a losses function over the same clips; `forcing` has the reusable pieces. The target is always the
true clip: this world has one right answer for every camera, clock and caption, so its few-step stage needs no teacher.
"""

from typing import Final

import numpy as np
import torch
from torch import Tensor

from engine.models.tiny.network import Given, TinyNetwork, to_tokens
from engine.models.tiny.planet import LATENTS_PER_BLOCK
from engine.training.data import BEFORE, CLIP_LATENTS, NOW, Array, Clips
from engine.training.forcing import TeacherForcing, Whole, noised, own_guess, renoised, teacher_forced
from engine.training.memory import choose_words, scenes_of
from engine.training.optimiser import Optimiser
from engine.training.run import Chance

WINDOW_BLOCKS: Final = 3
CONTEXT_NOISE: Final = 0.3
SHAPES: Final = ((2, 12, 1), (4, 4, 2), (8, 2, 2))
SHAPE_SHARE: Final = (0.3, 0.3, 0.4)
"""Latent frames, clips and noisy copies of a batch, and how often each is drawn; the first is a world's first block."""
STEP_TIMES: Final = (1.0, 0.95, 0.83)
"""Of the sampler: what a first block is to be (here a livery) is decided in much noise, little by little."""
LATER_TIMES: Final = (0.95, 0.83, 0.5)
"""Of the second step and those after it, with two to four steps."""
MEMORY_PARTS: Final = ("memory", "words", "slots", "text", "pool", "motion", "phase")


class TransformerData:
    """Batches of clips with everything the network is told about them."""

    def __init__(self, clips: Clips, shards: range, scale: int = 1) -> None:
        self.clips, self.shards, self.scale = clips, shards, scale
        self.per_shard = len(clips.shards[shards[0]].signals)

    def shape(self, chance: Chance) -> tuple[int, int, int]:
        """Latent frames, clips and noisy copies of the next batch."""
        frames, batch, copies = SHAPES[chance.numbers.choice(len(SHAPES), p=SHAPE_SHARE)]
        return frames, batch * self.scale, copies

    def take(self, chance: Chance, frames: int, batch: int) -> tuple[Array, Tensor]:
        numbers = chance.numbers
        first_clip = self.shards[0] * self.per_shard
        which = first_clip + numbers.integers(0, len(self.shards) * self.per_shard, batch)
        start = numbers.integers(0, (CLIP_LATENTS - frames) // LATENTS_PER_BLOCK + 1, batch) * LATENTS_PER_BLOCK
        signals, latents = self.clips.take(which, start, frames)
        return signals, torch.from_numpy(latents).to(chance.device)


def give(network: TinyNetwork, signals: Array, numbers: np.random.Generator) -> Given:
    """Words drawn for the scenes of signals (B, F, 12), the same in a whole clip for the same scene; memory asked."""
    device = network.place.device
    words_before, words = (network.embed_words(ids.to(device)) for ids in _clip_words(signals, numbers))
    cross = network.cross_kv(torch.cat([words_before, words], -2))
    return network.recall(scenes_of(signals, device), words_before, words, cross)


def _clip_words(signals: Array, numbers: np.random.Generator) -> tuple[Tensor, Tensor]:
    before, now = choose_words(signals[..., BEFORE], numbers), choose_words(signals[..., NOW], numbers)
    for clip in range(len(signals)):
        said: dict[tuple[float, ...], Tensor] = {}
        for frame in range(signals.shape[1]):
            for scene, ids in ((BEFORE, before), (NOW, now)):
                key = tuple(signals[clip, frame, scene].tolist())
                ids[clip, frame] = said.setdefault(key, ids[clip, frame].clone())
    return before, now


def full_losses(network: TinyNetwork, data: TransformerData, chance: Chance) -> dict[str, Tensor]:
    """The full-context diffusion model: all frames of a clip at one time, all seeing each other."""
    batch = 4 * data.scale
    signals, x = data.take(chance, CLIP_LATENTS, batch)
    given = give(network, signals, chance.numbers)
    t = _times(chance, batch, 1, 1)[:, 0].expand(-1, CLIP_LATENTS)
    answer = network.predict(noised(x, t, chance.normal(*x.shape)), t, given, Whole())
    return {"loss": weighted(network, answer, x, t), "error": (answer - x).square().mean()}


def block_losses(network: TinyNetwork, data: TransformerData, chance: Chance) -> dict[str, Tensor]:
    """Teacher forcing: blocks from noise, seeing a noised copy of the true past."""
    frames, batch, copies = data.shape(chance)
    signals, x = data.take(chance, frames, batch)
    given = give(network, signals, chance.numbers)
    context_t = (CONTEXT_NOISE * chance.uniform(batch, 1) ** 2).expand(-1, frames)
    clean = (noised(x, context_t, chance.normal(*x.shape)), context_t)
    t = _times(chance, batch, copies, frames // LATENTS_PER_BLOCK).repeat_interleave(LATENTS_PER_BLOCK, 2)
    noisy = noised(x[:, None].expand(-1, copies, -1, -1, -1, -1), t, chance.normal(batch, copies, *x.shape[1:]))
    context = TeacherForcing(frames, LATENTS_PER_BLOCK, WINDOW_BLOCKS, copies)
    answer = teacher_forced(network.predict, given, clean, (noisy, t), context)
    error = (answer[:, 0] - x).square().mean()
    return {"loss": weighted(network, answer, x[:, None], t), "error": error}


def few_step_losses(network: TinyNetwork, data: TransformerData, chance: Chance) -> dict[str, Tensor]:
    """As it will be run: context and later steps made of its own guesses, at the sampler's times."""
    frames, batch, _ = data.shape(chance)
    signals, x = data.take(chance, frames, batch)
    given = give(network, signals, chance.numbers)
    start = (0.5 + 0.5 * chance.uniform(batch, 1)).expand(-1, frames)
    guess = own_guess(network.predict, given, x, (start, chance.normal(*x.shape)), LATENTS_PER_BLOCK, WINDOW_BLOCKS)
    past = torch.where(chance.uniform(batch, 1, 1, 1, 1) < 0.7, guess, x)
    later = torch.tensor(chance.numbers.choice(LATER_TIMES, (batch, 1)), dtype=x.dtype, device=x.device)
    later = later.expand(-1, frames)
    noisy = torch.stack([chance.normal(*x.shape), renoised(guess, later, chance.normal(*x.shape))], 1)
    times = torch.stack([torch.ones_like(later), later], 1)
    context = TeacherForcing(frames, LATENTS_PER_BLOCK, WINDOW_BLOCKS, 2)
    answer = teacher_forced(network.predict, given, (past, torch.zeros_like(later)), (noisy, times), context)
    error_1, error_2 = ((answer[:, i] - x).square().mean() for i in range(2))
    return {"loss": (error_1 + error_2) / network.variance.mean(), "error_1": error_1, "error_2": error_2}


def weighted(network: TinyNetwork, answer: Tensor, target: Tensor, t: Tensor) -> Tensor:
    """Squared error weighted so that each time asks about as much of the network: ((1 - t)^2 r + t^2) / (t^2 r)."""
    r = network.variance.mean()
    weight = (((1 - t) ** 2 * r + t**2) / t.square()).clamp(max=10.0) / r
    return ((answer - target).square().mean((-3, -2, -1)) * weight).mean()


def _times(chance: Chance, batch: int, copies: int, blocks: int) -> Tensor:
    """(batch, copies, blocks): the first copy mostly pure noise, others all over."""
    high = torch.where(chance.uniform(batch, 1, blocks) < 0.6, 1.0, 0.5 + 0.5 * chance.uniform(batch, 1, blocks))
    if copies == 1:
        spread = torch.sigmoid(1.2 * chance.normal(batch, 1, blocks))
        return torch.where(chance.uniform(batch, 1, blocks) < 0.65, high, spread).clamp(min=0.02)
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
    """Error relative to the variance of latents: memory alone, first block, later blocks, at some times."""
    chance = Chance.of(0, "measure", 0)
    signals, x = data.take(chance, CLIP_LATENTS, clips)
    given = give(network, signals, chance.numbers)
    context = TeacherForcing(CLIP_LATENTS, LATENTS_PER_BLOCK, WINDOW_BLOCKS, 1)
    power, report = float(x.var()), []
    alone = float((to_tokens(x) - given.mean).square().mean()) / power
    noise, zero = chance.normal(*x.shape), torch.zeros(clips, CLIP_LATENTS)
    for time in (1.0, 0.5):
        t = torch.full((clips, 1, CLIP_LATENTS), time)
        noisy = noised(x[:, None], t, noise[:, None])
        error = (teacher_forced(network.predict, given, (x, zero), (noisy, t), context)[:, 0] - x).square()
        first, later = (float(error[:, part].mean()) / power for part in (slice(0, 2), slice(2, None)))
        report.append(f"t={time}: {first:.4f} / {later:.4f}")
    start = torch.full((clips, CLIP_LATENTS), 0.9)
    guess = own_guess(network.predict, given, x, (start, noise), LATENTS_PER_BLOCK, WINDOW_BLOCKS)
    t = torch.full((clips, 1, CLIP_LATENTS), STEP_TIMES[1])
    second = renoised(guess[:, None], t, chance.normal(*guess[:, None].shape))
    error = (teacher_forced(network.predict, given, (guess, zero), (second, t), context)[:, 0] - x).square()
    return f"memory {alone:.4f} {' '.join(report)} two steps, own context {float(error.mean()) / power:.4f}"
