"""Published checkpoints to modules: strictly, memory-mapped, and without running anything that is in a file.

    tensors = read(path)                        # .pt / .pth with or without wrappers, .safetensors, shards, a folder
    tensors = merge_lora(tensors, read(lora))   # adapters become part of the weights
    assign(module, tensors, device, dtype)      # all or nothing: a wrong name, shape or dtype changes nothing

Knows no model: key maps between naming schemes are handed in. Where files lie and how they get there is `hub.py`.
"""

from __future__ import annotations

import hashlib
import pickle
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

CONTAINERS = ("generator_ema", "generator", "generator_lora", "model", "state_dict")
"""Top-level entries that hold the weights of a training checkpoint, the averaged ones first."""

WRAPPERS = frozenset(
    {"model", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod", "base_model"}
)
"""Parts of a parameter's name that wrappers of a training run have left in it."""

TRAINING_ONLY = ("_cls_pred_branch", "_register_tokens", "_gan_ca_blocks")
"""Parts of names that belong to a discriminator."""


DAMAGED = (OSError, RuntimeError, EOFError, ValueError, LookupError, AttributeError, TypeError, struct.error)
"""What `torch.load` raises on a file that is damaged or cut off, besides `UnpicklingError`."""


class WeightsError(ValueError):
    """A checkpoint that cannot be used; the message names what was expected and what was got. Nothing was loaded."""


def read(path: Path, container: str = "") -> dict[str, Tensor]:
    """Every tensor of a checkpoint by its plain name, as views of the file where the format allows.

    `path` is a file, or a folder with one checkpoint in it. `container` picks one of several state dicts.
    """
    if path.is_dir():
        return _read_folder(path, container)
    if not path.is_file():
        raise WeightsError(f"{path}: expected a checkpoint, there is no such file")
    if path.name.endswith(".index.json"):
        return _read_shards(path)
    entries = _read_safetensors(path) if path.suffix == ".safetensors" else _read_pickle(path)
    return plain_names(_unwrapped(entries, container, path), path)


def plain_names(tensors: Mapping[str, Any], source: Path | str) -> dict[str, Tensor]:
    """Names without the wrappers of training, discriminator parts left out."""
    plain: dict[str, Tensor] = {}
    for name, value in tensors.items():
        parts = [part for part in name.split(".") if part not in WRAPPERS]
        if not isinstance(value, Tensor) or any(part in TRAINING_ONLY for part in parts):
            continue
        short = ".".join(parts)
        if short in plain:
            raise WeightsError(f"{source}: expected one tensor called {short}, got two (one as {name})")
        plain[short] = value
    return plain


def assign(
    module: nn.Module,
    tensors: Mapping[str, Tensor],
    device: torch.device | str,
    dtype: torch.dtype | None,
    source: Path | str = "checkpoint",
) -> None:
    """Make `tensors` the parameters of `module` (built on the meta device, or anywhere), cast and moved one at a time.

    `dtype` None: each becomes what the module declares it as.
    Raises WeightsError and leaves the module alone unless names and shapes match exactly.
    """
    expected = module.state_dict()
    check(tensors, {name: tuple(value.shape) for name, value in expected.items()}, source)
    values = {name: tensors[name].to(device=device, dtype=dtype or e.dtype) for name, e in expected.items()}
    module.load_state_dict(values, strict=True, assign=True)
    module.to(device).eval().requires_grad_(False)


def check(tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]], source: Path | str) -> None:
    """Raise WeightsError unless the names and shapes are the expected ones and every tensor is of floats."""
    missing = [name for name in expected if name not in tensors]
    unexpected = [name for name in tensors if name not in expected]
    if missing or unexpected:
        told = [f"{len(missing)} missing ({_first(missing)})"] if missing else []
        told += [f"{len(unexpected)} unexpected ({_first(unexpected)})"] if unexpected else []
        raise WeightsError(f"{source}: expected {len(expected)} tensors, got {len(tensors)}: {', '.join(told)}")
    wrong = [
        f"{name}: expected {list(shape)}, got {list(tensors[name].shape)}"
        for name, shape in expected.items()
        if tuple(tensors[name].shape) != tuple(shape)
    ]
    if wrong:
        raise WeightsError(f"{source}: {len(wrong)} tensors have another shape ({_first(wrong, '; ')})")
    whole = [f"{name} is {value.dtype}" for name, value in tensors.items() if not value.is_floating_point()]
    if whole:
        raise WeightsError(f"{source}: expected floating-point tensors, got {_first(whole)}")


def renamed(tensors: Mapping[str, Tensor], names: Mapping[str, str], source: Path | str) -> dict[str, Tensor]:
    """Tensors under their new names; a name that the map does not have is an error."""
    unknown = [name for name in tensors if name not in names]
    if unknown:
        raise WeightsError(f"{source}: {len(unknown)} names are not of the expected kind ({_first(unknown)})")
    return {names[name]: value for name, value in tensors.items()}


