"""The MAGI-1 transformer against forwards computed with the public implementation, intermediates included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.branches import Branches, Call, Entry
from engine.kvcache.cache import KVCache
from engine.kvcache.deal import Blocks, Deal, Span
from engine.kvcache.policy import Policy
from engine.kvcache.pool import PageFormat, PagePool
from engine.kvcache.staggered import IsolatedContext, StaggeredContext
from engine.layers.attention import sdpa
from engine.models import Context, Geometry, KVGeometry, LatentShape
from engine.models.magi import MagiConditioning, MagiTransformer
from engine.models.magi_model import MagiModel
from engine.models.magi_vae import MagiVAE, MagiVAEConfig
from engine.stages import Distilled
from tests.golden_magi import cases, distil, error, load_case, prompts, transformer

pytestmark = pytest.mark.golden
TOLERANCE = 5e-5


def context(case: dict[str, Any], data: dict[str, Tensor]) -> Context:
    if len(data["x"]) > 1:
        return IsolatedContext(sdpa)
    width, tokens = case["chunk_width"], case["tokens_per_chunk"]
    spans = [Span(a * width // tokens, b * width // tokens) for a, b in data["kv_range"].tolist()]
    return StaggeredContext(Deal(Blocks(case["slice_point"] * width, width, tuple(spans))), sdpa)


class Recorder:
    """Keeps what the named modules and the context put out during one forward."""

    def __init__(self, model: MagiTransformer, inner: Context) -> None:
        self.seen: dict[str, Tensor] = {}
        self.inner = inner
        self.angles: Tensor | None = None
        first: Any = model.videodit_blocks.layers[0]
        attention: Any = first.self_attention
        names: dict[str, nn.Module] = {
            "x_embed_NCTHW": model.x_embedder,
            "y_adaln": model.y_embedder.y_proj_adaln,
            "final_linear": model.final_linear,
            "final_ln": model.videodit_blocks.final_layernorm,
            "layer0.attn_ln": attention.linear_qkv.layer_norm,
            "layer0.attn_post_norm": first.self_attn_post_norm,
            "layer0.attn_proj_out": attention.linear_proj,
            "layer0.gates_pre_softcap": first.ada_modulate_layer,
            "layer0.q_normed_pre_rope": attention.q_layernorm,
            "layer0.k_normed_pre_rope": attention.k_layernorm,
            "layer0.mlp_out": first.mlp,
            "layer0.mlp_post_norm": first.mlp_post_norm,
            "layer0.xattn_q_normed": attention.q_layernorm_xattn,
        }
        names |= {f"layer{i}.out": layer for i, layer in enumerate(model.videodit_blocks.layers)}
        self.hooks = [m.register_forward_hook(self._keep(n)) for n, m in names.items()]
        self.hooks.append(attention.linear_proj.register_forward_pre_hook(self._interleaved))
        self.hooks.append(model.y_embedder.y_proj_xattn.register_forward_hook(self._append("y_xattn_flat")))
        self.hooks.append(attention.k_layernorm_xattn.register_forward_hook(self._append("layer0.xattn_k_normed")))

    def _keep(self, name: str) -> Any:
        return lambda module, args, out: self.seen.__setitem__(name, out)

    def _append(self, name: str) -> Any:
        def keep(module: nn.Module, args: Any, out: Tensor) -> None:
            self.seen[name] = torch.cat([*([self.seen[name]] if name in self.seen else []), out[0]])

        return keep

    def _interleaved(self, module: nn.Module, args: tuple[Tensor]) -> None:
        halves = torch.unflatten(args[0], -1, (8, 2, -1))
        self.seen["layer0.self_attn_out"], self.seen["layer0.cross_attn_out"] = (
            halves[..., i, :].flatten(-2) for i in (0, 1)
        )

    def shard(self, tokens: Tensor) -> Tensor:
        return self.inner.shard(tokens)

    def unshard(self, tokens: Tensor) -> Tensor:
        return self.inner.unshard(tokens)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rotate: Any) -> Tensor:
        return self.inner.attend(layer, q, k, v, rotate)

    def attend_latent(self, layer: int, q: Tensor, latent: Tensor, expand: Any, rotate: Any) -> Tensor:
        return self.inner.attend_latent(layer, q, latent, expand, rotate)

    def as_stored(self, name: str, want: Tensor) -> Tensor:
        """Our (B, F, S, …) as the stored tokens-first (S, N, …)."""
        got = self.seen[name]
        if got.numel() == want.shape[-1] or got.shape == want.shape:
            return got.view(want.shape)
        flat: Tensor = got.flatten(1, 2).transpose(0, 1)
        rows: Tensor = got.flatten(0, 2)
        return rows if name == "layer0.xattn_q_normed" else flat


@pytest.mark.parametrize(("group", "name"), cases("magi_dit_forward"))
def test_forward_and_every_intermediate_equal_the_reference(group: str, name: str) -> None:
    case, data = load_case(group, name)
    model = transformer(case["config"], case["weights"])
    texts = prompts(data["y"], data["xattn_mask"])
    dropped = tuple(data["caption_dropout_mask"].tolist())
    conditioning = MagiConditioning(texts[0], prompts=texts, dropped=dropped, distil=distil(case))
    recorder = Recorder(model, context(case, data))
    out = model(data["x"].transpose(1, 2), data["t"], conditioning, recorder).transpose(1, 2)
    errors = {"out": error(out, data["out"])}
    for key, want in data.items():
        inner = key.removeprefix("inter.")
        if inner in recorder.seen:
            errors[key] = error(recorder.as_stored(inner, want), want)
    if "inter.condition" in data:
        errors["condition"] = error(model.condition(data["t"], conditioning), data["inter.condition"])
    assert max(errors.values()) < TOLERANCE, errors
    assert len(errors) > (20 if "inter.condition" in data else 0), sorted(errors)


class Cached:
    """Calls over the four blocks of a case, the past in a cache of ours."""

    def __init__(self, case: dict[str, Any], data: dict[str, Tensor]) -> None:
        self.case, self.data, self.width = case, data, case["chunk_width"]
        self.model = transformer(case["config"], case["weights"])
        self.texts = prompts(data["y"], data["xattn_mask"])
        config = self.model.config
        geometry = KVGeometry(config.layers, config.kv_heads, config.head_dim, case["tokens_per_chunk"] // self.width)
        self.cache = KVCache(PagePool(PageFormat(geometry), 64), Policy(), self.width)

    def __call__(self, x: Tensor, t: Tensor, first: int, end: int, *, write: bool = False) -> Tensor:
        spans = [Span(a * self.width, b * self.width) for a, b in self.case["kv_range_in_chunks"][first:end]]
        dropped = tuple(self.case["caption_dropout_mask"])
        conditioning = MagiConditioning(self.texts[first], prompts=self.texts[first:end], dropped=dropped)
        part = x[:, :, first * self.width : end * self.width].transpose(1, 2)
        with self.cache.stage(first * self.width, self.width) as staged:
            keep = staged if write else None
            view = StaggeredContext(Deal(Blocks(first * self.width, self.width, tuple(spans))), sdpa, self.cache, keep)
            out: Tensor = self.model(part, t[:, first:end], conditioning, view).transpose(1, 2)
            if write:
                staged.clean = True
                staged.commit()
        return out

    def stored(self, after: str, blocks: int) -> dict[str, float]:
        """What the cache holds of the first blocks, against the fixture."""
        errors = {}
        for layer in range(self.model.config.layers):
            k, v = self.cache.between(layer, 0, blocks * self.width)
            want = self.data[f"cache.{after}.layer{layer}"][: blocks * self.case["tokens_per_chunk"]]
            errors[f"{after} layer {layer}"] = error(torch.cat([k, v], -1).flatten(0, 1), want)
        return errors


@pytest.mark.parametrize(("group", "name"), cases("magi_kv_cache"))
def test_reading_the_past_from_a_cache_changes_nothing(group: str, name: str) -> None:
    case, data = load_case(group, name)
    call = Cached(case, data)
    blocks = len(case["kv_range_in_chunks"])
    errors = {"full": error(call(data["x"], data["t"], 0, blocks), data["out_full"])}
    errors["a"] = error(call(data["x"], data["t"], 0, 1, write=True), data["out_step_a"])
    errors |= call.stored("after_a", 1)
    errors["b"] = error(call(data["x"], data["t"], 1, blocks, write=True), data["out_step_b"])
    errors |= call.stored("after_b", 2)
    errors["c"] = error(call(data["x_second"], data["t_second"], 2, blocks), data["out_step_c"])
    errors["d"] = error(nearly_clean(call, case, data), data["d.velocity"])
    errors |= call.stored("after_d", 2)
    assert max(errors.values()) < TOLERANCE, errors


def nearly_clean(call: Cached, case: dict[str, Any], data: dict[str, Tensor]) -> Tensor:
    """Step d: the distilled rule over blocks 2 and 3, the older of them along a second time."""
    rule, width = case["step_d"], case["chunk_width"]
    blocks = torch.split(data["x_second"][0].transpose(0, 1), width)
    reaches = [end - first for first, end in case["kv_range_in_chunks"]]
    active = tuple(
        Entry(i, blocks[i], float(data["t_second"][0, i]), call.texts[i], reaches[i]) for i in range(2, len(blocks))
    )
    latent = LatentShape(blocks[0].shape[1], *blocks[0].shape[2:])
    geometry = Geometry(latent, call.cache.pool.format.geometry, width, 4, 8 * latent.width, 8 * latent.height, 24.0)
    vae = MagiVAE(MagiVAEConfig(z_channels=latent.channels, width=256, depth=1, heads=2))
    model = MagiModel("magi", geometry, call.model, lambda text: pytest.fail("no captions here"), vae, None)
    branches = Branches(model, call.cache)
    plan = Call(None, active, rule["num_steps"] / 2)
    step = branches.distilled(plan, None, Distilled(nearly_clean=0.0, history=rule["prev_chunks_scale"]))
    assert step.run == len(active) + 1
    return torch.cat(step.velocities).transpose(0, 1)[None]
