"""What a person needs to reach a seed: addresses, tickets and codes.

A ticket is an address with the hash of a run's CA and a secret::

    HOST:PORT/ base64url( version and role (1) ‖ id (6) ‖ secret (16) ‖ pin (32) ‖ checksum (2) )

The checksum detects typing and copying errors. It does not cover the address, so a person may write another name of the
same seed before the slash. The secret is never sent: a joiner proves that it has it (``proof``).
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from p2ptrain.core.errors import ProtocolError, UserError

DEFAULT_PORT = 7337
MEMBER_PORT = 7339
"""Where a member listens for the others if it may and the port is free. So a firewall's rule can name it."""
EVERYWHERE = frozenset({"0.0.0.0", "::"})  # noqa: S104 - addresses to listen on, not to dial
MAX_HOST_CHARS = 255
"""Longest DNS name (RFC 1035, section 2.3.4)."""

_SECRET = re.compile(r"[A-Za-z0-9_=-]{24,}")
_NAME = re.compile(r"[a-z0-9_-]+")
_SCHEME = re.compile(r"\s*(?:tcp|https?)://", re.IGNORECASE)  # of an address that was copied from another program
_ADDRESS = re.compile(r"(?:\[(?P<v6>[^\[\]]+)\]|(?P<host>[^\s:/@\[\]]+))(?::(?P<port>\d{1,5}))?", re.ASCII)


def parse_address(text: str, *, default_port: int = DEFAULT_PORT) -> tuple[str, int]:
    """Parse ``host``, ``host:port``, ``[IPv6]`` or ``[IPv6]:port`` to host and port, also after ``http://`` or
    ``tcp://``. Raises ``UserError``."""
    match = _ADDRESS.fullmatch(without_scheme(text))
    if match is None:
        raise _bad_address(text, "expected a host, with or without a port")
    host, port = match["v6"] or match["host"], int(match["port"] or default_port)
    if len(host) > MAX_HOST_CHARS or not host.isprintable():
        raise _bad_address(text[:80], f"a host is {MAX_HOST_CHARS} printable characters at most")
    if match["v6"]:
        try:
            address = ipaddress.IPv6Address(host)
        except ValueError:
            raise _bad_address(text, f"{without_secrets(host)!r} is not an IPv6 address") from None
        if address.is_link_local and not address.scope_id:
            why = f"{host} is a link-local address, which needs this machine's interface to that network"
            raise _bad_address(text, why, f"write [{host}%INTERFACE]:{port}, such as [{host}%eth0]:{port}")
    if not 1 <= port <= 65535:
        raise _bad_address(text, f"port {port} is not between 1 and 65535")
    return host, port


def without_scheme(text: str) -> str:
    """Remove ``http://`` or ``tcp://`` before an address, and a slash after it."""
    scheme = _SCHEME.match(text)
    return text[scheme.end() :].strip().removesuffix("/") if scheme else text.strip()


def without_secrets(text: str) -> str:
    """Remove from a person's input every part that may belong to a ticket, so that it can be shown.

    A ticket's secret is part of a run of at least 24 letters in mixed case; a host name has small letters only.
    """
    return _SECRET.sub(lambda found: found[0] if _NAME.fullmatch(found[0]) else "…", text)


