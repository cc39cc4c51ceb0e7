"""One forward pass of the Wan transformer against the reference's numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.layers.attention import sdpa
from engine.layers.rope import Rope3D, angles, axis_pairs
from engine.models import Expand, Prompt, Rotate
from engine.models.wan import OwnFrames, WanConditioning, WanConfig, WanTransformer, sinusoid
from tests.golden_wan import Case, cases, close, per_frame, transformer

pytestmark = pytest.mark.golden


@pytest.mark.parametrize("case", cases("text network, one pass"))
def test_a_bidirectional_text_model_gives_the_references_flow(case: Case) -> None:
    inputs, expected = case.tensors("inputs"), case.tensors("expected")
    model = transformer(case.config, case.tensors("weights"))
    x = per_frame(inputs["x"])
    t = inputs["t"][:, None].expand(x.shape[:2])
    full = WanConditioning(Prompt("", inputs["context_full"]))
    close(per_frame(model(x, t, full, OwnFrames())), expected["out_full"])
    close(sinusoid(inputs["t"], case.config["freq_dim"]), expected["sinusoidal_embedding_f64"], 1e-12)
    for i, length in enumerate(inputs["context_lengths"].tolist()):
        short = WanConditioning(Prompt("", inputs["context_full"][i : i + 1, :length]))
        close(per_frame(model(x[i : i + 1], t[i : i + 1], short, OwnFrames())), expected["out_short"][i : i + 1])


@pytest.mark.parametrize("case", cases("text network, one pass"))
def test_rotary_angles_are_the_references(case: Case) -> None:
    expected = case.tensors("expected")
    config = WanConfig.of(case.config)
    positions = torch.arange(len(expected["rope_freqs_real"]))
    angle = torch.cat([angles(positions, n) for n in axis_pairs(config.head_dim)], dim=-1)
    close(angle.cos(), expected["rope_freqs_real"], 1e-12)
    close(angle.sin(), expected["rope_freqs_imag"], 1e-12)


@pytest.mark.parametrize("case", cases("image network, one pass"))
def test_an_image_model_gives_the_references_flow(case: Case) -> None:
    inputs, expected = case.tensors("inputs"), case.tensors("expected")
    model = transformer(case.config, case.tensors("weights"))
    x = per_frame(inputs["x"])
    conditioning = WanConditioning(
        Prompt("", inputs["context"][:, : int(inputs["context_lengths"][0])]),
        image=Prompt("", inputs["clip_fea"]),
        picture=per_frame(inputs["y"]),
    )
    close(per_frame(model(x, inputs["t"][:, None].expand(x.shape[:2]), conditioning, OwnFrames())), expected["out"])


class Growing:
    """A context that keeps everything: rotated keys and values of every frame seen, in order."""

    def __init__(self) -> None:
        self.start = 0
        self.held: dict[int, tuple[Tensor, Tensor]] = {}

    def shard(self, tokens: Tensor) -> Tensor:
        return tokens

    def unshard(self, tokens: Tensor) -> Tensor:
        return tokens

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rotate: Rotate | None) -> Tensor:
        assert rotate is not None
        positions = torch.arange(self.start, self.start + q.shape[1])
        keys, values = rotate(k, positions).flatten(1, 2), v.flatten(1, 2)
        if layer in self.held:
            keys, values = (torch.cat(pair, 1) for pair in zip(self.held[layer], (keys, values), strict=True))
        self.held[layer] = keys, values
        return sdpa(rotate(q, positions).flatten(1, 2), keys, values).view_as(q)

    def attend_latent(self, layer: int, q: Tensor, latent: Tensor, expand: Expand, rotate: Rotate | None) -> Tensor:
        return self.attend(layer, q, *expand(latent), rotate)


@pytest.mark.parametrize("case", cases("causal network, two passes"))
def test_a_causal_model_with_a_time_per_frame_gives_the_references_flow(case: Case) -> None:
    inputs, expected = case.tensors("inputs"), case.tensors("expected")
    model = transformer(case.config["model"], case.tensors("weights"))
    conditioning, context = WanConditioning(Prompt("", inputs["context"])), Growing()
    for call in ("first", "second"):
        x = per_frame(inputs[f"x_{call}"])
        close(per_frame(model(x, inputs[f"t_{call}"], conditioning, context)), expected[f"flow_{call}"])
        context.start += x.shape[1]
    for layer, (keys, values) in context.held.items():
        close(keys, expected[f"cache.{layer}.k"][:, : keys.shape[1]])
        close(values, expected[f"cache.{layer}.v"][:, : values.shape[1]])


def test_rotation_depends_on_the_distance_of_frames_only() -> None:
    rope, q, k = Rope3D(32, 2, 3), torch.randn(1, 1, 6, 2, 32), torch.randn(1, 1, 6, 2, 32)
    near, far = (
        torch.einsum("bfshd,bfthd->hst", rope(q, torch.tensor([n + 3])), rope(k, torch.tensor([n])))
        for n in (0, 100_000)
    )
    assert (near - far).abs().max() < 1e-4


def test_a_share_of_the_tokens_is_rotated_as_in_the_whole() -> None:
    rope, x, positions = Rope3D(32, 2, 4), torch.randn(1, 3, 8, 2, 32), torch.arange(3)
    share = torch.tensor([1, 5, 6])
    assert torch.equal(rope(x[:, :, share], positions, share=share), rope(x, positions)[:, :, share])
    with pytest.raises(ValueError, match="expected 8 tokens per latent frame, got 3"):
        rope(x[:, :, share], positions)


def test_compiled_layers_give_the_same_flow() -> None:
    torch.manual_seed(0)
    sizes = {"dim": 24, "ffn_dim": 16, "num_heads": 2, "num_layers": 3, "text_dim": 6, "text_len": 4, "freq_dim": 8}
    model = WanTransformer(WanConfig.of(sizes)).eval().requires_grad_(False)
    x, t = torch.randn(1, 2, 16, 4, 4), torch.full((1, 2), 500.0)
    conditioning = WanConditioning(Prompt("", torch.randn(1, 3, 6)))
    plain = model(x, t, conditioning, OwnFrames())
    model.compile_layers(backend="eager")
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for _ in range(2):
        assert torch.equal(model(x, t, conditioning, OwnFrames()), plain)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before + 2  # both halves, once for all layers
