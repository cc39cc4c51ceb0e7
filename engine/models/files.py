"""The published files that models are made of: which parts, in which repository, under which name, how big.

Facts only: where they lie on this machine, and how they get there, is known to engine/hub.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Part = Literal["transformer", "lora", "text_encoder", "tokenizer", "decoder", "tiny_decoder", "image_encoder"]

WAN_REPOSITORY = "Wan-AI/Wan2.1-T2V-1.3B"
WAN_I2V_REPOSITORY = "Wan-AI/Wan2.1-I2V-14B-480P"
LONGLIVE_REPOSITORY = "Efficient-Large-Model/LongLive-1.3B"
MAGI_REPOSITORY = "sand-ai/MAGI-1"


class MissingFiles(FileNotFoundError):
    """A model's published files are not where they are looked for; the message says where, and how to get them."""


@dataclass(frozen=True)
class File:
    """A published file. `path` may be a pattern; `bytes` is about the size of all files of the pattern together."""

    part: Part
    repo: str
    path: str
    bytes: int
    container: str = ""  # top-level entry of a checkpoint that holds several; "": whichever there is, averaged first


TINY_DECODER = File("tiny_decoder", "madebyollin/taehv", "taew2_1.pth", 22_600_000)
CLIP = File(
    "image_encoder",
    WAN_I2V_REPOSITORY,
    "models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth",
    4_772_000_000,
)


def wan(*own: File) -> tuple[File, ...]:
    """A model of the Wan2.1 family: its own files, and those that all share."""
    return (
        *own,
        File("decoder", WAN_REPOSITORY, "Wan2.1_VAE.pth", 507_609_880),
        File("text_encoder", WAN_REPOSITORY, "models_t5_umt5-xxl-enc-bf16.pth", 11_361_920_418),
        File("tokenizer", WAN_REPOSITORY, "google/umt5-xxl/*", 21_000_000),
        TINY_DECODER,
    )


LONGLIVE = wan(
    File("transformer", LONGLIVE_REPOSITORY, "models/longlive_base.pt", 5_676_000_000),
    File("lora", LONGLIVE_REPOSITORY, "models/lora.pt", 1_400_000_000, "generator_lora"),
)


def magi(folder: str, size: int) -> tuple[File, ...]:
    """A model of the MAGI-1 family, whose transformer lies in `folder` and takes about `size` bytes."""
    return (
        File("transformer", MAGI_REPOSITORY, f"ckpt/magi/{folder}/*", size),
        File("decoder", MAGI_REPOSITORY, "ckpt/vae/diffusion_pytorch_model.safetensors", 2_455_000_000),
        File("text_encoder", MAGI_REPOSITORY, "ckpt/t5/t5-v1_1-xxl/*", 19_050_000_000),
    )
