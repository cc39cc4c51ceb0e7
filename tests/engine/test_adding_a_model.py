"""docs/adding-a-model.md, held to the model it builds; and that model through everything the contract promises."""

from __future__ import annotations

import re
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from engine import recipe
from engine.generator import Generator
from engine.kvcache.cache import KVCache
from engine.kvcache.pool import PageFormat, PagePool
from engine.models import BlockModel, presets
from engine.models.presets import LoadOptions
from engine.protocol import PromptChange, WorldSpec
from engine.rollout import Request, Rollout
from engine.world import World
from tests import lantern

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model as a package would bring it: an entry point, and nothing in the table."""
    entry = EntryPoint("lantern", "tests.lantern:PRESET", "inferix.models")

    def found(*, group: str) -> tuple[EntryPoint, ...]:
        return (entry,) if group == "inferix.models" else ()

    monkeypatch.setattr(presets, "entry_points", found)


def opened(*prompts: PromptChange) -> tuple[Generator, World]:
    preset = presets.find("lantern")
    model: BlockModel = presets.load("lantern", LoadOptions())
    pool = PagePool(PageFormat(model.geometry.kv, model.dtype), pages=32)
    cache = KVCache(pool, recipe.kv_policy(preset), model.geometry.frames_per_block)
    spec = WorldSpec("lantern", prompts)
    return recipe.generator(model, preset), World(spec, model, recipe.sampler(preset), (cache,))


RED, THEN_BLUE = PromptChange(0.0, "a red lantern"), PromptChange(1.0, "a blue lantern", "auto")


def made(generator: Generator, world: World, blocks: int) -> list[Tensor]:
    return [generator.next_block(world).latents for _ in range(blocks)]


def test_every_line_of_python_on_the_page_is_in_the_model() -> None:
    page = (ROOT / "docs" / "adding-a-model.md").read_text()
    source = Path(lantern.__file__).read_text()
    fences = re.findall(r"```python\n(.*?)```", page, re.S)
    assert len(fences) == 5
    for fence in fences:
        assert fence in source, f"the page and tests/lantern.py differ:\n{fence}"


def test_files_that_the_page_links_to_exist() -> None:
    for page in ("adding-a-model.md", "models.md"):
        for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", (ROOT / "docs" / page).read_text()):
            assert (ROOT / "docs" / link).exists(), f"{page}: {link}"


def test_a_roll_out_of_it_is_as_long_as_asked_and_the_same_twice() -> None:
    pictures = []
    for _ in range(2):
        with Rollout.open(Request("lantern", (RED, THEN_BLUE), 3.0)) as rollout:
            pictures.append(np.concatenate([part.pictures for part in rollout]))
    assert pictures[0].shape == (48, 64, 96, 3) and np.array_equal(pictures[0], pictures[1])
    assert pictures[0].std() > 1


def test_its_prompt_switches_blend() -> None:
    plain, steered = made(*opened(RED), 8), made(*opened(RED, THEN_BLUE), 8)
    assert all(torch.equal(a, b) for a, b in zip(plain[:2], steered[:2], strict=True))
    assert not torch.allclose(plain[2], steered[2], atol=1e-3)


def test_worlds_in_a_batch_are_the_worlds_alone() -> None:
    alone = [made(*opened(prompt), 6) for prompt in (RED, PromptChange(0.0, "a blue lantern"))]
    (generator, red), (_, blue) = opened(RED), opened(PromptChange(0.0, "a blue lantern"))
    for i in range(6):
        for row, block in enumerate(generator.next_blocks([red, blue])):
            assert torch.allclose(block.latents, alone[row][i], atol=1e-5)


def test_a_fork_goes_on_as_the_world_would() -> None:
    generator, world = opened(RED)
    made(generator, world, 5)
    twin = world.fork()
    assert all(torch.equal(a, b) for a, b in zip(made(generator, world, 3), made(generator, twin, 3), strict=True))


def test_pictures_do_not_depend_on_where_the_stream_is_cut() -> None:
    generator, world = opened(RED)
    latents = torch.cat(made(generator, world, 3))
    decoder, conditioning = world.model.decoder, world.model.condition(world.signals()[0])
    whole, _ = decoder.decode(latents, conditioning, None)
    first, state = decoder.decode(latents[:2], conditioning, None)
    rest, _ = decoder.decode(latents[2:], conditioning, state)
    assert torch.equal(torch.cat((first, rest)), whole)
