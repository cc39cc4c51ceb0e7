"""A roll-out on several ranks: each makes the same world from the same request, and one shows it.

A roll-out reads no clock and hears nobody, so its ranks need no orders: they go from block to block in step.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch

from engine.models import BlockModel, presets
from engine.parallel.bands import Bands, BandThread, Joining, bands, shown, unseen
from engine.parallel.launch import Group
from engine.parallel.mesh import Mesh
from engine.parallel.rank import Member
from engine.parallel.wish import Wish
from engine.rollout import Request, Rollout


@contextmanager
def opened(request: Request, wish: Wish) -> Iterator[Rollout]:
    """The roll-out of a request. Raises what `Rollout.open` does, SplitError, or RankLost while it is iterated."""
    if wish.ranks == 1:
        with Rollout.open(request) as rollout:
            yield rollout
        return
    request.check()
    device = "cuda" if request.load.device.startswith("cuda") else "cpu"
    told = base64.b64encode(pickle.dumps((request, wish, torch.get_num_threads()))).decode()
    with Group.start(wish.ranks, "engine.parallel.together:follow", told, device=device) as group:
        model = presets.load(request.model, _on(request, 0).load)
        mesh = group.join()
        with group.guarded():
            shared = _bands(wish, request, model)
            with Joining(mesh) if shared else nullcontext() as joining:
                if joining is not None:
                    decoder = joining.decoder(request.model, shared[request.model], model.geometry.width)
                    model = shown(model, decoder)
                with _open(_on(request, 0), model, mesh, wish) as rollout:
                    yield rollout


def follow(member: Member) -> None:
    """What the other ranks do."""
    request, wish, threads = pickle.loads(base64.b64decode(member.argument))
    torch.set_num_threads(threads)
    request = _on(request, member.rank)
    model = presets.load(request.model, request.load)
    mesh, shared = member.join(), _bands(wish, request, model)
    with (
        BandThread(mesh, shared, threads) if shared else nullcontext(),
        _open(request, unseen(model), mesh, wish) as rollout,
    ):
        rollout.run_unseen()


def _bands(wish: Wish, request: Request, model: BlockModel) -> Bands:
    return bands({request.model: model}, wish.ranks) if wish.share_decoding else {}


def _open(request: Request, model: BlockModel, mesh: Mesh, wish: Wish) -> Rollout:
    preset = presets.find(request.model)
    return Rollout(request, model, preset, wish.spread(mesh, preset, model))


def _on(request: Request, rank: int) -> Request:
    """The request with the device of a rank."""
    if not request.load.device.startswith("cuda"):
        return request
    return replace(request, load=replace(request.load, device=f"cuda:{rank}"))
