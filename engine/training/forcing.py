"""From a diffusion model that sees a whole clip to one that makes it block by block from its own past: the pieces.

Any model that reaches its self-attention through the engine's `Context` can use them; `predict` stands for it. The
four ideas, each a function or a context:

* teacher forcing (`TeacherForcing`, `teacher_forced`): a packed forward in which noisy blocks see a clean copy of the
  blocks before them, so that one pass trains every block of a clip exactly as it will be streamed;
* noised and own context (`noised`, `own_clip`): the copy is noised, later replaced by what the model itself made from
  noise, so that it learns to live with its own mistakes;
* few steps (`renoised`): the input of a later step is the model's own earlier answer with noise, as when sampling;
* noise that chooses (`coupled`): what a clip leaves open is tied to its noise, so that a first step need not answer
  with the mean of all it could be.

Knows no data, no optimiser and no model.
"""

from collections.abc import Callable, Sequence
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

    block: int
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

    def commit(self) -> None:
        """The block that was just written becomes part of the past."""
        kept = [*self.past, self.fresh]
        self.past = kept[-self.window :] if self.window else []
        self.fresh, self.start = {}, self.start + self.block


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


def renoised(answer: Tensor, t: Tensor, noise: Tensor) -> Tensor:
    """The input of the next step of a few-step sampler: the model's own answer taken back to time t."""
    return noised(answer.detach(), t, noise)


def coupled(noise: Tensor, choice: Tensor, directions: Tensor) -> Tensor:
    """The noise, mirrored where it must be so that its sign along `directions` is `choice`.

    noise (B, ...); choice (B, n) of 1 and -1, or 0 for either; directions (n, ...), orthonormal. If every choice is as
    likely as every other, the noise of many clips together is as normal as before, so a sampler draws it as always and
    the draw chooses. Source: flow matching between coupled samples (Tong et al., arXiv 2302.00482), whose coupling
    is by distance; here it is by what is known of the clip.
    """
    flat, along = noise.flatten(1), directions.flatten(1)
    said = flat @ along.T
    wrong = torch.where(said * choice < 0, said, 0)
    return (flat - 2 * wrong @ along).view_as(noise)


@torch.no_grad()
def own_clip(
    predict: Predict,
    given: Any,
    noise: Sequence[Tensor],
    times: Sequence[float],
    written: tuple[Tensor, Tensor],
    context: Rolling,
) -> list[Tensor]:
    """A clip that the model makes from noise block by block, as a stream: what every step answered, (B, F, ...) each.

    `noise` has a clip (B, F, ...) for each of the sampler's `times`; `written` is (times (B, F), noise) of the clean
    pass, in which a block enters the past.
    """
    answers: list[list[Tensor]] = [[] for _ in times]
    frames = noise[0].shape[1]
    for start in range(0, frames, context.block):
        own = slice(start, start + context.block)
        told, x = given.pick(torch.arange(own.start, own.stop)), noise[0][:, own]
        for step, t in enumerate(times):
            now = torch.full(x.shape[:2], t, device=x.device)
            x = x if step == 0 else noised(answers[step - 1][-1], now, noise[step][:, own])
            answers[step].append(predict(x, now, told, context))
        context.writing = True
        predict(noised(answers[-1][-1], written[0][:, own], written[1][:, own]), written[0][:, own], told, context)
        context.writing = False
        context.commit()
    return [torch.cat(blocks, 1) for blocks in answers]
