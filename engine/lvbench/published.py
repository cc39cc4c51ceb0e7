"""The published measures: VBench's five quality dimensions, on each part and on the whole video.

clarity: MUSIQ (SPAQ) / 100 · motion: 1 - |frame - AMT-S interpolation of its neighbours| / 255, every second frame ·
aesthetic: LAION head on CLIP ViT-L/14, / 10 · background: CLIP ViT-B/32 · subject: DINO ViT-B/16, both as the mean
cosine to the first and to the previous sample. A part's consistency is that of the part by itself, as if it were a
video of its own.

Pictures are read at up to 480 lines and about 16 a part, so numbers can differ in the third digit from tools that
read every full frame. The formulas are here; the networks come through `networks.py` as five functions, and this file
knows nothing of where from.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.lvbench.measures import MeasureSet, PartMeans, Scores
from engine.lvbench.networks import Networks, Vector, load_networks
from engine.lvbench.pixels import Pixels
from engine.lvbench.video import VideoFrame


class PublishedMeasures:
    """`Measures` as published; see the module's docstring."""

    name: MeasureSet = "published"

    def __init__(self, parts: int, networks: Networks) -> None:
        self._networks = networks
        self._clarity, self._aesthetic, self._motion = PartMeans(parts), PartMeans(parts), PartMeans(parts)
        self._background, self._subject = ConsistencyTrack(parts), ConsistencyTrack(parts)
        self._before: Pixels | None = None
        self._middle: tuple[int, Pixels] | None = None

    def observe(self, part: int, frame: VideoFrame, *, sampled: bool) -> None:
        picture = frame.picture()
        self._judge_motion(part, frame.index, picture)
        if sampled:
            self._clarity.add(part, self._networks.musiq(picture) / 100.0)
            self._aesthetic.add(part, self._networks.laion(picture) / 10.0)
            self._background.add(part, self._networks.clip(picture))
            self._subject.add(part, self._networks.dino(picture))

    def finish(self) -> Scores:
        return Scores(
            curves={
                "clarity": self._clarity.curve(),
                "motion": self._motion.curve(),
                "aesthetic": self._aesthetic.curve(),
                "background": self._background.curve(),
                "subject": self._subject.curve(),
            },
            vbench={
                "subject_consistency": self._subject.whole(),
                "background_consistency": self._background.whole(),
                "motion_smoothness": self._motion.mean(),
                "aesthetic_quality": self._aesthetic.mean(),
                "imaging_quality": self._clarity.mean(),
            },
        )

    def _judge_motion(self, part: int, index: int, picture: Pixels) -> None:
        """Odd frames are kept as middles; each even one closes a triple."""
        if index % 2 == 1:
            self._middle = (part, picture)
            return
        if self._before is not None and self._middle is not None:
            middle_part, middle = self._middle
            guess = self._networks.interpolate(self._before, picture)
            error = np.abs(guess.astype(np.float32) - middle.astype(np.float32)).mean()
            self._motion.add(middle_part, 1.0 - float(error) / 255.0)
        self._before, self._middle = picture, None


class ConsistencyTrack:
    """VBench's consistency of feature vectors, of each part by itself and of the whole; holds four vectors."""

    def __init__(self, parts: int) -> None:
        self._parts, self._whole = PartMeans(parts), PartMeans(1)
        self._part = -1
        self._first: Vector | None = None
        self._previous: Vector | None = None
        self._part_first: Vector | None = None
        self._part_previous: Vector | None = None

    def add(self, part: int, vector: Vector) -> None:
        unit = np.asarray(vector / max(1e-12, float(np.linalg.norm(vector))), dtype=np.float32)
        if self._first is None or self._previous is None:
            self._first = unit
        else:
            self._whole.add(0, _consistency(unit, self._first, self._previous))
        if part != self._part or self._part_first is None or self._part_previous is None:
            self._part, self._part_first = part, unit
        else:
            self._parts.add(part, _consistency(unit, self._part_first, self._part_previous))
        self._previous = self._part_previous = unit

    def curve(self) -> NDArray[np.float64]:
        return self._parts.curve()

    def whole(self) -> float:
        return self._whole.mean()


def create(parts: int, weights_dir: Path | None) -> PublishedMeasures:
    """The measures with the real networks. Raises `MeasuresUnavailable`."""
    return PublishedMeasures(parts, load_networks(weights_dir))


def _consistency(unit: Vector, first: Vector, previous: Vector) -> float:
    return 0.5 * (max(0.0, float(unit @ first)) + max(0.0, float(unit @ previous)))
