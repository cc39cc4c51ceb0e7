from __future__ import annotations

import asyncio
import dataclasses
import gc
import os
import re
import subprocess
from pathlib import Path

import pytest
from aiortc.mediastreams import AudioStreamTrack, VideoStreamTrack
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from server.congestion import POOR_REPORTS
from server.peer import Peer
from server.problems import Problem
from server.sdp import advertise, choose_codec, clean_offer
from server.settings import IceSettings, Limits, Settings
from tests.server.harness import Live, event, live, until
from tests.server.watcher import Watcher, watching

SDP = {"Content-Type": "application/sdp"}


@pytest.mark.parametrize("codec", ["H264", "VP8"])
async def test_a_viewer_sees_the_picture_move(server: Live, codec: str) -> None:
    id = (await server.create())["id"]
    async with watching(server.http, id, codec) as watcher:
        frames = await watcher.frames(8)
        pictures = [frame.to_ndarray(format="rgb24") for frame in frames]
        assert pictures[0].shape == (80, 128, 3)
        assert sum(bool((abs(a.astype(int) - b) > 60).any()) for a, b in zip(pictures, pictures[1:], strict=False)) >= 6
        view = (await server.http.get(f"/v1/sessions/{id}/peers/{watcher.peer}")).json()
        assert (view["state"], view["codec"]) == ("connected", codec.lower())
        assert view["rtp_origin"] is not None and view["packets_sent"] >= 8
        assert (await server.show(id))["viewers"] == 1
    await until(lambda: len(server.session(id).viewers) == 0)


async def test_viewers_of_a_codec_share_one_encoding_and_vp8_is_turned_off_again(server: Live) -> None:
    session = server.session((await server.create())["id"])
    async with watching(server.http, session.id) as one, watching(server.http, session.id) as two:
        await asyncio.gather(one.frames(3), two.frames(3))
        assert len(session.encodings.h264) == 2
        assert len(session.encodings.vp8) == 0
        assert not session.encodings._vp8_on
    async with watching(server.http, session.id, "VP8") as three:
        await three.frames(2)
        assert session.encodings._vp8_on
    await until(lambda: len(session.encodings.vp8) == 0)
    session.encodings.spare()
    assert session.encodings._vp8_idle_since_s is not None
    session.encodings._vp8_idle_since_s -= 60
    session.encodings.spare()
    assert not session.encodings._vp8_on


async def test_delete_ends_a_viewer_at_once(server: Live) -> None:
    session = server.session((await server.create())["id"])
    async with watching(server.http, session.id) as watcher:
        await watcher.frames(1)
        assert (await server.http.delete(watcher.location)).status_code == 200
        assert len(session.viewers) == 0
        assert (await server.http.delete(watcher.location)).status_code == 404
        assert (await server.http.patch(watcher.location)).status_code == 405
        await until(lambda: watcher.pc.connectionState == "closed")


async def test_the_resource_speaks_whep(server: Live) -> None:
    id = (await server.create())["id"]
    url = f"/v1/sessions/{id}/whep"
    options = await server.http.options(url)
    assert (options.status_code, options.headers["accept-post"]) == (204, "application/sdp")
    watcher = Watcher(server.http)
    wrong_type = await server.http.post(url, content=await watcher.offer(), headers={"Content-Type": "text/plain"})
    assert wrong_type.status_code == 415
    assert (await server.http.post(url, content="v=0 nonsense", headers=SDP)).status_code == 400
    broken = "v=0\r\nm=video x\r\na=rtpmap:96 VP8/90000\r\n"
    assert (await server.http.post(url, content=broken, headers=SDP)).json()["code"] == "bad-sdp"
    no_codec = (await watcher.offer()).replace("H264", "H266")
    assert (await server.http.post(url, content=no_codec, headers=SDP)).status_code == 406
    assert (await server.http.post("/v1/sessions/nobody/whep", content="v=0", headers=SDP)).status_code == 404
    assert len(server.session(id).viewers) == 0
    await watcher.pc.close()


async def test_what_a_viewer_would_send_is_declined(server: Live) -> None:
    id = (await server.create())["id"]
    watcher = Watcher(server.http)
    watcher.pc.addTrack(AudioStreamTrack())
    watcher.pc.addTransceiver(VideoStreamTrack(), direction="sendonly")
    answer = await watcher.join(id)
    await watcher.frames(2)
    directions = re.findall(r"^a=(sendrecv|sendonly|recvonly|inactive)\r?$", answer.text, re.MULTILINE)
    assert directions == ["sendonly", "inactive", "inactive"]
    await watcher.pc.close()


async def test_an_offer_of_many_media_is_refused_unread(server: Live) -> None:
    id = (await server.create())["id"]
    for end in ("\r\n", "\n", "\r"):
        offer = GOOD_OFFER + f"m=audio 9 UDP/TLS/RTP/SAVPF 0{end}" * 4
        refused = await server.http.post(f"/v1/sessions/{id}/whep", content=offer, headers=SDP)
        assert (refused.status_code, refused.json()["code"]) == (400, "bad-sdp")
        assert "at most 4 m= lines, got 5" in refused.json()["detail"]


