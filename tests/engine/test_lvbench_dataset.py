import json
from collections import Counter
from pathlib import Path

import pytest

from engine.lvbench.dataset import (
    Caption,
    DatasetBroken,
    Item,
    build_manifest,
    prompt_times,
    read_dataset,
    split_of,
)
from tests.engine.lvbench_clips import noise, write_video


def write_manifest(root: Path, *lines: dict[str, object] | str) -> None:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    (root / "manifest.jsonl").write_text(text, encoding="utf-8")


def test_a_folder_of_videos_becomes_a_data_set(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    write_video(tmp_path / "sub" / "good.mp4", noise(12, 32, 32))
    write_video(tmp_path / "short.mp4", noise(3, 32, 32))
    (tmp_path / "broken.mp4").write_bytes(b"not a video")
    write_video(tmp_path / "silent.mp4", noise(12, 32, 32))
    captions = tmp_path / "captions.csv"
    captions.write_text(
        "video,start_s,end_s,text\nsub/good.mp4,2,4,then\nsub/good.mp4,0,2,first\nshort.mp4,0,1,a\nbroken.mp4,0,1,b\n",
        encoding="utf-8",
    )
    listed, skipped = build_manifest(tmp_path, captions, tmp_path / "manifest.jsonl", 12)
    assert listed == 1
    assert {left.video.name: left.reason.split(", got")[0] for left in skipped} == {
        "short.mp4": "expected at least 12 frames",
        "broken.mp4": f"{tmp_path / 'broken.mp4'}: expected a video file",
        "silent.mp4": "expected captions for silent.mp4",
    }
    [item] = read_dataset(tmp_path)
    assert item.video == tmp_path / "sub" / "good.mp4" and item.split == split_of("sub/good.mp4")
    assert [caption.text for caption in item.captions] == ["first", "then"]


def test_a_failed_manifest_leaves_the_old_one(tmp_path: Path) -> None:
    write_manifest(tmp_path, {"video": "a.mp4", "captions": []})
    (tmp_path / "captions.json").write_text('{"a.mp4": [{"text": "no times"}]}', encoding="utf-8")
    with pytest.raises(DatasetBroken, match=r"a.mp4: caption 0: expected start_s or start, got \['text'\]"):
        build_manifest(tmp_path, tmp_path / "captions.json", tmp_path / "manifest.jsonl", 3)
    assert len(list(read_dataset(tmp_path))) == 1


def test_other_tools_names_are_read(tmp_path: Path) -> None:
    segments = [{"start": "0", "end": 2.5, "prompt": "a"}, {"start": 2.5, "end": 5, "caption": "b"}]
    write_manifest(
        tmp_path, {"path": "x.mp4", "segments": segments}, "", {"video": "y.mp4", "captions": ["one", "two"]}
    )
    x, y = read_dataset(tmp_path)
    assert x.captions == (Caption(0.0, 2.5, "a"), Caption(2.5, 5.0, "b"))
    assert y.captions == (Caption(0.0, 2.5, "one"), Caption(2.5, 5.0, "two"))


def test_the_split_is_stable_and_one_in_five_is_for_judging() -> None:
    assert [i for i in range(40) if split_of(f"video-{i}.mp4") == "eval"] == [0, 1, 3, 9, 10, 14, 15, 16, 28, 37]
    counts = Counter(split_of(f"video-{i}") for i in range(5000))
    assert counts["eval"] / 5000 == pytest.approx(0.2, abs=0.02)


def test_a_published_list_and_a_lines_own_split_come_first(tmp_path: Path) -> None:
    names = [f"v{i}.mp4" for i in range(6)]
    lines: list[dict[str, object]] = [{"video": name, "captions": []} for name in names]
    write_manifest(tmp_path, *lines[:5], {**lines[5], "split": "eval"})
    (tmp_path / "eval.txt").write_text("v1\nv3.mp4\n", encoding="utf-8")
    assert [item.video.name for item in read_dataset(tmp_path, "eval")] == ["v1.mp4", "v3.mp4", "v5.mp4"]
    assert [item.video.name for item in read_dataset(tmp_path, "train")] == ["v0.mp4", "v2.mp4", "v4.mp4"]


def test_captions_become_prompts_over_time() -> None:
    captions = (Caption(0.5, 2, "sea"), Caption(2, 4, "sea"), Caption(4, 6, "storm"), Caption(6, 8, "calm"))
    item = Item(Path("v.mp4"), "eval", captions)
    assert prompt_times(item, 6.0) == [(0.0, "sea"), (4.0, "storm")]
    assert prompt_times(item, 60.0) == [(0.0, "sea"), (4.0, "storm"), (6.0, "calm")]
    with pytest.raises(DatasetBroken, match="expected captions to take prompts from, got none"):
        prompt_times(Item(Path("v.mp4"), "eval", ()), 6.0)


HEAD = "video,start_s,end_s,text\n"


@pytest.mark.parametrize(
    ("captions", "reason"),
    [
        (HEAD + "a.mp4,0,2.5", "a.mp4: caption 0: expected a text, got None"),
        (HEAD + "a.mp4,0,inf,hello", "expected 0 <= start < end, both finite, got 0.0 and inf"),
        (HEAD + "a.mp4,0,2," + "x" * 200_000, "expected CSV, got after line 1: field larger"),
        ("video,text\n", r"expected the columns video, start_s, end_s, text, got \['video', 'text'\]"),
    ],
)
def test_captions_that_cannot_be_are_named(tmp_path: Path, captions: str, reason: str) -> None:
    (tmp_path / "captions.csv").write_text(captions, encoding="utf-8")
    with pytest.raises(DatasetBroken, match=reason):
        build_manifest(tmp_path, tmp_path / "captions.csv", tmp_path / "manifest.jsonl", 12)


def test_a_caption_of_two_lines_stays_one_of_two_lines(tmp_path: Path) -> None:
    write_video(tmp_path / "a.mp4", noise(12, 32, 32))
    (tmp_path / "captions.csv").write_text(HEAD + 'a.mp4,0,2,"a boat\nleaves"\n', encoding="utf-8")
    build_manifest(tmp_path, tmp_path / "captions.csv", tmp_path / "manifest.jsonl", 12)
    [item] = read_dataset(tmp_path)
    assert [caption.text for caption in item.captions] == ["a boat\nleaves"]


@pytest.mark.parametrize(("name", "reason"), [("manifest.jsonl", "jsonl:1: expected JSON"), ("eval.txt", "in UTF-8")])
def test_files_that_are_no_text_are_named(tmp_path: Path, name: str, reason: str) -> None:
    write_manifest(tmp_path, {"video": "a.mp4", "captions": []})
    (tmp_path / name).write_bytes(b"\xff\n")
    with pytest.raises(DatasetBroken, match=reason):
        list(read_dataset(tmp_path))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "manifest.jsonl:2: expected JSON"),
        ("[]", "manifest.jsonl:2: expected an object, got list"),
        ('{"captions": []}', r"expected video or path, got \['captions'\]"),
        ('{"video": 3, "captions": []}', "expected the video's path, got 3"),
        ('{"video": "a", "captions": {}}', "captions: expected a list, got dict"),
        ('{"video": "a", "captions": [], "split": "test"}', "expected train or eval, got 'test'"),
        ('{"video": "a", "captions": [{"start_s": 2, "end_s": 1, "text": "x"}]}', "expected 0 <= start < end"),
        (
            '{"video": "a", "captions": [{"start_s": "x", "end_s": 1, "text": "x"}]}',
            "expected start and end in seconds",
        ),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, reason: str) -> None:
    write_manifest(tmp_path, {"video": "fine.mp4", "captions": []}, line)
    items = read_dataset(tmp_path)
    assert next(items).video.name == "fine.mp4"  # read line by line: what comes before is there
    with pytest.raises(DatasetBroken, match=reason):
        next(items)


def test_a_folder_without_manifest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetBroken, match=r"expected a manifest.jsonl, got none"):
        next(read_dataset(tmp_path))
