from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.protocol import Codec, Packet
from server.broadcast import Broadcast, BroadcastOver
from server.congestion import FLOOR_BPS, Path, Rate, Report
from server.history import History, HistoryGap
from server.messages import Viewers
from server.metrics import Metrics


def packet(n: int, *, keyframe: bool = False) -> Packet:
    return Packet("w.1", "h264", b"x", n * 4500, 4500, keyframe, n // 5, n * 50)


class Asked:
    def __init__(self) -> None:
        self.times = 0

    def __call__(self, codec: Codec) -> None:
        self.times += 1


async def taken(subscription: object, count: int) -> list[int]:
    return [(await subscription.get()).pts // 4500 for _ in range(count)]  # type: ignore[attr-defined]


async def test_a_subscriber_begins_at_a_keyframe_and_asks_for_one() -> None:
    asked = Asked()
    broadcast = Broadcast("h264", asked, Metrics())
    subscription = broadcast.subscribe("whep")
    assert asked.times == 1
    for n in range(3):
        broadcast.publish(packet(n))
    broadcast.publish(packet(3, keyframe=True))
    broadcast.publish(packet(4))
    assert await taken(subscription, 2) == [3, 4]
    assert subscription.dropped == 3


async def test_a_full_queue_waits_for_the_next_keyframe_and_harms_nobody_else() -> None:
    asked = Asked()
    broadcast = Broadcast("h264", asked, Metrics())
    slow, quick = broadcast.subscribe("whep", limit=4), broadcast.subscribe("rtmp", limit=100)
    broadcast.publish(packet(0, keyframe=True))
    for n in range(1, 8):
        broadcast.publish(packet(n))
    assert len(slow) == 0 and len(quick) == 8
    broadcast.publish(packet(8, keyframe=True))
    broadcast.publish(packet(9))
    assert await taken(slow, 2) == [8, 9]
    assert await taken(quick, 10) == list(range(10))
    broadcast.close()


async def test_wishes_for_keyframes_are_gathered() -> None:
    asked = Asked()
    broadcast = Broadcast("h264", asked, Metrics())
    for _ in range(50):
        broadcast.want_keyframe()
    assert asked.times == 1 and broadcast._later is not None
    repair_s = broadcast._later.when()
    broadcast.subscribe("whep")  # somebody who sees nothing yet comes first
    assert asked.times == 1 and broadcast._later is not None and broadcast._later.when() < repair_s
    broadcast.want_keyframe()
    await asyncio.sleep(0.4)
    assert asked.times == 2 and broadcast._later is None
    broadcast.want_keyframe()
    broadcast.publish(packet(1, keyframe=True))  # what was wished for has come
    assert broadcast._later is None
    broadcast.close()


async def test_keyframes_only_and_back() -> None:
    broadcast = Broadcast("h264", Asked(), Metrics())
    subscription = broadcast.subscribe("whep")
    subscription.restrict(keyframes_only=True)
    for n in range(6):
        broadcast.publish(packet(n, keyframe=n % 3 == 0))
    subscription.restrict(keyframes_only=False)
    for n in range(6, 12):
        broadcast.publish(packet(n, keyframe=n % 3 == 2))
    assert await taken(subscription, 6) == [0, 3, 8, 9, 10, 11]
    broadcast.close()


async def test_after_the_last_packet_comes_the_end() -> None:
    broadcast = Broadcast("h264", Asked(), Metrics())
    subscription = broadcast.subscribe("whep")
    broadcast.publish(packet(0, keyframe=True))
    broadcast.close()
    assert await taken(subscription, 1) == [0]
    for late in (subscription, broadcast.subscribe("whep")):
        with pytest.raises(BroadcastOver):
            await late.get()


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=60), st.integers(1, 8))
def test_what_is_delivered_can_always_be_decoded(script: list[tuple[bool, bool]], limit: int) -> None:
    """Whatever is lost, a picture is only delivered when all since its keyframe were."""

    async def run() -> list[int]:
        broadcast = Broadcast("h264", Asked(), Metrics())
        subscription = broadcast.subscribe("whep", limit)
        delivered: list[int] = []
        for n, (keyframe, takes) in enumerate(script):
            broadcast.publish(packet(n, keyframe=keyframe))
            if takes and len(subscription):
                delivered += await taken(subscription, 1)
            assert len(subscription) <= limit
        delivered += await taken(subscription, len(subscription))
        broadcast.close()
        return delivered

    previous: int | None = None
    for n in asyncio.run(run()):
        assert script[n][0] or previous == n - 1
        previous = n


async def test_history_is_followed_from_any_kept_number() -> None:
    history = History(kept=3)
    for n in range(5):
        history.append(Viewers(viewers=n))
    history.close()
    assert [text async for text in history.follow(3)] == [
        '{"type":"viewers","viewers":3,"seq":4}',
        '{"type":"viewers","viewers":4,"seq":5}',
    ]
    assert [history.covers(after) for after in range(7)] == [False, False, True, True, True, True, False]
    with pytest.raises(HistoryGap):
        await anext(history.follow(1))


async def test_a_follower_that_falls_behind_is_told() -> None:
    history = History(kept=3)
    history.append(Viewers(viewers=0))
    follower = history.follow(0)
    assert "0" in await anext(follower)
    for n in range(4):
        history.append(Viewers(viewers=n))
    with pytest.raises(HistoryGap):
        await anext(follower)


def test_loss_alone_or_a_low_estimate_alone_is_no_congestion() -> None:
    for report in (Report(0.2, 900_000, 500_000), Report(0.0, 100_000, 500_000), Report(0.2, None, 0)):
        path = Path()
        for _ in range(10):
            path.feed(report)
        assert not path.poor
    path = Path()
    for n in range(3):
        assert not path.poor, n
        path.feed(Report(0.2, 200_000, 500_000))
    assert path.poor
    path.feed(Report(0.0, 200_000, 500_000))
    assert not path.poor


def test_the_bitrate_goes_down_when_most_suffer_and_comes_back() -> None:
    rate = Rate()
    asked = [rate.next(1, 1, 800_000, t) for t in range(0, 30)]
    lowered = [bps for bps in asked if bps]
    assert lowered[:3] == [600_000, 450_000, 337_500] and min(lowered) == FLOOR_BPS
    raised = [bps for t in range(30, 200) if (bps := rate.next(0, 1, 100_000, t))]
    assert raised == sorted(raised) and raised[-1] == 800_000
    assert all(rate.next(0, 1, 800_000, t) is None for t in range(200, 220))


def test_one_slow_viewer_among_many_does_not_lower_the_bitrate() -> None:
    rate = Rate()
    assert all(rate.next(1, 2, 800_000, t) is None for t in range(30))