async def test_the_viewer_limit_is_said_and_lifts(settings: Settings) -> None:
    settings = dataclasses.replace(settings, limits=Limits(viewers=1))
    async with live(settings) as server:
        id = (await server.create())["id"]
        async with watching(server.http, id) as one:
            await one.frames(1)
            two = Watcher(server.http)
            refused = await server.http.post(f"/v1/sessions/{id}/whep", content=await two.offer(), headers=SDP)
            assert (refused.status_code, refused.json()["code"]) == (503, "viewer-limit")
            assert int(refused.headers["retry-after"]) > 0
            await two.pc.close()
        await until(lambda: len(server.session(id).viewers) == 0)
        async with watching(server.http, id) as three:
            await three.frames(1)


async def test_viewers_that_never_connect_or_vanish_are_dropped(settings: Settings) -> None:
    settings = dataclasses.replace(settings, ice=IceSettings(connect_s=1.0, silent_s=1.5))
    async with live(settings) as server:
        session = server.session((await server.create())["id"])
        never = Watcher(server.http)
        offer = await never.offer()
        answer = await server.http.post(f"/v1/sessions/{session.id}/whep", content=offer, headers=SDP)
        assert answer.status_code == 201 and len(session.viewers) == 1
        await until(lambda: len(session.viewers) == 0, 12)
        await never.pc.close()
        async with watching(server.http, session.id) as watcher:
            await watcher.frames(1)
            silence(watcher)
            await until(lambda: len(session.viewers) == 0, 12)


async def gone(watcher: Watcher) -> None:
    """Closing it earlier would leak aiortc's tasks on the viewer's side, which is not what is tested."""
    await until(lambda: watcher.pc.connectionState in ("closed", "failed"), 15)


def silence(watcher: Watcher) -> None:
    """From here on nothing the viewer sends arrives; its ICE consent would last another 30 s."""
    transport = watcher.pc.getTransceivers()[0].receiver.transport

    async def nothing(data: bytes) -> None:
        pass

    transport.transport._send = nothing


async def test_fifty_viewers_come_and_go_without_a_trace(server: Live) -> None:
    session = server.session((await server.create())["id"])

    async def come_and_go() -> None:
        async with watching(server.http, session.id) as watcher:
            await watcher.frames(1)
            await server.http.delete(watcher.location)

    async def counts() -> tuple[int, int]:
        await until(lambda: len(session.viewers._tasks) == 0)
        await asyncio.sleep(0.5)
        gc.collect()
        return len(asyncio.all_tasks()), len(os.listdir("/proc/self/fd"))

    await asyncio.gather(*(come_and_go() for _ in range(5)))  # opens the HTTP connections that stay
    tasks, files = await counts()
    for _ in range(10):
        await asyncio.gather(*(come_and_go() for _ in range(5)))
    tasks_after, files_after = await counts()
    assert tasks_after <= tasks + 1, asyncio.all_tasks()
    assert files_after <= files + 2


async def test_leaving_while_connecting_leaks_nothing(server: Live) -> None:
    session = server.session((await server.create())["id"])
    await asyncio.sleep(0.2)
    before = len(asyncio.all_tasks())
    for _ in range(5):
        watcher = Watcher(server.http)
        await watcher.join(session.id)
        await server.http.delete(watcher.location)
        await gone(watcher)
    await until(lambda: len(session.viewers._tasks) == 0, 15)
    await asyncio.sleep(0.5)
    assert len(asyncio.all_tasks()) <= before + 1, asyncio.all_tasks()


async def test_a_keyframe_request_reaches_the_engine(server: Live) -> None:
    session = server.session((await server.create())["id"])
    async with watching(server.http, session.id) as watcher:
        await watcher.frames(12)
        before = session.encodings.h264._asked_at_s
        receiver = watcher.pc.getTransceivers()[0].receiver
        stats = await receiver.getStats()
        ssrc = next(one.ssrc for one in stats.values() if one.type == "inbound-rtp")
        await receiver._send_rtcp_pli(ssrc)
        await until(lambda: session.encodings.h264._asked_at_s > before)


GST = """
import gi
gi.require_version("Gst", "1.0"); gi.require_version("GstWebRTC", "1.0")
from gi.repository import Gst, GstWebRTC
Gst.init(None)
assert all(Gst.ElementFactory.find(name) for name in ("webrtcbin", "nicesrc", "avdec_h264", "vp8dec"))
"""


def has_gstreamer() -> bool:
    python = Path("/usr/bin/python3")
    return python.exists() and subprocess.run([python, "-c", GST], capture_output=True).returncode == 0


@pytest.mark.parametrize("codec", ["h264", "vp8"])
async def test_gstreamer_watches_too(server: Live, codec: str) -> None:
    if not await asyncio.to_thread(has_gstreamer):
        pytest.skip("the system's Python has no GStreamer with webrtcbin, nice and decoders")
    session = server.session((await server.create())["id"])
    url = f"http://{server.base}/v1/sessions/{session.id}/whep"
    script = Path(__file__).with_name("gst_watcher.py")
    process = await asyncio.create_subprocess_exec("/usr/bin/python3", script, url, codec, "20", stdout=-1, stderr=-1)
    out, problems = await process.communicate()
    assert out.split() and int(out.split()[-1]) >= 20, problems.decode()  # one more may come before it stops


