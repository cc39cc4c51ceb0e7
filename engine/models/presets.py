"""The models this engine can run by name: one row of values each. Families differ in code, rows differ in values only.

A row says which function loads the model, how its blocks are denoised, what they see of the past, which published files
it needs and how big it is. Rows are data: no weights are touched here, and a family's code is imported when it loads.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from engine.models import files
from engine.models.files import File
from engine.protocol import PromptMode
from engine.stages import Distilled, Guided, Plan

if TYPE_CHECKING:
    from engine.models import BlockModel

Recache = Literal["blocks", "joint", "joint-keep-sink", "none"]


class UnknownModel(ValueError):
    """A model that no row and no entry point is named after."""


@dataclass(frozen=True)
class FewStep:
    """Distilled models: denoise, re-noise to the next time, `len(steps)` times.

    `steps` count down from 1000; with `warp` they are positions in the shifted table, otherwise times as they are.
    """

    steps: tuple[int, ...]
    shift: float
    warp: bool = True
    context_time: float = 0.0  # told to the model in the clean pass
    noise_context: bool = False  # and so much noise is in what it is shown of the past


@dataclass(frozen=True)
class Flow:
    """Undistilled models: `steps` Euler steps along the flow with classifier-free guidance."""

    steps: int
    shift: float
    guidance: float


@dataclass(frozen=True)
class Segments:
    """A model trained on clips: every `frames` latent frames it starts anew from the last `overlap` (CausVid)."""

    frames: int
    overlap: int


@dataclass(frozen=True)
class Sizes:
    """What memory and disk are computed from; tokens at the row's own picture size."""

    parameters: int
    layers: int
    kv_heads: int
    head_dim: int
    tokens_per_frame: int
    dim: int
    ffn_dim: int
    decoder_parameters: int = 0  # of the whole autoencoder, which worlds also start through
    text_parameters: int = 0
    image_parameters: int = 0
    decoder_item: int | None = None  # bytes of a parameter; None: as many as of the network's
    text_item: int | None = None

    def decoder_bytes(self, item: int) -> int:
        """With `item` bytes to a parameter of the network."""
        return self.decoder_parameters * (self.decoder_item or item)

    def text_bytes(self, item: int) -> int:
        return self.text_parameters * (self.text_item or item)


@dataclass(frozen=True)
class Preset:
    """A row."""

    name: str
    family: str
    about: str
    loader: str  # "module:function" taking (preset, options)
    architecture: str  # which of the family's networks
    sampler: Any  # a spec of this module, or one that the family brings with it
    kv: str  # the policy in its declarative form
    width: int
    height: int
    fps: float
    frames_per_block: int
    sizes: Sizes
    pictures_per_frame: int = 4  # that a latent frame decodes to
    files: tuple[File, ...] = ()
    licence: str = ""
    switch: tuple[PromptMode, int] = ("cut", 1)  # how a prompt replaces another when nothing is said
    recache: Recache = "blocks"
    segments: Segments | None = None
    first_block_frames: int | None = None
    first_pictures: int | None = None  # that the very first latent frame decodes to; None: as all others
    lora_scale: float = 1.0  # alpha / rank
    blend: Literal["linear", "spherical"] = "linear"
    note: str = ""

    def recache_room(self, held: int) -> int:
        """Latent frames kept beside the `held` ones while the past is computed again: the old ones stay until it is."""
        if isinstance(self.sampler, Flow):
            return 0  # a clip at a time: there is no past to compute again
        return self.frames_per_block if self.recache in ("blocks", "none") else held


@dataclass(frozen=True)
class LoadOptions:
    """How a model is to be loaded: what is the machine's or the user's choice, not the model's."""

    device: str = "cpu"
    dtype: str | None = None  # "bfloat16", "float32" …; None: bfloat16 on an accelerator, float32 on a CPU
    folder: Path | None = None  # where published files lie; None: the default folder
    width: int | None = None
    height: int | None = None
    decoder: Literal["full", "tiny"] = "full"
    keep_text_encoder: bool = True  # False: load it for each prompt and free it afterwards
    compile: bool = False
    attention: str = "auto"


def find(name: str) -> Preset:
    """The row of this name, or the one that an installed entry point of the group `inferix.models` gives."""
    if name in PRESETS:
        return PRESETS[name]
    for entry in entry_points(group="inferix.models"):
        if entry.name == name:
            preset: Preset = entry.load()
            return preset
    raise UnknownModel(f"model: expected one of {', '.join(sorted(PRESETS))}; got {name!r}")


