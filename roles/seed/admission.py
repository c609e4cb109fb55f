"""Who is let in: which peers and operators the seed admits, and which get a certificate (``wire.enrol``: the protocol).

The seed dials a peer back before it admits it. If it cannot reach the peer, others hardly can: the peer is *behind a
router*, and others reach it over circuits (``roles.seed.circuits``). The certificates still tell who is at the ends.

A seed without an authority uses plain TCP on the loopback: it admits all peers, and cannot verify who they are.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from p2ptrain.core.errors import ConnectionLost, DeadlineExceeded, P2PTrainError, ProtocolError, Refused, UserError
from p2ptrain.core.world import World
from roles.seed.authority import FIRST_TICKET_S, LONGEST_TICKET_S, MAX_USES, ROLES, Authority, TicketRecord
from roles.seed.join_codes import CODE_LIFETIME_S, JoinCodes
from roles.seed.overview import SeedIdentity
from roles.seed.peers import NAME_CHARS, ConnectedPeer, PeerTable, Reach, check_hello, seed_beats, send_if_open
from wire.address import (
    NONCE_BYTES,
    Ticket,
    dialable_host,
    format_address,
    is_loopback,
    parse_address,
    verify_proof,
)
from wire.circuits import peer_host
from wire.connection import Connection, last_word
from wire.handshake import HANDSHAKE_TIMEOUT_S, PERMITTED, dial, local_hello, local_welcome
from wire.messages import CodeShare, EnrolGranted, EnrolOffer, EnrolRequest, Hello, RefusalCode, Refuse, Welcome
from wire.transport import is_out_of_files

MAX_PEERS = 1024
DIAL_BACK_S = 10.0
"""For a peer that the seed dials back. It may be loading torch on a slow machine."""
FAR_MS = 50.0
"""Round trip that is assumed of a peer behind a router where the kernel does not tell it: beats for far peers."""
MAX_OPERATORS = 64
SHORTEST_TICKET_S = 1.0


class EnrolmentPolicy:
    """Decides which peers get a certificate, and which certificates are honoured.

    Args:
        authority: None on a plain seed.
        host: address of this machine that others reach, for tickets. ``open_at`` sets the port.
        note: adds (level, kind, text) to the event log. It never gets a secret.
    """

    def __init__(
        self, authority: Authority | None, world: World, host: str, note: Callable[[str, str, str], None]
    ) -> None:
        self._authority, self._world, self._note = authority, world, note
        self.host, self._local_host, self._port = host, host, 0
        self._codes = JoinCodes(world, note)

    @property
    def encrypted(self) -> bool:
        return self._authority is not None

    async def open_at(self, address: tuple[str, int]) -> Ticket | None:
        """Write the local tickets, now that the seed listens on ``address``. Returns the ticket to show; None on a
        plain seed. Raises ``StorageError``."""
        if self._authority is None:
            return None
        self._local_host, self._port = dialable_host(address[0]), address[1]
        return self._authority.ticket(await self._make_start_tickets(self._authority), self._port)

    async def _make_start_tickets(self, authority: Authority) -> TicketRecord:
        """Write the local tickets, and return the one to show."""
        now = self._world.clock.wall()
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
        await self._authority_for("evicting a peer").change(lambda records: records.evict(peer_id, name))
        self._note("warning", "evicted", f"an operator evicted {name} ({peer_id})")

    async def enrol(self, connection: Connection, hello: Hello) -> None:
        """Enrol a peer within ``HANDSHAKE_TIMEOUT_S``. Refusals are sent to it, and raised as ``P2PTrainError``."""
        authority = self._authority_for("enrolment")
        nonce = self._world.entropy(NONCE_BYTES)
        connection.send(EnrolOffer(authority.ca_der, nonce))
        try:
            message = (await connection.receive(timeout_s=HANDSHAKE_TIMEOUT_S)).message
        except ConnectionLost:
            return  # the peer only fetched the CA
        try:
            match message:
                case EnrolRequest():
                    await self._enrol(authority, connection, hello, message, nonce)
                case CodeShare():
                    await self._codes.exchange(authority, self.host, connection, hello, message)
                case Refuse():
                    raise Refused(message.code, message.message, remedy=message.remedy)
                case _:
                    raise ProtocolError(f"unexpected message {type(message).__name__} during enrolment")
        except P2PTrainError as problem:
            send_if_open(connection, last_word(problem))
            raise

    async def _enrol(
        self, authority: Authority, connection: Connection, hello: Hello, request: EnrolRequest, nonce: bytes
    ) -> None:
        ticket = authority.records.ticket(request.ticket_id)
        if not verify_proof(request.mac, secret=ticket.secret, nonce=nonce, csr_der=request.csr_der):
            text = f"the proof for ticket {ticket.id} is wrong: the secret does not match"
            raise Refused(RefusalCode.BAD_PROOF, text, remedy="copy the whole ticket again, or ask for a new one")
        now = self._world.clock.wall()
        certificate_der = await authority.enrol(ticket.id, hello.peer_id, request.csr_der, now)
        self._note("info", "enrolled", f"{hello.peer_id} enrolled as {ticket.role} with ticket {ticket.id}")
        connection.send(EnrolGranted(certificate_der))

    async def renew(self, params: dict[str, Any], connection: Connection) -> dict[str, Any]:
        """Renew the certificate with which this connection was opened. Raises ``Refused``, ``ProtocolError``."""
        authority, identity = self._authority_for("renewing a certificate"), connection.ends.identity
        if identity is None:
            raise Refused("no-certificate", "this connection has no certificate that could be renewed")
        try:
            csr_der = base64.b64decode(str(params.get("csr")), validate=True)
        except (ValueError, binascii.Error):
            raise ProtocolError("the certificate request is not valid base64") from None
        certificate_der = await authority.renew(identity, csr_der, self._world.clock.wall())
        return {"certificate": base64.b64encode(certificate_der).decode()}

    async def tickets_new(self, params: dict[str, Any], connection: Connection) -> dict[str, Any]:
        authority = self._authority_for("a ticket")
        role = params.get("role", ROLES[0])
        if role not in ROLES:
            raise Refused("bad-parameter", f"role must be one of {', '.join(ROLES)}")
        expires_s = params.get("expires_s", FIRST_TICKET_S)
        if type(expires_s) not in (int, float) or not SHORTEST_TICKET_S <= expires_s <= LONGEST_TICKET_S:
            text = f"a ticket expires after {SHORTEST_TICKET_S:g} to {LONGEST_TICKET_S:g} seconds"
            raise Refused("bad-parameter", text, remedy="choose another --expires")
        uses = params.get("uses")
        if uses is not None and (type(uses) is not int or not 1 <= uses <= MAX_USES):
            raise Refused("bad-parameter", f"a ticket is for 1 to {MAX_USES} uses", remedy="choose another --uses")
        host, now = _check_host(params.get("host") or self.host), self._world.clock.wall()
        record = await authority.new_ticket(role, host=host, now=now, expires_s=float(expires_s), uses=uses)
        self._note("info", "ticket", f"an operator made ticket {record.id}, role {role}")
        return self._ticket_answer(authority, record)

    async def tickets_code(self, params: dict[str, Any], connection: Connection) -> dict[str, Any]:
        """Open a code, with which one peer can join; an operator needs a ticket."""
        self._authority_for("a code")
        role = params.get("role", ROLES[0])
        if role not in PERMITTED["peer"]:
            raise Refused("bad-parameter", "role must be worker, verifier or drafter", remedy="choose another --role")
        return {"code": self._codes.new(role), "expires_at": self._world.clock.wall() + CODE_LIFETIME_S}

    async def tickets_list(self, params: dict[str, Any], connection: Connection) -> dict[str, Any]:
        now = self._world.clock.wall()
        records = self._authority_for("a ticket").records.prune(now)
        return {"tickets": [record.to_map(now) for record in records.tickets.values()]}

    async def tickets_revoke(self, params: dict[str, Any], connection: Connection) -> dict[str, Any]:
        authority, begun = self._authority_for("a ticket"), params.get("id")
        found = [known for known in authority.records.tickets if isinstance(begun, str) and known.startswith(begun)]
        if not begun or len(found) != 1:
            text = f"{len(found) or 'no'} tickets begin with {str(begun)[:40]!r}"
            raise Refused("unknown-ticket", text, remedy="see p2ptrain ticket list")
        await authority.change(lambda records: records.revoke(found[0], self._world.clock.wall()))
        self._note("warning", "ticket", f"an operator revoked ticket {found[0]} and its certificates")
        record = authority.records.ticket(found[0])
        if record.kind == "local":  # programs of this machine need a new one
            await self._make_start_tickets(authority)
        return {"ticket": record.to_map(self._world.clock.wall())}

    async def tickets_rotate(self, params: dict[str, Any], connection: Connection) -> dict[str, Any]:
        """Close all open tickets and the code, and make new ones to show and for this machine. Members stay."""
        authority = self._authority_for("a ticket")
        await authority.change(lambda records: records.rotate(self._world.clock.wall()))
        self._codes.open = None
        self._note("warning", "ticket", "an operator replaced all tickets; members stay")
        return self._ticket_answer(authority, await self._make_start_tickets(authority))

    def _ticket_answer(self, authority: Authority, record: TicketRecord) -> dict[str, Any]:
        """The answer to the operator who requested a ticket. Only here a secret leaves the seed over the network."""
        return {"ticket": record.to_map(self._world.clock.wall()), "text": str(authority.ticket(record, self._port))}

    def _authority_for(self, what: str) -> Authority:
        if self._authority is None:
            text = f"{what} requires an encrypted cluster; this seed uses plain TCP on the loopback"
            raise Refused(RefusalCode.NOT_ENCRYPTED, text, remedy="start the seed with --tls, or with --host")
        return self._authority


def _check_host(host: object) -> str:
    try:
        return parse_address(format_address(str(host), 1))[0]
    except UserError as error:
        raise Refused("bad-parameter", error.message, remedy="choose another --host") from error


class Acceptor:
    """Answers every ``Hello`` with a welcome or a refusal. ``Seed`` serves the admitted peers.

    Attributes:
        host: the address on which the seed listens.
        reached: how each admitted peer is reached, until ``Seed`` serves it.
        operators: the connection of each operator → its software.
    """

    def __init__(self, identity: SeedIdentity, world: World, enrolment: EnrolmentPolicy, peers: PeerTable) -> None:
        self.closed = False
        self.host = "127.0.0.1"
        self.reached: WeakKeyDictionary[Connection, Reach] = WeakKeyDictionary()
        self.operators: dict[Connection, str] = {}
        self._identity, self._world, self._enrolment, self._peers = identity, world, enrolment, peers

    async def decide(self, hello: Hello, connection: Connection) -> Welcome | Refuse:
        if self.closed:
            return Refuse(RefusalCode.SHUTTING_DOWN, "the seed is stopping", "try again when it is back")
        self._enrolment.judge(connection)
        if hello.cluster == self._identity.cluster_id and hello.term > self._identity.term:
            text = "a seed that was restored from a backup has replaced this one"
            return Refuse(RefusalCode.STALE_TERM, text, "stop this seed, and use the restored one")
        match hello.purpose:
            case "peer":
                return await self._decide_peer(hello, connection)
            case "probe" if hello.port:  # `check` asks whether this seed can reach it
                return await self._decide_peer(hello, connection)
            case "operator" if len(self.operators) >= MAX_OPERATORS:
                return Refuse(RefusalCode.FULL, f"{MAX_OPERATORS} operators are connected", "close one of them")
            case "operator" | "probe":
                return self._welcome(0.0, 0.0)
            case "enrol" if self._enrolment.encrypted:
                return self._welcome(0.0, 0.0)
        text = f"this is a seed: it accepts no connection for {hello.purpose[:40]!r}"
        return Refuse(RefusalCode.ROLE, text, "dial the member itself")

    async def _decide_peer(self, hello: Hello, connection: Connection) -> Welcome | Refuse:
        check_hello(hello)
        if hello.purpose == "peer" and (len(hello.roles) != 1 or hello.roles[0] not in PERMITTED["peer"]):
            text = "a peer must have one role: worker, verifier or drafter"
            return Refuse(RefusalCode.ROLE, text, "set the role with p2ptrain join --role")
        if hello.job and hello.cluster not in ("", self._identity.cluster_id):  # here its job would be over
            name, job, cluster = hello.name[:NAME_CHARS], hello.job[:64], hello.cluster[:64]
            text = f"{name} works on job {job} of cluster {cluster}, whose records are not here"
            remedy = "restore them (p2ptrain seed --restore DIR), or stop the worker and join again to give the job up"
            return Refuse(RefusalCode.UNKNOWN_JOB, text, remedy)
        host = hello.host or connection.ends.remote[0]
        old = self._peers.connected.get(hello.peer_id)
        if old is not None and not self._is_replaced(old, host, hello.port):
            text = f"a {old.role} with this id ({hello.peer_id}) is already here, as {old.name} at {old.origin}"
            return Refuse(RefusalCode.DUPLICATE_PEER, text, "stop the other one, or give this one its own --state")
        listens = hello.capabilities.get("listens")
        is_here = is_loopback(connection.ends.remote[0]) and not is_loopback(self.host)
        if is_here and isinstance(listens, str) and is_loopback(listens):
            text = "this peer listens on the loopback only, so members on other machines cannot reach it"
            return Refuse(RefusalCode.LOOPBACK_ONLY, text, "join with --host 0.0.0.0")
        if len(self._peers.connected) >= MAX_PEERS:
            return Refuse(RefusalCode.FULL, f"{MAX_PEERS} peers are connected, the limit", "start another seed")
        began, problem = self._world.clock.now(), ""
        try:
            await (await self.dial(host, hello.port, hello.peer_id, "probe")).close()
        except P2PTrainError as error:
            if is_passing(error):
                text = f"the seed dialled this machine back: {error.message}"
                return Refuse(RefusalCode.TOO_SLOW, text, error.remedy)
            problem = error.message
        # TCP's handshake is one round trip, ours another. The time of a failure tells nothing: then it may be far.
        rtt_ms = FAR_MS if problem else (self._world.clock.now() - began) / 2 * 1e3
        if (least_s := connection.least_rtt_s) is not None:
            rtt_ms = min(rtt_ms, least_s * 1e3)  # the kernel answers in time, even while the worker loads libraries
        self.reached[connection] = Reach(peer_host(hello.peer_id) if problem else host, rtt_ms, problem)
        return self._welcome(*seed_beats(rtt_ms, len(self._peers.connected)), unreached=problem)

    def _is_replaced(self, old: ConnectedPeer, host: str, port: int) -> bool:
        silent_s = self._world.clock.now() - old.connection.last_heard
        closed = old.connection.closed.is_set() or old.connection.close_cause is not None
        return closed or silent_s > 2 * old.detector.heartbeat_s or (old.origin, old.port) == (host, port)

    async def dial(self, host: str, port: int, peer_id: str, purpose: str) -> Connection:
        """Connect to a peer. Raises ``P2PTrainError`` if it cannot be reached, or refuses."""
        identity = self._identity
        hello = local_hello(
            peer_id=identity.cluster_id,
            name=identity.name,
            roles=["seed"],
            purpose=purpose,
            cluster=identity.cluster_id,
            term=identity.term,
        )
        # Only a peer that answers at its own address is one that others dial.
        probes = purpose == "probe"
        connection, _ = await dial(
            self._world.network, host, port, hello, timeout_s=DIAL_BACK_S, expect_peer=peer_id, direct_only=probes
        )
        return connection

    def _welcome(self, heartbeat_s: float, death_s: float, **more: str) -> Welcome:
        return local_welcome(
            peer_id=self._identity.cluster_id,
            name=self._identity.name,
            wall=self._world.clock.wall(),
            cluster_id=self._identity.cluster_id,
            heartbeat_s=heartbeat_s,
            death_s=death_s,
            term=self._identity.term,
            **more,
        )


def is_passing(problem: P2PTrainError) -> bool:
    """Whether a peer that was not reached may soon be: it, or this seed, is only busy."""
    slow = problem.code in (RefusalCode.BUSY, RefusalCode.TOO_SLOW)
    return slow or isinstance(problem, DeadlineExceeded) or is_out_of_files(problem.__cause__)
