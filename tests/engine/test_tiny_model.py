"""tiny-world behind the contract: streamed through the engine's cache it is the network that was trained."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.kvcache.cache import KVCache
from engine.kvcache.policy import parse
from engine.kvcache.pool import PageFormat, PagePool
from engine.models import BlockSignals
from engine.models.tiny import decoder as planes
from engine.models.tiny.decoder import Glimpse, Keyframe, KeyframeDecoder
from engine.models.tiny.model import GEOMETRY, TinyConditioning, TinyModel
from engine.models.tiny.network import Given, TinyNetwork
from engine.models.tiny.planet import HEIGHT, PLANES, WIDTH
from engine.protocol import ActionState
from engine.training.forcing import Rolling, TeacherForcing, teacher_forced

RIGHT = ActionState(keys=("right", "fast"))


@pytest.fixture(scope="module")
def model() -> TinyModel:
    """Random weights large enough to make every part count."""
    torch.manual_seed(0)
    network, decoder = TinyNetwork(table=8, hidden=16, images=4), KeyframeDecoder((16, 16, 8, 8))
    with torch.no_grad():
        for p in (*network.parameters(), *decoder.parameters()):
            p.add_(torch.randn_like(p) * 0.02)
    return TinyModel(network, decoder)


def signals_at(model: TinyModel, block: int, motion: tuple[float, ...], text: str = "beach") -> BlockSignals:
    return BlockSignals(block, 2 * block, 2, model.encode(text, None), action=RIGHT, motion=motion)


def conditioning_of(model: TinyModel, blocks: int) -> list[TinyConditioning]:
    made: list[TinyConditioning] = []
    for block in range(blocks):
        made.append(model.condition(signals_at(model, block, made[-1].motion if made else ())))
    return made


def joined(parts: list[TinyConditioning]) -> Given:
    """What is given about all blocks, as in training: words for every latent frame."""
    given = [part.given() for part in parts]
    cross = torch.cat([g.cross.expand(-1, 2, -1, -1, -1, -1) for g in given], 1)
    mean, tokens, light = (torch.cat([getattr(g, name) for g in given], 1) for name in ("mean", "tokens", "light"))
    return Given(mean, tokens, light, cross, torch.cat([g.share for g in given], 1))


def test_streaming_through_the_cache_is_the_training_forward(model: TinyModel) -> None:
    parts = conditioning_of(model, 4)
    clean, noisy = torch.randn(1, 8, 64, 9, 16), torch.randn(1, 1, 8, 64, 9, 16)
    times, now = torch.full((1, 8), 0.06), torch.full((1, 1, 8), 0.7)
    context = TeacherForcing(frames=8, block=2, window=2, copies=1)
    with torch.no_grad():
        trained = teacher_forced(model.network.predict, joined(parts), (clean, times), (noisy, now), context)[0, 0]
    cache = KVCache(PagePool(PageFormat(GEOMETRY.kv, torch.float32), 16), parse("window=6"), 2)
    streamed = []
    for block, part in enumerate(parts):
        own = slice(2 * block, 2 * block + 2)
        with cache.stage(2 * block, 2) as staged:
            flow = model.forward(noisy[:, 0, own], now[:, 0, own] * 1000, part, staged)
            streamed.append(noisy[0, 0, own] - 0.7 * flow[0])
            staged.clean = True
            model.forward(clean[:, own], times[:, own] * 1000, part, staged)
            staged.commit()
    assert torch.allclose(torch.cat(streamed), trained, atol=1e-5)


def test_the_rolling_context_of_training_is_the_cache(model: TinyModel) -> None:
    parts = conditioning_of(model, 3)
    x = torch.randn(1, 6, 64, 9, 16)
    rolling = Rolling(block=2, window=2)
    cache = KVCache(PagePool(PageFormat(GEOMETRY.kv, torch.float32), 16), parse("window=6"), 2)
    for block, part in enumerate(parts):
        own, t = x[:, 2 * block : 2 * block + 2], torch.full((1, 2), 0.5)
        rolling.writing = True
        with torch.no_grad():
            a = model.network.predict(own, t, part.given(), rolling)
        rolling.writing = False
        rolling.commit()
        with cache.stage(2 * block, 2) as staged:
            staged.clean = True
            b = own - 0.5 * model.forward(own, t * 1000, part, staged)
            staged.commit()
        assert torch.allclose(a, b, atol=1e-5)


def test_decoding_in_a_stream_is_decoding_at_once(model: TinyModel) -> None:
    first, second = conditioning_of(model, 2)
    latents = torch.randn(4, 64, 9, 16)
    both = TinyConditioning(first.prompt, travel=torch.cat([first.travel, second.travel], 1))
    whole, _ = model.decoder.decode(latents, both, None)
    a, state = model.decoder.decode(latents[:2], first, None)
    again, _ = model.decoder.decode(latents[2:], second, state)
    b, _ = model.decoder.decode(latents[2:], second, state)
    assert torch.equal(torch.cat([a, b]), whole)
    assert torch.equal(again, b)
    assert whole.shape == (16, HEIGHT, WIDTH, 3) and whole.dtype == torch.uint8


def test_conditioning_is_deterministic_and_moves_the_camera(model: TinyModel) -> None:
    signals = signals_at(model, 0, ())
    a, b = model.condition(signals), model.condition(signals)
    assert torch.equal(a.mean, b.mean) and a.motion == b.motion
    assert a.motion != model.condition(signals_at(model, 0, (), "the desert")).motion


def test_a_dissolve_mixes_both_scenes(model: TinyModel) -> None:
    day, night = model.encode("beach by day", None), model.encode("beach at night", None)
    motion = model.condition(BlockSignals(0, 0, 2, day)).motion

    def mean(weight_start: float, weight: float) -> Tensor:
        signals = BlockSignals(1, 2, 2, night, day, weight, weight_start, motion=motion)
        return model.condition(signals).mean[0, -1]

    half = mean(0.0, 0.5)
    assert torch.allclose(half, (mean(0.0, 1e-9) + mean(0.0, 1.0)) / 2, atol=1e-5)


def test_words_are_projected_for_cross_attention_once_per_prompt(model: TinyModel) -> None:
    prompt = model.encode("a rainy night", None)
    model.condition(BlockSignals(0, 0, 2, prompt))
    kept = prompt.cross[0][0]
    model.condition(BlockSignals(1, 2, 2, prompt))
    assert prompt.cross[0][0] is kept


def keyframe(camera: int) -> Keyframe:
    """A world of one plane, the ground, with random texture, seen from `camera` pixels."""
    texture = torch.from_numpy(np.random.default_rng(0).random((3, HEIGHT, WIDTH + 64), np.float32))
    cover = torch.zeros(len(PLANES), HEIGHT, WIDTH)
    cover[PLANES.index("ground")] = 1.0
    dry = torch.zeros(HEIGHT, WIDTH)
    return Keyframe(texture[..., camera : camera + WIDTH], cover, dry, dry)


def test_a_plane_between_two_keyframes_is_exactly_where_the_camera_says() -> None:
    before, now = keyframe(0), keyframe(16)
    between = planes.picture_between([Glimpse(now, -12.0, -3, 0.25), Glimpse(before, 4.0, 1, 0.75)])
    assert torch.allclose(between, keyframe(4).base, atol=1e-3)


def test_a_moment_at_the_keyframe_is_the_keyframe() -> None:
    torch.manual_seed(1)
    cover = planes.conditional_cover(torch.rand(1, len(PLANES), HEIGHT, WIDTH).softmax(1))[0]
    wet = torch.zeros(HEIGHT, WIDTH)
    frame = Keyframe(torch.rand(3, HEIGHT, WIDTH), cover, wet, wet)
    assert torch.allclose(planes.picture_between([Glimpse(frame, 0.0, 0, 1.0)]), frame.base, atol=1e-4)


def test_rain_falls_as_one_piece() -> None:
    drop = torch.zeros(HEIGHT, WIDTH)
    drop[50, 100] = 1.0
    fallen = planes.precipitation([(drop, 2, 1.0)], (0.0, 18.0))
    assert int(fallen.argmax()) == (50 + 36) * WIDTH + 100
