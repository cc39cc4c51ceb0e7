"""The reusable pieces that turn a clip model into a block model, proven on a model of a few numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.models import Context
from engine.training.forcing import (
    Rolling,
    TeacherForcing,
    Whole,
    noised,
    own_guess,
    renoised,
    roll_block,
    teacher_forced,
)


@dataclass(frozen=True)
class Nothing:
    """Given to a model that is told nothing."""

    def pick(self, frames: Tensor) -> Nothing:
        return self


def predict(x: Tensor, t: Tensor, given: Nothing, context: Context) -> Tensor:
    """One attention layer over tokens of size 4: latents are (B, F, S * 4)."""
    tokens = x.reshape(*x.shape[:2], -1, 1, 4) + t[..., None, None, None]

    def turn(h: Tensor, frames: Tensor) -> Tensor:
        return h * (1 + 0.1 * frames[None, :, None, None, None])

    return context.attend(0, tokens, tokens * 0.5, tokens * 2, turn).flatten(2)


def test_a_packed_pass_sees_what_a_stream_sees() -> None:
    torch.manual_seed(0)
    clean, noisy = torch.randn(2, 6, 12), torch.randn(2, 3, 6, 12)
    times, now = torch.rand(2, 6), torch.rand(2, 3, 6)
    context = TeacherForcing(frames=6, block=2, window=1, copies=3)
    packed = teacher_forced(predict, Nothing(), (clean, times), (noisy, now), context)
    for copy in range(3):
        stream = Rolling(window=1)
        for start in range(0, 6, 2):
            own = slice(start, start + 2)
            made = predict(noisy[:, copy, own], now[:, copy, own], Nothing(), stream)
            assert torch.allclose(made, packed[:, copy, own], atol=1e-5)
            stream.writing = True
            predict(clean[:, own], times[:, own], Nothing(), stream)
            stream.writing = False
            stream.commit(2)


def test_no_block_sees_the_future() -> None:
    torch.manual_seed(0)
    clean, noisy = torch.randn(1, 6, 12), torch.randn(1, 1, 6, 12)
    times, now = torch.zeros(1, 6), torch.ones(1, 1, 6)
    context = TeacherForcing(frames=6, block=2, window=2, copies=1)
    before = teacher_forced(predict, Nothing(), (clean, times), (noisy, now), context)
    changed_clean, changed_noisy = clean.clone(), noisy.clone()
    changed_clean[:, 2:] += 1
    changed_noisy[:, :, 4:] += 1
    after = teacher_forced(predict, Nothing(), (changed_clean, times), (changed_noisy, now), context)
    assert torch.equal(before[:, :, :4], after[:, :, :4])
    assert not torch.allclose(before[:, :, 4:], after[:, :, 4:])


def test_full_context_sees_everything() -> None:
    x = torch.randn(1, 4, 12)
    changed = x.clone()
    changed[:, 3] += 1
    zero = torch.zeros(1, 4)
    assert not torch.allclose(
        predict(x, zero, Nothing(), Whole())[:, 0], predict(changed, zero, Nothing(), Whole())[:, 0]
    )


def test_noise_mixes_along_a_straight_line() -> None:
    clean, noise = torch.randn(2, 3, 5), torch.randn(2, 3, 5)
    assert torch.equal(noised(clean, torch.zeros(2, 3), noise), clean)
    assert torch.equal(noised(clean, torch.ones(2, 3), noise), noise)
    assert torch.allclose(noised(clean, torch.full((2, 3), 0.5), noise), (clean + noise) / 2)


def test_own_guesses_and_their_renoising_carry_no_gradient() -> None:
    clean = torch.randn(1, 4, 12, requires_grad=True)
    guess = own_guess(predict, Nothing(), clean, (torch.ones(1, 4), torch.randn(1, 4, 12)), 2, 1)
    assert guess.shape == clean.shape and not guess.requires_grad
    assert not renoised(clean * 2, torch.full((1, 4), 0.5), torch.randn(1, 4, 12)).requires_grad


def test_a_rolled_block_is_part_of_the_next_ones_past() -> None:
    torch.manual_seed(0)
    stream, noise = Rolling(window=2), [torch.randn(1, 2, 12) for _ in range(2)]
    alone = roll_block(predict, Nothing(), Rolling(window=2), noise, (1.0, 0.5))
    first = roll_block(predict, Nothing(), stream, noise, (1.0, 0.5))
    second = roll_block(predict, Nothing(), stream, noise, (1.0, 0.5))
    assert torch.equal(alone, first)
    assert not torch.allclose(first, second)
    assert stream.start == 4 and len(stream.past) == 2
