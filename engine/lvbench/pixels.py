"""Sharpness and colour of single pictures, in numpy alone: two numbers, each blind to what the other sees.

Sharpness is a ratio of two gradient energies, so gain, contrast and colour cancel; colour is read after averaging
over large squares, so blur hardly reaches it. Knows nothing of time.
"""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Pixels = NDArray[np.uint8]

ROUNDING_VARIANCE = 1.0 / 12.0  # of an 8-bit sample
LAPLACIAN_NOISE = 0.40625 * ROUNDING_VARIANCE  # the squared taps of binomial and Laplacian together, times that
NOISE_SHARPNESS = 2.1805  # what sharpness() reads on white noise, the most there is
COLOUR_CELLS = 24  # squares along the shorter side over which colour is averaged
HALF_CHROMA = 30.0  # the chroma spread, in 8-bit steps, that earns half of the marks for colour
HALF_CONTRAST = 16.0  # the same for the spread of brightness
HALF_CAST = 48.0  # the mean chroma that loses half


def luma_of(rgb: Pixels) -> Floats:
    """BT.601 luma of (..., 3) RGB, 0..255, as float32 (...)."""
    weights = np.array([0.299, 0.587, 0.114], dtype=np.float32)
    return np.asarray(rgb.astype(np.float32) @ weights, dtype=np.float32)


def sharpness(luma: Pixels | Floats) -> float:
    """Laplacian energy over Tenengrad energy, square root: 0 for a flat or fully blurred picture (H, W), towards
    `NOISE_SHARPNESS` for noise.

    The ratio is the mean squared spatial frequency of the gradient field: contrast and brightness cancel. A 3 x 3
    binomial comes first, or the noise a codec adds would hide a blur. The share that rounding to 8 bits adds to the
    Laplacian is taken off, and half a grey level of gradient is added below, so that flat pictures read 0.
    """
    if min(luma.shape) < 5:
        return 0.0
    rough = luma.astype(np.float32)
    lines = rough[:-2] + 2.0 * rough[1:-1] + rough[2:]
    p = (lines[:, :-2] + 2.0 * lines[:, 1:-1] + lines[:, 2:]) / 16.0
    laplacian = p[:-2, 1:-1] + p[2:, 1:-1] + p[1:-1, :-2] + p[1:-1, 2:] - 4.0 * p[1:-1, 1:-1]
    smooth_y = p[:-2] + 2.0 * p[1:-1] + p[2:]
    smooth_x = p[:, :-2] + 2.0 * p[:, 1:-1] + p[:, 2:]
    tenengrad = (_energy(smooth_y[:, 2:] - smooth_y[:, :-2]) + _energy(smooth_x[2:] - smooth_x[:-2])) / 64.0
    excess = max(0.0, _energy(laplacian) - LAPLACIAN_NOISE)
    return float(np.sqrt(excess / (tenengrad + 0.25)))


def colour_quality(rgb: Pixels) -> float:
    """Marks in 0..1 for colour and contrast of one picture (H, W, 3): richness x neutrality x contrast x exposure.

    Richness is the spread of chroma about its mean (grey pictures have none), neutrality falls as the mean chroma
    leaves grey (a cast), contrast is the spread of brightness, exposure falls towards black and white. Chroma is read
    in the opponent axes R - G and (R + G) / 2 - B of Hasler and Suesstrunk's colourfulness.
    """
    cells = box_mean(rgb.astype(np.float32), COLOUR_CELLS)  # (h, w, 3)
    red, green, blue = cells[..., 0], cells[..., 1], cells[..., 2]
    red_green, yellow_blue = red - green, 0.5 * (red + green) - blue
    spread = float(np.hypot(red_green.std(), yellow_blue.std()))
    cast = float(np.hypot(red_green.mean(), yellow_blue.mean()))
    brightness = 0.299 * red + 0.587 * green + 0.114 * blue
    contrast = float(brightness.std())
    exposure = 1.0 - (abs(float(brightness.mean()) - 127.5) / 127.5) ** 2
    neutrality = 1.0 / (1.0 + (cast / HALF_CAST) ** 2)
    return (spread / (spread + HALF_CHROMA)) * neutrality * (contrast / (contrast + HALF_CONTRAST)) * exposure


def box_mean(picture: Floats, cells: int) -> Floats:
    """Averages (H, W) or (H, W, C) over squares, about `cells` of them along the shorter side; a rest at the border
    is left out.
    """
    height, width = picture.shape[:2]
    side = max(1, min(height, width) // cells)
    rows, columns = height // side, width // side
    cut = picture[: rows * side, : columns * side]
    means = cut.reshape(rows, side, columns, side, *picture.shape[2:]).mean(axis=(1, 3))
    return np.asarray(means, dtype=np.float32)


def _energy(values: Floats) -> float:
    return float(np.mean(np.square(values), dtype=np.float64))