def merge_lora(
    tensors: Mapping[str, Tensor], lora: Mapping[str, Tensor], scale: float = 1.0, source: Path | str = "LoRA"
) -> dict[str, Tensor]:
    """W + scale * B A for every pair `<layer>.lora_A.weight` (rank, in), `<layer>.lora_B.weight` (out, rank).

    `scale` is alpha / rank. Raises WeightsError if the adapters were made for another base; `tensors` is not changed.
    """
    pairs = _lora_pairs(lora, source)
    missing = [name for name in pairs if name not in tensors]
    if missing:
        raise WeightsError(f"{source}: adapters for {len(missing)} layers that this model lacks ({_first(missing)})")
    wrong = [
        f"{name}: expected {list(tensors[name].shape)}, got {[b.shape[0], a.shape[1]]}"
        for name, (a, b) in pairs.items()
        if tensors[name].shape != (b.shape[0], a.shape[1]) or a.shape[0] != b.shape[1]
    ]
    if wrong:
        raise WeightsError(f"{source}: adapters of another base: {_first(wrong, '; ')}")
    merged = dict(tensors)
    for name, (a, b) in pairs.items():
        merged[name] = torch.addmm(tensors[name].float(), b.float(), a.float(), alpha=scale).to(tensors[name].dtype)
    return merged


def digest(module: nn.Module) -> str:
    """A hash of every parameter's name, shape, dtype and bytes."""
    state = hashlib.blake2b(digest_size=16)
    for name, value in sorted(module.state_dict().items()):
        state.update(f"{name} {list(value.shape)} {value.dtype}\n".encode())
        state.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return state.hexdigest()


def _lora_pairs(lora: Mapping[str, Tensor], source: Path | str) -> dict[str, tuple[Tensor, Tensor]]:
    """By the name of the weight they belong to."""
    sides: dict[str, dict[str, Tensor]] = {}
    for name, value in lora.items():
        layer, mark, rest = name.partition(".lora_")
        if not mark or rest not in ("A.weight", "B.weight", "A.default.weight", "B.default.weight"):
            raise WeightsError(f"{source}: expected names ending in .lora_A.weight or .lora_B.weight, got {name}")
        sides.setdefault(f"{layer}.weight", {})[rest[0]] = value
    lonely = [name for name, pair in sides.items() if len(pair) != 2]
    if lonely or not sides:
        raise WeightsError(f"{source}: expected pairs of lora_A and lora_B, got half of {_first(lonely) or 'none'}")
    return {name: (pair["A"], pair["B"]) for name, pair in sides.items()}


def _read_folder(folder: Path, container: str) -> dict[str, Tensor]:
    for pattern in ("*.safetensors.index.json", "*.safetensors", "*.pth", "*.pt"):
        found = sorted(folder.glob(pattern))
        if len(found) == 1:
            return read(found[0], container)
        if found:
            names = [path.name for path in found]
            raise WeightsError(f"{folder}: expected one checkpoint, got {len(found)} ({_first(names)})")
    raise WeightsError(f"{folder}: expected a .safetensors, .pth or .pt file, got none")


class _Index(msgspec.Struct):
    """A checkpoint in several files: tensor names to file names."""

    weight_map: dict[str, str]


def _read_shards(index: Path) -> dict[str, Tensor]:
    try:
        where = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
    except (msgspec.DecodeError, OSError, UnicodeDecodeError) as error:
        raise WeightsError(f"{index}: expected an index with a weight_map, got: {error}") from error
    if not where:
        raise WeightsError(f"{index}: expected tensors in its weight_map, got none")
    tensors: dict[str, Tensor] = {}
    for shard in sorted(set(where.values())):
        path = index.parent / shard
        if not path.is_file():
            raise WeightsError(f"{index}: expected the shard {shard} beside it, there is no such file")
        tensors |= _read_safetensors(path)
    misplaced = [name for name in where if name not in tensors]
    if misplaced:
        raise WeightsError(f"{index}: {len(misplaced)} tensors are in no shard ({_first(misplaced)})")
    return plain_names(tensors, index)


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # it is no mapping
    except (SafetensorError, OSError) as error:
        raise WeightsError(_damaged(path, "safetensors", error)) from error


def _read_pickle(path: Path) -> Mapping[str, Any]:
    try:
        loaded = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        reason = str(error).splitlines()[0]
        raise WeightsError(f"{path}: expected tensors only, got a pickle with code in it: {reason}") from error
    except DAMAGED as error:
        raise WeightsError(_damaged(path, "PyTorch", error)) from error
    if not isinstance(loaded, Mapping):
        raise WeightsError(f"{path}: expected a state dict, got {type(loaded).__name__}")
    return loaded


def _unwrapped(entries: Mapping[str, Any], container: str, path: Path) -> Mapping[str, Any]:
    if container:
        if container in entries:
            return _state_dict(entries[container], container, path)
        if any(isinstance(value, Mapping) for value in entries.values()):
            raise WeightsError(f"{path}: expected an entry {container}, got {_first(list(map(str, entries)))}")
        return entries  # saved without a container
    for name in CONTAINERS:
        if isinstance(entries.get(name), Mapping):
            return _state_dict(entries[name], name, path)
    return _state_dict(entries, "", path)


def _state_dict(entries: Any, container: str, path: Path) -> Mapping[str, Any]:
    if not isinstance(entries, Mapping) or not any(isinstance(value, Tensor) for value in entries.values()):
        expected = f"tensors under {container}" if container else f"tensors, or one of {', '.join(CONTAINERS)}"
        got = _first(list(map(str, entries))) if isinstance(entries, Mapping) else type(entries).__name__
        raise WeightsError(f"{path}: expected {expected}; got {got or 'an empty file'}")
    return entries


def _damaged(path: Path, kind: str, error: Exception) -> str:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return (
        f"{path}: expected a whole {kind} file, got {path.stat().st_size} bytes that are damaged or cut off: {reason}"
    )


def _first(names: Iterable[str], separator: str = ", ") -> str:
    names = list(names)
    return separator.join(names[:3]) + (" …" if len(names) > 3 else "")
