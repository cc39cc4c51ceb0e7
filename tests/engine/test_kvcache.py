"""The cache is an optimisation: whatever the policy, a block sees exactly the keys and values it is said to see."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.generator import Generator
from engine.kvcache.cache import KVCache
from engine.kvcache.latent import Projection
from engine.kvcache.policy import Policy, parse
from engine.kvcache.pool import CacheFull, PageFormat, PagePool
from engine.kvcache.tiers import CacheFileError, load, save
from engine.layers.attention import reference
from engine.models import KVGeometry, Rotate
from engine.protocol import PromptChange
from engine.world import World
from tests.toy_model import ToyModel, toy_world

GEOMETRY = KVGeometry(layers=2, heads=2, head_dim=8, tokens=3)


def pool_of(pages: int, store: str = "native", geometry: KVGeometry = GEOMETRY) -> PagePool:
    return PagePool(PageFormat(geometry, torch.float32, parse(f"store={store}").store), pages)


def frames_of(start: int, n: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v (1, n, S, heads, head_dim) of made-up frames: a function of the frame indices alone."""
    seeded = (torch.Generator().manual_seed(1000 * seed + f) for f in range(start, start + n))
    drawn = [torch.randn(3, 3, 2, 8, generator=generator) for generator in seeded]
    q, k, v = torch.stack(drawn, 1)[:, None]
    return q, k, v


def put(cache: KVCache, start: int, n: int, rotate: Rotate | None = None) -> Tensor:
    """Run a block through all layers, noisy pass and clean pass, and commit it; return the clean output of layer 0."""
    with cache.stage(start, n) as staged:
        noisy = frames_of(start, n, seed=7)
        for layer in range(GEOMETRY.layers):
            staged.attend(layer, *noisy, rotate)
        staged.clean = True
        out = [staged.attend(layer, *frames_of(start, n), rotate) for layer in range(GEOMETRY.layers)]
        staged.commit()
    return out[0]


def turn(x: Tensor, frames: Tensor) -> Tensor:
    """A rotation by the frame index, on pairs of channels."""
    angle = frames.float()[None, :, None, None, None] * torch.tensor([1.0, 0.3, 0.1, 0.01])
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


def expected(start: int, n: int, past: list[int], positions: str) -> Tensor:
    """The same block from scratch: every visible frame's keys made anew and laid side by side."""
    q, k, v = frames_of(start, n)
    keys = torch.cat([*(frames_of(f, 1)[1] for f in past), k], 1)
    values = torch.cat([*(frames_of(f, 1)[2] for f in past), v], 1)
    at = torch.tensor([*past, *range(start, start + n)]) if positions == "absolute" else torch.arange(len(past) + n)
    q, keys = turn(q, at[-n:]), turn(keys, at)
    return reference(q.flatten(1, 2), keys.flatten(1, 2), values.flatten(1, 2)).reshape(q.shape)


