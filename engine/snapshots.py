"""Worlds on disk, so that one goes on after its engine was lost: written every few seconds, read once.

A snapshot holds what the next block depends on. The decoder's memory is left out, because a second thread owns it: it
is made again from the blocks that the world still keeps. Files are read as data; nothing in them is executed. Knows no
link and no server.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

import torch

from engine.models import BlockSignals, Prompt
from engine.protocol import ActionState, PromptChange
from engine.signals import Switch
from engine.weights import DAMAGED
from engine.world import Kept, World

EVERY_S = 4.0
MOST_BYTES = 512 << 20  # a cache larger than this is not written: that would hold the world up


class SnapshotError(RuntimeError):
    """A file that no world can go on from; the message says why."""


def worth_saving(world: World) -> bool:
    """Whether the world can be written in passing: small enough, and no block of it half made."""
    held = sum(sum(cache.bytes_by_tier().values()) for cache in world.caches)
    return world.in_flight is None and held <= MOST_BYTES


def save(world: World, path: Path) -> None:
    """Write the world as it is between two blocks; the file before stays until the new one is whole. Raises OSError."""
    state = {**world.snapshot(decoder=False), "model": world.model.digest(), "spec": _origin(world)}
    partial = path.with_name(path.name + ".partial")
    try:
        torch.save(state, partial)
    except RuntimeError as error:  # how torch reports a disk that is full
        partial.unlink(missing_ok=True)
        raise OSError(f"{path}: {error}") from error
    os.replace(partial, path)


def resume(world: World, path: Path) -> None:
    """Let a newly opened world go on from a file, its decoder warmed up. Raises SnapshotError, and changes nothing."""
    state = _load(path, world.model.device)
    if (state.get("model"), state.get("spec")) != (world.model.digest(), _origin(world)):
        raise SnapshotError(f"{path.name}: expected a world of the same model, seed and cache, got another's")
    world.restore(state)


def _load(path: Path, device: torch.device) -> dict[str, Any]:
    try:
        with ZipFile(path) as archive:
            if (damaged := archive.testzip()) is not None:
                raise BadZipFile(f"{damaged} is not as it was written")
        with torch.serialization.safe_globals(_classes()):
            state = torch.load(path, map_location=device, weights_only=True)
    except (BadZipFile, pickle.UnpicklingError, *DAMAGED) as error:
        said = str(error).splitlines() or [type(error).__name__]
        raise SnapshotError(f"{path.name}: cannot be read: {said[0]}") from error
    if not isinstance(state, dict):
        raise SnapshotError(f"{path.name}: expected the state of a world, got {type(state).__name__}")
    return state


def _classes() -> list[Callable[..., Any] | tuple[Callable[..., Any], str]]:
    """What a snapshot may hold besides tensors and plain values."""
    prompts = [Prompt]
    for kind in prompts:
        prompts += kind.__subclasses__()
    parts = [part for kind in prompts for part in kind.parts]
    return [BlockSignals, Kept, Switch, PromptChange, ActionState, *prompts, *parts]


def _origin(world: World) -> tuple[int, str, str]:
    """What must be the same for a snapshot to fit."""
    return world.spec.seed, str(world.caches[0].policy), type(world.sampler).__name__
