"""Quantised pages stay inside the error and size that is stated."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kvcache.policy import parse
from engine.kvcache.pool import PageFormat, PagePool
from engine.kvcache.quant import make
from engine.layers.attention import reference
from engine.models import KVGeometry


@pytest.mark.parametrize(("store", "error", "ratio"), [("int8", 0.01, 0.53), ("int4", 0.14, 0.3), ("fp8", 0.06, 0.51)])
def test_quantised_pages_stay_inside_their_stated_error_and_size(store: str, error: float, ratio: float) -> None:
    geometry = KVGeometry(layers=1, heads=2, head_dim=64, tokens=48)
    form = PageFormat(geometry, torch.float16, parse(f"store={store}").store)
    assert form.page_bytes <= ratio * PageFormat(geometry, torch.float16).page_bytes
    pool = PagePool(form, 4)
    assert form.page_bytes * 4 == sum(p.numel() * p.element_size() for p in pool.storage.planes.values())
    q, k, v = (torch.randn(1, 4, 48, 2, 64, generator=torch.Generator().manual_seed(i)) for i in range(3))
    k[..., 5] *= 8  # keys have channels that stand out
    pool.storage.write(0, torch.arange(4), k[0], v[0])
    planes = {name: plane[0] for name, plane in pool.storage.planes.items()}
    stored_k, stored_v = (x[None].float() for x in pool.storage.read(0, planes))
    pairs = ((k, v), (stored_k, stored_v))
    exact, out = (reference(q.flatten(1, 2), a.flatten(1, 2), b.flatten(1, 2)) for a, b in pairs)
    assert (out - exact).norm() / exact.norm() < error


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(["int8", "int4", "fp8"]), st.integers(0, 10**6), st.floats(1e-2, 1e3))
def test_a_quantised_value_is_off_by_at_most_half_a_step(store: str, seed: int, size: float) -> None:
    x = torch.randn(2, 3, 2, 8, generator=torch.Generator().manual_seed(seed)) * size
    storage = make(parse(f"store={store}").store, (1, 2, 3, 2, 8), torch.float32, torch.device("cpu"), latent=False)
    storage.write(0, torch.arange(2), x, x)
    k, v = storage.read(0, {name: plane[0] for name, plane in storage.planes.items()})
    step = {"int8": 1 / 127, "int4": 2 / 15, "fp8": 1 / 8}[store]
    assert (k - x).abs().max() <= 0.56 * step * x.abs().max() + 1e-6
    assert (v - x).abs().max() <= 0.56 * step * x.abs().max() + 1e-6
