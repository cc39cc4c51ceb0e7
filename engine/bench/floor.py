"""The floor under a step: its own matrix products, convolutions and attention, run alone on tensors of the same shapes.

    ops = record(lambda: model.forward(...))     # which products the step is made of
    floor_s = seconds(ops)                       # how fast this machine does just those

A step can take no less. What it takes beyond the floor is norms, activations, copies, Python. The floor has a tensor
for each that the step has, so the weights of every layer come from memory in both.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# by the names that reach a dispatch mode: whole operations without autograd, their parts with it
PRODUCTS = (
    "linear",
    "matmul",
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "einsum",
    "conv",
    "scaled_dot_product_attention",
    "_scaled_dot",
)


@dataclass(frozen=True)
class Op:
    """One product: which kernel, on what."""

    name: str
    function: Callable[..., object]
    arguments: tuple[object, ...]  # tensors replaced by Shape
    options: tuple[tuple[str, object], ...]


@dataclass(frozen=True)
class Shape:
    """A tensor by its layout and where it lay: the same tensor in two products is one, another layer's is another."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    place: int = 0

    @classmethod
    def of(cls, tensor: Tensor) -> Shape:
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device, tensor.data_ptr())

    def make(self) -> Tensor:
        own = [1 if step == 0 else count for count, step in zip(self.size, self.stride, strict=True)]  # not expanded
        made = torch.empty_strided(own, self.stride, dtype=self.dtype, device=self.device)
        return (made.normal_() if self.dtype.is_floating_point else made.zero_()).expand(self.size)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[Op] = []

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name.startswith(PRODUCTS):
            shapes = tuple(_shaped(a) for a in args)
            self.ops.append(Op(name, func, shapes, tuple((k, _shaped(v)) for k, v in kwargs.items())))
        return func(*args, **kwargs)


def record(run: Callable[[], object]) -> list[Op]:
    """The products that `run` is made of, in order."""
    recorder = _Recorder()
    with recorder:
        run()
    return recorder.ops


class Floor:
    """Products ready to be timed, their inputs made once."""

    def __init__(self, ops: list[Op]) -> None:
        self.kinds = Counter(op.name for op in ops)
        made: dict[Shape, Tensor] = {}
        self._runs = [_prepared(op, made) for op in ops]

    @torch.inference_mode()
    def seconds(self, clock: Callable[[], float] = time.perf_counter) -> float:
        """Time of all products, once."""
        began = clock()
        for run in self._runs:
            run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return clock() - began


def _prepared(op: Op, made: dict[Shape, Tensor]) -> Callable[[], object]:
    def filled(value: object) -> object:
        if isinstance(value, Shape) and value not in made:
            made[value] = value.make()
        return made[value] if isinstance(value, Shape) else value

    arguments, options = [filled(a) for a in op.arguments], {k: filled(v) for k, v in op.options}
    return lambda: op.function(*arguments, **options)


def _shaped(value: Any) -> Any:
    if isinstance(value, Tensor):
        return Shape.of(value)
    return tuple(value) if isinstance(value, list) else value
