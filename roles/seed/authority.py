"""The run's certificate authority: its key, the certificates that it signed, and the tickets for which it signs them.

It is kept in one directory of the seed's state, readable by its owner only::

    ca.key, ca.pem              the run CA; without them every member needs a new ticket
    tickets.json                ``AuthorityState``
    self/                       the seed's own credentials
    local-worker.ticket, ...    a ticket of each role, for programs of the same user on this machine

- With a ticket a peer *enrols*: it gets a certificate that is valid for a day. A member renews it in time.
- A ticket that is *expired*, *used up* or *rotated* admits no new peer. Its members stay.
- If a ticket is *revoked*, its certificates and their renewals are refused as well.
- An *evicted* peer id stays excluded for good.
- While a peer id has a valid certificate, it belongs to the key that enrolled with it. So nobody can take another
  peer's id with a ticket of their own.
- The serial number of every certificate contains the id of its ticket.
- A change is on the disk before its result is reported. Times are Unix seconds of the seed's own clock.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import json
import math
import os
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from p2ptrain.core.disk import Disk, write_atomic
from p2ptrain.core.errors import ProtocolError, Refused, StorageError
from p2ptrain.core.ids import is_id
from wire.address import ID_BYTES, SECRET_BYTES, Ticket, local_ticket_path
from wire.credentials import (
    CERTIFICATE_LIFETIME_S,
    SKEW_S,
    Credentials,
    PeerIdentity,
    der_of,
    new_authority,
    new_key_and_request,
    pem_of,
    request_of_untrusted,
    server_certificate,
    sign_certificate,
)
from wire.messages import RefusalCode

Role = Literal["worker", "operator", "verifier", "drafter"]
Kind = Literal["", "first", "local"]
ROLES: tuple[Role, ...] = ("worker", "operator", "verifier", "drafter")

MAX_TICKETS = 256
"""Tickets kept at a time. A person reads this list."""
MAX_MEMBERS = 4096
"""Peer ids with a valid certificate. A seed admits fewer at a time."""
MAX_EVICTED = 4096
MAX_USES = 1_000_000
REMOVED_AFTER_S = 7 * 86_400.0
"""How long a ticket is kept after its end, so that a peer that tries it is told why it is refused."""
FIRST_TICKET_S = 7 * 86_400.0
"""Lifetime of the ticket shown at the start. Machines join within days; a ticket left in a chat must become useless."""
LONGEST_TICKET_S = 366 * 86_400.0
KEY_FILE, BOOK_FILE, CA_FILE = "ca.key", "tickets.json", "ca.pem"
_MAX_BOOK_BYTES = 8 << 20
_MAX_PEM_BYTES = 16 << 10
_SERIAL_LEAD = b"\x01"  # no leading zero, so all serial numbers have the same length
_SERIAL_RANDOM_BYTES = 8
_VERSION = 1
_CLOSED = {
    "revoked": (RefusalCode.TICKET_REVOKED, "was revoked together with its certificates"),
    "rotated": (RefusalCode.TICKET_REVOKED, "was replaced by a newer one"),
    "expired": (RefusalCode.TICKET_EXPIRED, "has expired"),
    "used": (RefusalCode.TICKET_USED, "is used up (uses allowed: {})"),
}
"""State of a ticket that admits no new peer → code and text of the refusal."""
_NEW = "on the seed's machine, `p2ptrain ticket new` makes another"


@dataclass(frozen=True, slots=True)
class TicketRecord:
    """One ticket.

    Attributes:
        secret: shared by the seed and the holders of the ticket; in no event, list or message.
        host: the seed's address in the ticket.
        kind: ``first``: shown when the seed starts; ``local``: in a file for this machine's own programs.
        expires_at: None: never. Only local tickets never expire: a reader of their file can read the CA's key too.
        uses: how many peers may enrol with it; None: any number.
        used: how many peers enrolled with it.
        closed_at: when it was rotated or revoked; it admits no new peer since then.
        revoked: whether its certificates are refused too.
        lapses_at: end of validity of its last certificate.
    """

    id: str
    role: Role
    secret: bytes = field(repr=False)
    host: str
    created_at: float
    expires_at: float | None
    kind: Kind = ""
    uses: int | None = None
    used: int = 0
    closed_at: float | None = None
    revoked: bool = False
    lapses_at: float = 0.0

    def state(self, now: float) -> str:
        """``open``, or why it admits no new peer: ``revoked``, ``rotated``, ``expired``, ``used``."""
        if self.revoked:
            return "revoked"
        if self.closed_at is not None:
            return "rotated"
        if self.expires_at is not None and now >= self.expires_at:
            return "expired"
        return "used" if self.uses is not None and self.used >= self.uses else "open"

    def refusal(self, state: str) -> Refused:
        code, text = _CLOSED[state]
        return Refused(code, f"ticket {self.id} {text.format(self.uses)}", remedy=_NEW)

    def removable_at(self, now: float, removed_after_s: float) -> float:
        """When it may be forgotten: ``removed_after_s`` after its end, but while none of its certificates is valid."""
        if self.state(now) == "open":
            return math.inf
        ends = [time for time in (self.closed_at, self.expires_at) if time is not None and time <= now]
        return max(self.lapses_at, min(ends, default=self.lapses_at) + removed_after_s)

    def to_map(self, now: float) -> dict[str, Any]:
        """All fields that people and programs may see: everything but the secret."""
        names = ("id", "role", "kind", "host", "created_at", "expires_at", "uses", "used")
        return {name: getattr(self, name) for name in names} | {"state": self.state(now)}


@dataclass(frozen=True, slots=True)
class Member:
    """A peer with a certificate. ``ticket``: the id of its ticket. ``key``: SHA-256 of its public key, hex."""

    ticket: str
    key: str
    not_after: float


@dataclass(frozen=True, slots=True)
class AuthorityState:
    """All tickets, members and evictions (peer id → its name). Immutable: every change makes a new state."""

    tickets: Mapping[str, TicketRecord] = field(default_factory=dict)
    members: Mapping[str, Member] = field(default_factory=dict)
    evicted: Mapping[str, str] = field(default_factory=dict)

    # -------------------------------------------------------------------------------------------------------- decisions

    def judge_enrolment(self, ticket_id: str, peer_id: str, key: str, now: float) -> TicketRecord:
        """Return the ticket if this peer may enrol with it. Call it only after the peer has proven the secret, because
        refusals describe the ticket. Raises ``Refused``, with a remedy."""
        ticket = self.ticket(ticket_id)
        valid = self._valid(now)
        member = valid.get(peer_id)
        again = member is not None and (member.ticket, member.key) == (ticket.id, key)
        state = ticket.state(now)
        if state in _CLOSED and not (state == "used" and again):
            raise ticket.refusal(state)
        self._judge_peer(peer_id)
        holder = self.tickets.get(member.ticket) if member is not None else None
        if member is not None and member.key != key and holder is not None and not holder.revoked:
            left_h = (member.not_after - now) / 3600
            text = f"the peer id {peer_id} belongs to another key, whose certificate is valid for {left_h:.1f} h more"
            remedy = "use the state directory that joined first, or another --state"
            raise Refused(RefusalCode.DUPLICATE_PEER, text, remedy=remedy)
        if member is None and len(valid) >= MAX_MEMBERS:
            text = f"all {MAX_MEMBERS} certificates are in use"
            raise Refused(RefusalCode.FULL, text, remedy="revoke tickets that leaked")
        return ticket

    def judge_certificate(self, ticket_id: str, peer_id: str) -> None:
        """Raise ``Refused`` if the certificate's ticket is revoked or unknown, or the peer was evicted."""
        ticket = self.ticket(ticket_id)
        if ticket.revoked:
            raise ticket.refusal("revoked")
        self._judge_peer(peer_id)

    def ticket(self, ticket_id: str) -> TicketRecord:
        """The ticket with this id. Raises ``Refused`` if it is unknown or was removed."""
        found = self.tickets.get(ticket_id)
        if found is None:
            text = f"this seed knows no ticket {ticket_id[:40]!r}: it was removed, or belongs to another cluster"
            raise Refused(RefusalCode.TICKET_UNKNOWN, text, remedy=_NEW)
        return found

    def _judge_peer(self, peer_id: str) -> None:
        if peer_id in self.evicted:
            text = f"the peer {self.evicted[peer_id]} ({peer_id}) was evicted from this cluster"
            remedy = "ask the seed's operator, or join as a new peer with another --state"
            raise Refused(RefusalCode.EVICTED, text, remedy=remedy)

    def _valid(self, now: float) -> dict[str, Member]:
        """Members whose certificate is valid on machines whose clock is up to ``SKEW_S`` fast, too."""
        return {peer_id: member for peer_id, member in self.members.items() if now < member.not_after - SKEW_S}

    def open_ticket(self, kind: Kind, role: Role, now: float) -> TicketRecord | None:
        found = [item for item in self.tickets.values() if (item.kind, item.role) == (kind, role)]
        return next((item for item in reversed(found) if item.state(now) == "open"), None)

    # ---------------------------------------------------------------------------------------------------------- changes

    def with_ticket(self, ticket: TicketRecord, now: float) -> AuthorityState:
        """Add a ticket. Raises ``Refused`` if there are too many."""
        kept = self.prune(now)
        if len(kept.tickets) >= MAX_TICKETS:
            kept = self.prune(now, removed_after_s=0.0)
        if len(kept.tickets) >= MAX_TICKETS:
            remedy = "wait: a ticket that has ended is removed when all its certificates have expired"
            raise Refused(RefusalCode.FULL, f"the seed keeps {len(kept.tickets)} tickets, the limit", remedy=remedy)
        return replace(kept, tickets={**kept.tickets, ticket.id: ticket})

    def with_member(self, ticket_id: str, peer_id: str, key: str, not_after: float, now: float) -> AuthorityState:
        kept, ticket = self.prune(now), self.ticket(ticket_id)
        old = kept.members.get(peer_id)
        new = old is None or old.ticket != ticket_id
        lapses_at = max(ticket.lapses_at, not_after)
        ticket = replace(ticket, used=min(ticket.used + new, MAX_USES), lapses_at=lapses_at)
        member = Member(ticket_id, key, not_after)
        return replace(kept, tickets={**kept.tickets, ticket_id: ticket}, members={**kept.members, peer_id: member})

    def revoke(self, ticket_id: str, now: float) -> AuthorityState:
        """Revoke a ticket. Raises ``Refused`` if it is unknown."""
        ticket = replace(self.ticket(ticket_id), closed_at=now, revoked=True)
        return replace(self, tickets={**self.tickets, ticket_id: ticket})

    def rotate(self, now: float) -> AuthorityState:
        """Close every open ticket. Members stay."""
        open_tickets = [item for item in self.tickets.values() if item.state(now) == "open"]
        closed = {item.id: replace(item, closed_at=now) for item in open_tickets}
        return replace(self, tickets={**self.tickets, **closed})

    def evict(self, peer_id: str, name: str) -> AuthorityState:
        """Evict a peer. Raises ``Refused`` if too many are evicted already."""
        if peer_id not in self.evicted and len(self.evicted) >= MAX_EVICTED:
            text = f"{MAX_EVICTED} peers are evicted already"
            raise Refused(RefusalCode.FULL, text, remedy="revoke the tickets that these peers join with")
        return replace(self, evicted={**self.evicted, peer_id: name})

    def prune(self, now: float, *, removed_after_s: float = REMOVED_AFTER_S) -> AuthorityState:
        """Remove expired members, and the tickets that ``TicketRecord.removable_at`` no longer keeps."""
        tickets = {key: item for key, item in self.tickets.items() if now < item.removable_at(now, removed_after_s)}
        return replace(self, tickets=tickets, members=self._valid(now))

    # -------------------------------------------------------------------------------------------------------- disk

    def to_json(self) -> bytes:
        tickets = [asdict(item) | {"secret": base64.b64encode(item.secret).decode()} for item in self.tickets.values()]
        members = {peer_id: asdict(member) for peer_id, member in self.members.items()}
        document = {"version": _VERSION, "tickets": tickets, "members": members, "evicted": dict(self.evicted)}
        return json.dumps(document, indent=1).encode()

    @classmethod
    def from_json(cls, data: bytes) -> AuthorityState:
        """Raises ``StorageError`` if the data is damaged, or of another release."""
        try:
            document = json.loads(data)
            if document["version"] != _VERSION:
                raise StorageError(f"it was written by another release (version {document['version']})")
            tickets = [
                TicketRecord(**item | {"secret": base64.b64decode(item["secret"], validate=True)})
                for item in document["tickets"]
            ]
            members = {peer_id: Member(**item) for peer_id, item in document["members"].items()}
            evicted = {str(peer_id): str(name) for peer_id, name in document["evicted"].items()}
        except (ValueError, KeyError, TypeError, AttributeError, binascii.Error) as error:
            raise StorageError(f"it is damaged: {type(error).__name__}") from error
        if any(item.role not in ROLES or len(item.secret) != SECRET_BYTES for item in tickets):
            raise StorageError("it is damaged: it has an invalid ticket")
        if not all(map(is_id, members)):
            raise StorageError("it is damaged: it has an invalid peer id")
        return cls({item.id: item for item in tickets}, members, evicted)


