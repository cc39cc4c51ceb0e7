"""What happened to a world: what it was opened with and every signal it was given, with the block at which it came.

With the model's weights that is the whole world: `replay` makes it again, bit for bit on the same machine, backend
and thread count. Kept as JSON lines, the first one the world's opening; a file is written as things happen, so a
crash costs at most its last line. A disk that fills up costs the file its later lines and the world nothing. Knows no
torch, no cache and no clock.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Protocol, TypeVar

import msgspec

from engine.protocol import ActionState, PromptChange, WorldSpec

log = logging.getLogger(__name__)

T = TypeVar("T", bound=msgspec.Struct)
FORMAT = 1
MAX_CHANGES = 200_000  # kept in memory; one a block at most for actions, so this is days


class JournalError(ValueError):
    """A journal that cannot be read or replayed; the message says where, and what was expected."""


class Opening(msgspec.Struct, frozen=True):
    """The first line."""

    spec: WorldSpec
    digest: str  # of the model's weights
    continues: str = ""  # the world from whose snapshot it went on
    format: int = FORMAT


class Change(msgspec.Struct, frozen=True, omit_defaults=True):
    """One signal. `at` is the block that was next when it came, `block` the first one that it steered."""

    at: int
    block: int
    prompt: PromptChange | None = None
    action: ActionState | None = None
    id: str = ""


class Steerable(Protocol):
    """What a replay needs of a world."""

    block: int

    def steer(self, change: PromptChange) -> int: ...

    def act(self, state: ActionState) -> int: ...


class Journal:
    """One world's journal, in memory and, if `path` is given, on disk as it grows."""

    def __init__(self, opening: Opening, path: Path | None = None) -> None:
        """Raises OSError if the file cannot be made, or not hold the opening."""
        self.opening = opening
        self.changes: list[Change] = []
        self.truncated = False  # whether memory holds the beginning only
        self._file: IO[bytes] | None = None
        if path is not None:
            self._file = path.open("wb", buffering=0)  # what is refused is not tried again when the file is closed
            try:
                self._append(msgspec.json.encode(opening))
            except OSError:
                self.close()
                raise

    def note(self, change: Change) -> None:
        """Add a change. An action replaces the one before it if no block has begun between the two."""
        last = self.changes[-1] if self.changes else None
        superseded = last is not None and last.action is not None and change.action is not None and last.at == change.at
        if superseded:
            self.changes.pop()
        if len(self.changes) >= MAX_CHANGES:
            self.truncated = True
        else:
            self.changes.append(change)
        self._write(msgspec.json.encode(change))

    def lines(self) -> bytes:
        """The journal as it would be in a file."""
        rows = [msgspec.json.encode(self.opening), *map(msgspec.json.encode, self.changes)]
        return b"".join(row + b"\n" for row in rows)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, row: bytes) -> None:
        try:
            self._append(row)
        except OSError as error:
            log.warning("a world's journal ends on disk after %d changes: %s", len(self.changes), error)
            self.close()

    def _append(self, row: bytes) -> None:
        if self._file is None:
            return
        rest = memoryview(row + b"\n")
        while rest:  # a line that the disk cuts short is left out when the file is read
            rest = rest[self._file.write(rest) :]


def save(journal: Journal, path: Path) -> None:
    """Write a whole journal; what was at `path` stays until the new file is complete."""
    part = path.with_name(path.name + ".part")
    part.write_bytes(journal.lines())
    os.replace(part, path)


def load(path: Path) -> Journal:
    """Read a journal. A last line that a crash cut short is left out."""
    *rows, rest = path.read_bytes().split(b"\n")
    if not rows:
        raise JournalError(f"{path}: expected an opening line, got {rest[:40]!r}")
    opening = _decoded(rows[0], Opening, path, 1)
    if opening.format != FORMAT:
        raise JournalError(f"{path}: expected format {FORMAT}, got {opening.format}")
    journal = Journal(opening)
    for number, row in enumerate(rows[1:], start=2):
        journal.note(_decoded(row, Change, path, number))
    return journal


def replay(journal: Journal, world: Steerable, blocks: int, make: Callable[[], object]) -> Iterator[int]:
    """Make the first `blocks` blocks of a newly opened world as they were made; yield the index of each when done.

    `make` makes the world's next block. Raises JournalError if a signal would take effect at another block than then.
    """
    if journal.opening.continues:
        raise JournalError(
            f"expected a world's journal from its first block, got one that continues {journal.opening.continues}"
        )
    if journal.truncated:
        raise JournalError(f"expected a whole journal, got its first {len(journal.changes)} changes")
    waiting = iter([*journal.changes, None])
    change = next(waiting)
    while world.block < blocks:
        while change is not None and change.at <= world.block:
            _apply(change, world)
            change = next(waiting)
        index = world.block
        make()
        yield index


def _apply(change: Change, world: Steerable) -> None:
    block = change.block
    if change.prompt is not None:
        block = world.steer(change.prompt)
    if change.action is not None:
        block = world.act(change.action)
    if (world.block, block) != (change.at, change.block):
        came = f"block {block} when block {world.block} was next"
        raise JournalError(f"expected a signal for block {change.block} when block {change.at} was next, got {came}")


def _decoded(row: bytes, kind: type[T], path: Path, number: int) -> T:
    try:
        return msgspec.json.decode(row, type=kind)
    except msgspec.DecodeError as error:
        wanted = kind.__name__.lower()
        raise JournalError(f"{path}, line {number}: expected {wanted}, got {row[:60]!r}: {error}") from error
