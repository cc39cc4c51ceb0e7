"""From a training run to the weights that ship: averaged modules, fp16, one file for the world and one for the decoder.

The files are read by `engine.models.tiny.model.load_from`. Knows nothing of quality: `evaluate` says whether they are
better than what is there.
"""

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from engine.training.recipe import load_decoder, load_network, newest_decoder, newest_network


class NothingTrained(FileNotFoundError):
    """A run without the checkpoints that an export needs; the message says which."""


def export(run: Path, weights: Path) -> dict[str, int]:
    """Writes `world.safetensors` and `decoder.safetensors`; returns their sizes in bytes. Raises NothingTrained."""
    newest, decoder = newest_network(run), newest_decoder(run)
    if newest is None or not decoder.exists():
        raise NothingTrained(f"{run}: expected checkpoints of the memory and the decoder, got {_found(run)}")
    network = load_network(newest)
    if newest.stem == "memory":  # the transformer has not been trained: let it add nothing
        network.out.weight.data.zero_()
        network.out.bias.data.zero_()
        network.variance.fill_(1e-4)
    weights.mkdir(parents=True, exist_ok=True)
    written = {}
    for module, name in ((network, "world"), (load_decoder(decoder), "decoder")):
        path = weights / f"{name}.safetensors"
        _save_half(module, path)
        written[path.name] = path.stat().st_size
    return written


def _save_half(module: nn.Module, path: Path) -> None:
    halves = {name: value.to(torch.float16).contiguous() for name, value in module.state_dict().items()}
    partial = path.with_suffix(".partial")
    save_file(halves, partial, metadata={"format": "pt"})
    partial.replace(path)


def _found(run: Path) -> str:
    return ", ".join(sorted(path.name for path in run.glob("*.pt"))) or "none"
