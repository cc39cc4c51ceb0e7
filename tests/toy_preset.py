"""The toy model as an installed model: a row behind an entry point, so that an engine process can be told to load it.

Prompts that name a fault make it happen, so that tests can watch one world fail beside another.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import Tensor

from engine.models import Conditioning, Context, Prompt, State
from engine.models.presets import FewStep, LoadOptions, Preset, Sizes
from tests.toy_model import ToyDecoder, ToyModel

SIZE = (16, 24)  # height and width of latents and pictures alike
SLOW_STEP_S = 0.5

PRESET = Preset(
    name="toy",
    family="toy",
    about="random weights",
    loader="tests.toy_preset:load",
    architecture="toy",
    sampler=FewStep((1000, 500), shift=1.0),
    kv="window=6",
    width=SIZE[1],
    height=SIZE[0],
    fps=8.0,
    frames_per_block=2,
    sizes=Sizes(1, 2, 2, 8, SIZE[0] * SIZE[1], 16, 16),
)


class FaultyDecoder(ToyDecoder):
    def decode(self, latents: Tensor, conditioning: Conditioning, state: State) -> tuple[Tensor, State]:
        if conditioning.prompt.text == "break the decoder":
            raise RuntimeError("the decoder is broken")
        return super().decode(latents, conditioning, state)


class ToyEncoder:
    """Undoes the toy's decoder, but for its memory."""

    def encode(self, pictures: Tensor) -> Tensor:
        shown = (pictures[::2].permute(0, 3, 1, 2).float() / 255).clamp(0.02, 0.98).logit()
        return torch.cat([shown, shown[:, :1] * 0], 1)


class LivingToy(ToyModel):
    """A toy big enough for an encoder, with its faults."""

    encoder = ToyEncoder()  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__(size=SIZE)
        self.decoder = FaultyDecoder()

    def encode(self, text: str, previous: Prompt | None) -> Prompt:
        if text == "break the encoding":
            raise RuntimeError("the encoding is broken")
        return super().encode(text, previous)

    def forward(self, x: Tensor, t: Tensor, conditioning: Conditioning, context: Context) -> Tensor:
        if conditioning.prompt.text == "break the model":
            raise RuntimeError("the model is broken")
        if conditioning.prompt.text == "slow":
            time.sleep(SLOW_STEP_S)
        out = super().forward(x, t, conditioning, context)
        return torch.tanh(out)


def load(preset: Preset, options: LoadOptions) -> LivingToy:
    return LivingToy()


def install(folder: Path) -> None:
    """Make `folder`, once it is on the path, a place where the toy is an installed model."""
    info = folder / "toy_model-0.0.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-model\nVersion: 0.0.0\n")
    (info / "entry_points.txt").write_text("[inferix.models]\ntoy = tests.toy_preset:PRESET\n")
