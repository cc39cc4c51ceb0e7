"""Sample sheets: what a model made above what was true, as one PNG. Knows nothing of models."""

from pathlib import Path
from typing import TypeAlias

import cv2
import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[np.float32]


def write_sheet(path: Path, made_and_true: tuple[Array, Array], columns: int = 8) -> None:
    """Two lists of pictures (N, H, W, 3) in [0, 1]: each row of made ones stands above its row of true ones."""
    made, true = (np.clip(pictures, 0, 1) for pictures in made_and_true)
    rows = []
    for start in range(0, len(made) - columns + 1, columns):
        rows += [np.concatenate(list(p[start : start + columns]), 1) for p in (made, true)]
    sheet = (np.concatenate(rows, 0) * 255 + 0.5).astype(np.uint8)
    cv2.imwrite(str(path), np.ascontiguousarray(sheet[..., ::-1]))
