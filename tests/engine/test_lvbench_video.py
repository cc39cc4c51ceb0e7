import weakref
from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np
import pytest

from engine.lvbench.faults import FPS, clip, clip_frames, video_frame
from engine.lvbench.judge import Method, judge_frames, judge_video
from engine.lvbench.video import VideoFacts, VideoFrame, VideoUnusable, probe, read_frames
from tests.engine.lvbench_clips import noise, write_video


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_video(tmp_path_factory.mktemp("clip") / "whole.mp4", clip("none", 40))


def facts_of(frames: int) -> VideoFacts:
    return VideoFacts("clip", 256, 144, frames, frames / FPS, "none")


def test_a_file_is_judged_like_its_frames(whole: Path) -> None:
    method = Method(parts=4)
    from_file, from_frames = judge_video(whole, method), judge_frames(clip_frames("none", 40), facts_of(40), method)
    assert from_file.facts.frames == 40 and from_file.facts.duration_s == pytest.approx(2.5, abs=0.05)
    for name, curve in from_frames.scores.curves.items():
        np.testing.assert_allclose(from_file.scores.curves[name], curve, atol=0.05, err_msg=name)
    assert len(from_file.pictures) == 4


@pytest.mark.parametrize(("height", "width"), [(61, 97), (16, 16), (9, 33), (145, 31)])
def test_odd_and_small_sizes_are_judged(tmp_path: Path, height: int, width: int) -> None:
    path = write_video(tmp_path / "odd.mkv", noise(12, height, width), codec="ffv1")
    verdict = judge_video(path, Method(parts=3))
    assert (verdict.facts.height, verdict.facts.width) == (height, width)
    assert all(np.isfinite(curve).all() for curve in verdict.scores.curves.values())


def test_large_frames_are_read_small(tmp_path: Path) -> None:
    path = write_video(tmp_path / "large.mp4", noise(2, 720, 960))
    frame = next(read_frames(path))
    assert (
        frame.luma().shape == (480, 640)
        and frame.small.shape == (144, 192, 3)
        and frame.picture().shape == (480, 640, 3)
    )


def test_a_variable_frame_rate_keeps_its_times(tmp_path: Path) -> None:
    times_ms = [0, 40, 200, 230, 600, 610, 700, 1100, 1150, 1200]
    path = write_video(tmp_path / "vfr.mkv", noise(10, 48, 64), times_ms)
    assert [round(1000 * frame.time_s) for frame in read_frames(path)] == times_ms
    assert probe(path).frames == 10


def test_gaps_that_the_time_stamps_tell_are_no_stutter() -> None:
    rough = np.random.default_rng(3).integers(0, 255, (12, 60, 3), dtype=np.uint8)
    landscape = cv2.resize(rough, (600, 120), interpolation=cv2.INTER_CUBIC).astype(np.uint8)
    kept = [i for i in range(60) if i % 3 != 1]  # uneven, but stamped with the times they belong to

    def motion(told: bool) -> float:
        pan = (
            video_frame(index, (i if told else index) / FPS, landscape[:, 2 * i : 2 * i + 200])
            for index, i in enumerate(kept)
        )
        return float(judge_frames(pan, facts_of(len(kept)), Method(parts=2)).scores.curves["motion"].mean())

    assert motion(told=True) > 1.3 * motion(told=False)


def test_memory_does_not_grow_with_the_video() -> None:
    given: list[weakref.ref[VideoFrame]] = []
    most = 0

    def watched() -> Iterator[VideoFrame]:
        nonlocal most
        for index, picture in enumerate(noise(90, 32, 48)):
            frame = video_frame(index, index / FPS, picture)
            given.append(weakref.ref(frame))
            most = max(most, sum(ref() is not None for ref in given))
            yield frame

    judge_frames(watched(), facts_of(90), Method(parts=3))
    assert most <= 5


@pytest.mark.parametrize("frames", [1, 8])
def test_too_short_a_video_is_refused(tmp_path: Path, frames: int) -> None:
    path = write_video(tmp_path / "short.mp4", noise(frames, 32, 32))
    with pytest.raises(VideoUnusable, match=f"expected at least 9 frames for 3 parts, got {frames}"):
        judge_video(path, Method(parts=3))


def test_what_is_no_video_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "text.mp4"
    with pytest.raises(VideoUnusable, match="expected a video file, got nothing there"):
        probe(path)
    path.write_text("not a video")
    with pytest.raises(VideoUnusable, match="expected a video file, got: Invalid data"):
        probe(path)


def test_a_damaged_video_says_where(tmp_path: Path, whole: Path) -> None:
    data = whole.read_bytes()
    third = len(data) // 3
    damaged = tmp_path / "damaged.mp4"
    damaged.write_bytes(data[:third] + bytes(third) + data[2 * third :])
    with pytest.raises(VideoUnusable, match=r"expected an undamaged video, got .* after frame \d+"):
        judge_video(damaged, Method(parts=4))


def test_fewer_frames_than_the_packets_promise_is_refused() -> None:
    with pytest.raises(VideoUnusable, match="expected 60 frames as its packets say, got 12 decoded"):
        judge_frames(clip_frames("none", 12), facts_of(60), Method(parts=5))


def test_a_black_video_has_no_drift_and_says_so() -> None:
    black = (video_frame(i, i / FPS, np.zeros((48, 64, 3), np.uint8)) for i in range(12))
    verdict = judge_frames(black, facts_of(12), Method(parts=3))
    assert verdict.drifts["clarity"] is None and verdict.drifts["aesthetic"] is None
    assert any("quality of the first part" in note for note in verdict.notes)


def test_flow_that_goes_astray_in_a_flat_sky_is_no_subject() -> None:
    sky = np.linspace(90, 110, 96)[:, None, None] * np.ones((1, 160, 3))
    faint = np.random.default_rng(5).normal(0, 1.5, (12, 96, 160, 3))
    frames = (video_frame(i, i / FPS, np.clip(sky + faint[i], 0, 255).astype(np.uint8)) for i in range(12))
    verdict = judge_frames(frames, facts_of(12), Method(parts=3))
    assert any(note.startswith("no subject moved on its own") for note in verdict.notes)
