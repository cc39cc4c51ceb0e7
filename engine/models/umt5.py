"""Text to the embeddings that Wan2.1 is conditioned on: cleaning, the UMT5 tokenizer and encoder.

The encoder is that of transformers (the `models` extra); the official file is loaded into it name by name. A prompt is
encoded without padding, which gives the same numbers as masking it, and padded with zero rows by whoever needs that.
Knows no prompt switching and no cache.
"""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engine import weights

LENGTH = 512  # tokens at most, end mark included


class TextEncoderUnavailable(RuntimeError):
    """What encodes prompts is not installed; the message says how to get it."""


@dataclass(frozen=True)
class UMT5Sizes:
    """Sizes of the encoder; the defaults are those of umt5-xxl."""

    vocabulary: int = 256_384
    dim: int = 4096
    attention_dim: int = 4096
    ffn_dim: int = 10_240
    heads: int = 64
    layers: int = 24
    buckets: int = 32
    max_distance: int = 128


def clean(text: str) -> str:
    """The official cleaning of prompts: mojibake mended, HTML unescaped, every run of white space one space."""
    try:
        import ftfy
    except ImportError as error:
        raise TextEncoderUnavailable(_install("ftfy")) from error
    mended = html.unescape(html.unescape(ftfy.fix_text(text)))
    return re.sub(r"\s+", " ", mended.strip()).strip()


def build(sizes: UMT5Sizes) -> nn.Module:
    """The encoder of these sizes on the meta device."""
    try:
        from transformers import UMT5Config, UMT5EncoderModel
    except ImportError as error:
        raise TextEncoderUnavailable(_install("transformers")) from error
    config = UMT5Config(
        vocab_size=sizes.vocabulary,
        d_model=sizes.dim,
        d_kv=sizes.attention_dim // sizes.heads,
        d_ff=sizes.ffn_dim,
        num_layers=sizes.layers,
        num_heads=sizes.heads,
        relative_attention_num_buckets=sizes.buckets,
        relative_attention_max_distance=sizes.max_distance,
        feed_forward_proj="gated-gelu",
    )
    with torch.device("meta"):
        module: nn.Module = UMT5EncoderModel(config)
    return module


def official_names(layers: int) -> dict[str, str]:
    """transformers' name -> the name in the official file; two of its names are one tensor there."""
    names = {"shared.weight": "token_embedding.weight", "encoder.embed_tokens.weight": "token_embedding.weight"}
    names["encoder.final_layer_norm.weight"] = "norm.weight"
    for i in range(layers):
        ours, theirs = f"encoder.block.{i}.layer", f"blocks.{i}"
        names |= {f"{ours}.0.SelfAttention.{x}.weight": f"{theirs}.attn.{x}.weight" for x in "qkvo"}
        names |= {
            f"{ours}.0.SelfAttention.relative_attention_bias.weight": f"{theirs}.pos_embedding.embedding.weight",
            f"{ours}.0.layer_norm.weight": f"{theirs}.norm1.weight",
            f"{ours}.1.layer_norm.weight": f"{theirs}.norm2.weight",
            f"{ours}.1.DenseReluDense.wi_0.weight": f"{theirs}.ffn.gate.0.weight",
            f"{ours}.1.DenseReluDense.wi_1.weight": f"{theirs}.ffn.fc1.weight",
            f"{ours}.1.DenseReluDense.wo.weight": f"{theirs}.ffn.fc2.weight",
        }
    return names


def load(
    module: nn.Module, tensors: Mapping[str, Tensor], layers: int, device: torch.device | str, dtype: torch.dtype
) -> None:
    """Put the official tensors (or those of a diffusers folder, under transformers' names) into the encoder."""
    names = official_names(layers)
    if "shared.weight" not in tensors:
        shapes = {theirs: tuple(module.state_dict()[ours].shape) for ours, theirs in names.items()}
        weights.check(tensors, shapes, "text encoder")
        tensors = {ours: tensors[theirs] for ours, theirs in names.items()}
    elif "encoder.embed_tokens.weight" not in tensors:
        tensors = {**tensors, "encoder.embed_tokens.weight": tensors["shared.weight"]}
    weights.assign(module, tensors, device, dtype, "text encoder")


@torch.inference_mode()
def embed(module: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    """Token ids and mask (B, L) -> embeddings (B, L, D), zero where the mask is."""
    hidden: Tensor = module(input_ids=ids, attention_mask=mask).last_hidden_state
    return hidden * mask.unsqueeze(-1).to(hidden.dtype)


class UMT5:
    """Prompts to embeddings. The weights stay, or are read for each prompt and let go after it."""

    def __init__(
        self,
        checkpoint: Path,
        tokenizer: Path,
        sizes: UMT5Sizes,
        place: tuple[torch.device, torch.dtype],
        *,
        keep: bool = True,
    ) -> None:
        self._checkpoint, self._sizes, self._keep = checkpoint, sizes, keep
        self._device, self._dtype = place
        self._tokenizer = _tokenizer(tokenizer)
        self._module: nn.Module | None = self._read(*place) if keep else None
        if not keep:
            self._read(torch.device("meta"), torch.bfloat16)  # wrong files are found now, not at the first prompt

    def __call__(self, text: str) -> Tensor:
        """(1, L, 4096), only the rows of the prompt's own tokens."""
        ids = self._tokenizer(clean(text), max_length=LENGTH, truncation=True, return_tensors="pt").input_ids
        if self._module is None:
            self._module = self._read(self._device, self._dtype)
        embedding = embed(self._module, ids.to(self._device), torch.ones_like(ids).to(self._device)).clone()
        if not self._keep:
            self.free()
        return embedding

    def free(self) -> None:
        """Give the weights' memory back; the next prompt reads them again."""
        self._module = None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _read(self, device: torch.device, dtype: torch.dtype) -> nn.Module:
        module = build(self._sizes)
        load(module, weights.read(self._checkpoint), self._sizes.layers, device, dtype)
        return module


def _tokenizer(folder: Path) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise TextEncoderUnavailable(_install("transformers")) from error
    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)


def _install(package: str) -> str:
    return f"prompts need {package}: expected the extra inferix-live[models] to be installed"
