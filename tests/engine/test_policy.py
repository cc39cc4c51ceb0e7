"""What a policy shows, keeps and costs, in integers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.kvcache.policy import Policy, PolicyError, parse


def reference_window(start: int, n: int, window: int, sink: int) -> list[int]:
    """Append the new frames one block after another; while more than `window` remove the frame at index `sink`."""
    frames: list[int] = []
    for first in range(0, start + n, n):
        frames += range(first, first + n)
        while len(frames) > window:
            del frames[sink]
    return [f for f in frames if f < start]


@given(st.integers(1, 4), st.integers(0, 12), st.integers(0, 5), st.integers(0, 8))
def test_a_window_shows_what_shifting_would_have_kept(n: int, blocks: int, sink: int, room: int) -> None:
    window, start = sink + n + room, blocks * n
    shown = Policy(window=window, sink=sink).check(n).visible(start, n)
    assert shown == reference_window(start, n, window, sink)


policies = st.builds(
    Policy,
    window=st.none() | st.integers(0, 40),
    remember=st.none() | st.integers(0, 12),
    sink=st.integers(0, 5),
    ranges=st.lists(st.tuples(st.integers(0, 9), st.integers(10, 20)), max_size=2).map(tuple),
    frames=st.sets(st.integers(0, 30), max_size=3).map(lambda s: tuple(sorted(s))),
    topk=st.integers(0, 3),
    store=st.sampled_from(["native", "int8", "int4", "fp8"]),
    positions=st.sampled_from(["absolute", "window"]),
    offload=st.sampled_from(["none", "host"]),
)


@given(policies)
def test_the_declarative_form_says_all_of_a_policy(policy: Policy) -> None:
    assert parse(str(policy)) == policy


@given(policies, st.integers(1, 4), st.integers(0, 12))
def test_no_block_reads_more_than_is_announced_or_what_was_let_go(policy: Policy, n: int, blocks: int) -> None:
    held: set[int] = set()
    for block in range(blocks + 1):
        start = block * n
        held = set(policy.keep(held, start, n))
        shown = policy.visible(start, n)
        assert set(shown) <= held
        most, most_kept = policy.most_read(n), policy.most_kept(n)
        assert most is None or len(shown) + n <= most
        assert most_kept is None or len(held) + n <= most_kept
        held |= set(range(start, start + n))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("window=x", "cannot read 'window=x'"),
        ("windows=3", "got 'windows=3'"),
        ("window=-1", "at least 0, got -1"),
        ("range=5:3", "got 5:3"),
        ("range=5", "cannot read"),
        ("store=int3", "native, fp8, int8, int4; got int3"),
        ("frames=1,-2", "got -2"),
        ("sink", "got 'sink'"),
    ],
)
def test_a_wrong_policy_says_what_was_expected(text: str, said: str) -> None:
    with pytest.raises(PolicyError, match=said.replace("[", r"\[")):
        parse(text)


def test_a_window_too_small_for_sink_and_block_says_the_least_that_would_do() -> None:
    with pytest.raises(PolicyError, match="expected at least 7"):
        Policy(window=6, sink=4).check(3)


@pytest.mark.parametrize("kv", ["full topk=1 remember=9", "window=8 remember=9"])
def test_frames_that_nobody_reads_are_not_asked_to_be_remembered(kv: str) -> None:
    with pytest.raises(PolicyError, match=f"expected window=N and topk=N with it, got {kv}"):
        parse(kv).check(2)


def test_of_frames_out_of_sight_the_newest_are_remembered() -> None:
    policy = parse("window=4 sink=1 topk=1 remember=6")
    assert policy.keep(range(20), 20, 2) == [0, 13, 14, 15, 16, 17, 18, 19]
    assert policy.most_held(2) == policy.most_kept(2) == 10
    hosted = parse("offload=host", policy)
    assert (hosted.most_held(2), hosted.most_kept(2)) == (4, 10)
    assert parse("window=4 topk=1 offload=host").most_kept(2) is None


def test_what_is_not_said_comes_from_the_base() -> None:
    assert parse("store=int8", parse("window=9 sink=3")) == parse("window=9 sink=3 store=int8")
    assert parse("full", parse("window=9")) == Policy()


def test_a_range_costs_what_it_shows_however_long_it_is() -> None:
    policy = parse("window=4 range=0:1000000000000 range=5:7 frames=3,1000000000000")
    assert policy.chosen == [(0, 10**12 + 1)]
    assert policy.most_read(2) == 4 + 10**12 + 1
    assert policy.keep([0, 5], 8, 2) == [0, 5] and policy.visible(3, 2) == [0, 1, 2]
