"""Addresses as a person writes them."""

from __future__ import annotations

import ipaddress
import re

from p2ptrain.core.errors import UserError

DEFAULT_PORT = 7337
MAX_HOST_CHARS = 255
"""As long as a name in the DNS may be (RFC 1035, section 2.3.4)."""

_SECRET = re.compile(r"[A-Za-z0-9_=-]{24,}")
_NAME = re.compile(r"[a-z0-9_-]+")
_ADDRESS = re.compile(r"(?:\[(?P<v6>[^\[\]]+)\]|(?P<host>[^\s:/@\[\]]+))(?::(?P<port>\d{1,5}))?", re.ASCII)


def parse_address(text: str, *, default_port: int = DEFAULT_PORT) -> tuple[str, int]:
    """Host and port of ``host``, ``host:port``, ``[IPv6]`` or ``[IPv6]:port``. Raises ``UserError``."""
    match = _ADDRESS.fullmatch(text.strip())
    if match is None:
        raise _bad_address(text, "it is no host with or without a port")
    host, port = match["v6"] or match["host"], int(match["port"] or default_port)
    if len(host) > MAX_HOST_CHARS or not host.isprintable():
        raise _bad_address(text[:80], f"a host is {MAX_HOST_CHARS} printable characters at most")
    if match["v6"]:
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            raise _bad_address(text, f"{without_secrets(host)!r} is no IPv6 address") from None
    if not 1 <= port <= 65535:
        raise _bad_address(text, f"port {port} is not between 1 and 65535")
    return host, port


def without_secrets(text: str) -> str:
    """What a person typed, fit to be shown: pieces that may be of a ticket are left out, wherever they stand.

    A ticket's secret is among more than 24 letters in a row, large and small ones; a host's name is told from that by
    its small letters.
    """
    return _SECRET.sub(lambda found: found[0] if _NAME.fullmatch(found[0]) else "…", text)


def _bad_address(text: str, why: str) -> UserError:
    return UserError(
        f"{without_secrets(text)!r} is not an address: {why}",
        remedy=f"write host, host:port or [IPv6]:port, such as 192.168.1.20:{DEFAULT_PORT} or [fe80::1]:{DEFAULT_PORT}",
    )
