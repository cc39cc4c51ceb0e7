"""A KV cache of which each rank holds its share, and the context that exchanges what the shares lack.

    spread = Spread.over(mesh.grid(layout), model.geometry.kv, machine)
    pool = PagePool(PageFormat(spread.kv, dtype), pages)        # pages of this rank's tokens and heads
    cache = spread.cache(pool, policy, frames_per_block)        # in place of KVCache(pool, policy, frames_per_block)

Policies, pages, slots and eviction are those of `KVCache`: they speak of frames, and every rank holds a part of each
frame. In a pipeline each team has all pages of a world, and only blocks in flight are dealt out. A snapshot is of the
whole cache, gathered from all ranks of a team: it can be resumed on another number of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from engine.guidance import ALL_BRANCHES, Branching
from engine.kvcache.cache import KVCache
from engine.kvcache.deal import Blocks, Deal
from engine.kvcache.policy import Policy
from engine.kvcache.pool import PagePool
from engine.kvcache.staged import Shelf, StagedBlock
from engine.layers.attention import Attention, sdpa
from engine.models import Context, Expand, KVGeometry, Rotate
from engine.parallel.choose import UNMEASURED, Chooser, Machine, Mode, Strategy, of_layout
from engine.parallel.deal import Dealt
from engine.parallel.guidance import SharedBranches
from engine.parallel.mesh import Axis, Grid, as_bytes
from engine.parallel.pipeline import PipelineDeal
from engine.parallel.ring import RingAttention
from engine.parallel.split import Layout, Split, SplitError
from engine.parallel.ulysses import HeadExchange


@dataclass(frozen=True)
class Spread:
    """How the worlds of one model are spread over the ranks of a mesh."""

    exchange: HeadExchange
    machine: Machine | None  # None: `mode` is fixed
    mode: Mode | None
    beside: float = 0.0  # of a layer's work in a pipeline, that beside attention: as much as so many frames of keys

    @classmethod
    def over(
        cls,
        grid: Grid,
        kv: KVGeometry,
        machine: Machine | None = None,
        mode: Mode | None = None,
        beside: float = 0.0,
    ) -> Self:
        """Raises SplitError where ranks, tokens and heads do not go together."""
        if mode is None and machine is None:
            raise SplitError("ring: expected a mode, or a measured machine to choose one by; got neither")
        split = Split(grid.layout.team, grid.everyone.index, kv)
        return cls(HeadExchange(grid, split), machine, mode, beside)

    @property
    def kv(self) -> KVGeometry:
        """What a latent frame puts into this rank's cache."""
        return self.exchange.split.local_kv

    def cache(
        self,
        pool: PagePool,
        policy: Policy,
        frames_per_block: int,
        attend: Attention = sdpa,
        shelf: Shelf | None = None,
    ) -> ParallelCache:
        """A world's cache, or this rank's share of it. Raises PolicyError like `KVCache`."""
        assert pool.format.geometry == self.kv, "the pool holds this rank's share of a page"
        split, ring = self.exchange.split, self.exchange.grid.ring
        backend = RingAttention(ring, split, self._chooser(ring.size)) if ring.size > 1 else attend
        return ParallelCache(pool, policy, frames_per_block, backend, shelf, self)

    def deal(self, blocks: Blocks) -> Deal:
        """Which blocks of a call of staggered ones this rank computes."""
        grid = self.exchange.grid
        if grid.layout.pipeline == 1:
            return Deal(blocks)
        return PipelineDeal(grid.pipeline, Dealt.over(grid.pipeline.size, blocks, self.beside), self.kv.layers)

    @property
    def branching(self) -> Branching:
        """Which parts of a guided step are this rank's."""
        grid = self.exchange.grid
        return SharedBranches(grid.cfg) if grid.layout.cfg > 1 else ALL_BRANCHES

    def _chooser(self, ranks: int) -> Chooser:
        """Of one ring's mode: what a Ulysses group around it costs is the same in both."""
        layout = Layout(1, ranks)
        allowed = [Strategy(layout, self.mode)] if self.mode else of_layout(layout)
        return Chooser(self.machine or UNMEASURED, allowed)


class ParallelCache(KVCache):
    """One rank's share of a world's cache."""

    def __init__(
        self,
        pool: PagePool,
        policy: Policy,
        frames_per_block: int,
        attend: Attention,
        shelf: Shelf | None,
        spread: Spread,
    ) -> None:
        super().__init__(pool, policy, frames_per_block, attend, shelf)
        self.exchange = spread.exchange
        self._spread = spread

    def spread(self, context: Context) -> Context:
        return SpreadContext(context, self.exchange)

    def deal(self, blocks: Blocks) -> Deal:
        return self._spread.deal(blocks)

    def snapshot(self) -> dict[str, Tensor]:
        """The whole cache, the same on every rank; all ranks must ask for it. Raises SplitError if it has no whole."""
        layout, whole = self.exchange.split.layout, _Whole(self.exchange)
        if layout.ring > 1 and self.policy.store != "native":
            raise SplitError(
                f"snapshot: store={self.policy.store} keeps a scale for each rank's tokens of a page, which add up to "
                f"no whole page; expected ring=1 or store=native, got {layout}"
            )
        return {name: whole.join(name, x) if _is_share(name) else x for name, x in super().snapshot().items()}

    def restore(self, state: dict[str, Tensor]) -> None:
        whole = _Whole(self.exchange)
        super().restore({name: whole.cut(name, x) if _is_share(name) else x for name, x in state.items()})

    def _block_at(self, start: int, frames: int, visible: list[int], slots: list[int], hidden: int) -> StagedBlock:
        return ParallelBlock(self, start, frames, visible, self._take(slots), slots, hidden)