def load(name: str, options: LoadOptions) -> BlockModel:
    """The model of this name, weights and all. Raises UnknownModel, MissingFiles or WeightsError."""
    preset = find(name)
    module, _, function = preset.loader.partition(":")
    loader: Callable[[Preset, LoadOptions], BlockModel] = getattr(importlib.import_module(module), function)
    return loader(preset, options)


# ----------------------------------------------------------------------------------------------------- Wan2.1

_WAN_1_3B = Sizes(1_418_996_800, 30, 12, 128, 1560, 1536, 8960, 126_892_531, 5_680_910_336, text_item=2)
_WAN_14B = Sizes(14_288_491_584, 40, 40, 128, 1560, 5120, 13824, 126_892_531, 5_680_910_336, text_item=2)
_WAN_I2V = replace(_WAN_14B, parameters=16_394_878_784, image_parameters=632_076_800)

_SELF_FORCING_STEPS = FewStep((1000, 750, 500, 250), shift=5.0)


def _wan(name: str, about: str, architecture: str, sizes: Sizes, **values: Any) -> Preset:
    common = {"width": 832, "height": 480, "fps": 16.0, "frames_per_block": 3, "first_pictures": 1} | values
    return Preset(name, "wan2.1", about, "engine.models.wan_model:load", architecture, sizes=sizes, **common)


_ROWS = (
    _wan(
        "self-forcing-1.3b",
        "text to video in 4 steps, trained on its own roll-outs",
        "t2v-1.3b",
        _WAN_1_3B,
        sampler=_SELF_FORCING_STEPS,
        kv="window=21",
        files=files.wan(
            File(
                "transformer", "gdhe17/Self-Forcing", "checkpoints/self_forcing_dmd.pt", 11_400_000_000, "generator_ema"
            ),
        ),
        licence="see huggingface.co/gdhe17/Self-Forcing",
    ),
    _wan(
        "causvid-1.3b",
        "text to video in 3 steps, in clips of 21 latent frames that overlap",
        "t2v-1.3b",
        _WAN_1_3B,
        sampler=FewStep((1000, 757, 522), shift=8.0, warp=False),
        kv="window=21",
        segments=Segments(frames=21, overlap=3),
        files=files.wan(
            File("transformer", "tianweiy/CausVid", "autoregressive_checkpoint/model.pt", 5_676_000_000, "generator"),
        ),
        licence="see huggingface.co/tianweiy/CausVid",
    ),
    _wan(
        "longlive-1.3b",
        "text to long video with a sink; the past is computed again when the prompt changes",
        "t2v-1.3b",
        _WAN_1_3B,
        sampler=_SELF_FORCING_STEPS,
        kv="window=12 sink=3",
        switch=("recache", 1),
        recache="joint-keep-sink",
        files=files.LONGLIVE,
        licence="see huggingface.co/Efficient-Large-Model/LongLive-1.3B",
    ),
    _wan(
        "longlive-infinity-1.3b",
        "LongLive with positions counted inside the window: no world is too long",
        "t2v-1.3b",
        _WAN_1_3B,
        sampler=_SELF_FORCING_STEPS,
        kv="window=12 sink=3 positions=window",
        switch=("recache", 1),
        recache="joint-keep-sink",
        files=files.LONGLIVE,
        licence="see huggingface.co/Efficient-Large-Model/LongLive-1.3B",
    ),
    _wan(
        "krea-realtime-14b",
        "text to video in 4 steps, ten times the size",
        "t2v-14b",
        _WAN_14B,
        sampler=_SELF_FORCING_STEPS,
        kv="window=9 sink=3",
        switch=("recache", 1),
        recache="blocks",
        files=files.wan(
            File("transformer", "krea/krea-realtime-video", "krea-realtime-video-14b.safetensors", 28_577_000_000),
        ),
        licence="see huggingface.co/krea/krea-realtime-video",
        note="window and sink are this project's choice, not checked against the published sampler",
    ),
    _wan(
        "wan2.1-1.3b",
        "the undistilled bidirectional model, one clip of 81 pictures: the reference",
        "t2v-1.3b",
        _WAN_1_3B,
        sampler=Flow(50, shift=5.0, guidance=5.0),
        kv="window=0",
        recache="none",  # there is no past
        frames_per_block=21,
        files=files.wan(
            File("transformer", files.WAN_REPOSITORY, "diffusion_pytorch_model.safetensors", 5_676_000_000)
        ),
        licence="Apache-2.0",
    ),
    _wan(
        "wan2.1-14b",
        "the undistilled bidirectional model at 14B",
        "t2v-14b",
        _WAN_14B,
        sampler=Flow(50, shift=5.0, guidance=5.0),
        kv="window=0",
        recache="none",  # there is no past
        frames_per_block=21,
        files=files.wan(
            File("transformer", "Wan-AI/Wan2.1-T2V-14B", "diffusion_pytorch_model*.safetensors*", 57_154_000_000),
        ),
        licence="Apache-2.0",
    ),
    _wan(
        "wan2.1-i2v-14b",
        "the undistilled bidirectional model that starts from a picture",
        "i2v-14b",
        _WAN_I2V,
        sampler=Flow(40, shift=3.0, guidance=5.0),
        kv="window=0",
        recache="none",  # there is no past
        frames_per_block=21,
        files=files.wan(
            File("transformer", files.WAN_I2V_REPOSITORY, "diffusion_pytorch_model*.safetensors*", 65_580_000_000),
            files.CLIP,
        ),
        licence="Apache-2.0",
    ),
)

