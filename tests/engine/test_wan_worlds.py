"""Worlds of a Wan model: the cache against computing from scratch, prompt switches, blends, endless worlds."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.layers.attention import reference
from engine.models import BlockSignals, Conditioning, Expand, Prompt, Rotate
from engine.models.presets import Recache
from engine.models.wan_model import WanModel, mix
from engine.protocol import PromptChange
from engine.samplers import FewStep, add_noise, to_clean
from engine.world import World
from tests.small_wan import embedding, small_model, small_preset, small_world


class FromScratch:
    """Attention with no cache: the rule of the window, applied to lists of frames that are shifted and copied.

    For each layer a list of (frame, keys, values), un-rotated. A call appends its own frames, then takes out the frame
    at index `sink` while there are more than `window`; the last call of a block stays.
    """

    def __init__(self, window: int | None, sink: int, *, relative: bool) -> None:
        self.window, self.sink, self.relative = window, sink, relative
        self.past: dict[int, list[tuple[int, Tensor, Tensor]]] = {}
        self.latest: dict[int, list[tuple[int, Tensor, Tensor]]] = {}
        self.start = 0
        self.again = False  # the past is being computed again, all of it in one call …
        self.kept = 0  # … but for so many frames at its beginning

    def shard(self, tokens: Tensor) -> Tensor:
        return tokens

    def unshard(self, tokens: Tensor) -> Tensor:
        return tokens

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rotate: Rotate | None) -> Tensor:
        assert rotate is not None
        frames = range(self.start, self.start + q.shape[1])
        shown = [*self.past.get(layer, [])]
        own = [(f, k[:, i : i + 1].clone(), v[:, i : i + 1].clone()) for i, f in enumerate(frames)]
        shown = [*shown[: self.kept], *own[self.kept :]] if self.again else [*shown, *own]
        while self.window is not None and len(shown) > self.window:
            del shown[self.sink]
        self.latest[layer] = shown
        at = torch.arange(len(shown)) if self.relative else torch.tensor([f for f, _, _ in shown])
        keys = torch.cat([rotate(key, at[i : i + 1]) for i, (_, key, _) in enumerate(shown)], 1)
        values = torch.cat([value for _, _, value in shown], 1)
        queries = rotate(q, torch.tensor([*frames]) if self.again and not self.relative else at[-q.shape[1] :])
        return reference(queries.flatten(1, 2), keys.flatten(1, 2), values.flatten(1, 2)).view_as(q)

    def attend_latent(self, layer: int, q: Tensor, latent: Tensor, expand: Expand, rotate: Rotate | None) -> Tensor:
        return self.attend(layer, q, *expand(latent), rotate)

    def block_done(self, frames: int) -> None:
        self.past, self.latest = self.latest, {}
        self.start += frames


def compute_again(world: World, context: FromScratch, made: Tensor, block: int, *, keep_sink: bool) -> None:
    """LongLive's rule: the newest frames in one call under the new prompt; the sink stays once frames have left."""
    end = context.start
    count = end if context.window is None else min(context.window, end)
    context.again, context.start = True, end - count
    context.kept = context.sink if keep_sink and count < end else 0
    conditioning = world.model.condition(world.signals(block)[0])
    world.model.forward(made[None, end - count :], torch.zeros(1, count), conditioning, context)
    context.block_done(count)
    context.again, context.kept = False, 0


def scratch_blocks(world: World, context: FromScratch, *, keep_sink: bool = True) -> Iterator[Tensor]:
    """The blocks that a world would make, each from formulas alone."""
    model, sampler = world.model, world.sampler
    assert isinstance(sampler, FewStep)
    block, made = 0, torch.zeros(0, 16, 4, 4)
    while True:
        signals, value = world.signals(block)
        if block and value.began and value.change.mode == "recache":
            compute_again(world, context, made, block, keep_sink=keep_sink)
        shape = (signals.frames, *world.model.geometry.latent.__dict__.values())
        conditioning = model.condition(signals)
        x = world.noise("initial", block, 0, shape)[None]
        for step, t in enumerate(sampler.times):
            flow = model.forward(x, torch.full(x.shape[:2], t), conditioning, context)
            x0 = to_clean(x, flow, sampler.schedule.sigma(t))
            if step + 1 < len(sampler.times):
                sigma = sampler.schedule.sigma(sampler.times[step + 1])
                x = add_noise(x0, world.noise("renoise", block, step, shape)[None], sigma)
        model.forward(x0, torch.zeros(x0.shape[:2]), conditioning, context)
        context.block_done(signals.frames)
        yield x0[0]
        block, made = block + 1, torch.cat((made, x0[0]))


