"""The run's certificate authority: its key, what it signed, and the tickets that lead to a signature.

It lives in one directory of the seed's state, readable by its owner only::

    ca.key, ca.pem                               the run CA; without them every member needs a new ticket
    tickets.json                                 ``roles.seed.tickets.Book``
    self/                                        the seed's own credentials
    local-worker.ticket, ...                     one of each role, for programs of the same user on this machine

Whatever changes the book is on the disk before its outcome is told. Every certificate carries the id of its ticket in
its serial number, so that nothing need be kept of a certificate to know where it came from.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from p2ptrain.core.disk import Disk, write_atomic
from p2ptrain.core.errors import ProtocolError, Refused, StorageError
from roles.seed.tickets import ID_BYTES, ROLES, SECRET_BYTES, Book, Kind, Role, TicketRecord
from wire.address import Ticket, local_ticket_path
from wire.credentials import (
    CERTIFICATE_LIFETIME_S,
    Credentials,
    PeerIdentity,
    der_of,
    new_authority,
    new_key_and_request,
    pem_of,
    request_of_untrusted,
    sign_certificate,
)

FIRST_TICKET_S = 7 * 86_400.0
"""The ticket shown at the start: machines are added within days; a forgotten line in a chat is worth nothing later."""
LONGEST_TICKET_S = 366 * 86_400.0
KEY_FILE, BOOK_FILE, CA_FILE = "ca.key", "tickets.json", "ca.pem"
_MAX_BOOK_BYTES = 8 << 20
_MAX_PEM_BYTES = 16 << 10
_SERIAL_LEAD = b"\x01"  # so that the number has the same length whatever follows
_SERIAL_RANDOM_BYTES = 8


class Authority:
    """Made by ``open``. ``now`` is always Unix seconds.

    Attributes:
        ca_der: the CA's certificate. pin: its SHA-256, as tickets carry it.
        book: what is decided by; replaced as a whole.
    """

    def __init__(self, disk: Disk, directory: Path, key_pem: bytes, ca_pem: bytes, book: Book) -> None:
        self.book = book
        self.ca_der = der_of(ca_pem)
        self.pin = hashlib.sha256(self.ca_der).digest()
        self._disk, self._directory = disk, directory
        self._key_pem, self._ca_pem = key_pem, ca_pem
        self._own_id = ""
        self._changing = asyncio.Lock()

    @classmethod
    def open(cls, disk: Disk, directory: Path, *, name: str, now: float) -> Authority:
        """The authority in ``directory``, made where there is none. Blocking.

        Raises:
            StorageError: it cannot be read or written, or is damaged.
        """
        disk.make_dir(directory, mode=0o700)
        disk.set_mode(directory, 0o700)  # where it was there before
        if "ca.pem" not in disk.list_dir(directory):
            key_pem, ca_pem = new_authority(f"p2ptrain {name}", now=now)
            write_atomic(disk, directory / "ca.key", key_pem, private=True)
            write_atomic(disk, directory / "ca.pem", ca_pem)  # last: where it is, the key is
        key_pem = disk.read(directory / "ca.key", max_bytes=_MAX_PEM_BYTES)
        ca_pem = disk.read(directory / "ca.pem", max_bytes=_MAX_PEM_BYTES)
        book, path = Book(), directory / "tickets.json"
        if path.name in disk.list_dir(directory):
            try:
                book = Book.from_json(disk.read(path, max_bytes=_MAX_BOOK_BYTES))
            except StorageError as error:
                remedy = "restore it from a backup, or move it away: then every member needs a new ticket"
                raise StorageError(f"cannot use {path}: {error.message}", remedy=error.remedy or remedy) from error
        try:
            _check_pair(key_pem, ca_pem)
            return cls(disk, directory, key_pem, ca_pem, book)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            remedy = f"restore it from a backup, or move {directory} away: then every member needs a new ticket"
            raise StorageError(f"the authority in {directory} is damaged: {error}", remedy=remedy) from error

    def files(self) -> dict[str, bytes]:
        """What another seed needs to be this authority: for standbys only. ``keep_files`` writes it there."""
        return {KEY_FILE: self._key_pem, BOOK_FILE: self.book.to_json(), CA_FILE: self._ca_pem}

    # ----------------------------------------------------------------------------------------------------- certificates

    def own_credentials(self, peer_id: str, now: float) -> Credentials:
        """Fresh credentials of the seed itself, saved. Blocking. Raises ``StorageError``."""
        key_pem, csr_der = new_key_and_request(peer_id)
        _, key = request_of_untrusted(csr_der)
        certificate_der = self._sign(key, peer_id, "seed", bytes(ID_BYTES), now)
        made = Credentials(self._directory / "self", self._ca_pem, pem_of(certificate_der), key_pem)
        made.save(self._disk)
        self._own_id = peer_id
        return made

    async def enrol(self, ticket_id: str, peer_id: str, csr_der: bytes, now: float) -> bytes:
        """A first certificate (DER), for whoever has proven to hold the ticket.

        Raises:
            Refused: the ticket, or this peer, lets nobody in. ProtocolError: the request is none, or names another.
            StorageError: it could not be written down.
        """
        if peer_id == self._own_id:
            text = f"the peer id {peer_id} is the seed's own"
            raise Refused("duplicate-peer", text, remedy="use another --state")
        key, digest = _requested(csr_der, peer_id)
        role = self.book.judge_enrolment(ticket_id, peer_id, digest, now).role

        def member(book: Book) -> Book:
            book.judge_enrolment(ticket_id, peer_id, digest, now)  # another may have used it up meanwhile
            return book.with_member(ticket_id, peer_id, digest, now + CERTIFICATE_LIFETIME_S, now)

        await self._change(member)
        return self._sign(key, peer_id, role, bytes.fromhex(ticket_id), now)

    async def renew(self, identity: PeerIdentity, csr_der: bytes, now: float) -> bytes:
        """The next certificate (DER) of a member, who has shown the one that it has. Raises as ``enrol``."""
        ticket_id, peer_id = ticket_of(identity), identity.peer_id
        key, digest = _requested(csr_der, peer_id)

        def member(book: Book) -> Book:
            book.judge_certificate(ticket_id, peer_id)
            return book.with_member(ticket_id, peer_id, digest, now + CERTIFICATE_LIFETIME_S, now)

        role = self.book.ticket(ticket_id).role
        await self._change(member)
        return self._sign(key, peer_id, role, bytes.fromhex(ticket_id), now)

    def judge(self, identity: PeerIdentity) -> None:
        """Raise ``Refused`` where a certificate under this CA is no longer honoured: revoked, evicted, or unknown."""
        if "seed" not in identity.roles or ticket_of(identity) != bytes(ID_BYTES).hex():  # that of a seed that has led
            self.book.judge_certificate(ticket_of(identity), identity.peer_id)

    def _sign(self, key: ec.EllipticCurvePublicKey, peer_id: str, role: str, ticket_id: bytes, now: float) -> bytes:
        serial = int.from_bytes(_SERIAL_LEAD + ticket_id + secrets.token_bytes(_SERIAL_RANDOM_BYTES))
        return sign_certificate(
            self._key_pem, self._ca_pem, key, peer_id=peer_id, roles=(role,), now=now, serial=serial
        )

    # ---------------------------------------------------------------------------------------------------------- tickets

    def ticket(self, record: TicketRecord, port: int) -> Ticket:
        """The ticket as a person pastes it."""
        return Ticket(record.host, port, record.role, record.id, record.secret, self.pin)

    async def new_ticket(
        self, role: Role, *, host: str, now: float, expires_s: float | None, uses: int | None = None, kind: Kind = ""
    ) -> TicketRecord:
        """Raises ``Refused`` where there are too many, ``StorageError``."""
        record = TicketRecord(
            id=secrets.token_hex(ID_BYTES),
            role=role,
            secret=secrets.token_bytes(SECRET_BYTES),
            host=host,
            created_at=now,
            expires_at=None if expires_s is None else now + expires_s,
            kind=kind,
            uses=uses,
        )
        await self._change(lambda book: book.with_ticket(record, now))
        return record

    async def first_ticket(self, *, host: str, now: float) -> TicketRecord:
        """The worker ticket that a seed shows when it starts: the same one until it is over."""
        found = self.book.of_kind("first", "worker", now)
        if found is not None and found.host == host:
            return found
        return await self.new_ticket("worker", host=host, now=now, expires_s=FIRST_TICKET_S, kind="first")

    async def write_local_tickets(self, *, host: str, port: int, now: float) -> None:
        """Leave a ticket of each role for this machine's own programs. Raises ``StorageError``."""
        for role in ROLES:
            record = self.book.of_kind("local", role, now)
            if record is None:
                record = await self.new_ticket(role, host=host, now=now, expires_s=None, kind="local")
            ticket = Ticket(host, port, role, record.id, record.secret, self.pin)
            path = self._directory / local_ticket_path(Path(), role).name
            data = f"{ticket}\n".encode()
            await asyncio.to_thread(write_atomic, self._disk, path, data, private=True)

    async def revoke(self, ticket_id: str, now: float) -> None:
        """Raises ``Refused`` where there is no such ticket, ``StorageError``."""
        await self._change(lambda book: book.without_ticket(ticket_id, now))

    async def rotate(self, now: float) -> None:
        """Close every open ticket. Members stay. Raises ``StorageError``."""
        await self._change(lambda book: book.rotated(now))

    async def evict(self, peer_id: str, name: str) -> None:
        """Raises ``Refused``, ``StorageError``."""
        await self._change(lambda book: book.with_evicted(peer_id, name))

    async def _change(self, change: Callable[[Book], Book]) -> None:
        task = asyncio.get_running_loop().create_task(self._changed(change), name="tickets")
        await asyncio.shield(task)  # a caller that goes away must not leave the disk and the memory apart

    async def _changed(self, change: Callable[[Book], Book]) -> None:
        async with self._changing:
            book = change(self.book)
            path = self._directory / "tickets.json"
            await asyncio.to_thread(write_atomic, self._disk, path, book.to_json(), private=True)
            self.book = book


