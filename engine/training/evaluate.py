"""Measures weights of `tiny-world` against the exact truth, through the engine that serves them.

    for finding in evaluate(EvaluationOptions(weights)): ...

Every part is one function from a model to findings; the parts and what they mean are described in docs/model-card.md.
Needs the renderer (the `train` extra). Wall-clock numbers are of the machine and the moment.
"""

import time
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Final

import cv2
import numpy as np

from engine.decoder import Pictures
from engine.models.presets import find
from engine.models.tiny.model import TinyModel, load_from
from engine.models.tiny.planet import PLACES, TIMES, TOP_SPEED, WEATHERS
from engine.models.tiny.text import PHRASES
from engine.protocol import ActionState, PromptChange
from engine.rollout import Request, Rollout
from engine.training.endurance import measure_drift
from engine.training.options import PARTS, EvaluationOptions
from engine.training.sheets import write_sheet
from engine.training.trials import BLOCK_S, Finding, Trial, kept_livery, livery_of, memory_alone, rates_of
from engine.training.truth import HEADS, Judge, codec_of, psnr, train_judge

NAMES: Final = {place: PHRASES["place"][place][0] for place in PLACES}
"""What each place is called in the scripts below."""
SAYINGS: Final = (
    "{place} {time} {weather} {subject}",
    "show me the {place} in the {time}, {weather}, with {subject}",
    "now it is {weather} and {time} over the {place}: {subject}",
    "i want to see {subject} near a {place} during {time}; {weather} please",
)


def evaluate(options: EvaluationOptions) -> Iterator[Finding]:
    """The findings of all parts, or of those in `options.only`, in order."""
    model = load_from(options.weights)
    for name, part in MEASURES.items():
        if not options.only or name in options.only:
            yield from part(model, options)
    if options.sheet:
        draw_sheet(model, options.sheet)


# -- parts -------------------------------------------------------------------------------------------------------


def measure_quality(model: TinyModel, options: EvaluationOptions) -> Iterator[Finding]:
    """First block and steady parts, every place in four lights, from standing to walking."""
    del options
    lights = ("noon, clear sky, nobody", "night, clear sky, nobody", "day, thunderstorm", "sunset, sunny, hiker")
    scenes = [f"{place}, {light}" for light in lights for place in NAMES.values()]
    rates = [rates_of(list(_walk(model, scene, seed=i).blocks())) for i, scene in enumerate(scenes)]
    first, steady = np.mean(rates, 0)
    yield Finding("quality", "dB", {"first block": float(first), "steady": float(steady)})


def _walk(model: TinyModel, scene: str, *, seed: int = 0, kv: str = "", steps: int | None = None) -> Trial:
    """Three seconds of a scene, two of them walking."""
    walking = ((1.0, ActionState(keys=("right",))),)
    return Trial(model, (PromptChange(0, scene),), 3.0, walking, seed, kv, steps)


def measure_ablation(model: TinyModel, options: EvaluationOptions) -> Iterator[Finding]:
    """What each part of the model adds, where there is something that only the past can tell: a subject's livery."""
    del options
    lights = ("noon, clear sky", "sunset, cloudy", "dawn, clear sky", "day, rain")
    subjects = ("balloon", "car", "hiker")
    scenes = [
        f"{place}, {lights[(i + k) % 4]}, {who}"
        for i, place in enumerate(NAMES.values())
        for k, who in enumerate(subjects)
    ]
    scenes += [f"beach, {light}, sailboat" for light in lights]
    variants: dict[str, Callable[..., Trial]] = {
        "memory alone": partial(_walk, memory_alone(model), steps=1),
        "no context, 1 step": partial(_walk, model, kv="window=2", steps=1),
        **{f"context, steps: {steps}": partial(_walk, model, steps=steps) for steps in (1, 2, 3, 4)},
    }
    found: dict[str, float] = {}
    kept: dict[str, float] = {}
    for name, make in variants.items():
        clips = [list(make(scene, seed=i).blocks()) for i, scene in enumerate(scenes)]
        found[name] = float(np.mean([rates_of(clip)[1] for clip in clips]))
        kept[name] = float(np.mean([kept_livery(clip) for clip in clips]))
    yield Finding("ablation", "dB", found)
    yield Finding("livery kept", "share of blocks", kept)