@st.composite
def windows(draw: st.DrawFn) -> tuple[int | None, int, int]:
    """(window, sink, frames per block) that fit each other."""
    per_block, sink = draw(st.integers(1, 3)), draw(st.integers(0, 4))
    window = draw(st.one_of(st.none(), st.integers(sink + per_block, sink + per_block + 5)))
    return window, sink if window else 0, per_block


@settings(max_examples=25, deadline=None)
@given(shape=windows(), blocks=st.integers(1, 6), relative=st.booleans(), first=st.booleans())
def test_the_cache_equals_computing_from_scratch(
    shape: tuple[int | None, int, int], blocks: int, relative: bool, first: bool
) -> None:
    window, sink, per_block = shape
    words = ["full" if window is None else f"window={window}", f"sink={sink}"]
    words += ["positions=window"] if relative else []
    preset = small_preset(" ".join(words), per_block, first_block_frames=1 if first else None)
    model = small_model(preset)
    generator, world = small_world(preset, model)
    with torch.inference_mode():
        expected = scratch_blocks(world, FromScratch(window, sink, relative=relative))
        for _ in range(blocks):
            wanted = next(expected)
            got = generator.next_block(world).latents
            assert (got - wanted).abs().max() < 1e-4


@settings(max_examples=25, deadline=None)
@given(
    shape=windows(),
    switches=st.sets(st.integers(1, 6), min_size=1, max_size=2),
    relative=st.booleans(),
    keep_sink=st.booleans(),
)
def test_a_past_computed_again_equals_the_rule_from_scratch(
    shape: tuple[int | None, int, int], switches: set[int], relative: bool, keep_sink: bool
) -> None:
    window, sink, per_block = shape
    words = ["full" if window is None else f"window={window}", f"sink={sink}"]
    words += ["positions=window"] if relative else []
    recache: Recache = "joint-keep-sink" if keep_sink else "joint"
    preset = small_preset(" ".join(words), per_block, switch="recache", recache=recache)
    model = small_model(preset)
    prompts = [PromptChange(0.0, "start")]
    for block in sorted(switches):
        prompts.append(PromptChange((1 + 4 * (block * per_block - 1)) / 16, f"at {block}", "recache"))
    generator, world = small_world(preset, model, prompts)
    scratch = small_world(preset, model, prompts)[1]
    with torch.inference_mode():
        expected = scratch_blocks(scratch, FromScratch(window, sink, relative=relative), keep_sink=keep_sink)
        for _ in range(8):
            assert (generator.next_block(world).latents - next(expected)).abs().max() < 1e-4


def test_a_world_with_window_positions_does_not_notice_how_old_it_is() -> None:
    preset = small_preset("window=4 sink=1 positions=window", 1)
    model = small_model(preset)
    seen: list[int] = []
    rope = model.network._rotate((2, 2), torch.zeros(1, 1, 4, 1), FromScratch(None, 0, relative=True))

    def watched(x: Tensor, positions: Tensor) -> Tensor:
        seen.append(int(positions.max()))
        return rope(x, positions)

    model.network._rotate = lambda *_: watched  # type: ignore[method-assign]
    generator, world = small_world(preset, model)
    for _ in range(20):
        generator.next_block(world)
    assert max(seen) == 3


def test_copied_bytes_are_the_blocks_own_keys_and_values() -> None:
    """In steady state nothing is shifted: every pass writes the block's pages, and nothing else moves."""
    preset = small_preset("window=6 sink=1", 2)
    model = small_model(preset)
    generator, world = small_world(preset, model)
    for _ in range(6):
        generator.next_block(world)
    cache = world.caches[0]
    before = cache.copied_bytes, cache.gathered_bytes
    generator.next_block(world)
    own = 2 * cache.pool.format.page_bytes
    passes = len(preset.sampler.steps) + 1
    assert cache.gathered_bytes == before[1]
    assert cache.copied_bytes - before[0] in (own, own * passes)


# ---------------------------------------------------------------------------------------------------- prompts


def at_block(block: int, text: str, mode: str, over: int = 1) -> PromptChange:
    return PromptChange((1 + 4 * (block - 1)) / 16 if block else 0.0, text, mode, over)  # type: ignore[arg-type]