class Paged:
    """A backend that reads pages where they lie, in the plainest way."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return reference(q, k, v)

    def paged(self, q: Tensor, k: Tensor, v: Tensor, pages: Sequence[int]) -> Tensor:
        self.calls += 1
        return reference(q, *(x[list(pages)].flatten(0, 1)[None] for x in (k, v)))


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 3),
    blocks=st.integers(1, 9),
    sink=st.integers(0, 3),
    room=st.none() | st.integers(0, 6),
    chosen=st.sets(st.integers(0, 12), max_size=3),
    positions=st.sampled_from(["absolute", "window"]),
    offload=st.sampled_from(["none", "host"]),
)
def test_reading_the_cache_equals_recomputing_every_visible_frame(
    n: int, blocks: int, sink: int, room: int | None, chosen: set[int], positions: str, offload: str
) -> None:
    window = None if room is None else sink + n + room
    words = f"{'full' if window is None else f'window={window}'} sink={sink} positions={positions} offload={offload}"
    policy = parse(words + (f" frames={','.join(map(str, sorted(chosen)))}" if chosen else ""))
    cache = KVCache(pool_of(64), policy, n)
    for block in range(blocks):
        seen = policy.visible(block * n, n)
        out = put(cache, block * n, n, turn)
        torch.testing.assert_close(out, expected(block * n, n, seen, positions), rtol=0, atol=2e-5)


def test_a_window_moves_without_a_copy_and_a_steady_world_takes_no_more_pages() -> None:
    pool = pool_of(32)
    cache = KVCache(pool, parse("window=6 sink=1"), 2)
    for block in range(3):
        put(cache, 2 * block, 2)
    used, block_bytes = pool.used_bytes, 2 * pool.format.page_bytes
    for block in range(3, 40):
        before = cache.copied_bytes
        put(cache, 2 * block, 2)
        assert cache.copied_bytes - before == 2 * block_bytes, "once in the noisy pass, once in the clean one"
    assert (cache.gathered_bytes, pool.used_bytes) == (0, used)


def test_a_full_cache_grows_in_one_run_beside_another_world() -> None:
    pool = pool_of(400)
    one, other = KVCache(pool, Policy(), 2), KVCache(pool, Policy(), 2)
    for block in range(20):
        put(one, 2 * block, 2)
        put(other, 2 * block, 2)
    assert one.gathered_bytes == other.gathered_bytes == 0


def test_scattered_pages_are_brought_together_once_a_block_not_once_a_step() -> None:
    cache = KVCache(pool_of(32), Policy(), 2)
    for block in range(4):
        put(cache, 2 * block, 2)
    with cache.stage(8, 2, visible=[0, 5]) as staged:
        for _ in range(5):
            staged.attend(0, *frames_of(8, 2), None)
        gathered_once = 2 * 2 * 3 * 2 * 8 * 4  # k and v of frames 0 and 5 in one layer
        before = cache.gathered_bytes
        staged.attend(0, *frames_of(8, 2), None)
        assert cache.gathered_bytes == before
        staged.attend(1, *frames_of(8, 2), None)
        assert cache.gathered_bytes - before == gathered_once


@pytest.mark.parametrize("kv", ["window=4 topk=1", "window=2 topk=2", "window=4 topk=1 range=0:2"])
def test_a_backend_that_reads_pages_sees_the_same_and_nothing_is_gathered(kv: str) -> None:
    backend, pool = Paged(), pool_of(60)
    paged = KVCache(pool, parse(kv), 2, backend)
    beside = KVCache(pool, parse("full"), 2)  # takes the pages behind those of the other
    plain = KVCache(pool_of(40), parse(kv), 2, reference)
    for block in range(6):
        assert torch.allclose(put(paged, 2 * block, 2, turn), put(plain, 2 * block, 2, turn), atol=1e-6)
        put(beside, 2 * block, 2, turn)
    assert backend.calls > 0
    assert paged.gathered_bytes == 0


@pytest.mark.parametrize("kv", ["window=6 store=int8", "window=6 positions=window", "window=4 offload=host range=0:2"])
def test_pages_that_do_not_hold_what_attention_reads_are_still_brought_together(kv: str) -> None:
    paged, plain = KVCache(pool_of(40), parse(kv), 2, Paged()), KVCache(pool_of(40), parse(kv), 2, reference)
    for block in range(6):
        assert torch.allclose(put(paged, 2 * block, 2, turn), put(plain, 2 * block, 2, turn), atol=1e-6)


def test_a_block_that_fails_half_way_leaves_what_every_later_block_sees() -> None:
    cache, twin = (KVCache(pool_of(16), parse("window=6 sink=1"), 2) for _ in range(2))
    for block in range(5):
        put(cache, 2 * block, 2)
        put(twin, 2 * block, 2)
    with pytest.raises(RuntimeError, match="half way"), cache.stage(10, 2) as staged:
        staged.attend(0, *frames_of(10, 2, seed=3), None)
        raise RuntimeError("half way")
    for block in range(5, 9):
        assert torch.equal(put(cache, 2 * block, 2), put(twin, 2 * block, 2))


def test_a_fork_goes_back_to_attending_in_place_once_its_pages_are_its_own() -> None:
    parent = KVCache(pool_of(64), parse("window=8"), 2)
    for block in range(4):
        put(parent, 2 * block, 2)
    child = parent.fork()
    for block in range(4, 8):
        put(child, 2 * block, 2)
    before = child.gathered_bytes
    put(child, 16, 2)
    assert before > 0 and child.gathered_bytes == before


def test_forks_share_pages_until_they_differ() -> None:
    pool = pool_of(64)
    parent = KVCache(pool, parse("window=8"), 2)
    for block in range(4):
        put(parent, 2 * block, 2)
    before = pool.used_bytes
    child = parent.fork()
    assert pool.used_bytes == before
    for start in (8, 10, 12):
        assert torch.equal(put(parent, start, 2), put(child, start, 2))
    parent.close()
    for block in range(7, 14):
        put(child, 2 * block, 2)
    child.close()
    assert pool.used_bytes == 0


@pytest.mark.parametrize(
    "kv",
    [
        *("window=6 sink=1", "full", "window=4 topk=1", "window=4 store=int8", "full positions=window"),
        *("window=4 topk=1 offload=host", "window=4 frames=1 offload=host"),
    ],
)
def test_a_cache_restored_from_disk_gives_bit_identical_blocks(kv: str, tmp_path: Path) -> None:
    policy = parse(kv)
    pages = policy.most_held(2) or 64  # no more than the policy says it needs, whatever waits on the host
    cache = KVCache(pool_of(pages, policy.store), policy, 2)
    for block in range(5):
        put(cache, 2 * block, 2, turn)
    path = tmp_path / "cache.safetensors"
    save(path, cache.snapshot(), {"kv": kv})
    again = KVCache(pool_of(pages, policy.store), policy, 2)
    again.restore(load(path, torch.device("cpu")))
    assert again.bytes_by_tier()["host"] == cache.bytes_by_tier()["host"]
    for block in range(5, 8):
        assert torch.equal(put(cache, 2 * block, 2, turn), put(again, 2 * block, 2, turn))


def test_a_damaged_file_says_so(tmp_path: Path) -> None:
    path = tmp_path / "cache.safetensors"
    path.write_bytes(b"not a cache")
    with pytest.raises(CacheFileError, match="cannot read"):
        load(path, torch.device("cpu"))


def test_top_k_fetches_the_blocks_whose_keys_answer_the_queries() -> None:
    cache = KVCache(pool_of(64), parse("window=2 topk=1"), 2)
    for block in range(5):
        put(cache, 2 * block, 2)
    q, k, v = frames_of(10, 2)
    q = torch.stack([cache.catalogue.summary(4)[0], cache.catalogue.summary(5)[0]]).mean(0).expand(q.shape) * 100
    with cache.stage(10, 2) as staged:
        out = staged.attend(0, q, k, v, None)
    keys, values = (torch.cat([x, y], 1) for x, y in zip(frames_of(4, 2)[1:], (k, v), strict=True))
    wanted = reference(q.flatten(1, 2), keys.flatten(1, 2), values.flatten(1, 2)).reshape(q.shape)
    torch.testing.assert_close(out, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("latent", [False, True], ids=["keys", "latents"])
@pytest.mark.parametrize("positions", ["absolute", "window"])
def test_top_k_shows_a_block_as_if_its_frames_had_been_asked_for(positions: str, latent: bool) -> None:
    """Same positions and same keys, at the first step as at the last, whatever way the frames came into sight."""
    axes, _ = torch.linalg.qr(torch.randn(32, 16, generator=torch.Generator().manual_seed(1)))
    projections = (Projection(axes, torch.zeros(32), 2),) * 2 if latent else ()
    geometry = KVGeometry(2, 2, 8, 3, latent_dim=16 if latent else None)

    def block_after_four(kv: str) -> list[Tensor]:
        """What the fifth block sees of layer 0, at its first step and at its second."""
        cache = KVCache(
            pool_of(32, geometry=geometry), parse(f"{kv} positions={positions}"), 2, projections=projections
        )
        for block in range(4):
            put(cache, 2 * block, 2, turn)
        with cache.stage(8, 2) as staged:
            return [staged.attend(0, *frames_of(8, 2), turn) for _ in range(2)]

    first, second = block_after_four("window=4 topk=1")
    asked = [block_after_four(f"window=4 frames={f},{f + 1}")[0] for f in (0, 2, 4)]
    assert torch.equal(first, second)
    assert sum(torch.allclose(first, wanted, rtol=0, atol=1e-6) for wanted in asked) == 1


@pytest.mark.parametrize("first", [1, 3, 5])
@pytest.mark.parametrize(
    "kv", ["window=7 sink=1 topk=2", "window=7 topk=1 positions=window", f"window=7 topk={10**15}"]
)
def test_a_first_block_of_another_size_is_fetched_by_content_like_any_other(first: int, kv: str) -> None:
    model = ToyModel(first_block_frames=first)
    world = toy_world(model, kv)
    for _ in range(9):
        assert Generator(model).next_block(world).latents.isfinite().all()


def test_blocks_written_together_are_still_fetched_one_by_one() -> None:
    model = ToyModel()
    world, generator = toy_world(model, "window=6 sink=1 topk=2"), Generator(model, "joint")
    for _ in range(6):
        generator.next_block(world)
    world.steer(PromptChange(0, "b", "recache"))
    for _ in range(8):
        assert generator.next_block(world).latents.isfinite().all()
    assert {len(block) for block in world.caches[0].catalogue.candidates(())} <= {1, 2}


def test_a_pool_without_room_says_what_would_do_and_takes_nothing() -> None:
    pool = pool_of(3)
    cache = KVCache(pool, Policy(), 2)
    put(cache, 0, 2)
    with pytest.raises(CacheFull, match=f"a budget of {4 * pool.format.page_bytes} bytes would do"):
        cache.stage(2, 2)
    assert pool.free == 1
    with pytest.raises(CacheFull, match="one page alone takes"):
        PagePool.from_budget(pool.format, 10)


@pytest.mark.parametrize("pages", [10**12, 10**30])
def test_more_pages_than_there_is_memory_are_refused(pages: int) -> None:
    with pytest.raises(CacheFull, match=f"{pages} pages .* more than can be allocated"):
        pool_of(pages)


def test_one_latent_per_token_is_expanded_on_read() -> None:
    geometry = KVGeometry(layers=1, heads=2, head_dim=8, tokens=3, latent_dim=16)
    form = PageFormat(geometry, torch.float32)
    assert form.page_bytes * 2 == PageFormat(GEOMETRY, torch.float32).page_bytes // 2
    cache = KVCache(PagePool(form, 16), parse("window=4"), 2)
    up = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(5)) / 4

    def expand(latent: Tensor) -> tuple[Tensor, Tensor]:
        k, v = ((latent @ up[i]).reshape(*latent.shape[:-1], 2, 8) for i in range(2))
        return k, v

    latents = torch.randn(1, 6, 3, 16, generator=torch.Generator().manual_seed(6))
    q = torch.randn(1, 6, 3, 2, 8, generator=torch.Generator().manual_seed(7))
    for start in (0, 2, 4):
        with cache.stage(start, 2) as staged:
            staged.clean = True
            out = staged.attend_latent(0, q[:, start : start + 2], latents[:, start : start + 2], expand, turn)
            staged.commit()
    k, v = expand(latents[:, 2:])
    k, turned = turn(k, torch.arange(2, 6)), turn(q[:, 4:], torch.arange(4, 6))
    wanted = reference(turned.flatten(1, 2), k.flatten(1, 2), v.flatten(1, 2)).reshape(out.shape)
    torch.testing.assert_close(out, wanted, rtol=0, atol=1e-5)


@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(1, 3),
    layers=st.integers(1, 3),
    group=st.sampled_from([1, 2]),
    kv=st.sampled_from(["full", "window=7 sink=1", "window=6", "window=0 range=0:4", "window=7 positions=window"]),
    blocks=st.integers(2, 6),
)
def test_a_rollout_with_the_cache_equals_one_whose_past_is_recomputed(
    n: int, layers: int, group: int, kv: str, blocks: int
) -> None:
    model = ToyModel(frames_per_block=n, layers=layers, heads=2, kv_heads=2 // group)
    world = toy_world(model, kv)
    generator = Generator(model)
    made = [generator.next_block(world).latents for _ in range(blocks)]
    again = recomputed(model, kv, made[:-1])
    torch.testing.assert_close(made[-1], generator.next_block(again).latents, rtol=0, atol=2e-5)


def recomputed(model: ToyModel, kv: str, made: list[Tensor]) -> World:
    """A world whose cache was filled anew from the finished blocks alone."""
    world = toy_world(model, kv)
    Generator(model).prefill(world, torch.cat(made))
    return world