def format_address(host: str, port: int) -> str:
    """Format as ``host:port``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def dialable_host(host: str, own: str = "127.0.0.1") -> str:
    """The host to dial of who listens on ``host``; ``own``, an address of that machine, if it listens on all."""
    return own if host in EVERYWHERE else host


def advertised_host(seed_host: str, host: str) -> str:
    """The host to dial of a member that the seed knows as ``host``, for a peer that reaches the seed at ``seed_host``:
    members on the seed's machine are known by its loopback, or without a host, and the name of an interface (the zone
    of a link-local address) is valid on one machine only."""
    if not host or (is_loopback(host) and not is_loopback(seed_host)):
        return seed_host
    address, percent, _ = host.partition("%")
    zone = seed_host.partition("%")[2]
    return f"{address}%{zone}" if percent and zone else host


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def how_to_join(address: str, role: str = "") -> str:
    """The command with which a peer joins a seed. ``address``: as ``ClusterInfo`` has it. ``role``: empty: a worker."""
    option = f" --role {role}" if role else ""
    is_plain = is_loopback(address.rpartition(":")[0].strip("[]"))
    return join_command(address, role) + f"   (`p2ptrain ticket code{option}` shows its code)" * (not is_plain)


def join_command(place: str, role: str) -> str:
    """The command that uses ``place`` in a role: a ticket, or the address of a seed that needs none."""
    if role == "operator":
        return f"p2ptrain tui {place}"
    return f"p2ptrain join {place}" + f" --role {role} --model DIR" * (role in ("verifier", "drafter"))


def how_to_open(port: int) -> str:
    """What a person can do about NAT or a firewall before ``port`` of a member."""
    chosen = "" if port == MEMBER_PORT else f"choose a port with --port (default: {MEMBER_PORT}, if it is free), and "
    return (
        f"{chosen}let it in through the firewall: `ufw allow {port}/tcp`, `nft insert rule inet filter input tcp dport"
        f" {port} accept` (or the table and chain with `hook input` in `nft list chains`), or on Windows `netsh"
        f" advfirewall firewall add rule name=p2ptrain dir=in action=allow protocol=TCP localport={port}`. Behind NAT,"
        f" forward the port in the router, and join with --port {port} --advertise PUBLIC-ADDRESS:{port}"
    )


def _bad_address(text: str, why: str, remedy: str = "") -> UserError:
    example = f"write host, host:port or [IPv6]:port, such as 192.168.1.20:{DEFAULT_PORT} or [fd00::1]:{DEFAULT_PORT}"
    return UserError(f"{without_secrets(text)!r} is not an address: {why}", remedy=remedy or example)


# -------------------------------------------------------------------------------------------------------------- tickets


ROLES = ("worker", "operator", "seed", "verifier", "drafter")
"""A ticket gives its holder one of these roles. The index is sent on the wire."""

ID_BYTES = 6
SECRET_BYTES = 16
PIN_BYTES = 32
NONCE_BYTES = 32

CODE_DIGITS = 6

_VERSION = 1
_CHECKSUM_BYTES = 2
_BODY_BYTES = 1 + ID_BYTES + SECRET_BYTES + PIN_BYTES
_BODY_CHARS = (_BODY_BYTES + _CHECKSUM_BYTES) * 4 // 3
_BODY = re.compile(r"[A-Za-z0-9_-]+")
_PROOF_LABEL = b"p2ptrain enrolment proof 1"


@dataclass(frozen=True, slots=True)
class Ticket:
    """What a person pastes to join.

    Attributes:
        id: names the ticket; 12 hex digits, not secret.
        secret: 16 random bytes.
        pin: SHA-256 of the run CA's certificate in DER.
    """

    host: str
    port: int
    role: str
    id: str
    secret: bytes = field(repr=False)
    pin: bytes

    def __str__(self) -> str:
        """The whole ticket with its secret: only for places that show or store a ticket on purpose."""
        head = bytes([_VERSION << 4 | ROLES.index(self.role)])
        body = head + bytes.fromhex(self.id) + self.secret + self.pin
        return f"{format_address(self.host, self.port)}/{urlsafe_b64encode(body + _checksum(body)).decode()}"

    @classmethod
    def parse_untrusted(cls, text: str) -> Self:
        """Parse a ticket. White space is ignored, because terminals insert it when they wrap a line.

        Raises ``ProtocolError``. Its text does not repeat the input, which may hold a secret.
        """
        if len(text) > 512:  # the longest host name and a ticket are shorter
            raise _no_ticket("it is longer than 512 characters")
        address, slash, encoded = "".join(text.split()).rpartition("/")
        if not slash:
            remedy = "copy the whole ticket again; if this is a host name, write it in lower case"
            raise _no_ticket("it has no slash after the seed's address", remedy)
        if len(encoded) != _BODY_CHARS:
            lost = f"{len(encoded)} characters follow the slash, expected {_BODY_CHARS}"
            raise _no_ticket(lost)
        if not _BODY.fullmatch(encoded):
            raise _no_ticket("it has invalid characters after the slash")
        raw = urlsafe_b64decode(encoded)
        body = raw[:_BODY_BYTES]
        if raw[_BODY_BYTES:] != _checksum(body):
            raise _no_ticket("its checksum is wrong: a character after the slash was changed")
        version, role = body[0] >> 4, body[0] & 15
        if version != _VERSION or role >= len(ROLES):
            raise _no_ticket(f"unknown version {version}, role {role}", "use the same release of p2ptrain as the seed")
        secret_at = 1 + ID_BYTES
        try:
            host, port = parse_address(address)
        except UserError as error:
            raise _no_ticket("the text before the slash is not an address", error.remedy) from None
        return cls(
            host=host,
            port=port,
            role=ROLES[role],
            id=body[1:secret_at].hex(),
            secret=body[secret_at : secret_at + SECRET_BYTES],
            pin=body[secret_at + SECRET_BYTES :],
        )


def read_code(text: str) -> str:
    """The digits of a code, without the spaces and hyphens of a person. Raises ``UserError``."""
    digits = re.sub(r"[\s-]", "", text)
    if not re.fullmatch(rf"[0-9]{{{CODE_DIGITS}}}", digits):
        text = f"a code has {CODE_DIGITS} digits"
        raise UserError(text, remedy="on the seed's machine `p2ptrain ticket code` shows one")
    return digits


def local_ticket_path(state_dir: Path, role: str) -> Path:
    return state_dir / "seed" / "authority" / f"local-{role}.ticket"


def is_ticket(text: str) -> bool:
    """Whether ``text``, given as an address, is meant as a ticket: it has a slash or a possible secret."""
    return "/" in without_scheme(text) or without_secrets(text) != text


def proof(secret: bytes, nonce: bytes, csr_der: bytes) -> bytes:
    """HMAC-SHA256 (RFC 2104) over the server's nonce and the certificate request; proves knowledge of ``secret``."""
    return hmac.digest(secret, b"%s\0%s%s" % (_PROOF_LABEL, hashlib.sha256(nonce).digest(), csr_der), "sha256")


def verify_proof(mac: bytes, *, secret: bytes, nonce: bytes, csr_der: bytes) -> bool:
    """Whether ``mac`` is the ``proof``, compared in constant time."""
    return hmac.compare_digest(mac, proof(secret, nonce, csr_der))


def _checksum(body: bytes) -> bytes:
    return hashlib.sha256(body).digest()[:_CHECKSUM_BYTES]


def _no_ticket(why: str, remedy: str = "copy the whole ticket again, or ask for a new one") -> ProtocolError:
    return ProtocolError(f"this is not a ticket: {why}", remedy=remedy)