def made(model: WanModel, kv: str, prompts: list[PromptChange], blocks: int) -> list[Tensor]:
    generator, world = small_world(small_preset(kv, 1, switch="recache"), model, prompts)
    return [generator.next_block(world).latents for _ in range(blocks)]


@pytest.mark.parametrize("kv", ["full", "window=3", "window=4 sink=1"])
def test_a_cut_keeps_the_past_and_a_recache_computes_it_again(kv: str) -> None:
    model = small_model(small_preset())
    start = at_block(0, "a", "cut")
    plain = made(model, kv, [start], 6)
    cut = made(model, kv, [start, at_block(3, "b", "cut")], 6)
    recached = made(model, kv, [start, at_block(3, "b", "recache")], 6)
    for i in range(3):
        assert torch.equal(plain[i], cut[i]) and torch.equal(plain[i], recached[i])
    for i in range(3, 6):
        assert not torch.allclose(plain[i], cut[i], atol=1e-3)
        assert not torch.allclose(cut[i], recached[i], atol=1e-4)


def test_a_blend_goes_from_one_embedding_to_the_other() -> None:
    model = small_model(small_preset())
    start, cut = at_block(0, "a", "cut"), at_block(2, "b", "cut")
    blended = made(model, "full", [start, at_block(2, "b", "blend", 2)], 4)
    plain, switched = made(model, "full", [start], 4), made(model, "full", [start, cut], 4)
    assert torch.equal(blended[1], plain[1])
    assert not torch.allclose(blended[2], plain[2], atol=1e-3)
    assert not torch.allclose(blended[2], switched[2], atol=1e-3)


def test_a_blended_prompt_has_keys_of_its_own_and_leaves_the_others_alone() -> None:
    model = small_model(small_preset())
    before, after = model.encode("a", None), model.encode("b", None)
    model.condition(BlockSignals(0, 0, 1, before))
    kept = {layer: (k.clone(), v.clone()) for layer, (k, v) in before.cross.items()}
    half = model.condition(BlockSignals(1, 1, 1, after, before, 0.5)).prompt
    assert torch.allclose(half.embedding, (before.embedding + after.embedding) / 2)
    assert not after.cross and all(torch.equal(before.cross[i][0], k) for i, (k, _) in kept.items())


@pytest.mark.parametrize("weight", [0.25, 0.5, 0.9])
def test_a_spherical_blend_keeps_to_the_arc(weight: float) -> None:
    a, b = torch.tensor([[[2.0, 0.0], [1.0, 0.0], [0.0, 0.0]]]), torch.tensor([[[0.0, 4.0], [3.0, 0.0], [1.0, 1.0]]])
    got = mix(a, b, weight, "spherical")[0]
    angle = weight * math.pi / 2
    length = 2 + 2 * weight
    assert torch.allclose(got[0], length * torch.tensor([math.cos(angle), math.sin(angle)]), atol=1e-5)
    assert torch.allclose(got[1], torch.tensor([1 + 2 * weight, 0.0]))  # the same direction: along the line
    assert torch.allclose(got[2], torch.tensor([weight, weight]))  # padding against text
    assert torch.allclose(mix(a, b, weight, "linear"), a + (b - a) * weight)


def test_worlds_in_a_batch_with_prompts_of_different_lengths_match_each_alone() -> None:
    preset = small_preset("window=4 sink=1", 1)
    model = small_model(preset)
    model.text = lambda text: embedding(text)[:, : len(text)]
    names = ("a", "bbb")
    alone = []
    for name in names:
        generator, world = small_world(preset, model, [PromptChange(0.0, name)])
        alone.append([generator.next_block(world).latents for _ in range(5)])
    pairs = [small_world(preset, model, [PromptChange(0.0, name)]) for name in names]
    for i in range(5):
        for row, block in enumerate(pairs[0][0].next_blocks([world for _, world in pairs])):
            assert (block.latents - alone[row][i]).abs().max() < 1e-5


def test_the_negative_prompt_is_encoded_once() -> None:
    asked: list[str] = []
    model = small_model(small_preset())

    def text(prompt: str) -> Tensor:
        asked.append(prompt)
        return embedding(prompt)

    model.text = text
    conditioning: Conditioning = model.condition(BlockSignals(0, 0, 1, Prompt("a", embedding("a"))))
    first, second = model.negative(conditioning), model.negative(conditioning)
    assert first.prompt is second.prompt and len(asked) == 1 and first.prompt.cross
