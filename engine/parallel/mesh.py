"""The ranks of a group and how bytes go between them, through torch.distributed: gloo on a CPU, NCCL on GPUs.

    with Mesh.join(Meeting(rank, ranks, store)) as mesh:
        grid = mesh.grid(Layout(ulysses=2, ring=2))
        grid.ulysses.exchange(parts, sizes) ...

What is sent is counted where it is handed to the transport, by kind, in `mesh.sent_bytes`; what a rank hands to itself
is not. A peer that is gone, or has not come within the patience of the group, raises ExchangeFailed. Knows no models,
no attention and no cache; who is missing is found out by `launch.py`.
"""

from __future__ import annotations

import datetime
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store, Work

from engine import profiler
from engine.parallel.split import Layout, SplitError

PATIENCE_S = 30.0
FOR_EVER = datetime.timedelta(days=365)
HEAD_BYTES = 512  # of what rank 0 says in one message; longer ones take a second


class ExchangeFailed(ConnectionError):
    """Ranks could not exchange: one of them is gone or has not come in time."""


@dataclass(frozen=True)
class Meeting:
    """Where and as who a rank joins. Without a store the rendezvous is torchrun's: MASTER_ADDR and its fellows."""

    rank: int
    ranks: int
    store: Store | None = None
    device: str = "cpu"
    patience_s: float = PATIENCE_S

    @classmethod
    def from_torchrun(cls, device: str = "cpu") -> Meeting:
        """As the environment that torchrun sets says. Raises SplitError where it is not set."""
        try:
            rank, ranks, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
            return cls(rank, ranks, device=f"cuda:{local}" if device.startswith("cuda") else device)
        except KeyError as error:
            raise SplitError(
                f"torchrun: expected RANK, WORLD_SIZE and LOCAL_RANK in the environment, {error} is missing"
            ) from error


