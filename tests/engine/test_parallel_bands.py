"""Pictures that ranks decode together are those of one rank, and what is sent for them is what the formula says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.parallel_lab import Lab


@pytest.fixture(scope="module", params=[2, 3])
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    made = Lab.open("tests.band_cases", request.param)
    yield made
    made.close()


def test_worlds_shown_by_all_ranks_are_those_of_one_and_send_what_the_formula_says(lab: Lab) -> None:
    told: Any = lab.run("joined", lab.mesh.ranks)
    pictures, expected, latents, least, heads = told
    assert pictures == expected > 0
    assert least < latents <= least + heads


def test_a_band_that_cannot_be_made_ends_its_world_alone(lab: Lab) -> None:
    lab.run("failing", lab.mesh.ranks)
