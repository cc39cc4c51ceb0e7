"""Pages that are kept but not read now: in host memory, and on disk for worlds at rest.

A page travels as a slice of every plane of its storage. Knows no policy: `cache.py` says which page goes where.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

PageData = dict[str, Tensor]
"""One page: plane name -> (layers, ...)."""


class CacheFileError(RuntimeError):
    """A saved cache that cannot be read back."""


class HostTier:
    """Pages of one world in host memory; pinned, and copied ahead on a stream of its own, when the device is CUDA."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.used_bytes = 0
        self._pages: dict[int, PageData] = {}
        self._ahead: dict[int, PageData] = {}
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def __contains__(self, frame: int) -> bool:
        return frame in self._pages

    def __len__(self) -> int:
        return len(self._pages)

    @property
    def frames(self) -> list[int]:
        return sorted(self._pages)

    def put(self, frame: int, page: Mapping[str, Tensor]) -> None:
        """Keep a copy of a page under its frame index."""
        pin = self._stream is not None
        self.drop([frame])
        self._pages[frame] = kept = {
            name: torch.empty(t.shape, dtype=t.dtype, pin_memory=pin).copy_(t) for name, t in page.items()
        }
        self.used_bytes += _bytes(kept)

    def layer(self, frames: Sequence[int], layer: int) -> PageData:
        """One layer of several pages on the device: plane name -> (n, ...)."""
        return {n: torch.stack([self._on_device(f)[n][layer] for f in frames]) for n in self._pages[frames[0]]}

    def page(self, frame: int) -> PageData:
        return self._pages[frame]

    def prefetch(self, frames: Sequence[int]) -> None:
        """Begin to copy these pages to the device, and let go of copies made ahead that are no longer wanted."""
        if self._stream is None:
            return
        self._ahead = {f: page for f, page in self._ahead.items() if f in frames}
        with torch.cuda.stream(self._stream):
            for frame in frames:
                if frame in self._pages and frame not in self._ahead:
                    page = self._pages[frame]
                    self._ahead[frame] = {n: t.to(self.device, non_blocking=True) for n, t in page.items()}

    def drop(self, frames: Sequence[int]) -> None:
        for frame in frames:
            self.used_bytes -= _bytes(self._pages.pop(frame, {}))
            self._ahead.pop(frame, None)

    def copy(self) -> HostTier:
        """A tier that shares the pages, which are never written to again."""
        twin = HostTier(self.device)
        twin._pages, twin.used_bytes = dict(self._pages), self.used_bytes
        return twin

    def _on_device(self, frame: int) -> PageData:
        if frame in self._ahead:
            assert self._stream is not None
            torch.cuda.current_stream(self.device).wait_stream(self._stream)
            return self._ahead[frame]
        return {name: t.to(self.device) for name, t in self._pages[frame].items()}


def _bytes(page: PageData) -> int:
    return sum(t.numel() * t.element_size() for t in page.values())


def save(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, str]) -> None:
    """Write tensors and facts as safetensors, whole or not at all (a full disk leaves what was there)."""
    partial = path.with_name(path.name + ".partial")
    try:
        save_file({name: t.contiguous().cpu() for name, t in tensors.items()}, partial, metadata=dict(facts))
        os.replace(partial, path)
    except (OSError, SafetensorError) as error:
        partial.unlink(missing_ok=True)
        raise CacheFileError(f"cannot save {path}: {error}") from error


def load(path: Path, device: torch.device) -> dict[str, Tensor]:
    """Read back what `save` wrote."""
    try:
        return load_file(path, device=str(device))
    except (OSError, SafetensorError) as error:
        raise CacheFileError(f"cannot read {path}: {error}") from error
