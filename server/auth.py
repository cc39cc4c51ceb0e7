"""Who is calling and what they may do: tokens with roles, signed links, this machine, origins, rates.

Secrets are compared in constant time, kept as digests and never logged. Knows no sessions beyond their ids.
"""

from __future__ import annotations

import base64
import binascii
import collections
import hashlib
import hmac
import ipaddress
import json
import logging
import re
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast
from urllib.parse import urlsplit

from server.problems import Problem
from server.settings import Settings, SettingsError

log = logging.getLogger(__name__)

Role = Literal["viewer", "player", "admin"]
RANK: dict[str, int] = {"viewer": 0, "player": 1, "admin": 2}
MIN_TOKEN_CHARS = 16
TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")  # RFC 9110's token: what a WebSocket's subprotocol may be made of
COMMENT = re.compile(r"(^|\s)#.*")  # within a token # is one of its characters
LINK_PREFIX = "v1."
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
CALLERS_KEPT = 4096


@dataclass(frozen=True)
class Identity:
    """A caller. `session` is set when the right is for one session only (a signed link)."""

    role: Role
    name: str
    session: str | None = None
    local: bool = False  # nobody named a token; this machine

    def at_least(self, role: Role) -> bool:
        return RANK[self.role] >= RANK[role]


@dataclass(frozen=True)
class Credentials:
    """What a request says about its sender, however it was carried."""

    bearer: str | None
    client_host: str
    host_header: str
    forwarded: bool


class Access:
    """Turns credentials into an identity and an identity into permission."""

    def __init__(self, settings: Settings) -> None:
        self._tokens = read_tokens(settings.token_file) if settings.token_file else {}
        self.has_tokens = settings.token_file is not None
        self._key = _read_key(settings.link_key_file)
        self._origins = frozenset(settings.allow_origins)
        self._hosts = LOOPBACK_NAMES | frozenset(settings.allow_hosts)
        self._rates = Rates(settings.limits.requests_per_s)

    def identify(self, credentials: Credentials) -> Identity:
        """Who this is; raises Problem 401 for a token nobody has or, where tokens are used, for none."""
        if credentials.bearer is not None and credentials.bearer.startswith(LINK_PREFIX):
            return self._open_link(credentials.bearer)
        if self.has_tokens:
            return self._by_token(credentials.bearer)
        if self._is_this_machine(credentials):
            return Identity("admin", "local", local=True)
        return Identity("viewer", f"guest:{credentials.client_host}")

    def require(self, identity: Identity, role: Role, *, session: str | None = None) -> None:
        """Raise Problem 403 unless the role reaches and the right covers this session."""
        if identity.session is not None and identity.session != session:
            raise Problem(403, "role-too-low", "this link opens one session only")
        if identity.at_least(role):
            return
        hint = "" if self.has_tokens else "; without a token file only this machine may steer (http://127.0.0.1)"
        raise Problem(403, "role-too-low", f"this needs the role {role}, you are {identity.role}{hint}")

    def require_owner(self, identity: Identity, session: str, owner: str) -> None:
        """Players steer what they created, or what a player link names; admins everything."""
        self.require(identity, "player", session=session)
        if identity.role == "admin" or identity.session == session or identity.name == owner:
            return
        raise Problem(403, "not-your-session", f"session {session} belongs to somebody else")

    def check_origin(self, origin: str | None, host_header: str) -> None:
        """A browser says where the page came from; only our own pages and allowed ones may call."""
        if origin is None or origin.lower() in self._origins:
            return
        if host_header and _origin_host(origin) == host_header.lower():
            return
        raise Problem(403, "origin-not-allowed", f"pages from {origin[:200]!r} may not call this server")

    def check_rate(self, identity: Identity) -> None:
        wait_s = self._rates.take(identity.name)
        if wait_s > 0:
            raise Problem(429, "too-fast", "too many requests, slow down", retry_after_s=wait_s)

    def sign_link(self, session: str, role: Role, ttl_s: float) -> tuple[str, float]:
        """A bearer value that opens one session until it expires (unix seconds, returned too)."""
        expires_s = time.time() + ttl_s
        claims = {"s": session, "r": role, "e": int(expires_s), "n": secrets.token_hex(4)}
        payload = _b64(json.dumps(claims, separators=(",", ":")).encode())
        return f"{LINK_PREFIX}{payload}.{_b64(self._mac(payload))}", expires_s

    def _open_link(self, access: str) -> Identity:
        payload, _, mac = access.removeprefix(LINK_PREFIX).partition(".")
        try:
            if not hmac.compare_digest(_unb64(mac), self._mac(payload)):
                raise ValueError("wrong signature")
            claims = json.loads(_unb64(payload))
        except (ValueError, binascii.Error) as error:
            raise _unauthorized("token-unknown", "this link was not made here or has been altered") from error
        if time.time() > claims["e"]:
            raise _unauthorized("link-expired", "this link has expired, ask for a new one")
        return Identity(claims["r"], f"link:{claims['n']}", session=claims["s"])

    def _by_token(self, token: str | None) -> Identity:
        if token is None:
            raise _unauthorized("token-required", "expected an Authorization: Bearer header, got none")
        digest = _digest(token)
        found: Identity | None = None
        for known, identity in self._tokens.items():  # all of them, so that time says nothing
            if hmac.compare_digest(known, digest):
                found = identity
        if found is None:
            raise _unauthorized("token-unknown", "nobody has this token")
        return found

    def _is_this_machine(self, credentials: Credentials) -> bool:
        """Loopback alone is not enough: a proxy or a page under a rebound name also comes from there."""
        if credentials.forwarded or _host_name(credentials.host_header) not in self._hosts:
            return False
        try:
            return ipaddress.ip_address(credentials.client_host).is_loopback
        except ValueError:
            return False

    def _mac(self, payload: str) -> bytes:
        return hmac.new(self._key, payload.encode(), hashlib.sha256).digest()


