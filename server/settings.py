"""What the server process was told at its start; the only reader of its arguments and environment.

Knows nothing of HTTP or of how the values are used. Wrong settings stop the start and say which.
"""

from __future__ import annotations

import argparse
import ipaddress
import os
import ssl
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

GIB = 1024**3


class SettingsError(ValueError):
    """An argument of the server cannot be used; the message names it, what was expected and what was given."""


@dataclass(frozen=True)
class EngineSettings:
    """How to start the engine process and when to give it up."""

    command: tuple[str, ...] = (sys.executable, "-m", "engine")
    models: tuple[str, ...] = ()
    device: str | None = None
    kv_budget_bytes: int | None = None
    host_budget_bytes: int | None = None
    ranks: int | None = None
    torchrun: bool = False  # it has started the ranks, this server as rank 0, and starts them all again
    ulysses: int | None = None
    ring: int | None = None
    pipeline: int | None = None
    cfg: int | None = None
    extra: tuple[str, ...] = ()
    nice: int = 10  # the event loop stays quick while the engine uses every core
    start_s: float = 300.0  # from start to Hello
    ping_every_s: float = 1.0
    deadline_s: float = 20.0  # without an answer to a ping
    backoff_s: float = 0.5  # before the first restart; doubles
    backoff_max_s: float = 30.0
    stop_s: float = 5.0  # from Shutdown to SIGKILL

    def argv(self, fd: int) -> list[str]:
        argv = [*self.command, "--fd", str(fd)]
        for model in self.models:
            argv += ["--model", model]
        for flag in ("device", "kv_budget_bytes", "host_budget_bytes", "ranks", "ulysses", "ring", "pipeline", "cfg"):
            value = getattr(self, flag)
            if value is not None:
                argv += [f"--{flag.replace('_', '-')}", str(value)]
        argv += ["--torchrun", "on"] if self.torchrun else []
        return [*argv, *self.extra]


@dataclass(frozen=True)
class IceSettings:
    """Everything about addresses that a viewer must be able to reach."""

    stun_url: str | None = None
    turn_url: str | None = None
    turn_user: str = ""
    turn_password: str = field(default="", repr=False)
    advertise: tuple[str, ...] = ()  # addresses written into answers in place of our own
    connect_s: float = 10.0  # from the offer to a connected viewer
    silent_s: float = 12.0  # without a receiver report; some receivers report every 7 s only


@dataclass(frozen=True)
class Limits:
    sessions: int = 16
    sessions_per_token: int = 4
    queued: int = 16
    viewers: int = 64  # per session
    listeners: int = 256  # WebSockets per session
    outputs: int = 8  # per session
    connections: int = 4000  # of any kind, to the whole server
    pause_after_s: float = 20.0  # nobody watches
    idle_s: float = 600.0
    lifetime_s: float = 24 * 3600.0
    requests_per_s: float = 20.0  # per caller, for requests that change something
    record_bytes: int = 4 * GIB
    record_s: float = 6 * 3600.0
    record_keep_days: float = 7.0
    body_bytes: int = 64 * 1024
    open_s: float = 15.0  # how long a create request waits for the engine


