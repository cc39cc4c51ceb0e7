from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import av
import pytest

from server.recorder import SUFFIX, RecordingFile, remove_old
from server.settings import Limits, Settings
from tests.server.harness import ROOT, Live, event, live, until
from tests.server.packets import packets


def frames_of(path: Path) -> int:
    with av.open(str(path)) as container:
        return sum(1 for _ in container.decode(video=0))


async def test_a_recording_grows_can_be_fetched_and_is_whole_in_the_end(server: Live, tmp_path: Path) -> None:
    id = (await server.create(record=True))["id"]
    url = f"/v1/sessions/{id}/recording.mp4"
    async with server.ws(id, "?after=0") as socket:
        live_event = await event(socket, "output")
        assert (live_event["output"]["kind"], live_event["output"]["state"]) == ("recording", "live")
        recorder = server.session(id).outputs.recording()
        assert recorder is not None
        await until(lambda: (recorder.view().seconds or 0) > 2.5)
        growing = await server.http.get(url)
        assert growing.status_code == 200
        (tmp_path / "part.mp4").write_bytes(growing.content)
        assert frames_of(tmp_path / "part.mp4") >= 20
        stopped = await server.http.delete(f"/v1/sessions/{id}/outputs/{recorder.id}")
        assert (stopped.json()["state"], stopped.json()["reason"]) == ("stopped", "")
    whole = await server.http.get(url)
    (tmp_path / "whole.mp4").write_bytes(whole.content)
    seconds = stopped.json()["seconds"]
    assert frames_of(tmp_path / "whole.mp4") == round(seconds * 20)
    part = await server.http.get(url, headers={"Range": "bytes=4-7"})
    assert (part.status_code, part.content) == (206, b"ftyp")
    assert (await server.http.get(url, headers={"Range": "bytes=-10"})).content == whole.content[-10:]
    assert (await server.http.get(url, headers={"Range": "bytes=99999999-"})).status_code == 416
    assert (await server.http.get(url, headers={"Range": "lines=1-2"})).status_code == 416


async def test_one_recording_at_a_time_and_none_where_they_are_off(server: Live, settings: Settings) -> None:
    id = (await server.create(record=True))["id"]
    again = await server.http.post(f"/v1/sessions/{id}/outputs", json={"kind": "recording"})
    assert (again.status_code, again.json()["code"]) == (409, "recording-already")
    other = (await server.create())["id"]
    assert (await server.http.get(f"/v1/sessions/{other}/recording.mp4")).json()["code"] == "no-recording"
    async with live(dataclasses.replace(settings, record_dir=None)) as off:
        answer = await off.http.post("/v1/sessions", json={"record": True})
        assert (answer.status_code, answer.json()["code"]) == (503, "recording-off")
        assert not list(off.core.sessions)


async def test_a_session_that_could_not_record_as_asked_is_not_begun(settings: Settings) -> None:
    assert settings.record_dir is not None
    settings.record_dir.write_text("a file where the folder should be")
    async with live(settings) as server:
        unusable = await server.http.post("/v1/sessions", json={"record": True})
        assert (unusable.status_code, unusable.json()["code"]) == (503, "recording-off")
        twice = await server.http.post("/v1/sessions", json={"record": True, "outputs": [{"kind": "recording"}]})
        assert (twice.status_code, twice.json()["code"]) == (409, "recording-already")
        push = {"kind": "rtmp", "url": "rtmp://127.0.0.1:1/live/key"}
        too_many = await server.http.post("/v1/sessions", json={"record": True, "outputs": [push] * 8})
        assert (too_many.status_code, too_many.json()["code"]) == (409, "wrong-state")
        assert not list(server.core.sessions)


async def test_limits_end_a_recording_and_nothing_else(settings: Settings) -> None:
    limits = Limits(record_s=1.0)
    async with live(dataclasses.replace(settings, limits=limits)) as server:
        session = server.session((await server.create(record=True))["id"])
        recorder = session.outputs.recording()
        assert recorder is not None
        await until(lambda: recorder.state == "stopped")
        assert recorder.reason == "the limit of 1 s is reached"
        assert session.state == "running"
        assert frames_of(recorder.path) >= 20


async def test_a_full_disk_ends_the_recording_and_nothing_else(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.outputs.RecordingFile", FullDisk)
    session = server.session((await server.create(record=True))["id"])
    recorder = session.outputs.recording()
    assert recorder is not None
    await until(lambda: recorder.state == "failed")
    assert recorder.reason == "the disk is full"
    assert session.state == "running"


class FullDisk(RecordingFile):
    """Every write to /dev/full fails as on a full disk."""

    def __init__(self, path: Path, width: int, height: int, fps: float, limits: Limits) -> None:
        super().__init__(Path("/dev/full"), width, height, fps, limits)


def test_a_kill_loses_at_most_the_last_fragment(tmp_path: Path) -> None:
    path = tmp_path / "killed.mp4"
    script = f"""
import sys, time
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from server.recorder import RecordingFile
from server.settings import Limits
from tests.server.packets import packets
file = RecordingFile(Path({str(path)!r}), 128, 80, 20, Limits())
for packet in packets(100, keyframe_every=10):
    file.write(packet)
print("written", flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"written\n"
        os.kill(process.pid, signal.SIGKILL)
    assert 90 <= frames_of(path) <= 100


def test_a_recording_of_nothing_but_one_keyframe_is_readable(tmp_path: Path) -> None:
    file = RecordingFile(tmp_path / "one.mp4", 128, 80, 20, Limits())
    for packet in packets(1):
        file.write(packet)
    file.close()
    assert frames_of(tmp_path / "one.mp4") == 1


def test_old_recordings_go_and_other_files_stay(tmp_path: Path) -> None:
    old, new, other = (tmp_path / name for name in (f"a{SUFFIX}", f"b{SUFFIX}", "c.mp4"))
    for path in (old, new, other):
        path.touch()
    for path in (old, other):
        os.utime(path, (time.time() - 10 * 86_400,) * 2)
    assert remove_old(tmp_path, 7) == [old]
    assert not old.exists() and new.exists() and other.exists()


async def test_stopping_the_server_finishes_recordings(settings: Settings) -> None:
    async with live(settings) as server:
        session = server.session((await server.create(record=True))["id"])
        recorder = session.outputs.recording()
        assert recorder is not None
        await until(lambda: (recorder.view().seconds or 0) > 0.5)
    assert recorder.state == "stopped"
    assert frames_of(recorder.path) == round((recorder.view().seconds or 0) * 20)
    assert (session.state, session.reason) == ("ended", "the server stops")
    assert session.history.over
