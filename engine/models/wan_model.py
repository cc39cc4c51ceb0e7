"""A Wan2.1 model as the engine sees it: network, text encoder and autoencoder behind the `BlockModel` contract.

`load` puts a preset's published files into it. Knows no world, no cache and no sampler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from engine import hub, weights
from engine.layers import attention
from engine.models import (
    BlockSignals,
    Conditioning,
    Context,
    Decoder,
    Encoder,
    Geometry,
    KVGeometry,
    LatentShape,
    Prompt,
    umt5,
)
from engine.models.clip_vision import ClipConfig, ClipVision
from engine.models.files import Part
from engine.models.presets import LoadOptions, Preset
from engine.models.taehv import Taehv, TaehvDecoder, fitted
from engine.models.umt5 import UMT5, UMT5Sizes
from engine.models.wan import WanConditioning, WanConfig, WanTransformer
from engine.models.wan_names import transformer_names, vae_names
from engine.models.wan_vae import VaeConfig, WanDecoder, WanEncoder, WanVae
from engine.protocol import PromptMode, Signal

Blend = Literal["linear", "spherical"]
Place: TypeAlias = tuple[torch.device, torch.dtype]


@dataclass(frozen=True)
class Architecture:
    """The sizes of all networks of a model."""

    network: WanConfig = WanConfig()
    vae: VaeConfig = VaeConfig()
    text: UMT5Sizes = UMT5Sizes()
    clip: ClipConfig = ClipConfig()


_14B = WanConfig(dim=5120, ffn_dim=13824, num_heads=40, num_layers=40)
ARCHITECTURES: dict[str, Architecture] = {
    "t2v-1.3b": Architecture(),
    "t2v-14b": Architecture(_14B),
    "i2v-14b": Architecture(replace(_14B, in_dim=36, clip_dim=1280)),
}

NEGATIVE = (
    "色调艳丽，过曝，静态，细节模糊不清，字幕，风格，作品，画作，画面，静止，整体发灰，最差质量，低质量，JPEG压缩残留，丑陋的，"
    "残缺的，多余的手指，画得不好的手部，画得不好的脸部，畸形的，毁容的，形态畸形的肢体，手指融合，静止不动的画面，杂乱的背景，"
    "三条腿，背景人很多，倒着走"
)
"""What Wan2.1 is steered away from when nothing else is said."""

SUGGESTIONS = (
    "A red fox walks through deep snow in a birch forest, low morning sun, the camera follows at its side.",
    "Waves roll against black cliffs under a stormy sky, seen from a slowly rising drone.",
    "A tram crosses a rainy city at night, neon signs mirrored in the wet street.",
)


class SizeError(ValueError):
    """A picture size that the model's grid of tokens does not fit."""


@dataclass(eq=False)
class WanModel:
    """See `BlockModel`. `text` gives the embedding (1, L, text_dim) of a prompt."""

    name: str
    geometry: Geometry
    network: WanTransformer
    text: Callable[[str], Tensor]
    decoder: Decoder
    encoder: Encoder | None = None
    switch: tuple[PromptMode, int] = ("cut", 1)
    blend: Blend = "linear"
    negative_text: str = NEGATIVE
    signals: tuple[Signal, ...] = ("prompt",)
    action_keys: tuple[str, ...] = ()
    action_values: tuple[str, ...] = ()
    suggestions: tuple[str, ...] = SUGGESTIONS
    uses_previous: bool = False
    _against: Prompt | None = field(default=None, init=False, repr=False)
    _digest: str = field(default="", init=False, repr=False)

    @property
    def device(self) -> torch.device:
        return self.network.patch_embedding.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.network.patch_embedding.weight.dtype

    def encode(self, text: str, previous: Prompt | None) -> Prompt:
        embedding = self.text(text).to(self.device, self.dtype)
        missing = self.network.config.text_len - embedding.shape[1]
        return Prompt(text, F.pad(embedding, (0, 0, 0, missing)))

    def condition(self, signals: BlockSignals) -> WanConditioning:
        prompt = signals.prompt
        if signals.before is not None and signals.weight < 1:
            mixed = mix(signals.before.embedding, prompt.embedding, signals.weight, self.blend)
            prompt = Prompt(prompt.text, mixed)
        clip, picture = signals.extra.get("clip"), signals.extra.get("picture")
        image = None if clip is None else Prompt("", clip.to(self.device, self.dtype))
        conditioning = WanConditioning(prompt, image=image, picture=picture)
        self.network.prepare(conditioning)
        return conditioning

    def negative(self, conditioning: Conditioning) -> Conditioning:
        if self._against is None:
            self._against = self.encode(self.negative_text, None)
        negative = replace(conditioning, prompt=self._against)
        self.network.prepare(negative)
        return negative

    def forward(self, x: Tensor, t: Tensor, conditioning: Conditioning, context: Context) -> Tensor:
        flow: Tensor = self.network(x, t, conditioning, context)
        return flow

    def digest(self) -> str:
        if not self._digest:
            self._digest = weights.digest(self.network)
        return self._digest