class Authority:
    """The authority, created by ``open``. ``now`` is always Unix seconds. ``pin``: SHA-256 of ``ca_der``, as tickets
    carry it. ``records``: the current state, which is replaced as a whole."""

    def __init__(
        self,
        disk: Disk,
        directory: Path,
        key_pem: bytes,
        ca_pem: bytes,
        records: AuthorityState,
        entropy: Callable[[int], bytes],
    ) -> None:
        self.records, self._entropy = records, entropy
        self.ca_der = der_of(ca_pem)
        self.pin = hashlib.sha256(self.ca_der).digest()
        self._disk, self._directory = disk, directory
        self._key_pem, self._ca_pem = key_pem, ca_pem
        self._own_id = ""
        self._changing = asyncio.Lock()

    @classmethod
    def open(
        cls, disk: Disk, directory: Path, *, name: str, now: float, entropy: Callable[[int], bytes] = os.urandom
    ) -> Authority:
        """Open the authority in ``directory``, or create it. Blocking. Raises ``StorageError``.

        ``entropy``: as of a ``World``; for tickets and serial numbers. Keys are always the operating system's.
        """
        found = disk.list_dir(directory)
        made = () if CA_FILE in found else new_authority(f"p2ptrain {name}", now=now)
        keep_files(disk, directory, dict(zip((KEY_FILE, CA_FILE), made, strict=False)))
        key_pem = disk.read(directory / KEY_FILE, max_bytes=_MAX_PEM_BYTES)
        ca_pem = disk.read(directory / CA_FILE, max_bytes=_MAX_PEM_BYTES)
        records, path = AuthorityState(), directory / BOOK_FILE
        if path.name in found:
            try:
                records = AuthorityState.from_json(disk.read(path, max_bytes=_MAX_BOOK_BYTES))
            except StorageError as error:
                remedy = "restore it from a backup, or move it away: then every member needs a new ticket"
                raise StorageError(f"cannot use {path}: {error.message}", remedy=error.remedy or remedy) from error
        try:
            key = serialization.load_pem_private_key(key_pem, password=None)
            if key.public_key() != x509.load_pem_x509_certificate(ca_pem).public_key():
                raise ValueError("ca.key is not the key of ca.pem")
            begins = x509.load_pem_x509_certificate(ca_pem).not_valid_before_utc
            if begins.timestamp() > now:  # every peer would report it as its own problem
                text = f"the seed's authority is valid only from {begins:%Y-%m-%d %H:%M} UTC"
                new = f"move {directory} away: a new authority is made, and every machine must join with a new ticket"
                raise StorageError(text, remedy=f"check this machine's clock; if it is right, {new}")
            return cls(disk, directory, key_pem, ca_pem, records, entropy)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            remedy = f"restore it from a backup, or move {directory} away: then every member needs a new ticket"
            raise StorageError(f"the authority in {directory} is damaged: {error}", remedy=remedy) from error

    def files(self) -> dict[str, bytes]:
        """The files that another seed needs to become this authority, for backups. ``keep_files`` writes them."""
        return {KEY_FILE: self._key_pem, BOOK_FILE: self.records.to_json(), CA_FILE: self._ca_pem}

    # ----------------------------------------------------------------------------------------------------- certificates

    def own_credentials(self, peer_id: str, now: float) -> Credentials:
        """Make and save new credentials of the seed itself. Blocking. Raises ``StorageError``."""
        key_pem, csr_der = new_key_and_request(peer_id)
        _, key = request_of_untrusted(csr_der)
        certificate_der = self._sign(key, peer_id, "seed", bytes(ID_BYTES), now)
        credentials = Credentials(self._directory / "self", self._ca_pem, pem_of(certificate_der), key_pem)
        credentials.save(self._disk)
        self._own_id = peer_id
        return credentials

    def http_credentials(self, names: Collection[str], now: float) -> Path:
        """Make a certificate for the HTTPS server of these names; return the file with it and its key. Blocking. Raises
        ``StorageError``."""
        path = self._directory / "https.pem"
        write_atomic(self._disk, path, server_certificate(self._key_pem, self._ca_pem, names, now=now), private=True)
        return path

    async def enrol(self, ticket_id: str, peer_id: str, csr_der: bytes, now: float) -> bytes:
        """Sign the first certificate (DER) of a peer that has proven to hold the ticket.

        Raises:
            Refused: the ticket admits no peer, or this peer is not admitted.
            ProtocolError: the request is malformed or names another peer.
            StorageError: the new state cannot be written.
        """
        if peer_id == self._own_id:
            text = f"the peer id {peer_id} is the seed's own"
            raise Refused(RefusalCode.DUPLICATE_PEER, text, remedy="use another --state")
        judge = lambda records, key: records.judge_enrolment(ticket_id, peer_id, key, now)  # noqa: E731
        return await self._certify(ticket_id, peer_id, csr_der, now, judge)

    async def renew(self, identity: PeerIdentity, csr_der: bytes, now: float) -> bytes:
        """Sign the next certificate (DER) of a member that has shown its present one. Raises as ``enrol``."""
        ticket_id, peer_id = ticket_of(identity), identity.peer_id
        return await self._certify(
            ticket_id, peer_id, csr_der, now, lambda records, key: records.judge_certificate(ticket_id, peer_id)
        )

    async def _certify(
        self, ticket_id: str, peer_id: str, csr_der: bytes, now: float, judge: Callable[[AuthorityState, str], object]
    ) -> bytes:
        name, key = request_of_untrusted(csr_der)
        if name != peer_id:
            raise ProtocolError(f"peer {peer_id} requested a certificate for {name}")
        form = serialization.PublicFormat.SubjectPublicKeyInfo
        digest = hashlib.sha256(key.public_bytes(serialization.Encoding.DER, form)).hexdigest()

        def add_member(records: AuthorityState) -> AuthorityState:
            judge(records, digest)  # here, because another peer may have used the ticket up meanwhile
            return records.with_member(ticket_id, peer_id, digest, now + CERTIFICATE_LIFETIME_S, now)

        await self.change(add_member)
        return self._sign(key, peer_id, self.records.ticket(ticket_id).role, bytes.fromhex(ticket_id), now)

    def judge(self, identity: PeerIdentity) -> None:
        """Raise ``Refused`` if a certificate under this CA is no longer honoured: revoked, evicted or unknown."""
        if "seed" not in identity.roles or ticket_of(identity) != bytes(ID_BYTES).hex():  # a seed's has no ticket
            self.records.judge_certificate(ticket_of(identity), identity.peer_id)

    def _sign(self, key: ec.EllipticCurvePublicKey, peer_id: str, role: str, ticket_id: bytes, now: float) -> bytes:
        serial = int.from_bytes(_SERIAL_LEAD + ticket_id + self._entropy(_SERIAL_RANDOM_BYTES))
        ca = self._key_pem, self._ca_pem
        return sign_certificate(*ca, key, peer_id=peer_id, roles=(role,), now=now, serial=serial)

    # ---------------------------------------------------------------------------------------------------------- tickets

    def ticket(self, record: TicketRecord, port: int) -> Ticket:
        return Ticket(record.host, port, record.role, record.id, record.secret, self.pin)

    async def new_ticket(
        self, role: Role, *, host: str, now: float, expires_s: float | None, uses: int | None = None, kind: Kind = ""
    ) -> TicketRecord:
        """Create a ticket. Raises ``Refused`` if there are too many, ``StorageError``."""
        record = TicketRecord(
            id=self._entropy(ID_BYTES).hex(),
            role=role,
            secret=self._entropy(SECRET_BYTES),
            host=host,
            created_at=now,
            expires_at=None if expires_s is None else now + expires_s,
            kind=kind,
            uses=uses,
        )
        await self.change(lambda records: records.with_ticket(record, now))
        return record

    async def first_ticket(self, *, host: str, now: float) -> TicketRecord:
        """The worker ticket that a seed shows when it starts. It stays the same until its end."""
        found = self.records.open_ticket("first", "worker", now)
        if found is not None and found.host == host:
            return found
        return await self.new_ticket("worker", host=host, now=now, expires_s=FIRST_TICKET_S, kind="first")

    async def write_local_tickets(self, *, host: str, port: int, now: float) -> None:
        """Write a ticket of each role for this machine's own programs. Raises ``Refused``, ``StorageError``."""
        for role in ROLES:
            record = self.records.open_ticket("local", role, now)
            if record is None:
                record = await self.new_ticket(role, host=host, now=now, expires_s=None, kind="local")
            ticket = Ticket(host, port, role, record.id, record.secret, self.pin)
            path = self._directory / local_ticket_path(Path(), role).name
            data = f"{ticket}\n".encode()
            await asyncio.to_thread(write_atomic, self._disk, path, data, private=True)

    async def change(self, change: Callable[[AuthorityState], AuthorityState]) -> None:
        """Replace ``records``, on the disk first. Raises what ``change`` raises, and ``StorageError``."""

        async def carry_out() -> None:
            async with self._changing:
                records = change(self.records)
                path = self._directory / BOOK_FILE
                await asyncio.to_thread(write_atomic, self._disk, path, records.to_json(), private=True)
                self.records = records

        task = asyncio.get_running_loop().create_task(carry_out(), name="tickets")
        await asyncio.shield(task)  # if the caller is cancelled, the disk and the memory must still agree


