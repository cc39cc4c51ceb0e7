"""The streaming decoder of `tiny-world`: a keyframe per latent frame, the three pictures before it by moving planes.

A keyframe is decoded into a picture without rain or snow, how much of each pixel belongs to each plane (ground, near
land, clouds and so on), and rain and snow covers. Between two keyframes every plane moves by its parallax times the
camera's exact shift, seen from both sides and blended; what one keyframe hides, the other fills in. The state between
blocks is the last keyframe, so decoding in a stream gives the same pictures as decoding at once.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.models.tiny.planet import (
    CHANNELS,
    COLUMNS,
    FRAMES_PER_LATENT,
    HEIGHT,
    PATCH,
    PLANES,
    PRECIPITATION_COLOUR,
    RAIN_SHIFT,
    ROWS,
    SNOW_SHIFT,
    WIDTH,
    plane_shift,
)

OUTPUTS: Final = 3 + len(PLANES) + 2
BORDER: Final = 20
"""More than a plane can move between two keyframes, so that moving it is slicing."""
HIDDEN: Final = 0.02
"""A plane with less room than this left by nearer ones counts as hidden."""


@dataclass(frozen=True)
class PlanePart:
    """What a keyframe shows of one plane: colour times cover, and cover, with BORDER zeros left and right."""

    content: Tensor  # (4, H, W + 2 BORDER)
    top: int
    bottom: int

    def shifted(self, pixels: float, rows: slice) -> Tensor:
        return shift_left(self.content[:, rows], pixels, BORDER)


@dataclass(frozen=True)
class Keyframe:
    """One decoded keyframe, float32, without a batch axis."""

    base: Tensor  # (3, H, W) RGB without rain and snow
    cover: Tensor  # (planes, H, W) share of a plane in what nearer planes leave open
    rain: Tensor  # (H, W)
    snow: Tensor  # (H, W)

    def picture(self) -> Tensor:
        return with_precipitation(self.base, self.rain, self.snow)

    def state(self) -> dict[str, Tensor]:
        return {"base": self.base, "cover": self.cover, "rain": self.rain, "snow": self.snow}

    def plane(self, index: int) -> PlanePart | None:
        """Plane number `index`, or None if nothing of it is in the picture."""
        return self._parts[index]

    @cached_property
    def _parts(self) -> list[PlanePart | None]:
        rows = (self.cover.amax(2) > HIDDEN).tolist()
        return [self._part(i, there) if any(there) else None for i, there in enumerate(rows)]

    def _part(self, index: int, there: list[bool]) -> PlanePart:
        cover = self.cover[index : index + 1]
        content = F.pad(torch.cat([self.base * cover, cover]), (BORDER, BORDER))
        return PlanePart(content, there.index(True), len(there) - there[::-1].index(True))


class KeyframeDecoder(nn.Module):
    """Latents (N, C, 9, 16) -> base picture, logits of planes, rain and snow: (N, OUTPUTS, 144, 256).

    The picture is the linear reconstruction, which is closed form and stays as it is, and what the convolutions add.
    """

    mean: Tensor
    basis: Tensor

    def __init__(self, widths: tuple[int, int, int, int] = (224, 128, 64, 32)) -> None:
        super().__init__()
        top, upper, lower, last = widths
        self.register_buffer("mean", torch.zeros(3 * PATCH * PATCH))
        self.register_buffer("basis", torch.zeros(CHANNELS, 3 * PATCH * PATCH))
        self.into = nn.Conv2d(CHANNELS, top, 3, padding=1)
        self.place = nn.Parameter(torch.zeros(1, top, ROWS, COLUMNS))
        self.body = nn.Sequential(
            *(Residual(top), Up(top, upper), Residual(upper), Residual(upper), Up(upper, lower)),
            *(Residual(lower), Residual(lower), Up(lower, last), Residual(last), nn.SiLU()),
        )
        self.out = nn.Conv2d(last, 4 * OUTPUTS, 3, padding=1)
        nn.init.zeros_(self.out.weight)
        bias = torch.zeros(4 * OUTPUTS)
        bias[-8:] = -4.0  # no rain and no snow to begin with
        self.out.bias = nn.Parameter(bias)

    def forward(self, latents: Tensor) -> Tensor:
        h = self.into(latents.contiguous(memory_format=torch.channels_last)) + self.place
        out = F.pixel_shuffle(self.out(self.body(h)), 2)
        return torch.cat([out[:, :3] * 0.5 + self.linear(latents), out[:, 3:]], 1)

    def linear(self, latents: Tensor) -> Tensor:
        """The principal components alone: (N, C, 9, 16) -> (N, 3, 144, 256)."""
        patches = latents.flatten(2).transpose(1, 2) @ self.basis + self.mean
        tiles = patches.reshape(-1, ROWS, COLUMNS, PATCH, PATCH, 3).permute(0, 5, 1, 3, 2, 4)
        return tiles.reshape(-1, 3, HEIGHT, WIDTH)

    def keyframes(self, latents: Tensor) -> list[Keyframe]:
        out = self(latents)
        cover = conditional_cover(out[:, 3 : 3 + len(PLANES)].softmax(1))
        falling = out[:, -2:].sigmoid()
        base = out[:, :3].clamp(0, 1)
        return [Keyframe(base[i], cover[i], falling[i, 0], falling[i, 1]) for i in range(len(latents))]


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1)
        self.second = nn.Conv2d(width, width, 3, padding=1)
        nn.init.zeros_(self.second.weight)
        self.second.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.silu(self.first(F.silu(x))))  # type: ignore[no-any-return]


class Up(nn.Module):
    """Twice the size, by a 1x1 convolution and the channels themselves spread out."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.spread = nn.Conv2d(width, 4 * out, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.pixel_shuffle(self.spread(x), 2)


