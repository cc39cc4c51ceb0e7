"""Muon for matrices, AdamW for the rest, and one schedule for both.

Muon follows the orthogonalised momentum (Newton-Schulz); in float32, because bfloat16 is emulated on many CPUs.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised by four Newton-Schulz iterations (coefficients of Jordan et al. 2024)."""

    def __init__(self, parameters: Iterable[Tensor], lr: float, momentum: float = 0.95, decay: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                momentum = state["momentum"].mul_(group["momentum"]).add_(p.grad)
                update = orthogonal((p.grad + group["momentum"] * momentum).flatten(1)).view_as(p)
                size = max(1.0, p.shape[0] / p[0].numel()) ** 0.5
                p.mul_(1 - group["lr"] * group["decay"]).add_(update, alpha=-group["lr"] * size)


def orthogonal(matrix: Tensor, iterations: int = 4) -> Tensor:
    """The nearest matrix with all singular values close to one."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix / (matrix.norm() + 1e-7)
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    for _ in range(iterations):
        square = x @ x.T
        x = torch.addmm(x, torch.addmm(square, square, square, beta=b, alpha=c), x, beta=a)
    result: Tensor = x.T if tall else x
    return result


class Optimiser:
    """Muon and AdamW side by side, stepped and scheduled as one."""

    def __init__(self, matrices: Sequence[Tensor], groups: list[dict[str, Any]], muon_lr: float) -> None:
        self.parts: list[torch.optim.Optimizer] = []
        if matrices:
            self.parts.append(Muon(matrices, muon_lr))
        self.parts.append(torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=0.0))
        self.base = [group["lr"] for group in self._groups()]

    def _groups(self) -> Iterator[dict[str, Any]]:
        for part in self.parts:
            yield from part.param_groups

    def step(self, loss: Tensor, rate: float) -> None:
        """One update with every learning rate multiplied by `rate`."""
        parameters = [p for group in self._groups() for p in group["params"]]
        for p in parameters:
            p.grad = None
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for group, base in zip(self._groups(), self.base, strict=True):
            group["lr"] = base * rate
        for part in self.parts:
            part.step()

    def state_dict(self) -> list[dict[str, Any]]:
        return [part.state_dict() for part in self.parts]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        for part, state in zip(self.parts, states, strict=True):
            part.load_state_dict(state)


def rate(step: int, steps: int, warmup: int = 20, hold: float = 0.5) -> float:
    """Learning-rate factor: a short warm-up, constant for `hold` of all steps, then linear to 3 %."""
    up = min(1.0, (step + 1) / warmup)
    done = step / max(steps, 1)
    return up * (1.0 if done < hold else max(0.03, (1 - done) / (1 - hold)))
