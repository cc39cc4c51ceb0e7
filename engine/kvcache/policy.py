"""Which pages a block reads and which may go: integers in, integers out.

Pages are named by the index of their latent frame. A policy is data: the API, a preset and the command line share its
declarative form, `parse("window=21 sink=3 topk=2 store=int8")`, and it is priced in bytes before anything is allocated.
Knows no tensors, no pool and no model.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from typing import Literal, get_args

Store = Literal["native", "fp8", "int8", "int4"]
Positions = Literal["absolute", "window"]
Offload = Literal["none", "host"]


class PolicyError(ValueError):
    """A KV policy that makes no sense, by itself or for a model; the message says what was expected and what came."""


@dataclass(frozen=True)
class Policy:
    """What a block at frames [start, start + n) sees of the past.

    window: frames in the window, the sink and the block itself included; None shows everything, 0 nothing of itself.
    sink: first frames of the world (or since its last full re-cache) that stay in the window for ever.
    ranges, frames: frames that are shown whenever they are past, wherever the window is.
    topk: blocks outside of the window that are fetched by content, chosen by the block's own queries in each layer;
    remember: the newest frames outside of the window, which stay for `topk` to choose from; None keeps them all.
    store: how pages are kept; positions: "absolute" keeps rotated keys, "window" keeps them un-rotated and counts
    positions from the oldest visible frame, so that no position ever grows; offload: where kept pages wait unread.
    """

    window: int | None = None
    sink: int = 0
    ranges: tuple[tuple[int, int], ...] = ()
    frames: tuple[int, ...] = ()
    topk: int = 0
    remember: int | None = None
    store: Store = "native"
    positions: Positions = "absolute"
    offload: Offload = "none"

    def __post_init__(self) -> None:
        for name in ("window", "sink", "topk", "remember"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise PolicyError(f"{name}: expected a number of at least 0, got {value}")
        for a, b in self.ranges:
            if not 0 <= a < b:
                raise PolicyError(f"range: expected FIRST:END with 0 <= FIRST < END, got {a}:{b}")
        if any(f < 0 for f in self.frames):
            raise PolicyError(f"frames: expected indices of at least 0, got {min(self.frames)}")
        for name, allowed in (("store", Store), ("positions", Positions), ("offload", Offload)):
            if getattr(self, name) not in get_args(allowed):
                raise PolicyError(f"{name}: expected one of {', '.join(get_args(allowed))}; got {getattr(self, name)}")

    def check(self, frames_per_block: int) -> Policy:
        """Raise PolicyError if a block of this many frames does not fit, or nobody reads what is kept; return self."""
        if self.window and self.window < self.sink + frames_per_block:
            least = self.sink + frames_per_block
            raise PolicyError(
                f"window={self.window} cannot hold a sink of {self.sink} and a block of {frames_per_block} frames: "
                f"expected at least {least}"
            )
        if self.remember is not None and (self.window is None or not self.topk):
            raise PolicyError(
                f"remember={self.remember} is for frames out of sight that topk chooses from: "
                f"expected window=N and topk=N with it, got {self}"
            )
        return self

    @property
    def chosen(self) -> list[tuple[int, int]]:
        """`ranges` and `frames` together, as disjoint [first, end) in rising order, however long."""
        joined: list[tuple[int, int]] = []
        for a, b in sorted((*self.ranges, *((f, f + 1) for f in self.frames))):
            if joined and a <= joined[-1][1]:
                joined[-1] = (joined[-1][0], max(b, joined[-1][1]))
            else:
                joined.append((a, b))
        return joined

    def visible(self, start: int, n: int, origin: int = 0) -> list[int]:
        """Past frames that a block at [start, start + n) reads whatever their content, oldest first.

        `origin` is the first frame of the sink.
        """
        if self.window is None:
            return list(range(start))
        rolling = max(0, self.window - self.sink - n)
        shown = set(range(origin, min(origin + self.sink, start)))
        # until the window is full there is room for frames between sink and window
        shown.update(range(max(origin, start - rolling), start))
        shown.update(f for a, b in self.chosen for f in range(a, min(b, start)))
        return sorted(shown)

    def keep(self, held: Iterable[int], start: int, n: int, origin: int = 0) -> list[int]:
        """Of the frames held, those that this block or a later one may still read."""
        if self.window is None or (self.topk and self.remember is None):
            return sorted(held)
        shown = set(self.visible(start, n, origin))
        chosen = self.chosen
        near = {f for f in held if f in shown or any(a <= f < b for a, b in chosen)}
        far = sorted(f for f in held if f not in near) if self.topk else []
        return sorted(near.union(far[max(0, len(far) - (self.remember or 0)) :]))

    def most_read(self, n: int) -> int | None:
        """The most frames a block of n ever reads, itself included; None if that grows with the world."""
        if self.window is None:
            return None
        return max(self.window, self.sink + n) + sum(b - a for a, b in self.chosen) + self.topk * n

    def most_kept(self, n: int) -> int | None:
        """The most frames kept at once, staged ones included; None if that grows with the world."""
        near = replace(self, topk=0).most_read(n)
        if near is None or not self.topk:
            return near
        return None if self.remember is None else near + self.remember

    def most_held(self, n: int) -> int | None:
        """Of those, the most on the device."""
        return self.most_kept(n) if self.offload == "none" else replace(self, topk=0).most_read(n)

    def __str__(self) -> str:
        """The declarative form; `parse` reads it back."""
        default = Policy()
        words = ["full" if self.window is None else f"window={self.window}"]
        words += [f"range={a}:{b}" for a, b in self.ranges]
        words += [f"frames={','.join(map(str, self.frames))}"] if self.frames else []
        plain = ("sink", "topk", "remember", "store", "positions", "offload")
        return " ".join(
            words + [f"{k}={v}" for k, v in asdict(self).items() if k in plain and v != getattr(default, k)]
        )


def parse(text: str, base: Policy | None = None) -> Policy:
    """A policy from its declarative form, e.g. `window=21 sink=3`, `full store=int8`, `window=0 range=0:12 topk=4`.

    Words are separated by spaces or `+`; what is not said is taken from `base` (by default: show everything).
    """
    policy = base or Policy()
    for word in text.replace("+", " ").split():
        policy = _apply(policy, word)
    return policy


def _apply(policy: Policy, word: str) -> Policy:
    if word == "full":
        return replace(policy, window=None)
    name, equals, value = word.partition("=")
    if not equals or name not in {"range", *(f.name for f in fields(Policy))} - {"ranges"}:
        words = "full, window=N, sink=N, range=A:B, frames=A,B,…, topk=N, remember=N, store=…, positions=…, offload=…"
        raise PolicyError(f"KV policy: expected words of {words}; got {word!r}")
    try:
        if name == "range":
            a, b = value.split(":")
            return replace(policy, ranges=(*policy.ranges, (int(a), int(b))))
        if name == "frames":
            return replace(policy, frames=tuple(sorted({int(f) for f in value.split(",")})))
        if name in ("window", "sink", "topk", "remember"):
            return replace(policy, **{name: int(value)})  # type: ignore[arg-type]
        return replace(policy, **{name: value})  # type: ignore[arg-type]  # checked by __post_init__
    except ValueError as error:
        if isinstance(error, PolicyError):
            raise
        raise PolicyError(f"KV policy: cannot read {word!r}: {error}") from error
