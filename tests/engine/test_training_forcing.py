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
    coupled,
    noised,
    own_clip,
    renoised,
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
        stream = Rolling(block=2, window=1)
        for start in range(0, 6, 2):
            own = slice(start, start + 2)
            made = predict(noisy[:, copy, own], now[:, copy, own], Nothing(), stream)
            assert torch.allclose(made, packed[:, copy, own], atol=1e-5)
            stream.writing = True
            predict(clean[:, own], times[:, own], Nothing(), stream)
            stream.writing = False
            stream.commit()


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


def test_a_clip_of_its_own_is_what_a_stream_makes_and_carries_no_gradient() -> None:
    torch.manual_seed(0)
    noise, written = [torch.randn(2, 6, 12) for _ in range(2)], (torch.full((2, 6), 0.2), torch.randn(2, 6, 12))
    leaf = noise[0].requires_grad_()
    first, last = own_clip(predict, Nothing(), [leaf, noise[1]], (1.0, 0.5), written, Rolling(2, window=1))
    assert not first.requires_grad and not last.requires_grad
    context = TeacherForcing(frames=6, block=2, window=1, copies=2)
    half = torch.full((2, 6), 0.5)
    inputs = torch.stack([noise[0].detach(), renoised(first, half, noise[1])], 1)
    past = (noised(last, written[0], written[1]), written[0])
    packed = teacher_forced(predict, Nothing(), past, (inputs, torch.stack([torch.ones(2, 6), half], 1)), context)
    assert torch.allclose(packed[:, 0], first, atol=1e-5) and torch.allclose(packed[:, 1], last, atol=1e-5)


def test_renoising_carries_no_gradient() -> None:
    clean = torch.randn(1, 4, 12, requires_grad=True)
    assert not renoised(clean * 2, torch.full((1, 4), 0.5), torch.randn(1, 4, 12)).requires_grad


def test_coupled_noise_says_the_choice_and_is_as_normal_as_before() -> None:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(20_000, 3, 4, generator=generator)
    directions = torch.zeros(2, 3, 4)
    directions[0, 0, :2] = 0.5**0.5
    directions[1, 2, 3] = 1
    choice = torch.randint(0, 2, (20_000, 2), generator=generator) * 2.0 - 1
    choice[:1000] = 0
    made = coupled(noise, choice, directions)
    said = made.flatten(1) @ directions.flatten(1).T
    assert torch.equal(said[1000:].sign(), choice[1000:]) and torch.equal(made[:1000], noise[:1000])
    covariance = torch.cov(made.flatten(1).T)
    assert (covariance - torch.eye(12)).abs().max() < 0.05 and made.mean(0).abs().max() < 0.03
    assert torch.equal(made[:, 1], noise[:, 1])
