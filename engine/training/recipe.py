"""The recipe of `tiny-world`: codec, clips, memory, full, blocks, few-step, and the decoder beside them.

Each stage starts where the one before left off and can be killed and resumed at any moment. How many steps a stage
takes is decided once, from the time it may take and its measured pace, and written to `plan.json`: with that file the
same seed gives the same weights on the same machine.
"""

import json
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from copy import deepcopy
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from engine.models.tiny.decoder import KeyframeDecoder
from engine.models.tiny.model import load_from
from engine.models.tiny.network import TinyNetwork
from engine.training import codec as linear
from engine.training.codec import LinearCodec
from engine.training.data import Array, Clips, make_shard, show, walk
from engine.training.decoder import (
    Degrade,
    add_noise,
    decoder_losses,
    decoder_optimiser,
    measure_decoder,
    new_decoder,
    render_lesson,
)
from engine.training.forcing import Whole, noised
from engine.training.memory import MemoryFrames, fit_tables, measure_memory, memory_losses, memory_optimiser
from engine.training.optimiser import Optimiser
from engine.training.options import ALIASES, SHARE, STAGES, TrainingOptions
from engine.training.run import Average, Chance, Plan, Stage
from engine.training.sheets import write_sheet
from engine.training.transformer import (
    CONTEXT_TIME,
    OWN_RATE,
    STEP_TIMES,
    TransformerData,
    begin_transformer,
    block_losses,
    draw_noise,
    few_step_losses,
    full_losses,
    give,
    measure_blocks,
    measure_variance,
    roll,
    trunk_optimiser,
)
from engine.training.truth import codec_of
from engine.weights import WeightsError

logger = logging.getLogger(__name__)

CODEC: Final = "codec.safetensors"
START: Final = "start.pt"
START_DECODER: Final = "start-decoder.pt"


def run_training(options: TrainingOptions) -> None:
    """Runs the stage (or all of them) to its end, or on from its last checkpoint."""
    options.out.mkdir(parents=True, exist_ok=True)
    if options.start is not None:
        begin_with(options.start, options.out)
    asked = STAGES if options.stage == "all" else ALIASES.get(options.stage, (options.stage,))
    for stage in asked:
        logger.info("stage %s", stage)
        RUNNERS[stage](options)


def begin_with(weights: Path, run: Path) -> None:
    """Makes exported weights what the stages of a new run go on from. Raises WeightsError."""
    if (run / CODEC).exists():
        if not (run / START).exists():
            raise WeightsError(f"{run}: expected a new run for the start {weights}, got one with a codec of its own")
        return
    model = load_from(weights)
    decoder = model.decoder.network
    torch.save({"average": decoder.state_dict()}, run / START_DECODER)
    torch.save({"average": model.network.state_dict()}, run / START)
    codec_of(decoder.basis.detach(), decoder.mean.detach()).save(run / CODEC)  # last: it says that all is there


# -- data --------------------------------------------------------------------------------------------------


def make_codec(options: TrainingOptions) -> None:
    path = options.out / CODEC
    if not path.exists():
        numbers = np.random.default_rng((options.seed, 10**9))
        pictures = [show(walk(numbers, 2)[i % 2]).picture() for i in range(1400)]
        linear.fit(np.stack(pictures)).save(path)


def make_clips(options: TrainingOptions) -> None:
    """The training shards, and one more that is held out."""
    codec = LinearCodec.load(options.out / CODEC)
    make = partial(make_shard, options.out / "clips", seed=options.seed, codec=codec)
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as processes:
        list(processes.map(make, range(options.size.shards + 1)))


def open_clips(options: TrainingOptions) -> tuple[Clips, range, range]:
    """All clips, the training shards, the held-out shard."""
    shards = options.size.shards
    return Clips.open(options.out / "clips", range(shards + 1)), range(shards), range(shards, shards + 1)


# -- stages --------------------------------------------------------------------------------------------------


