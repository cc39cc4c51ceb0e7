import importlib.util
import os
from pathlib import Path

import numpy as np
import pytest

from engine.lvbench.faults import clip_frames, video_frame
from engine.lvbench.judge import Method, judge_frames
from engine.lvbench.measures import MeasuresUnavailable, measures
from engine.lvbench.networks import FILES, Networks, Vector, load_networks
from engine.lvbench.pixels import Pixels
from engine.lvbench.published import ConsistencyTrack, PublishedMeasures
from engine.lvbench.video import VideoFacts

WEIGHTS = os.environ.get("INFERIX_LVBENCH_WEIGHTS")
LIBRARIES = ("pyiqa", "open_clip", "timm", "vbench")


def vector(*values: float) -> Vector:
    return np.array(values, dtype=np.float32)


def test_consistency_is_vbenchs_formula_on_each_part_and_on_the_whole() -> None:
    track = ConsistencyTrack(2)
    a, b, c = vector(1, 0), vector(0.6, 0.8), vector(0, 2)
    for part, features in ((0, a), (0, b), (0, c), (1, c), (1, b)):
        track.add(part, features)
    # part 1: b to first .6, to previous .6; c to first 0, to previous .8. part 2: b to c, .8 both
    np.testing.assert_allclose(track.curve(), [(0.6 + 0.4) / 2, 0.8], rtol=1e-6)
    assert track.whole() == pytest.approx((0.6 + 0.4 + 0.5 + (0.6 + 0.8) / 2) / 4)


def test_opposite_features_count_as_unlike_not_as_negative() -> None:
    track = ConsistencyTrack(1)
    for features in (vector(1, 0), vector(-1, 0)):
        track.add(0, features)
    assert track.whole() == 0.0


def fake_networks() -> Networks:
    def brightness(picture: Pixels) -> float:
        return float(picture.mean())

    return Networks(
        musiq=lambda picture: brightness(picture) / 255 * 100,
        laion=lambda picture: brightness(picture) / 255 * 10,
        clip=lambda picture: vector(1, 0),
        dino=lambda picture: vector(1, brightness(picture) / 255),
        interpolate=lambda before, after: ((before.astype(int) + after) // 2).astype(np.uint8),
    )


def test_parts_are_judged_by_the_networks_and_scaled() -> None:
    frames = [video_frame(i, i / 16, np.full((32, 48, 3), 10 * i, np.uint8)) for i in range(12)]
    judge = PublishedMeasures(2, fake_networks())
    for frame in frames:
        judge.observe(frame.index // 6, frame, sampled=True)
    scores = judge.finish()
    levels = [np.mean(range(6)) * 10 / 255, np.mean(range(6, 12)) * 10 / 255]
    np.testing.assert_allclose(scores.curves["clarity"], levels)
    np.testing.assert_allclose(scores.curves["aesthetic"], levels)
    np.testing.assert_allclose(scores.curves["motion"], [1.0, 1.0])  # brightness grows evenly
    np.testing.assert_allclose(scores.curves["background"], [1.0, 1.0])
    assert scores.curves["subject"][0] < scores.curves["subject"][1] < 1.0
    assert scores.vbench["imaging_quality"] == pytest.approx(np.mean(levels))


def test_only_sampled_frames_go_through_the_slow_networks_but_motion_sees_all() -> None:
    judge = PublishedMeasures(1, fake_networks())
    for i in range(9):
        level = 100 if i == 5 else 0  # a flash in an odd frame that is not sampled
        judge.observe(0, video_frame(i, i / 16, np.full((32, 48, 3), level, np.uint8)), sampled=i == 0)
    scores = judge.finish()
    assert scores.curves["clarity"][0] == 0.0
    assert scores.curves["motion"][0] == pytest.approx(1.0 - 100 / 255 / 4)


def test_a_missing_weight_file_is_named(tmp_path: Path) -> None:
    if importlib.util.find_spec("pyiqa") is None:
        pytest.skip("pyiqa is not installed, and a missing package is told before a missing file")
    load_networks.cache_clear()
    with pytest.raises(MeasuresUnavailable, match=f"expected {FILES['musiq']} in {tmp_path}, got no such file"):
        measures("published", 10, tmp_path)


def test_a_missing_package_is_named() -> None:
    if importlib.util.find_spec("pyiqa") is not None:
        pytest.skip("pyiqa is installed")
    load_networks.cache_clear()
    with pytest.raises(
        MeasuresUnavailable, match=r"MUSIQ: expected the package pyiqa, got none .*inferix-live\[lvbench\]"
    ):
        measures("published", 10)


@pytest.fixture(scope="module")
def networks() -> Networks:
    missing = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    if WEIGHTS is None:
        pytest.skip("INFERIX_LVBENCH_WEIGHTS names no folder with the published weights")
    return load_networks(Path(WEIGHTS))


def test_clip_agrees_with_its_library(networks: Networks) -> None:
    import open_clip
    import torch
    from PIL import Image

    path = str(Path(WEIGHTS or "") / FILES["clip_b32"])
    model, _, preprocess = open_clip.create_model_and_transforms("ViT-B-32-quickgelu", pretrained=path)
    picture = next(clip_frames("none", 1)).picture()
    with torch.inference_mode():
        expected = model.eval().encode_image(preprocess(Image.fromarray(picture))[None])[0].numpy()
    ours = networks.clip(picture)
    assert ours @ expected / np.linalg.norm(ours) / np.linalg.norm(expected) > 0.995


def test_musiq_agrees_with_its_library(networks: Networks) -> None:
    import pyiqa
    import torch

    path = str(Path(WEIGHTS or "") / FILES["musiq"])
    metric = pyiqa.create_metric("musiq-spaq", device=torch.device("cpu"), pretrained_model_path=path)
    picture = next(clip_frames("none", 1)).picture()
    expected = metric(torch.from_numpy(picture).permute(2, 0, 1)[None] / 255).item()
    assert networks.musiq(picture) == pytest.approx(expected, abs=0.5)


def test_the_published_measures_see_blur(networks: Networks) -> None:
    facts = VideoFacts("blur", 256, 144, 30, 2.0, "none")
    judge = PublishedMeasures(3, networks)
    for frame in clip_frames("blur", facts.frames):
        judge.observe(frame.index // 10, frame, sampled=frame.index % 5 == 0)
    curve = judge.finish().curves["clarity"]
    assert curve[2] < curve[0]


def test_the_set_is_named_in_the_verdict() -> None:
    verdict = judge_frames(clip_frames("none", 9), VideoFacts("c", 256, 144, 9, 0.5, "none"), Method(parts=3))
    assert verdict.to_json()["measures"] == "classic"
