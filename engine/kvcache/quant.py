"""How a page lies in memory: as it is, or as 8-bit float, 8-bit or 4-bit integers.

A `Storage` is a set of planes, tensors of shape (layers, pages, ...). Keys and values of one page and layer are
(S, heads, head_dim). Keys are quantised per channel (their outliers sit in fixed channels), values per token
(KIVI, arXiv 2402.02750). Knows nothing of who owns a page.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from engine.kvcache.policy import PolicyError, Store


class Storage(Protocol):
    """Pages of all layers. `planes` is all there is: copying a page is copying its slice of every plane."""

    planes: dict[str, Tensor]
    direct: bool  # pages can be attended to as they lie

    def write(self, layer: int, pages: Pages, k: Tensor, v: Tensor) -> None:
        """Put k and v (n, S, heads, head_dim) into these n pages."""
        ...

    def read(self, layer: int, planes: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values (n, S, heads, head_dim) of pages given as slices (n, ...) of a layer's planes."""
        ...


PageShape = tuple[int, int, int, int, int]
"""layers, pages, tokens, heads, head_dim"""
Pages: TypeAlias = slice | Tensor
"""Numbers of pages: one run of them, or any."""


def run_of(pages: Sequence[int]) -> slice | None:
    """Pages that follow each other, as a slice; None if they do not."""
    run = range(pages[0], pages[0] + len(pages)) if pages else range(0)
    return slice(run.start, run.stop) if pages and list(pages) == list(run) else None


def put(plane: Tensor, pages: Pages, rows: Tensor) -> None:
    """Write (n, ...) into these pages of (all pages, ...)."""
    if isinstance(pages, slice):
        plane[pages].copy_(rows)
    else:
        plane.index_copy_(0, pages, rows)


class Native:
    """Keys and values in the model's own type; a run of pages is one slab."""

    direct = True

    def __init__(self, shape: PageShape, dtype: torch.dtype, device: torch.device) -> None:
        self.planes = {name: torch.empty(shape, dtype=dtype, device=device) for name in ("k", "v")}

    def write(self, layer: int, pages: Pages, k: Tensor, v: Tensor) -> None:
        put(self.planes["k"][layer], pages, k)
        put(self.planes["v"][layer], pages, v)

    def read(self, layer: int, planes: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return planes["k"], planes["v"]


class Latent:
    """Multi-head latent attention: one vector per token, in place of keys and values; expanded by the model on read."""

    direct = False

    def __init__(self, shape: PageShape, dtype: torch.dtype, device: torch.device) -> None:
        self.planes = {"latent": torch.empty(shape, dtype=dtype, device=device)}

    def write(self, layer: int, pages: Pages, k: Tensor, v: Tensor) -> None:
        put(self.planes["latent"][layer], pages, k)

    def read(self, layer: int, planes: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return planes["latent"], planes["latent"]


class Integer:
    """int8 (symmetric) or int4 (affine, two to a byte); keys scaled per channel, values per token."""

    direct = False

    def __init__(self, shape: PageShape, dtype: torch.dtype, device: torch.device, bits: int) -> None:
        layers, pages, tokens, heads, dim = shape
        if bits == 4 and dim % 2:
            raise ValueError(f"int4 pages hold two channels to a byte: expected an even head_dim, got {dim}")
        self.bits, self.dtype = bits, dtype
        codes = (layers, pages, tokens, heads, dim * bits // 8)
        scales = {"k": (layers, pages, 1, heads, dim), "v": (layers, pages, tokens, heads, 1)}
        kind = torch.int8 if bits == 8 else torch.uint8
        self.planes = {name: torch.empty(codes, dtype=kind, device=device) for name in ("k", "v")}
        for name, size in scales.items():
            self.planes[f"{name}_scale"] = torch.empty(size, dtype=torch.float16, device=device)
            if bits == 4:
                self.planes[f"{name}_low"] = torch.empty(size, dtype=torch.float16, device=device)

    def write(self, layer: int, pages: Pages, k: Tensor, v: Tensor) -> None:
        for name, x, axis in (("k", k, 1), ("v", v, 3)):
            for suffix, plane in self._quantise(x.float(), axis).items():
                put(self.planes[name + suffix][layer], pages, plane)

    def read(self, layer: int, planes: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return self._restore(planes, "k"), self._restore(planes, "v")

    def _quantise(self, x: Tensor, axis: int) -> dict[str, Tensor]:
        if self.bits == 8:
            scale = (x.abs().amax(axis, keepdim=True) / 127).clamp(min=1e-7).half()
            return {"": (x / scale.float()).round().clamp(-127, 127).to(torch.int8), "_scale": scale}
        low = x.amin(axis, keepdim=True).half()
        scale = ((x.amax(axis, keepdim=True) - low.float()) / 15).clamp(min=1e-7).half()
        codes = ((x - low.float()) / scale.float()).round().clamp(0, 15).to(torch.uint8)
        return {"": codes[..., 0::2] | (codes[..., 1::2] << 4), "_scale": scale, "_low": low}

    def _restore(self, planes: dict[str, Tensor], name: str) -> Tensor:
        codes, scale = planes[name], planes[f"{name}_scale"].float()
        if self.bits == 8:
            return (codes.float() * scale).to(self.dtype)
        nibbles = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)
        return (nibbles.float() * scale + planes[f"{name}_low"].float()).to(self.dtype)


class Float8:
    """float8 e4m3 with one scale per page and head."""

    direct = False

    def __init__(self, shape: PageShape, dtype: torch.dtype, device: torch.device) -> None:
        layers, pages, _, heads, _ = shape
        self.dtype = dtype
        self.planes = {name: torch.empty(shape, dtype=torch.float8_e4m3fn, device=device) for name in ("k", "v")}
        for name in ("k", "v"):
            self.planes[f"{name}_scale"] = torch.empty((layers, pages, 1, heads, 1), dtype=torch.float32, device=device)

    def write(self, layer: int, pages: Pages, k: Tensor, v: Tensor) -> None:
        for name, x in (("k", k.float()), ("v", v.float())):
            scale = (x.abs().amax((1, 3), keepdim=True) / 448).clamp(min=1e-12)
            codes = (x / scale).to(torch.float8_e4m3fn)
            # index_copy_ has no float8 kernel everywhere: copy the same bytes as uint8
            put(self.planes[name][layer].view(torch.uint8), pages, codes.view(torch.uint8))
            put(self.planes[f"{name}_scale"][layer], pages, scale)

    def read(self, layer: int, planes: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        k, v = ((planes[n].float() * planes[f"{n}_scale"]).to(self.dtype) for n in ("k", "v"))
        return k, v


def make(store: Store, shape: PageShape, dtype: torch.dtype, device: torch.device, *, latent: bool) -> Storage:
    """The storage of that name; `latent` pages hold one vector per token and only come unquantised."""
    if latent:
        if store != "native":
            raise PolicyError(f"store: latent pages are kept as they are, expected native, got {store}")
        return Latent(shape, dtype, device)
    if store == "native":
        return Native(shape, dtype, device)
    if store == "fp8":
        return Float8(shape, dtype, device)
    return Integer(shape, dtype, device, bits=8 if store == "int8" else 4)
