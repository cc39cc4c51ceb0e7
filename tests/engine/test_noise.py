"""A draw depends on its name alone."""

import torch

from engine.noise import stream


def test_a_draw_does_not_depend_on_what_was_drawn_before() -> None:
    a, b = stream(7), stream(7)
    a("initial", 0, 0, (5,))
    assert torch.equal(a("renoise", 3, 1, (2, 3)), b("renoise", 3, 1, (2, 3)))


def test_every_part_of_the_name_counts() -> None:
    draw = stream(7)
    names = [("initial", 0, 0), ("renoise", 0, 0), ("initial", 1, 0), ("initial", 0, 1), ("initial", 1, 1)]
    values = {tuple(draw(purpose, block, step, (4,)).tolist()) for purpose, block, step in names}  # type: ignore[arg-type]
    assert len(values | {tuple(stream(8)("initial", 0, 0, (4,)).tolist())}) == len(names) + 1


def test_the_stream_is_the_same_on_every_machine() -> None:
    draw = stream(7)("initial", 0, 0, (3,))
    torch.testing.assert_close(draw, torch.tensor(KNOWN), rtol=0, atol=0)


def test_draws_are_standard_normal() -> None:
    x = torch.cat([stream(1)("initial", block, 0, (4096,)) for block in range(16)])
    assert abs(float(x.mean())) < 0.02 and abs(float(x.std()) - 1) < 0.02


KNOWN = [0.7325458526611328, 2.150223970413208, 0.940597414970398]