def keep_files(disk: Disk, directory: Path, files: Mapping[str, bytes]) -> None:
    """Write the result of ``Authority.files``, the key before the CA. Blocking. Raises ``ProtocolError`` if a file is
    none of an authority's, and ``StorageError``."""
    if unknown := files.keys() - {KEY_FILE, BOOK_FILE, CA_FILE}:
        raise ProtocolError(f"unknown file {min(unknown)[:40]!r} among the authority's files")
    disk.make_dir(directory)
    disk.set_mode(directory, 0o700)  # the directory may have existed before
    for name in (KEY_FILE, BOOK_FILE, CA_FILE):
        if name in files:
            write_atomic(disk, directory / name, files[name], private=name != CA_FILE)


def ticket_of(identity: PeerIdentity) -> str:
    """The id of a certificate's ticket. Raises ``Refused`` if this authority did not make the certificate."""
    with suppress(OverflowError):
        raw = identity.serial.to_bytes(len(_SERIAL_LEAD) + ID_BYTES + _SERIAL_RANDOM_BYTES)
        if raw.startswith(_SERIAL_LEAD):
            return raw[len(_SERIAL_LEAD) :][:ID_BYTES].hex()
    raise Refused(RefusalCode.TICKET_UNKNOWN, "the certificate does not name the ticket that it was issued for")
