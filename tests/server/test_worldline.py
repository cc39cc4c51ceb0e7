"""What a viewer was looking at is told in media time, also after stalls, pauses and the loss of a world."""

from __future__ import annotations

import pytest

from engine.protocol import CLOCK_HZ, Command, Packet, PromptChange, WorldSpec
from server.encodings import Encodings
from server.history import History
from server.metrics import Metrics
from server.worldline import Worldline

FPS = 20
TICKS = CLOCK_HZ // FPS


def worldline() -> Worldline:
    metrics, sent = Metrics(), list[Command]()
    return Worldline(WorldSpec("m", (PromptChange(0.0, "a"),)), History(), Encodings(sent.append, metrics), metrics)


def show(line: Worldline, pictures: range, stalled_ms: int = 0) -> None:
    """Pictures of the present world by number, each at its media time plus what the clock has been moved on."""
    for i in pictures:
        media_ms = 1000 * i // FPS
        pts = i * TICKS + stalled_ms * CLOCK_HZ // 1000
        line.on_packet(Packet("w", "h264", b"\0", pts, TICKS, i == 0, i // 4, media_ms))


@pytest.mark.parametrize("stalled_ms", [0, 4500])
async def test_what_was_shown_at_a_pts_is_told_in_media_time(stalled_ms: int) -> None:
    line = worldline()
    show(line, range(0, 40))
    show(line, range(40, 80), stalled_ms)
    assert line.media_ms_at(10 * TICKS) == 500
    assert line.media_ms_at(60 * TICKS + stalled_ms * 90) == 3000
    assert line.media_ms_at(10**9) == line.media_ms, "no later than what has left"


async def test_while_the_picture_stood_its_media_time_stood() -> None:
    line = worldline()
    show(line, range(0, 40))
    show(line, range(39, 40), stalled_ms=2000)  # a paused world shows its last picture to a newcomer
    assert line.media_ms_at(39 * TICKS + 2000 * 90) == 1950


async def test_a_time_that_nobody_can_have_seen_is_not_believed() -> None:
    line = worldline()
    assert line.media_ms_at(0) is None
    show(line, range(0, 40))
    assert line.world_ms(1000) == 1000
    assert line.world_ms(1951) is None, "the last picture is at 1950 ms"
    assert line.world_ms(None) is None


async def test_after_a_lost_world_the_present_one_begins_at_zero() -> None:
    line = worldline()
    show(line, range(0, 40))
    line.lost()
    line.reopen()
    show(line, range(0, 20))
    assert line.world_ms(500) == 0, "what was seen of the world before"
    assert line.world_ms(line.media_ms) == line.media_ms - 1950
