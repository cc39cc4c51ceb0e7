"""Worlds made to be judged: one video per prompt, or per item of a data set with its captions as prompts over time.

The one file here that needs torch to be loaded and a model to run. Knows nothing of judging.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.progress import Progress

from engine.commands.generate import Refusals
from engine.lvbench.dataset import Item, prompt_times
from engine.movie import Movie
from engine.protocol import PromptChange
from engine.rollout import Request, Rollout


class WorldRefused(ValueError):
    """The model, the prompts or the length cannot be; the message says which."""


@dataclass(frozen=True)
class Script:
    """What one world is to show: (second, prompt), the first at 0."""

    name: str
    prompts: tuple[tuple[float, str], ...]


def scripts_of_file(path: Path) -> list[Script]:
    """One prompt a line; empty lines and lines that begin with # are left out."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise WorldRefused(f"{path}: expected a file of prompts in UTF-8, got: {error}") from error
    prompts = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not prompts:
        raise WorldRefused(f"{path}: expected one prompt a line, got none")
    return [Script(prompt, ((0.0, prompt),)) for prompt in prompts]


def script_of_item(item: Item, seconds: float) -> Script:
    """The captions of a data set's video as prompts at their times."""
    return Script(item.video.stem, tuple(prompt_times(item, seconds)))


def make_videos(
    model: str, scripts: list[Script], seconds: float, seed: int, folder: Path, bar: Progress
) -> Iterator[tuple[Script, Path]]:
    """Makes each script's world into `folder` and gives it as soon as it is there. Raises `WorldRefused`."""
    for number, script in enumerate(scripts, 1):
        path = folder / f"{number:03d}.mp4"
        changes = tuple(PromptChange(at_s, text) for at_s, text in script.prompts)
        try:
            _make(Request(model, changes, seconds, seed), path, bar, f"making {number}/{len(scripts)}")
        except Refusals as error:
            raise WorldRefused(f"{script.name}: {error}") from error
        yield script, path


def _make(request: Request, path: Path, bar: Progress, title: str) -> None:
    with Rollout.open(request) as rollout:
        geometry = rollout.model.geometry
        task = bar.add_task(title, total=rollout.total_pictures)
        with Movie(path, geometry.width, geometry.height, geometry.fps) as movie:
            for part in rollout:
                movie.add(part.pictures)
                bar.advance(task, len(part.pictures))
