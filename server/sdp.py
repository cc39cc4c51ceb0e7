"""The few things we read and change in offers and answers; all text, no network."""

from __future__ import annotations

import ipaddress
import re

from engine.protocol import Codec
from server.problems import Problem

MAX_CANDIDATES = 32
MAX_MEDIA = 4  # aiortc opens ports for each


def clean_offer(offer: str) -> str:
    """The offer as aiortc should see it: no mDNS names (a second each to resolve), the viewer DTLS-active.

    Raises Problem 400 for what is no offer of a video, or one of too much beside it.
    """
    if not offer.lstrip().startswith("v=0") or not re.search(r"^m=video ", offer, re.MULTILINE):
        raise Problem(400, "bad-sdp", "expected an SDP offer with an m=video line")
    lines = offer.strip().splitlines()
    media = sum(line.startswith("m=") for line in lines)
    if media > MAX_MEDIA:
        raise Problem(400, "bad-sdp", f"expected an SDP offer with at most {MAX_MEDIA} m= lines, got {media}")
    kept, candidates = [], 0
    for line in lines:
        if line.startswith("a=candidate:"):
            candidates += 1
            if ".local" in line or candidates > MAX_CANDIDATES:
                continue
        kept.append("a=setup:active" if line == "a=setup:actpass" else line)
    return "\r\n".join(kept) + "\r\n"


def choose_codec(offer: str) -> Codec:
    """H.264 (constrained baseline, packetization mode 1) where the offer has it, else VP8; raises Problem 406."""
    formats = dict(re.findall(r"^a=fmtp:(\d+) (.*?)\r?$", offer, re.MULTILINE))
    for payload in re.findall(r"^a=rtpmap:(\d+) H264/90000", offer, re.MULTILINE | re.IGNORECASE):
        format = formats.get(payload, "").lower().replace(" ", "")
        if "packetization-mode=1" in format and re.search(r"profile-level-id=42", format):
            return "h264"
    if re.search(r"^a=rtpmap:\d+ VP8/90000", offer, re.MULTILINE | re.IGNORECASE):
        return "vp8"
    raise Problem(406, "no-common-codec", "expected H.264 constrained baseline (mode 1) or VP8 in the offer")


def has_candidates(answer: str) -> bool:
    return "a=candidate:" in answer


def advertise(answer: str, addresses: tuple[str, ...]) -> str:
    """Write these public addresses in place of our own host addresses, port by port."""
    if not addresses:
        return answer
    lines: list[str] = []
    for line in answer.split("\r\n"):
        if not (line.startswith("a=candidate:") and " typ host" in line):
            lines.append(line)
            continue
        fields = line.split(" ")
        for address in addresses:
            if ipaddress.ip_address(address).version == ipaddress.ip_address(fields[4]).version:
                lines.append(" ".join([*fields[:4], address, *fields[5:]]))
    return "\r\n".join(lines)
