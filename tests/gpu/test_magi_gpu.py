"""MAGI-1 on a CUDA device against float32 on a CPU: half precision, float8 weights, a world in bfloat16."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from engine.kvcache.deal import Blocks, Deal, Span
from engine.kvcache.staggered import StaggeredContext
from engine.layers.attention import sdpa
from engine.models import Prompt
from engine.models.magi import MagiConditioning, MagiConfig, MagiTransformer
from engine.models.magi_fp8 import FP8_CAPABILITY, Fp8Linear, SmoothFp8Linear
from tests.small_magi import DISTILLED, random_weights, small_model, small_preset, small_world

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]
CONFIG = MagiConfig(layers=3, hidden=1024, ffn=2048, heads=8, kv_heads=2, head_dim=128, caption_channels=64)


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 4, 16, 16, 24, generator=generator)
    return x, torch.tensor([[0.7, 0.1]]), torch.randn(1, 20, 64, generator=generator)


def run(network: MagiTransformer, device: str) -> Tensor:
    x, t, text = (v.to(device) for v in inputs())
    prompt = Prompt("", text)
    context = StaggeredContext(Deal(Blocks(0, 2, (Span(0, 2), Span(0, 4)))), sdpa)
    out: Tensor = network(x, t, MagiConditioning(prompt, prompts=(prompt, prompt)), context)
    return out.float().cpu()


@pytest.fixture(scope="module")
def network() -> MagiTransformer:
    made = MagiTransformer(CONFIG)
    random_weights(made, 0.03)
    return made


def test_float32_on_the_device_is_float32(network: MagiTransformer) -> None:
    expected, got = run(network, "cpu"), run(copy.deepcopy(network).cuda(), "cuda")
    assert float((got - expected).abs().max() / expected.std()) < 1e-4


def test_half_precision_is_near_float32(network: MagiTransformer) -> None:
    half = MagiTransformer(CONFIG, torch.bfloat16)
    half.load_state_dict(network.state_dict())
    expected, got = run(network, "cpu"), run(half.cuda().eval().requires_grad_(False), "cuda")
    assert float((got - expected).norm() / expected.norm()) < 0.03


@pytest.mark.parametrize("kind", [Fp8Linear, SmoothFp8Linear])
def test_the_devices_float8_product_is_that_of_the_rounded_numbers(kind: type[Fp8Linear]) -> None:
    if torch.cuda.get_device_capability() < FP8_CAPABILITY:
        pytest.skip("this device does not multiply float8")
    generator = torch.Generator().manual_seed(0)
    linear = kind(256, 128)
    for name, value in linear.state_dict().items():
        scale = torch.full(value.shape, 0.02)
        value.copy_(scale if "scale" in name else torch.randn(value.shape, generator=generator).to(value.dtype))
    x = torch.randn(64, 256, generator=generator).bfloat16()
    expected, got = linear(x.float()), linear.cuda()(x.cuda()).float().cpu()
    assert float((got - expected).abs().max() / expected.std()) < 0.02


def test_a_world_in_half_precision_stays_finite_and_forks_alike() -> None:
    preset = small_preset(DISTILLED)
    model = small_model(preset)
    half = MagiTransformer(model.network.config, torch.bfloat16)
    half.load_state_dict(model.network.state_dict())
    model.network = half.cuda().eval().requires_grad_(False)
    generator, world = small_world(preset, model)
    generator.next_block(world)
    twin = world.fork()
    a, b = generator.next_block(world).latents, generator.next_block(twin).latents
    assert bool(a.isfinite().all()) and torch.equal(a, b)
