"""Decoding shared by ranks: each makes a band of a block's pictures, and rank 0 puts them together.

    rank 0      JoiningDecoder, in place of a model's own: called by whichever thread decodes
    the others  BandThread: makes its band as it is told, beside this rank's passes through the model

What is said goes through host memory, where pictures are wanted, over a gloo group that nothing else uses: exchanges
of decoding and of passes cannot meet. Rank 0 sends the latents although every rank has made them: so a rank's decoding
depends on nothing that its other thread does, and the world it belongs to need not even exist there any more. Of a
block of N pictures of H x W all ranks together send

    pictures    N (H - the rows of rank 0) W 3, and 8 for each other band
    latents     (n - 1) max(512, F C h w e + a head below 2 KiB)

A world keeps its decoder's memory as ever, by value and unchanged once made; what it holds on rank 0 is the memory of
rank 0's band, and a token for those that the others keep. The token is its own copy, so worlds fork; when the last one
is gone, rank 0 says so with the next block.
"""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from types import TracebackType
from typing import Any, Self, cast

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from engine.decoding import own_stream
from engine.models import Band, BandedDecoder, BlockModel, Conditioning, Decoder, State
from engine.parallel.mesh import FOR_EVER, ExchangeFailed, Mesh, as_bytes, named, tell
from engine.parallel.plan import packed, unpacked

logger = logging.getLogger(__name__)

HEAD_BYTES = 8  # how many pictures follow; FAILED: none, the band could not be made
FAILED = -1
ENDED = b""

Bands = Mapping[str, Sequence[Band]]
"""By model: one for each of the first ranks, at least two."""


class BandFailed(RuntimeError):
    """Another rank could not make its band; its world cannot be shown any further."""


class _Order(msgspec.Struct, frozen=True):
    """What rank 0 tells the others. Memories go by number; 0 is none."""

    model: str
    latents: bytes
    after: int  # the memory to decode with
    made: int  # the memory that results
    forget: tuple[int, ...]


_encode, _decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(_Order).decode


def bands(models: Mapping[str, BlockModel], ranks: int) -> dict[str, Sequence[Band]]:
    """Of those models whose decoders can be shared by so many ranks: the same on all of them."""
    found: dict[str, Sequence[Band]] = {}
    for name, model in models.items():
        decoder = model.decoder
        made = decoder.bands(model.geometry.latent, ranks) if isinstance(decoder, BandedDecoder) else ()
        if len(made) > 1:
            found[name] = made
            logger.info("%s: pictures are decoded by %d ranks", name, len(made))
    return found


def shown(model: BlockModel, decoder: Decoder) -> BlockModel:
    """A model with a decoder in place of its own."""
    return cast(BlockModel, _Shown(model, decoder))


def unseen(model: BlockModel) -> BlockModel:
    """A model of worlds that this rank does not show."""
    return shown(model, _Nothing())


class _Shown:
    """All but the decoder shows through."""

    def __init__(self, model: BlockModel, decoder: Decoder) -> None:
        self._model, self.decoder = model, decoder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class _Nothing:
    def decode(self, latents: Tensor, conditioning: Conditioning, state: State) -> tuple[Tensor, State]:
        return torch.empty(0, 0, 0, 3, dtype=torch.uint8), None


class _Token:
    """Stands for the memories of the other ranks' bands after one block."""

    def __init__(self, number: int, forget: Callable[[int], None]) -> None:
        self.number = number
        weakref.finalize(self, forget, number).atexit = False

    def __deepcopy__(self, memo: object) -> _Token:
        return self


