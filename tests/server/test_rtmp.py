from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from server.amf0 import encode
from server.settings import Settings
from tests.server.harness import Live, event, live, until

NGINX_MODULE = Path("/usr/lib/nginx/modules/ngx_rtmp_module.so")
needs_nginx = pytest.mark.skipif(
    shutil.which("nginx") is None or not NGINX_MODULE.exists(), reason="nginx with its RTMP module is not installed"
)
needs_ffmpeg = pytest.mark.skipif(shutil.which("ffmpeg") is None, reason="ffmpeg is not installed")
KEY = "s3cret-stream-key"


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclasses.dataclass
class Nginx:
    folder: Path
    port: int
    process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        (self.folder / "nginx.conf").write_text(f"""
load_module {NGINX_MODULE};
daemon off; master_process off; pid {self.folder}/pid; error_log {self.folder}/error.log;
events {{ worker_connections 64; }}
rtmp {{ server {{ listen 127.0.0.1:{self.port}; chunk_size 4096; notify_method get;
  application live {{ live on; record all; record_unique on; record_path {self.folder}; }}
  application closed {{ live on; deny publish all; }}
}} }}
""")
        self.process = await asyncio.create_subprocess_exec(
            "nginx", "-c", str(self.folder / "nginx.conf"), "-p", str(self.folder), stderr=subprocess.DEVNULL
        )
        for _ in range(500):
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", self.port)
                writer.close()
                return
            await asyncio.sleep(0.01)
        raise AssertionError("nginx did not come up")

    async def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            await self.process.wait()
            self.process = None

    def recordings(self) -> list[Path]:
        return sorted(self.folder.glob("*.flv"), key=lambda path: path.stat().st_mtime)


@pytest_asyncio.fixture(loop_scope="session")
async def nginx(tmp_path: Path) -> AsyncIterator[Nginx]:
    nginx = Nginx(tmp_path / "nginx", free_port())
    nginx.folder.mkdir()
    nginx.folder.chmod(0o777)
    await nginx.start()
    yield nginx
    await nginx.stop()


async def probe(path: Path) -> dict[str, Any]:
    process = await asyncio.create_subprocess_exec(
        *"ffprobe -v error -of json -show_streams -show_packets -count_frames".split(), str(path), stdout=-1
    )
    out, _ = await process.communicate()
    probed: dict[str, Any] = json.loads(out)
    return probed


async def push(server: Live, session: str, **fields: Any) -> dict[str, Any]:
    answer = await server.http.post(f"/v1/sessions/{session}/outputs", json={"kind": "rtmp", **fields})
    assert answer.status_code == 201, answer.text
    body: dict[str, Any] = answer.json()
    return body


@needs_nginx
@needs_ffmpeg
async def test_a_push_arrives_at_nginx_with_picture_and_silence(server: Live, nginx: Nginx) -> None:
    session = server.session((await server.create())["id"])
    output = await push(server, session.id, url=f"rtmp://127.0.0.1:{nginx.port}/live", key=KEY)
    assert output["target"] == f"rtmp://127.0.0.1:{nginx.port}/live/•••"
    push_object = session.outputs.get(output["id"])
    await until(lambda: push_object.state == "live")
    await asyncio.sleep(3)
    stopped = await server.http.delete(f"/v1/sessions/{session.id}/outputs/{output['id']}")
    assert stopped.json()["state"] == "stopped" and stopped.json()["bytes_sent"] > 1000
    await until(lambda: len(nginx.recordings()) == 1)
    await asyncio.sleep(0.2)
    probed = await probe(nginx.recordings()[0])
    video = next(one for one in probed["streams"] if one["codec_type"] == "video")
    audio = next(one for one in probed["streams"] if one["codec_type"] == "audio")
    assert (video["codec_name"], video["profile"]) == ("h264", "Constrained Baseline")
    assert (audio["codec_name"], audio["sample_rate"]) == ("aac", "44100")
    times = [float(one["pts_time"]) for one in probed["packets"] if one["codec_type"] == "video"]
    assert int(video["nb_read_frames"]) == len(times) >= 40
    assert all(abs(b - a - 0.05) < 0.002 for a, b in zip(times, times[1:], strict=False))