def train_memory(options: TrainingOptions) -> None:
    clips, training, held_out = open_clips(options)
    frames, checks = MemoryFrames(clips, training), MemoryFrames(clips, held_out)
    torch.manual_seed(options.seed)
    start = options.out / START
    network = (load_network(start) if start.exists() else TinyNetwork()).to(options.device)
    optimiser = memory_optimiser(network)

    def losses(chance: Chance) -> dict[str, Tensor]:
        return memory_losses(network, frames, options.size.memory_batch, chance)

    stage = _stage(options, "memory", network, optimiser, losses, hold=0.45)
    if not stage.resume() and not start.exists():
        fit_tables(network.memory, frames)
        stage.average = Average(network, 0.995)
    stage.run(losses, lambda module: f"{measure_memory(_network(module), checks):.4f}")


def train_full(options: TrainingOptions) -> None:
    _train_transformer(options, "full", "memory", full_losses, trunk_optimiser)


def train_blocks(options: TrainingOptions) -> None:
    _train_transformer(options, "blocks", "full", block_losses, trunk_optimiser)


def train_few_step(options: TrainingOptions) -> None:
    _train_transformer(options, "few-step", "blocks", few_step_losses, partial(trunk_optimiser, scale=OWN_RATE))


Losses = Callable[[TinyNetwork, TransformerData, Chance], dict[str, Tensor]]


def _train_transformer(
    options: TrainingOptions, name: str, before: str, losses: Losses, optimiser: Callable[[TinyNetwork], Optimiser]
) -> None:
    clips, training, held_out = open_clips(options)
    scale = options.size.clip_scale
    data, checks = TransformerData(clips, training, scale), TransformerData(clips, held_out)
    network = load_network(first_of(options.out / f"{before}.pt", options.out / START)).to(options.device)
    if before == "memory":
        begin_transformer(network, options.seed)
        measure_variance(network, data)

    def of(chance: Chance) -> dict[str, Tensor]:
        return losses(network, data, chance)

    codec = LinearCodec.load(options.out / CODEC)

    def check(module: torch.nn.Module) -> str:
        write_sheet(options.out / f"{name}-sheet.png", sheet_clips(_network(module), checks, codec))
        return measure_blocks(_network(module), checks)

    stage = _stage(options, name, network, optimiser(network), of, hold=0.5)
    stage.resume()
    stage.run(of, check)


def train_decoder(options: TrainingOptions) -> None:
    """On true latents with noise; once the memory is trained, two thirds of them its own."""
    codec = LinearCodec.load(options.out / CODEC)
    torch.manual_seed(options.seed)
    start = options.out / START_DECODER
    decoder = (load_decoder(start) if start.exists() else new_decoder(codec)).to(options.device)
    degrade = _degrade(options)

    def losses(chance: Chance) -> dict[str, Tensor]:
        return decoder_losses(decoder, codec, options.size.decoder_batch, degrade, chance)

    lessons = [render_lesson(codec, 8, np.random.default_rng((options.seed, 9, i))) for i in range(8)]
    stage = _stage(options, "decoder", decoder, decoder_optimiser(decoder), losses, hold=0.4)
    stage.resume()
    stage.run(losses, lambda module: measure_decoder(_decoder(module), lessons))


def _degrade(options: TrainingOptions) -> Degrade:
    """Latents as the newest network in the run makes them, for two thirds of the frames."""
    path = newest_network(options.out)
    if path is None:
        return add_noise
    network = load_network(path).to(options.device)

    @torch.no_grad()
    def degrade(signals: Array, latents: Tensor, chance: Chance) -> Tensor:
        given = give(network, signals[:, None], chance.numbers)
        start = 0.4 + 0.5 * chance.uniform(len(latents), 1)
        noisy = noised(latents[:, None], start, chance.normal(*latents[:, None].shape))
        made = network.predict(noisy, start, given, Whole())[:, 0]
        own = chance.uniform(len(latents), 1, 1, 1) < 0.66
        share = chance.uniform(len(latents), 1, 1, 1).sqrt()
        return torch.where(own, latents + (made - latents) * share, add_noise(signals, latents, chance))

    return degrade


