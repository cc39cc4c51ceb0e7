"""LV-Bench's layout: minute-long videos with a caption every two to three seconds, four fifths for training, one for
judging.

A data set is a folder with a `manifest.jsonl`, one video a line, read line by line:

    {"video": "videos/a.mp4", "split": "eval", "captions": [{"start_s": 0.0, "end_s": 2.5, "text": "a boat leaves"},
    ...]}

The split is, in this order: the line's own, a published list (`eval.txt`, one video name a line, beside the
manifest), a stable hash of the name. Lines made elsewhere may say `path` for `video`, `segments` for `captions`,
`caption` or `prompt` for `text`, `start` and `end`; captions that are bare strings follow each other every 2.5 s.
Knows nothing of judging.
"""

import csv
import hashlib
import io
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from typing import Literal, get_args

from engine.lvbench.video import VideoUnusable, probe

Split = Literal["train", "eval"]

MANIFEST = "manifest.jsonl"
PUBLISHED_EVAL_LIST = "eval.txt"
EVAL_SHARE = 0.2
BARE_CAPTION_S = 2.5
VIDEO_SUFFIXES = frozenset({".mp4", ".mkv", ".mov", ".webm", ".avi", ".m4v", ".flv", ".ts"})


class DatasetBroken(ValueError):
    """A manifest or captions file that does not follow the layout; the message names file, line, expected and got."""


@dataclass(frozen=True)
class Caption:
    """What is to be seen from `start_s` until `end_s`."""

    start_s: float
    end_s: float
    text: str


@dataclass(frozen=True)
class Item:
    """One video of a data set, captions in order of time."""

    video: Path
    split: Split
    captions: tuple[Caption, ...]


@dataclass(frozen=True)
class Skipped:
    """A video that was left out, and why."""

    video: Path
    reason: str


def read_dataset(root: Path, split: Split | None = None) -> Iterator[Item]:
    """The items of a folder, one at a time, of one split or of both."""
    path = root / MANIFEST
    if not path.is_file():
        raise DatasetBroken(f"{root}: expected a {MANIFEST}, got none; `inferix eval manifest` builds one")
    published = _published_eval_names(root)
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            item = _parse_item(f"{path}:{number}", line, root, published)
            if split is None or item.split == split:
                yield item


def split_of(name: str) -> Split:
    """Train or eval by a hash of the video's name: the same on every machine and in every year."""
    draw = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64
    return "eval" if draw < EVAL_SHARE else "train"


def prompt_times(item: Item, seconds: float) -> list[tuple[float, str]]:
    """The captions as prompts for a world of `seconds`: (second, text), the first at 0, like neighbours joined.

    A world takes each at the next block boundary, so every block is made under the caption of its time.
    """
    if not item.captions:
        raise DatasetBroken(f"{item.video}: expected captions to take prompts from, got none")
    times = [(0.0, item.captions[0].text)]
    for caption in item.captions[1:]:
        if caption.start_s < seconds and caption.text != times[-1][1]:
            times.append((caption.start_s, caption.text))
    return times


def build_manifest(folder: Path, captions: Path, out: Path, fewest_frames: int) -> tuple[int, list[Skipped]]:
    """Writes `out` for the videos under `folder`; returns how many it lists, and what was left out.

    `captions` is CSV with the columns video, start_s, end_s, text, or JSON {name: [{start_s, end_s, text}, ...]}; names
    are relative to `folder`. Videos stay where they are.
    """
    if not folder.is_dir():
        raise DatasetBroken(f"{folder}: expected a folder of videos, got none")
    texts, skipped, listed = _read_captions(captions), list[Skipped](), 0
    unfinished = out.with_name(out.name + ".part")
    with unfinished.open("w", encoding="utf-8") as lines:
        for video in sorted(p for p in folder.rglob("*") if p.suffix.lower() in VIDEO_SUFFIXES):
            name = video.relative_to(folder).as_posix()
            reason = _unusable(video, fewest_frames) if name in texts else f"expected captions for {name}, got none"
            if reason:
                skipped.append(Skipped(video, reason))
                continue
            line = {
                "video": Path(os.path.relpath(video, out.parent)).as_posix(),
                "split": split_of(name),
                "captions": [asdict(caption) for caption in texts[name]],
            }
            lines.write(json.dumps(line, ensure_ascii=False) + "\n")
            listed += 1
    unfinished.replace(out)
    return listed, skipped


