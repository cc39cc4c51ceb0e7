"""Where published files lie, and how they get here.

    <folder>/<owner>/<repository>/<path>      e.g. ~/.cache/inferix/Wan-AI/Wan2.1-T2V-1.3B/Wan2.1_VAE.pth

`locate` finds a preset's files there and says exactly what is missing; `pull` fetches them with huggingface_hub
(resumed where a download was cut, nothing fetched when offline). Knows no modules.
"""

from __future__ import annotations

import hashlib
import logging
import re
from dataclasses import dataclass
from pathlib import Path

from engine.models.files import File, MissingFiles, Part
from engine.models.presets import Preset

logger = logging.getLogger(__name__)
DEFAULT_FOLDER = Path.home() / ".cache" / "inferix"


class HubUnavailable(RuntimeError):
    """Files cannot be fetched from here; the message says why, and where they may be put by hand."""


@dataclass(frozen=True)
class Found:
    """One published file as it lies here."""

    file: File
    path: Path | None  # None: missing
    bytes: int = 0
    sha256: str = ""
    published_sha256: str = ""  # as the hub said when it was pulled; "" if it was put here by hand

    @property
    def differs(self) -> bool:
        """Whether the file is not what was published."""
        return bool(self.sha256 and self.published_sha256) and self.sha256 != self.published_sha256


def locate(preset: Preset, folder: Path | None = None, *, tiny: bool = False) -> dict[Part, Path]:
    """The path of each part's checkpoint. Raises MissingFiles and names every file that is not there."""
    root = folder or DEFAULT_FOLDER
    wanted = [f for f in preset.files if tiny or f.part != "tiny_decoder"]
    paths = {file.part: path(root, file) for file in wanted}
    missing = [file for file in wanted if paths[file.part] is None]
    if missing:
        raise MissingFiles(f"{preset.name}: {layout(root, missing)}")
    return {part: found for part, found in paths.items() if found is not None}


def path(root: Path, file: File) -> Path | None:
    """Where a part's checkpoint is: the file, the index of its shards, or the folder that holds several."""
    base = root / file.repo
    found = [p for p in sorted(base.glob(file.path)) if p.is_file()]
    if not found:
        return None
    if "*" not in file.path:
        return found[0]
    index = [p for p in found if p.name.endswith(".index.json")]
    return index[0] if index else found[0].parent


def layout(root: Path, missing: list[File]) -> str:
    """What is expected where, for a person."""
    lines = [f"  {root / file.repo / file.path}    ({_size(file.bytes)}, {file.part})" for file in missing]
    return "expected these published files, which are not there:\n" + "\n".join(lines)


def pull(preset: Preset, folder: Path | None = None, *, tiny: bool = False) -> list[Path]:
    """Fetch what is missing. Raises HubUnavailable without a network, with the layout that would do instead."""
    root = folder or DEFAULT_FOLDER
    wanted = [f for f in preset.files if (tiny or f.part != "tiny_decoder") and path(root, f) is None]
    if not wanted:
        return []
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled
    except ImportError as error:
        raise HubUnavailable("expected the extra inferix-live[models] to be installed (huggingface_hub)") from error
    try:
        for file in wanted:
            logger.info("fetching %s of %s", file.path, file.repo)
            snapshot_download(file.repo, allow_patterns=[file.path], local_dir=root / file.repo)
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise HubUnavailable(f"{preset.name}: no download ({reason}); {layout(root, wanted)}") from error
    return [found for file in wanted if (found := path(root, file)) is not None]


def check(preset: Preset, folder: Path | None = None, *, hashes: bool = True) -> list[Found]:
    """Every file of a preset as it lies here, with its size and hash."""
    root = folder or DEFAULT_FOLDER
    found = []
    for file in preset.files:
        there = [p for p in sorted((root / file.repo).glob(file.path)) if p.is_file()]
        if not there:
            found.append(Found(file, None))
        published = {p: _published_sha256(root / file.repo, p) for p in there}
        found += [Found(file, p, p.stat().st_size, _sha256(p) if hashes else "", published[p]) for p in there]
    return found


def _published_sha256(repository: Path, file: Path) -> str:
    """What huggingface_hub noted beside a download: commit, tag, time. The tag of a large file is its SHA-256."""
    note = repository / ".cache" / "huggingface" / "download" / f"{file.relative_to(repository)}.metadata"
    lines = note.read_text().splitlines() if note.is_file() else []
    return lines[1] if len(lines) > 1 and re.fullmatch("[0-9a-f]{64}", lines[1]) else ""


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"
