"""The engine as its server sees it: a process at the other end of a socket, with real blocks of a small model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from engine.journal import load
from engine.protocol import (
    ActionState,
    BlockDone,
    Close,
    Encode,
    Opened,
    Packet,
    Pause,
    Ping,
    Pong,
    Profile,
    PromptChange,
    Refused,
    Resume,
    SignalApplied,
    SignalRefused,
    Stats,
    Steer,
    WantBitrate,
    WantKeyframe,
    WantProfile,
    WorldChanged,
)
from tests.engine_process import EngineProcess

PERIOD_MS, PICTURE_MS, BLOCK = 500, 125, 4


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    folder = tmp_path_factory.mktemp("engine")
    (folder / "journals").mkdir()
    with EngineProcess(
        folder, "--journal-dir", str(folder / "journals"), "--max-worlds", "4", "--max-load", "16"
    ) as process:
        process.greeting()
        yield process


@pytest.fixture
def world(engine: EngineProcess, request: pytest.FixtureRequest) -> Iterator[str]:
    """A world named after its test, open and showing pictures."""
    name = request.node.name.split("[")[0]
    engine.open(name)
    engine.wait_for(Packet, lambda p: p.world == name)
    yield name
    engine.send(Close(name))
    engine.wait_for(WorldChanged, lambda e: e.world == name and e.state in ("ended", "failed"))


def decoded(packets: list[Packet]) -> list[av.VideoFrame]:
    decoder = av.CodecContext.create("h264" if packets[0].codec == "h264" else "vp8", "r")
    assert isinstance(decoder, av.VideoCodecContext)
    return [f for p in packets for f in decoder.decode(av.Packet(p.data))] + decoder.decode(None)


def test_it_greets_with_its_models_and_encoders(engine: EngineProcess) -> None:
    hello = engine.greeting()
    card = hello.models[0]
    assert (card.name, card.width, card.height, card.fps, card.frames_per_block) == ("toy", 24, 16, 8.0, BLOCK)
    assert hello.device == "cpu" and hello.encoders["vp8"] == "libvpx"
    assert engine.events[0][1] is hello


def test_a_world_is_opened_and_its_pictures_come_at_its_pace(engine: EngineProcess, world: str) -> None:
    opened = engine.wait_for(Opened, lambda e: e.world == world)
    assert (opened.id, opened.width, opened.height, opened.lead_ms) == (f"open-{world}", 24, 16, PERIOD_MS)
    engine.wait_for(Packet, lambda p: p.world == world and p.block == 3)
    packets = engine.of(Packet, lambda p: p.world == world)
    assert packets[0].keyframe and packets[0].pts == 0
    assert [p.media_ms for p in packets] == [PICTURE_MS * i for i in range(len(packets))]
    assert [p.block for p in packets] == [i // BLOCK for i in range(len(packets))]
    assert all(b.pts - a.pts >= 11250 for a, b in zip(packets, packets[1:], strict=False))
    frames = decoded(packets)
    assert len(frames) == len(packets)
    assert (frames[0].width, frames[0].height) == (24, 16)
    assert len({f.to_ndarray(format="gray").tobytes() for f in frames}) > 3, "the picture moves"
    states = [e.state for e in engine.of(WorldChanged, lambda e: e.world == world)]
    assert states == ["starting", "running"]
    blocks = engine.of(BlockDone, lambda e: e.world == world)
    assert [b.media_ms for b in blocks] == [PERIOD_MS * b.block for b in blocks]
    assert list(blocks[0].phases_ms) == ["denoise", "commit", "decode"], "in the order of the work, each counted once"
    assert all(ms > 0 for ms in blocks[0].phases_ms.values())


def test_no_block_is_made_further_ahead_than_the_lead(engine: EngineProcess, world: str) -> None:
    engine.wait_for(Packet, lambda p: p.world == world and p.block == 4)
    shown_ms = 0
    for _, event in engine.events:
        if isinstance(event, Packet) and event.world == world:
            shown_ms = event.media_ms
        if isinstance(event, BlockDone) and event.world == world and event.block > 1:
            assert event.media_ms - shown_ms <= PERIOD_MS + PICTURE_MS


def test_a_prompt_is_applied_to_a_block_within_two_periods(engine: EngineProcess, world: str) -> None:
    """Two periods from the picture shown when it came, and what reserve a busy machine has taught (half at most)."""
    for i in range(3):
        engine.wait_for(Packet, lambda p: p.world == world and p.block == 1 + 2 * i)  # noqa: B023
        engine.send(Steer(f"p{i}", world, prompt=PromptChange(0.0, f"prompt {i}")))
        applied = engine.wait_for(SignalApplied, lambda e: e.world == world and e.id == f"p{i}")  # noqa: B023
        assert applied.signal == "prompt" and applied.text == f"prompt {i}"
        assert applied.media_ms == PERIOD_MS * applied.block
        so_far = [e for _, e in engine.events[: [e for _, e in engine.events].index(applied)]]
        shown = [e for e in so_far if isinstance(e, Packet) and e.world == world][-1]
        assert applied.media_ms - shown.media_ms <= 2.5 * PERIOD_MS + PICTURE_MS
        first = engine.wait_for(Packet, lambda p: p.world == world and p.block == applied.block)  # noqa: B023
        assert first.media_ms == applied.media_ms


def test_actions_are_applied_and_wrong_signals_refused_with_a_reason(engine: EngineProcess, world: str) -> None:
    engine.send(
        Steer("a", world, action=ActionState(keys=("left",))),
        Steer("b", world, action=ActionState(keys=("fly",))),
        Steer("c", world, prompt=PromptChange(0.0, "  ")),
        Steer("d", "nobody", prompt=PromptChange(0.0, "x")),
    )
    assert engine.wait_for(SignalApplied, lambda e: e.id == "a" and e.world == world).signal == "action"
    for id, word in (("b", "'fly'"), ("c", "got none"), ("d", "'nobody'")):
        assert word in engine.wait_for(SignalRefused, lambda e: e.id == id).message  # noqa: B023


def test_prompts_of_the_schedule_are_reported_when_they_take_effect(engine: EngineProcess) -> None:
    prompts = (PromptChange(0.0, "dawn"), PromptChange(0.9, "noon"), PromptChange(9000.0, "dusk"))
    engine.open("scheduled", prompts=prompts)
    noon = engine.wait_for(SignalApplied, lambda e: e.world == "scheduled" and e.text == "noon")
    assert (noon.id, noon.block, noon.media_ms) == ("", 2, 1000)
    assert engine.wait_for(SignalApplied, lambda e: e.world == "scheduled").block == 0
    engine.send(Steer("live", "scheduled", prompt=PromptChange(0.0, "rain")))
    assert engine.wait_for(SignalApplied, lambda e: e.id == "live").text == "rain"
    engine.send(Close("scheduled"))
    engine.wait_for(WorldChanged, lambda e: e.world == "scheduled" and e.state == "ended")


def test_pause_holds_the_picture_and_resume_goes_on_with_the_next(engine: EngineProcess, world: str) -> None:
    engine.send(Pause(world))
    paused = engine.wait_for(WorldChanged, lambda e: e.world == world and e.state == "paused")
    engine.read_for(0.3)  # what was on its way
    before = engine.of(Packet, lambda p: p.world == world)
    engine.read_for(1.0)
    assert engine.of(Packet, lambda p: p.world == world) == before
    assert before[-1].media_ms - paused.media_ms <= PICTURE_MS
    mark = len(engine.events)
    engine.send(Resume(world))
    assert engine.wait_for(WorldChanged, lambda e: e.world == world, after=mark).state == "running"
    after = engine.wait_for(Packet, lambda p: p.world == world, after=mark)
    assert after.media_ms == before[-1].media_ms + PICTURE_MS
    assert after.pts - before[-1].pts > 90_000


def test_a_wanted_keyframe_is_the_next_picture(engine: EngineProcess, world: str) -> None:
    engine.wait_for(Packet, lambda p: p.world == world and p.block == 1)
    mark = len(engine.events)
    engine.send(WantKeyframe(world, "h264"), Ping(99))
    key = engine.wait_for(Packet, lambda p: p.world == world and p.keyframe, after=mark)
    pong = engine.wait_for(Pong, lambda e: e.n == 99)
    taken = [e for _, e in engine.events].index(pong)
    between = [e for _, e in engine.events[taken:] if isinstance(e, Packet) and e.world == world and e.pts < key.pts]
    assert len(between) <= 1, "one may have been in the encoder"
    assert decoded([key])


def test_a_paused_world_still_answers_who_needs_a_keyframe(engine: EngineProcess, world: str) -> None:
    engine.send(Pause(world))
    engine.wait_for(WorldChanged, lambda e: e.world == world and e.state == "paused")
    engine.read_for(0.6)
    mark = len(engine.events)
    engine.send(WantKeyframe(world, "h264"))
    again = engine.wait_for(Packet, lambda p: p.world == world, after=mark)
    assert again.keyframe and decoded([again])


def test_vp8_runs_beside_h264_only_while_it_is_wanted(engine: EngineProcess, world: str) -> None:
    engine.send(Encode(world, "vp8"), WantBitrate(world, "h264", 100_000))
    engine.wait_for(Packet, lambda p: p.world == world and p.codec == "vp8")
    mark = len(engine.events)
    engine.wait_for(Packet, lambda p: p.world == world and p.codec == "vp8", after=mark)
    vp8 = engine.of(Packet, lambda p: p.world == world and p.codec == "vp8")
    assert vp8[0].keyframe and len(decoded(vp8)) == len(vp8)
    engine.send(Encode(world, "vp8", on=False))
    engine.read_for(0.4)
    mark = len(engine.events)
    engine.read_for(0.5)
    codecs = {e.codec for _, e in engine.events[mark:] if isinstance(e, Packet) and e.world == world}
    assert codecs == {"h264"}


def test_two_worlds_run_side_by_side(engine: EngineProcess, world: str) -> None:
    engine.open("second", prompt="b", seed=9)
    engine.wait_for(Packet, lambda p: p.world == "second" and p.block == 3)
    engine.wait_for(Packet, lambda p: p.world == world and p.block == 3)
    for name in (world, "second"):
        packets = engine.of(Packet, lambda p: p.world == name)  # noqa: B023
        assert [p.media_ms for p in packets] == [PICTURE_MS * i for i in range(len(packets))]
    engine.send(Close("second", "enough"))
    ended = engine.wait_for(WorldChanged, lambda e: e.world == "second" and e.state == "ended")
    assert ended.reason == "enough" and ended.media_ms >= 3 * PERIOD_MS


@pytest.mark.parametrize("fault", ["break the model", "break the decoder", "break the encoding"])
def test_a_world_that_fails_ends_alone_and_says_why(engine: EngineProcess, world: str, fault: str) -> None:
    victim = fault.replace(" ", "_")
    engine.open(victim)
    engine.wait_for(Packet, lambda p: p.world == victim)
    engine.send(Steer("s", victim, prompt=PromptChange(0.0, fault)))
    failed = engine.wait_for(WorldChanged, lambda e: e.world == victim and e.state == "failed")
    assert "is broken" in failed.reason
    mark = len(engine.events)
    engine.wait_for(Packet, lambda p: p.world == world, after=mark)
    engine.open(victim)
    engine.wait_for(Packet, lambda p: p.world == victim, after=mark)  # its name is free again
    engine.send(Close(victim))
    engine.wait_for(WorldChanged, lambda e: e.world == victim and e.state == "ended")


def test_pings_are_answered_and_a_world_closed_in_the_middle_of_a_slow_block(engine: EngineProcess) -> None:
    """A block of this world takes at least a second and a half; answers come between its steps."""
    engine.open("slow", prompt="slow")
    engine.wait_for(Opened, lambda e: e.world == "slow")
    order = []
    for n in range(3):
        engine.send(Ping(n))
        engine.wait_for(Pong, lambda e: e.n == n)  # noqa: B023
        order.append(len(engine.of(BlockDone, lambda e: e.world == "slow")))
    assert order[0] == order[1] == 0, "two pongs came before the first block was done"
    engine.send(Close("slow"))
    engine.wait_for(WorldChanged, lambda e: e.world == "slow" and e.state == "ended")


@pytest.mark.parametrize(
    ("name", "spec", "words"),
    [
        ("x1", {"model": "other"}, ["model", "toy", "'other'"]),
        ("x2", {"width": 640}, ["width", "24", "640"]),
        ("x8", {"lead_ms": -1}, ["lead_ms", "0 to 30000", "-1"]),
        ("x3", {"steps": 0}, ["steps", "1 to 1000"]),
        ("x4", {"kv": "window=1"}, ["window=1", "at least 2"]),
        ("x5", {"kv": "magic"}, ["'magic'"]),
        ("x9", {"kv": "full"}, ["expected window=N", "no end", "full"]),
        ("x10", {"kv": "window=4 topk=1 offload=host"}, ["expected remember=N beside topk=1"]),
        ("x11", {"kv": "window=4 topk=1 remember=90000000 offload=host"}, ["host budget", "at most"]),
        ("x6", {"prompts": ()}, ["prompts", "got none"]),
        ("x7", {"prompts": (PromptChange(0.0, "x" * 5000),)}, ["2000", "5000"]),
        ("../x8", {}, ["world", "letters"]),
    ],
)
def test_a_world_that_cannot_be_is_refused_with_expected_and_got(
    engine: EngineProcess, name: str, spec: dict[str, Any], words: list[str]
) -> None:
    engine.open(name, **spec)
    refused = engine.wait_for(Refused, lambda e: e.id == f"open-{name}")
    assert all(word in refused.message for word in words) and not refused.busy


def test_a_world_can_begin_with_a_picture(engine: EngineProcess, tmp_path: Path) -> None:
    red = np.zeros((40, 60, 3), np.uint8)
    red[..., 0] = 220
    with av.open(str(tmp_path / "red.png"), "w", format="image2") as out:
        stream = out.add_stream("png")
        stream.width, stream.height, stream.pix_fmt = 60, 40, "rgb24"
        out.mux(stream.encode(av.VideoFrame.from_ndarray(red, format="rgb24")) + stream.encode())
    engine.open("red", start_picture=str(tmp_path / "red.png"))
    engine.wait_for(Packet, lambda p: p.world == "red" and p.block == 2)
    packets = engine.of(Packet, lambda p: p.world == "red")
    assert [p.block for p in packets] == [i // BLOCK for i in range(len(packets))]
    first = decoded(packets)[BLOCK - 1].to_ndarray(format="rgb24").reshape(-1, 3).mean(0)
    assert first[0] > 150 and first[1:].max() < 90
    engine.send(Close("red"))
    engine.open("none", start_picture="http://example.com/x.png")
    assert "expected a file" in engine.wait_for(Refused, lambda e: e.world == "none").message
    (tmp_path / "text").write_text("no picture")
    engine.open("text", start_picture=str(tmp_path / "text"))
    assert "cannot be read" in engine.wait_for(Refused, lambda e: e.world == "text").message


def test_a_world_too_many_is_refused_as_busy(engine: EngineProcess) -> None:
    names = [f"crowd{i}" for i in range(5)]
    for name in names:
        engine.open(name)
    refused = engine.wait_for(Refused, lambda e: e.world == "crowd4")
    assert refused.busy and refused.retry_after_s > 0 and "4 places" in refused.message
    engine.send(*map(Close, names[:4]))
    engine.wait_for(WorldChanged, lambda e: e.world == "crowd3" and e.state == "ended")


def test_stats_and_profile_tell_of_the_world(engine: EngineProcess, world: str) -> None:
    stats = engine.wait_for(Stats, lambda e: e.world == world and e.block >= 1)
    assert stats.kv_bytes["device"] > 0 and stats.real_time_factor > 0 and stats.bitrate > 0
    assert {"rss_bytes", "lead_ms", "release_late_ms"} <= set(stats.metrics)
    engine.send(WantProfile("q", world, blocks=2), WantProfile("t", world, blocks=2, trace=True))
    shot = json.loads(engine.wait_for(Profile, lambda e: e.id == "q").body)
    assert len(shot["blocks"]) == 2
    assert {"denoise", "step", "clean pass"} <= set(shot["blocks"][0]["phases_ms"])
    assert {s["thread"] for s in shot["blocks"][0]["spans"]} >= {"MainThread"}
    trace = json.loads(engine.wait_for(Profile, lambda e: e.id == "t").body)
    assert {"denoise", "decode"} <= {e["name"] for e in trace["traceEvents"]}
    engine.send(WantProfile("n", "nobody"))
    assert "'nobody'" in engine.wait_for(Refused, lambda e: e.id == "n").message


def test_the_journal_holds_what_happened(engine: EngineProcess, world: str) -> None:
    engine.send(Steer("j", world, prompt=PromptChange(0.0, "noted")))
    applied = engine.wait_for(SignalApplied, lambda e: e.id == "j" and e.world == world)
    journal = load(engine.log.parent / "journals" / f"{world}.jsonl")
    assert journal.opening.spec.model == "toy" and journal.opening.digest == "toy"
    assert [(c.id, c.block) for c in journal.changes] == [("j", applied.block)]
