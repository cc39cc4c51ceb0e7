"""Worlds that begin from a picture or a clip."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import av
import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from engine import start
from engine.movie import Movie, write_png
from engine.protocol import PromptChange
from engine.rollout import Request, Rollout
from engine.start import StartError, begin, filled, read_pictures
from engine.world import World
from tests.small_wan import small_model, small_preset, small_world
from tests.toy_preset import PRESET as TOY
from tests.toy_preset import LivingToy

PRESET = small_preset("window=6 sink=1", 2)
GEOMETRY = small_model(PRESET).geometry  # 32 x 32 at 16 fps; the first block has 5 pictures, each later one 8


def striped(width: int, height: int) -> NDArray[np.uint8]:
    """Red on the left third, green in the middle, blue on the right."""
    picture = np.zeros((height, width, 3), np.uint8)
    for i in range(3):
        picture[:, i * width // 3 : (i + 1) * width // 3, i] = 255
    return picture


def starting(world: World, path: Path) -> World:
    world.spec = msgspec.structs.replace(world.spec, start_picture=str(path))
    return world


def write_clip(path: Path, pictures: int, fps: int) -> None:
    """A clip that gets brighter with time."""
    with Movie(path, 64, 64, fps) as movie:
        movie.add(np.stack([np.full((64, 64, 3), 10 * i, np.uint8) for i in range(pictures)]))


def test_a_picture_is_scaled_to_cover_and_cropped_in_the_middle(tmp_path: Path) -> None:
    write_png(tmp_path / "a.png", striped(192, 64))
    (picture,) = read_pictures(tmp_path / "a.png", GEOMETRY)
    assert picture.shape == (32, 32, 3)
    assert torch.equal(picture[16, 16], torch.tensor([0, 255, 0], dtype=torch.uint8))
    assert picture[16, 2, 1] > 200 and picture[16, -3, 1] > 200  # the sides are cut off


@pytest.mark.parametrize(("fps", "pictures", "expected"), [(16, 9, 9), (32, 18, 9), (8, 5, 9)])
def test_a_clip_is_sampled_at_the_models_rate(tmp_path: Path, fps: int, pictures: int, expected: int) -> None:
    write_clip(tmp_path / "a.mp4", pictures, fps)
    got = read_pictures(tmp_path / "a.mp4", GEOMETRY)
    assert len(got) == expected
    for i, picture in enumerate(got):
        assert abs(int(picture[16, 16, 1]) - 10 * (i * fps // 16)) < 8


def test_a_long_clip_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "MAX_START_S", 0.5)
    write_clip(tmp_path / "a.mp4", 20, 16)
    assert len(read_pictures(tmp_path / "a.mp4", GEOMETRY)) == 8


@pytest.mark.parametrize(("given", "kept"), [(1, 5), (4, 5), (5, 5), (12, 5), (13, 13), (20, 13), (21, 21)])
def test_pictures_are_cut_to_whole_blocks_or_held(given: int, kept: int) -> None:
    pictures = torch.arange(given, dtype=torch.uint8)[:, None, None, None]
    got = filled(pictures, GEOMETRY).flatten().tolist()
    assert got == [min(i, given - 1) for i in range(kept)]


def test_a_world_goes_on_from_the_latents_of_its_start(tmp_path: Path) -> None:
    model = small_model(PRESET)
    write_clip(tmp_path / "a.mp4", 13, 16)
    generator, world = small_world(PRESET, model)
    blocks = begin(generator, starting(world, tmp_path / "a.mp4"))
    assert [len(block.latents) for block in blocks] == [2, 2] and world.start == 4
    assert world.caches[0].held == [0, 1, 2, 3]
    after = generator.next_block(world)
    assert after.start == 4
    _, plain = small_world(PRESET, model)
    for _ in range(2):
        generator.next_block(plain)
    assert not torch.allclose(generator.next_block(plain).latents, after.latents, atol=1e-3)


def test_a_model_whose_first_block_has_one_frame_starts_from_one_picture(tmp_path: Path) -> None:
    preset = small_preset("full", 2, first_block_frames=1)
    write_png(tmp_path / "a.png", striped(64, 64))
    generator, world = small_world(preset, small_model(preset))
    (block,) = begin(generator, starting(world, tmp_path / "a.png"))
    assert len(block.latents) == 1 and world.start == 1


def test_what_is_no_picture_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generator, world = small_world(PRESET, small_model(PRESET))
    (tmp_path / "text.png").write_text("this is no picture")
    (tmp_path / "cut.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    write_png(tmp_path / "a.png", striped(64, 64))
    secret = tmp_path / "secret.ts"
    write_stream(secret)
    playlist = f"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{secret}\n#EXT-X-ENDLIST\n"
    (tmp_path / "list.m3u8").write_text(playlist)
    (tmp_path / "list.mp4").write_text(f"ffconcat version 1.0\nfile {secret}\n")
    for name in ("nothing.png", "n" * 300 + ".png", "text.png", "cut.png", "list.m3u8", "list.mp4"):
        with pytest.raises(StartError, match="start_picture: "):
            begin(generator, starting(world, tmp_path / name))
    monkeypatch.setattr(start, "MAX_PIXELS", 1000)
    with pytest.raises(StartError, match="expected at most 1000 pixels, got 64x64"):
        begin(generator, starting(world, tmp_path / "a.png"))
    assert world.start == 0 and not world.caches[0].held


def write_stream(path: Path) -> None:
    with av.open(path, "w", format="mpegts") as container:
        stream = container.add_stream("mpeg2video", rate=Fraction(25))
        stream.width = stream.height = 64
        stream.pix_fmt = "yuv420p"
        frame = av.VideoFrame.from_ndarray(striped(64, 64), format="rgb24")
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


def test_a_model_without_an_encoder_says_so(tmp_path: Path) -> None:
    model = small_model(PRESET)
    model.encoder = None
    generator, world = small_world(PRESET, model)
    with pytest.raises(StartError, match="small-wan cannot start from a picture"):
        begin(generator, starting(world, tmp_path / "a.png"))


def test_a_roll_out_shows_its_start_first(tmp_path: Path) -> None:
    write_clip(tmp_path / "a.mp4", 13, 16)
    request = Request("small-wan", (PromptChange(0.0, "a"),), 2.0, start=tmp_path / "a.mp4")
    with Rollout(request, small_model(PRESET), PRESET) as rollout:
        parts = list(rollout)
    assert [part.block.index for part in parts] == list(range(len(parts)))
    assert sum(len(part.pictures) for part in parts) == 32
    assert rollout.world.block == len(parts)


@pytest.mark.parametrize("kv", ["full", "window=24"])
def test_a_start_longer_than_the_video_has_room_all_the_same(tmp_path: Path, kv: str) -> None:
    write_clip(tmp_path / "a.mp4", 25, 8)
    request = Request("toy", (PromptChange(0, "a"),), 0.5, kv=kv, start=tmp_path / "a.mp4")
    with Rollout(request, LivingToy(), TOY) as rollout:
        assert sum(len(part.pictures) for part in rollout) == rollout.total_pictures
