"""`inferix bench model`: a published architecture with random weights, each block against its own products alone.

The scale decides the width; window, steps and sampler are the preset's. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine import recipe
from engine.bench import magi
from engine.bench.floor import Floor, record
from engine.bench.result import Cell, Result, count
from engine.generator import Generator
from engine.layers.attention import choose
from engine.models import BlockModel, presets
from engine.models.magi_model import MagiModel
from engine.models.presets import Preset, UnknownModel
from engine.models.wan import WanConfig, WanTransformer
from engine.models.wan_model import ARCHITECTURES, WanModel, geometry
from engine.models.wan_vae import VaeConfig, WanDecoder, WanVae
from engine.protocol import PromptChange, WorldSpec
from engine.rollout import use_threads
from engine.world import World


@dataclass(frozen=True)
class Scale:
    """A network and a picture size; None: the preset's own."""

    network: WanConfig | None
    width: int | None = None
    height: int | None = None


SCALES: Mapping[str, Scale] = {
    "tiny": Scale(WanConfig(dim=256, ffn_dim=1024, num_heads=2, num_layers=4, text_dim=64, text_len=64), 256, 128),
    "mid": Scale(WanConfig(dim=512, ffn_dim=2048, num_heads=4, num_layers=8, text_dim=64, text_len=64), 416, 240),
    "full": Scale(None),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--preset", default="self-forcing-1.3b", help="a row of the Wan2.1 or MAGI-1 family (default: %(default)s)"
    )
    parser.add_argument("--scale", choices=SCALES, default="mid", help="default: %(default)s; full wants a GPU")
    parser.add_argument("--blocks", type=count, default=7, help="default: %(default)s")
    parser.add_argument("--kv", default="", help="KV policy in place of the preset's")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=count, default=1, help="of torch (default: %(default)s)")
    parser.add_argument("--compile", action="store_true", help="compile the layers")


def measure(args: argparse.Namespace) -> Result:
    """Blocks of one world are timed; the same blocks of a twin are recorded, and their products timed alone."""
    use_threads(args.threads)
    preset, model = _model(args)
    generator, world = _world(args, preset, model)
    _, twin = _world(args, preset, model)
    if args.compile:
        _rehearse(args, preset, model)
    rows: list[tuple[Cell, ...]] = []
    spent_s = floor_s = 0.0
    for index in range(args.blocks):
        floor = Floor(record(lambda: generator.next_block(twin)))
        cache = world.caches[0]
        moved = -cache.copied_bytes - cache.gathered_bytes
        before_s = _timed(model, floor.seconds)
        block_s = _timed(model, lambda: generator.next_block(world))
        alone_s = (before_s + _timed(model, floor.seconds)) / 2  # around the block: a machine's moods weigh on both
        moved += cache.copied_bytes + cache.gathered_bytes
        spent_s, floor_s = spent_s + block_s, floor_s + alone_s
        rows.append((index, round(1e3 * block_s, 1), round(1e3 * alone_s, 1), round(block_s / alone_s, 3), moved))
    return Result(
        "model", COLUMNS, tuple(rows), _notes(model, world, spent_s, floor_s, args.blocks), _name(args, model)
    )


COLUMNS = ("block", "ms", "its products alone, ms", "ratio", "bytes written and gathered")


WRITTEN = "they are written at each pass where they lie to be read"


def _notes(model: BlockModel, world: World, spent_s: float, floor_s: float, blocks: int) -> tuple[str, ...]:
    g, cache = model.geometry, world.caches[0]
    own = g.frames_per_block * cache.pool.format.page_bytes
    return (
        f"all blocks: {spent_s:.2f} s{_of_cpu(model)}, {spent_s / floor_s:.3f} × their products alone (linear layers "
        "and attention)",
        f"{blocks * g.frames_per_block * g.pictures_per_frame / spent_s:.2f} pictures of video per second at "
        f"{g.width}x{g.height}, undecoded",
        f"a block's own keys and values are {own} bytes",
        *(magi.spared(world) if isinstance(model, MagiModel) else (WRITTEN,)),
    )


def _of_cpu(model: BlockModel) -> str:
    return " of CPU time" if model.device.type == "cpu" else ""


def _name(args: argparse.Namespace, model: WanModel | MagiModel) -> str:
    g = model.geometry
    width = model.network.config.hidden if isinstance(model, MagiModel) else model.network.config.dim
    return f"{args.preset} at scale {args.scale}: {g.kv.layers} layers of {width}, {g.kv.tokens} tokens per frame"


def _model(args: argparse.Namespace) -> tuple[Preset, WanModel | MagiModel]:
    preset = presets.find(args.preset)
    if preset.family == "magi-1" and not args.compile:
        return magi.build(preset, args.scale, torch.device(args.device))
    if preset.family == "wan2.1":
        return _wan(args, preset, SCALES[args.scale])
    raise UnknownModel(f"preset: expected one of the Wan2.1 or (not compiled) MAGI-1 family, got {args.preset!r}")


def _wan(args: argparse.Namespace, preset: Preset, scale: Scale) -> tuple[Preset, WanModel]:
    config = scale.network or ARCHITECTURES[preset.architecture].network
    preset = replace(preset, width=scale.width or preset.width, height=scale.height or preset.height)
    device = torch.device(args.device)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    with device:
        network = WanTransformer(config).to(dtype).eval().requires_grad_(False)
    for parameter in network.parameters():
        parameter.normal_(0, 0.02)
    network.attention = choose("auto", device, dtype).attend
    if args.compile:
        network.compile_layers()

    def text(prompt: str) -> Tensor:
        return torch.randn(1, min(32, config.text_len), config.text_dim, generator=torch.Generator().manual_seed(0))

    vae = VaeConfig(dim=1)  # nothing is decoded here
    shape = geometry(config, vae, preset, preset.width, preset.height)
    return preset, WanModel(preset.name, shape, network, text, WanDecoder(WanVae(vae)))


def _world(args: argparse.Namespace, preset: Preset, model: BlockModel) -> tuple[Generator, World]:
    sampler, rule = recipe.sampler(preset), recipe.kv_policy(preset, args.kv)
    attend = choose("auto", model.device, model.dtype).attend
    caches = recipe.caches(model, preset, rule, sampler, args.blocks * preset.frames_per_block, attend)
    return recipe.generator(model, preset), World(
        WorldSpec(preset.name, (PromptChange(0.0, "a"),)), model, sampler, caches
    )


def _rehearse(args: argparse.Namespace, preset: Preset, model: BlockModel) -> None:
    """Let everything be compiled before it is timed."""
    generator, world = _world(args, preset, model)
    generator.next_block(world)
    world.close()


def _timed(model: BlockModel, run: Callable[[], object]) -> float:
    """Seconds that `run` takes; on a CPU those of its own threads, so that other programs do not count."""
    clock = time.process_time if model.device.type == "cpu" else time.perf_counter
    began = clock()
    run()
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    return clock() - began
