"""One encoding of one session → N bounded queues, one per output; a slow one costs only itself.

    publish(packet) ──► Subscription (peer)        full: everything in it goes, and it waits for the next keyframe
                    ├─► Subscription (rtmp)
                    └─► Subscription (recording)

Every subscriber starts at a keyframe. Wishes for one are debounced: a keyframe is ten times a normal packet and goes to
everybody. Knows nothing of what the subscribers do with a packet.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable
from typing import Literal

from engine.protocol import Codec, Packet
from server.metrics import Metrics

Kind = Literal["whep", "rtmp", "recording"]
JOIN_GAP_S, REPAIR_GAP_S = 0.25, 1.0  # between keyframes for newcomers, and for those that lost one
QUEUED_PACKETS = 64


class BroadcastOver(Exception):
    """No more packets will come."""


class Subscription:
    """One output's bounded queue. Owned by `Broadcast`; read by one task."""

    def __init__(self, broadcast: Broadcast, kind: Kind, limit: int) -> None:
        self._broadcast = broadcast
        self._limit = limit
        self._queue: collections.deque[Packet] = collections.deque()
        self._news = asyncio.Event()
        self._over = False
        self._waits_for_keyframe = True
        self.kind: Kind = kind
        self.keyframes_only = False
        self.sent = 0
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._queue)

    async def get(self) -> Packet:
        """The next packet; raises BroadcastOver after the last."""
        while not self._queue:
            if self._over:
                raise BroadcastOver
            self._news.clear()
            await self._news.wait()
        self.sent += 1
        self._broadcast.metrics.packets_sent.labels(self.kind).inc()
        return self._queue.popleft()

    def want_keyframe(self) -> None:
        self._broadcast.want_keyframe()

    def restrict(self, *, keyframes_only: bool) -> None:
        """For one viewer too slow for the rest; going back to all packets starts at a keyframe again."""
        if self.keyframes_only and not keyframes_only:
            self._waits_for_keyframe = True
            self._broadcast.want_keyframe()
        self.keyframes_only = keyframes_only

    def close(self) -> None:
        self._broadcast.drop(self)

    def offer(self, packet: Packet) -> None:
        if packet.keyframe:
            self._waits_for_keyframe = False
        elif self._waits_for_keyframe or self.keyframes_only:
            self._lose(1)
            return
        if len(self._queue) >= self._limit:
            self._overflow(packet)
            return
        self._queue.append(packet)
        self._news.set()

    def end(self) -> None:
        self._over = True
        self._news.set()

    def _overflow(self, packet: Packet) -> None:
        self._lose(len(self._queue))
        self._queue.clear()
        if packet.keyframe:
            self._queue.append(packet)
            self._news.set()
            return
        self._lose(1)
        self._waits_for_keyframe = True
        self._broadcast.want_keyframe()

    def _lose(self, count: int) -> None:
        self.dropped += count
        self._broadcast.metrics.packets_dropped.labels(self.kind).inc(count)


class Broadcast:
    def __init__(self, codec: Codec, ask_for_keyframe: Callable[[Codec], None], metrics: Metrics) -> None:
        self.codec: Codec = codec
        self.metrics = metrics
        self._ask = ask_for_keyframe
        self._subscriptions: list[Subscription] = []
        self._asked_at_s = float("-inf")
        self._later: asyncio.TimerHandle | None = None
        self._over = False

    def __len__(self) -> int:
        return len(self._subscriptions)

    @property
    def queued(self) -> int:
        return sum(len(subscription) for subscription in self._subscriptions)

    def subscribe(self, kind: Kind, limit: int = QUEUED_PACKETS) -> Subscription:
        """A new queue; a keyframe for it is asked for at once."""
        subscription = Subscription(self, kind, limit)
        if self._over:
            subscription.end()
            return subscription
        self._subscriptions.append(subscription)
        self.want_keyframe(JOIN_GAP_S)
        return subscription

    def drop(self, subscription: Subscription) -> None:
        if subscription in self._subscriptions:
            self._subscriptions.remove(subscription)
        subscription.end()

    def publish(self, packet: Packet) -> None:
        if packet.keyframe:
            self._cancel_later()
        for subscription in self._subscriptions:
            subscription.offer(packet)

    def want_keyframe(self, gap_s: float = REPAIR_GAP_S) -> None:
        """Ask now, or as soon as the last wish is so old."""
        loop = asyncio.get_running_loop()
        due_s = self._asked_at_s + gap_s
        if self._over or (self._later is not None and self._later.when() <= due_s):
            return
        self._cancel_later()
        if due_s <= loop.time():
            self._ask_now()
        else:
            self._later = loop.call_at(due_s, self._ask_now)

    def close(self) -> None:
        self._over = True
        self._cancel_later()
        for subscription in self._subscriptions:
            subscription.end()
        self._subscriptions.clear()

    def _ask_now(self) -> None:
        self._later = None
        self._asked_at_s = asyncio.get_running_loop().time()
        self.metrics.keyframe_requests.inc()
        self._ask(self.codec)

    def _cancel_later(self) -> None:
        if self._later is not None:
            self._later.cancel()
            self._later = None
