"""From a diffusion model that sees a whole clip to one that makes it block by block from its own past: the pieces.

Any model that reaches its self-attention through the engine's `Context` can use them; `predict` stands for it. The
three ideas, each a function or a context:

* teacher forcing (`TeacherForcing`, `teacher_forced`): a packed forward in which noisy blocks see a clean copy of the
  blocks before them, so that one pass trains every block of a clip exactly as it will be streamed;
* noised and own context (`noised`, `own_guess`): the copy is noised, later replaced by the model's own guesses, so that
  the model learns to live with its own mistakes;
* few steps (`renoised`): the input of a later step is the model's own earlier answer with noise, as when sampling.

Knows no data, no optimiser and no model.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.models import Context, Expand, Rotate

Predict: TypeAlias = Callable[[Tensor, Tensor, Any, Context], Tensor]
"""(noisy latents (B, F, ...), times (B, F) in [0, 1], what is given about the frames, context) -> clean latents."""
Noise: TypeAlias = Callable[..., Tensor]


class Whole:
    """One rank, nothing cached: the parts of a context that are the same in all of training."""

    def shard(self, tokens: Tensor) -> Tensor:
        return tokens

    def unshard(self, tokens: Tensor) -> Tensor:
        return tokens

    def attend_latent(self, layer: int, q: Tensor, latent: Tensor, expand: Expand, rotate: Rotate | None) -> Tensor:
        k, v = expand(latent)
        return self.attend(layer, q, k, v, rotate)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rotate: Rotate | None) -> Tensor:
        """Every latent frame of the clip sees every other: the full-context model that one starts from."""
        frames = torch.arange(q.shape[1], device=q.device)
        if rotate is not None:
            q, k = rotate(q, frames), rotate(k, frames)
        return attention(q, k, v)


@dataclass(frozen=True)
class TeacherForcing(Whole):
    """Packed frames [clean copy of all blocks but the last | noisy copy 1 | ... | noisy copy n] of one clip.

    Block b of the clean copy sees clean blocks b - window .. b; block b of a noisy copy sees clean blocks
    b - window .. b - 1 and itself: what the cache will show it.
    """

    frames: int
    block: int
    window: int
    copies: int

    @property
    def context_frames(self) -> int:
        return self.frames - self.block

    def order(self) -> Tensor:
        """For each packed frame, its place in the clip."""
        clip = torch.arange(self.frames)
        return torch.cat([clip[: self.context_frames], clip.repeat(self.copies)])

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rotate: Rotate | None) -> Tensor:
        if rotate is not None:
            order = self.order().to(q.device)
            q, k = rotate(q, order), rotate(k, order)
        split = self.context_frames
        clean = (q[:, :split], k[:, :split], v[:, :split])
        noisy_q, noisy_k, noisy_v = (self._copies(x[:, split:]) for x in (q, k, v))
        clean_k, clean_v = (x.repeat_interleave(self.copies, 0) for x in clean[1:])
        clean_out, noisy_out = [], []
        for start in range(0, self.frames, self.block):
            first, end = max(0, start - self.window * self.block), start + self.block
            if end <= split:
                clean_out.append(attention(clean[0][:, start:end], clean[1][:, first:end], clean[2][:, first:end]))
            keys = torch.cat([clean_k[:, first:start], noisy_k[:, start:end]], 1)
            values = torch.cat([clean_v[:, first:start], noisy_v[:, start:end]], 1)
            noisy_out.append(attention(noisy_q[:, start:end], keys, values))
        noisy = torch.cat(noisy_out, 1).reshape(q.shape[0], self.copies * self.frames, *q.shape[2:])
        return torch.cat([*clean_out, noisy], 1)

    def _copies(self, x: Tensor) -> Tensor:
        """(B, copies * F, ...) -> (B * copies, F, ...)."""
        return x.reshape(x.shape[0] * self.copies, self.frames, *x.shape[2:])


@dataclass
class Rolling(Whole):
    """A window over a stream in its plainest form: what training and evaluation roll out with.

    While `writing`, the block's keys and values stay for the blocks to come.
    """

    window: int
    start: int = 0
    writing: bool = False
    past: list[dict[int, tuple[Tensor, Tensor]]] = field(default_factory=list)
    fresh: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rotate: Rotate | None) -> Tensor:
        frames = torch.arange(self.start, self.start + q.shape[1], device=q.device)
        if rotate is not None:
            q, k = rotate(q, frames), rotate(k, frames)
        if self.writing:
            self.fresh[layer] = (k, v)
        keys, values = ([block[layer][i] for block in self.past] for i in (0, 1))
        return attention(q, torch.cat([*keys, k], 1), torch.cat([*values, v], 1))

    def commit(self, frames: int) -> None:
        """The block that was just written becomes part of the past."""
        kept = [*self.past, self.fresh]
        self.past = kept[-self.window :] if self.window else []
        self.fresh, self.start = {}, self.start + frames


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(B, F, S, heads, head_dim) over all tokens of all given frames."""
    flat_q, flat_k, flat_v = (x.flatten(1, 2).transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(flat_q, flat_k, flat_v).transpose(1, 2).reshape(q.shape)


def expand_times(t: Tensor, latents: Tensor) -> Tensor:
    """Times (B, F, ...) with as many axes as `latents`."""
    return t.reshape(*t.shape, *(1 for _ in range(latents.dim() - t.dim())))


def noised(clean: Tensor, t: Tensor, noise: Tensor) -> Tensor:
    """(1 - t) clean + t noise; t has the leading axes of `clean`."""
    t = expand_times(t, clean)
    return (1 - t) * clean + t * noise


def teacher_forced(
    predict: Predict, given: Any, clean: tuple[Tensor, Tensor], noisy: tuple[Tensor, Tensor], context: TeacherForcing
) -> Tensor:
    """Clean latents predicted for every noisy copy, (B, copies, F, ...), from (context latents, their times).

    clean: (B, >= F - block, ...) and times; noisy: (B, copies, F, ...) and times (B, copies, F). `given` is whatever
    the model is told about the F frames; its `pick(indices)` repeats it for the packed order.
    """
    split = context.context_frames
    x = torch.cat([clean[0][:, :split], noisy[0].flatten(1, 2)], 1)
    t = torch.cat([clean[1][:, :split], noisy[1].flatten(1, 2)], 1)
    answer = predict(x, t, given.pick(context.order()), context)
    return answer[:, split:].reshape(x.shape[0], context.copies, context.frames, *x.shape[2:])


@torch.no_grad()
def own_guess(
    predict: Predict, given: Any, clean: Tensor, noised_from: tuple[Tensor, Tensor], block: int, window: int
) -> Tensor:
    """What the model itself makes of a clip in one step, each block seeing the true ones before it.

    `noised_from` is (times (B, F), noise like `clean`). At time 1 the step begins with nothing but noise, and a model
    that has many right answers gives their mean. Below 1 it begins with a little of the truth, and gives the one
    answer that the rest of the lesson is about.

    Used in place of the truth as context (against exposure bias), and as what a later step starts from. It is one
    packed pass, not a roll-out: mistakes of mistakes are left to the next training step.
    """
    frames = clean.shape[1]
    context = TeacherForcing(frames, block, window, 1)
    times, noise = noised_from
    start = (noised(clean, times, noise)[:, None], times[:, None])
    return teacher_forced(predict, given, (clean, torch.zeros_like(times)), start, context)[:, 0]


def renoised(answer: Tensor, t: Tensor, noise: Tensor) -> Tensor:
    """The input of the next step of a few-step sampler: the model's own answer taken back to time t."""
    return noised(answer.detach(), t, noise)


@torch.no_grad()
def roll_block(predict: Predict, given: Any, context: Rolling, noise: list[Tensor], times: tuple[float, ...]) -> Tensor:
    """One block of a stream by few-step sampling, committed to `context`. `noise` has one (B, F, ...) per time."""
    x = noise[0]
    for step, t in enumerate(times):
        now = torch.full(x.shape[:2], t, device=x.device)
        answer = predict(x, now, given, context)
        if step + 1 < len(times):
            x = noised(answer, torch.full_like(now, times[step + 1]), noise[step + 1])
    context.writing = True
    predict(answer, torch.zeros_like(now), given, context)
    context.writing = False
    context.commit(x.shape[1])
    return answer