async def test_most_slow_viewers_lower_the_bitrate_and_a_single_one_gets_keyframes_only(server: Live) -> None:
    session = server.session((await server.create())["id"])

    def suffer(peer: Peer) -> None:
        peer.path._poor_reports = POOR_REPORTS
        peer.sent_bps = 400_000.0

    async with server.ws(session.id) as socket, watching(server.http, session.id) as one:
        await one.frames(2)
        suffer(session.viewers.get(one.peer))
        session.viewers.balance()
        await event(socket, "stats", bitrate=300_000)
        async with watching(server.http, session.id) as two:
            await two.frames(2)
            slow = session.viewers.get(two.peer)
            suffer(slow)
            session.viewers.get(one.peer).path._poor_reports = 0
            session.viewers.balance()
            assert slow.keyframes_only and not session.viewers.get(one.peer).keyframes_only
            sent = slow.view().packets_sent
            await one.frames(10)
            assert slow.view().packets_sent <= sent + 2
            slow.path.restricted_until_s = 0.0
            slow.path._poor_reports = 0
            session.viewers.balance()
            await two.frames(2)
            assert not slow.keyframes_only


async def test_viewers_are_told_the_ice_servers(settings: Settings) -> None:
    ice = IceSettings(stun_url="stun:s", turn_url="turn:t", turn_user="u", turn_password="p")
    async with live(dataclasses.replace(settings, ice=ice)) as server:
        id = (await server.create())["id"]
        links = (await server.http.options(f"/v1/sessions/{id}/whep")).headers.get_list("link")
        assert links[0] == '<stun:s>; rel="ice-server"'
        assert links[1] == '<turn:t>; rel="ice-server"; username="u"; credential="p"; credential-type="password"'
        servers = (await server.http.get("/v1/me")).json()["ice_servers"]
        assert [one["urls"] for one in servers] == ["stun:s", "turn:t"]


OFFER = "v=0\r\no=- 1 1 IN IP4 0.0.0.0\r\nm=video 9 UDP/TLS/RTP/SAVPF 96 97\r\na=setup:actpass\r\n"


def test_offers_lose_mdns_names_and_become_active() -> None:
    offer = OFFER + "a=candidate:1 1 udp 1 abc.local 5000 typ host\r\na=candidate:2 1 udp 1 10.0.0.1 5000 typ host\r\n"
    cleaned = clean_offer(offer)
    assert ".local" not in cleaned and "10.0.0.1" in cleaned and "a=setup:active" in cleaned


def test_h264_is_chosen_only_as_we_can_send_it() -> None:
    high = OFFER + "a=rtpmap:96 H264/90000\r\na=fmtp:96 packetization-mode=1;profile-level-id=640c1f\r\n"
    vp8 = high + "a=rtpmap:97 VP8/90000\r\n"
    baseline = (
        vp8
        + "a=rtpmap:98 H264/90000\r\n"
        + "a=fmtp:98 level-asymmetry-allowed=1;packetization-mode=1;profile-level-id=42e01f\r\n"
    )
    assert choose_codec(baseline) == "h264"
    assert choose_codec(vp8) == "vp8"
    with pytest.raises(Problem, match="expected H.264"):
        choose_codec(high)


def test_public_addresses_replace_our_own_port_by_port() -> None:
    answer = "a=candidate:1 1 udp 1 10.0.0.1 5000 typ host\r\na=candidate:2 1 udp 1 fd00::1 5001 typ host\r\na=x"
    assert advertise(answer, ("203.0.113.9",)) == "a=candidate:1 1 udp 1 203.0.113.9 5000 typ host\r\na=x"
    assert advertise(answer, ()) == answer


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 60), st.text(max_size=12)), max_size=4), st.data())
def test_broken_offers_are_a_problem_and_nothing_else(cuts: list[tuple[int, str]], data: st.DataObject) -> None:
    """Lines of a good offer replaced by anything."""
    lines = GOOD_OFFER.split("\r\n")
    for at, text in cuts:
        lines[at % len(lines)] = text
    try:
        choose_codec(clean_offer("\r\n".join(lines)))
    except Problem as problem:
        assert problem.status in (400, 406)


async def test_broken_offers_leave_the_server_well(server: Live) -> None:
    id = (await server.create())["id"]
    lines = GOOD_OFFER.split("\r\n")
    for at in range(0, len(lines), 3):
        for text in ("", "a=", "m=video", "a=fmtp:x y", "c=IN IP9 x"):
            offer = "\r\n".join([*lines[:at], text, *lines[at + 1 :]])
            answer = await server.http.post(f"/v1/sessions/{id}/whep", content=offer, headers=SDP)
            assert answer.status_code in (201, 400, 406), (answer.status_code, at, text)
            if answer.status_code == 201:
                await server.http.delete(answer.headers["Location"])


GOOD_OFFER = (Path(__file__).with_name("offer.sdp")).read_bytes().decode()
