"""The push to a media server: connect, publish, send until told to stop; on trouble say why, wait, try again.

    connecting ──► live ──► retrying ──► live …          failed: not allowed, or nothing worked for ten minutes
                                                         stopped: we were asked to

Every connection begins at a keyframe with timestamps from 0. The stream key is in no log, no event and no reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import ssl
from collections.abc import Callable
from typing import Literal

import av

from server.broadcast import Broadcast, BroadcastOver, Subscription
from server.flv import FlvMuxer
from server.metrics import Metrics
from server.rtmp_wire import DATA, RtmpConnection, RtmpError
from server.schemas import OutputState, OutputView, now
from server.targets import AllowRule, Target, TargetDenied

log = logging.getLogger(__name__)

BACKOFF_S, BACKOFF_MAX_S = 1.0, 30.0
GIVE_UP_S = 600.0
HEALTHY_S = 10.0  # live for this long: the next trouble starts the back-off afresh
SET_DATA_FRAME = b"\x02\x00\x0d@setDataFrame"


class Picture:
    """Size and rate of what is pushed; known once the world is open."""

    def __init__(self) -> None:
        self.width, self.height, self.fps = 0, 0, 0.0


class RtmpPush:
    kind: Literal["rtmp"] = "rtmp"

    def __init__(
        self,
        id: str,
        target: Target,
        broadcast: Broadcast,
        picture: Picture,
        changed: Callable[[OutputView], None],
        *,
        audio: Literal["silent", "none"],
        rule: AllowRule,
        tls: ssl.SSLContext,
        metrics: Metrics,
    ) -> None:
        self._target = target
        self._broadcast = broadcast
        self._picture = picture
        self._changed = changed
        self._audio = audio
        self._rule = rule
        self._tls = tls
        self._metrics = metrics
        self._stopping = asyncio.Event()
        self._attempts = 0
        self._sent_bytes = 0
        self._dropped = 0
        self._since = now()
        self._live_s = float("-inf")
        self.id = id
        self.state: OutputState = "connecting"
        self.reason = ""

    @property
    def active(self) -> bool:
        return self.state not in ("failed", "stopped")

    def view(self) -> OutputView:
        return OutputView(
            id=self.id,
            kind=self.kind,
            state=self.state,
            reason=self.reason,
            since=self._since,
            packets_dropped=self._dropped,
            target=self._target.shown,
            audio=self._audio,
            attempts=self._attempts,
            bytes_sent=self._sent_bytes,
        )

    def stop(self) -> None:
        self._stopping.set()

    async def run(self) -> None:
        """Push until stopped, until the session is over, or until it is hopeless."""
        loop = asyncio.get_running_loop()
        backoff_s, working_s = BACKOFF_S, loop.time()
        try:
            while not self._stopping.is_set():
                began_s = loop.time()
                reason = await self._attempt()
                if reason is None or self._stopping.is_set():
                    break
                if began_s <= self._live_s:
                    working_s = loop.time()
                    self._metrics.rtmp_reconnects.inc()
                    if working_s - self._live_s > HEALTHY_S:
                        backoff_s = BACKOFF_S
                if self.state == "failed":
                    return
                if loop.time() - working_s > GIVE_UP_S:
                    self._enter("failed", f"given up after {GIVE_UP_S / 60:.0f} minutes: {reason}")
                    return
                self._enter("retrying", reason)
                await self._wait(backoff_s * random.uniform(0.75, 1.25))
                backoff_s = min(2 * backoff_s, BACKOFF_MAX_S)
        finally:
            if self.state != "failed":
                self._enter("stopped")

    async def _attempt(self) -> str | None:
        """One connection, to its end; the reason it ended, None when it was to end."""
        self._attempts += 1
        try:
            connection = await self._connect()
        except TargetDenied as error:
            self._enter("failed", str(error))
            return str(error)
        except (RtmpError, OSError, TimeoutError) as error:
            return self._told(error)
        try:
            await self._push(connection)
        except (RtmpError, OSError, TimeoutError, av.FFmpegError) as error:
            connection.abort()
            return self._told(error)
        await connection.close()
        return None

    async def _connect(self) -> RtmpConnection:
        error: Exception | None = None
        target = self._target
        for address in await self._rule.addresses(target):
            try:
                tls = self._tls if target.scheme == "rtmps" else None
                connection = await RtmpConnection.open(address, target.port, tls, target.host)
            except (RtmpError, OSError, TimeoutError) as failure:
                error = failure
                continue
            try:
                await connection.publish(target.app, target.tc_url, target.key)
            except BaseException:
                connection.abort()
                raise
            return connection
        raise error or OSError(f"{target.host} has no address")

    async def _push(self, connection: RtmpConnection) -> None:
        """Send and listen until one of them ends; returns when the session is over or we are asked to stop."""
        self._enter("live")
        self._live_s = asyncio.get_running_loop().time()
        subscription = self._broadcast.subscribe("rtmp")
        tasks = [
            asyncio.create_task(self._send(connection, subscription)),
            asyncio.create_task(connection.listen()),
            asyncio.create_task(self._stopped()),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            subscription.close()
            self._dropped += subscription.dropped
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _send(self, connection: RtmpConnection, subscription: Subscription) -> None:
        before = self._sent_bytes
        muxer: FlvMuxer | None = None
        try:
            while True:
                packet = await subscription.get()
                muxer = muxer or self._muxer()
                for tag in muxer.mux(packet):
                    payload = SET_DATA_FRAME + tag.payload if tag.kind == DATA else tag.payload
                    await connection.send(tag.kind, tag.timestamp_ms, payload)
                self._sent_bytes = before + connection.sent_bytes
        except BroadcastOver:
            return
        finally:
            if muxer is not None:
                muxer.close()

    def _muxer(self) -> FlvMuxer:
        picture = self._picture
        return FlvMuxer(picture.width, picture.height, picture.fps, silent_audio=self._audio == "silent")

    async def _stopped(self) -> None:
        await self._stopping.wait()

    async def _wait(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()

    def _enter(self, state: OutputState, reason: str = "") -> None:
        self.state, self.reason, self._since = state, reason, now()
        log.info("output %s to %s: %s%s", self.id, self._target.shown, state, f" ({reason})" if reason else "")
        self._changed(self.view())

    def _told(self, error: Exception) -> str:
        """The reason in words, without the key, whoever wrote them."""
        if isinstance(error, TimeoutError):
            text = "the server did not answer or stopped reading in time"
        elif isinstance(error, ssl.SSLCertVerificationError):
            text = f"the server's certificate is not trusted: {error.verify_message}"
        else:
            text = str(error) or type(error).__name__
        return self._target.hide(text)[:300]
