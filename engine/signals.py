"""Signals: what steers a world, as a value for every block.

A track answers "what is in force at block k?" from the changes it was given, and from nothing else: asking changes
nothing, so a block can be made again. Knows no model; encoding a prompt is handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.models import Prompt
from engine.profiler import span
from engine.protocol import MAX_PROMPT_CHARS, ActionState, PromptChange

Encode = Callable[[str, Prompt | None], Prompt]


class SignalError(ValueError):
    """A signal that cannot be taken; the message says what was expected and what came. Nothing has changed."""


@dataclass
class Switch:
    """A prompt taking effect at a block."""

    block: int
    change: PromptChange
    prompt: Prompt | None = None  # encoded at first use


@dataclass(frozen=True)
class PromptValue:
    """The prompt of a block: `prompt` alone, or on its way from `before`."""

    prompt: Prompt
    before: Prompt | None
    weight: float  # at the end of the block
    weight_start: float  # at its beginning
    began: bool  # this block is the first under `prompt`
    change: PromptChange


@dataclass
class PromptTrack:
    """The prompts of a world, in the order in which they take effect."""

    encode: Encode
    switches: list[Switch] = field(default_factory=list)

    def change(self, block: int, change: PromptChange) -> None:
        """Let a prompt take effect at `block`: after those given for it already, before those still to come."""
        check_prompt(change.text)
        if change.mode == "blend" and change.over_blocks < 1:
            raise SignalError(f"over_blocks: expected at least 1, got {change.over_blocks}")
        at = sum(s.block <= block for s in self.switches)
        for later in self.switches[at:]:
            later.prompt = None  # it may build on the prompt that now comes before it
        self.switches.insert(at, Switch(block, change))

    def at(self, block: int) -> PromptValue:
        """The value at a block, encoded now if it was not before."""
        due = [s for s in self.switches if s.block <= block]
        assert due, "a world's first prompt is in force from block 0"
        for i, switch in enumerate(due):
            if switch.prompt is None:
                with span("encode prompt"):
                    switch.prompt = self.encode(switch.change.text, due[i - 1].prompt if i else None)
        last = due[-1]
        assert last.prompt is not None
        shown = _shown_before(due)
        before = None if shown is None else shown.prompt
        over = last.change.over_blocks if last.change.mode == "blend" else 1
        age, began = block - last.block, block == last.block
        if before is None or last.change.mode != "blend" or age >= over:
            return PromptValue(last.prompt, None, 1.0, 1.0, began, last.change)
        return PromptValue(last.prompt, before, (age + 1) / over, age / over, began, last.change)

    def forget_before(self, block: int) -> None:
        """Drop what no block from `block` on can ask for. Encodes nothing, so it cannot fail."""
        due = [s for s in self.switches if s.block <= block]
        if due and due[-1].prompt is not None:  # a prompt that is not encoded yet may build on any before it
            shown = _shown_before(due)
            self.switches = [s for s in self.switches if s is shown or s is due[-1] or s.block > block]

    def keep_until(self, block: int) -> None:
        """Drop what is still to come after `block`."""
        self.switches = [s for s in self.switches if s.block <= block]

    def copy(self) -> PromptTrack:
        return PromptTrack(self.encode, [Switch(s.block, s.change, s.prompt) for s in self.switches])


def _shown_before(due: Sequence[Switch]) -> Switch | None:
    """What the last of these takes over from: a blend that another replaced at its very first block was never seen."""
    return next((s for s in reversed(due[:-1]) if s.block < due[-1].block or s.change.mode != "blend"), None)


@dataclass
class ActionTrack:
    """The actions of a world: the newest wins, and one that is not renewed is released after `hold_blocks`."""

    hold_blocks: int
    states: list[tuple[int, ActionState]] = field(default_factory=list)

    def change(self, block: int, state: ActionState) -> None:
        """Let `state` be in force from `block` on; it replaces what was given for that block before."""
        self.states = [(b, s) for b, s in self.states if b < block] + [(block, state)]

    def at(self, block: int) -> ActionState:
        due = [(b, s) for b, s in self.states if b <= block]
        if not due or block - due[-1][0] >= self.hold_blocks:
            return ActionState()
        return due[-1][1]

    def forget_before(self, block: int) -> None:
        """Drop what no block from `block` on can ask for."""
        due = [(b, s) for b, s in self.states if b <= block]
        self.states = due[-1:] + [(b, s) for b, s in self.states if b > block]

    def copy(self) -> ActionTrack:
        return ActionTrack(self.hold_blocks, list(self.states))


def check_prompt(text: str) -> None:
    """Raise SignalError unless `text` can be a prompt."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise SignalError(f"prompt: expected text, got {text[error.start : error.end]!r} in it") from error
    if not text.strip():
        raise SignalError("prompt: expected some text, got none")
    if len(text) > MAX_PROMPT_CHARS:
        raise SignalError(f"prompt: expected at most {MAX_PROMPT_CHARS} characters, got {len(text)}")


def check_action(state: ActionState, keys: tuple[str, ...], values: tuple[str, ...]) -> None:
    """Raise SignalError unless every key and value is one that the model declares, within its range."""
    unknown = [k for k in state.keys if k not in keys] + [v for v in state.values if v not in values]
    if unknown:
        raise SignalError(f"action: expected keys of {list(keys)} and values of {list(values)}, got {unknown[0]!r}")
    for name, value in state.values.items():
        if not -1 <= value <= 1:
            raise SignalError(f"action {name}: expected a value in [-1, 1], got {value}")
