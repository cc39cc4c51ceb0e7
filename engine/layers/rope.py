"""Rotary position embedding over frame, row and column, in interleaved complex pairs.

Angles are made in float64 from the positions themselves, so there is no table to exhaust; the rotation runs in float32,
which differs from float64 by one rounding. Knows no cache: whoever calls says at which latent frames the tokens are.
"""

from __future__ import annotations

import torch
from torch import Tensor


def axis_pairs(head_dim: int) -> tuple[int, int, int]:
    """How many complex pairs of a head encode frame, row and column; what 3 leaves over is the frame's."""
    third = head_dim // 2 // 3
    return head_dim // 2 - 2 * third, third, third


def spectrum(pairs: int, device: torch.device | None = None) -> Tensor:
    """theta_j = 10000^(-j / pairs): (pairs,) float64."""
    return 10000.0 ** (-torch.arange(pairs, dtype=torch.float64, device=device) / pairs)


def angles(positions: Tensor, pairs: int) -> Tensor:
    """(N,) positions -> (N, pairs) float64 angles of one axis."""
    return positions.to(torch.float64)[:, None] * spectrum(pairs, positions.device)


class Rope3D:
    """Rotates queries and keys of a grid of `rows` x `columns` tokens per latent frame.

    The angles of one set of positions serve every layer: they are made when the positions tensor changes, not per call.
    """

    def __init__(self, head_dim: int, rows: int, columns: int) -> None:
        self.tokens = rows * columns
        self._pairs = axis_pairs(head_dim)
        self._grid = (rows, columns)
        self._tables: list[tuple[Tensor, Tensor]] = []  # (positions, (F, S, 1, head_dim / 2) complex64), newest last

    def __call__(self, x: Tensor, positions: Tensor, share: Tensor | None = None) -> Tensor:
        """x: (B, F, S, heads, head_dim), positions: (F,) latent-frame indices -> the same shape and dtype.

        Where a rank holds only some of a frame's tokens, `share` (S',) says which.
        """
        table = self.table(positions, x.device)
        if x.shape[2] != self.tokens:
            if share is None or x.shape[2] != len(share):
                raise ValueError(f"rotary embedding: expected {self.tokens} tokens per latent frame, got {x.shape[2]}")
            table = table[:, share]
        return rotate(x, table)

    def table(self, positions: Tensor, device: torch.device) -> Tensor:
        """(F,) -> (F, S, 1, head_dim / 2) unit complex numbers on `device`."""
        for known, table in self._tables:
            if known is positions and table.device == device:
                break
        else:
            table = self._make(positions.to(device))
        others = [row for row in self._tables if row[0] is not positions]
        self._tables = [*others[-1:], (positions, table)]  # queries and keys may have different positions
        return table

    def _make(self, positions: Tensor) -> Tensor:
        device, (rows, columns) = positions.device, self._grid
        frame, row, column = (
            angles(p, n)
            for p, n in zip(
                (positions, torch.arange(rows, device=device), torch.arange(columns, device=device)),
                self._pairs,
                strict=True,
            )
        )
        shape = (len(positions), rows, columns)
        joined = torch.cat(
            (
                frame[:, None, None].expand(*shape, -1),
                row[None, :, None].expand(*shape, -1),
                column[None, None].expand(*shape, -1),
            ),
            dim=-1,
        ).flatten(1, 2)
        return torch.complex(joined.cos().float(), joined.sin().float())[:, :, None]


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Multiply the pairs (2j, 2j + 1) of x (…, d) by the complex numbers of `table` (…, d / 2), broadcast."""
    pairs = x.float().contiguous().view(*x.shape[:-1], -1, 2)
    if x.device.type == "cpu":  # one pass; accelerators fuse the real form below instead
        return torch.view_as_real(torch.view_as_complex(pairs) * table).flatten(-2).to(x.dtype)
    real, imaginary = pairs.unbind(-1)
    cos, sin = table.real, table.imag
    return torch.stack((real * cos - imaginary * sin, real * sin + imaginary * cos), dim=-1).flatten(-2).to(x.dtype)