@dataclass(eq=False)
class WanImageModel(WanModel):
    """An image-to-video model: every block of a world is conditioned on one picture, seen twice.

    CLIP tokens are attended to beside the text; and the picture's own latents, behind a mask that says which frames are
    given, are joined to the noisy ones.
    """

    vae: WanVae | None = None
    clip: ClipVision | None = None

    @torch.inference_mode()
    def picture_conditions(self, picture: Tensor) -> dict[str, Tensor]:
        """(H, W, 3) uint8 -> what a world's blocks are conditioned on (`BlockSignals.extra`)."""
        assert self.vae is not None and self.clip is not None
        seen = picture.to(self.device).permute(2, 0, 1)[None].float() / 127.5 - 1  # (1, 3, H, W)
        frames, per_frame = self.geometry.frames_per_block, self.geometry.pictures_per_frame
        video = seen.new_zeros(1, 3, 1 + (frames - 1) * per_frame, *seen.shape[2:])
        video[:, :, 0] = seen
        latents = self.vae.encode(video.to(self.vae.conv2.weight.dtype)).transpose(1, 2).to(self.dtype)
        mask = latents.new_zeros(1, frames, per_frame, *latents.shape[3:])
        mask[:, 0] = 1
        return {"clip": self.clip(seen).to(self.dtype), "picture": torch.cat((mask, latents), dim=2)}

    def condition(self, signals: BlockSignals) -> WanConditioning:
        """Without a picture, nothing is given: zeros stand in."""
        if "picture" not in signals.extra:
            g, config = self.geometry, self.network.config
            shape = (1, g.frames_per_block, config.in_dim - config.out_dim, g.latent.height, g.latent.width)
            nothing = {"picture": torch.zeros(shape, device=self.device, dtype=self.dtype)}
            tokens = torch.zeros(1, 1, config.clip_dim or 1, device=self.device, dtype=self.dtype)
            signals = replace(signals, extra={**signals.extra, **nothing, "clip": tokens})
        return super().condition(signals)


def mix(before: Tensor, after: Tensor, weight: float, how: Blend) -> Tensor:
    """Between two embeddings (1, L, D): on the straight line, or row by row on the arc (and on the length's line).

    Rows of which one is zero (padding against text) have no angle between them and go along the line. Slerp:
    Shoemake, "Animating rotation with quaternion curves", 1985.
    """
    line = before + (after - before) * weight
    if how == "linear":
        return line
    a, b = before.float(), after.float()
    size_a, size_b = a.norm(dim=-1, keepdim=True), b.norm(dim=-1, keepdim=True)
    both = (size_a * size_b).clamp_min(1e-12)
    angle = ((a * b).sum(-1, keepdim=True) / both).clamp(-1, 1).acos()
    sine = angle.sin()
    arc = (((1 - weight) * angle).sin() * a / size_a + (weight * angle).sin() * b / size_b) / sine
    arc = arc * (size_a + (size_b - size_a) * weight)
    flat = (sine < 1e-4) | (size_a * size_b == 0)
    return torch.where(flat, line.float(), arc).to(before.dtype)