def keep_files(disk: Disk, directory: Path, files: Mapping[str, bytes]) -> None:
    """Write what ``Authority.files`` gave, so that a kill leaves no CA without its key. Blocking.

    Raises:
        ProtocolError: these are other files. StorageError.
    """
    if unknown := files.keys() - {KEY_FILE, BOOK_FILE, CA_FILE}:
        raise ProtocolError(f"an authority has no file {min(unknown)[:40]!r}")
    disk.make_dir(directory, mode=0o700)
    disk.set_mode(directory, 0o700)
    for name in (KEY_FILE, BOOK_FILE, CA_FILE):
        path = directory / name
        if name in files and not (
            name in disk.list_dir(directory) and disk.read(path, max_bytes=_MAX_BOOK_BYTES) == files[name]
        ):
            write_atomic(disk, path, files[name], private=name != CA_FILE)


def _check_pair(key_pem: bytes, ca_pem: bytes) -> None:
    """Raise ``ValueError``, or what the parsers raise, where they do not belong together."""
    key = serialization.load_pem_private_key(key_pem, password=None)
    if key.public_key() != x509.load_pem_x509_certificate(ca_pem).public_key():
        raise ValueError("ca.key is not the key of ca.pem")


def _requested(csr_der: bytes, peer_id: str) -> tuple[ec.EllipticCurvePublicKey, str]:
    """The key of a request, and its SHA-256 in hex."""
    named, key = request_of_untrusted(csr_der)
    if named != peer_id:
        raise ProtocolError(f"a certificate request for {named} from {peer_id}")
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return key, hashlib.sha256(key.public_bytes(serialization.Encoding.DER, form)).hexdigest()


def ticket_of(identity: PeerIdentity) -> str:
    """The id of the ticket that a certificate came from. Raises ``Refused`` where this authority did not make it."""
    with suppress(OverflowError):
        raw = identity.serial.to_bytes(len(_SERIAL_LEAD) + ID_BYTES + _SERIAL_RANDOM_BYTES)
        if raw.startswith(_SERIAL_LEAD):
            return raw[len(_SERIAL_LEAD) :][:ID_BYTES].hex()
    raise Refused("ticket-unknown", "a certificate that does not tell the ticket it came from")
