"""Signals: what steers a world, as a value for every block.

A track answers "what is in force at block k?" from the changes it was given, and from nothing else: asking changes
nothing, so a block can be made again. Knows no model; encoding a prompt is handed in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from engine.models import Prompt
from engine.profiler import span
from engine.protocol import MAX_PROMPT_CHARS, ActionState, PromptChange

MOST_WAIT = 2
"""Blocks that a blend waits for another at most: hurried so, no dissolve is faster than one over two blocks."""

MOST_AT_A_BLOCK = 64
"""Prompts that may wait for the same block: as many as a schedule holds, and more than a paused world needs."""

Encode = Callable[[str, Prompt | None], Prompt]


class SignalError(ValueError):
    """A signal that cannot be taken; the message says what was expected and what came. Nothing has changed."""


@dataclass
class Switch:
    """A prompt to be seen from a block on."""

    block: int
    change: PromptChange
    prompt: Prompt | None = None  # encoded at first use
    alone: int | None = None  # the first block that shows nothing else, once that is known

    @property
    def blends(self) -> bool:
        return self.change.mode == "blend"

    def share(self, block: int) -> float:
        """How far a blend has come at the beginning of a block: evenly, or in a hurry for its last blocks."""
        assert self.alone is not None
        over, hurried = self.change.over_blocks, self.alone - MOST_WAIT
        if block >= self.alone:
            return 1.0
        if block <= hurried or self.alone == self.block + over:
            return (block - self.block) / over
        begun = (hurried - self.block) / over
        return begun + (1 - begun) * (block - hurried) / MOST_WAIT


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
    """The prompts of a world, in the order in which they take effect.

    A blend that is given while another is half shown waits for it, so that nothing jumps. The other is hurried, to be
    done within MOST_WAIT blocks; what is given meanwhile takes the place of the one that waits.
    """

    encode: Encode
    switches: list[Switch] = field(default_factory=list)

    def change(self, block: int, change: PromptChange) -> int:
        """Let a prompt take effect at `block`: after those given for it already, before those still to come.

        Returns the first block that will show it.
        """
        check_prompt(change.text)
        if change.mode == "blend" and change.over_blocks < 1:
            raise SignalError(f"over_blocks: expected at least 1, got {change.over_blocks}")
        if sum(s.block == block for s in self.switches) >= MOST_AT_A_BLOCK:
            raise SignalError(
                f"prompt: expected at most {MOST_AT_A_BLOCK} for block {block}, got one more before it began"
            )
        at = sum(s.block <= block for s in self.switches)
        for later in self.switches[at:]:
            later.prompt = None  # it may build on the prompt that now comes before it
        self.switches.insert(at, Switch(block, change))
        return self._scenes(block)[-1].block

    def at(self, block: int) -> PromptValue:
        """The value at a block, encoded now if it was not before."""
        due = [s for s in self.switches if s.block <= block]
        assert due, "a world's first prompt is in force from block 0"
        for i, switch in enumerate(due):
            if switch.prompt is None:
                with span("encode prompt"):
                    switch.prompt = self.encode(switch.change.text, due[i - 1].prompt if i else None)
        scenes = self._scenes(block)
        now = max(i for i, scene in enumerate(scenes) if scene.block <= block)
        scene, before = scenes[now], scenes[now - 1].prompt if now else None
        began, change = block == scene.block, scene.change
        assert scene.prompt is not None and scene.alone is not None
        if before is None or block >= scene.alone:
            return PromptValue(scene.prompt, None, 1.0, 1.0, began, change)
        return PromptValue(scene.prompt, before, scene.share(block + 1), scene.share(block), began, change)

    def forget_before(self, block: int) -> None:
        """Drop what no block from `block` on can ask for. Encodes nothing, so it cannot fail."""
        due = [s for s in self.switches if s.block <= block]
        if due and due[-1].prompt is not None:  # a prompt that is not encoded yet may build on any before it
            scenes = self._scenes(block)
            begun = [scene for scene in scenes if scene.block <= block]
            waiting = due[-1:] if len(begun) < len(scenes) else []
            self.switches = [*begun[-2:], *waiting, *self.switches[len(due) :]]

    def keep_until(self, block: int) -> None:
        """Drop what is still to come after `block`."""
        self.switches = [s for s in self.switches if s.block <= block]

    def copy(self) -> PromptTrack:
        return PromptTrack(self.encode, [replace(s) for s in self.switches])

    def _scenes(self, block: int) -> list[Switch]:
        """What is seen, one after the other, of the prompts given for `block` or before; the last may wait still."""
        scenes: list[Switch] = []
        for given in self.switches:
            if given.block > block:
                break
            while scenes and scenes[-1].blends and scenes[-1].block >= given.block:
                scenes.pop()  # replaced before it was seen
            begins = given.block
            if scenes and given.blends and (end := scenes[-1].alone or 0) > begins:
                begins = scenes[-1].alone = min(end, begins + MOST_WAIT)
            over = given.change.over_blocks if scenes and given.blends else 0
            alone = begins + over if given.alone is None else given.alone
            scenes.append(replace(given, block=begins, alone=alone))
        return scenes


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
