"""Who may send a request: keys, and the pages that a browser shows."""

from __future__ import annotations

import hashlib
import ipaddress
import os
import stat
import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path

from starlette.datastructures import Headers

from p2ptrain.core.errors import P2PTrainError, UserError
from roles.http.answers import Problem
from wire.address import is_loopback, parse_address

_BEARER = {"www-authenticate": "Bearer"}
KEY_CHARS = range(16, 513)
MAKE_KEY = "make one: python3 -c 'import secrets; print(secrets.token_urlsafe(32))' > FILE; chmod 600 FILE"


def read_key(path: Path, warn: Callable[[str], None], *, least_chars: int = KEY_CHARS[0]) -> str:
    """Read the API key, the only line of the file ``path``. ``warn`` is called if other users of this machine may read
    the file. Raises ``UserError`` if it cannot be read or holds no key."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(4096)
    except OSError as error:
        raise UserError(f"cannot read the API key in {path}: {error.strerror}", remedy=MAKE_KEY) from error
    key = content.decode("ascii", "replace").strip()
    most = KEY_CHARS[-1]
    if not least_chars <= len(key) <= most or not all("!" <= letter <= "~" for letter in key):
        text = f"{path} has no valid API key: one line of {least_chars} to {most} letters, digits and signs, no spaces"
        raise UserError(text, remedy=MAKE_KEY)
    if sys.platform != "win32" and mode & (stat.S_IRWXG | stat.S_IRWXO):
        warn(f"other users of this machine may read the API key in {path}: chmod 600 {path}")
    return key


class Keys:
    """The keys of an endpoint, and what each of them permits. Only digests are kept."""

    def __init__(self, permits: Mapping[str, str], remedy: str = "send the key as Authorization: Bearer KEY") -> None:
        """``permits``: key → the word for what its holder may do. ``remedy``: for who has none."""
        self._remedy = remedy
        self._permits = {_digest(key.encode()): permit for key, permit in permits.items()}

    def permit(self, headers: Headers, offered: str = "") -> str:
        """What the bearer of the key in these headers, or of the ``offered`` one, may do. Raises ``Problem`` without a
        valid key."""
        key = headers.get("x-api-key") or offered  # the first one is of Anthropic's clients
        scheme, _, shown = (headers.get("authorization") or f"Bearer {key}").partition(" ")
        if not shown:
            raise Problem(401, f"locked: {self._remedy}", code="missing_api_key", headers=_BEARER)
        # A digest says nothing about how much of a key was right, so the time of this look-up does not, either.
        found = self._permits.get(_digest(shown.strip().encode("latin-1", "replace")))
        if scheme.lower() != "bearer" or found is None:
            raise Problem(401, f"the key is wrong: {self._remedy}", code="invalid_api_key", headers=_BEARER)
        return found


def refuse_pages(headers: Headers, remedy: str, *, own_only: bool = False, names: Collection[str] = ()) -> None:
    """Refuse requests that a browser sends for a foreign page. A page may make a browser send requests to this
    machine (with its ``Origin``), and rename this machine to read the answers (``Host``: DNS rebinding). Programs
    do neither. Raises ``Problem``.

    Args:
        own_only: only this endpoint's own pages may use it; otherwise those of any server on the loopback, too.
        names: names of this machine, and any IP address, are allowed as well; empty: only the loopback is.
    """
    host = headers.get("host", "")
    if not _names_here(host, names):
        raise Problem(403, f"the Host header names another machine: {remedy}", code="host_refused")
    for origin in headers.getlist("origin"):
        page = origin.partition("://")[2]
        if page.lower() != host.lower() if own_only else not _names_here(page, names):
            raise Problem(403, f"pages of other machines may not use this endpoint: {remedy}", code="origin_refused")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _names_here(text: str, names: Collection[str]) -> bool:
    with suppress(P2PTrainError):
        host = parse_address(text.lower())[0]
        if is_loopback(host) or host in names or f"*.{host.partition('.')[2]}" in names:
            return True
        with suppress(ValueError):
            return bool(names) and bool(ipaddress.ip_address(host))
    return False