class Mesh:
    """All ranks of a group, this one among them."""

    def __init__(self, meeting: Meeting) -> None:
        ranks = meeting.ranks
        self.rank, self.ranks, self.device = meeting.rank, ranks, torch.device(meeting.device)
        self.sent_bytes: dict[str, int] = {}
        self.exchanges = 0  # how many this rank has begun: the one that lags is the one that all wait for
        self.everyone = Axis(self, range(ranks), None)
        self._counting = threading.Lock()
        self._plans = dist.new_group(backend="gloo", timeout=FOR_EVER) if ranks > 1 else None
        self.patience = datetime.timedelta(seconds=meeting.patience_s)
        self._axes: dict[range, Axis] = {range(ranks): self.everyone}

    @classmethod
    def join(cls, meeting: Meeting) -> Mesh:
        """Meet the others. Raises ExchangeFailed if they do not come."""
        on_gpu = torch.device(meeting.device).type == "cuda"
        if on_gpu:
            torch.cuda.set_device(meeting.device)
        with named("join"):
            dist.init_process_group(
                "nccl" if on_gpu else "gloo",
                store=meeting.store,
                rank=meeting.rank,
                world_size=meeting.ranks,
                timeout=datetime.timedelta(seconds=meeting.patience_s),
            )
        return cls(meeting)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def prepare(self, layout: Layout) -> None:
        """Make the groups of a layout of the first ranks (all, as a rule).

        All ranks must ask for the same layouts in the same order, those outside of one too.
        """
        if layout.ranks > self.ranks:
            raise SplitError(f"layout: expected at most {self.ranks} ranks, got {layout}")
        team = [layout.team_group(0)]
        team += [layout.ulysses_group(i) for i in range(layout.ring)]
        team += [layout.ring_group(i) for i in range(layout.ulysses)]
        groups = [_shifted(ranks, layout.team_group(i).start) for i in range(layout.teams) for ranks in team]
        groups += [group(i) for i in range(layout.ranks) for group in (layout.pipeline_group, layout.cfg_group)]
        for ranks in groups:
            if ranks not in self._axes:
                group = dist.new_group(list(ranks), timeout=self.patience) if len(ranks) > 1 else None
                self._axes[ranks] = Axis(self, ranks, group)

    def grid(self, layout: Layout) -> Grid:
        """The groups of a layout that this rank is in; see `prepare`."""
        self.prepare(layout)
        if self.rank >= layout.ranks:
            raise SplitError(f"layout: expected a rank below {layout.ranks}, got rank {self.rank}")
        at_ring, at_ulysses = layout.place(self.rank)
        team = layout.team_group(self.rank // layout.team.ranks)
        shared = (layout.team_group(0), layout.ulysses_group(at_ring), layout.ring_group(at_ulysses))
        groups = [_shifted(ranks, team.start) for ranks in shared]
        groups += [layout.pipeline_group(self.rank), layout.cfg_group(self.rank)]
        return Grid(layout, *(self._axes[group] for group in groups))

    def tell(self, data: bytes | None) -> bytes:
        """Bytes of rank 0 (who gives them) to all; the others wait for them as long as it takes."""
        return tell(self, self._plans, data, "plan")

    def wait_for_all(self) -> None:
        """Return when every rank has come here."""
        self.everyone.sum(torch.zeros(1, device=self.device), "barrier")

    def count(self, kind: str, sent: int) -> None:
        """Note an exchange that begins, in whichever thread."""
        profiler.count(f"sent_bytes: {kind}", sent)
        with self._counting:
            self.exchanges += 1
            self.sent_bytes[kind] = self.sent_bytes.get(kind, 0) + sent


@dataclass(frozen=True)
class Grid:
    """The groups that one rank is in."""

    layout: Layout
    everyone: Axis  # of its team
    ulysses: Axis
    ring: Axis
    pipeline: Axis  # those at its place in the teams of its pipeline
    cfg: Axis  # those at its place in all pipelines


class Pending:
    """Transfers under way."""

    def __init__(self, works: Sequence[Work], sent: Sequence[Tensor], received: Tensor) -> None:
        self._works, self._received = works, received
        self._sent = sent  # must live until they have gone

    def wait(self) -> Tensor:
        """What has come: (bytes,) uint8."""
        with named("transfer"):
            for work in self._works:
                work.wait()
        return self._received


class Axis:
    """Some ranks in order, this one at `index`. Tensors go as they are in memory, bytes of any type."""

    def __init__(self, mesh: Mesh, ranks: range, group: dist.ProcessGroup | None) -> None:
        self.mesh, self.ranks, self._group = mesh, ranks, group
        self.index = ranks.index(mesh.rank) if mesh.rank in ranks else -1

    @property
    def size(self) -> int:
        return len(self.ranks)

    def exchange(self, parts: Sequence[Tensor], receive_bytes: Sequence[int], kind: str) -> list[Tensor]:
        """Part i (bytes,) goes to rank i; what comes from each, by rank. All parts, all sizes, one collective."""
        if self.size == 1:
            return [*parts]
        sizes = [len(part) for part in parts]
        self.mesh.count(kind, sum(sizes) - sizes[self.index])
        received = torch.empty(sum(receive_bytes), dtype=torch.uint8, device=parts[0].device)
        with named(kind):
            dist.all_to_all_single(received, torch.cat(list(parts)), list(receive_bytes), sizes, group=self._group)
        return list(torch.split(received, list(receive_bytes)))

    def gather(self, mine: Tensor, receive_bytes: Sequence[int], kind: str) -> list[Tensor]:
        """Everyone's (bytes,) by rank; sizes may differ."""
        return self.exchange([mine] * self.size, receive_bytes, kind)

    def post(self, data: Tensor, to: int, source: int, receive_bytes: int, kind: str) -> Pending:
        """Begin to send (bytes,) to rank `to` and to receive from `source`, both indices in this axis.

        `data` must stay as it is until the result has been waited for. All ranks post in the same order.
        """
        self.mesh.count(kind, len(data))
        received = torch.empty(receive_bytes, dtype=torch.uint8, device=data.device)
        pair = [
            dist.P2POp(dist.isend, data, self.ranks[to], self._group),
            dist.P2POp(dist.irecv, received, self.ranks[source], self._group),
        ]
        with named(kind):
            return Pending(dist.batch_isend_irecv(pair), [data], received)

    def send(self, parts: Sequence[tuple[int, Tensor]], kind: str) -> Pending:
        """Begin to send (bytes,) to ranks, as many or as few as there are parts; those ranks `receive`.

        Ranks that do so in step must all call it, with nothing to send too: it counts as one exchange for each.
        """
        self.mesh.count(kind, sum(len(data) for _, data in parts))
        sends = [dist.P2POp(dist.isend, data, self.ranks[to], self._group) for to, data in parts]
        return self._begun(sends, [data for _, data in parts], torch.empty(0, dtype=torch.uint8), kind)

    def receive(self, sizes: Sequence[tuple[int, int]], kind: str) -> Pending:
        """Begin to receive bytes, (from rank, how many) each; they come one behind the other in one tensor."""
        received = torch.empty(sum(size for _, size in sizes), dtype=torch.uint8, device=self.mesh.device)
        parts = torch.split(received, [size for _, size in sizes])
        receives = [
            dist.P2POp(dist.irecv, part, self.ranks[source], self._group)
            for (source, _), part in zip(sizes, parts, strict=True)
        ]
        return self._begun(receives, [], received, kind)

    def _begun(self, transfers: list[dist.P2POp], sent: Sequence[Tensor], received: Tensor, kind: str) -> Pending:
        with named(kind):
            return Pending(dist.batch_isend_irecv(transfers) if transfers else [], sent, received)

    def sum(self, values: Tensor, kind: str) -> Tensor:
        """The sum over ranks, the same on all of them; (2 n - 2) / n of its bytes are sent by each, n being ranks."""
        if self.size == 1:
            return values
        self.mesh.count(kind, 2 * (self.size - 1) * values.numel() * values.element_size() // self.size)
        total = values.clone()
        with named(kind):
            dist.all_reduce(total, group=self._group)
        return total


def _shifted(ranks: range, by: int) -> range:
    return range(ranks.start + by, ranks.stop + by, ranks.step)


def as_bytes(x: Tensor) -> Tensor:
    """Any tensor as (bytes,) uint8, copied only where it does not lie in one piece."""
    return x.contiguous().view(-1).view(torch.uint8)


def tell(mesh: Mesh, group: dist.ProcessGroup | None, data: bytes | None, kind: str) -> bytes:
    """Bytes of rank 0 (who gives them) to all, over a gloo group of all ranks: see `Mesh.tell`.

    HEAD_BYTES of them, the length among them, go first; to each rank that is max(HEAD_BYTES, 8 + length) in all.
    """
    head = torch.zeros(HEAD_BYTES, dtype=torch.uint8)
    if data is not None:
        first = len(data).to_bytes(8, "little") + data[: HEAD_BYTES - 8]
        head[: len(first)] = torch.frombuffer(bytearray(first), dtype=torch.uint8)
        rest = max(0, len(data) + 8 - HEAD_BYTES)
        mesh.count(kind, (mesh.ranks - 1) * (HEAD_BYTES + rest))
    with named(kind):
        dist.broadcast(head, 0, group=group)
        size = int.from_bytes(bytes(head[:8].numpy()), "little")
        whole = bytes(head[8 : 8 + size].numpy()) if data is None else data
        if size > HEAD_BYTES - 8:
            body = torch.empty(size + 8 - HEAD_BYTES, dtype=torch.uint8)
            if data is not None:
                body.copy_(torch.frombuffer(bytearray(data[HEAD_BYTES - 8 :]), dtype=torch.uint8))
            dist.broadcast(body, 0, group=group)
            whole = whole if data is not None else whole + bytes(body.numpy())
    return whole


@contextmanager
def named(what: str) -> Iterator[None]:
    """Failures of the transport as ExchangeFailed."""
    try:
        with profiler.span(f"exchange: {what}"):
            yield
    except RuntimeError as error:  # what torch.distributed raises for lost and late peers
        raise ExchangeFailed(f"{what}: {error}") from error
