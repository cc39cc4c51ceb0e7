"""The Wan network on a CUDA device against float32 on a CPU: half precision, compiled layers, attention backends."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from engine import recipe
from engine.layers.attention import BACKENDS, AttentionUnavailable, choose
from engine.models import Prompt
from engine.models.wan import OwnFrames, WanConditioning, WanConfig, WanTransformer
from engine.models.wan_model import WanModel, geometry
from engine.models.wan_vae import VaeConfig, WanDecoder, WanVae
from engine.protocol import PromptChange, WorldSpec
from engine.world import World
from tests.small_wan import random_weights, small_preset

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]
CONFIG = WanConfig(
    dim=256, ffn_dim=512, num_heads=2, num_layers=4, text_dim=64, text_len=32
)  # heads of 128, as published


@pytest.fixture(scope="module")
def network() -> WanTransformer:
    made = WanTransformer(CONFIG)
    random_weights(made, 0.04)
    return made


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(1, 3, 16, 16, 24), torch.full((1, 3), 750.0), torch.randn(1, 20, 64)


def flow(network: WanTransformer, device: str, dtype: torch.dtype, attend: str = "sdpa") -> Tensor:
    x, t, text = inputs()
    choice = choose(attend, device, dtype)
    network.attention = choice.attend
    conditioning = WanConditioning(Prompt("", text.to(device, dtype)))
    with torch.inference_mode():
        out: Tensor = network(x.to(device, dtype), t.to(device), conditioning, OwnFrames(choice.attend))
    return out.float().cpu()


def on_cuda(network: WanTransformer, dtype: torch.dtype) -> WanTransformer:
    return copy.deepcopy(network).to("cuda", dtype)


def test_float32_on_the_device_is_float32_on_the_cpu(network: WanTransformer) -> None:
    assert (
        flow(on_cuda(network, torch.float32), "cuda", torch.float32) - flow(network, "cpu", torch.float32)
    ).abs().max() < 1e-3


@pytest.mark.parametrize("backend", list(BACKENDS))
def test_every_backend_stays_near_float32_in_half_precision(network: WanTransformer, backend: str) -> None:
    try:
        got = flow(on_cuda(network, torch.bfloat16), "cuda", torch.bfloat16, backend)
    except AttentionUnavailable as reason:
        pytest.skip(str(reason))
    expected = flow(network, "cpu", torch.float32)
    assert (got - expected).norm() / expected.norm() < 0.03


def test_compiled_layers_stay_near_eager_ones_and_compile_once(network: WanTransformer) -> None:
    module = on_cuda(network, torch.bfloat16)
    eager = flow(module, "cuda", torch.bfloat16)
    module.compile_layers()
    compiled = flow(module, "cuda", torch.bfloat16)
    assert (compiled - eager).norm() / eager.norm() < 0.03
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    flow(module, "cuda", torch.bfloat16)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before


@pytest.mark.parametrize("kv", ["window=6 sink=1", "window=6 sink=1 positions=window", "window=6 sink=1 store=int8"])
def test_worlds_on_the_device_follow_those_on_the_cpu(network: WanTransformer, kv: str) -> None:
    preset = small_preset(kv, 2)
    made = []
    for device in ("cpu", "cuda"):
        module, decoder = copy.deepcopy(network).to(device), WanVae(VaeConfig(dim=8))
        random_weights(decoder, 0.1)
        shape = geometry(CONFIG, VaeConfig(), preset, 64, 64)
        model = WanModel("small", shape, module, lambda text: inputs()[2], WanDecoder(decoder.to(device)))
        sampler = recipe.sampler(preset)
        caches = recipe.caches(model, preset, recipe.kv_policy(preset), sampler)
        world = World(WorldSpec("small", (PromptChange(0.0, "a"),)), model, sampler, caches)
        generator = recipe.generator(model, preset)
        blocks = [generator.next_block(world) for _ in range(6)]
        pictures = decoder_pictures(model, world, blocks[0].latents)
        made.append((torch.stack([block.latents.float().cpu() for block in blocks]), pictures))
    (latents, pictures), (on_device, device_pictures) = made
    assert (latents - on_device).norm() / latents.norm() < 0.02
    assert pictures.shape == device_pictures.shape


def decoder_pictures(model: WanModel, world: World, latents: Tensor) -> Tensor:
    pictures, _ = model.decoder.decode(latents, model.condition(world.signals()[0]), None)
    return pictures.cpu()
