"""The transformer of `tiny-world`: block diffusion of what the scene memory leaves open.

A latent frame is 48 tokens of three latents above each other. The network predicts the residual to the memory's mean,
preconditioned per channel with that residual's variance, and reads the past only through the context it is handed. A
token is told its noisy residual and what is known of it, the best linear guess: noise has nothing to say to others that
look for the past. Where there is nothing but noise no token is shown any: two signs of the block's noise, which choose
what the world leaves open, are all that it is told of it. Training and streaming run this same code; they differ in the
context.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.models import Context
from engine.models.tiny.memory import COLUMN, MOTION, PHASES, SceneMemory, motion_features, phase_of
from engine.models.tiny.planet import CHANNELS, COLUMNS, LATENTS_PER_BLOCK, ROWS
from engine.models.tiny.text import SEEN_SLOTS, VOCABULARY

WIDTH: Final = 256
LAYERS: Final = 6
HEADS: Final = 4
HEAD: Final = WIDTH // HEADS
STACK: Final = 3
"""Latents above each other in one token."""
BANDS: Final = ROWS // STACK
TOKENS: Final = BANDS * COLUMNS
TOKEN: Final = CHANNELS * STACK
CROSS_LAYERS: Final = (1, 3)
WORDS: Final = len(SEEN_SLOTS)
NEARNESS: Final = 6.0
"""How strongly heads begin to prefer their own place: beside it, what differs between tokens adds up to about 5."""
HANDED_ON: Final = 0.8
SAID: Final = 0.6
"""How much of what is known of the past the first layer begins by handing on, and the network by answering."""
PURE: Final = 0.999
"""From this time on there is nothing but noise."""
CHOOSING: Final = (0, 1)
"""Channels of a block's noise whose signs in the upper left corner choose what no prompt says, if no past does."""


@dataclass(frozen=True)
class Scenes:
    """Two scenes, one dissolving into the other, for each latent frame of a batch. All tensors are (B, F)."""

    camera_before: Tensor
    camera: Tensor
    weight: Tensor
    clock: Tensor
    velocity: Tensor
    facing: Tensor


@dataclass(frozen=True)
class Given:
    """What the network is told about each latent frame; the same in all steps of a block."""

    mean: Tensor  # (B, F, S, TOKEN) the scene memory's answer
    tokens: Tensor  # (B, F, S, D) what was read of the map, and the places of the tokens
    light: Tensor  # (B, F, D) words, camera and clock
    cross: Tensor  # (B, G, len(CROSS_LAYERS), 2, 2 * WORDS, D) keys and values of the words; G is F or 1
    share: Tensor  # (B, F, 2 * WORDS) logarithm of the share of each scene

    def pick(self, frames: Tensor) -> "Given":
        """The latent frames at the indices `frames` (F',), which may repeat."""
        cross = self.cross if self.cross.shape[1] == 1 else self.cross[:, frames]
        picked = (self.mean[:, frames], self.tokens[:, frames], self.light[:, frames])
        return Given(*picked, cross, self.share[:, frames])

    def detach(self) -> "Given":
        return replace(self, mean=self.mean.detach())


