"""Each classic measure answers to its own fault and not to the others."""

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.lvbench.faults import FAULTS, Fault
from engine.lvbench.matrix import OWN_FAULT, response
from engine.lvbench.measures import DIMENSIONS, Dimension

Drifts = NDArray[np.float64]
PARTS, FRAMES = 3, 90


@pytest.fixture(scope="module")
def matrix() -> dict[Fault, Drifts]:
    return {fault: response(fault, FRAMES, PARTS) for fault in FAULTS if fault != "cast"}


@pytest.mark.parametrize("dimension", DIMENSIONS)
def test_a_fault_shows_most_in_its_own_dimension(matrix: dict[Fault, Drifts], dimension: Dimension) -> None:
    own = DIMENSIONS.index(dimension)
    row = matrix[OWN_FAULT[dimension]]
    assert row[own] > 2.0 * np.delete(row, own).max(), row


@pytest.mark.parametrize("dimension", DIMENSIONS)
def test_a_dimension_answers_most_to_its_own_fault(matrix: dict[Fault, Drifts], dimension: Dimension) -> None:
    own = DIMENSIONS.index(dimension)
    others = [row[own] for fault, row in matrix.items() if fault != OWN_FAULT[dimension]]
    assert matrix[OWN_FAULT[dimension]][own] > 3.0 * max(others), others


def test_a_clean_clip_does_not_drift(matrix: dict[Fault, Drifts]) -> None:
    assert matrix["none"].max() < 0.06
