"""A block being made, as its model sees it: the `Context` that joins the block's own keys with those of the past.

Attention over the cache is attention over a set of pages. When the visible pages and the block's own lie in one run of
pages that can be read as they are, that run is attended to in place; scattered ones are too by a backend that reads
pages. Otherwise the visible ones are brought into a workspace, once per block and layer, with room for the block's own
behind them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from engine.kvcache.quant import PageShape, run_of
from engine.layers.attention import PagedAttention
from engine.models import Context, Expand, Rotate
from engine.profiler import span

if TYPE_CHECKING:
    from engine.kvcache.cache import KVCache


class StagedBlock:
    """The block at [start, start + frames); see `KVCache.stage`."""

    def __init__(
        self,
        cache: KVCache,
        start: int,
        frames: int,
        visible: list[int],
        pages: list[int],
        slots: list[int],
        hidden: int,
    ) -> None:
        self.clean = False  # True during the pass whose keys and values stay
        self.start, self.frames = start, frames
        self.stored = range(start + hidden, start + frames)
        self.pages, self.slots = pages, slots
        self.summaries: dict[int, Tensor] = {}
        self.candidates: list[range] = []  # blocks out of sight, of which the policy fetches some by content
        self._cache, self._visible, self._hidden = cache, visible, hidden
        self._open = True
        device = cache.pool.device
        self._own_pages = run_of(pages) or torch.tensor(pages, device=device)
        self._counted: dict[tuple[int, int], Tensor] = {}  # rotations keep what they make of a tensor
        self._slab = self._find_slab()
        self._workspace: Workspace | None = None
        self._past: dict[int, list[int]] = {}  # layer -> the frames it sees
        self._pages: dict[int, list[int] | None] = {}  # layer -> where they lie, for a backend that reads pages
        self._order: dict[int, Order] = {}  # layer -> where each frame's keys stand in the workspace

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    # ------------------------------------------------------------------------------------- what a model calls

    def shard(self, tokens: Tensor) -> Tensor:
        return tokens

    def unshard(self, tokens: Tensor) -> Tensor:
        return tokens

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rotate: Rotate | None) -> Tensor:
        """Attention of (1, F, S, heads, head_dim) queries over the visible past and the block itself."""
        if self._cache.projections:
            squeezed = self._cache.projections[layer]
            return self.attend_latent(layer, q, squeezed.squeeze(k, v), squeezed.expand, rotate)
        rotate, unrotated = rotate or _unrotated, self._cache.policy.positions == "window"
        self._choose(layer, q, None if unrotated else rotate, None)
        at = self._positions(layer)
        q, turned = rotate(q, at), rotate(k, at)
        self._store(layer, k if unrotated else turned, v)
        if self._slab is not None:
            return self._attend(q, *self._in_place(layer))
        if (pages := self._scattered(layer)) is not None:
            return self._attend_pages(layer, q, pages)
        self._bring_past(layer, rotate if unrotated else None, None)
        return self._attend(q, *self._join(layer, turned, v))

    def attend_latent(self, layer: int, q: Tensor, latent: Tensor, expand: Expand, rotate: Rotate | None) -> Tensor:
        """The same with one latent (1, F, S, R) per token in the cache, of which `expand` makes keys and values."""
        rotate = rotate or _unrotated
        self._store(layer, latent.unsqueeze(3), latent.unsqueeze(3))
        self._choose(layer, q, None, expand)
        at = self._positions(layer)
        self._bring_past(layer, rotate, expand)
        k, v = expand(latent)
        return self._attend(rotate(q, at), *self._join(layer, rotate(k, at), v))

    # ------------------------------------------------------------------------------------------- its end

    def commit(self) -> None:
        """Keep what the clean pass wrote; the block is part of the past from now on."""
        assert self._open and self.clean, "commit follows the clean pass, once"
        self._open = False
        self._put_workspace_back()
        self._cache.accept(self)

    def abort(self) -> None:
        """Give the pages back, unless the block was committed."""
        if self._open:
            self._open = False
            self._put_workspace_back()
            self._cache.refuse(self.pages)

    # ------------------------------------------------------------------------------------------ positions

    def _positions(self, layer: int) -> Tensor:
        """Of the block's own frames: behind all that the layer sees, where positions are the window's."""
        if self._cache.policy.positions == "absolute":
            return self._count(self.start, self.frames)
        return self._count(len(self._past[layer]) - self._hidden, self.frames)

    def _past_positions(self, past: Sequence[int]) -> Tensor:
        if self._cache.policy.positions == "absolute":
            return torch.tensor(past, device=self._cache.pool.device)
        return self._count(0, len(past))

    def _count(self, first: int, frames: int) -> Tensor:
        if (first, frames) not in self._counted:
            self._counted[first, frames] = torch.arange(first, first + frames, device=self._cache.pool.device)
        return self._counted[first, frames]

    # -------------------------------------------------------------------------------------------- storage

    @property
    def _readable(self) -> bool:
        """Whether pages hold what attention reads: keys in the model's type, turned to where they stand."""
        return self._cache.pool.storage.direct and self._cache.policy.positions == "absolute"

    def _find_slab(self) -> slice | None:
        """The run of pages that is what is visible, in the order of slots, if it can be attended to as it lies."""
        if not self._readable or self._cache.policy.topk:
            return None
        pages = self._by_slot(self._visible)
        return run_of(pages) if pages else None

    def _scattered(self, layer: int) -> list[int] | None:
        """The pages that one layer sees, if the backend reads pages and all of them are on the device."""
        if layer not in self._pages:
            reads = isinstance(self._cache.attend, PagedAttention) and self._readable
            self._pages[layer] = self._by_slot(self._past[layer]) if reads else None
        return self._pages[layer]

    def _by_slot(self, past: Sequence[int]) -> list[int] | None:
        """Pages of these frames and of the block's own, in the order of slots; None if one is not on the device."""
        placed = [(self._cache.slot_of(f), self._cache.page_of(f)) for f in past]
        placed += zip(self.slots, self.pages, strict=True)
        pages = [page for _, page in sorted(placed, key=lambda p: p[0]) if page is not None]
        return pages if len(pages) == len(placed) else None

    def _store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Write the block's pages: at each step when they are attended to as they lie, else in the clean pass only."""
        if self._slab is not None or self.clean or self._scattered(layer) is not None:
            self.store(layer, k, v)

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Write keys and values (1, F, S, heads, head_dim) of the block as they will be read."""
        k, v = k[0, self._hidden :], v[0, self._hidden :]
        self._cache.pool.storage.write(layer, self._own_pages, k, v)
        self._cache.copied_bytes += 2 * k.numel() * k.element_size()
        if self.clean and self._cache.policy.topk:
            self._summarise(layer, k.mean(1))

    def _summarise(self, layer: int, means: Tensor) -> None:
        layers = self._cache.pool.format.geometry.layers
        for i, frame in enumerate(self.stored):
            if frame not in self.summaries:
                self.summaries[frame] = means.new_zeros((layers, *means.shape[1:]))
            self.summaries[frame][layer] = means[i]

    def _in_place(self, layer: int) -> tuple[Tensor, Tensor]:
        assert self._slab is not None
        planes = self._cache.pool.storage.planes
        return planes["k"][layer, self._slab].flatten(0, 1)[None], planes["v"][layer, self._slab].flatten(0, 1)[None]

    def _attend_pages(self, layer: int, q: Tensor, pages: list[int]) -> Tensor:
        assert isinstance(self._cache.attend, PagedAttention)
        planes = self._cache.pool.storage.planes
        return self._cache.attend.paged(q.flatten(1, 2), planes["k"][layer], planes["v"][layer], pages).reshape(q.shape)

    # ------------------------------------------------------------------------------------------ workspace

    def _bring_past(self, layer: int, rotate: Rotate | None, expand: Expand | None) -> None:
        """Put the past that one layer sees into the workspace, the first time this block asks for it."""
        if layer in self._order:
            return
        past, device = self._past[layer], self._cache.pool.device
        self._order[layer] = order = Order.of([self._cache.slot_of(f) for f in past], self.slots, device)
        if past:
            with span("gather"):
                self._gather(layer, past, order, rotate, expand)

    def _gather(self, layer: int, past: list[int], order: Order, rotate: Rotate | None, expand: Expand | None) -> None:
        k, v = self._cache.select(layer, past)
        if expand is not None:
            k, v = (x[0] for x in expand(k.squeeze(2)[None]))
        if rotate is not None:
            k = rotate(k[None], self._past_positions(past))[0]
        self._borrow_workspace().fill(layer, order.past, k, v)
        self._cache.gathered_bytes += 2 * k.numel() * k.element_size()

    def _choose(self, layer: int, q: Tensor, rotate: Rotate | None, expand: Expand | None) -> None:
        """What one layer sees, once a block: what is visible, and of what is out of sight that which its queries want.

        Queries are compared with keys as they are kept: un-rotated unless `rotate` is given, and `expand` makes keys of
        latents.
        """
        if layer in self._past:
            return
        self._past[layer] = self._visible
        if not self.candidates:
            return
        summary = self._cache.catalogue.summary
        keys = torch.stack([torch.stack([summary(f)[layer] for f in b]).mean(0) for b in self.candidates])
        keys = keys if expand is None else expand(keys[None])[0].squeeze(2)[0]
        q = q if rotate is None else rotate(q, self._positions(layer))
        best = self.score(keys, q).topk(min(self._cache.policy.topk, len(self.candidates))).indices.tolist()
        self._past[layer] = sorted({f for i in best for f in self.candidates[i]}.union(self._visible))

    def score(self, keys: Tensor, q: Tensor) -> Tensor:
        """How well mean keys (n, kv_heads, head_dim) answer the block's queries (1, F, S, heads, head_dim): (n,)"""
        query = q.mean((0, 1, 2)).reshape(keys.shape[1], -1, q.shape[-1]).mean(1)  # (kv_heads, head_dim)
        return (keys * query).sum((1, 2))

    def _join(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        order, workspace = self._order[layer], self._borrow_workspace()
        workspace.fill(layer, order.own, k[0, self._hidden :], v[0, self._hidden :])
        return workspace.read(layer, order.frames)

    def _borrow_workspace(self) -> Workspace:
        if self._workspace is None:
            g, form = self._cache.pool.format.geometry, self._cache.pool.format
            extra = min(self._cache.policy.topk, len(self.candidates)) * self._cache.frames_per_block
            frames = len(self._visible) + extra + len(self.stored)
            shape = (g.layers, frames, g.tokens, g.heads, g.head_dim)
            self._workspace = self._cache.shelf.take(shape, form.dtype, self._cache.pool.device)
        return self._workspace

    def _put_workspace_back(self) -> None:
        if self._workspace is not None:
            self._cache.shelf.put_back(self._workspace)
            self._workspace = None

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self._cache.attend(q.flatten(1, 2), k, v).reshape(q.shape)


class Batch:
    """Several worlds' blocks in one forward pass: each row of the batch attends through its own context."""

    def __init__(self, parts: Sequence[Context]) -> None:
        self._parts = parts

    def shard(self, tokens: Tensor) -> Tensor:
        return self._parts[0].shard(tokens)

    def unshard(self, tokens: Tensor) -> Tensor:
        return self._parts[0].unshard(tokens)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rotate: Rotate | None) -> Tensor:
        rows = (slice(i, i + 1) for i in range(len(self._parts)))
        return torch.cat(
            [part.attend(layer, q[i], k[i], v[i], rotate) for part, i in zip(self._parts, rows, strict=True)]
        )

    def attend_latent(self, layer: int, q: Tensor, latent: Tensor, expand: Expand, rotate: Rotate | None) -> Tensor:
        rows = (slice(i, i + 1) for i in range(len(self._parts)))
        return torch.cat(
            [
                part.attend_latent(layer, q[i], latent[i], expand, rotate)
                for part, i in zip(self._parts, rows, strict=True)
            ]
        )


