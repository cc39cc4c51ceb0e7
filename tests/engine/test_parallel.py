"""A world spread over ranks is the world of one rank, whatever it is spread by; and it sends what the formulas say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.kvcache.pool import PageFormat
from engine.models import KVGeometry
from engine.parallel.split import Layout, Split, SplitError, kv_head_spans, layouts, q_head_spans, shares
from engine.parallel.wish import Wish
from tests.parallel_lab import Lab
from tests.parallel_models import shipped

WAYS: list[tuple[int, tuple[int, int], str | None]] = [
    (1, (1, 1), None),
    (2, (2, 1), None),
    (2, (1, 2), "pass-kv"),
    (2, (1, 2), "pass-q"),
    (3, (3, 1), None),
    (3, (1, 3), "pass-kv"),
    (3, (1, 3), "pass-q"),
    (4, (4, 1), None),
    (4, (1, 4), "pass-kv"),
    (4, (1, 4), "pass-q"),
    (4, (2, 2), "pass-kv"),
    (4, (2, 2), "pass-q"),
]
NAMES = [f"{u}x{r} {mode or ''}".strip() for _, (u, r), mode in WAYS]
EVERY_WAY = pytest.mark.parametrize(("ranks", "layout", "mode"), WAYS, ids=NAMES)
UNEVEN = {"heads": 5, "kv_heads": 5, "size": (1, 7)}


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    group = Lab.open("tests.parallel_cases")
    yield group
    group.close()


@EVERY_WAY
def test_a_window_with_a_sink_is_that_of_one_rank(lab: Lab, ranks: int, layout: Any, mode: str | None) -> None:
    lab.run("world", ranks, layout=layout, mode=mode, kv="window=6 sink=1", blocks=6, sizes=UNEVEN)


@EVERY_WAY
def test_a_growing_cache_is_that_of_one_rank(lab: Lab, ranks: int, layout: Any, mode: str | None) -> None:
    lab.run("world", ranks, layout=layout, mode=mode, steer="blend", sizes={"heads": 6, "kv_heads": 2, "size": (2, 5)})


@pytest.mark.parametrize(
    ("kv", "sampler", "steer", "recache"),
    [
        ("full", "guided", "recache", "blocks"),
        ("window=6 sink=2 positions=window", "few-step", "recache", "joint-keep-sink"),
        ("window=6 positions=window", "few-step", "cut", "blocks"),
        ("window=4 topk=1", "few-step", "cut", "blocks"),
        ("window=4 topk=1 positions=window", "guided", "cut", "blocks"),
        ("window=4 range=0:1 frames=3", "few-step", "recache", "joint"),
        ("window=6 offload=host range=0:2", "few-step", "cut", "blocks"),
    ],
)
@pytest.mark.parametrize(
    ("ranks", "layout", "mode"), [(3, (3, 1), None), (3, (1, 3), "pass-kv"), (4, (2, 2), "pass-q")]
)
def test_every_policy_is_that_of_one_rank(
    lab: Lab, ranks: int, layout: Any, mode: str | None, kv: str, sampler: str, steer: str, recache: str
) -> None:
    case: dict[str, Any] = {"kv": kv, "sampler": sampler, "steer": steer, "recache": recache, "blocks": 6}
    lab.run("world", ranks, layout=layout, mode=mode, sizes={"heads": 4, "kv_heads": 4}, **case)


@pytest.mark.parametrize("store", ["int8", "int4", "fp8"])
def test_quantised_pages_split_by_head_are_the_same_pages(lab: Lab, store: str) -> None:
    lab.run("world", 3, layout=(3, 1), kv=f"window=6 store={store}", sizes={"heads": 3, "kv_heads": 3}, tolerance=1e-4)


def test_quantised_pages_split_by_token_have_scales_of_their_own(lab: Lab) -> None:
    """Finer ones than on one rank: the same world within what int8 rounds off."""
    lab.run("world", 2, layout=(1, 2), kv="window=6 store=int8", mode="pass-q", tolerance=0.05)


@pytest.mark.parametrize(("ranks", "layout", "mode"), [way for way in WAYS if way[1][0] <= 2 and way[0] != 3])
def test_wan_is_that_of_one_rank(lab: Lab, ranks: int, layout: Any, mode: str | None) -> None:
    case: dict[str, Any] = {"model": "wan", "sampler": "wan", "kv": "window=6 sink=1", "steer": "recache"}
    lab.run("world", ranks, layout=layout, mode=mode, recache="joint-keep-sink", blocks=5, **case)


@pytest.mark.parametrize("sampler", ["staggered", "staggered distilled"])
@pytest.mark.parametrize(
    ("ranks", "layout", "mode"), [(2, (2, 1), None), (2, (1, 2), "pass-kv"), (3, (3, 1), None), (4, (2, 2), "pass-q")]
)
def test_blocks_in_flight_are_those_of_one_rank(
    lab: Lab, ranks: int, layout: Any, mode: str | None, sampler: str
) -> None:
    lab.run("world", ranks, layout=layout, mode=mode, model="magi", sampler=sampler, kv="window=9", blocks=3)


@pytest.mark.skipif(not shipped(), reason="the shipped model's weights are not in the tree")
@pytest.mark.parametrize(("ranks", "layout", "mode"), [(2, (2, 1), None), (2, (1, 2), "pass-q"), (3, (3, 1), None)])
def test_the_shipped_model_is_that_of_one_rank(lab: Lab, ranks: int, layout: Any, mode: str | None) -> None:
    lab.run("world", ranks, layout=layout, mode=mode, model="tiny", sampler="tiny", kv="window=6 sink=1", blocks=4)


@pytest.mark.parametrize(("ranks", "layout", "mode"), [(2, (2, 1), None), (4, (4, 1), None), (3, (1, 3), "pass-kv")])
def test_latent_attention_is_that_of_one_rank(lab: Lab, ranks: int, layout: Any, mode: str | None) -> None:
    lab.run("latent_attention", ranks, layout=layout, mode=mode)


@pytest.mark.parametrize(("layout", "then"), [((2, 2), (4, 1)), ((1, 4), (2, 2)), ((4, 1), (1, 4))])
@pytest.mark.parametrize("kv", ["window=6 sink=1", "window=4 topk=1"])
def test_a_snapshot_goes_on_on_another_grid_and_on_one_rank(lab: Lab, layout: Any, then: Any, kv: str) -> None:
    lab.run("resumed", 4, layout=layout, then=then, kv=kv)


@pytest.mark.parametrize(("layout", "mode"), [((2, 1), "pass-q"), ((1, 2), "pass-kv")])
def test_worlds_in_one_batch_are_each_what_they_are_alone(lab: Lab, layout: Any, mode: str) -> None:
    lab.run("batched", 2, layout=layout, mode=mode)


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    way=st.sampled_from(WAYS),
    per_group=st.integers(1, 3),
    kv_heads=st.integers(1, 5),
    tokens=st.integers(4, 11),
    frames=st.integers(1, 3),
    sink=st.integers(0, 2),
    window=st.integers(0, 4),
    keep_sink=st.booleans(),
)
def test_any_shape_is_that_of_one_rank(
    lab: Lab,
    way: Any,
    per_group: int,
    kv_heads: int,
    tokens: int,
    frames: int,
    sink: int,
    window: int,
    keep_sink: bool,
) -> None:
    ranks, layout, mode = way
    heads = max(per_group, -(-layout[0] // kv_heads)) * kv_heads
    sizes = {"heads": heads, "kv_heads": kv_heads, "size": (1, tokens), "frames_per_block": frames}
    kv = f"window={window + sink + frames} sink={sink}"
    recache = "joint-keep-sink" if keep_sink else "blocks"
    lab.run("world", ranks, layout=layout, mode=mode, kv=kv, sizes=sizes, steer="recache", recache=recache, blocks=4)


@pytest.mark.parametrize(("ranks", "layout", "mode"), [(4, (2, 2), "pass-q"), (4, (1, 4), "pass-kv")])
def test_all_ranks_do_to_a_world_what_rank_0_does(lab: Lab, ranks: int, layout: Any, mode: str | None) -> None:
    lab.run("led", ranks, layout=layout, mode=mode)


# --------------------------------------------------------------------------------- branches of guidance

CFG = pytest.mark.parametrize(
    ("ranks", "layout", "mode"),
    [(2, (1, 1, 1, 2), None), (4, (2, 1, 1, 2), None), (4, (1, 2, 1, 2), "pass-kv")],
    ids=["cfg 2", "ulysses 2 cfg 2", "ring 2 cfg 2"],
)


@CFG
@pytest.mark.parametrize(
    ("kv", "steer", "recache"),
    [("window=6 sink=1", "cut", "blocks"), ("full", "recache", "joint"), ("window=4 topk=1", "recache", "blocks")],
)
def test_branches_on_ranks_of_their_own_are_those_of_one_rank(
    lab: Lab, ranks: int, layout: Any, mode: str | None, kv: str, steer: str, recache: str
) -> None:
    case: dict[str, Any] = {"kv": kv, "steer": steer, "recache": recache, "sampler": "guided", "blocks": 6}
    lab.run("world", ranks, layout=layout, mode=mode, sizes={"heads": 4, "kv_heads": 4}, **case)


@pytest.mark.parametrize(("layout", "mode"), [((2, 1, 1, 2), None), ((1, 2, 1, 2), "pass-q")])
def test_all_ranks_of_all_branches_do_what_rank_0_does(lab: Lab, layout: Any, mode: str | None) -> None:
    lab.run("led", 4, layout=layout, mode=mode, sampler="guided")


@pytest.mark.parametrize(("layout", "then"), [((2, 1, 1, 2), (1, 4)), ((4, 1), (1, 2, 1, 2))])
def test_a_snapshot_has_all_branches_and_goes_on_anywhere(lab: Lab, layout: Any, then: Any) -> None:
    lab.run("resumed", 4, layout=layout, then=then, sampler="guided")


def test_guided_worlds_in_one_batch_are_each_what_they_are_alone(lab: Lab) -> None:
    lab.run("batched", 4, layout=(2, 1, 1, 2), mode="pass-q", sampler="guided")


def test_branches_send_each_other_a_flow_a_step(lab: Lab) -> None:
    sent: Any = lab.run("cfg_bytes", 4, layout=(2, 1, 1, 2))
    counted, formula = sent
    assert counted == formula > 0


def test_a_sampler_without_guidance_has_no_branches_to_share(lab: Lab) -> None:
    with pytest.raises(AssertionError, match="cfg: expected 1, for no guidance; got 2"):
        lab.run("world", 2, layout=(1, 1, 1, 2), sampler="few-step")


@pytest.mark.parametrize(
    ("asked", "branches", "groups"),
    [
        (Wish(2), 2, 2),
        (Wish(3), 2, 1),
        (Wish(4, ulysses=2), 2, 2),
        (Wish(4, ulysses=4), 2, 1),
        (Wish(4, ulysses=2, ring=2), 2, 1),
        (Wish(8, ulysses=2, ring=2, cfg=2), 2, 2),
        (Wish(4, cfg=1), 2, 1),
        (Wish(4), 1, 1),
    ],
)
def test_each_branch_has_ranks_of_its_own_where_it_fits(asked: Wish, branches: int, groups: int) -> None:
    assert asked.groups(branches, caches=branches) == [groups]


def test_groups_for_branches_that_are_not_there_are_refused() -> None:
    with pytest.raises(SplitError, match="cfg: expected 1, for no guidance; got 2"):
        Wish(4, cfg=2).groups(1, caches=1)
    with pytest.raises(SplitError, match="cfg: expected 1 or 2, for the 2 branches of guidance; got 4"):
        Wish(4, cfg=4).groups(2, caches=2)
    with pytest.raises(SplitError, match="expected numbers that divide the 4 ranks, got"):
        Wish(4, ulysses=4, cfg=2)


# ------------------------------------------------------------------------------------------ what is sent


@pytest.mark.parametrize(("kv", "heads"), [((2, 8, 11), 6), ((5, 8, 7), 5)], ids=["grouped", "uneven"])
@EVERY_WAY
def test_bytes_sent_are_those_of_the_formula(
    lab: Lab, ranks: int, layout: Any, mode: str | None, kv: Any, heads: int
) -> None:
    sent: Any = lab.run("attend_bytes", ranks, layout=layout, mode=mode, kv=kv, heads=heads, past=4)
    counted, formula = sent
    assert counted == formula
    assert (formula > 0) == (ranks > 1)


def test_gathering_tokens_sends_what_the_formula_says(lab: Lab) -> None:
    sent: Any = lab.run("unshard_bytes", 3, layout=(3, 1), tokens=7)
    counted, formula = sent
    assert counted == formula


def test_what_is_measured_is_the_same_on_every_rank(lab: Lab) -> None:
    numbers: Any = lab.run("measured", 4)
    assert all(x >= 0 for x in numbers) and all(x > 0 for x in numbers[:3])


def test_a_ring_changes_its_mode_once_as_its_cache_grows(lab: Lab) -> None:
    modes: Any = lab.run("chosen", 4, layout=(1, 4))
    assert modes[0] == "pass-kv" and modes[-1] == "pass-q"
    assert len(modes) <= 11  # one mode to a block, and both in the block that changes: its keys were fewer at first


# ------------------------------------------------------------------------------------------------ splits


@given(st.integers(1, 64), st.integers(1, 16))
def test_shares_add_up_and_differ_by_one_at_most(total: int, parts: int) -> None:
    got = shares(total, parts)
    assert sum(got) == total and len(got) == parts and max(got) - min(got) <= 1


@given(st.integers(1, 12), st.integers(1, 6), st.integers(1, 12))
def test_every_query_head_is_on_one_rank_beside_the_keys_it_reads(kv_heads: int, group: int, ranks: int) -> None:
    heads = kv_heads * group
    if heads < ranks:
        with pytest.raises(SplitError, match=f"at most {heads} ranks for {heads} heads, got {ranks}"):
            q_head_spans(heads, kv_heads, ranks)
        return
    queries, keys = q_head_spans(heads, kv_heads, ranks), kv_head_spans(kv_heads, ranks)
    assert [head for span in queries for head in span] == list(range(heads))
    for q, k in zip(queries, keys, strict=True):
        assert len(q) > 0 and len(q) % len(k) == 0
        local = len(q) // len(k)
        assert [head // group for head in q] == [k[i // local] for i in range(len(q))]


@given(st.integers(1, 8), st.integers(8, 40), st.integers(1, 8))
def test_what_ranks_keep_of_a_page_adds_up_to_the_page(ranks: int, tokens: int, kv_heads: int) -> None:
    whole = KVGeometry(3, kv_heads, 8, tokens)
    for layout in layouts(ranks):
        kept = [PageFormat(Split(layout, rank, whole).local_kv).page_bytes for rank in range(ranks)]
        assert sum(kept) * kv_heads == PageFormat(whole).page_bytes * max(kv_heads, layout.ulysses)


def test_grids_that_cannot_be_are_refused_by_name() -> None:
    with pytest.raises(SplitError, match="at most 3, a latent frame's tokens; got ulysses=2 ring=2"):
        Split(Layout(2, 2), 0, KVGeometry(1, 2, 8, 3))
    with pytest.raises(SplitError, match="at least 1 x 1 ranks, got 0 x 2"):
        Layout(0, 2)
