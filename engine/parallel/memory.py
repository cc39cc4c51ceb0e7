"""Bytes that one rank needs, by formula, before anything is allocated: weights, cache, activations.

    weights       of the network, all of them on every rank: parameters x e
    beside it     text encoder, autoencoder and picture encoder, where the preset has them: every rank encodes prompts
                  for itself, and has the autoencoder to start worlds with and to decode its band of the pictures
    cache         pages of the rank's tokens and heads: see `Split.local_kv`; about 1 / ranks of the whole, or of its
                  team's ranks in a pipeline; with teams for branches of guidance, of one branch where each
                  has a cache, and as much as without where they share one; room to compute the past again is in it
    activations   at the widest place of a layer: t tokens of the rank's share in b rows, D wide, M in the feed-forward
                  net; queries, keys, values and result of attention over its chunk and heads; what is in transit

        layer       b F t (4 D + max(3 D, M)) e    F frames of a block, b of them: those in flight of a team
        attention   b F c (2 h + 2 k) d e          c tokens of the chunk, h and k heads of d that are the rank's
        transit     ulysses: as much again for what comes; ring: two shards of what goes round, and n partial results;
                    pipeline: keys and values of the other blocks in flight, of two layers that come, one that goes
        latents     b F S D e, gathered before the head

Measured peaks are above this by what an allocator keeps. `inferix plan --ranks` prints it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.kvcache.policy import Policy
from engine.kvcache.pool import PageFormat
from engine.models import KVGeometry
from engine.models.presets import Preset, Sizes
from engine.parallel.choose import LSE_BYTES
from engine.parallel.split import Layout, Split
from engine.stages import Plan


@dataclass(frozen=True)
class Model:
    """The sizes of a model that memory depends on."""

    parameters: int
    dim: int
    ffn_dim: int
    heads: int
    kv: KVGeometry
    frames_per_block: int
    in_flight: int = 1  # blocks of a pass
    sizes: Sizes | None = None  # of what lies beside the network
    room: Callable[[int], int] | None = None  # pages beside those held, while the past is computed again


@dataclass(frozen=True)
class RankMemory:
    """One rank's bytes."""

    rank: int
    weights: int  # of the network
    text_encoder: int  # unless it is freed between prompts
    decoder: int
    image_encoder: int
    cache: int
    activations: int

    @property
    def beside(self) -> int:
        """All weights but the network's."""
        return self.text_encoder + self.decoder + self.image_encoder

    @property
    def total(self) -> int:
        return self.weights + self.beside + self.cache + self.activations


def model_of(preset: Preset) -> Model:
    """The sizes of a row of the table."""
    s = preset.sizes
    kv = KVGeometry(s.layers, s.kv_heads, s.head_dim, s.tokens_per_frame)
    heads = max(s.kv_heads, s.dim // s.head_dim)
    in_flight = preset.sampler.window + 1 if isinstance(preset.sampler, Plan) else 1
    per_block, room = preset.frames_per_block, preset.recache_room
    return Model(s.parameters, s.dim, s.ffn_dim, heads, kv, per_block, in_flight, s, room)


def per_rank(
    model: Model, layout: Layout, policy: Policy, dtype: torch.dtype, most_frames: int = 0, caches: int = 1
) -> list[RankMemory]:
    """What each rank of a layout needs for one world.

    `dtype`: of weights and of pages that are not quantised; `most_frames`: latent frames that a cache which grows is to
    hold; `caches`: of a world, on one rank. Raises SplitError where ranks, tokens and heads do not go together.
    """
    held = policy.most_held(model.frames_per_block) or most_frames
    read = policy.most_read(model.frames_per_block) or most_frames
    found, item, s = [], dtype.itemsize, model.sizes
    beside = (s.text_bytes(item), s.decoder_bytes(item), s.image_parameters * item) if s else (0, 0, 0)
    for rank in range(layout.ranks):
        split = Split(layout.team, rank % layout.team.ranks, model.kv)
        own = max(1, caches // layout.cfg)
        page_bytes = PageFormat(split.local_kv, dtype, policy.store).page_bytes
        pages = (held + (model.room(held) if model.room else 0)) * page_bytes * own
        rows = own * -(-model.in_flight // layout.pipeline)  # whole blocks
        working = _activations(model, split, read, item, rows)
        working += _in_transit(model, split, item) if layout.pipeline > 1 else 0
        found.append(RankMemory(rank, model.parameters * item, *beside, pages, working))
    return found


def _in_transit(model: Model, split: Split, item: int) -> int:
    keys = model.frames_per_block * len(split.chunk) * split.local_kv.heads * model.kv.head_dim
    return 3 * (model.in_flight - 1) * 2 * keys * item


def _activations(model: Model, split: Split, read: int, item: int, rows: int) -> int:
    frames, d, layout = rows * model.frames_per_block, model.kv.head_dim, split.layout
    at_ulysses = layout.place(split.rank)[1]
    heads, kv_heads = len(split.q_heads(model.heads)[at_ulysses]), len(split.kv_heads[at_ulysses])
    layer = frames * len(split.mine) * (4 * model.dim + max(3 * model.dim, model.ffn_dim)) * item
    chunk = frames * len(split.chunk) * d
    attention = chunk * (2 * heads + 2 * kv_heads) * item
    transit = chunk * (2 * heads + 2 * kv_heads) * item if layout.ulysses > 1 else 0
    if layout.ring > 1:
        shard = 2 * read * len(split.chunks[0]) * kv_heads * d * item
        queries = chunk * heads * item
        transit += 2 * max(shard, queries) + layout.ring * (queries + queries // (d * item) * LSE_BYTES)
    gathered = frames * model.kv.tokens * model.dim * item
    return layer + attention + transit + gathered
