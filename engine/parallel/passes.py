"""How ranks best share steps of blocks in flight: every block by token and head, whole blocks dealt out, branches of
guidance dealt out, or several of these.

The cost of a pass in one layer, in seconds, on p teams of a layout (deal.py), the machine as in choose.py:

    work t      all-to-alls of its blocks' tokens + for each of its blocks
                  4 F S' (S beside) h d / rate + what choose.py says of its attention, in the team's best mode
    message t   latency x teams sent to + bytes of keys and values / bandwidth, or of those received if that is more
    pipeline    max over teams of hop(work, message) + (p - 1) max message / layers
    step        max over the teams that share branches (parts.py) of the sum over their passes

S' is the rank's share of a frame's S tokens, so that with one team this is what sharing every block costs. The last
term of a pass is how long the youngest team waits for its first keys. A layer's work beside attention counts because a
team with more blocks has more of it, attention by block because younger ones see more of the past. Left out: what is
sent once a pass or a step and not in each layer. Knows no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.kvcache.deal import Blocks, Span
from engine.models import KVGeometry
from engine.parallel.choose import MARGIN, Call, Machine, attended, exchanged, hop, message, of_layout
from engine.parallel.deal import Dealt
from engine.parallel.split import Layout, Split
from engine.parts import ALONE, HISTORY, Part, parts, passes
from engine.stages import Distilled, Guided, Plan, Weights

PAST_BLOCKS = 8  # of a world in mid-course, where a model looks back without limit


@dataclass(frozen=True)
class Layers:
    """The sizes of a model's layers that the cost of a pass depends on."""

    kv: KVGeometry
    heads: int  # of queries
    beside: float  # work beside attention, in frames of keys that as much attention would see
    item_bytes: int = 4

    @classmethod
    def of(cls, kv: KVGeometry, heads: int, parameters: int, item_bytes: int) -> Layers:
        """From how many parameters there are in all layers: 2 products and sums each for every token."""
        return cls(kv, heads, parameters / (2 * kv.layers * kv.tokens * heads * kv.head_dim), item_bytes)


@dataclass(frozen=True)
class Step:
    """What a step of a world is made of."""

    blocks: Blocks  # of a pass with history
    weights: tuple[Weights, ...] = ()  # of branches, by active block; none: no guidance, one pass

    def passes(self, teams: int = 1) -> list[list[Blocks]]:
        """That each of the teams makes which share branches."""
        if not self.weights:
            return [[self.blocks]]
        made = passes(parts(self.weights, skip=True), teams, clean=self.blocks.kept > 0)
        return [[self._blocks(part) for part in own] for own in made]

    def _blocks(self, part: Part) -> Blocks:
        b, count = self.blocks, len(part.blocks)
        if part.branch == ALONE:
            return Blocks(0, b.width, tuple(Span(i * b.width, (i + 1) * b.width) for i in range(count)))
        return Blocks(b.start, b.width, b.spans[: b.kept + count], b.kept if part.branch == HISTORY else 0)


def predict_pass(layout: Layout, blocks: Blocks, layers: Layers, machine: Machine) -> float:
    """Seconds of one pass in one layer."""
    dealt = Dealt.over(layout.pipeline, blocks, layers.beside)
    work = [_work(layout.team, blocks, dealt.computed(i), layers, machine) for i in range(layout.pipeline)]
    messages = [_message(layout, dealt, i, layers, machine) for i in range(layout.pipeline)]
    slowest = max(hop(machine, p, x) for p, x in zip(work, messages, strict=True))
    return slowest + (layout.pipeline - 1) * max(messages) / layers.kv.layers


def predict_step(layout: Layout, step: Step, layers: Layers, machine: Machine) -> float:
    """Seconds of one step in one layer."""
    return max(sum(predict_pass(layout, each, layers, machine) for each in own) for own in step.passes(layout.cfg))


def choose_for_steps(
    layouts: Sequence[Layout], steps: Sequence[Step], layers: Layers, machine: Machine
) -> tuple[Layout, str]:
    """The layout for a world that will make these steps, and why.

    Blocks and branches are dealt out only where that saves the margin, since every team then keeps whole pages.
    """
    costs = {each: sum(predict_step(each, s, layers, machine) for s in steps) / len(steps) for each in layouts}
    best = min(costs, key=lambda each: costs[each] * (1 - MARGIN if each.teams == 1 else 1))
    said = ", ".join(f"{each} {1e3 * cost:.3g} ms" for each, cost in sorted(costs.items(), key=lambda x: x[1]))
    return best, f"a step in a layer takes {said}"


def steps_of(plan: Plan, width: int, window: int | None) -> list[Step]:
    """The steps of a stage of a world in mid-course. `width`: frames of a block; `window`: frames that it keeps."""
    return [_step(plan, index, width, window) for index in range(plan.steps_per_stage)]


def _step(plan: Plan, index: int, width: int, window: int | None) -> Step:
    """In the first of the stage the block that has just finished goes along, clean."""
    steps = [(plan.window - 1 - i) * plan.steps_per_stage + index for i in range(plan.window)]
    weights = tuple(plan.weights(plan.times[step]) for step in steps) if isinstance(plan.guidance, Guided) else ()
    reaches = [plan.reach_clean] if index == 0 else []
    reaches += [plan.reach(step) for step in steps]
    if isinstance(plan.guidance, Distilled) and plan.times[steps[0]] > plan.guidance.nearly_clean:
        reaches.append(1)  # the oldest once more, without history
    past = max([PAST_BLOCKS, *(reach or 0 for reach in reaches)])
    start = past * width
    oldest = 0 if window is None else max(0, start - (window - width))
    ends = [start + (i + 1) * width for i in range(len(reaches))]
    spans = (
        Span(oldest if r is None else max(oldest, end - r * width), end) for r, end in zip(reaches, ends, strict=True)
    )
    return Step(Blocks(start, width, tuple(spans), int(index == 0)), weights)


def _work(team: Layout, blocks: Blocks, numbers: Sequence[int], layers: Layers, machine: Machine) -> float:
    kv, width = layers.kv, blocks.width
    together = Call(kv, layers.heads, width * len(numbers), 0, layers.item_bytes)
    tokens = len(Split(team, 0, kv).mine)  # rank 0 has one more than others, if any has
    keys = layers.beside * kv.tokens * len(numbers)
    products = 4 * width * tokens * keys * layers.heads * kv.head_dim / machine.attention_rate
    calls = [Call(kv, layers.heads, width, blocks.frames_seen(i), layers.item_bytes) for i in numbers]
    attention = sum(min(attended(s, call, machine) for s in of_layout(team)) for call in calls)
    return products + exchanged(team, together, machine) + attention


def _message(layout: Layout, dealt: Dealt, team: int, layers: Layers, machine: Machine) -> float:
    split = Split(layout.team, 0, layers.kv)
    size = 2 * dealt.blocks.width * len(split.chunk) * max(map(len, split.kv_heads)) * layers.kv.head_dim
    others = [i for i in range(layout.pipeline) if i != team]
    ways = ([len(dealt.sent(team, i)) for i in others], [len(dealt.sent(i, team)) for i in others])
    return max(sum(message(machine, n * size * layers.item_bytes) for n in way if n) for way in ways)
