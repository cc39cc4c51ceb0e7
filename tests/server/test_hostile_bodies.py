"""Bodies and messages that no honest client sends: each gets an answer of ours, and the server stays."""

from __future__ import annotations

import json

import pytest

from tests.server.harness import Live

BODIES = {
    "half a character": b'{"prompt": "\\ud800"}',
    "half a character as a name": b'{"\\ud800": 1}',
    "half a character in a list": b'{"prompts": [{"at": 1, "text": "\\udfff"}]}',
    "not a number": b'{"seed": NaN}',
    "no number has an end": b'{"prompts": [{"at": Infinity, "text": "a"}]}',
    "a float past all floats": b'{"limits": {"idle_s": 1e999}, "prompt": "a"}',
    "a number of 5000 digits": b'{"seed": ' + b"9" * 5000 + b"}",
    "a text for a number": b'{"fps": "nan"}',
    "a time of no number": b'{"prompts": [{"at": "nans", "text": "a"}]}',
    "deep": b'{"prompt": ' + b"[" * 20_000 + b"]" * 20_000 + b"}",
    "not UTF-8": b'{"prompt": "\xff\xfe"}',
    "UTF-16": '{"prompt": 1}'.encode("utf-16"),
    "nothing": b"",
    "null": b"null",
    "zeros": b"\0" * 100,
    "a name twice": b'{"prompt": "a", "prompt": 7}',
    "a list of names": b'{"model": ["tiny-world"]}',
    "only control characters": b'{"prompt": "\\u0000\\u0001", "seed": -1}',
}


@pytest.mark.parametrize("what", BODIES)
@pytest.mark.parametrize("path", ["/v1/sessions", "/v1/sessions/{id}/prompt", "/v1/sessions/{id}/action"])
async def test_a_body_that_cannot_be_is_a_problem_and_no_bug(server: Live, path: str, what: str) -> None:
    id = (await server.create(prompt="a"))["id"] if "{id}" in path else ""
    answer = await server.http.post(
        path.format(id=id), content=BODIES[what], headers={"Content-Type": "application/json"}
    )
    assert 400 <= answer.status_code < 500, (answer.status_code, answer.text)
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["status"] == answer.status_code
    assert (await server.http.get("/healthz")).status_code == 200


@pytest.mark.parametrize(
    "text",
    [
        '{"type": "prompt", "id": "\\ud800", "text": "a"}',
        '{"type": "prompt", "id": "x", "text": "\\ud800"}',
        '{"type": "action", "values": {"pan": NaN}}',
        '{"type": "action", "values": {"pan": 1e999}}',
        "[" * 10_000,
        '{"type": ' * 500,
        '{"type": "prompt", "id": "x", "text": "a", "over_blocks": 99999999999999999999999}',
        '{"type": "\\u0000"}',
        "null",
        "",
    ],
)
async def test_a_message_that_cannot_be_is_an_error_and_the_connection_stays(server: Live, text: str) -> None:
    session = await server.create(prompt="a")
    async with server.ws(session["id"]) as socket:
        await socket.send(text)
        await socket.send('{"type": "ping", "id": "after"}')
        seen: list[str] = []
        while "pong" not in seen:
            message = json.loads(await socket.recv())
            seen.append(message["type"])
        assert "error" in seen
