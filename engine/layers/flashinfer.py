"""FlashInfer: attention over keys and values where they lie, page by page, or in one piece.

Its page table is the engine's pool as it is: planes of (pages, tokens, heads, head_dim), its layout NHD, a latent frame
to a page. A plan says which pages a call reads; it is made once for a block and used by all layers and steps that read
the same ones. Source of the interface: the FlashInfer documentation, BatchPrefillWithPagedKVCacheWrapper.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

WORKSPACE_BYTES = 128 * 1024 * 1024  # what its documentation asks for


class FlashInfer:
    """A `PagedAttention`. Making one raises ImportError where FlashInfer is not installed."""

    def __init__(self) -> None:
        import flashinfer

        self._library: Any = flashinfer
        self._wrapper: Any = None
        self._planned: tuple[object, ...] = ()

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        single = self._library.single_prefill_with_kv_cache
        return torch.stack([single(*row) for row in zip(q, k, v, strict=True)])

    def paged(self, q: Tensor, k: Tensor, v: Tensor, pages: Sequence[int]) -> Tensor:
        self._plan(q, k, tuple(pages))
        out: Tensor = self._wrapper.run(q[0], (k, v))
        return out[None]

    def _plan(self, q: Tensor, k: Tensor, pages: tuple[int, ...]) -> None:
        wanted = (pages, q.shape, k.shape, q.dtype, q.device)
        if wanted == self._planned:
            return
        if self._wrapper is None:
            workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)
            self._wrapper = self._library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        _, tokens, kv_heads, dim = k.shape
        self._wrapper.plan(
            _starts(q.shape[1], q.device),
            _starts(len(pages), q.device),
            torch.tensor(pages, dtype=torch.int32, device=q.device),
            torch.tensor([tokens], dtype=torch.int32, device=q.device),  # of the last page: it is full, as all are
            q.shape[2],
            kv_heads,
            dim,
            tokens,
            causal=False,
            q_data_type=q.dtype,
        )
        self._planned = wanted


def _starts(length: int, device: torch.device) -> Tensor:
    """Where the one request of a batch begins and ends."""
    return torch.tensor([0, length], dtype=torch.int32, device=device)
