"""From the engine's settings to a crew: rank 0 starts the others, measures the links, and spreads its models.

    group = start(config, arguments)           # None for one rank; the others load while rank 0 does
    with led(group, config, models) as models: # the same models, their worlds now on all ranks

`follow` is what a started rank runs; `follow_torchrun`, one that torchrun has started.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace

import torch

from engine.config import EngineConfig
from engine.loader import Loaded, load, plan
from engine.parallel.bands import Bands, BandThread, Joining, bands, shown, unseen
from engine.parallel.cache import Spread
from engine.parallel.crew import Crew, Follower, LedGenerator, LedWorld, between_passes
from engine.parallel.launch import Group
from engine.parallel.mesh import Mesh
from engine.parallel.rank import Member
from engine.parallel.torchrun import Torchrun
from engine.parallel.wish import Wish
from engine.protocol import WorldSpec
from engine.world import World


def start(config: EngineConfig, arguments: Sequence[str]) -> Group | Torchrun | None:
    """Start the other ranks with this rank's own arguments, if torchrun has not. Raises SplitError."""
    if config.ranks == 1:
        return None
    if config.torchrun:
        return Torchrun(config, _kind(config))
    return Group.start(config.ranks, "engine.parallel.lead:follow", json.dumps([*arguments]), device=_kind(config))


@contextmanager
def led(group: Group | Torchrun | None, config: EngineConfig, models: dict[str, Loaded]) -> Iterator[dict[str, Loaded]]:
    """The models of rank 0, once all ranks have met.

    Raises RankLost (ExchangeFailed under torchrun), or SplitError where they cannot be spread.
    """
    if group is None:
        yield models
        return
    with closing(group):
        mesh = group.join()
        crew = Crew(mesh, group if isinstance(group, Group) else None)
        try:
            with crew.guarded():
                spreads = _spreads(mesh, config, models)
                shared = _bands(config, models)
                joining = Joining(mesh, crew.guarded) if shared else nullcontext()
            with joining as channel:
                made = {name: _led(loaded, spreads[name], crew) for name, loaded in models.items()}
                yield made if channel is None else {name: _joined(each, shared, channel) for name, each in made.items()}
        finally:
            crew.close()


def follow(member: Member) -> None:
    """A rank that does as rank 0 says, until it says that it is over."""
    config = EngineConfig.read(json.loads(member.argument), os.environ)
    _follow(config, f"cuda:{member.rank}", member.join)


def follow_torchrun(config: EngineConfig) -> None:
    """The same where torchrun has started it. Raises SplitError, or ExchangeFailed when another rank is gone."""
    fellow = Torchrun(config, _kind(config))
    _follow(config, fellow.meeting.device, fellow.join)
    fellow.close()


def _follow(config: EngineConfig, gpu: str, join: Callable[[], Mesh]) -> None:
    if _kind(config) == "cuda":
        config = replace(config, device=gpu)
    torch.set_num_threads(config.threads)
    os.nice(config.nice)
    loaded = {name: load(name, config, lambda: None) for name in config.models}
    mesh = join()
    spreads = _spreads(mesh, config, loaded)
    shared = _bands(config, loaded)
    models = {name: replace(each, spread=spreads[name], model=unseen(each.model)) for name, each in loaded.items()}
    for each in models.values():
        each.watched.pulse = functools.partial(between_passes, mesh)

    def open_world(spec: WorldSpec) -> World:
        return plan(models[spec.model], spec, config.kv_budget_bytes).open()

    with BandThread(mesh, shared, config.threads) if shared else nullcontext():
        Follower(mesh, open_world, {name: each.generator for name, each in models.items()}).follow()


def _led(loaded: Loaded, spread: Spread, crew: Crew) -> Loaded:
    loaded.watched.pulse = crew.watched(loaded.watched.pulse)
    generator = LedGenerator(loaded.model, loaded.preset.recache, crew)
    return replace(loaded, spread=spread, generator=generator, world=functools.partial(LedWorld, crew=crew))


def _joined(loaded: Loaded, shared: Bands, joining: Joining) -> Loaded:
    name = loaded.preset.name
    if name not in shared:
        return loaded
    return replace(loaded, model=shown(loaded.model, joining.decoder(name, shared[name], loaded.model.geometry.width)))


def _bands(config: EngineConfig, models: Mapping[str, Loaded]) -> Bands:
    """What each rank decodes: the same on every rank."""
    return bands({name: each.model for name, each in models.items()}, config.ranks) if config.share_decoding else {}


def _spreads(mesh: Mesh, config: EngineConfig, models: Mapping[str, Loaded]) -> dict[str, Spread]:
    """How each model's worlds are spread: the same on every rank."""
    c = config
    wish = Wish(c.ranks, c.ulysses, c.ring, c.exchange, c.pipeline, c.cfg, c.share_decoding)
    return {name: wish.spread(mesh, loaded.preset, loaded.model) for name, loaded in models.items()}


def _kind(config: EngineConfig) -> str:
    on_gpu = config.device.startswith("cuda") or (config.device == "auto" and torch.cuda.is_available())
    return "cuda" if on_gpu else "cpu"
