"""Does a long world of `tiny-world` wear out? A walk that is the same in every minute, judged minute by minute.

The error is against the exact truth; LV-Bench's measures (engine/lvbench) look at what was made and, beside it, at the
truth, whose own changes from minute to minute are no drift.
"""

from collections.abc import Iterator

import numpy as np

from engine.decoder import Pictures
from engine.lvbench.faults import video_frame
from engine.lvbench.judge import is_sampled
from engine.lvbench.measures import Measures, measures
from engine.lvbench.vde import drift
from engine.models.tiny.model import TinyModel
from engine.models.tiny.planet import FPS
from engine.protocol import ActionState, PromptChange
from engine.training.options import EvaluationOptions
from engine.training.trials import BLOCK_S, Finding, Trial
from engine.training.truth import psnr


def measure_drift(model: TinyModel, options: EvaluationOptions) -> Iterator[Finding]:
    """A walk to and fro under changing light, the same in every minute: error and looks, minute by minute."""
    minutes = max(2, round(options.minutes))
    lights = ("noon, clear sky", "sunset, cloudy", "night, clear sky", "dawn, rain")
    prompts = [PromptChange(15.0 * k, lights[k % 4], "auto") for k in range(4 * minutes)]
    prompts[0] = PromptChange(0, f"beach, {lights[0]}, nobody")
    turns = [(30.0 * k, ActionState(keys=("left" if k % 2 else "right",))) for k in range(2 * minutes)]
    errors: list[list[float]] = [[] for _ in range(minutes)]
    judges = {"": measures("classic", minutes), "true ": measures("classic", minutes)}
    for k, seen in enumerate(Trial(model, tuple(prompts), 60.0 * minutes, tuple(turns)).blocks()):
        true = seen.true(0)
        errors[int(k * BLOCK_S // 60)].extend(psnr(seen.pictures, true).tolist())
        for name, pictures in (("", seen.pictures), ("true ", (true * 255 + 0.5).astype(np.uint8))):
            _look(judges[name], minutes, k * len(pictures), pictures)
    yield Finding("drift", "dB", {f"minute {m + 1}": float(np.mean(found)) for m, found in enumerate(errors)})
    for name, judge in judges.items():
        for dimension, curve in judge.finish().curves.items():
            by_minute = {f"minute {m + 1}": float(value) for m, value in enumerate(curve)}
            yield Finding(f"{name}{dimension}", "score", {**by_minute, "VDE": drift(curve).raw})


def _look(judge: Measures, minutes: int, first: int, pictures: Pictures) -> None:
    """Shows a block's pictures to a set of LV-Bench's measures, one part of which is a minute."""
    length = 60 * FPS
    for index, picture in enumerate(pictures, first):
        frame = video_frame(index, index / FPS, picture)
        judge.observe(index // length, frame, sampled=is_sampled(index % length, length))
