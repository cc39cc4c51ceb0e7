"""The MAGI-1 transformer against forwards computed with the public implementation, intermediates included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.kvcache.staggered import IsolatedContext, Span, StaggeredContext
from engine.layers.attention import sdpa
from engine.models import Context
from engine.models.magi import MagiConditioning, MagiTransformer
from tests.engine.magi_golden import cases, distil, error, load_case, prompts, transformer

pytestmark = pytest.mark.golden
TOLERANCE = 5e-5


def context(case: dict[str, Any], data: dict[str, Tensor]) -> Context:
    if len(data["x"]) > 1:
        return IsolatedContext(sdpa)
    width, tokens = case["chunk_width"], case["tokens_per_chunk"]
    spans = [Span(a * width // tokens, b * width // tokens) for a, b in data["kv_range"].tolist()]
    return StaggeredContext(case["slice_point"] * width, width, spans, sdpa)


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


@pytest.mark.parametrize("name", cases("magi_dit_forward"))
def test_forward_and_every_intermediate_equal_the_reference(name: str) -> None:
    case, data = load_case("magi_dit_forward", name)
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


@pytest.mark.parametrize("name", cases("magi_kv_cache"))
def test_reading_the_past_from_a_cache_changes_nothing(name: str) -> None:
    case, data = load_case("magi_kv_cache", name)
    model, width = transformer(case["config"], case["weights"]), case["chunk_width"]
    texts, ranges = prompts(data["y"], data["xattn_mask"]), case["kv_range_in_chunks"]
    dropped = tuple(case["caption_dropout_mask"])
    cached: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def read(layer: int, first: int, end: int) -> tuple[Tensor, Tensor]:
        k, v = (torch.cat(parts)[first:end].flatten(0, 1)[None] for parts in zip(*cached[layer], strict=True))
        return k, v

    def keep(layer: int, k: Tensor, v: Tensor) -> None:
        cached.setdefault(layer, []).append((k, v))

    def call(x: Tensor, t: Tensor, first: int, end: int, *, write: bool) -> Tensor:
        spans = [Span(a * width, b * width) for a, b in ranges[first:end]]
        view = StaggeredContext(first * width, width, spans, sdpa, read if first else None, keep if write else None)
        conditioning = MagiConditioning(texts[first], prompts=texts[first:end], dropped=dropped)
        part = x[:, :, first * width : end * width].transpose(1, 2)
        return model(part, t[:, first:end], conditioning, view).transpose(1, 2)

    def stored(chunks: int) -> dict[str, Tensor]:
        return {
            f"layer{layer}": torch.cat([torch.cat(pair, -1) for pair in parts[:chunks]]).flatten(0, 1)
            for layer, parts in cached.items()
        }

    errors = {"full": error(call(data["x"], data["t"], 0, 4, write=False), data["out_full"])}
    errors["a"] = error(call(data["x"], data["t"], 0, 1, write=True), data["out_step_a"])
    errors |= {f"cache a {n}": error(c, data[f"cache.after_a.{n}"]) for n, c in stored(1).items()}
    errors["b"] = error(call(data["x"], data["t"], 1, 4, write=True), data["out_step_b"])
    rows = 2 * case["tokens_per_chunk"]
    errors |= {f"cache b {n}": error(c, data[f"cache.after_b.{n}"][:rows]) for n, c in stored(2).items()}
    errors["c"] = error(call(data["x_second"], data["t_second"], 2, 4, write=False), data["out_step_c"])
    assert max(errors.values()) < TOLERANCE, errors
