"""One video in, one verdict out: cuts it into parts, feeds a set of measures, applies the drift formula.

The parts are equal in frames. Nothing is held but the running sums and one small picture per part.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from engine.lvbench.measures import DIMENSIONS, Dimension, Measures, MeasureSet, Scores, measures
from engine.lvbench.pixels import Pixels
from engine.lvbench.vde import Drift, DriftUndefined, WeightScheme, drift, part_of, part_weights
from engine.lvbench.video import VideoFacts, VideoFrame, VideoUnusable, probe, read_frames

SAMPLES_PER_PART = 16
FRAMES_PER_PART = 3  # motion is judged on triples
MOST_PARTS = 1000

Progress = Callable[[int, int], None]  # frames done, frames in all


@dataclass(frozen=True)
class Method:
    """How videos are judged."""

    measures: MeasureSet = "classic"
    parts: int = 10
    weights: WeightScheme = "linear"
    weights_dir: Path | None = None

    def __post_init__(self) -> None:
        if self.parts > MOST_PARTS:
            raise DriftUndefined(f"parts: expected at most {MOST_PARTS}, got {self.parts}")
        part_weights(self.parts, self.weights)  # refuses what the formula does not allow


@dataclass(frozen=True)
class Verdict:
    """What was found. `drifts` has None where the formula has no value; `pictures` one small RGB picture per part."""

    facts: VideoFacts
    method: Method
    scores: Scores
    drifts: dict[Dimension, Drift | None]
    notes: list[str]
    pictures: list[Pixels] = field(repr=False)

    def to_json(self) -> dict[str, object]:
        """The object that stands in `videos` on the command line."""
        return {
            "path": self.facts.path,
            "measures": self.method.measures,
            "parts": self.method.parts,
            "weights": self.method.weights,
            "frames": self.facts.frames,
            "seconds": round(self.facts.duration_s, 3),
            "vde": {name: found.raw if found else None for name, found in self.drifts.items()},
            "vde_mean": {name: found.mean if found else None for name, found in self.drifts.items()},
            "vbench": self.scores.vbench,
            "curves": {name: curve.tolist() for name, curve in self.scores.curves.items()},
            "notes": self.notes,
        }


def judge_video(path: Path, method: Method, progress: Progress | None = None, name: str | None = None) -> Verdict:
    """Judges a file, shown as `name` where that says more. Raises `VideoUnusable`, `MeasuresUnavailable`."""
    facts = probe(path)
    if name is not None:
        facts = replace(facts, path=name)
    return judge_frames(read_frames(path), facts, method, progress)


def judge_frames(
    frames: Iterable[VideoFrame], facts: VideoFacts, method: Method, progress: Progress | None = None
) -> Verdict:
    """Judges decoded frames, `facts.frames` of them."""
    fewest = FRAMES_PER_PART * method.parts
    if facts.frames < fewest:
        raise VideoUnusable(
            f"{facts.path}: expected at least {fewest} frames for {method.parts} parts, got {facts.frames}"
        )
    judge = measures(method.measures, method.parts, method.weights_dir)
    pictures, seen = _feed(judge, frames, facts.frames, method.parts, progress)
    if len(pictures) < method.parts:
        raise VideoUnusable(f"{facts.path}: expected {facts.frames} frames as its packets say, got {seen} decoded")
    scores = judge.finish()
    notes = list(scores.notes)
    if seen != facts.frames:
        notes.append(f"{facts.frames} packets gave {seen} frames")
    drifts = {name: _drift_of(name, scores, method, notes) for name in DIMENSIONS}
    return Verdict(facts, method, scores, drifts, notes, pictures)


def worst_part(curve: np.ndarray[tuple[int], np.dtype[np.float64]]) -> int:
    """The part (0-based) furthest from the first."""
    return int(np.argmax(np.abs(curve - curve[0])))


def _feed(
    judge: Measures, frames: Iterable[VideoFrame], count: int, parts: int, progress: Progress | None
) -> tuple[list[Pixels], int]:
    pictures: list[Pixels] = []
    seen = 0
    for frame in frames:
        part = min(parts - 1, part_of(frame.index, count, parts))
        start, end = -(-part * count // parts), -(-(part + 1) * count // parts)
        inside, length = frame.index - start, end - start
        judge.observe(part, frame, sampled=is_sampled(inside, length))
        if part == len(pictures) and inside >= length // 2:
            pictures.append(frame.small.copy())
        seen += 1
        if progress is not None:
            progress(seen, count)
    return pictures, seen


def is_sampled(index: int, length: int, samples: int = SAMPLES_PER_PART) -> bool:
    """Whether frame `index` of a part of `length` is one of `samples` spread evenly over it."""
    return length <= samples or (index + 1) * samples // length > index * samples // length


def _drift_of(name: Dimension, scores: Scores, method: Method, notes: list[str]) -> Drift | None:
    try:
        return drift(scores.curves[name], method.weights)
    except DriftUndefined as error:
        notes.append(f"{name}: {error}")
        return None
