"""Pages in memory: allocated once from a byte budget, handed out in runs, counted by reference.

A page is the keys and values of one latent frame in all layers. Page tables, windows and worlds are unknown here: see
`cache.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.kvcache.policy import Store
from engine.kvcache.quant import Storage, make
from engine.models import KVGeometry

_MOST_BYTES = 1 << 62  # that torch can count
_STORED_BITS: dict[Store, int | None] = {"native": None, "fp8": 8, "int8": 8, "int4": 4}


class CacheFull(RuntimeError):
    """No pages are left in the budget; the message says how many were wanted and what would do."""


@dataclass(frozen=True)
class PageFormat:
    """All that decides how many bytes a page takes."""

    geometry: KVGeometry
    dtype: torch.dtype = torch.float32
    store: Store = "native"

    @property
    def shape(self) -> tuple[int, int, int]:
        """(tokens, heads, channels) of what a layer stores of one frame, keys and values alike."""
        g = self.geometry
        return (g.tokens, 1, g.latent_dim) if g.latent_dim else (g.tokens, g.heads, g.head_dim)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in all layers, scales included."""
        tokens, heads, dim = self.shape
        bits, full = _STORED_BITS[self.store], self.dtype.itemsize
        planes = 1 if self.geometry.latent_dim else 2
        if bits is None:
            return self.geometry.layers * planes * tokens * heads * dim * full
        per_scale = {"fp8": 4, "int8": 2, "int4": 4}[self.store]  # int4 keeps a scale and a lowest value
        scales = 2 * heads if self.store == "fp8" else heads * dim + tokens * heads
        return self.geometry.layers * (2 * tokens * heads * dim * bits // 8 + scales * per_scale)


class PagePool:
    """`pages` pages of one format on one device.

    Raises CacheFull when the memory cannot be had, and from `take` when fewer pages are free than wanted; nothing is
    taken then.
    """

    def __init__(self, form: PageFormat, pages: int, device: torch.device | str = "cpu") -> None:
        if pages < 1:
            raise CacheFull(f"KV budget: expected room for at least 1 page of {form.page_bytes} bytes, got {pages}")
        self.format = form
        self.pages = pages
        self.device = torch.device(device)
        self.storage = self._allocated()
        self._references = [0] * pages
        self.free = pages

    @classmethod
    def from_budget(cls, form: PageFormat, budget_bytes: int, device: torch.device | str = "cpu") -> PagePool:
        """As many pages as fit into the budget."""
        if budget_bytes < form.page_bytes:
            raise CacheFull(f"KV budget of {budget_bytes} bytes: one page alone takes {form.page_bytes}")
        return cls(form, budget_bytes // form.page_bytes, device)

    def take(self, count: int, after: int = 0) -> list[int]:
        """`count` free pages, each then referenced once: one run if there is one, best right after page `after`."""
        if count > self.free:
            raise CacheFull(
                f"{count} pages wanted, {self.free} of {self.pages} are free; "
                f"a budget of {(self.pages - self.free + count) * self.format.page_bytes} bytes would do"
            )
        run = self._run(count, after)
        chosen = list(range(run, run + count)) if run is not None else self._any(count)
        for page in chosen:
            self._references[page] = 1
        self.free -= count
        return chosen

    def share(self, pages: Sequence[int]) -> None:
        """One more reference to pages that are held."""
        for page in pages:
            assert self._references[page] > 0, f"page {page} is free"
            self._references[page] += 1

    def give_back(self, pages: Sequence[int]) -> None:
        """One reference less; a page without any is free."""
        for page in pages:
            assert self._references[page] > 0, f"page {page} is free"
            self._references[page] -= 1
            self.free += self._references[page] == 0

    def references(self, page: int) -> int:
        return self._references[page]

    @property
    def used_bytes(self) -> int:
        return (self.pages - self.free) * self.format.page_bytes

    def _allocated(self) -> Storage:
        form, wanted = self.format, self.pages * self.format.page_bytes
        refused = f"KV budget: {self.pages} pages of {form.page_bytes} bytes are more than can be allocated"
        if wanted > _MOST_BYTES:
            raise CacheFull(refused)
        shape = (form.geometry.layers, self.pages, *form.shape)
        try:
            return make(form.store, shape, form.dtype, self.device, latent=form.geometry.latent_dim is not None)
        except RuntimeError as error:  # torch has no other for memory that a CPU lacks
            raise CacheFull(refused) from error

    def _run(self, count: int, after: int) -> int | None:
        """First page of a free run: right after `after` if free there, else the shortest run that is long enough."""
        runs = self._free_runs()
        for first, length in runs:
            if first <= after + 1 and after + 1 + count <= first + length:
                return after + 1 if after else first
        fitting = [(length, first) for first, length in runs if length >= count]
        return min(fitting)[1] if fitting else None

    def _free_runs(self) -> list[tuple[int, int]]:
        runs: list[tuple[int, int]] = []
        for page, references in enumerate(self._references):
            if references:
                continue
            if runs and sum(runs[-1]) == page:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1)
            else:
                runs.append((page, 1))
        return runs

    def _any(self, count: int) -> list[int]:
        return [page for page, references in enumerate(self._references) if not references][:count]
