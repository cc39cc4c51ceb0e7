"""What the cost model counts with, measured at start in under a second: the links between ranks, and attention.

Every rank measures at the same time, as it will be in use, and all go by the slowest one's times: the numbers are the
same everywhere, so that choices are too. Knows no world.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch
from torch import Tensor

from engine.layers.attention import merge, with_lse
from engine.parallel.choose import UNMEASURED, Machine
from engine.parallel.mesh import Axis, Mesh, Pending, as_bytes

BUDGET_S = 0.1  # for each of the measurements
REPEATS = 5
LEAST_BYTES, LARGEST_BYTES = 1 << 17, 1 << 24
QUERIES = 256
MOST_KEYS = 1 << 15


def measure(mesh: Mesh, heads: int, head_dim: int, dtype: torch.dtype = torch.float32) -> Machine:
    """The machine under this mesh, for attention of these heads. All ranks call it together."""
    axis, device = mesh.everyone, mesh.device
    if axis.size == 1:
        return UNMEASURED
    small = torch.zeros(8, dtype=torch.uint8, device=device)
    large = torch.zeros(_affordable(axis, device), dtype=torch.uint8, device=device)
    latency_s = _agreed(axis, lambda: _shift(axis, small).wait())
    transfer_s = _agreed(axis, lambda: _shift(axis, large).wait())
    collective_s, together_s = (_agreed(axis, functools.partial(_all_to_all, axis, data)) for data in (small, large))
    sizes = QUERIES, _keys(heads * head_dim, device)
    q, k = (torch.zeros(1, n, heads, head_dim, dtype=dtype, device=device) for n in sizes)
    call_s = _agreed(axis, lambda: with_lse(q[:, :1], k[:, :1], k[:, :1]))
    product_s = _agreed(axis, lambda: with_lse(q, k, k))
    part = k[:, : max(1, int(k.shape[1] * min(1.0, transfer_s / (2 * product_s))))]  # hidden by the transfer
    part_s = _agreed(axis, lambda: with_lse(q, part, part))
    both_s = _agreed(axis, lambda: _overlapped(axis, large, q, part))
    parts = [with_lse(q, k[:, :8], k[:, :8])] * 2
    merge_s = _agreed(axis, lambda: merge(parts))
    flops = 4 * q.shape[1] * k.shape[1] * heads * head_dim
    return Machine(
        latency_s=latency_s,
        bandwidth=len(large) / max(transfer_s - latency_s, 1e-9),
        collective_s=collective_s,
        collective_bandwidth=len(large) * (axis.size - 1) / axis.size / max(together_s - collective_s, 1e-9),
        attention_rate=flops / max(product_s - call_s, 1e-9),
        call_s=call_s,
        merge_rate=4 * q.numel() * q.element_size() / merge_s,
        overlap=min(1.0, max(0.0, (part_s + transfer_s - both_s) / part_s)),
    )


def _affordable(axis: Axis, device: torch.device) -> int:
    """The largest power of two bytes of which a few go through in the time there is; enough to show a slow link."""
    size = LEAST_BYTES
    while size < LARGEST_BYTES:
        data = torch.zeros(size, dtype=torch.uint8, device=device)
        if _agreed(axis, lambda data=data: _shift(axis, data).wait(), repeats=2) * REPEATS * 2 > BUDGET_S:  # type: ignore[misc]
            break
        size *= 2
    return size


def _keys(width: int, device: torch.device) -> int:
    """As many keys as make a product long beside its call and short beside the budget."""
    rate = 5e13 if device.type == "cuda" else 1e10
    return max(64, min(MOST_KEYS, int(rate * BUDGET_S / REPEATS / 4) // (4 * QUERIES * width)))


def _agreed(axis: Axis, act: Callable[[], object], repeats: int = REPEATS) -> float:
    """Seconds until the slowest rank is done, in the best of some tries after a first one; known to all ranks.

    The slowest, because ranks wait for one another, and may share cores; the best, because what disturbs a try is not
    the machine.
    """
    act()
    taken = torch.zeros(repeats, dtype=torch.float64)
    for i in range(repeats):
        _settle(axis)
        began = time.perf_counter()
        act()
        _settle(axis, wait=False)
        taken[i] = time.perf_counter() - began
    mine = as_bytes(taken.to(axis.mesh.device))
    everyone = axis.gather(mine, [len(mine)] * axis.size, "probe")
    return float(torch.stack([x.view(torch.float64) for x in everyone]).amax(0).min())


def _settle(axis: Axis, *, wait: bool = True) -> None:
    """Ranks begin together; an accelerator has finished."""
    if axis.mesh.device.type == "cuda":
        torch.cuda.synchronize()
    if wait:
        axis.sum(torch.zeros(1, device=axis.mesh.device), "probe")


def _shift(axis: Axis, data: Tensor) -> Pending:
    """To the next rank, from the one before."""
    return axis.post(data, (axis.index + 1) % axis.size, (axis.index - 1) % axis.size, len(data), "probe")


def _all_to_all(axis: Axis, data: Tensor) -> None:
    """A share of `data` to each rank, as much from each."""
    sizes = [len(data) // axis.size] * axis.size
    axis.exchange(list(torch.split(data[: sum(sizes)], sizes)), sizes, "probe")


def _overlapped(axis: Axis, data: Tensor, q: Tensor, k: Tensor) -> None:
    pending = _shift(axis, data)
    with_lse(q, k, k)
    pending.wait()
