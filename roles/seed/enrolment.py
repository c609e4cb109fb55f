"""Enrolment of peers, renewal of certificates, and operators' requests for tickets. ``wire.enrol`` shows the protocol.

A seed without an authority uses plain TCP on the loopback: it admits all peers, and cannot verify who they are.
"""

from __future__ import annotations

import base64
import binascii
import secrets
from collections.abc import Callable

from p2ptrain.core.errors import ConnectionLost, P2PTrainError, ProtocolError, Refused, UserError
from p2ptrain.core.world import Clock
from roles.seed.authority import FIRST_TICKET_S, LONGEST_TICKET_S, MAX_USES, ROLES, Authority, TicketRecord
from roles.seed.operator_api import Params, Result
from roles.seed.peers import send_if_open
from wire.address import NONCE_BYTES, Ticket, format_address, parse_address, to_dial, verify_proof
from wire.connection import Connection, last_word
from wire.handshake import HANDSHAKE_TIMEOUT_S
from wire.messages import EnrolGranted, EnrolOffer, EnrolRequest, Hello, RefusalCode, Refuse

MAX_HOST_CHARS = 255
SHORTEST_TICKET_S = 1.0


class EnrolmentPolicy:
    """Decides which peers get a certificate, and which certificates are honoured.

    Args:
        authority: None on a plain seed.
        host: address of this machine that others reach, for tickets. ``opened`` sets the port.
        note: adds (level, kind, text) to the event log. It never gets a secret.
    """

    def __init__(
        self, authority: Authority | None, clock: Clock, host: str, note: Callable[[str, str, str], None]
    ) -> None:
        self._authority, self._clock, self._note = authority, clock, note
        self.host, self._local_host, self._port = host, host, 0

    @property
    def encrypted(self) -> bool:
        return self._authority is not None

    async def opened(self, address: tuple[str, int]) -> Ticket | None:
        """Write the local tickets, now that the seed listens on ``address``. Raises ``StorageError``.

        Returns the ticket to show; None on a plain seed.
        """
        if self._authority is None:
            return None
        self._local_host, self._port = to_dial(address[0]), address[1]
        record = await self._tickets_of_the_start(self._authority)
        return self._authority.ticket(record, self._port)

    async def _tickets_of_the_start(self, authority: Authority) -> TicketRecord:
        now = self._clock.wall()
        await authority.write_local_tickets(host=self._local_host, port=self._port, now=now)
        return await authority.first_ticket(host=self.host, now=now)

    def judge(self, connection: Connection) -> None:
        """Raise ``Refused`` if a connection's certificate is no longer honoured."""
        if self._authority is not None and connection.ends.identity is not None:
            self._authority.judge(connection.ends.identity)

    def knows(self, peer_id: str) -> bool:
        return self._authority is not None and peer_id in self._authority.records.members

    async def evict(self, peer_id: str, name: str) -> None:
        """Refuse that peer's certificates from now on. Raises ``Refused``, ``StorageError``."""
        await self._of_the_run("evicting a peer").evict(peer_id, name)
        self._note("warning", "evicted", f"an operator evicted {name} ({peer_id})")

    # -------------------------------------------------------------------------------------------------------- enrolment

    async def enrol(self, connection: Connection, hello: Hello) -> None:
        """Enrol a peer within ``HANDSHAKE_TIMEOUT_S``. Refusals are sent to it, and raised as ``P2PTrainError``."""
        authority = self._of_the_run("enrolment")
        nonce = secrets.token_bytes(NONCE_BYTES)
        connection.send(EnrolOffer(authority.ca_der, nonce))
        try:
            message = (await connection.receive(timeout_s=HANDSHAKE_TIMEOUT_S)).message
        except ConnectionLost:
            return  # the peer only fetched the CA
        try:
            match message:
                case EnrolRequest():
                    await self._enrol(authority, connection, hello, message, nonce)
                case Refuse():
                    raise Refused(message.code, message.message, remedy=message.remedy)
                case _:
                    raise ProtocolError(f"unexpected message {type(message).__name__} during enrolment")
        except P2PTrainError as problem:
            send_if_open(
                connection, last_word(problem.code if isinstance(problem, Refused) else RefusalCode.PROTOCOL, problem)
            )
            raise

    async def _enrol(
        self, authority: Authority, connection: Connection, hello: Hello, request: EnrolRequest, nonce: bytes
    ) -> None:
        ticket = authority.records.ticket(request.ticket_id)
        if not verify_proof(request.mac, secret=ticket.secret, nonce=nonce, csr_der=request.csr_der):
            text = f"the proof for ticket {ticket.id} is wrong: the secret does not match"
            raise Refused(RefusalCode.BAD_PROOF, text, remedy="copy the whole ticket again, or ask for a new one")
        now = self._clock.wall()
        certificate_der = await authority.enrol(ticket.id, hello.peer_id, request.csr_der, now)
        self._note("info", "enrolled", f"{hello.peer_id} enrolled as {ticket.role} with ticket {ticket.id}")
        connection.send(EnrolGranted(certificate_der))

    async def renew(self, params: Params, connection: Connection) -> Result:
        """Renew the certificate that opened this connection. Raises ``Refused``, ``ProtocolError``."""
        authority, identity = self._of_the_run("renewing a certificate"), connection.ends.identity
        if identity is None:
            raise Refused("no-certificate", "this connection has no certificate that could be renewed")
        try:
            csr_der = base64.b64decode(str(params.get("csr")), validate=True)
        except (ValueError, binascii.Error):
            raise ProtocolError("the certificate request is not valid base64") from None
        certificate_der = await authority.renew(identity, csr_der, self._clock.wall())
        return {"certificate": base64.b64encode(certificate_der).decode()}

    # ---------------------------------------------------------------------------------------- what operators may ask

    async def tickets_new(self, params: Params, connection: Connection) -> Result:
        authority = self._of_the_run("a ticket")
        role = next((known for known in ROLES if known == params.get("role", ROLES[0])), None)
        if role is None:
            raise Refused("bad-parameter", f"role must be one of {', '.join(ROLES)}")
        expires_s = params.get("expires_s", FIRST_TICKET_S)
        if type(expires_s) not in (int, float) or not SHORTEST_TICKET_S <= expires_s <= LONGEST_TICKET_S:
            text = f"a ticket expires after {SHORTEST_TICKET_S:g} to {LONGEST_TICKET_S:g} seconds"
            raise Refused("bad-parameter", text, remedy="choose another --expires")
        uses = params.get("uses")
        if uses is not None and (type(uses) is not int or not 1 <= uses <= MAX_USES):
            raise Refused("bad-parameter", f"a ticket is for 1 to {MAX_USES} uses", remedy="choose another --uses")
        host, now = _checked_host(params.get("host") or self.host), self._clock.wall()
        record = await authority.new_ticket(role, host=host, now=now, expires_s=float(expires_s), uses=uses)
        self._note("info", "ticket", f"an operator made ticket {record.id}, role {role}")
        return self._shown(authority, record)

    async def tickets_list(self, params: Params, connection: Connection) -> Result:
        now = self._clock.wall()
        records = self._of_the_run("a ticket").records.pruned(now)
        return {"tickets": [record.to_map(now) for record in records.tickets.values()]}

    async def tickets_revoke(self, params: Params, connection: Connection) -> Result:
        authority, begun = self._of_the_run("a ticket"), params.get("id")
        found = [known for known in authority.records.tickets if isinstance(begun, str) and known.startswith(begun)]
        if not begun or len(found) != 1:
            text = f"{len(found) or 'no'} tickets begin with {str(begun)[:40]!r}"
            raise Refused("unknown-ticket", text, remedy="see p2ptrain ticket list")
        await authority.revoke(found[0], self._clock.wall())
        self._note("warning", "ticket", f"an operator revoked ticket {found[0]} and its certificates")
        record = authority.records.ticket(found[0])
        if record.kind == "local":  # programs of this machine need a new one
            await self._tickets_of_the_start(authority)
        return {"ticket": record.to_map(self._clock.wall())}

    async def tickets_rotate(self, params: Params, connection: Connection) -> Result:
        """Close all open tickets and make new ones to show and for this machine. Members stay."""
        authority = self._of_the_run("a ticket")
        await authority.rotate(self._clock.wall())
        self._note("warning", "ticket", "an operator replaced all tickets; members stay")
        return self._shown(authority, await self._tickets_of_the_start(authority))

    def _shown(self, authority: Authority, record: TicketRecord) -> Result:
        """The answer to the operator who requested a ticket. Only here a secret leaves the seed over the network."""
        return {"ticket": record.to_map(self._clock.wall()), "text": str(authority.ticket(record, self._port))}

    def _of_the_run(self, what: str) -> Authority:
        if self._authority is None:
            text = f"{what} requires an encrypted cluster; this seed uses plain TCP on the loopback"
            raise Refused(RefusalCode.NOT_ENCRYPTED, text, remedy="start the seed with --tls, or with --host")
        return self._authority


def _checked_host(host: object) -> str:
    try:
        if isinstance(host, str) and len(host) <= MAX_HOST_CHARS:
            return parse_address(format_address(host, 1))[0]
    except UserError as error:
        raise Refused("bad-parameter", error.message, remedy="choose another --host") from error
    raise Refused("bad-parameter", "host is not a valid address", remedy="choose another --host")