@dataclass(frozen=True)
class Order:
    """Ranks of the past frames and of the block's own among all that are attended to, by slot."""

    past: Tensor
    own: Tensor

    @classmethod
    def of(cls, past: Sequence[int], own: Sequence[int], device: torch.device) -> Order:
        rank = {slot: i for i, slot in enumerate(sorted([*past, *own]))}
        return cls(*(torch.tensor([rank[s] for s in slots], device=device, dtype=torch.int64) for slots in (past, own)))

    @property
    def frames(self) -> int:
        return len(self.past) + len(self.own)


class Workspace:
    """Keys and values of all layers, frame by frame, in the order of attention."""

    def __init__(self, shape: PageShape, dtype: torch.dtype, device: torch.device) -> None:
        self.k, self.v = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))

    def fits(self, shape: PageShape, dtype: torch.dtype) -> bool:
        layers, frames, *rest = self.k.shape
        return (layers, *rest) == (shape[0], *shape[2:]) and frames >= shape[1] and self.k.dtype == dtype

    def fill(self, layer: int, ranks: Tensor, k: Tensor, v: Tensor) -> None:
        """Write (n, S, heads, head_dim) at these ranks."""
        self.k[layer].index_copy_(0, ranks, k)
        self.v[layer].index_copy_(0, ranks, v)

    def read(self, layer: int, frames: int) -> tuple[Tensor, Tensor]:
        """The first frames as (1, tokens, heads, head_dim)."""
        return self.k[layer, :frames].flatten(0, 1)[None], self.v[layer, :frames].flatten(0, 1)[None]


class Shelf:
    """Workspaces between uses: as many as are ever in use at once by the caches that were given the same shelf."""

    def __init__(self) -> None:
        self._free: list[Workspace] = []

    def take(self, shape: PageShape, dtype: torch.dtype, device: torch.device) -> Workspace:
        for i, workspace in enumerate(self._free):
            if workspace.fits(shape, dtype):
                return self._free.pop(i)
        self._free.clear()  # all are too small: a growing cache never needs them again
        return Workspace(shape, dtype, device)

    def put_back(self, workspace: Workspace) -> None:
        self._free.append(workspace)


def _unrotated(x: Tensor, frames: Tensor) -> Tensor:
    return x