def _unusable(video: Path, fewest_frames: int) -> str | None:
    try:
        facts = probe(video)
    except VideoUnusable as error:
        return str(error)
    if facts.frames < fewest_frames:
        return f"expected at least {fewest_frames} frames, got {facts.frames}"
    return None


def _published_eval_names(root: Path) -> frozenset[str] | None:
    path = root / PUBLISHED_EVAL_LIST
    if not path.is_file():
        return None
    return frozenset(Path(line.strip()).stem for line in _text(path, "names").splitlines() if line.strip())


def _parse_item(where: str, line: bytes, root: Path, published: frozenset[str] | None) -> Item:
    entry = _object(where, _json(where, line))
    name = _first(where, entry, "video", "path")
    if not isinstance(name, str):
        raise DatasetBroken(f"{where}: expected the video's path, got {name!r}")
    split = entry.get("split")
    if split is None:
        split = split_of(name) if published is None else ("eval" if Path(name).stem in published else "train")
    if split not in get_args(Split):
        raise DatasetBroken(f"{where}: split: expected train or eval, got {split!r}")
    return Item(
        root / name,
        "eval" if split == "eval" else "train",
        _parse_captions(where, _first(where, entry, "captions", "segments")),
    )


def _parse_captions(where: str, entries: object) -> tuple[Caption, ...]:
    if not isinstance(entries, list):
        raise DatasetBroken(f"{where}: captions: expected a list, got {type(entries).__name__}")
    captions = [_parse_caption(f"{where}: caption {index}", index, entry) for index, entry in enumerate(entries)]
    return tuple(sorted(captions, key=lambda caption: caption.start_s))


def _parse_caption(where: str, index: int, entry: object) -> Caption:
    if isinstance(entry, str):
        return Caption(index * BARE_CAPTION_S, (index + 1) * BARE_CAPTION_S, entry)
    fields = _object(where, entry)
    start, end = _first(where, fields, "start_s", "start"), _first(where, fields, "end_s", "end")
    text = _first(where, fields, "text", "caption", "prompt")
    if not isinstance(text, str):
        raise DatasetBroken(f"{where}: expected a text, got {text!r}")
    try:
        caption = Caption(float(str(start)), float(str(end)), text)
    except ValueError as error:
        raise DatasetBroken(f"{where}: expected start and end in seconds, got {start!r} and {end!r}") from error
    if not 0.0 <= caption.start_s < caption.end_s < inf:
        raise DatasetBroken(
            f"{where}: expected 0 <= start < end, both finite, got {caption.start_s} and {caption.end_s}"
        )
    return caption


def _read_captions(path: Path) -> dict[str, tuple[Caption, ...]]:
    text = _text(path, "captions")
    if path.suffix.lower() == ".json":
        videos = _object(str(path), _json(str(path), text))
        return {name: _parse_captions(f"{path}: {name}", entries) for name, entries in videos.items()}
    found: dict[str, list[object]] = {}
    for row in _rows(path, text):
        found.setdefault(row["video"], []).append(row)
    return {name: _parse_captions(f"{path}: {name}", entries) for name, entries in found.items()}


def _rows(path: Path, text: str) -> Iterator[dict[str, str]]:
    rows = csv.DictReader(io.StringIO(text, newline=""))
    expected = {"video", "start_s", "end_s", "text"}
    try:
        if not expected <= set(rows.fieldnames or ()):
            raise DatasetBroken(f"{path}: expected the columns video, start_s, end_s, text, got {rows.fieldnames}")
        yield from rows
    except csv.Error as error:
        raise DatasetBroken(f"{path}: expected CSV, got after line {rows.line_num}: {error}") from error


def _text(path: Path, what: str) -> str:
    try:
        return path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetBroken(f"{path}: expected {what} in UTF-8, got: {error}") from error


def _json(where: str, text: str | bytes) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DatasetBroken(f"{where}: expected JSON, got: {error}") from error


def _object(where: str, value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise DatasetBroken(f"{where}: expected an object, got {type(value).__name__}")
    return value


def _first(where: str, entry: dict[str, object], *names: str) -> object:
    for name in names:
        if name in entry:
            return entry[name]
    raise DatasetBroken(f"{where}: expected {' or '.join(names)}, got {sorted(entry)}")
