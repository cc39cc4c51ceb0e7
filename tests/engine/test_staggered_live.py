"""Worlds of staggered blocks in an engine process: pictures come out, prompts take effect, a picture can begin one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from engine.movie import Movie, write_png
from engine.protocol import BlockDone, Close, Opened, Packet, PromptChange, SignalApplied, Steer, WorldChanged
from tests import small_magi
from tests.engine_process import EngineProcess

WINDOW = small_magi.QUICK.window


WIDTH, HEIGHT = small_magi.PRESET.width, small_magi.PRESET.height


WAYS = {
    "one rank": ("PRESET", []),
    "a pipeline of two": ("PRESET", ["--ranks", "2", "--pipeline", "2"]),
    "branches on two teams": ("GUIDED_PRESET", ["--ranks", "2", "--cfg", "2"]),
}


@pytest.fixture(scope="module", params=list(WAYS.values()), ids=list(WAYS))
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    folder, (preset, arguments) = tmp_path_factory.mktemp("engine"), request.param
    small_magi.install(folder, preset)
    with EngineProcess(folder, "--max-load", "16", *arguments, model="small-magi") as process:
        process.greeting()
        yield process


def test_blocks_come_out_one_after_another_and_a_prompt_enters_with_the_next_to_start(engine: EngineProcess) -> None:
    engine.open("live", model="small-magi")
    card = engine.wait_for(Opened, lambda e: e.world == "live").card
    assert (card.name, card.frames_per_block, card.signals) == ("small-magi", 8, ("prompt",))
    engine.wait_for(Packet, lambda e: e.world == "live")
    engine.send(Steer("change", "live", PromptChange(0.0, "something else")))
    applied = engine.wait_for(SignalApplied, lambda e: e.id == "change")
    engine.wait_for(BlockDone, lambda e: e.world == "live" and e.block == applied.block)
    done = [e.block for e in engine.of(BlockDone, lambda e: e.world == "live")]
    assert done == list(range(applied.block + 1))
    assert applied.block >= WINDOW
    assert all(e.frames == 8 for e in engine.of(BlockDone, lambda e: e.world == "live"))
    engine.send(Close("live"))
    assert (
        engine.wait_for(WorldChanged, lambda e: e.world == "live" and e.state in ("ended", "failed")).state == "ended"
    )


@pytest.mark.parametrize(("pictures", "shown"), [(1, [(0, 8), (1, 8)]), (13, [(0, 8), (1, 4), (1, 4), (2, 8)])])
def test_a_picture_or_a_clip_begins_a_world(
    engine: EngineProcess, tmp_path: Path, pictures: int, shown: list[tuple[int, int]]
) -> None:
    """A picture is the head of the first block; whole latent frames of a clip are shown, then gone on from."""
    path, name = tmp_path / ("a.png" if pictures == 1 else "a.mp4"), f"start-{pictures}"
    if pictures == 1:
        write_png(path, np.full((HEIGHT, WIDTH, 3), 200, np.uint8))
    else:
        with Movie(path, WIDTH, HEIGHT, 24) as movie:
            movie.add(np.full((pictures, HEIGHT, WIDTH, 3), 200, np.uint8))
    engine.open(name, model="small-magi", start_picture=str(path))
    engine.wait_for(BlockDone, lambda e: e.world == name and e.block == shown[-1][0])
    assert [(e.block, e.frames) for e in engine.of(BlockDone, lambda e: e.world == name)] == shown
    engine.send(Close(name))
    over = engine.wait_for(WorldChanged, lambda e: e.world == name and e.state in ("ended", "failed"))
    assert over.state == "ended", over.reason
