"""A stage can be killed at any moment; the pieces around it do what they say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from engine.models.tiny.decoder import KeyframeDecoder
from engine.models.tiny.model import load_from
from engine.models.tiny.network import TinyNetwork, latents_to_columns, to_latents, to_tokens
from engine.models.tiny.planet import CHANNELS, COLUMNS, ROWS
from engine.training import codec, data
from engine.training.data import CAMERA, CLOCK, NOW, WEIGHT, Clips, Shard, walk
from engine.training.export import NothingTrained, export
from engine.training.memory import MemoryFrames, choose_words, memory_losses, memory_optimiser
from engine.training.optimiser import Optimiser, orthogonal, rate
from engine.training.recipe import begin_with, newest_network
from engine.training.renderer import Frame
from engine.training.run import Chance, Plan, Stage
from engine.weights import WeightsError


class Killed(Exception):
    pass


def clips(count: int = 6) -> Clips:
    """A shard of random walks with noise for latents."""
    signals = np.stack([walk(np.random.default_rng(i)) for i in range(count)])
    latents = np.random.default_rng(0).normal(size=(count, 8, CHANNELS, ROWS, COLUMNS)).astype(np.float16)
    return Clips((Shard(signals, latents),))


def memory_stage(folder: Path) -> tuple[Stage, TinyNetwork]:
    torch.manual_seed(0)
    network = TinyNetwork(table=4, hidden=8, images=2)
    return Stage(Plan("memory", folder, steps=6, seed=3, save_every=2), network, memory_optimiser(network)), network


def train(folder: Path, die_at: int | None = None) -> dict[str, Tensor]:
    stage, network = memory_stage(folder)
    frames = MemoryFrames(clips(), range(1))
    stage.resume()

    def losses(chance: Chance) -> dict[str, Tensor]:
        if stage.step == die_at:
            raise Killed
        return memory_losses(network, frames, 4, chance)

    return stage.run(losses).state_dict()


def test_a_killed_run_ends_with_the_same_weights(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    whole = train(tmp_path / "a")
    with pytest.raises(Killed):
        train(tmp_path / "b", die_at=5)
    resumed = train(tmp_path / "b")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_muon_makes_singular_values_nearly_one() -> None:
    values = torch.linalg.svdvals(orthogonal(torch.randn(24, 16, generator=torch.Generator().manual_seed(0))))
    assert 0.5 < float(values.min()) and float(values.max()) < 1.5


def test_muon_and_adam_both_lower_a_loss() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(8, 8), torch.randn(64, 8)
    optimiser = Optimiser([layer.weight], [{"params": [layer.bias], "lr": 1e-2}], muon_lr=0.05)
    before = (layer(x) - x).square().mean().item()
    for step in range(40):
        optimiser.step((layer(x) - x).square().mean(), rate(step, 40))
    assert (layer(x) - x).square().mean().item() < 0.2 * before


def test_the_rate_warms_up_holds_and_falls() -> None:
    rates = [rate(step, 1000) for step in (0, 100, 499, 750, 999)]
    assert rates[0] < 0.1 and rates[1] == rates[2] == 1.0 and 0.4 < rates[3] < 0.6 and rates[4] == 0.03


def test_tokens_and_columns_are_the_same_latents() -> None:
    x = torch.randn(2, 4, CHANNELS, ROWS, COLUMNS)
    assert torch.equal(to_latents(to_tokens(x)), x)
    assert latents_to_columns(x.flatten(0, 1)).shape == (8, COLUMNS, ROWS * CHANNELS)


def test_the_codec_gives_back_what_its_components_span() -> None:
    numbers = np.random.default_rng(0)
    basis = numbers.normal(size=(3, 768)).astype(np.float32)
    patches = (numbers.normal(size=(4, ROWS * COLUMNS, 3)).astype(np.float32) @ basis) * 0.01 + 0.5
    pictures = codec.from_patches(patches)
    fitted = codec.fit(pictures, channels=3)
    assert np.abs(fitted.decode(fitted.encode(pictures)) - pictures).max() < 1e-3
    assert np.array_equal(codec.from_patches(codec.to_patches(pictures)), pictures)


def test_a_clip_of_a_seed_is_always_the_same_and_changes_only_between_blocks() -> None:
    for seed in range(60):
        signals = walk(np.random.default_rng(seed))
        assert np.array_equal(signals, walk(np.random.default_rng(seed)))
        assert ((0 < signals[:, WEIGHT]) & (signals[:, WEIGHT] <= 1)).all()
        changed = np.flatnonzero((np.diff(signals[:, NOW], axis=0) != 0).any(1)) + 1
        assert (changed % 2 == 0).all()
        assert np.allclose(np.diff(signals[:, CLOCK]) % 64, 0.25)
        assert (signals[:, CAMERA] >= 0).all() and (signals[:, CAMERA] < 4096).all()


def test_words_are_drawn_from_the_synonyms_of_what_is_shown() -> None:
    scene = np.array([[3.0, 2.0, 5.0]])
    drawn = {tuple(choose_words(scene, np.random.default_rng(i))[0].tolist()) for i in range(30)}
    assert len(drawn) > 10


def test_an_export_without_checkpoints_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(NothingTrained, match="expected checkpoints of the memory and the decoder, got none"):
        export(tmp_path, tmp_path / "weights")


def test_an_export_can_be_loaded(tmp_path: Path) -> None:
    network, decoder = TinyNetwork(), KeyframeDecoder()
    torch.save({"average": network.state_dict()}, tmp_path / "blocks.pt")
    torch.save({"average": decoder.state_dict()}, tmp_path / "decoder.pt")
    sizes = export(tmp_path, tmp_path / "weights")
    assert sum(sizes.values()) <= 25_000_000
    loaded = load_from(tmp_path / "weights").network.state_dict()
    assert all(torch.allclose(loaded[k], v, atol=1e-3, rtol=1e-3) for k, v in network.state_dict().items())


def test_shards_are_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "SHARD_CLIPS", 1)
    monkeypatch.setattr(data, "show", lambda signals: Frame())
    linear = codec.LinearCodec(
        np.zeros(768, np.float32), np.zeros((768, CHANNELS), np.float32), np.zeros((CHANNELS, 768), np.float32)
    )
    data.make_shard(tmp_path, 0, 0, linear)
    made = (tmp_path / "latents-000.npy").stat().st_mtime_ns
    data.make_shard(tmp_path, 0, 0, linear)
    assert (tmp_path / "latents-000.npy").stat().st_mtime_ns == made
    assert data.open_shard(tmp_path, 0).latents.shape == (1, 8, CHANNELS, ROWS, COLUMNS)


def test_a_run_may_begin_with_exported_weights(tmp_path: Path) -> None:
    network, decoder, run = TinyNetwork(), KeyframeDecoder(), tmp_path / "run"
    (tmp_path / "before").mkdir()
    run.mkdir()
    torch.save({"average": network.state_dict()}, tmp_path / "before" / "blocks.pt")
    torch.save({"average": decoder.state_dict()}, tmp_path / "before" / "decoder.pt")
    export(tmp_path / "before", tmp_path / "weights")
    begin_with(tmp_path / "weights", run)
    assert newest_network(run) == run / "start.pt" and (run / "codec.safetensors").exists()
    export(run, tmp_path / "again")
    for name in ("world", "decoder"):
        first, second = ((tmp_path / f / f"{name}.safetensors").read_bytes() for f in ("weights", "again"))
        assert first == second
    torch.save({"average": network.state_dict()}, run / "few-step.pt")
    begin_with(tmp_path / "weights", run)
    assert newest_network(run) == run / "few-step.pt"


def test_a_run_with_a_codec_of_its_own_cannot_begin_with_other_weights(tmp_path: Path) -> None:
    (tmp_path / "codec.safetensors").touch()
    with pytest.raises(WeightsError, match="expected a new run for the start weights, got one with a codec"):
        begin_with(Path("weights"), tmp_path)
