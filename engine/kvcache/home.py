"""The run of pages that one world has reserved, so that its frames lie side by side.

A cache with a bound asks once for all the pages it will ever hold; slot s of the world then belongs at the s-th page of
the run. A growing one asks for many at a time. Knows pages and slots, no frames.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.kvcache.pool import PagePool

# How many pages a world whose cache grows asks for at once, so that its pages lie in long runs.
GROWTH_PAGES = 48


class Home:
    """`most`: the most pages the world ever holds; None if that grows."""

    def __init__(self, pool: PagePool, most: int | None) -> None:
        self._pool, self._most = pool, most
        self._run = range(0)
        self._spare: list[int] = []  # pages of the run that hold nothing

    def __len__(self) -> int:
        """Pages reserved that hold nothing."""
        return len(self._spare)

    def take(self, slots: Sequence[int], after: int) -> list[int]:
        """Pages for new frames, in the order of their slots if it can be had; the pool's where the run has none left.

        `after` is the last page the world holds. Raises CacheFull, and takes nothing, if there are too few.
        """
        count = len(slots)
        if len(self._spare) < count:
            self._reserve(count)
        if len(self._spare) < count:
            return self._pool.take(count, after)
        belongs = [self._run.start + slot for slot in slots]
        fits = self._most is not None and set(belongs) <= set(self._spare)
        taken = belongs if fits else self._spare[:count]
        self._spare = [page for page in self._spare if page not in taken]
        return taken

    def release(self, page: int) -> None:
        """The world needs this page no more: it is spare if it is of the run and nobody else's, else the pool's."""
        if page in self._run and self._pool.references(page) == 1:
            self._spare = sorted([*self._spare, page])
        else:
            self._pool.give_back([page])

    def better_place(self, page: int, slot: int) -> int | None:
        """Take the page where a frame in this slot belongs, if it lies elsewhere, alone, and that page is spare."""
        belongs = self._run.start + slot
        movable = self._most is not None and page != belongs and self._pool.references(page) == 1
        if not movable or belongs not in self._spare:
            return None
        self._spare.remove(belongs)
        return belongs

    def close(self) -> None:
        """Give the spare pages back."""
        self._pool.give_back(self._spare)
        self._spare, self._run = [], range(0)

    def _reserve(self, count: int) -> None:
        """Reserve a run if the pool has room for one."""
        wanted = max(count, GROWTH_PAGES - GROWTH_PAGES % count if self._most is None else self._most)
        self._pool.give_back(self._spare)
        self._spare = []
        if self._pool.free >= wanted:
            run = self._pool.take(wanted, after=self._run[-1] if self._most is None and self._run else -1)
            self._spare, self._run = sorted(run), range(min(run), max(run) + 1)
