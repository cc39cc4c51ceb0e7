"""Who holds what of a world that is spread over ranks: integers in, integers out.

Ranks form a grid, `ulysses` x `ring`; neighbours in rank are neighbours in a Ulysses group, which exchanges most.

    rank = ring index * ulysses + ulysses index

Every latent frame's tokens are split over all ranks, in rank order. Within a Ulysses group attention is split by head:
a rank gets the group's tokens, a chunk of consecutive ones, for its heads alone. Chunks go round in rings. So a rank
keeps 1/ring of the tokens and 1/ulysses of the heads of every page, whatever a policy shows or lets go of: pages are
cut, not dealt out, and no window, sink or chosen range can leave one rank with more to keep or to read than another.

All of that is one team. The teams of a pipeline compute blocks of a call each (deal.py), the first the oldest; and
pipelines, of one team as a rule, compute parts of a guided step each (guidance.py):

    rank = ((cfg index * pipeline + pipeline index) * ring + ring index) * ulysses + ulysses index

Knows no torch and no transport.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from engine.models import KVGeometry


class SplitError(ValueError):
    """Ranks, tokens and heads that do not go together; the message says what was expected and what came."""


@dataclass(frozen=True)
class Layout:
    """How many ranks share heads, how many of these groups share keys, how many teams of them share blocks in flight
    (`pipeline`), and how many pipelines share the branches of guidance (`cfg`)."""

    ulysses: int = 1
    ring: int = 1
    pipeline: int = 1
    cfg: int = 1

    def __post_init__(self) -> None:
        if min(self.ulysses, self.ring, self.pipeline, self.cfg) < 1:
            got = f"{self.ulysses} x {self.ring}" + f" x {self.teams}" * (self.teams != 1)
            raise SplitError(f"layout: expected at least 1 x 1 ranks, got {got}")

    @property
    def teams(self) -> int:
        return self.pipeline * self.cfg

    @property
    def ranks(self) -> int:
        return self.ulysses * self.ring * self.teams

    @property
    def team(self) -> Layout:
        """Of the ranks that share what they compute."""
        return Layout(self.ulysses, self.ring)

    def place(self, rank: int) -> tuple[int, int]:
        """(ring index, ulysses index) of a rank in its team."""
        return divmod(rank % self.team.ranks, self.ulysses)

    def team_group(self, index: int) -> range:
        return range(index * self.team.ranks, (index + 1) * self.team.ranks)

    def ulysses_group(self, ring_index: int) -> range:
        """Of the first team."""
        return range(ring_index * self.ulysses, (ring_index + 1) * self.ulysses)

    def ring_group(self, ulysses_index: int) -> range:
        """Of the first team."""
        return range(ulysses_index, self.team.ranks, self.ulysses)

    def pipeline_group(self, rank: int) -> range:
        """The ranks at the place of this one in the teams of its pipeline."""
        step, whole = self.team.ranks, self.team.ranks * self.pipeline
        first = rank // whole * whole
        return range(first + rank % step, first + whole, step)

    def cfg_group(self, rank: int) -> range:
        """The ranks at the place of this one in all pipelines."""
        whole = self.team.ranks * self.pipeline
        return range(rank % whole, self.ranks, whole)

    def __str__(self) -> str:
        teams = f" pipeline={self.pipeline}" * (self.pipeline > 1) + f" cfg={self.cfg}" * (self.cfg > 1)
        return f"ulysses={self.ulysses} ring={self.ring}{teams}"


def layouts(ranks: int, *, pipeline: bool = False, cfg: Iterable[int] = (1,)) -> list[Layout]:
    """Every grid of this many ranks: with `cfg` pipelines, of several teams too where `pipeline` is wanted."""
    deep = range(1, ranks + 1) if pipeline else (1,)
    teams = [(n, g) for g in cfg for n in deep if ranks % (n * g) == 0]
    sizes = [(ranks // n // g, n, g) for n, g in teams]
    return [Layout(u, size // u, n, g) for size, n, g in sizes for u in range(1, size + 1) if size % u == 0]


def teams_for(branches: int, caches: int) -> list[int]:
    """How many can share so many branches of guidance: where each has a cache, one for all or one for each."""
    return list(range(1, branches + 1)) if caches == 1 else [1, branches]


def check_teams(teams: int, branches: int, caches: int) -> None:
    """Raise SplitError unless so many can."""
    possible = teams_for(branches, caches)
    if teams not in possible:
        what = f"the {branches} branches of guidance" if branches > 1 else "no guidance"
        raise SplitError(f"cfg: expected {' or '.join(map(str, possible))}, for {what}; got {teams}")


def shares(total: int, parts: int) -> list[int]:
    """`total` in `parts` that differ by one at most, larger ones first."""
    return [total // parts + (i < total % parts) for i in range(parts)]


def spans(sizes: list[int]) -> list[range]:
    """Sizes laid end to end."""
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def kv_head_spans(kv_heads: int, ranks: int) -> list[range]:
    """The key/value heads of each rank of a Ulysses group: split where there are enough, else one each, repeated."""
    if kv_heads >= ranks:
        return spans(shares(kv_heads, ranks))
    return [range(head, head + 1) for head, times in enumerate(shares(ranks, kv_heads)) for _ in range(times)]


def q_head_spans(heads: int, kv_heads: int, ranks: int) -> list[range]:
    """The query heads of each rank, those that read the key/value heads it holds.

    With fewer key/value heads than ranks the queries of one such head are split over the ranks that hold a copy of it,
    unevenly where they do not divide. Raises SplitError when a rank would have none.
    """
    if heads < ranks:
        raise SplitError(f"ulysses: expected at most {heads} ranks for {heads} heads, got {ranks}")
    group = heads // kv_heads
    if kv_heads >= ranks:
        return [range(s.start * group, s.stop * group) for s in kv_head_spans(kv_heads, ranks)]
    return spans([size for times in shares(ranks, kv_heads) for size in shares(group, times)])


@dataclass(frozen=True)
class Split:
    """The share of one rank, and of the others as far as it deals with them."""

    layout: Layout  # of its team
    rank: int  # in the team
    kv: KVGeometry  # of the whole model

    def __post_init__(self) -> None:
        if self.kv.tokens < self.layout.ranks:
            raise SplitError(f"ranks: expected at most {self.kv.tokens}, a latent frame's tokens; got {self.layout}")
        if self.kv.latent_dim is not None and self.kv.heads < self.layout.ulysses:
            raise SplitError(f"ulysses: expected at most {self.kv.heads} ranks, as many as heads; got {self.layout}")

    @cached_property
    def tokens(self) -> list[range]:
        """Of a latent frame, by rank."""
        return spans(shares(self.kv.tokens, self.layout.ranks))

    @cached_property
    def mine(self) -> range:
        """This rank's tokens, outside of attention."""
        return self.tokens[self.rank]

    @cached_property
    def chunks(self) -> list[range]:
        """Tokens by ring index: what a Ulysses group attends from and keeps."""
        groups = (self.layout.ulysses_group(i) for i in range(self.layout.ring))
        return [range(self.tokens[g[0]].start, self.tokens[g[-1]].stop) for g in groups]

    @cached_property
    def chunk(self) -> range:
        return self.chunks[self.layout.place(self.rank)[0]]

    @cached_property
    def kv_heads(self) -> list[range]:
        """Key/value heads by ulysses index."""
        return kv_head_spans(self.kv.heads, self.layout.ulysses)

    def q_heads(self, heads: int) -> list[range]:
        """Query heads by ulysses index."""
        return q_head_spans(heads, self.kv.heads, self.layout.ulysses)

    @cached_property
    def local_kv(self) -> KVGeometry:
        """What a latent frame puts into this rank's cache. A latent has no heads to split: its ranks keep a copy."""
        heads = len(self.kv_heads[self.layout.place(self.rank)[1]])
        return KVGeometry(self.kv.layers, heads, self.kv.head_dim, len(self.chunk), self.kv.latent_dim)
