"""Latent pages for any model: keys and values of a token squeezed into one vector, and back, by a linear map per layer.

Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) learns the two projections with the model. Here they are
fitted to a trained model instead: the principal axes of its own keys and values, seen in a few blocks. At full rank
nothing is lost; below, what the left-out axes carried is. Knows no model and no page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Projection:
    """One layer's maps between (k, v) and a latent of R numbers."""

    down: Tensor  # (2 * heads * head_dim, R)
    mean: Tensor  # (2 * heads * head_dim,)
    heads: int

    @classmethod
    def fit(cls, k: Tensor, v: Tensor, rank: int) -> Projection:
        """From un-rotated keys and values (tokens, heads, head_dim) of a layer.

        Raises ValueError unless 1 <= rank <= 2 * heads * head_dim and there are at least `rank` tokens.
        """
        rows = torch.cat([k.flatten(1), v.flatten(1)], 1).double()
        if not 1 <= rank <= min(rows.shape):
            raise ValueError(f"rank: expected 1 to {min(rows.shape)} for {tuple(rows.shape)} samples, got {rank}")
        mean = rows.mean(0)
        axes = torch.linalg.eigh((rows - mean).T @ (rows - mean)).eigenvectors.flip(1)[:, :rank]
        return cls(axes.to(k.dtype), mean.to(k.dtype), k.shape[1])

    def squeeze(self, k: Tensor, v: Tensor) -> Tensor:
        """(B, F, S, heads, head_dim) twice -> (B, F, S, R)"""
        return (torch.cat([k.flatten(-2), v.flatten(-2)], -1) - self.mean) @ self.down

    def expand(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """(B, F, S, R) -> keys and values (B, F, S, heads, head_dim)"""
        both = (latent @ self.down.T + self.mean).reshape(*latent.shape[:-1], 2, self.heads, -1)
        k, v = both.unbind(-3)
        return k, v


def fit(keys: Sequence[Tensor], values: Sequence[Tensor], rank: int) -> tuple[Projection, ...]:
    """A projection per layer, from what each layer wrote: (tokens, heads, head_dim)."""
    return tuple(Projection.fit(k, v, rank) for k, v in zip(keys, values, strict=True))