@needs_nginx
@needs_ffmpeg
async def test_a_push_comes_back_after_its_server_and_begins_at_a_keyframe(server: Live, nginx: Nginx) -> None:
    session = server.session((await server.create())["id"])
    async with server.ws(session.id) as socket:
        output = await push(server, session.id, url=f"rtmp://127.0.0.1:{nginx.port}/live/{KEY}", audio="none")
        await event(socket, "output")
        await until(lambda: session.outputs.get(output["id"]).state == "live")
        await asyncio.sleep(0.5)
        await nginx.stop()
        retrying = await event(socket, "output", seconds=15)
        while retrying["output"]["state"] != "retrying":
            retrying = await event(socket, "output", seconds=15)
        assert retrying["output"]["reason"]
        before = len(nginx.recordings())
        await nginx.start()
        await until(lambda: session.outputs.get(output["id"]).state == "live", 20)
    await asyncio.sleep(1.5)
    await server.http.delete(f"/v1/sessions/{session.id}/outputs/{output['id']}")
    await until(lambda: len(nginx.recordings()) > before)
    await asyncio.sleep(0.2)
    probed = await probe(nginx.recordings()[-1])
    assert [one["codec_type"] for one in probed["streams"]] == ["video"]
    assert probed["packets"][0]["flags"].startswith("K") and float(probed["packets"][0]["pts_time"]) < 0.1
    assert int(probed["streams"][0]["nb_read_frames"]) >= 15