@dataclass(frozen=True)
class Settings:
    host: str = "127.0.0.1"
    port: int = 8000
    engine: EngineSettings = EngineSettings()
    ice: IceSettings = IceSettings()
    limits: Limits = Limits()
    token_file: Path | None = None
    link_key_file: Path | None = None
    record_dir: Path | None = Path("recordings")
    allow_origins: tuple[str, ...] = ()
    allow_hosts: tuple[str, ...] = ()  # Host names, beside loopback ones, under which loopback callers are trusted
    rtmp_allow: tuple[str, ...] = ()
    rtmp_ca_file: Path | None = None
    drain_s: float = 10.0  # SIGTERM: for outputs and recordings to close
    log_level: str = "info"
    rank: int = 0  # of this process, where torchrun has started it

    @property
    def listens_on_loopback_only(self) -> bool:
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `inferix serve`."""
    limits, ice = Limits(), IceSettings()
    add = parser.add_argument
    add("--model", action="append", default=[], metavar="NAME", help="model to load (repeatable)")
    add("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    add("--port", type=int, default=8000)
    add("--token-file", type=Path, help="lines `role name token`; role: viewer, player or admin")
    add("--link-key-file", type=Path, help="key for share links that outlive a restart (at least 32 bytes)")
    add("--record-dir", type=Path, default=Path("recordings"), help="where recordings go ('' turns them off)")
    add("--allow-origin", action="append", default=[], metavar="URL", help="web origin that may call us (repeatable)")
    add("--allow-host", action="append", default=[], metavar="NAME", help="trusted Host name beside localhost")
    add("--rtmp-allow", action="append", default=[], metavar="HOST", help="private host or network to push to")
    add("--rtmp-ca-file", type=Path, help="certificates to trust for rtmps beside the system's")
    add("--advertise-address", action="append", default=[], metavar="IP", help="public address put into WebRTC answers")
    add("--stun", metavar="URL", help="stun:host:port (default: none; an unreachable one costs 5 s per viewer)")
    add("--turn", metavar="URL", help="turn:host:port?transport=udp; password in INFERIX_TURN_PASSWORD")
    add("--turn-user", default="")
    add("--max-sessions", type=int, default=limits.sessions)
    add("--max-sessions-per-token", type=int, default=limits.sessions_per_token)
    add("--max-viewers", type=int, default=limits.viewers, help="per session")
    add("--pause-after-s", type=float, default=limits.pause_after_s, help="unwatched worlds pause after this")
    add("--idle-s", type=float, default=limits.idle_s, help="unwatched and unsteered sessions end after this")
    add("--lifetime-s", type=float, default=limits.lifetime_s, help="sessions end after this")
    add("--record-max-bytes", type=int, default=limits.record_bytes, help="per recording")
    add("--record-max-s", type=float, default=limits.record_s, help="per recording")
    add("--record-keep-days", type=float, default=limits.record_keep_days)
    add("--connect-s", type=float, default=ice.connect_s, help="deadline for a viewer to connect")
    add("--device", help="given to the engine")
    for flag in ("--kv-budget-bytes", "--host-budget-bytes", "--ranks", "--ulysses", "--ring", "--pipeline", "--cfg"):
        add(flag, type=int, help="given to the engine")
    add("--torchrun", action="store_true", help="torchrun has started this: rank 0 serves, the others follow")
    add("--engine-arg", action="append", default=[], metavar="ARG", help="given to the engine as it is (repeatable)")
    add("--engine-deadline-s", type=float, default=EngineSettings().deadline_s, help="silence after which it is killed")
    add("--log-level", choices=["debug", "info", "warning", "error"], default="info")


def from_arguments(args: argparse.Namespace, environment: dict[str, str] | None = None) -> Settings:
    """Settings from parsed arguments; raises SettingsError."""
    env = os.environ if environment is None else environment
    rank, ranks = _torchrun(env) if args.torchrun else (0, args.ranks)
    settings = Settings(
        host=args.host,
        port=args.port,
        engine=EngineSettings(
            models=tuple(args.model),
            device=args.device,
            kv_budget_bytes=args.kv_budget_bytes,
            host_budget_bytes=args.host_budget_bytes,
            ranks=ranks,
            torchrun=args.torchrun,
            ulysses=args.ulysses,
            ring=args.ring,
            pipeline=args.pipeline,
            cfg=args.cfg,
            extra=tuple(args.engine_arg),
            deadline_s=args.engine_deadline_s,
        ),
        ice=IceSettings(
            stun_url=args.stun,
            turn_url=args.turn,
            turn_user=args.turn_user,
            turn_password=env.get("INFERIX_TURN_PASSWORD", ""),
            advertise=tuple(args.advertise_address),
            connect_s=args.connect_s,
        ),
        limits=_limits(args),
        token_file=args.token_file,
        link_key_file=args.link_key_file,
        record_dir=args.record_dir if str(args.record_dir) not in ("", ".") else None,
        allow_origins=tuple(origin.rstrip("/").lower() for origin in args.allow_origin),
        allow_hosts=tuple(host.lower() for host in args.allow_host),
        rtmp_allow=tuple(args.rtmp_allow),
        rtmp_ca_file=args.rtmp_ca_file,
        log_level=args.log_level,
        rank=rank,
    )
    check(settings)
    return settings


def check(settings: Settings) -> None:
    """Raise SettingsError for the first value that cannot be used."""
    if not 0 <= settings.port <= 65535:
        raise SettingsError(f"--port: expected 0 to 65535, got {settings.port}")
    for origin in settings.allow_origins:
        if not origin.startswith(("http://", "https://")) or origin.count("/") != 2:
            raise SettingsError(f"--allow-origin: expected scheme://host[:port], got {origin!r}")
    for address in settings.ice.advertise:
        _check_address(address)
    for name, path in (("token", settings.token_file), ("link-key", settings.link_key_file)):
        if path is not None and not path.is_file():
            raise SettingsError(f"--{name}-file: expected a readable file, got {str(path)!r}")
    if settings.rtmp_ca_file is not None:
        _check_certificates(settings.rtmp_ca_file)
    _check_ice(settings.ice)
    _check_positive(settings)


def _torchrun(env: Mapping[str, str]) -> tuple[int, int]:
    """(rank, ranks) as torchrun has told this process."""
    try:
        return int(env["RANK"]), int(env["WORLD_SIZE"])
    except (KeyError, ValueError) as error:
        raise SettingsError(
            f"--torchrun: expected to be started by torchrun, with RANK and WORLD_SIZE; got {error}"
        ) from error


def _limits(args: argparse.Namespace) -> Limits:
    return Limits(
        sessions=args.max_sessions,
        sessions_per_token=args.max_sessions_per_token,
        viewers=args.max_viewers,
        pause_after_s=args.pause_after_s,
        idle_s=args.idle_s,
        lifetime_s=args.lifetime_s,
        record_bytes=args.record_max_bytes,
        record_s=args.record_max_s,
        record_keep_days=args.record_keep_days,
    )


def _check_address(address: str) -> None:
    try:
        ipaddress.ip_address(address)
    except ValueError as error:
        raise SettingsError(f"--advertise-address: expected an IP address, got {address!r}") from error


def _check_certificates(path: Path) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except OSError as error:
        raise SettingsError(f"--rtmp-ca-file: expected a file of certificates (PEM), got {str(path)!r}") from error


def _check_ice(ice: IceSettings) -> None:
    if ice.stun_url is not None and not ice.stun_url.startswith("stun:"):
        raise SettingsError(f"--stun: expected stun:host:port, got {ice.stun_url!r}")
    if ice.turn_url is None:
        return
    if not ice.turn_url.startswith(("turn:", "turns:")):
        raise SettingsError(f"--turn: expected turn:host:port or turns:host:port, got {ice.turn_url!r}")
    if not ice.turn_user or not ice.turn_password:
        raise SettingsError("--turn: expected --turn-user and INFERIX_TURN_PASSWORD with it, got neither or one")


def _check_positive(settings: Settings) -> None:
    numbers = {
        "--max-sessions": settings.limits.sessions,
        "--max-sessions-per-token": settings.limits.sessions_per_token,
        "--max-viewers": settings.limits.viewers,
        "--pause-after-s": settings.limits.pause_after_s,
        "--idle-s": settings.limits.idle_s,
        "--lifetime-s": settings.limits.lifetime_s,
        "--record-max-bytes": settings.limits.record_bytes,
        "--record-max-s": settings.limits.record_s,
        "--connect-s": settings.ice.connect_s,
        "--engine-deadline-s": settings.engine.deadline_s,
    }
    for flag, number in numbers.items():
        if not number > 0:
            raise SettingsError(f"{flag}: expected a number above 0, got {number}")
