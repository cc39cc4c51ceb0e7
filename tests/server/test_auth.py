from __future__ import annotations

import dataclasses
import logging
import time
from pathlib import Path

import httpx
import pytest
import websockets
from hypothesis import given
from hypothesis import strategies as st

from server.auth import Access, Credentials, Rates, read_tokens
from server.problems import Problem
from server.serve import quiet_others
from server.settings import Limits, Settings, SettingsError
from tests.server.harness import LIMITS, Live, event, live
from tests.server.watcher import Watcher, watching

VIEWER, PLAYER, OTHER, ADMIN = (f"{name}-0123456789abcdef" for name in ("viewer", "player", "other", "admin"))


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens.txt"
    lines = [f"viewer vera {VIEWER}", f"player paul {PLAYER} # him", "", f"player olga {OTHER}", f"admin ada {ADMIN}"]
    path.write_text("\n".join(lines))
    return path


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


async def test_roles_decide_who_may_do_what(settings: Settings, tokens: Path) -> None:
    limits = dataclasses.replace(LIMITS, sessions_per_token=1)
    settings = dataclasses.replace(settings, token_file=tokens, limits=limits)
    async with live(settings) as server:
        http = server.http
        nobody = await http.get("/v1/sessions")
        assert (nobody.status_code, nobody.json()["code"]) == (401, "token-required")
        assert nobody.headers["www-authenticate"] == "Bearer"
        assert (await http.get("/v1/sessions", headers=bearer("x" * 20))).json()["code"] == "token-unknown"
        assert (await http.get("/metrics")).status_code == 401
        assert (await http.get("/healthz")).status_code == 200
        refused = await http.post("/v1/sessions", json={}, headers=bearer(VIEWER))
        assert (refused.status_code, refused.json()["code"]) == (403, "role-too-low")
        made = await http.post("/v1/sessions", json={}, headers=bearer(PLAYER))
        assert (made.status_code, made.json()["owner"]) == (201, "paul")
        again = await http.post("/v1/sessions", json={}, headers=bearer(PLAYER))
        assert (again.status_code, again.json()["code"]) == (429, "too-many-sessions")
        url = f"/v1/sessions/{made.json()['id']}"
        for token, code in ((VIEWER, "role-too-low"), (OTHER, "not-your-session"), (PLAYER, None), (ADMIN, None)):
            answer = await http.post(f"{url}/prompt", json={"text": "x"}, headers=bearer(token))
            assert answer.json().get("code") == code, token
        assert (await http.get(url, headers=bearer(VIEWER))).status_code == 200
        assert (await http.delete(url, headers=bearer(OTHER))).status_code == 403
        assert (await http.get("/v1/me", headers=bearer(PLAYER))).json()["name"] == "paul"


async def test_a_signed_link_opens_one_session_and_only_for_watching(settings: Settings, tokens: Path) -> None:
    async with live(dataclasses.replace(settings, token_file=tokens)) as server:
        admin = httpx.AsyncClient(base_url=server.http.base_url, headers=bearer(ADMIN))
        async with admin:
            one, two = [(await admin.post("/v1/sessions", json={})).json()["id"] for _ in range(2)]
            link = (await admin.post(f"/v1/sessions/{one}/links", json={"ttl_s": 60})).json()
            player = (await admin.post(f"/v1/sessions/{one}/links", json={"role": "player"})).json()
        assert link["url"] == f"/s/{one}?access={link['access']}"
        query = f"?access={link['access']}"
        assert (await server.http.get(f"/v1/sessions/{one}{query}")).status_code == 200
        assert (await server.http.get(f"/v1/sessions/{two}{query}")).status_code == 403
        listed = (await server.http.get("/v1/sessions", headers=bearer(link["access"]))).json()
        assert [session["id"] for session in listed["sessions"]] == [one]
        assert (await server.http.post(f"/v1/sessions{query}", json={})).status_code == 403
        assert (await server.http.post(f"/v1/sessions/{one}/pause{query}")).status_code == 403
        assert (await server.http.post(f"/v1/sessions/{one}/links{query}", json={})).status_code == 403
        altered = query.replace("v1.e", "v1.f")
        assert (await server.http.get(f"/v1/sessions/{one}{altered}")).json()["code"] == "token-unknown"
        prompt = await server.http.post(
            f"/v1/sessions/{one}/prompt", json={"text": "x"}, headers=bearer(player["access"])
        )
        assert prompt.status_code == 202
        assert (await server.http.delete(f"/v1/sessions/{two}", headers=bearer(player["access"]))).status_code == 403
        async with httpx.AsyncClient(base_url=server.http.base_url, headers=bearer(link["access"])) as guest:
            async with watching(guest, one) as watcher:
                await watcher.frames(1)
            stranger = Watcher(guest)
            sdp = {"Content-Type": "application/sdp"}
            refused = await guest.post(f"/v1/sessions/{two}/whep", content=await stranger.offer(), headers=sdp)
            assert refused.status_code == 403
            await stranger.pc.close()