def conditional_cover(shares: Tensor) -> Tensor:
    """Shares of each plane (N, planes, H, W) that sum to one -> share of what the nearer planes leave open."""
    nearer = shares.cumsum(1) - shares
    return shares / (1 - nearer + HIDDEN)


def with_precipitation(base: Tensor, rain: Tensor, snow: Tensor) -> Tensor:
    """base (..., 3, H, W), rain and snow (..., H, W)."""
    cover = torch.maximum(rain, snow).unsqueeze(-3)
    colour = torch.tensor(PRECIPITATION_COLOUR, device=base.device)[:, None, None]
    return base + (colour - base) * cover


@dataclass(frozen=True)
class Glimpse:
    """A keyframe as seen at another moment: the camera's shift from it in pixels, the frames since, its weight."""

    keyframe: Keyframe
    shift: float
    frames: float
    weight: float


def picture_between(glimpses: list[Glimpse]) -> Tensor:
    """The picture (3, H, W) at a moment between keyframes, made of one or two of them."""
    base = composite(glimpses)
    rain = precipitation([(g.keyframe.rain, g.frames, g.weight) for g in glimpses], RAIN_SHIFT)
    snow = precipitation([(g.keyframe.snow, g.frames, g.weight) for g in glimpses], SNOW_SHIFT)
    return with_precipitation(base, rain, snow)


def composite(glimpses: list[Glimpse]) -> Tensor:
    """Planes laid over each other from near to far, each moved by its own parallax: (3, H, W)."""
    colour = torch.zeros_like(glimpses[0].keyframe.base)
    room = torch.ones_like(colour[:1])
    filled = torch.zeros_like(room)
    for index, plane in enumerate(PLANES):
        parts = [part for g in glimpses if (part := g.keyframe.plane(index)) is not None]
        if not parts:
            continue
        rows = slice(min(p.top for p in parts), max(p.bottom for p in parts))
        seen = _moved_plane(glimpses, index, plane, rows)
        colour[:, rows].addcmul_(room[:, rows], seen[:3])
        filled[:, rows].addcmul_(room[:, rows], seen[3:])
        room[:, rows] *= (1 - seen[3:]).clamp_(min=0)
    still = torch.stack([g.keyframe.base * g.weight for g in glimpses]).sum(0)
    left = room * HIDDEN  # what no keyframe has seen shows the keyframes as they are
    return (colour + still * left) / (filled + left * sum(g.weight for g in glimpses))


def _moved_plane(glimpses: list[Glimpse], index: int, plane: str, rows: slice) -> Tensor:
    """Colour times cover, and cover, of one plane (4, rows, W), averaged over the keyframes that look there."""
    total, looked = None, torch.full((WIDTH,), 1e-6, device=glimpses[0].keyframe.base.device)
    for g in glimpses:
        pixels = plane_shift(plane, g.shift, g.frames)
        looked += shift_left(torch.ones_like(looked), pixels) * g.weight
        part = g.keyframe.plane(index)
        if part is not None:
            moved = part.shifted(pixels, rows)
            total = moved * g.weight if total is None else total.add_(moved, alpha=g.weight)
    assert total is not None
    return total.div_(looked)


def shift_left(x: Tensor, pixels: float, border: int = 0) -> Tensor:
    """x (..., W) moved to the left by a fraction of pixels, linearly interpolated; zeros come in.

    With `border`, x already has that many zeros on either side, and the result has none.
    """
    whole = math.floor(pixels)
    part, width = pixels - whole, x.shape[-1] - 2 * border
    if abs(whole) >= width:
        return torch.zeros_like(x[..., border : border + width])
    if not -border <= whole < border:
        x, border = F.pad(x, (abs(whole) + 1, abs(whole) + 1)), border + abs(whole) + 1
    start = border + whole
    left = x[..., start : start + width]
    return left if part == 0 else torch.lerp(left, x[..., start + 1 : start + 1 + width], part)


def precipitation(covers: list[tuple[Tensor, float, float]], per_frame: tuple[float, float]) -> Tensor:
    """What falls (H, W) `per_frame` pixels (x, y), seen from (cover, frames since, weight) of one or two keyframes."""
    total, seen = torch.zeros_like(covers[0][0]), torch.full_like(covers[0][0], 1e-6)
    for cover, frames, weight in covers:
        if float(cover.max()) < 0.02:
            seen += weight
            continue
        fallen = shift_left(cover.T, -per_frame[1] * frames).T
        there = shift_left(torch.ones_like(cover[:, 0]), -per_frame[1] * frames)[:, None]
        whole = int(per_frame[0] * frames // 1)
        part = per_frame[0] * frames - whole
        total += torch.lerp(fallen.roll(whole, 1), fallen.roll(whole + 1, 1), part) * weight
        seen += there * weight
    return total / seen


def decode_latent(before: Keyframe | None, now: Keyframe, travel: list[float]) -> Tensor:
    """The pictures (4, H, W, 3) uint8 up to and with keyframe `now`; `travel`: the camera's shift since `before`."""
    pictures = []
    for frame, gone in enumerate(travel[:-1], 1):
        left = FRAMES_PER_LATENT - frame
        weight = frame / FRAMES_PER_LATENT if before else 1.0
        glimpses = [Glimpse(now, gone - travel[-1], -left, weight)]
        if before:
            glimpses.append(Glimpse(before, gone, frame, 1 - weight))
        pictures.append(picture_between(glimpses))
    stacked = torch.stack([*pictures, now.picture()]).clamp(0, 1)
    return (stacked * 255 + 0.5).to(torch.uint8).permute(0, 2, 3, 1)
