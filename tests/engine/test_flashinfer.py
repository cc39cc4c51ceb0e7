"""FlashInfer is told the pool's pages as they lie; the library itself needs a GPU and is stood in for."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.layers.attention import PagedAttention, reference
from engine.layers.flashinfer import FlashInfer


class Wrapper:
    """What the documentation says of BatchPrefillWithPagedKVCacheWrapper, for one request, written out."""

    plans = 0

    def __init__(self, workspace: Tensor, layout: str) -> None:
        assert workspace.dtype == torch.uint8 and layout == "NHD"

    def plan(self, q_starts: Tensor, page_starts: Tensor, pages: Tensor, last: Tensor, *sizes: int, **how: Any) -> None:
        Wrapper.plans += 1
        assert {t.dtype for t in (q_starts, page_starts, pages, last)} == {torch.int32}
        assert not how["causal"] and page_starts.tolist() == [0, len(pages)]
        self.rows, self.pages, self.last, self.sizes = q_starts.tolist()[1], pages.tolist(), int(last), sizes

    def run(self, q: Tensor, planes: tuple[Tensor, Tensor]) -> Tensor:
        heads, kv_heads, dim, page_size = self.sizes
        assert q.shape == (self.rows, heads, dim) and planes[0].shape[1:] == (page_size, kv_heads, dim)
        k, v = (x[self.pages].flatten(0, 1)[: (len(self.pages) - 1) * page_size + self.last] for x in planes)
        return reference(q[None], k[None], v[None])[0]


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> FlashInfer:
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=Wrapper))
    monkeypatch.setattr(Wrapper, "plans", 0)
    return FlashInfer()


def test_pages_are_read_in_their_order_and_planned_once_for_all_layers(backend: FlashInfer) -> None:
    assert isinstance(backend, PagedAttention)
    q, k, v = torch.randn(1, 6, 4, 8), torch.randn(5, 3, 2, 8), torch.randn(5, 3, 2, 8)
    for pages in ([4, 0, 2], [4, 0, 2], [1]):
        expected = reference(q, k[pages].flatten(0, 1)[None], v[pages].flatten(0, 1)[None])
        assert torch.allclose(backend.paged(q, k, v, pages), expected, atol=1e-6)
    assert Wrapper.plans == 2


def test_without_the_library_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ImportError):
        FlashInfer()
