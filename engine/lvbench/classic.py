"""The five measures that need no weights: sharpness, smooth motion, colour, and the looks of background and subject.

Clarity, motion and aesthetic are marks of each part by itself; background and subject are likeness to the first part
of the video, so that a slow change is seen although neighbouring frames hardly differ. Every frame is judged as the
middle of three, one frame late.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.lvbench.appearance import (
    Descriptor,
    centre_mask,
    describe_background,
    describe_subject,
    likeness,
    mean_descriptor,
)
from engine.lvbench.measures import MeasureSet, PartMeans, Scores
from engine.lvbench.motion import MotionReader, Passage, smoothness
from engine.lvbench.pixels import NOISE_SHARPNESS, Floats, colour_quality, luma_of, sharpness
from engine.lvbench.video import VideoFrame

BRIGHTEST = 255.0
LONGEST_STANDSTILL = 8  # frames
ENOUGH = 0.5  # of the samples of every part must show the moving subject


class ClassicMeasures:
    """`Measures` without weights; see the module's docstring."""

    name: MeasureSet = "classic"

    def __init__(self, parts: int) -> None:
        self._parts = parts
        self._clarity, self._motion, self._colour = PartMeans(parts), PartMeans(parts), PartMeans(parts)
        self._residual = PartMeans(parts)
        self._background = LikenessTrack(parts)
        self._moving, self._centre = LikenessTrack(parts), LikenessTrack(parts)
        self._moving_mask: Floats | None = None
        self._subject_mask: Floats | None = None
        self._unseen = 0  # frames since a subject was last seen moving
        self._reader: MotionReader | None = None
        self._before: _Seen | None = None
        self._middle: _Seen | None = None

    def observe(self, part: int, frame: VideoFrame, *, sampled: bool) -> None:
        seen = _Seen(part, frame, sampled)
        if self._before is not None and self._middle is not None:
            self._judge(self._before, self._middle, seen)
        self._before, self._middle = self._middle, seen

    def finish(self) -> Scores:
        notes = []
        subject = self._moving
        if not subject.covers_all_parts():
            subject = self._centre
            notes.append("no subject moved on its own throughout: the middle of the picture was judged as subject")
        return Scores(
            curves={
                "clarity": self._clarity.curve(),
                "motion": smoothness(self._motion.curve()),
                "aesthetic": self._colour.curve(),
                "background": self._background.curve(),
                "subject": subject.curve(),
            },
            vbench={
                "subject_consistency": subject.consistency(),
                "background_consistency": self._background.consistency(),
                "motion_smoothness": 1.0 - self._residual.mean() / BRIGHTEST,
                "aesthetic_quality": self._colour.mean(),
                "imaging_quality": self._clarity.mean(),
            },
            notes=notes,
        )

    def _judge(self, before: "_Seen", middle: "_Seen", after: "_Seen") -> None:
        if self._reader is None:
            self._reader = MotionReader(*middle.grey.shape)
        span = after.frame.time_s - before.frame.time_s
        at = (middle.frame.time_s - before.frame.time_s) / span if span > 0 else 0.5
        passage = self._reader.read(before.grey, middle.grey, after.grey, at)
        self._motion.add(middle.part, passage.misplaced_px, passage.evidence)
        self._residual.add(middle.part, passage.residual)
        self._keep_masks(passage)
        if middle.sampled:
            self._judge_picture(middle)

    def _keep_masks(self, passage: Passage) -> None:
        """A subject that stands still for a moment, as in a stutter, is where it was."""
        self._unseen = 0 if passage.subject is not None else self._unseen + 1
        if passage.subject is not None or self._unseen > LONGEST_STANDSTILL:
            self._moving_mask, self._subject_mask = passage.moving, passage.subject

    def _judge_picture(self, seen: "_Seen") -> None:
        grey = seen.grey.astype(np.float32)
        self._clarity.add(seen.part, min(1.0, sharpness(seen.frame.luma()) / NOISE_SHARPNESS))
        self._colour.add(seen.part, colour_quality(seen.frame.small))
        hidden = self._moving_mask if self._moving_mask is not None else np.zeros_like(grey)
        self._background.add(seen.part, describe_background(grey, hidden))
        subject = describe_subject(grey, self._subject_mask) if self._subject_mask is not None else None
        self._moving.add(seen.part, subject)
        self._centre.add(seen.part, describe_subject(grey, centre_mask(*grey.shape)))


def create(parts: int, weights_dir: Path | None) -> ClassicMeasures:
    """The measures; there are no weights to look for in `weights_dir`."""
    return ClassicMeasures(parts)


class LikenessTrack:
    """Likeness of each part to the first one, and VBench's consistency (mean likeness to the first and to the
    previous sample).

    Keeps the samples of the first part and one more, whatever the video's length. A sample of the first part is
    compared with the mean of the others, so that the first part is judged as strictly as the rest.
    """

    def __init__(self, parts: int) -> None:
        self._means = PartMeans(parts)
        self._seen, self._asked = np.zeros(parts), np.zeros(parts)
        self._first_part: list[Descriptor] = []
        self._anchor: Descriptor | None = None
        self._previous: Descriptor | None = None
        self._steps = PartMeans(1)

    def add(self, part: int, descriptor: Descriptor | None) -> None:
        self._asked[part] += 1
        if descriptor is None:
            return
        self._seen[part] += 1
        if self._previous is not None:
            to_first = likeness(self._first_part[0] if self._first_part else self._previous, descriptor)
            self._steps.add(0, 0.5 * (to_first + likeness(self._previous, descriptor)))
        self._previous = descriptor
        if part == 0:
            self._first_part.append(descriptor)
        elif self._first_part:
            if self._anchor is None:
                self._anchor = mean_descriptor(self._first_part)
            self._means.add(part, likeness(self._anchor, descriptor))

    def covers_all_parts(self) -> bool:
        return bool((self._seen >= ENOUGH * self._asked).all()) and len(self._first_part) > 1

    def curve(self) -> NDArray[np.float64]:
        for index, descriptor in enumerate(self._first_part):
            others = self._first_part[:index] + self._first_part[index + 1 :]
            self._means.add(0, likeness(mean_descriptor(others), descriptor) if others else 1.0)
        return self._means.curve()

    def consistency(self) -> float:
        return self._steps.mean()


class _Seen:
    """A frame with its part and its grey small picture."""

    def __init__(self, part: int, frame: VideoFrame, sampled: bool) -> None:
        self.part, self.frame, self.sampled = part, frame, sampled
        self.grey = luma_of(frame.small).round().astype(np.uint8)