class ParallelBlock(StagedBlock):
    """A block being made, as the model on one of several ranks sees it."""

    _cache: ParallelCache
    _heads = 0  # of the model's queries, as of the last call

    @property
    def _exchange(self) -> HeadExchange:
        return self._cache.exchange

    def shard(self, tokens: Tensor) -> Tensor:
        return self._exchange.shard(tokens)

    def unshard(self, tokens: Tensor) -> Tensor:
        return self._exchange.unshard(tokens)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rotate: Rotate | None) -> Tensor:
        self._heads = q.shape[3]
        return self._exchange.attend(super().attend, layer, (q, k, v), rotate)

    def attend_latent(self, layer: int, q: Tensor, latent: Tensor, expand: Expand, rotate: Rotate | None) -> Tensor:
        self._heads = q.shape[3]
        return self._exchange.attend_latent(super().attend_latent, layer, (q, latent), expand, rotate)

    def score(self, keys: Tensor, q: Tensor) -> Tensor:
        """The same scores on every rank.

        They are linear in mean queries and in mean keys: both are summed over the tokens of a ring, the products over
        heads; of a key head that has copies each rank answers for the share of its queries that it has.
        """
        split, grid = self._exchange.split, self._exchange.grid
        share = len(split.chunk) / split.kv.tokens
        query = grid.ring.sum(q.float().mean((0, 1, 2)) * share, "top-k")
        local = super().score(keys.float(), query[None, None, None])
        of_group = (q.shape[3] / keys.shape[1]) / (self._heads / split.kv.heads)
        return grid.everyone.sum(local * share * of_group, "top-k")


class SpreadContext:
    """Any other context of a world, with the exchange around it."""

    def __init__(self, inner: Context, exchange: HeadExchange) -> None:
        self._inner, self._exchange = inner, exchange

    def shard(self, tokens: Tensor) -> Tensor:
        return self._exchange.shard(tokens)

    def unshard(self, tokens: Tensor) -> Tensor:
        return self._exchange.unshard(tokens)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rotate: Rotate | None) -> Tensor:
        return self._exchange.attend(self._inner.attend, layer, (q, k, v), rotate)

    def attend_latent(self, layer: int, q: Tensor, latent: Tensor, expand: Expand, rotate: Rotate | None) -> Tensor:
        return self._exchange.attend_latent(self._inner.attend_latent, layer, (q, latent), expand, rotate)


class _Whole:
    """A cache's snapshot put together from the shares of all ranks, and cut again."""

    def __init__(self, exchange: HeadExchange) -> None:
        self._grid, self._split = exchange.grid, exchange.split

    def join(self, name: str, x: Tensor) -> Tensor:
        """A plane (frames, layers, tokens, heads, channels), or summaries (frames, layers, heads, channels)."""
        split, ring, ulysses = self._split, self._grid.ring, self._grid.ulysses
        if name == "summaries":
            x = ring.sum(x * (len(split.chunk) / split.kv.tokens), "snapshot")
        elif ring.size > 1:
            x = torch.cat(self._gather(ring, x, 2, [len(c) for c in split.chunks]), 2)
        if ulysses.size == 1 or split.kv.latent_dim is not None:
            return x
        pieces = self._gather(ulysses, x, -2, [len(h) for h in split.kv_heads])
        first = {span.start: i for i, span in reversed(list(enumerate(split.kv_heads)))}  # the others are copies
        return torch.cat([pieces[i] for _, i in sorted(first.items())], -2)

    def cut(self, name: str, x: Tensor) -> Tensor:
        """This rank's share of what `join` made."""
        split, chunk = self._split, self._split.chunk
        if name != "summaries" and x.shape[2] == split.kv.tokens:
            x = x[:, :, chunk.start : chunk.stop]
        if split.kv.latent_dim is not None:
            return x
        heads = split.kv_heads[split.layout.place(split.rank)[1]]
        return x[..., heads.start : heads.stop, :]

    def _gather(self, axis: Axis, x: Tensor, dim: int, sizes: list[int]) -> list[Tensor]:
        shapes = [[*x.shape] for _ in sizes]
        for shape, size in zip(shapes, sizes, strict=True):
            shape[dim] = size
        received = axis.gather(as_bytes(x), [math.prod(s) * x.element_size() for s in shapes], "snapshot")
        return [data.view(x.dtype).view(shape) for data, shape in zip(received, shapes, strict=True)]


def _is_share(name: str) -> bool:
    """Whether an entry of a snapshot differs from rank to rank."""
    return name.startswith("page.") or name == "summaries"