class Rates:
    """One token bucket per caller; the callers kept are bounded."""

    def __init__(self, per_s: float, burst: float = 2.0) -> None:
        self._per_s = per_s
        self._full = max(1.0, per_s * burst)
        self._buckets: collections.OrderedDict[str, tuple[float, float]] = collections.OrderedDict()

    def take(self, caller: str) -> float:
        """0 when the caller may go on, else the seconds to wait."""
        now_s = time.monotonic()
        level, then_s = self._buckets.pop(caller, (self._full, now_s))
        level = min(self._full, level + (now_s - then_s) * self._per_s)
        wait_s = 0.0 if level >= 1 else (1 - level) / self._per_s
        self._buckets[caller] = (level - 1 if level >= 1 else level, now_s)
        if len(self._buckets) > CALLERS_KEPT:
            self._buckets.popitem(last=False)
        return wait_s


def read_tokens(path: Path) -> dict[bytes, Identity]:
    """`role name token` per line; raises SettingsError naming the line, never the token."""
    tokens: dict[bytes, Identity] = {}
    try:
        lines = path.read_text("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise SettingsError("--token-file: expected text in UTF-8, got a byte that is none") from error
    for number, line in enumerate(lines, 1):
        words = COMMENT.sub("", line).split()
        if not words:
            continue
        if len(words) != 3 or words[0] not in RANK:
            raise SettingsError(f"--token-file line {number}: expected `viewer|player|admin name token`")
        role, name, token = words
        if len(token) < MIN_TOKEN_CHARS or token.startswith(LINK_PREFIX):
            raise SettingsError(
                f"--token-file line {number}: expected a token of at least {MIN_TOKEN_CHARS} characters"
                f" not starting with {LINK_PREFIX}, got {len(token)} characters"
            )
        if not TOKEN.fullmatch(token):
            raise SettingsError(
                f"--token-file line {number}: expected a token of letters, digits and !#$%&'*+-.^_`|~ only, which a"
                " browser can send with a WebSocket; `openssl rand -hex 24` makes one"
            )
        tokens[_digest(token)] = Identity(cast(Role, role), name)
    if not tokens:
        raise SettingsError("--token-file: expected at least one token, got none")
    return tokens


def _read_key(path: Path | None) -> bytes:
    if path is None:
        return secrets.token_bytes(32)
    key = path.read_bytes().strip()
    if len(key) < 32:
        raise SettingsError(f"--link-key-file: expected at least 32 bytes, got {len(key)}")
    return key


def _unauthorized(code: str, detail: str) -> Problem:
    return Problem(401, code, detail)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def _origin_host(origin: str) -> str:
    """Host and port of an Origin header; empty when it has none."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def _host_name(header: str) -> str:
    """The name in a Host header, without port and brackets."""
    try:
        return (urlsplit(f"//{header}").hostname or "").lower()
    except ValueError:
        return ""


def _b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _unb64(text: str) -> bytes:
    return base64.b64decode(text.encode() + b"=" * (-len(text) % 4), altchars=b"-_", validate=True)