# ------------------------------------------------------------------------------------------------------ MAGI-1

_T5 = 4_762_310_656
_VAE = 613_800_000
_MAGI_4B = Sizes(4_459_898_128, 34, 8, 128, 2025, 3072, 12288, _VAE, _T5, decoder_item=4, text_item=4)
_MAGI_24B = Sizes(23_899_281_936, 48, 8, 128, 3600, 6144, 16384, _VAE, _T5, decoder_item=4, text_item=4)


def _magi(name: str, about: str, folder: str, architecture: str, plan: Plan, file_bytes: int) -> Preset:
    big = architecture.startswith("24b")
    return Preset(
        name,
        "magi-1",
        about,
        "engine.models.magi_load:load",
        architecture,
        sampler=plan,
        kv="window=30",  # five blocks: as far as any block looks, so nothing that is read is ever gone
        width=1280 if big else 720,
        height=720,
        fps=24.0,
        frames_per_block=6,
        sizes=_MAGI_24B if big else _MAGI_4B,
        files=files.magi(folder, file_bytes),
        licence="Apache-2.0",
        recache="none",
        note="also needs special_tokens.npz of the MAGI-1 source repository, in the repository's folder",
    )


_MAGI_ROWS = (
    _magi(
        "magi-1-4.5b-distill",
        "text, picture or clip to video; four blocks of a second in flight, one branch",
        "4.5B_distill/inference_weight.distill",
        "4.5b",
        Plan(64, Distilled()),
        9_000_000_000,
    ),
    _magi(
        "magi-1-4.5b",
        "the undistilled model, three branches of guidance",
        "4.5B_base/inference_weight",
        "4.5b",
        Plan(64, Guided()),
        9_000_000_000,
    ),
    _magi(
        "magi-1-4.5b-distill-fp8",
        "the distilled model with float8 weights in all layers but the first and last",
        "4.5B_distill_quant/inference_weight.fp8.distill",
        "4.5b-fp8",
        Plan(64, Distilled()),
        4_900_000_000,
    ),
    _magi(
        "magi-1-24b-distill",
        "five times the size, 16 steps, one branch",
        "24B_distill/inference_weight.distill",
        "24b",
        Plan(16, Distilled()),
        47_800_000_000,
    ),
    _magi(
        "magi-1-24b",
        "the undistilled model at 24B, three branches of guidance",
        "24B_base/inference_weight",
        "24b",
        Plan(32, Guided()),
        47_800_000_000,
    ),
    _magi(
        "magi-1-24b-distill-fp8",
        "the distilled model at 24B with float8 weights in all layers but the first and last",
        "24B_distill_quant/inference_weight.fp8.distill",
        "24b-fp8",
        Plan(16, Distilled()),
        25_000_000_000,
    ),
)

# ------------------------------------------------------------------------------------------------------- tiny

_TINY = Preset(
    "tiny-world",
    "tiny",
    "a little planet of six places, trained here and shipped with the package; runs live on two CPU cores",
    "engine.models.tiny.model:load",
    "tiny-world",
    sampler=FewStep((1000,), shift=0.0025, context_time=150.0, noise_context=True),
    kv="window=8",
    width=256,
    height=144,
    fps=16.0,
    frames_per_block=2,
    sizes=Sizes(10_373_032, 6, 4, 64, 48, 256, 1024, 2_043_156),
    licence="Apache-2.0",
    switch=("blend", 2),
)


PRESETS: dict[str, Preset] = {row.name: row for row in (*_ROWS, *_MAGI_ROWS, _TINY)}
"""By name. Other families add their rows here."""
