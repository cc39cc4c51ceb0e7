"""The table of attention backends: the first that computes correctly here is taken, and it is said why."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor

from engine.layers import attention
from engine.layers.attention import BACKENDS, AttentionUnavailable, Backend, choose, reference, sdpa


def wrong(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return reference(q, k, v) + 0.01


def missing() -> attention.Attention:
    raise ImportError("no module named 'quick'")


def with_table(monkeypatch: pytest.MonkeyPatch, *backends: Backend) -> None:
    monkeypatch.setattr(attention, "BACKENDS", {backend.name: backend for backend in backends})


def test_a_cpu_takes_the_kernel_of_torch_and_says_what_it_passed_over() -> None:
    choice = choose(device="cpu")
    assert (choice.name, choice.attend) == ("sdpa", sdpa)
    assert "flash-attn-3 needs CUDA, the device is cpu" in choice.reason


def test_what_is_missing_or_computes_wrongly_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with_table(monkeypatch, Backend("quick", missing), Backend("off", lambda: wrong), BACKENDS["reference"])
    choice = choose()
    assert choice.name == "reference"
    assert choice.reason == "quick: no module named 'quick'; off: differs from the reference by 0.01"


def test_where_nothing_works_every_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with_table(monkeypatch, Backend("quick", missing), Backend("off", lambda: wrong))
    with pytest.raises(AttentionUnavailable, match="no module named 'quick'; off: differs"):
        choose()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("flash", r"expected one of auto, flash-attn-3, .*; got 'flash'"),
        ("flash-attn-2", "flash-attn-2 needs CUDA, the device is cpu"),
    ],
)
def test_a_name_that_cannot_be_had_is_refused_with_the_reason(name: str, message: str) -> None:
    with pytest.raises(AttentionUnavailable, match=message):
        choose(name)


def test_a_backend_asked_for_by_name_is_the_one() -> None:
    assert choose("reference").attend is reference


@pytest.mark.parametrize("kv_heads", [2, 1])
def test_torchs_kernel_computes_what_the_plain_product_does(kv_heads: int) -> None:
    q, k, v = (torch.randn(2, n, h, 16) for n, h in ((5, 4), (9, kv_heads), (9, kv_heads)))
    torch.testing.assert_close(sdpa(q, k, v), reference(q, k, v))


def test_a_process_says_its_choice_once(caplog: pytest.LogCaptureFixture) -> None:
    attention._announce.cache_clear()
    with caplog.at_level(logging.INFO, logger="engine.layers.attention"):
        for _ in range(3):
            choose()
    assert len(caplog.messages) == 1 and caplog.messages[0].startswith("attention: sdpa with the CPU flash kernel (")