class Joining:
    """Rank 0's end of the channel. All ranks open theirs at the same point of their start."""

    def __init__(self, mesh: Mesh, guarded: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        """`guarded`: around each exchange, to name the rank that one has failed for."""
        self._mesh, self._guarded = mesh, guarded
        self._group = dist.new_group(backend="gloo", timeout=FOR_EVER)
        self._numbers = itertools.count(1)
        self._forgotten: deque[int] = deque()  # as many as there were memories at most
        self._one_at_a_time = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Send the others home."""
        with suppress(ConnectionError), self._exclusive():
            tell(self._mesh, self._group, ENDED, "latents")

    def decoder(self, model: str, bands: Sequence[Band], width: int) -> JoiningDecoder:
        """`width` of the pictures."""
        return JoiningDecoder(self, model, bands, width)

    @contextmanager
    def block(self, model: str, latents: Tensor, after: _Token | None) -> Iterator[_Token]:
        """Let the others decode a block while what is inside decodes it here, and then receives their bands."""
        token = _Token(next(self._numbers), self._forgotten.append)
        with self._exclusive():
            forget = tuple(self._forgotten.popleft() for _ in range(len(self._forgotten)))
            order = _Order(model, packed(latents.cpu()), after.number if after else 0, token.number, forget)
            tell(self._mesh, self._group, _encode(order), "latents")
            yield token

    def receive(self, rank: int, rows: int, width: int) -> Tensor | None:
        """A rank's band (N, rows, width, 3), or None if it could not be made."""
        count = int(self._bytes_of(rank, HEAD_BYTES).view(torch.int64))
        if count == FAILED:
            return None
        return self._bytes_of(rank, count * rows * width * 3).view(count, rows, width, 3)

    def _bytes_of(self, rank: int, size: int) -> Tensor:
        received = torch.empty(size, dtype=torch.uint8)
        with named(f"pictures of rank {rank}"):
            work = dist.irecv(received, rank, self._group)
            assert work is not None
            work.wait(self._mesh.patience)
        return received

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        with self._one_at_a_time, self._guarded():
            yield


class JoiningDecoder:
    """A model's decoder on rank 0: makes its own band, and takes in those of the others."""

    def __init__(self, joining: Joining, model: str, bands: Sequence[Band], width: int) -> None:
        self._joining, self._model, self._bands, self._width = joining, model, bands, width

    @torch.inference_mode()
    def decode(self, latents: Tensor, conditioning: Conditioning, state: State) -> tuple[Tensor, State]:
        """Pictures come in host memory. Raises BandFailed, ExchangeFailed or RankLost."""
        after, memory = state or (None, None)
        with self._joining.block(self._model, latents, after) as token:
            try:
                own, memory = self._bands[0].decode(latents, memory)
                own = own.cpu()
            finally:
                sizes = enumerate([len(band.rows) for band in self._bands[1:]], 1)
                others = [self._joining.receive(rank, rows, self._width) for rank, rows in sizes]
        parts = [own, *(part for part in others if part is not None)]
        if len(parts) < len(self._bands):
            raise BandFailed(f"decoder: rank {others.index(None) + 1} could not make its band; its log says why")
        return torch.cat(parts, 1), (token, memory)


class BandThread:
    """What another rank does of decoding, in a thread that lives until rank 0 ends it."""

    def __init__(self, mesh: Mesh, bands: Bands, threads: int) -> None:
        """`threads` that torch computes with; it gives way to other processes as the thread that starts it does."""
        self._mesh, self._threads = mesh, threads
        self._bands = {name: made[mesh.rank] for name, made in bands.items() if mesh.rank < len(made)}
        self._group = dist.new_group(backend="gloo", timeout=FOR_EVER)
        self._memories: dict[int, State] = {0: None}
        self._thread = threading.Thread(target=self._run, name="decode", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:  # else rank 0 is gone, or will find out that this rank is
            self._thread.join()

    def _run(self) -> None:
        torch.set_num_threads(self._threads)
        try:
            with torch.inference_mode(), own_stream(self._mesh.device):
                while (told := tell(self._mesh, self._group, None, "latents")) != ENDED:
                    self._obey(_decode(told))
        except ExchangeFailed as error:
            logger.error("%s", error)

    def _obey(self, order: _Order) -> None:
        for number in order.forget:
            self._memories.pop(number, None)
        if order.model not in self._bands:
            return
        try:
            pictures = self._made(order)
        except Exception:  # a thread's main loop: that world fails, on rank 0, and the thread goes on
            logger.exception("a band could not be made")
            self._send(torch.tensor([FAILED]))
            return
        self._send(torch.tensor([len(pictures)]), pictures)

    def _made(self, order: _Order) -> Tensor:
        latents: Tensor = unpacked(order.latents)
        band = self._bands[order.model]
        pictures, self._memories[order.made] = band.decode(latents.to(self._mesh.device), self._memories[order.after])
        return pictures.cpu()

    def _send(self, *parts: Tensor) -> None:
        for data in map(as_bytes, parts):
            self._mesh.count("pictures", len(data))
            with named("pictures"):
                dist.send(data, 0, self._group)
