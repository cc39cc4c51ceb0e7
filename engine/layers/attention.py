"""Attention backends in one table: which exist here, which one runs, and why.

A backend takes q (B, Tq, H, D), k and v (B, Tk, Hkv, D) and returns (B, Tq, H, D); H is a multiple of Hkv. There is no
mask: what a block may see is decided by what it is handed. One that is a `PagedAttention` can be handed a pool and the
numbers of its pages instead, and nothing is gathered. Knows nothing of worlds or ranks.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.layers.flashinfer import FlashInfer

logger = logging.getLogger(__name__)

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@runtime_checkable
class PagedAttention(Protocol):
    """A backend that also reads keys and values where they lie in a pool."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...

    def paged(self, q: Tensor, k: Tensor, v: Tensor, pages: Sequence[int]) -> Tensor:
        """q (1, Tq, H, D) over these pages, in this order, of k and v (all pages, S, Hkv, D) -> (1, Tq, H, D)."""
        ...


class AttentionUnavailable(RuntimeError):
    """A backend that was asked for by name cannot run here; the message says why."""


def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(d)) v in float32, written out; what the others are compared with."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.float().repeat_interleave(group, dim=2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q.float(), k) / math.sqrt(q.shape[-1])
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).to(q.dtype)


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """torch's scaled_dot_product_attention."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1]).transpose(1, 2)


def with_lse(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Attention and its log-sum-exp (B, Tq, H) in float32: partial results over pieces of the keys can be merged."""
    group = q.shape[2] // k.shape[2]
    if group > 1:
        k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
    if q.device.type == "cpu":
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = flash(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return out.transpose(1, 2), lse.transpose(1, 2)
    if q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256:
        rows = (x.transpose(1, 2) for x in (q, k, v))
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(*rows)
        return out.transpose(1, 2), lse.transpose(1, 2)
    scores = torch.einsum("bqhd,bkhd->bqhk", q.float(), k.float()) / math.sqrt(q.shape[-1])
    out = torch.einsum("bqhk,bkhd->bqhd", scores.softmax(-1), v.float()).to(q.dtype)
    return out, scores.logsumexp(-1)


def merge(parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """One result from partial ones `(out, lse)` over disjoint sets of keys.

    out = sum_i exp(lse_i - lse) out_i with lse = log sum_i exp(lse_i).
    """
    total = torch.stack([lse for _, lse in parts]).logsumexp(0)
    return sum((out * (lse - total).exp().unsqueeze(-1) for out, lse in parts), torch.zeros(())).to(parts[0][0].dtype)


def _flash_3() -> Attention:
    from flash_attn_interface import flash_attn_func

    return lambda q, k, v: flash_attn_func(q, k, v)[0]


def _flash_2() -> Attention:
    from flash_attn import flash_attn_func

    return lambda q, k, v: flash_attn_func(q, k, v)


@dataclass(frozen=True)
class Backend:
    """A row of the table: how to get it, and on what it can run."""

    name: str
    make: Callable[[], Attention]
    cuda_only: bool = False


BACKENDS: dict[str, Backend] = {
    b.name: b
    for b in (
        Backend("flash-attn-3", _flash_3, cuda_only=True),
        Backend("flash-attn-2", _flash_2, cuda_only=True),
        Backend("flashinfer", FlashInfer, cuda_only=True),
        Backend("sdpa", lambda: sdpa),
        Backend("reference", lambda: reference),
    )
}
"""In order of preference."""


@dataclass(frozen=True)
class Choice:
    """The backend in use and the reason, as logged once in a process."""

    name: str
    attend: Attention
    reason: str


def choose(name: str = "auto", device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Choice:
    """The first backend of the table that computes a small product correctly here, or the one asked for.

    Raises AttentionUnavailable if `name` is unknown or does not work on this device.
    """
    device = torch.device(device)
    if name != "auto":
        if name not in BACKENDS:
            raise AttentionUnavailable(f"attention backend: expected one of auto, {', '.join(BACKENDS)}; got {name!r}")
        return Choice(name, _probe(BACKENDS[name], device, dtype), "asked for")
    passed_over: list[str] = []
    for backend in BACKENDS.values():
        try:
            attend = _probe(backend, device, dtype)
        except AttentionUnavailable as error:
            passed_over.append(str(error))
            continue
        choice = Choice(backend.name, attend, "; ".join(passed_over) or "first in the table")
        _announce(f"attention: {choice.name}{_sdpa_kernels(backend, device)} ({choice.reason})")
        return choice
    raise AttentionUnavailable("; ".join(passed_over))


@cache
def _announce(line: str) -> None:
    """An evaluation makes hundreds of roll-outs, and every one of them chooses."""
    logger.info(line)


def _probe(backend: Backend, device: torch.device, dtype: torch.dtype) -> Attention:
    if backend.cuda_only and device.type != "cuda":
        raise AttentionUnavailable(f"{backend.name} needs CUDA, the device is {device.type}")
    try:
        attend = backend.make()
        q, k = (torch.linspace(-1, 1, n * 2 * 64, device=device).view(1, n, 2, 64).to(dtype) for n in (8, 24))
        error = (attend(q, k, k.flip(1)).float() - reference(q, k, k.flip(1)).float()).abs().max().item()
    except (ImportError, RuntimeError, TypeError) as exception:
        raise AttentionUnavailable(f"{backend.name}: {exception}") from exception
    if isinstance(attend, PagedAttention):
        pages = attend.paged(q, k.view(3, 8, 2, 64), k.flip(1).view(3, 8, 2, 64), [2, 0, 1])
        error = max(error, (pages.float() - reference(q, k, k.flip(1)).float()).abs().max().item())
    if error > (1e-4 if dtype == torch.float32 else 2e-2):
        raise AttentionUnavailable(f"{backend.name}: differs from the reference by {error:.2g}")
    return attend


def _sdpa_kernels(backend: Backend, device: torch.device) -> str:
    if backend.name != "sdpa":
        return ""
    if device.type != "cuda":
        return " with the CPU flash kernel"
    on = [n for n in ("flash", "cudnn", "mem_efficient", "math") if getattr(torch.backends.cuda, f"{n}_sdp_enabled")()]
    return f" with {', '.join(on)}"
