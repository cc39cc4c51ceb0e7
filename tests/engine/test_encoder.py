"""What comes out of an encoder can be joined at any keyframe, keeps its timestamps and follows what is asked of it."""

from __future__ import annotations

import av
import numpy as np
import pytest
from av.video.frame import PictureType

from engine.decoder import Pictures
from engine.encoder import Encoded, EncoderError, Picture, VideoEncoder, choose_encoder, default_bitrate, probe
from engine.models.presets import LoadOptions, find, load
from engine.protocol import ActionState, Codec, PromptChange
from engine.rollout import Request, Rollout

WIDTH, HEIGHT, FPS, TICKS = 128, 80, 16.0, 5625


def picture(i: int) -> Picture:
    """A texture that moves, so that rate control has something to do."""
    y, x = np.mgrid[0:HEIGHT, 0:WIDTH]
    value = 127 + 60 * np.sin((x + 3 * i) / 5.0) + 60 * np.sin((x * y + 40 * i) / 97.0)
    return np.repeat(value.astype(np.uint8)[:, :, None], 3, axis=2)


def encode(encoder: VideoEncoder, count: int, first: int = 0) -> list[Encoded]:
    packets = [encoder.encode(picture(i), i * TICKS) for i in range(first, first + count)]
    assert all(len(p) == 1 for p in packets), "no encoder here may hold a picture back"
    return [p[0] for p in packets]


def decode(codec: str, packets: list[Encoded]) -> list[av.VideoFrame]:
    decoder = av.CodecContext.create(codec, "r")
    assert isinstance(decoder, av.VideoCodecContext)
    return [f for p in packets for f in decoder.decode(av.Packet(p.data))] + decoder.decode(None)


def nal_types(data: bytes) -> list[int]:
    return [part[0] & 31 for part in data.replace(b"\0\0\0\1", b"\0\0\1").split(b"\0\0\1")[1:]]


@pytest.mark.parametrize(("codec", "name"), [("h264", "libx264"), ("vp8", "libvpx")])
def test_a_stream_can_be_joined_at_a_keyframe_that_was_asked_for(codec: Codec, name: str) -> None:
    encoder = VideoEncoder(name, WIDTH, HEIGHT, FPS, default_bitrate(WIDTH, HEIGHT, FPS))
    before = encode(encoder, 5)
    asked = encoder.encode(picture(5), 5 * TICKS, keyframe=True)
    after = encode(encoder, 4, first=6)
    assert [p.keyframe for p in before + asked + after] == [True, *[False] * 4, True, *[False] * 4]
    frames = decode(codec, asked + after)
    assert len(frames) == 5
    shown = frames[-1].to_ndarray(format="rgb24").astype(int)
    assert np.abs(shown - picture(9)).mean() < 12


@pytest.fixture(scope="module")
def storm() -> Pictures:
    """Four seconds of the shipped world, with rain in the last half: hard to encode."""
    prompts = (PromptChange(0, "the beach by day, sailboat"), PromptChange(2.0, "a thunderstorm", "auto"))
    preset = find("tiny-world")
    request = Request(preset.name, prompts, 4.0, actions=((0.5, ActionState(keys=("right",))),))
    with Rollout(request, load(preset.name, LoadOptions()), preset) as rollout:
        return np.concatenate([part.pictures for part in rollout])


@pytest.mark.parametrize(("codec", "name"), [("h264", "libx264"), ("vp8", "libvpx")])
def test_encoding_loses_less_than_the_shipped_world_does(storm: Pictures, codec: Codec, name: str) -> None:
    height, width = storm.shape[1:3]
    encoder = VideoEncoder(name, width, height, FPS, default_bitrate(width, height, FPS))
    packets = [packet for i, picture in enumerate(storm) for packet in encoder.encode(picture, i * TICKS)]
    shown = np.stack([frame.to_ndarray(format="rgb24") for frame in decode(codec, packets)])
    assert shown.shape == storm.shape
    error = np.square(shown.astype(float) - storm).mean() / 255**2
    assert -10 * np.log10(error) > 34, "the model's own error is at 33 dB"


def test_h264_repeats_its_headers_and_is_constrained_baseline_in_one_slice() -> None:
    encoder = VideoEncoder("libx264", WIDTH, HEIGHT, FPS, 300_000)
    packets = encode(encoder, 3) + encoder.encode(picture(3), 3 * TICKS, keyframe=True)
    for packet in packets:
        types = [t for t in nal_types(packet.data) if t != 6]
        assert types == ([7, 8, 5] if packet.keyframe else [1])
    sps = packets[0].data.split(b"\0\0\1")[1]
    assert sps[1] == 66 and sps[2] & 0x40, "profile 66 with constraint_set1: constrained baseline"
    assert [p.pts for p in packets] == [0, TICKS, 2 * TICKS, 3 * TICKS]
    assert all(f.pict_type != PictureType.B for f in decode("h264", packets))


def test_colours_survive() -> None:
    encoder = VideoEncoder("libx264", WIDTH, HEIGHT, FPS, 2_000_000)
    wanted = np.array([200, 60, 30])
    flat = np.broadcast_to(wanted.astype(np.uint8), (HEIGHT, WIDTH, 3)).copy()
    frame = decode("h264", encoder.encode(flat, 0))[0]
    assert np.abs(frame.to_ndarray(format="rgb24").reshape(-1, 3).mean(0) - wanted).max() < 4


def test_a_new_bitrate_is_followed_and_begins_with_a_keyframe() -> None:
    encoder = VideoEncoder("libx264", WIDTH, HEIGHT, FPS, 600_000)
    generous = encode(encoder, 48)
    assert not encoder.set_bitrate(610_000), "a change of two per cent is not worth a keyframe"
    assert encoder.set_bitrate(100_000)
    meagre = encode(encoder, 48, first=48)
    assert meagre[0].keyframe
    sizes = [sum(len(p.data) for p in packets) for packets in (generous, meagre)]
    assert sizes[1] < 0.4 * sizes[0]
    assert sizes[1] * 8 * FPS / 48 < 150_000
    assert len(decode("h264", generous + meagre)) == 96


def test_a_rate_outside_reason_is_bounded() -> None:
    encoder = VideoEncoder("libx264", WIDTH, HEIGHT, FPS, 1)
    assert encoder.bits_per_second == 60_000


def test_probing_says_why_and_falls_back() -> None:
    assert probe("libx264") == ""
    assert probe("libvpx") == ""
    for name in ("h264_nvenc", "h264_v4l2m2m"):
        reason = probe(name)
        assert choose_encoder("h264", name) == (name if not reason else "libx264")
    assert choose_encoder("vp8", "h264_nvenc") == "libvpx"


def test_wrong_pictures_and_sizes_are_refused_with_expected_and_got() -> None:
    with pytest.raises(EncoderError, match="even.*127x80"):
        VideoEncoder("libx264", 127, 80, FPS, 300_000)
    encoder = VideoEncoder("libx264", WIDTH, HEIGHT, FPS, 300_000)
    with pytest.raises(EncoderError, match=r"\(80, 128, 3\) uint8, got \(80, 64, 3\)"):
        encoder.encode(picture(0)[:, :64], 0)
    assert encode(encoder, 1)[0].keyframe, "a refused picture costs nothing"
