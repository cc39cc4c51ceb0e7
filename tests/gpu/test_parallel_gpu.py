"""Partial attention on a GPU: the flash kernel's log-sum-exp merges to what one product gives."""

from __future__ import annotations

import pytest
import torch

from engine.layers.attention import merge, reference, with_lse

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float32, 1e-4)])
def test_partial_results_merge_on_a_gpu(dtype: torch.dtype, tolerance: float) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(1, n, heads, 64, device="cuda", generator=generator).to(dtype)
        for n, heads in ((96, 8), (160, 2), (160, 2))
    )
    parts = [with_lse(q, k[:, piece], v[:, piece]) for piece in (slice(0, 50), slice(50, 51), slice(51, 160))]
    assert all(lse.dtype == torch.float32 for _, lse in parts)
    torch.testing.assert_close(merge(parts).float(), reference(q, k, v).float(), rtol=0, atol=tolerance)