async def test_a_websocket_takes_its_token_as_a_subprotocol(settings: Settings, tokens: Path) -> None:
    async with live(dataclasses.replace(settings, token_file=tokens)) as server:
        made = await server.http.post("/v1/sessions", json={}, headers=bearer(PLAYER))
        id = made.json()["id"]
        protocols = [websockets.Subprotocol("inferix.v1"), websockets.Subprotocol(f"bearer.{VIEWER}")]
        async with server.ws(id, subprotocols=protocols) as socket:
            assert socket.subprotocol == "inferix.v1"
            welcome = await event(socket, "welcome")
            assert (welcome["role"], welcome["can_steer"]) == ("viewer", False)
            await socket.send('{"type":"prompt","id":"p","text":"x"}')
            assert (await event(socket, "error"))["code"] == "role-too-low"
            await socket.send('{"type":"ping","id":"t"}')
            assert (await event(socket, "pong"))["id"] == "t"
        async with server.ws(id) as socket:
            with pytest.raises(websockets.ConnectionClosed) as closed:
                await socket.recv()
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 4401


async def test_no_secret_is_logged_at_any_level(
    settings: Settings, tokens: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quiet_others()
    caplog.set_level(logging.DEBUG)
    async with live(dataclasses.replace(settings, token_file=tokens)) as server:
        id = (await server.http.post("/v1/sessions", json={}, headers=bearer(PLAYER))).json()["id"]
        link = (await server.http.post(f"/v1/sessions/{id}/links", json={}, headers=bearer(PLAYER))).json()
        protocols = [websockets.Subprotocol("inferix.v1"), websockets.Subprotocol(f"bearer.{PLAYER}")]
        async with server.ws(id, subprotocols=protocols), server.ws(id, f"?access={link['access']}"):
            await server.http.get(f"/v1/sessions/{id}?access={link['access']}")
    ours = [record.getMessage() for record in caplog.records if not record.name.startswith(("httpx", "httpcore"))]
    assert any(f"session {id}" in line for line in ours)
    assert not [line for line in ours if PLAYER in line or link["access"] in line]


async def test_foreign_pages_may_not_call(server: Live, settings: Settings) -> None:
    id = (await server.create())["id"]
    foreign = {"Origin": "https://evil.example"}
    answer = await server.http.post("/v1/sessions", json={}, headers=foreign)
    assert (answer.status_code, answer.json()["code"]) == (403, "origin-not-allowed")
    assert "access-control-allow-origin" not in answer.headers
    for origin in ("null", "http://[", "//"):
        assert (await server.http.get(f"/v1/sessions/{id}", headers={"Origin": origin})).status_code == 403
    own = {"Origin": f"http://{server.base}"}
    assert (await server.http.get(f"/v1/sessions/{id}", headers=own)).status_code == 200
    with pytest.raises(websockets.InvalidStatus):
        async with server.ws(id, origin=websockets.Origin("https://evil.example")):
            pass
    async with server.ws(id, origin=websockets.Origin(f"http://{server.base}")) as socket:
        await event(socket, "welcome")
    async with live(dataclasses.replace(settings, allow_origins=("https://evil.example",))) as friendly:
        answer = await friendly.http.post("/v1/sessions", json={}, headers=foreign)
        assert answer.status_code == 201
        assert answer.headers["access-control-allow-origin"] == "https://evil.example"


async def test_without_tokens_only_this_machine_may_steer(server: Live) -> None:
    for headers in ({"Host": "rebound.example"}, {"X-Forwarded-For": "203.0.113.1"}, {"Forwarded": "for=1.2.3.4"}):
        answer = await server.http.post("/v1/sessions", json={}, headers=headers)
        assert (answer.status_code, answer.json()["code"]) == (403, "role-too-low")
        assert "only this machine may steer" in answer.json()["detail"]
        assert (await server.http.get("/v1/sessions", headers=headers)).status_code == 200


async def test_too_many_requests_are_refused_for_a_while(settings: Settings) -> None:
    async with live(dataclasses.replace(settings, limits=Limits(requests_per_s=1))) as server:
        id = (await server.create())["id"]
        statuses = [(await server.http.post(f"/v1/sessions/{id}/resume")).status_code for _ in range(3)]
        assert statuses[-1] == 429
        refused = await server.http.post(f"/v1/sessions/{id}/resume")
        assert refused.headers["retry-after"] == "1"
        assert (await server.http.get(f"/v1/sessions/{id}")).status_code == 200


def test_links_expire_and_belong_to_their_key(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = tmp_path / "key"
    key.write_bytes(b"k" * 32)
    kept = [Access(dataclasses.replace(settings, link_key_file=key)) for _ in range(2)]
    link, _ = kept[0].sign_link("s", "viewer", 60)
    shown = Credentials(link, "203.0.113.1", "h", forwarded=False)
    assert kept[1].identify(shown).session == "s"
    with pytest.raises(Problem, match="not made here"):
        Access(settings).identify(shown)
    now_s = time.time()
    monkeypatch.setattr(time, "time", lambda: now_s + 61)
    with pytest.raises(Problem, match="expired"):
        kept[0].identify(shown)


@given(st.text(max_size=80))
def test_no_link_breaks_the_reader(text: str) -> None:
    access = Access(Settings())
    with pytest.raises(Problem):
        access.identify(Credentials("v1." + text, "127.0.0.1", "localhost", forwarded=False))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("king arthur 0123456789abcdef", "line 1: expected `viewer"),
        ("viewer short token", "at least 16"),
        ("viewer x v1.0123456789abcdef", "not starting with v1."),
        ("viewer x aGVsbG8/0123456789==", "openssl rand -hex 24"),
        ("viewer x 0123456789abcdéf", "openssl rand -hex 24"),
        ("# nothing", "at least one token"),
    ],
)
def test_a_wrong_token_file_is_named_without_the_token(tmp_path: Path, line: str, expected: str) -> None:
    path = tmp_path / "tokens"
    path.write_text(line)
    with pytest.raises(SettingsError, match=expected) as caught:
        read_tokens(path)
    assert "0123456789" not in str(caught.value)


def test_a_token_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_bytes(b"viewer x \xff123456789abcdef")
    with pytest.raises(SettingsError, match="expected text in UTF-8"):
        read_tokens(tmp_path / "tokens")


def test_what_a_websocket_can_carry_is_a_token(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text("# ours\nviewer x 0123456789abcdefXYZ!#$%&'*+-.^_`|~ # a guest\n")
    assert {one.name for one in read_tokens(path).values()} == {"x"}
    path.write_text("viewer x 0123456789abcdefXYZ!#$%&'*+-.^_`|~")
    access = Access(dataclasses.replace(Settings(), token_file=path))
    mine = Credentials("0123456789abcdefXYZ!#$%&'*+-.^_`|~", "10.0.0.1", "localhost", forwarded=False)
    assert access.identify(mine).name == "x"


def test_rates_refill_with_time_and_forget_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    rates = Rates(2.0)
    assert [rates.take("a") for _ in range(5)] == [0, 0, 0, 0, 0.5]
    assert rates.take("b") == 0
    now_s = 0.5
    assert rates.take("a") == 0
    for n in range(5000):
        rates.take(str(n))
    assert len(rates._buckets) <= 4096