@needs_ffmpeg
async def test_a_push_arrives_at_a_listening_ffmpeg(server: Live, tmp_path: Path) -> None:
    port, out = free_port(), tmp_path / "out.flv"
    listening = ["-listen", "1", "-i", f"rtmp://127.0.0.1:{port}/live/{KEY}", "-c", "copy", str(out)]
    process = await asyncio.create_subprocess_exec(
        "ffmpeg", "-v", "error", "-y", *listening, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    session = server.session((await server.create())["id"])
    output = session.outputs.get((await push(server, session.id, url=f"rtmp://127.0.0.1:{port}/live", key=KEY))["id"])
    await until(lambda: output.state == "live", 20)
    await asyncio.sleep(2)
    await server.http.delete(f"/v1/sessions/{session.id}")
    async with asyncio.timeout(10):
        await process.wait()
    probed = await probe(out)
    assert {one["codec_name"] for one in probed["streams"]} == {"h264", "aac"}
    assert output.state == "stopped"


@needs_nginx
async def test_a_server_that_denies_is_quoted_and_asked_again(server: Live, nginx: Nginx) -> None:
    session = server.session((await server.create())["id"])
    output = session.outputs.get(
        (await push(server, session.id, url=f"rtmp://127.0.0.1:{nginx.port}/closed", key=KEY))["id"]
    )
    await until(lambda: output.state == "retrying")
    assert "the server closed the connection" in output.reason or "denied" in output.reason.lower()


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def listening(handler: Handler, tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    tasks: set[asyncio.Task[Any]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        with contextlib.suppress(asyncio.CancelledError, ConnectionError, asyncio.IncompleteReadError):
            await handler(reader, writer)
        writer.transport.abort()

    server = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=tls, limit=1024)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def message(kind: int, payload: bytes) -> bytes:
    return bytes([3]) + bytes(3) + len(payload).to_bytes(3, "big") + bytes([kind]) + bytes(4) + payload


async def shake_hands(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readexactly(1537)
    writer.write(b"\x03" + bytes(1536) + bytes(1536))
    await reader.readexactly(1536)


def status(code: str, level: str = "status", description: str = "") -> bytes:
    return message(20, encode("onStatus", 0.0, None, {"level": level, "code": code, "description": description}))


async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Say yes to everything without reading it: chunk size 128 fits these answers."""
    await shake_hands(reader, writer)
    writer.write(message(20, encode("_result", 1.0, None, {})) + message(20, encode("_result", 4.0, None, 1.0)))
    writer.write(status("NetStream.Publish.Start"))


async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(60)


async def stalling(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await accept(reader, writer)
    await asyncio.sleep(60)


async def busy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await shake_hands(reader, writer)
    writer.write(message(20, encode("_result", 1.0, None, {})) + message(20, encode("_result", 4.0, None, 1.0)))
    long = "x" * 180
    writer.write(message(1, (4096).to_bytes(4, "big")))
    writer.write(status("NetStream.Publish.BadName", "error", f"Already publishing {long} {KEY}"))
    await asyncio.sleep(60)


async def garbage(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 100)
    await writer.drain()


async def flooding(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await accept(reader, writer)
    writer.write(message(3, b"") + b"\xc3" * 5000)  # a byte each, and each a whole message
    await asyncio.sleep(60)


async def long_winded(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await accept(reader, writer)
    writer.write(message(20, bytes(100_000)))
    await asyncio.sleep(60)


async def cutting_short(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Announce a message, send a part of it, and begin a shorter one in its place."""
    await accept(reader, writer)
    writer.write(message(18, bytes(1000))[: 12 + 128] + status("NetStream.Unpublish", "error", "cut short"))
    await asyncio.sleep(60)


async def countless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await shake_hands(reader, writer)
    writer.write(
        message(20, encode("_result", 1.0, None, {})) + message(20, encode("_result", 4.0, None, float("nan")))
    )
    await asyncio.sleep(60)


@pytest.mark.parametrize(
    ("handler", "reason"),
    [
        (silent, "the server did not answer or stopped reading in time"),
        (stalling, "the server did not answer or stopped reading in time"),
        (busy, f"NetStream.Publish.BadName: Already publishing {'x' * 180} •••"),
        (garbage, "expected RTMP version 3 in the handshake, got 72"),
        (flooding, "the server sent more than 1000 chunks within a second"),
        (long_winded, "the server announced a message of 100000 bytes, at most 16384 are read"),
        (cutting_short, "NetStream.Unpublish: cut short"),
        (countless, "expected the number of a stream, got nan"),
    ],
)
async def test_a_bad_server_costs_nobody_else_anything(
    server: Live, handler: Handler, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("server.rtmp_wire.CONNECT_S", 0.5)
    monkeypatch.setattr("server.rtmp_wire.WRITE_S", 0.3)
    monkeypatch.setattr("server.rtmp_wire.WRITE_BUFFER_BYTES", 1024)
    caplog.set_level(logging.DEBUG, "server")
    session = server.session((await server.create())["id"])
    async with listening(handler) as port:
        output = session.outputs.get((await push(server, session.id, url=f"rtmp://127.0.0.1:{port}/live/{KEY}"))["id"])
        if handler is stalling:
            stop_reading(session.id, server)
        await until(lambda: output.state == "retrying", 60)
        assert output.reason == reason
        media_ms = session.line.media_ms
        await until(lambda: session.line.media_ms > media_ms + 200)
        assert KEY not in caplog.text
        assert KEY not in json.dumps(await server.show(session.id))
        await server.http.delete(f"/v1/sessions/{session.id}/outputs/{output.id}")
        assert output.state == "stopped"


def stop_reading(session_id: str, server: Live) -> None:
    """Fill the kernel's buffers quickly: packets of a still small picture would take minutes."""
    broadcast = server.session(session_id).encodings.h264
    original = broadcast.publish
    import msgspec

    def publish(packet: Any) -> None:
        filler = b"\x00\x00\x00\x01\x0c" + b"\xff" * 400_000
        original(msgspec.structs.replace(packet, data=packet.data + filler))

    broadcast.publish = publish  # type: ignore[method-assign]


async def test_rtmps_wants_a_trusted_certificate(settings: Settings, tmp_path: Path) -> None:
    cert = certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert)
    for trusted, state in ((False, "retrying"), (True, "live")):
        changed = dataclasses.replace(settings, rtmp_ca_file=cert if trusted else None)
        async with listening(stalling, context) as port, live(changed) as server:
            session = server.session((await server.create())["id"])
            url = f"rtmps://localhost:{port}/live/{KEY}"
            output = session.outputs.get((await push(server, session.id, url=url))["id"])
            await until(lambda output=output, state=state: output.state == state)  # type: ignore[misc]
            assert ("certificate is not trusted" in output.reason) is not trusted


def certificate(folder: Path) -> Path:
    """A self-signed certificate for localhost, key included."""
    import datetime

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    built = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .sign(key, hashes.SHA256())
    )
    path = folder / "localhost.pem"
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.write_bytes(built.public_bytes(serialization.Encoding.PEM) + private)
    return path


async def test_wrong_and_forbidden_targets_are_refused_at_once(server: Live, settings: Settings) -> None:
    id = (await server.create())["id"]

    async def refused(url: str, key: str = "") -> tuple[int, str]:
        body = {"kind": "rtmp", "url": url, "key": key}
        answer = await server.http.post(f"/v1/sessions/{id}/outputs", json=body)
        assert KEY not in answer.text
        return answer.status_code, answer.json()["code"]

    assert await refused("http://example.com/live", KEY) == (422, "bad-target")
    assert await refused("rtmp://127.0.0.1/live") == (422, "bad-target")
    assert await refused(f"rtmp://user:pw@127.0.0.1/live/{KEY}") == (422, "bad-target")
    assert await refused(f"rtmp://127.0.0.1:99999/live/{KEY}") == (422, "bad-target")
    assert await refused("rtmp://live..example.com/live", KEY) == (422, "bad-target")
    assert await refused(f"rtmp://169.254.169.254/live/{KEY}") == (403, "target-not-allowed")
    assert await refused(f"rtmp://10.0.0.1/live/{KEY}") == (403, "target-not-allowed")
    assert await refused(f"rtmp://[::ffff:10.0.0.1]/live/{KEY}") == (403, "target-not-allowed")
    answer = await server.http.post("/v1/sessions", json={"outputs": [{"kind": "rtmp", "url": "rtmp://10.0.0.1/a/b"}]})
    assert answer.json()["code"] == "target-not-allowed"