class Layer(nn.Module):
    def __init__(self, cross: bool, first: bool) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.merge = nn.Linear(WIDTH, WIDTH)
        self.cross_q = nn.Linear(WIDTH, WIDTH) if cross else None
        self.cross_kv = nn.Linear(WIDTH, 2 * WIDTH) if cross else None
        self.cross_merge = nn.Linear(WIDTH, WIDTH) if cross else None
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.zeros(6, WIDTH))
        self.first_bias = nn.Parameter(torch.zeros(6, WIDTH))
        for linear in (self.merge, self.down, self.cross_merge):
            if linear is not None:
                nn.init.zeros_(linear.weight)
                nn.init.zeros_(linear.bias)
        if first:
            self._start_copying()

    @torch.no_grad()
    def _start_copying(self) -> None:
        """Most heads begin by handing on what stood at their own place on the screen in the past.

        Equal constant parts of queries and keys, in the pairs that turn fastest with band and column, make attention
        fall off with the distance; values and `merge` pass the channels of what is known through.
        """
        near = torch.zeros(HEAD // 2, 2)
        near[[8, 9, 10, 11, *range(16, 22)], 0] = NEARNESS
        copying = torch.zeros(3, HEADS, HEAD)
        copying[:2, : TOKEN // HEAD] = near.flatten()
        self.qkv.bias.copy_(copying.flatten())
        self.qkv.weight[2 * WIDTH : 2 * WIDTH + TOKEN] = torch.eye(TOKEN, WIDTH)
        self.merge.weight[:, :TOKEN] = HANDED_ON * torch.eye(WIDTH, TOKEN)

    def heads(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Normalised queries and keys, and values: (B, F, S, heads, head_dim) each."""
        found = self.qkv(h).unflatten(-1, (3 * HEADS, HEAD))
        q, k = F.rms_norm(found[..., : 2 * HEADS, :], (HEAD,)).chunk(2, -2)
        return q, k, found[..., 2 * HEADS :, :]

    def read_words(self, h: Tensor, cross: Tensor, share: Tensor) -> Tensor:
        """h (B, F, S, D), cross (B, G, 2, L, D), share (B, F, L) -> (B, F, S, D)."""
        assert self.cross_q is not None and self.cross_merge is not None
        b, f = h.shape[:2]
        q = self.cross_q(h).unflatten(-1, (HEADS, HEAD)).flatten(0, 1).transpose(1, 2)
        k, v = cross.expand(b, f, -1, -1, -1).reshape(b * f, 2, -1, HEADS, HEAD).transpose(2, 3).unbind(1)
        found = F.scaled_dot_product_attention(q, k, v, share.flatten(0, 1)[:, None, None])
        return self.cross_merge(found.transpose(1, 2).reshape(h.shape))  # type: ignore[no-any-return]


class TinyNetwork(nn.Module):
    """Scene memory and residual block-diffusion transformer."""

    variance: Tensor

    def __init__(self, *, table: int = 64, hidden: int = 768, images: int = 40) -> None:
        super().__init__()
        self.memory = SceneMemory(table, hidden, images, WIDTH)
        self.words = nn.Embedding(len(VOCABULARY), WIDTH)
        self.slots = nn.Parameter(torch.randn(WORDS, WIDTH) * 0.05)
        self.text = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.SiLU(), nn.Linear(2 * WIDTH, WIDTH)
        )
        self.pool = nn.Sequential(nn.Linear(WORDS * WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.motion = nn.Sequential(nn.Linear(MOTION, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.phase = nn.Embedding(PHASES, WIDTH)
        self.time = nn.Sequential(nn.Linear(64, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.map = nn.Linear(5 * table, BANDS * WIDTH)
        self.place = nn.Parameter(torch.randn(TOKENS, WIDTH) * 0.3)
        self.into = nn.Linear(2 * TOKEN + len(CHOOSING), WIDTH)
        self.layers = nn.ModuleList(Layer(i in CROSS_LAYERS, first=i == 0) for i in range(LAYERS))
        self.modulate = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 6 * WIDTH))
        self.modulate_out = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 2 * WIDTH))
        self.out = nn.Linear(WIDTH, TOKEN)
        self.register_buffer("variance", torch.full((TOKEN,), 0.1))
        self._start()

    def _start(self) -> None:
        nn.init.normal_(self.words.weight, std=0.3)
        nn.init.normal_(self.phase.weight, std=0.3)
        self._start_copying()
        last, last_out = self.modulate[1], self.modulate_out[1]
        assert isinstance(last, nn.Linear) and isinstance(last_out, nn.Linear)
        nn.init.normal_(last.weight, std=0.002)
        nn.init.zeros_(last_out.weight)
        with torch.no_grad():
            last.bias.view(6, WIDTH).copy_(torch.tensor([1, 0, 1, 1, 0, 1])[:, None].expand(-1, WIDTH))

    @torch.no_grad()
    def _start_copying(self) -> None:
        """The first channels begin as what is known of a token's residual, and as the answer; see `Layer`."""
        for weight in (self.into.weight, self.map.weight.view(BANDS, WIDTH, -1), self.place.unsqueeze(-1)):
            weight[..., :TOKEN, :] = 0
        for bias in (self.into.bias, self.map.bias.view(BANDS, WIDTH)):
            bias[..., :TOKEN] = 0
        self.into.weight[:TOKEN, TOKEN : 2 * TOKEN] = torch.eye(TOKEN)
        self.out.weight.copy_(SAID * torch.eye(TOKEN, WIDTH))
        self.out.bias.zero_()

    # -- what is given -----------------------------------------------------------------------------------------------

    def embed_words(self, ids: Tensor) -> Tensor:
        """(..., WORDS) rows of the word table -> (..., WORDS, D)."""
        words = self.words(ids) + self.slots
        return words + self.text(words)  # type: ignore[no-any-return]

    def cross_kv(self, words: Tensor) -> Tensor:
        """(..., L, D) -> keys and values of the cross-attention layers (..., len(CROSS_LAYERS), 2, L, D)."""
        layers = [self.layers[i] for i in CROSS_LAYERS]
        pairs = [torch.stack(layer.cross_kv(words).chunk(2, -1), -3) for layer in layers]  # type: ignore[operator]
        return torch.stack(pairs, -4)

    def recall(self, scenes: Scenes, words_before: Tensor, words: Tensor, cross: Tensor) -> Given:
        """Asks the scene memory about every latent frame. `words*` are (B, F, WORDS, D) or (B, 1, WORDS, D)."""
        weight = scenes.weight[..., None]
        mean, read, light = self._ask(scenes.camera, scenes, words)
        if bool((scenes.weight < 1).any()):
            old_mean, old_read, old_light = self._ask(scenes.camera_before, scenes, words_before)
            mean = old_mean + (mean - old_mean) * weight[..., None]
            read = old_read + (read - old_read) * weight[..., None]
            light = old_light + (light - old_light) * weight
        share = torch.cat([(1 - weight).expand(-1, -1, WORDS), weight.expand(-1, -1, WORDS)], -1)
        bands = self.map(read).unflatten(-1, (BANDS, WIDTH)).transpose(2, 3).flatten(2, 3)
        return Given(columns_to_tokens(mean), bands + self.place, light, cross, share.clamp(min=1e-4).log())

    def _ask(self, camera: Tensor, scenes: Scenes, words: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        light = self.light(camera, scenes, words)
        mean, read = self.memory(camera.flatten(), scenes.clock.flatten(), light.flatten(0, 1))
        return mean.reshape(*camera.shape, *mean.shape[1:]), read.reshape(*camera.shape, *read.shape[1:]), light

    def light(self, camera: Tensor, scenes: Scenes, words: Tensor) -> Tensor:
        """Camera (B, F) and words (B, F or 1, WORDS, D) -> (B, F, D)."""
        features = motion_features(camera, scenes.velocity, scenes.facing)
        moment = self.motion(features) + self.phase(phase_of(scenes.clock))
        return moment + self.pool(words.flatten(-2))  # type: ignore[no-any-return]

    # -- diffusion ---------------------------------------------------------------------------------------------------

    def predict(self, x: Tensor, t: Tensor, given: Given, context: Context) -> Tensor:
        """The clean latents of noisy ones x = (1 - t) clean + t noise. x, result: (B, F, C, H, W); t: (B, F)."""
        t = t[..., None, None]
        scale = ((1 - t) ** 2 * self.variance + t**2).sqrt()
        residual = to_tokens(x) - (1 - t) * given.mean
        keep = (1 - t) * self.variance / scale**2
        known = keep * residual / self.variance.sqrt()  # nothing at t = 1, all of it at t = 0
        pure = t > PURE
        chosen = (choice(residual) * pure).expand(-1, -1, TOKENS, -1)
        h = context.shard(self.into(torch.cat([residual / scale * ~pure, known, chosen], -1)) + given.tokens)
        light = self.time(time_waves(t[..., 0, 0])) + given.light
        steer = self.modulate(light).unflatten(-1, (6, WIDTH)).unsqueeze(-3)
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            h = self._layer(index, layer, h, steer + layer.bias + pure[..., None] * layer.first_bias, given, context)
        grow, shift = self.modulate_out(light)[..., None, :].chunk(2, -1)
        answer = self.out(torch.addcmul(shift, F.layer_norm(context.unshard(h), (WIDTH,)), 1 + grow))
        return to_latents(given.mean + keep * residual + self.variance.sqrt() * answer)

    def _layer(self, index: int, layer: Layer, h: Tensor, steer: Tensor, given: Given, context: Context) -> Tensor:
        grow_1, shift_1, gate_1, grow_2, shift_2, gate_2 = steer.unbind(-2)
        q, k, v = layer.heads(torch.addcmul(shift_1, F.layer_norm(h, (WIDTH,)), grow_1))
        h = torch.addcmul(h, gate_1, layer.merge(context.attend(index, q, k, v, rotate).flatten(-2)))
        if index in CROSS_LAYERS:
            cross = given.cross[:, :, CROSS_LAYERS.index(index)]
            h = h + layer.read_words(F.layer_norm(h, (WIDTH,)), cross, given.share)
        up = layer.up(torch.addcmul(shift_2, F.layer_norm(h, (WIDTH,)), grow_2))
        return torch.addcmul(h, gate_2, layer.down(squared_relu(up)))


def choice(noise: Tensor) -> Tensor:
    """The signs in a block's noise that choose what no prompt says: tokens (B, F, S, TOKEN) -> (B, F, 1, 2)."""
    corner = noise[:, :, :1, [channel * STACK for channel in CHOOSING]]
    blocks: tuple[Tensor, ...] = corner.split(LATENTS_PER_BLOCK, 1)  # type: ignore[no-untyped-call]
    return torch.cat([block.sum(1, keepdim=True).sign().expand_as(block) for block in blocks], 1)


def to_tokens(x: Tensor) -> Tensor:
    """(B, F, C, 9, 16) -> (B, F, 48, C * 3): band by band, left to right."""
    x = x.reshape(*x.shape[:3], BANDS, STACK, COLUMNS)
    return x.permute(0, 1, 3, 5, 2, 4).reshape(*x.shape[:2], TOKENS, TOKEN)


def to_latents(tokens: Tensor) -> Tensor:
    x = tokens.reshape(*tokens.shape[:2], BANDS, COLUMNS, CHANNELS, STACK)
    return x.permute(0, 1, 4, 2, 5, 3).reshape(*tokens.shape[:2], CHANNELS, ROWS, COLUMNS)


def columns_to_tokens(mean: Tensor) -> Tensor:
    """(B, F, 16, 9 * C), each column as (C, 9) -> (B, F, 48, C * 3)."""
    x = mean.reshape(*mean.shape[:3], CHANNELS, BANDS, STACK).permute(0, 1, 4, 2, 3, 5)
    return x.reshape(*mean.shape[:2], TOKENS, TOKEN)


def latents_to_columns(x: Tensor) -> Tensor:
    """(N, C, 9, 16) -> (N, 16, C * 9), as the memory answers."""
    return x.permute(0, 3, 1, 2).reshape(x.shape[0], COLUMNS, COLUMN)


def time_waves(t: Tensor) -> Tensor:
    """Times in [0, 1] (...,) -> (..., 64)."""
    speed = torch.exp(-math.log(1000) * torch.arange(32, device=t.device) / 32) * 100
    angles = t[..., None] * speed
    return torch.cat([angles.cos(), angles.sin()], -1)


def squared_relu(x: Tensor) -> Tensor:
    """max(x, 0)^2, in place: the widest tensor of a layer is not written twice where nobody asks for gradients."""
    x = x.relu_()
    return x * x if x.requires_grad else x.mul_(x)


def rotate(x: Tensor, frames: Tensor) -> Tensor:
    """Rotary embedding over latent frame, band and column: (B, F, S, heads, 64) at frames (F,).

    Neighbouring numbers are a complex one, so that turning it is one multiplication.
    """
    turned = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * rotation(tuple(frames.tolist()), x.device)
    return torch.view_as_real(turned).flatten(-2)


@lru_cache(maxsize=64)
def rotation(frames: tuple[int, ...], device: torch.device) -> Tensor:
    """The complex factors (F, S, 1, 32) of `rotate`; a block asks for the same ones in every layer and step."""
    with torch.inference_mode(False):  # what is kept may be needed by training too
        angles = rotary_angles(torch.tensor(frames, device=device))[:, :, None]
        return torch.polar(torch.ones_like(angles), angles)


def rotary_angles(frames: Tensor) -> Tensor:
    """(F,) -> (F, S, 32): 8 angles for the frame, 8 for the band, 16 for the column."""
    device = frames.device
    band, column = torch.arange(TOKENS, device=device) // COLUMNS, torch.arange(TOKENS, device=device) % COLUMNS
    in_time = _angles(frames, 16, 50.0)[:, None].expand(-1, TOKENS, -1)
    in_space = torch.cat([_angles(band, 16, 20.0), _angles(column, 32, 100.0)], -1)
    return torch.cat([in_time, in_space.expand(len(frames), -1, -1)], -1).float()


def _angles(positions: Tensor, size: int, base: float) -> Tensor:
    steps = torch.arange(0, size, 2, device=positions.device, dtype=torch.float64) / size
    return positions[:, None].double() * base**-steps
