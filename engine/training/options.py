"""What a training run is asked for. Plain values: nothing here needs the libraries that training itself needs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

PARTS: Final = ("speed", "quality", "ablation", "seams", "actions", "return", "attributes", "switch", "drift")
"""Of the evaluation."""
STAGES: Final = ("codec", "clips", "memory", "full", "blocks", "few-step", "decoder")
SHARE: Final = {"memory": 0.12, "full": 0.04, "blocks": 0.24, "few-step": 0.30, "decoder": 0.30}
"""Share of the training time of each stage that is trained by gradient. More of it for the memory, and it learns the
clips by heart; the decoder had been short of it."""
ALIASES: Final = {"transformer": ("full", "blocks")}


@dataclass(frozen=True)
class Size:
    """What differs between a run on a CPU and one on a GPU."""

    shards: int
    memory_batch: int
    decoder_batch: int
    clip_scale: int  # times as many clips in a batch


SIZES: Final = {"cpu": Size(8, 160, 8, 1), "gpu": Size(40, 2048, 64, 32)}


@dataclass(frozen=True)
class TrainingOptions:
    """What `inferix train tiny-world` was asked for."""

    out: Path
    stage: str = "all"
    hours: float = 6.0
    seed: int = 0
    device: str = "cpu"
    preset: str = "cpu"
    steps: int | None = None  # instead of what `hours` would give; for one stage
    start: Path | None = None  # exported weights to begin with

    @property
    def size(self) -> Size:
        return SIZES[self.preset]


@dataclass(frozen=True)
class EvaluationOptions:
    weights: Path
    clips: int = 200
    minutes: float = 2.0
    only: tuple[str, ...] = ()
    sheet: Path | None = None
