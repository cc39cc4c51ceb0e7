"""Pictures are released at their media time, late blocks move the clock on, and encodings follow between pictures.

Time is handed in, so these tests do not depend on how busy the machine is.
"""

from __future__ import annotations

import numpy as np
import pytest

from engine.clock import MediaClock, Reserve
from engine.encoder import Picture
from engine.playout import Playout
from engine.protocol import Codec, Event, Packet, WorldChanged
from engine.screen import Pictures

WIDTH, HEIGHT, FPS, BLOCK = 64, 48, 16.0, 8
PERIOD_S = BLOCK / FPS
ENCODERS: dict[Codec, str] = {"h264": "libx264", "vp8": "libvpx"}


def pictures(block: int, early_s: float = 0.0) -> Pictures:
    rng = np.random.default_rng(block)
    shown: list[Picture] = [rng.integers(0, 255, (HEIGHT, WIDTH, 3), dtype=np.uint8) for _ in range(BLOCK)]
    return Pictures(block, block * PERIOD_S, shown, early_s)


class Stage:
    """A playout without its thread, at a time that the test sets."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.sent: list[tuple[float, Event]] = []
        self.full = False
        self.playout = Playout(self._send, ENCODERS, now=lambda: self.now_s)
        self.playout.open("w", (WIDTH, HEIGHT), FPS, PERIOD_S)

    def run(self, seconds: float, step_s: float = 1 / 256) -> None:
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.playout.turn(self.now_s)
            self.now_s += step_s

    def add(self, block: int) -> float:
        return self.playout.add("w", pictures(block))

    def packets(self, codec: Codec = "h264") -> list[tuple[float, Packet]]:
        return [(t, e) for t, e in self.sent if isinstance(e, Packet) and e.codec == codec]

    def _send(self, event: Event) -> bool:
        if self.full:
            return False
        self.sent.append((self.now_s, event))
        return True


def test_pictures_are_paced_at_the_rate_of_the_world() -> None:
    stage = Stage()
    stage.add(0)
    stage.run(0.25)
    stage.add(1)
    stage.run(2 * PERIOD_S)
    times = [t - 100.0 for t, _ in stage.packets()]
    assert times == [i / FPS for i in range(2 * BLOCK)]
    packets = [p for _, p in stage.packets()]
    assert [p.pts for p in packets] == [i * 5625 for i in range(2 * BLOCK)]
    assert [p.media_ms for p in packets] == [round(1000 * i / FPS) for i in range(2 * BLOCK)]
    assert [p.block for p in packets] == [0] * BLOCK + [1] * BLOCK
    assert packets[0].keyframe and packets[0].duration == 5625


def test_the_first_picture_makes_the_world_running() -> None:
    stage = Stage()
    stage.run(1.0)
    assert not stage.sent
    stage.add(0)
    stage.run(0.1)
    assert stage.sent[0][1] == WorldChanged("w", "running")


def test_a_stall_moves_the_clock_on_and_is_not_made_up_by_a_burst() -> None:
    stage = Stage()
    stage.add(0)
    stage.run(PERIOD_S + 0.25)
    assert stage.add(1) == pytest.approx(-0.25)
    stage.run(0.25)
    stage.add(2)
    stage.run(1.5 * PERIOD_S)
    times = [t for t, _ in stage.packets()]
    gaps = [round(b - a, 4) for a, b in zip(times, times[1:], strict=False)]
    assert len(times) >= 2 * BLOCK + 4
    assert gaps[BLOCK - 1] == pytest.approx(1 / FPS + 0.25, abs=0.005)
    assert all(g == pytest.approx(1 / FPS, abs=0.005) for i, g in enumerate(gaps) if i != BLOCK - 1)
    first_late = stage.packets()[BLOCK][1]
    assert first_late.pts == pytest.approx(BLOCK * 5625 + 0.25 * 90_000, abs=400), "pts runs with the wall clock"
    assert first_late.media_ms == 500, "media time does not"
    figures = stage.playout.figures("w")
    assert figures is not None
    assert figures.late_blocks == 1 and figures.stretched_ms == pytest.approx(250, abs=5)


def test_a_process_that_was_stopped_does_not_burst_when_it_wakes() -> None:
    stage = Stage()
    stage.add(0)
    stage.run(0.2)
    before = len(stage.packets())
    stage.now_s += 30.0
    stage.run(0.2)
    assert len(stage.packets()) - before <= 4


def test_a_pause_holds_the_picture_and_resuming_skips_nothing() -> None:
    stage = Stage()
    stage.add(0)
    stage.run(0.2)
    stage.playout.pause("w")
    shown = len(stage.packets())
    stage.run(5.0)
    assert len(stage.packets()) == shown
    stage.playout.resume("w")
    stage.run(PERIOD_S)
    packets = [p for _, p in stage.packets()]
    assert [p.media_ms for p in packets] == [round(1000 * i / FPS) for i in range(BLOCK)]
    assert all(a.pts < b.pts for a, b in zip(packets, packets[1:], strict=False))
    assert packets[shown].pts - packets[shown - 1].pts > 4.9 * 90_000
    figures = stage.playout.figures("w")
    assert figures is not None and figures.stretched_ms == 0, "a pause is no stall"


def test_a_keyframe_that_is_wanted_comes_with_the_next_picture_but_not_in_floods() -> None:
    stage = Stage()
    stage.add(0)
    stage.add(1)
    stage.run(0.3)
    for _ in range(20):
        stage.playout.keyframe("w", "h264")
    stage.run(0.02)
    keys = [i for i, (_, p) in enumerate(stage.packets()) if p.keyframe]
    assert keys == [0, 5]
    for _ in range(100):
        stage.playout.keyframe("w", "h264")
        stage.run(0.005)
    later = [t for t, p in stage.packets() if p.keyframe]
    assert len(later) <= 5
    assert all(b - a >= 0.25 for a, b in zip(later, later[1:], strict=False))


def test_who_joins_a_paused_world_gets_its_last_picture() -> None:
    stage = Stage()
    stage.add(0)
    stage.run(0.3)
    stage.playout.pause("w")
    stage.run(10.0)
    stage.playout.keyframe("w", "h264")
    stage.run(1.0)
    _, last = stage.packets()[-1]
    assert last.keyframe and last.media_ms == stage.packets()[-2][1].media_ms
    assert last.pts == pytest.approx(10.3 * 90_000, abs=1000)
    count = len(stage.packets())
    stage.playout.resume("w")
    stage.run(PERIOD_S)
    packets = [p for _, p in stage.packets()]
    assert packets[count].media_ms > last.media_ms and packets[count].pts > last.pts


def test_a_second_encoding_starts_and_ends_on_demand() -> None:
    stage = Stage()
    stage.add(0)
    stage.run(0.2)
    stage.playout.encode("w", "vp8", on=True)
    stage.run(0.2)
    stage.playout.encode("w", "vp8", on=False)
    stage.run(0.1)
    both = stage.packets("vp8")
    assert 2 <= len(both) <= 4 and both[0][1].keyframe
    assert {p.pts for _, p in both} < {p.pts for _, p in stage.packets("h264")}


def test_a_packet_that_found_no_room_is_soon_followed_by_a_keyframe() -> None:
    stage = Stage()
    stage.add(0)
    stage.add(1)
    stage.run(0.3)
    stage.full = True
    stage.run(0.1)
    stage.full = False
    seen = len(stage.packets())
    stage.run(0.3)
    assert any(p.keyframe for _, p in stage.packets()[seen:])


def test_a_new_bitrate_is_taken_between_pictures() -> None:
    stage = Stage()
    stage.add(0)
    stage.add(1)
    stage.run(0.3)
    stage.playout.bitrate("w", "h264", 60_000)
    stage.run(0.6)
    sizes = [len(p.data) for _, p in stage.packets()]
    assert len(sizes) > BLOCK + 4
    assert sum(sizes[-4:]) < sum(sizes[1:5])


def test_rates_that_change_all_the_time_do_not_make_keyframes_all_the_time() -> None:
    stage = Stage()
    for block in range(5):
        stage.add(block)
    for i in range(40):
        stage.playout.bitrate("w", "h264", 100_000 if i % 2 else 900_000)
        stage.run(1 / FPS)
    keys = [t for t, p in stage.packets() if p.keyframe]
    assert 2 <= len(keys) <= 4
    assert all(b - a >= 1.0 for a, b in zip(keys[1:], keys[2:], strict=False))


def test_a_failing_encoder_is_reported_and_hurts_no_other_world() -> None:
    stage = Stage()
    stage.playout.open("odd", (WIDTH - 1, HEIGHT), FPS, PERIOD_S)
    stage.playout.add("odd", pictures(0))
    stage.add(0)
    stage.run(0.1)
    world, reason = stage.playout.failures.popleft()
    assert world == "odd" and "63x48" in reason
    assert len(stage.packets()) == 2


def test_a_hardware_encoder_that_dies_is_replaced_by_software() -> None:
    stage = Stage()
    stage.playout = Playout(stage._send, {"h264": "h264_v4l2m2m"}, now=lambda: stage.now_s)
    stage.playout.open("w", (WIDTH, HEIGHT), FPS, PERIOD_S)
    stage.add(0)
    stage.run(0.3)
    assert stage.packets()[0][1].keyframe
    assert not stage.playout.failures


def test_a_world_that_is_gone_swallows_its_blocks() -> None:
    stage = Stage()
    stage.add(0)
    stage.run(0.3)
    assert stage.playout.remove("w") == 250
    count = len(stage.sent)
    assert stage.add(1) == 0.0
    stage.run(0.5)
    assert len(stage.sent) == count


def test_the_reserve_is_about_the_99th_percentile_of_lateness_and_bounded() -> None:
    reserve = Reserve(most_s=0.5)
    reserve.note(3.0)
    assert reserve.seconds == 0.0, "one stall is no habit"
    for _ in range(20):
        reserve.note(-0.2)
    assert reserve.seconds == 0.0
    reserve.note(0.1)
    assert reserve.seconds == pytest.approx(0.1)
    for _ in range(200):
        reserve.note(-0.2)
    assert reserve.seconds == 0.0, "what is long past is forgotten"
    for _ in range(200):
        reserve.note(2.0)
    assert reserve.seconds == 0.5


def test_a_reserve_that_works_is_kept() -> None:
    """A block that came in time only because it began early counts as late as it would have been."""
    stage = Stage()
    stage.add(0)
    for block in range(1, 6):
        due_s = stage.playout.due_s("w", block * PERIOD_S)
        assert due_s is not None
        stage.run(due_s - 0.05 - stage.now_s)
        stage.playout.add("w", pictures(block, early_s=0.15))
    figures = stage.playout.figures("w")
    assert figures is not None and figures.late_blocks == 0
    assert figures.reserve_ms == pytest.approx(100, abs=5)


def test_a_clock_paused_before_its_start_begins_where_it_is_resumed() -> None:
    clock = MediaClock()
    clock.pause(1.0)
    clock.start(5.0)
    assert clock.due_s(0.0, 7.0) == 7.0
    clock.resume(9.0)
    assert clock.due_s(0.5, 10.0) == 9.5


def test_pictures_that_nobody_could_ever_show_are_refused() -> None:
    stage = Stage()
    for block in range(int(60 / PERIOD_S)):
        stage.add(block)
    with pytest.raises(OverflowError, match="60 s of pictures waiting in w"):
        stage.add(999)
