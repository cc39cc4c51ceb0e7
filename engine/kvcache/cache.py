"""One world's view of the cache: which frame lies in which page, what the next block sees, what goes.

    with cache.stage(start, frames) as block:   # pages for the new block; invisible to later blocks until commit
        ... model.forward(x, t, conditioning, block) ...   # once a step; each rewrites the block's pages
        block.clean = True
        ... model.forward(clean, t_context, conditioning, block) ...
        block.commit()                          # leaving without commit gives the pages back: nothing has happened

Committed pages are never written again, so a fork shares them. Letting go of frames that no later block reads happens
when a block is staged, and holds whether or not that block succeeds. Every frame has a slot, its place in the order in
which keys are attended to; slots follow from the policy alone, so that a fork, a restored or an offloaded cache adds up
the same numbers in the same order as the original, wherever its pages lie. Knows no model and no noise; see `staged.py`
for what a model sees.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from engine.kvcache.catalogue import Catalogue
from engine.kvcache.deal import Blocks, Deal
from engine.kvcache.home import Home
from engine.kvcache.latent import Projection
from engine.kvcache.policy import Policy
from engine.kvcache.pool import PagePool
from engine.kvcache.staged import Shelf, StagedBlock
from engine.kvcache.tiers import HostTier, PageData
from engine.layers.attention import Attention, sdpa
from engine.models import Context
from engine.profiler import span


class KVCache:
    """The pages of one world (one branch of one world, under classifier-free guidance)."""

    def __init__(
        self,
        pool: PagePool,
        policy: Policy,
        frames_per_block: int,
        attend: Attention = sdpa,
        shelf: Shelf | None = None,
        projections: Sequence[Projection] = (),
    ) -> None:
        """Raises PolicyError if the policy cannot hold a block of `frames_per_block` latent frames.

        With `projections`, one per layer, and a pool of latent pages, keys and values are kept as latents.
        """
        self.pool = pool
        self.policy = policy.check(frames_per_block)
        self.frames_per_block = frames_per_block
        self.attend = attend
        self.projections = projections
        self.shelf = shelf or Shelf()
        self.host = HostTier(pool.device)
        self.origin = 0  # first frame of the sink
        self.copied_bytes = 0  # written into pages
        self.gathered_bytes = 0  # moved because the visible pages did not lie in one run, or not as they are read
        self.offloaded_bytes = 0  # moved to host memory
        self._pages: dict[int, int] = {}  # frame -> page
        self._slots: dict[int, int] = {}  # frame -> slot
        self.catalogue = Catalogue(frames_per_block)  # of the committed blocks
        self._home = Home(pool, policy.most_held(frames_per_block))

    # ------------------------------------------------------------------------------------------ one block

    def stage(self, start: int, frames: int, visible: Sequence[int] | None = None, hidden: int = 0) -> StagedBlock:
        """Pages for the block at [start, start + frames).

        `visible` is all of the past that is seen, in place of what the policy shows and would fetch; nothing is let go
        of then. The first `hidden` frames of the block are queries only: they get no page and nobody sees their keys (a
        re-cache behind a sink).
        Raises CacheFull and takes nothing if the pool has no room.
        """
        if visible is None:
            self._let_go(start, frames)
            shown = [f for f in self.policy.visible(start, frames, self.origin) if f in self]
            candidates = self.catalogue.candidates(shown) if self.policy.topk else []
        else:
            shown, candidates = [f for f in visible if f in self], []
        slots = self._slots_for(range(start + hidden, start + frames))
        block = self._block_at(start, frames, shown, slots, hidden)
        block.candidates = candidates
        return block

    def accept(self, block: StagedBlock) -> None:
        """Make a staged block part of the past (called by its `commit`)."""
        self._release(block.stored)
        self._pages.update(zip(block.stored, block.pages, strict=True))
        self._slots.update(zip(block.stored, block.slots, strict=True))
        self.catalogue.add(block.stored, block.summaries)
        self._come_home()
        after = block.start + block.frames
        self.host.prefetch(self.policy.visible(after, self.frames_per_block, self.origin))

    def refuse(self, pages: Iterable[int]) -> None:
        """Take back the pages of a block that was not committed."""
        for page in pages:
            self._home.release(page)

    def spread(self, context: Context) -> Context:
        """A context of this cache's world as its model is to see it: itself, unless the cache is a rank's share."""
        return context

    def deal(self, blocks: Blocks) -> Deal:
        """Which blocks of a call of staggered ones are computed here: all, unless the cache is a pipeline's."""
        return Deal(blocks)

    # ------------------------------------------------------------------------------------------- reading

    def __contains__(self, frame: int) -> bool:
        return frame in self._pages or frame in self.host

    @property
    def held(self) -> list[int]:
        """Frames whose keys and values are kept, on the device or off it, oldest first."""
        return sorted({*self._pages, *self.host.frames})

    def page_of(self, frame: int) -> int | None:
        """The device page of a frame; None while it waits in host memory."""
        return self._pages.get(frame)

    def slot_of(self, frame: int) -> int:
        """The place of a frame in the order of attention."""
        return self._slots[frame]

    def select(self, layer: int, frames: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Stored keys and values (n, S, heads, head_dim) of any frames held, in the order asked for."""
        missing = [f for f in frames if f not in self]
        if missing:
            raise KeyError(f"frames {missing[:3]} are not in the cache; it holds {self.held[:1]}..{self.held[-1:]}")
        parts = [self.pool.storage.read(layer, self._planes(layer, f)) for f in frames]
        return torch.cat([k for k, _ in parts]), torch.cat([v for _, v in parts])

    def between(self, layer: int, first: int, end: int) -> tuple[Tensor, Tensor]:
        """Stored keys and values of frames [first, end)."""
        return self.select(layer, range(first, end))

    def bytes_by_tier(self) -> dict[str, int]:
        """Bytes this world holds: pages on the device (reserved ones included) and in host memory."""
        pages = len(self._pages) + len(self._home)
        return {"device": pages * self.pool.format.page_bytes, "host": self.host.used_bytes}

    # ------------------------------------------------------------------------------------ life and copies

    def drop(self, frames: Iterable[int]) -> None:
        """Let go of frames for good."""
        self.catalogue.forget(self._release(frames))

    def offload(self, frames: Iterable[int]) -> None:
        """Move pages to host memory; reading them brings them back a layer at a time."""
        for frame in [f for f in frames if f in self._pages]:
            self.host.put(frame, self._page_data(frame))
            self.offloaded_bytes += self.pool.format.page_bytes
            self._home.release(self._pages.pop(frame))

    def fork(self) -> KVCache:
        """A second cache that shares every page until the two differ."""
        twin = copy.copy(self)
        self.pool.share(list(self._pages.values()))
        twin._pages, twin._slots = dict(self._pages), dict(self._slots)
        twin.host, twin.catalogue = self.host.copy(), self.catalogue.copy()
        twin._home = Home(self.pool, self.policy.most_held(self.frames_per_block))
        twin.copied_bytes = twin.gathered_bytes = twin.offloaded_bytes = 0
        return twin

    def close(self) -> None:
        """Give every page back."""
        self.drop(self.held)
        self._home.close()

    def snapshot(self) -> dict[str, Tensor]:
        """Everything held, as tensors; `restore` on an empty cache of the same format makes the same cache of it."""
        held = self.held
        pages = [self._page_data(f) for f in held]
        apart = len(self.host) > 0  # some pages are on the device and some are not
        state = {
            f"page.{name}": torch.stack([p[name].cpu() if apart else p[name] for p in pages])
            for name in (pages[0] if pages else {})
        }
        state |= self.catalogue.snapshot()
        state["frames"] = torch.tensor(held, dtype=torch.int64)
        state["slots"] = torch.tensor([self._slots[f] for f in held], dtype=torch.int64)
        state["hosted"] = torch.tensor(self.host.frames, dtype=torch.int64)
        state["origin"] = torch.tensor(self.origin)
        return state

    def restore(self, state: dict[str, Tensor]) -> None:
        """Fill this cache, which must be empty, from a snapshot. Raises CacheFull if the pool is too small."""
        assert not self.held, "restore into an empty cache"
        frames, hosted = [int(f) for f in state["frames"]], {int(f) for f in state["hosted"]}
        self._slots = {f: int(slot) for f, slot in zip(frames, state["slots"], strict=True)}
        here = [f not in hosted for f in frames]
        near = list(itertools.compress(frames, here))
        self._pages = dict(zip(near, self._take([self._slots[f] for f in near]), strict=True))
        for name, plane in self.pool.storage.planes.items():
            if near:
                pages = torch.tensor([self._pages[f] for f in near])
                plane[:, pages] = state[f"page.{name}"][torch.tensor(here)].transpose(0, 1).to(plane.device)
        for i in (i for i, f in enumerate(frames) if f in hosted):
            self.host.put(frames[i], {name: state[f"page.{name}"][i] for name in self.pool.storage.planes})
        self.catalogue.restore(state, frames, self.pool.device)
        self.origin = int(state["origin"])

    # ---------------------------------------------------------------------------------------------- pages

    def _block_at(self, start: int, frames: int, visible: list[int], slots: list[int], hidden: int) -> StagedBlock:
        return StagedBlock(self, start, frames, visible, self._take(slots), slots, hidden)

    def _release(self, frames: Iterable[int]) -> list[int]:
        """Give back the pages of those of these frames that are held; which they were."""
        gone = [f for f in frames if f in self]
        for frame in gone:
            if frame in self._pages:
                self._home.release(self._pages.pop(frame))
            self._slots.pop(frame)
        self.host.drop(gone)
        return gone

    def _let_go(self, start: int, frames: int) -> None:
        keep = set(self.policy.keep(self.held, start, frames, self.origin))
        self.drop(f for f in self.held if f not in keep)
        if self.policy.offload == "host":
            shown = set(self.policy.visible(start, frames, self.origin))
            with span("offload"):
                self.offload(f for f in self._pages if f not in shown)

    def _slots_for(self, stored: Iterable[int]) -> list[int]:
        """Their own for frames that are written again, the first that nobody has for new ones."""
        used = set(self._slots.values())
        unused = (slot for slot in itertools.count() if slot not in used)
        return [self._slots[f] if f in self._slots else next(unused) for f in stored]

    def _take(self, slots: Sequence[int]) -> list[int]:
        return self._home.take(slots, after=max(self._pages.values(), default=-1))

    def _come_home(self) -> None:
        """Move this world's own pages to where their slots belong (after a re-cache, or a fork's end)."""
        for frame, page in list(self._pages.items()):
            better = self._home.better_place(page, self._slots[frame])
            if better is not None:
                for plane in self.pool.storage.planes.values():
                    plane[:, better] = plane[:, page]
                self._pages[frame] = better
                self._home.release(page)

    def _planes(self, layer: int, frame: int) -> PageData:
        """One frame of one layer, plane by plane: (1, ...)."""
        page = self._pages.get(frame)
        if page is None:
            return self.host.layer([frame], layer)
        return {name: plane[layer, page : page + 1] for name, plane in self.pool.storage.planes.items()}

    def _page_data(self, frame: int) -> PageData:
        page = self._pages.get(frame)
        if page is None:
            return self.host.page(frame)
        return {name: plane[:, page].clone() for name, plane in self.pool.storage.planes.items()}