def geometry(config: WanConfig, vae: VaeConfig, preset: Preset, width: int, height: int) -> Geometry:
    """Raises SizeError unless width and height are whole numbers of tokens."""
    cell = vae.pixels_per_cell * 2
    if width % cell or height % cell or width < cell or height < cell:
        raise SizeError(f"picture size: expected multiples of {cell}, got {width}x{height}")
    latent = LatentShape(vae.z_dim, height // vae.pixels_per_cell, width // vae.pixels_per_cell)
    tokens = config.tokens(latent.height, latent.width)
    return Geometry(
        latent=latent,
        kv=KVGeometry(config.num_layers, config.num_heads, config.head_dim, tokens),
        frames_per_block=preset.frames_per_block,
        pictures_per_frame=vae.pictures_per_frame,
        width=width,
        height=height,
        fps=preset.fps,
        first_pictures=preset.first_pictures,
        first_block_frames=preset.first_block_frames,
    )


def load(preset: Preset, options: LoadOptions) -> WanModel:
    """The model of a preset from its published files. Raises MissingFiles, WeightsError or SizeError."""
    device = torch.device(options.device)
    dtype = _dtype(options, device)
    sizes = ARCHITECTURES[preset.architecture]
    shape = geometry(sizes.network, sizes.vae, preset, options.width or preset.width, options.height or preset.height)
    files = hub.locate(preset, options.folder, tiny=options.decoder == "tiny")
    place = (device, dtype)
    network = load_transformer(sizes.network, files["transformer"], files.get("lora"), preset.lora_scale, place)
    network.attention = attention.choose(options.attention, device, dtype).attend
    if options.compile:
        network.compile_layers()
    vae = load_vae(sizes.vae, files["decoder"], place)
    text_place = (device, torch.bfloat16)  # as the file is; float32 would be 23 GB
    text = UMT5(files["text_encoder"], files["tokenizer"], sizes.text, text_place, keep=options.keep_text_encoder)
    model = WanModel(
        name=preset.name,
        geometry=shape,
        network=network,
        text=text,
        decoder=_tiny(files["tiny_decoder"], place) if options.decoder == "tiny" else WanDecoder(vae),
        encoder=WanEncoder(vae),
        switch=preset.switch,
        blend=preset.blend,
    )
    if "image_encoder" not in files:
        return model
    values = {f.name: getattr(model, f.name) for f in fields(model) if f.init}
    return WanImageModel(**values, vae=vae, clip=load_clip(sizes.clip, files["image_encoder"], place))


def verify(preset: Preset, files: Mapping[Part, Path]) -> None:
    """Hold the files against the names and shapes this code expects, without loading them. Raises WeightsError."""
    sizes, meta = ARCHITECTURES[preset.architecture], (torch.device("meta"), torch.bfloat16)
    load_transformer(sizes.network, files["transformer"], files.get("lora"), preset.lora_scale, meta)
    load_vae(sizes.vae, files["decoder"], meta)
    if "tiny_decoder" in files:
        _tiny(files["tiny_decoder"], meta)
    if "image_encoder" in files:
        load_clip(sizes.clip, files["image_encoder"], meta)
    umt5.load(umt5.build(sizes.text), weights.read(files["text_encoder"]), sizes.text.layers, *meta)


def load_transformer(
    config: WanConfig, checkpoint: Path, lora: Path | None, lora_scale: float, place: Place
) -> WanTransformer:
    """The network with its weights, adapters merged."""
    with torch.device("meta"):
        network = WanTransformer(config)
    tensors = weights.read(checkpoint)
    if "proj_out.weight" in tensors:
        tensors = weights.renamed(tensors, transformer_names(config), checkpoint)
    if lora is not None:
        tensors = weights.merge_lora(tensors, weights.read(lora, "generator_lora"), lora_scale, lora)
    weights.assign(network, tensors, *place, checkpoint)
    return network


def load_vae(config: VaeConfig, checkpoint: Path, place: Place) -> WanVae:
    with torch.device("meta"):
        vae = WanVae(config)
    tensors = weights.read(checkpoint)
    if "quant_conv.weight" in tensors:
        tensors = weights.renamed(tensors, vae_names(config), checkpoint)
    weights.assign(vae, tensors, *place, checkpoint)
    return vae


def load_clip(config: ClipConfig, checkpoint: Path, place: Place) -> ClipVision:
    """The picture's half of a CLIP checkpoint."""
    with torch.device("meta"):
        clip = ClipVision(config)
    visual = {
        name.removeprefix("visual."): value
        for name, value in weights.read(checkpoint).items()
        if name.startswith("visual.")
    }
    weights.assign(clip, visual, *place, checkpoint)
    return clip


def _tiny(checkpoint: Path, place: Place) -> TaehvDecoder:
    with torch.device("meta"):
        net = Taehv()
    weights.assign(net, fitted(net, weights.read(checkpoint)), *place, checkpoint)
    return TaehvDecoder(net)


def _dtype(options: LoadOptions, device: torch.device) -> torch.dtype:
    if options.dtype is None:
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    found = getattr(torch, options.dtype, None)
    if not isinstance(found, torch.dtype):
        raise weights.WeightsError(f"dtype: expected float32, bfloat16 or float16, got {options.dtype!r}")
    return found
