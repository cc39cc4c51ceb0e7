"""Published MAGI-1 files to a model: the transformer (float8 variants too), the autoencoder, T5 and the special tokens.

Everything is loaded strictly: a name too many or too few, another shape, an absent file is an error that says what was
expected and what was found. Knows no arithmetic.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from engine import hub, weights
from engine.layers import attention
from engine.layers.attention import Attention, sdpa
from engine.models.files import MAGI_REPOSITORY, Part
from engine.models.magi import MagiConfig, MagiTransformer
from engine.models.magi_model import MagiModel, geometry
from engine.models.magi_text import TOKENS_FILE, Row, SpecialTokens, T5Caption, TextEncoderUnavailable
from engine.models.magi_vae import MagiVAE, MagiVAEConfig
from engine.models.presets import LoadOptions, Preset

TOKENS_SHA256 = "b54bc664d5f4a722dfd8bb22201c025df61f22acddc07c0a2529d7b5cd6be5a7"


@dataclass(frozen=True)
class Architecture:
    """The sizes of the networks of a model."""

    network: MagiConfig
    vae: MagiVAEConfig = MagiVAEConfig()


_4B = MagiConfig(layers=34, hidden=3072, ffn=12288, heads=24, kv_heads=8, head_dim=128)
_24B = MagiConfig(
    layers=48,
    hidden=6144,
    ffn=16384,
    heads=48,
    kv_heads=8,
    head_dim=128,
    duplicate_channels=True,
    rescale=0.1,
    gated=True,
)
ARCHITECTURES: dict[str, Architecture] = {
    "4.5b": Architecture(_4B),
    "24b": Architecture(_24B),
    "4.5b-fp8": Architecture(replace(_4B, fp8=True)),
    "24b-fp8": Architecture(replace(_24B, fp8=True)),
}


def load(preset: Preset, options: LoadOptions) -> MagiModel:
    """The model of a preset. Raises MissingFiles, SpecialTokensMissing, WeightsError or SizeError."""
    device = torch.device(options.device)
    dtype = _dtype(options, device)
    sizes = ARCHITECTURES[preset.architecture]
    width, height = options.width or preset.width, options.height or preset.height
    shape = geometry(sizes.network, sizes.vae, preset, width, height)
    files = hub.locate(preset, options.folder)
    tokens = SpecialTokens.load(_repository(files), sizes.network.caption_channels)
    attend = attention.choose(options.attention, device, dtype).attend
    return MagiModel(
        name=preset.name,
        geometry=shape,
        network=load_transformer(sizes.network, files["transformer"], dtype, device, attend),
        captions=Captions(files["text_encoder"], device, keep=options.keep_text_encoder),
        autoencoder=load_autoencoder(sizes.vae, files["decoder"], device, attend),
        tokens=tokens,
        switch=preset.switch,
    )


def verify(preset: Preset, files: Mapping[Part, Path]) -> None:
    """Hold the files against the names and shapes this code expects, without loading them.

    Raises WeightsError or SpecialTokensMissing.
    """
    sizes, meta = ARCHITECTURES[preset.architecture], torch.device("meta")
    load_transformer(sizes.network, files["transformer"], torch.bfloat16, meta, sdpa)
    load_autoencoder(sizes.vae, files["decoder"], meta, sdpa)
    folder = _repository(files)
    SpecialTokens.load(folder, sizes.network.caption_channels)
    found = hashlib.sha256((folder / TOKENS_FILE).read_bytes()).hexdigest()
    if found != TOKENS_SHA256:
        raise weights.WeightsError(f"{folder / TOKENS_FILE}: expected SHA-256 {TOKENS_SHA256}, got {found}")


def _repository(files: Mapping[Part, Path]) -> Path:
    """The folder of the repository, in which the special tokens are to be put."""
    name = Path(MAGI_REPOSITORY).name
    return next(parent for parent in files["transformer"].parents if parent.name == name)


def load_transformer(
    config: MagiConfig, checkpoint: Path, dtype: torch.dtype, device: torch.device, attend: Attention
) -> MagiTransformer:
    """The transformer with its weights, each in the precision that the architecture wants it in."""
    with torch.device("meta"):
        network = MagiTransformer(config, dtype, attend)
    weights.assign(network, weights.read(checkpoint), device, None, checkpoint)
    return network


def load_autoencoder(config: MagiVAEConfig, checkpoint: Path, device: torch.device, attend: Attention) -> MagiVAE:
    with torch.device("meta"):
        autoencoder = MagiVAE(config, attention=attend)
    weights.assign(autoencoder, weights.read(checkpoint), device, torch.float32, checkpoint)
    return autoencoder


class Captions:
    """T5 from a checkpoint folder, read at the first caption, and let go after each unless it is to stay."""

    def __init__(self, checkpoint: Path, device: torch.device, *, keep: bool = True) -> None:
        self._folder = checkpoint if checkpoint.is_dir() else checkpoint.parent
        self._device, self._keep = device, keep
        self._encoder: T5Caption | None = None

    def __call__(self, text: str) -> Row:
        encoder = self._encoder or load_t5(self._folder, self._device)
        self._encoder = encoder if self._keep else None
        return encoder(text)


def load_t5(folder: Path, device: torch.device) -> T5Caption:
    """Raises TextEncoderUnavailable without transformers, WeightsError on a folder that is not whole."""
    try:
        from transformers import AutoTokenizer, T5EncoderModel
    except ImportError as error:
        raise TextEncoderUnavailable(f"captions need the `models` extra: {error}") from error
    if not (folder / "config.json").is_file():  # without it, transformers would assume another size
        raise weights.WeightsError(f"{folder}: expected T5's configuration, weights and tokeniser, got no config.json")
    try:
        loaded: Any = T5EncoderModel.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, output_loading_info=True
        )
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise weights.WeightsError(f"{folder}: expected T5's configuration, weights and tokeniser: {error}") from error
    model, info = loaded
    wrong = sorted(map(str, (*info["missing_keys"], *info["mismatched_keys"])))
    if wrong:
        raise weights.WeightsError(
            f"{folder}: {len(wrong)} tensors of T5's encoder are missing or other ({wrong[0]} …)"
        )
    return T5Caption(model.to(device).eval(), tokenizer)


def _dtype(options: LoadOptions, device: torch.device) -> torch.dtype:
    if options.dtype is None:
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    found = getattr(torch, options.dtype, None)
    if not isinstance(found, torch.dtype):
        raise weights.WeightsError(f"dtype: expected float32, bfloat16 or float16, got {options.dtype!r}")
    return found