def sheet_clips(network: TinyNetwork, data: TransformerData, codec: LinearCodec) -> tuple[Array, Array]:
    """Eight held-out clips rolled out from noise, and the truth: pictures of every second latent frame of both."""
    chance = Chance.of(0, "sheet", 0)
    signals, truth = data.take(chance, 8, 8)
    made = roll_clips(network, signals, chance)
    return codec.decode(made[:, ::2].flatten(0, 1).numpy()), codec.decode(truth[:, ::2].flatten(0, 1).numpy())


@torch.no_grad()
def roll_clips(network: TinyNetwork, signals: Array, chance: Chance) -> Tensor:
    """Clips (B, F, C, 9, 16) streamed block by block under the signals (B, F, 13), in the livery of the clips."""
    start = torch.ones(signals.shape[:2])
    first, given = draw_noise(signals, start, chance), give(network, signals, chance.numbers)
    return roll(network, given, first, STEP_TIMES, CONTEXT_TIME * start, chance)[-1]


# -- checkpoints --------------------------------------------------------------------------------------------------


def newest_network(folder: Path) -> Path | None:
    """The checkpoint of the furthest stage that has trained the network."""
    made = [folder / f"{name}.pt" for name in ("few-step", "blocks", "full", "memory")]
    return next((path for path in (*made, folder / START) if path.exists()), None)


def newest_decoder(folder: Path) -> Path:
    """Its own if the run has trained one."""
    return first_of(folder / "decoder.pt", folder / START_DECODER)


def first_of(own: Path, start: Path) -> Path:
    """What the run has made, or else what it began with."""
    return own if own.exists() or not start.exists() else start


def load_network(path: Path) -> TinyNetwork:
    """The averaged network of a checkpoint."""
    network = TinyNetwork()
    network.load_state_dict(torch.load(path, weights_only=True, map_location="cpu")["average"])
    return network


def load_decoder(path: Path) -> KeyframeDecoder:
    decoder = KeyframeDecoder()
    decoder.load_state_dict(torch.load(path, weights_only=True, map_location="cpu")["average"])
    return decoder.to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


def _network(module: torch.nn.Module) -> TinyNetwork:
    assert isinstance(module, TinyNetwork)
    return module


def _decoder(module: torch.nn.Module) -> KeyframeDecoder:
    assert isinstance(module, KeyframeDecoder)
    return module


def _stage(
    options: TrainingOptions,
    name: str,
    module: torch.nn.Module,
    optimiser: Optimiser,
    losses: Callable[[Chance], dict[str, Tensor]],
    hold: float,
) -> Stage:
    steps = planned_steps(options, name, losses, optimiser)
    plan = Plan(name, options.out, steps, options.seed, options.device, hold)
    return Stage(plan, module, optimiser, average=0.98 if name == "decoder" else 0.995)


def planned_steps(
    options: TrainingOptions, name: str, losses: Callable[[Chance], dict[str, Tensor]], optimiser: Optimiser
) -> int:
    """Steps of a stage: as planned before, as asked for, or as many as fit into its share of the time."""
    path = options.out / "plan.json"
    plan: dict[str, int] = json.loads(path.read_text()) if path.exists() else {}
    if options.steps is not None:
        plan[name] = options.steps
    if name not in plan:
        blank = deepcopy(optimiser.state_dict())
        moments = [time.monotonic()]
        for trial in range(6):
            optimiser.step(losses(Chance.of(options.seed, "pace", trial, options.device))["loss"], 0.0)
            moments.append(time.monotonic())
        pace = (moments[6] - moments[2]) / 4
        optimiser.load_state_dict(blank)
        share = SHARE[name] if options.stage == "all" else 1.0
        plan[name] = max(50, int(options.hours * 3600 * share / pace))
    path.write_text(json.dumps(plan, indent=1))
    return plan[name]


RUNNERS: Final[dict[str, Callable[[TrainingOptions], None]]] = {
    "codec": make_codec,
    "clips": make_clips,
    "memory": train_memory,
    "full": train_full,
    "blocks": train_blocks,
    "few-step": train_few_step,
    "decoder": train_decoder,
}