def measure_attributes(model: TinyModel, options: EvaluationOptions) -> Iterator[Finding]:
    """Is what was asked for in the picture? Held-out sentences over the vocabulary, read by the judge."""
    judge, skill = _judge(model)
    numbers = np.random.default_rng(3)
    right: dict[str, list[bool]] = {name: [] for name in HEADS}
    for i in range(options.clips):
        wanted = {name: str(numbers.choice(values)) for name, values in HEADS.items()}
        if wanted["subject"] == "boat":
            wanted["place"] = "beach"
        said = {name: str(numbers.choice(PHRASES[name][value])) for name, value in wanted.items()}
        prompt = SAYINGS[i % len(SAYINGS)].format(**said)
        last = list(Trial(model, (PromptChange(0, prompt),), 2 * BLOCK_S, seed=i).blocks())[-1]
        verdict = judge.verdicts(last.pictures[-1:])[0]
        for name, value in wanted.items():
            right[name].append(getattr(verdict, name) == value)
    shares = {name: float(np.mean(hits)) for name, hits in right.items()}
    every = float(np.mean(np.all(list(right.values()), axis=0)))
    yield Finding("attributes", "share", {**shares, "all four": every, "judge on renders, all four": skill})


def measure_switches(model: TinyModel, options: EvaluationOptions) -> Iterator[Finding]:
    """Blocks from a prompt until the judge sees the new value, for changes of time and weather."""
    judge, _ = _judge(model)
    numbers = np.random.default_rng(4)
    latencies = []
    for i in range(max(8, options.clips // 5)):
        slot, values = ("time", TIMES) if i % 2 else ("weather", WEATHERS)
        old, new = (str(v) for v in numbers.choice(values, 2, replace=False))
        place = str(numbers.choice(list(NAMES.values())))
        start = PromptChange(0, f"{place}, {PHRASES[slot][old][0]}")
        change = PromptChange(1.0, PHRASES[slot][new][0], "auto")
        blocks = list(Trial(model, (start, change), 4.0, seed=i).blocks())[2:]
        seen = [getattr(judge.verdicts(b.pictures[-1:])[0], slot) == new for b in blocks]
        latencies.append(seen.index(True) + 1 if any(seen) else len(seen) + 1)
    within = {f"within {n} blocks": float(np.mean([x <= n for x in latencies])) for n in (1, 2, 3)}
    yield Finding("switch", "share", within)


def measure_actions(model: TinyModel, options: EvaluationOptions) -> Iterator[Finding]:
    """The pan that registration of the ground finds between pictures, against the pan asked for."""
    del options
    sign, speed = [], []
    for i, place in enumerate(NAMES.values()):
        for pan in (-1.0, -0.5, 0.5, 1.0):
            action = ((0.0, ActionState(values={"pan": pan})),)
            blocks = list(Trial(model, (PromptChange(0, f"{place} by day, clear"),), 2.5, action, i).blocks())
            pictures = np.concatenate([b.pictures for b in blocks[2:]])
            moved = np.median([ground_shift(pictures[k], pictures[k + 2]) / 2 for k in range(len(pictures) - 2)])
            sign.append(np.sign(moved) == np.sign(pan))
            speed.append(abs(moved - pan * TOP_SPEED) <= 0.2 * abs(pan) * TOP_SPEED)
    yield Finding("actions", "share", {"direction": float(np.mean(sign)), "speed within 20 %": float(np.mean(speed))})


def ground_shift(before: Pictures, after: Pictures) -> float:
    """Pixels by which the camera moved to the right, by matching the strip of ground in both pictures."""
    a, b = (cv2.cvtColor(p, cv2.COLOR_RGB2GRAY)[112:144].astype(np.float32) for p in (before, after))
    scores = cv2.matchTemplate(b, a[:, 24:-24], cv2.TM_CCOEFF_NORMED)[0]
    best = int(scores.argmax())
    if 0 < best < len(scores) - 1:
        left, middle, right = (float(s) for s in scores[best - 1 : best + 2])
        return 24 - (best + 0.5 * (left - right) / (left - 2 * middle + right - 1e-9))
    return float(24 - best)


def measure_return(model: TinyModel, options: EvaluationOptions) -> Iterator[Finding]:
    """Away for four seconds and back: the place found again, against the truth of then and the picture of before."""
    del options
    rates, same = [], []
    for i, place in enumerate(NAMES.values()):
        path = ((1.0, "right"), (5.0, "left"), (9.0, ""))
        actions = tuple((at, ActionState(keys=(key,) if key else ())) for at, key in path)
        scene = PromptChange(0, f"{place}, noon, clear sky, nobody")
        blocks = list(Trial(model, (scene,), 11.0, actions, i).blocks())
        first, last = blocks[1], blocks[-1]
        rates.append(last.psnr(0))
        land = slice(90, 144)
        same.append(float(psnr(last.pictures[-1:, land], np.asarray(first.pictures[-1:, land] / 255, np.float32))[0]))
    yield Finding(
        "return", "dB", {"after coming back": float(np.mean(rates)), "ground as before": float(np.mean(same))}
    )


def measure_seams(model: TinyModel, options: EvaluationOptions) -> Iterator[Finding]:
    """Does anything jump at a keyframe? Change between neighbouring pictures there, over that elsewhere."""
    del options
    ratios = []
    for i, place in enumerate(NAMES.values()):
        walking = ((0.0, ActionState(keys=("right",))),)
        blocks = list(Trial(model, (PromptChange(0, f"{place}, day, clear sky, nobody"),), 4.0, walking, i).blocks())
        made = np.concatenate([b.pictures for b in blocks]).astype(np.float32)[16:]
        true = np.concatenate([b.true(0) for b in blocks])[16:] * 255
        change = np.abs(np.diff(made, axis=0) - np.diff(true, axis=0)).mean((1, 2, 3))
        at_key = np.arange(len(change)) % 4 == 3
        ratios.append([float(change[at_key].mean()), float(change[~at_key].mean())])
    after, between = np.mean(ratios, 0)
    yield Finding("seams", "levels of 255", {"change error after a keyframe": after, "elsewhere": between})


def measure_speed(model: TinyModel, options: EvaluationOptions) -> Iterator[Finding]:
    """Wall-clock time with one denoiser thread and one decoder thread, and to the first picture after loading."""
    began = time.perf_counter()
    load_from(options.weights)
    loading = time.perf_counter() - began
    request = Request("tiny-world", (PromptChange(0, "a sunny beach with a sailboat"),), 20.0)
    began, first = time.perf_counter(), 0.0
    with Rollout(request, model, find("tiny-world")) as rollout:
        for part in rollout:
            first = first or time.perf_counter() - began
            del part
    real_time = 20.0 / (time.perf_counter() - began)
    yield Finding("speed", "x or s", {"real-time factor": real_time, "first pictures s": first, "loading s": loading})
    size = sum(path.stat().st_size for path in options.weights.glob("*.safetensors"))
    yield Finding("size", "MB", {"weights": size / 1e6})


@lru_cache(maxsize=1)
def _judge(model: TinyModel) -> tuple[Judge, float]:
    decoder = model.decoder.network
    return train_judge(codec_of(decoder.basis.detach(), decoder.mean.detach()))


def draw_sheet(model: TinyModel, path: Path) -> None:
    """Every place in four lights, and eight moments of a walk with changes, made above true."""
    scenes = [
        f"{place}, {light}"
        for place in NAMES.values()
        for light in ("noon, clear sky", "night, clear sky", "day, thunderstorm", "sunset, sunny, hiker")
    ]
    made, true = [], []
    for i, scene in enumerate(scenes):
        blocks = list(Trial(model, (PromptChange(0, scene),), 2 * BLOCK_S, seed=i).blocks())
        made.append(blocks[-1].pictures[-1].astype(np.float32) / 255)
        true.append(blocks[-1].true(livery_of(blocks))[-1])
    prompts = (
        PromptChange(0, "a sunny beach with a sailboat"),
        PromptChange(4.0, "a storm breaks out", "auto"),
        PromptChange(8.0, "night, the sky clears", "auto"),
        PromptChange(12.0, "the desert", "auto"),
    )
    walking = ((1.0, ActionState(keys=("right", "fast"))),)
    blocks = list(Trial(model, prompts, 16.0, walking).blocks())
    livery = livery_of(blocks)
    for block in blocks[1::2]:
        made.append(block.pictures[3].astype(np.float32) / 255)
        true.append(block.true(livery)[3])
    write_sheet(path, (np.stack(made), np.stack(true)))


Part = Callable[[TinyModel, EvaluationOptions], Iterator[Finding]]
MEASURES: Final[dict[str, Part]] = dict(
    zip(
        PARTS,
        (
            *(measure_speed, measure_quality, measure_ablation, measure_seams, measure_actions),
            *(measure_return, measure_attributes, measure_switches, measure_drift),
        ),
        strict=True,
    )
)
