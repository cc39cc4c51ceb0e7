"""One training stage: a loop of steps that can be killed at any moment and goes on as if it had not been.

All randomness of a step comes from (seed, stage, step), so a checkpoint holds weights, averages, optimiser and the step
number and nothing else. Knows no stage's mathematics.
"""

import logging
import os
import time
import zlib
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from engine.training.optimiser import Optimiser, rate

logger = logging.getLogger(__name__)


@dataclass
class Chance:
    """The random numbers of one step."""

    numbers: np.random.Generator
    noise: torch.Generator
    device: str = "cpu"

    @classmethod
    def of(cls, seed: int, stage: str, step: int, device: str = "cpu") -> "Chance":
        numbers = np.random.default_rng((seed, zlib.crc32(stage.encode()), step))
        return cls(numbers, torch.Generator().manual_seed(int(numbers.integers(2**62))), device)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.noise).to(self.device)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.noise).to(self.device)


class Average:
    """A slowly following copy of a module: the weights that are evaluated and shipped."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.module = deepcopy(module).requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def follow(self, module: nn.Module, step: int) -> None:
        share = 1 - min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(list(self.module.parameters()), list(module.parameters()), share)


@dataclass(frozen=True)
class Plan:
    """How long a stage runs and how its learning rate falls."""

    stage: str
    folder: Path
    steps: int
    seed: int
    device: str = "cpu"
    hold: float = 0.5
    save_every: int = 25
    report_every: int = 25
    check_every: int = 100


class Stage:
    """Runs `loss_of(chance)` for the steps of a plan, from the last checkpoint on."""

    def __init__(self, plan: Plan, module: nn.Module, optimiser: Optimiser, *, average: float = 0.995) -> None:
        self.plan, self.module, self.optimiser = plan, module, optimiser
        self.average = Average(module, average)
        self.step = 0
        self.path = plan.folder / f"{plan.stage}.pt"
        self.log = plan.folder / "log.txt"

    def resume(self) -> bool:
        """Loads the stage's checkpoint if there is one."""
        if not self.path.exists():
            return False
        state = torch.load(self.path, weights_only=True)
        self.module.load_state_dict(state["module"])
        self.average.module.load_state_dict(state["average"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.step = state["step"]
        self.say(f"resumed at step {self.step}")
        return True

    def save(self) -> None:
        state = {
            "module": self.module.state_dict(),
            "average": self.average.module.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "step": self.step,
        }
        partial = self.path.with_suffix(f".{os.getpid()}")
        torch.save(state, partial)
        partial.replace(self.path)

    def run(
        self, losses: Callable[[Chance], dict[str, Tensor]], check: Callable[[nn.Module], str] | None = None
    ) -> nn.Module:
        """Trains to the plan's last step; returns the averaged module. `losses` gives at least the entry "loss"."""
        sums: dict[str, float] = {}
        started, first = time.monotonic(), self.step
        with _bar(self.plan) as progress:
            task = progress.add_task(self.plan.stage, total=self.plan.steps, completed=self.step)
            while self.step < self.plan.steps:
                values = losses(Chance.of(self.plan.seed, self.plan.stage, self.step, self.plan.device))
                self.optimiser.step(values["loss"], rate(self.step, self.plan.steps, hold=self.plan.hold))
                self.average.follow(self.module, self.step)
                self.step += 1
                progress.advance(task)
                for name, value in values.items():
                    sums[name] = sums.get(name, 0.0) + float(value.detach())
                if self.step % self.plan.report_every == 0:
                    pace = (time.monotonic() - started) / (self.step - first)
                    means = " ".join(f"{k} {v / self.plan.report_every:.4f}" for k, v in sums.items())
                    self.say(f"step {self.step}/{self.plan.steps} {pace:.2f} s/step {means}")
                    sums.clear()
                if self.step % self.plan.save_every == 0 or self.step == self.plan.steps:
                    self.save()
                if check and (self.step % self.plan.check_every == 0 or self.step == self.plan.steps):
                    self.say(f"step {self.step} check {check(self.average.module)}")
        return self.average.module

    def say(self, line: str) -> None:
        stamped = f"{time.strftime('%H:%M:%S')} {self.plan.stage} {line}"
        logger.info(stamped)
        with self.log.open("a") as log:
            log.write(stamped + "\n")


def _bar(plan: Plan) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, disable=not os.isatty(2))
