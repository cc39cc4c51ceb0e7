"""The two float8 linear layers of MAGI-1's quantised checkpoints; weights stay as published.

Where the device multiplies float8 the product runs on its tensor cores; elsewhere the same rounded numbers are
multiplied in float32. Knows nothing of how the scales were found.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
FP8_CAPABILITY = (8, 9)  # compute capability from which CUDA devices multiply float8


class Fp8Linear(nn.Module):
    """Per-tensor: x is divided by `input_scale`, a constant vector over the inputs, before it is rounded."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.empty(1, outputs, inputs, dtype=FP8))
        self.register_buffer("weight_scale", torch.empty(1))
        self.register_buffer("input_scale", torch.empty(inputs))

    def quantise(self, x: Tensor) -> Tensor:
        return round_fp8(x, self.get_buffer("input_scale"))

    def forward(self, x: Tensor) -> Tensor:
        """(..., inputs) -> (..., outputs) in the dtype of x"""
        scale = self.get_buffer("input_scale")[:1]
        return multiply(self.quantise(x), self.get_buffer("weight")[0], scale, self.get_buffer("weight_scale"), x.dtype)


class SmoothFp8Linear(Fp8Linear):
    """Smoothed: x is divided channel by channel by `smooth_scale`; `input_scale` is one number."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.register_buffer("input_scale", torch.empty(1))
        self.register_buffer("smooth_scale", torch.empty(1, inputs))

    def quantise(self, x: Tensor) -> Tensor:
        return round_fp8(x, self.get_buffer("smooth_scale")[0])


def round_fp8(x: Tensor, scale: Tensor) -> Tensor:
    """x / scale in float32, clamped to what float8 holds, rounded to bfloat16 and then to float8."""
    return (x.float() / scale).clamp(-FP8_MAX, FP8_MAX).bfloat16().to(FP8)


def multiply(x: Tensor, weight: Tensor, input_scale: Tensor, weight_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """(..., inputs) x (outputs, inputs)^T in float8, times both scales."""
    if x.is_cuda and dtype == torch.bfloat16 and torch.cuda.get_device_capability(x.device) >= FP8_CAPABILITY:
        flat = x.flatten(0, -2)
        out = torch._scaled_mm(flat, weight.t(), input_scale, weight_scale, out_dtype=dtype)
        return out.view(*x.shape[:-1], -1)
    return (x.float() @ weight.float().t() * input_scale * weight_scale).to(dtype)
