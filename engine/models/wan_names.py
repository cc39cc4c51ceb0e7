"""Parameter names of diffusers' Wan classes mapped to the official ones: one to one, nothing is transposed or split."""

from __future__ import annotations

from collections.abc import Iterator

from engine.models.wan import WanConfig
from engine.models.wan_vae import VaeConfig

_ATTENTION = {
    "to_q": "q",
    "to_k": "k",
    "to_v": "v",
    "to_out.0": "o",
    "add_k_proj": "k_img",
    "add_v_proj": "v_img",
}
_NORMS = {"norm_q": "norm_q", "norm_k": "norm_k"}


def transformer_names(config: WanConfig) -> dict[str, str]:
    """diffusers' `WanTransformer3DModel` -> official."""
    condition = "condition_embedder"
    names = dict(
        [
            *_affine("patch_embedding", "patch_embedding"),
            *_affine(f"{condition}.text_embedder.linear_1", "text_embedding.0"),
            *_affine(f"{condition}.text_embedder.linear_2", "text_embedding.2"),
            *_affine(f"{condition}.time_embedder.linear_1", "time_embedding.0"),
            *_affine(f"{condition}.time_embedder.linear_2", "time_embedding.2"),
            *_affine(f"{condition}.time_proj", "time_projection.1"),
            *_affine("proj_out", "head.head"),
            ("scale_shift_table", "head.modulation"),
        ]
    )
    if config.clip_dim is not None:
        image = f"{condition}.image_embedder"
        for theirs, ours in (("norm1", 0), ("ff.net.0.proj", 1), ("ff.net.2", 3), ("norm2", 4)):
            names |= dict(_affine(f"{image}.{theirs}", f"img_emb.proj.{ours}"))
    for i in range(config.num_layers):
        names |= dict(_layer(i, image=config.clip_dim is not None))
    return names


def _layer(i: int, *, image: bool) -> Iterator[tuple[str, str]]:
    block = f"blocks.{i}"
    yield f"{block}.scale_shift_table", f"{block}.modulation"
    yield from _affine(f"{block}.norm2", f"{block}.norm3")
    yield from _affine(f"{block}.ffn.net.0.proj", f"{block}.ffn.0")
    yield from _affine(f"{block}.ffn.net.2", f"{block}.ffn.2")
    for theirs, ours in (("attn1", "self_attn"), ("attn2", "cross_attn")):
        pictured = image and theirs == "attn2"
        for old, new in _ATTENTION.items():
            if pictured or not new.endswith("_img"):
                yield from _affine(f"{block}.{theirs}.{old}", f"{block}.{ours}.{new}")
        for old, new in (_NORMS | {"norm_added_k": "norm_k_img"} if pictured else _NORMS).items():
            yield f"{block}.{theirs}.{old}.weight", f"{block}.{ours}.{new}.weight"


def vae_names(config: VaeConfig) -> dict[str, str]:
    """diffusers' `AutoencoderKLWan` -> official."""
    names = dict([*_affine("quant_conv", "conv1"), *_affine("post_quant_conv", "conv2")])
    for half in ("encoder", "decoder"):
        names |= dict(
            [
                *_affine(f"{half}.conv_in", f"{half}.conv1"),
                (f"{half}.norm_out.gamma", f"{half}.head.0.gamma"),
                *_affine(f"{half}.conv_out", f"{half}.head.2"),
                *_residual(f"{half}.mid_block.resnets.0", f"{half}.middle.0"),
                (f"{half}.mid_block.attentions.0.norm.gamma", f"{half}.middle.1.norm.gamma"),
                *_affine(f"{half}.mid_block.attentions.0.to_qkv", f"{half}.middle.1.to_qkv"),
                *_affine(f"{half}.mid_block.attentions.0.proj", f"{half}.middle.1.proj"),
                *_residual(f"{half}.mid_block.resnets.1", f"{half}.middle.2"),
            ]
        )
    return names | dict(_downs(config)) | dict(_ups(config))


def _downs(config: VaeConfig) -> Iterator[tuple[str, str]]:
    """Layers are numbered alike on the way down."""
    per_level = config.num_res_blocks + 1
    for i in range(len(config.dim_mult) * per_level - 1):
        theirs, ours = f"encoder.down_blocks.{i}", f"encoder.downsamples.{i}"
        yield from _residual(theirs, ours) if i % per_level < config.num_res_blocks else _resample(theirs, ours)


def _ups(config: VaeConfig) -> Iterator[tuple[str, str]]:
    """Layers are numbered by level on the way up."""
    per_level = config.num_res_blocks + 2
    for i in range(len(config.dim_mult) * per_level - 1):
        level, within = divmod(i, per_level)
        theirs, ours = f"decoder.up_blocks.{level}", f"decoder.upsamples.{i}"
        if within <= config.num_res_blocks:
            yield from _residual(f"{theirs}.resnets.{within}", ours)
        else:
            yield from _resample(f"{theirs}.upsamplers.0", ours)


def _residual(theirs: str, ours: str) -> Iterator[tuple[str, str]]:
    """The shortcut is named whether or not the block has one: names without a tensor are never asked for."""
    yield f"{theirs}.norm1.gamma", f"{ours}.residual.0.gamma"
    yield from _affine(f"{theirs}.conv1", f"{ours}.residual.2")
    yield f"{theirs}.norm2.gamma", f"{ours}.residual.3.gamma"
    yield from _affine(f"{theirs}.conv2", f"{ours}.residual.6")
    yield from _affine(f"{theirs}.conv_shortcut", f"{ours}.shortcut")


def _resample(theirs: str, ours: str) -> Iterator[tuple[str, str]]:
    yield from _affine(f"{theirs}.resample.1", f"{ours}.resample.1")
    yield from _affine(f"{theirs}.time_conv", f"{ours}.time_conv")


def _affine(theirs: str, ours: str) -> Iterator[tuple[str, str]]:
    for name in ("weight", "bias"):
        yield f"{theirs}.{name}", f"{ours}.{name}"
