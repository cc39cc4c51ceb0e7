"""Where a session may push to. A server that connects to whatever it is told would be a way into its own network.

Public addresses pass. Private and loopback ones pass where a rule names them (host, address or network). Link-local,
multicast and the clouds' metadata addresses pass only by exact address. The addresses that were checked are the ones
connected to: a name cannot change its mind in between.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
PORTS = {"rtmp": 1935, "rtmps": 443}
METADATA = frozenset(ipaddress.ip_address(text) for text in ("169.254.169.254", "fd00:ec2::254", "100.100.100.200"))
HIDDEN = "•••"
RESOLVE_S = 5.0


class TargetError(ValueError):
    """The address is not one that can be pushed to; the message never contains the stream key."""


class TargetDenied(TargetError):
    """The address is understood, and not allowed."""


@dataclass(frozen=True)
class Target:
    scheme: str
    host: str
    port: int
    app: str = field(repr=False)
    key: str = field(repr=False)

    @property
    def shown(self) -> str:
        """The address as anybody may see it."""
        return f"{self.tc_url.partition('?')[0]}/{HIDDEN}"

    def hide(self, text: str) -> str:
        """`text` without the key, its name, and what is said in a query of key or application."""
        for secret in sorted(self._secrets(), key=len, reverse=True):
            text = text.replace(secret, HIDDEN)
        return text

    def _secrets(self) -> set[str]:
        name, _, query = self.key.partition("?")
        found = {self.key, name}
        for part in f"{query}&{self.app.partition('?')[2]}".split("&"):
            value = part.partition("=")[2] or part
            found |= {value, unquote(value)}
        return found - {""}

    @property
    def tc_url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if self.port == PORTS[self.scheme] else f":{self.port}"
        return f"{self.scheme}://{host}{port}/{self.app}"


def parse_target(url: str, key: str = "") -> Target:
    """`rtmp[s]://host[:port]/app[/key]`; raises TargetError saying what is missing."""
    if any(ord(char) <= 32 or ord(char) == 127 for char in url + key):
        raise TargetError("expected an address and key without spaces and control characters")
    try:
        parts = urlsplit(url)
        port = parts.port
        (parts.hostname or "").encode("idna")
    except UnicodeError as error:
        raise TargetError("expected a host name with labels of 1 to 63 characters") from error
    except ValueError as error:
        raise TargetError("expected rtmp://host[:port]/app, got an address that cannot be read") from error
    if parts.scheme not in PORTS:
        raise TargetError(f"expected rtmp:// or rtmps://, got {parts.scheme[:20]!r}")
    if not parts.hostname or parts.username is not None:
        raise TargetError("expected a host name and no user name in the address")
    path = parts.path.strip("/") + (f"?{parts.query}" if parts.query else "")
    if not key:
        head, _, query = path.partition("?")
        app, _, name = head.rpartition("/")
        path, key = app, name + (f"?{query}" if query and name else "")
    if not path or not key:
        raise TargetError(
            "expected an application and a stream key: rtmp://host/app with `key`, or rtmp://host/app/key"
        )
    return Target(parts.scheme, parts.hostname, port or PORTS[parts.scheme], path, key)


class AllowRule:
    def __init__(self, patterns: tuple[str, ...], *, loopback: bool) -> None:
        """`patterns`: host names, addresses or networks; `loopback`: whether this machine itself is allowed."""
        self._names: set[str] = set()
        self._networks: list[ipaddress.IPv4Network | ipaddress.IPv6Network] = []
        for pattern in patterns:
            try:
                self._networks.append(ipaddress.ip_network(pattern, strict=False))
            except ValueError:
                self._names.add(pattern.lower())
        self._loopback = loopback

    async def addresses(self, target: Target) -> list[str]:
        """The addresses of the target's host, all allowed; raises TargetDenied, OSError or TimeoutError."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(RESOLVE_S):
            found = await loop.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
        addresses = list(dict.fromkeys(str(entry[4][0]).split("%")[0] for entry in found))
        for address in addresses:
            if not self.allows(target.host, address):
                raise TargetDenied(
                    f"{target.host} ({address}) is not a public address; the server's owner may allow it"
                )
        return addresses

    def allows(self, host: str, address: str) -> bool:
        ip = _unwrapped(ipaddress.ip_address(address))
        if any(network.num_addresses == 1 and ip in network for network in self._networks):
            return True
        if ip in METADATA or ip.is_link_local or ip.is_multicast or ip.is_unspecified:
            return False
        if any(ip in network for network in self._networks) or host.lower() in self._names:
            return True
        return ip.is_global or (self._loopback and ip.is_loopback)


def _unwrapped(ip: IpAddress) -> IpAddress:
    """The IPv4 address inside an IPv6 one, where there is one: that is where packets go."""
    if isinstance(ip, ipaddress.IPv4Address):
        return ip
    if ip.ipv4_mapped is not None:
        return ip.ipv4_mapped
    if ip.sixtofour is not None:
        return ip.sixtofour
    if ip in ipaddress.IPv6Network("64:ff9b::/96"):
        return ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
    return ip
