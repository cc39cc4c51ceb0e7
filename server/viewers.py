"""A session's viewers: let in, counted, watched for slowness, and let go."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator

from engine.protocol import Codec
from server.congestion import KEYFRAMES_ONLY_S, Rate
from server.encodings import Encodings
from server.metrics import Metrics
from server.peer import Peer
from server.problems import Problem
from server.sdp import choose_codec, clean_offer
from server.settings import IceSettings

log = logging.getLogger(__name__)


class Viewers:
    def __init__(
        self, encodings: Encodings, changed: Callable[[], None], *, ice: IceSettings, limit: int, metrics: Metrics
    ) -> None:
        self._encodings = encodings
        self._changed = changed
        self._ice = ice
        self._limit = limit
        self._metrics = metrics
        self._peers: dict[str, Peer] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._rates: dict[Codec, Rate] = {"h264": Rate(), "vp8": Rate()}
        self._joining = 0
        self._over = False

    def __len__(self) -> int:
        return len(self._peers)

    def __iter__(self) -> Iterator[Peer]:
        return iter(self._peers.values())

    async def join(self, offer: str) -> tuple[Peer, str]:
        """A new viewer and the answer to its offer; raises Problem."""
        codec = choose_codec(clean_offer(offer))
        if len(self._peers) + self._joining >= self._limit:
            raise Problem(503, "viewer-limit", f"this session has its {self._limit} viewers", retry_after_s=10)
        self._encodings.need(codec)
        peer = Peer(self._encodings.of(codec), self._ice)
        self._joining += 1
        try:
            answer = await peer.answer(offer)
        finally:
            self._joining -= 1
        self._peers[peer.id] = peer
        task = asyncio.create_task(self._live(peer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._changed()
        if self._over:
            peer.leave("the session is over")
        return peer, answer

    def get(self, id: str) -> Peer:
        if id not in self._peers:
            raise Problem(404, "peer-not-found", "there is no such viewer, or it has left")
        return self._peers[id]

    def leave(self, id: str) -> None:
        self.get(id).leave("left")
        self._forget(id)

    def balance(self) -> None:
        """About once a second: bitrate down for all when most suffer, keyframes only for the few that do."""
        now_s = asyncio.get_running_loop().time()
        for codec, rate in self._rates.items():
            peers = [peer for peer in self._peers.values() if peer.codec == codec and peer.state == "connected"]
            poor = [peer for peer in peers if peer.path.poor and not peer.keyframes_only]
            full = [peer for peer in peers if not peer.keyframes_only]
            sent_bps = max((peer.sent_bps for peer in full), default=0.0)
            wanted_bps = rate.next(len(poor), len(full), sent_bps, now_s)
            if wanted_bps is not None:
                self._encodings.want_bitrate(codec, wanted_bps)
            if len(poor) * 2 <= len(full):
                for peer in poor:
                    peer.path.restricted_until_s = now_s + KEYFRAMES_ONLY_S
                    peer.restrict(keyframes_only=True)
            for peer in peers:
                if peer.keyframes_only and now_s > peer.path.restricted_until_s:
                    peer.restrict(keyframes_only=False)

    def end(self) -> None:
        self._over = True
        for peer in self._peers.values():
            peer.leave("the session is over")

    async def close(self) -> None:
        self.end()
        await asyncio.gather(*self._tasks)

    async def _live(self, peer: Peer) -> None:
        self._metrics.viewers.inc()
        log.info("viewer %s… joined (%s)", peer.id[:6], peer.codec)
        try:
            await peer.run()
        except Exception:  # one viewer's trouble is nobody else's
            log.exception("viewer %s… failed", peer.id[:6])
        finally:
            self._metrics.viewers.dec()
            self._forget(peer.id)
            log.info("viewer %s… left: %s", peer.id[:6], peer.why_gone)

    def _forget(self, id: str) -> None:
        if self._peers.pop(id, None) is not None:
            self._changed()
