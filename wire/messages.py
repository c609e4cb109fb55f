"""The base of the protocol's messages, and those of the handshake, of peers and their seed, and of enrolment.

Messages are frozen dataclasses. ``PROTOCOL_VERSION`` is the version of all of them. ``A → B`` means that A sends to B::

    anyone → anyone    Hello → Welcome | Refuse                       (handshake; 4 KiB, 5 s)
    peer   → seed      Heartbeat → HeartbeatAck (also between ring neighbours); EventNotice, Leave
    operator ↔ seed    Request ↔ Response; after ``subscribe``: seed → operator Update
    seed   → peer      Request → Response                             (verify or delete a checkpoint, measure links)
    peer   ↔ peer      KeepAlive on long-lived connections that are idle
    newcomer ↔ seed    EnrolOffer, EnrolRequest, EnrolGranted; CodeShare, CodeProof   (see ``wire.enrol``)
    seed   → peer      CircuitOffer, CircuitOrder                     (see ``wire.circuits``)
    end of a circuit → meeting point    JoinCircuit → CircuitJoined | Refuse

Other conversations have modules of their own: ``wire.job_messages`` (the seed and the workers of a job),
``wire.chain_messages`` (split models), ``wire.text_messages`` (text and speculation), ``wire.http_messages`` (requests
of HTTP clients).

A message is encoded as a msgpack map of its fields; the frame's ``kind`` names the class. Decoding checks every type
and bound (``wire.codec``). An unknown, missing or ill-typed field is a ``ProtocolError``.
"""

from __future__ import annotations

from dataclasses import field
from enum import StrEnum
from typing import Annotated, Any, ClassVar

from wire.schema import Bound, Count, Declared, Host, Id, Port, Record

PROTOCOL_VERSION = 25
MAX_TERM = 1 << 13
"""Limit of a seed's terms: a generation of term t is above t << 40, and every number must be below 2**53."""

LONGEST_SILENCE_S = 600.0
Silence = Annotated[float, Bound(0.1, LONGEST_SILENCE_S)]
"""The silence on which the two sides of a connection may agree."""

Scalar = str | int | float | bool | None
"""Allowed values of a free-form map."""


class Message(Declared):
    """Base of all messages. ``KIND`` is the frame kind, unique per class; 1 to 15 belong to the handshake.

    If ``LONG`` is true, the body may be compressed (``wire.codec``).
    """

    KIND: ClassVar[int]
    LONG: ClassVar[bool] = False

    def __init_subclass__(cls, *, kind: int = 0, long: bool = False) -> None:
        super().__init_subclass__()
        if kind:  # else it is that of the base
            cls.KIND, cls.LONG = kind, long


# ---------------------------------------------------------------------------------------------------------- handshake


class Hello(Message, kind=1):
    """First frame of the peer that dials.

    Attributes:
        purpose: what the connection is for. ``peer``: a worker, verifier or drafter to its seed. ``operator``: a
            command line or TUI to a seed. ``ring``: a member to its right neighbour. ``heal``: a member to a source of
            the state. ``files``: to a worker that has a stage's checkpoint. ``input``: to a worker of the same job, for
            what the setting in its capability ``input`` names. ``probe``: tests whether a peer answers.
            ``enrol``: a newcomer to a seed, for a certificate. ``chain``: a client to a worker of a split model.
            ``stage``: a stage to the next one. ``model``, ``give``: to fetch and to send tensors
            (``roles.worker.stages``). ``generate``: a client to a verifier, with one question. ``draft``: a verifier to
            a drafter. ``http``: a seed to a verifier, with one request of an HTTP client.
        job, generation: the view that the caller believes in; empty and 0 without one. For ``stage``: the session, and
            the index of the stage that is called. For ``model`` and ``give``: the model, and 0.
        port: where this peer listens for other peers; 0 if it does not.
        host: the address under which others reach this peer; empty: the address that the other side sees.
        cluster, term: the highest seed term that the caller has seen, and the cluster of that seed.
        padding: makes the frame longer than a packet, so that a network that loses large ones fails here.
    """

    version: int
    software: str
    peer_id: str
    name: str
    roles: list[str]
    purpose: str
    capabilities: dict[str, Scalar] = field(default_factory=dict)
    job: str = ""
    generation: Count = 0
    host: str = ""
    port: Annotated[int, Bound(0, 65535)] = 0
    cluster: str = ""
    term: Count = 0
    padding: str = ""


class Welcome(Message, kind=2):
    """The answer that accepts the caller.

    Attributes:
        heartbeat_s, death_s: heartbeat interval, and silence after which the caller is dead; 0 for no heartbeats.
        wall: the answerer's wall clock in Unix seconds, to detect clock skew.
        term: of a seed: grows when it is restored from a backup.
        unreached: of a seed: why it cannot dial the caller, which others reach over circuits; empty: it can.
    """

    version: int
    software: str
    peer_id: str
    name: str
    wall: float
    cluster_id: str = ""
    heartbeat_s: float = 0.0
    death_s: float = 0.0
    term: int = 0
    unreached: str = ""


class RefusalCode(StrEnum):
    """Why a peer refuses: stable words for programs, the ``code`` of ``Refuse`` and ``Refused``. Answers to requests
    have further codes."""

    VERSION = "version-mismatch"
    PROTOCOL = "protocol-error"
    TOO_SLOW = "too-slow"
    STALE_GENERATION = "stale-generation"
    NOT_A_NEIGHBOUR = "not-a-neighbour"
    NOT_A_MEMBER = "not-a-member"
    UNREACHABLE = "unreachable"
    LOOPBACK_ONLY = "loopback-only"
    DUPLICATE_PEER = "duplicate-peer"
    ROLE = "role"
    FULL = "full"
    BUSY = "busy"
    SHUTTING_DOWN = "shutting-down"
    TLS_REQUIRED = "tls-required"
    NOT_ENCRYPTED = "not-encrypted"
    IDENTITY = "wrong-identity"
    NOT_PERMITTED = "not-permitted"
    WRONG_PIN = "wrong-pin"
    TICKET_UNKNOWN = "ticket-unknown"
    TICKET_REVOKED = "ticket-revoked"
    TICKET_EXPIRED = "ticket-expired"
    TICKET_USED = "ticket-used"
    BAD_PROOF = "bad-proof"
    CODE_UNKNOWN = "code-unknown"
    CODE_WRONG = "code-wrong"
    EVICTED = "evicted"
    CERTIFICATE_NOT_YET_VALID = "certificate-not-yet-valid"
    CERTIFICATE_EXPIRED = "certificate-expired"
    CERTIFICATE_UNTRUSTED = "certificate-untrusted"
    STALE_TERM = "stale-term"
    UNKNOWN_JOB = "unknown-job"
    UNKNOWN_CIRCUIT = "unknown-circuit"


class Refuse(Message, kind=3):
    """The answer that rejects the caller, or the last message before a connection is closed because of an error."""

    code: str
    message: str
    remedy: str = ""


# --------------------------------------------------------------------------------------------------- peer and its seed


MAX_GPUS, MOST_WAYS = 16, 64


class GpuInfo(Record):
    """One GPU of a peer's machine. None and 0: unknown.

    Attributes:
        load: share of the last second in which it computed.
        memory_bytes: in use, by all programs.
    """

    index: Annotated[int, Bound(0, 1023)]
    name: Annotated[str, Bound(0, 64)] = ""
    load: Annotated[float | None, Bound(0, 1)] = None
    memory_bytes: Count = 0
    memory_total_bytes: Count = 0
    temperature_c: Annotated[float | None, Bound(-300, 1000)] = None
    power_w: Annotated[float | None, Bound(0, 1e5)] = None


class Heartbeat(Message, kind=16):
    """Peer to seed, and between ring neighbours: it is alive, and how far it is.

    Attributes:
        progress: to the seed: grows with every micro-batch handled. To a neighbour: how far it is in the ring's or the
            chain's operations.
        stats: figures for display: ``rtt_ms``, ``in_bps``, ``out_bps``, ``sent_bytes`` (see ``PeerInfo``),
            ``tokens_per_s``, ``memory_bytes``, ``memory_total_bytes``,
            ``compute_ms``, ``communicate_ms``, ``wait_ms``, ``compute_flops`` (absent until measured; 0 if it cannot be
            measured).
        ways: to the seed: peers that the sender has dialled by circuits that are open, and the way of the newest one to
            each: ``direct``, ``punched``, ``reversed``, or ``relayed by`` and a name.
    """

    seq: Count
    progress: Count
    step: Count
    state: str
    stats: dict[str, float] = field(default_factory=dict)
    gpus: Annotated[list[GpuInfo], Bound(0, MAX_GPUS)] = field(default_factory=list)
    ways: Annotated[dict[Id, Annotated[str, Bound(1, 80)]], Bound(0, MOST_WAYS)] = field(default_factory=dict)


class HeartbeatAck(Message, kind=17):
    """The answer to heartbeat ``seq``, from the seed or from a ring neighbour."""

    seq: int


class EventNotice(Message, kind=25):
    """Peer to seed: an entry for the event log. ``level`` is ``info``, ``warning`` or ``error``.

    ``age_s``: how long ago it was, if it had to wait for a connection.
    """

    level: str
    kind: str
    text: str
    job: str = ""
    age_s: Annotated[float, Bound(0, 1e9)] = 0.0


class Leave(Message, kind=27):
    """Peer to seed: it leaves on purpose and closes the connection."""

    reason: str


# ------------------------------------------------------------------------------------------------- requests, updates


class Request(Message, kind=32):
    """A method call. ``params`` and results hold maps with string keys, lists and scalars, at most 8 levels deep."""

    id: Count
    method: str
    params: dict[str, Any] = field(default_factory=dict)


class Response(Message, kind=33):
    """The answer to the ``Request`` with this ``id``. ``error_code`` is empty on success."""

    id: Count
    result: dict[str, Any] = field(default_factory=dict)
    error_code: str = ""
    error_message: str = ""
    error_remedy: str = ""


class Update(Message, kind=34):
    """Seed to subscriber: what changed since the last update, coalesced, at most ten per second.

    Attributes:
        topic: ``cluster``, ``peers``, ``jobs``, ``metrics``, ``events``, ``checkpoints``, ``recoveries``, ``parts``;
            ``peers-gone``, ``jobs-gone``, ``checkpoints-gone`` and ``parts-gone``, whose items hold ``id`` only.
        items: maps made by ``to_map`` of the topic's record in ``wire.records``; metrics also have ``job``.
    """

    topic: str
    items: list[dict[str, Any]]


# ------------------------------------------------------------------------------------------------------- between peers


class KeepAlive(Message, kind=55):
    """Sent by both sides of an idle connection, so that silence means that the peer is dead."""


BULK_KIND = 64
"""Frame kind of a raw payload: empty header, with the stream and the exact length that the receiver planned."""


# ------------------------------------------------------------------------------------------------------------ enrolment


class EnrolOffer(Message, kind=4):
    """Seed to newcomer, at once: the run's CA, whose hash is in the newcomer's ticket, and a nonce.

    Attributes:
        ca_der: the CA's certificate.
        nonce: random, for this connection only.
    """

    ca_der: bytes
    nonce: Annotated[bytes, Bound(32, 32)]


class EnrolRequest(Message, kind=5):
    """Newcomer to seed, over TLS under the run's CA: sign this certificate request; the ticket entitles to it.

    Attributes:
        ticket_id: the ticket's id; its secret is never sent.
        csr_der: the certificate request (PKCS #10), which names the peer id.
        mac: ``wire.address.proof`` of the ticket's secret, the nonce and the request.
    """

    ticket_id: str
    csr_der: bytes
    mac: Annotated[bytes, Bound(32, 32)]


class EnrolGranted(Message, kind=6):
    """Seed to newcomer: the certificate in DER. The connection ends; the newcomer connects again with it."""

    certificate_der: bytes


class CodeShare(Message, kind=10):
    """Newcomer to seed, in place of an ``EnrolRequest``, and back: a share of SPAKE2 (``wire.join_code``)."""

    share: Annotated[bytes, Bound(33, 33)]


class CodeProof(Message, kind=11):
    """Newcomer to seed, and back: it has made the same key. The connection ends; the newcomer enrols with the ticket
    that both know now. The seed takes one proof for each code."""

    proof: Annotated[bytes, Bound(32, 32)]


# ------------------------------------------------------------------------------------------------------------- circuits


CALLER, ANSWERER = "caller", "answerer"
WAYS = DIRECT, PUNCHED, REVERSED, RELAYED = "direct", "punched", "reversed", "relayed"
"""How an end reached the other one: it dialled it; both dialled at once, and a router maps the other; the other
dialled it; a third passes the bytes on."""
MAX_END_ADDRESSES = 5
CircuitId = Annotated[str, Bound(pattern="[0-9a-f]{64}")]
Side = Annotated[str, Bound(pattern=f"{CALLER}|{ANSWERER}")]


class SocketAddress(Record):
    host: Host
    port: Port


EndAddresses = Annotated[list[SocketAddress], Bound(0, MAX_END_ADDRESSES)]


class Circuit(Record):
    """One connection between two peers through a meeting point, as one of its ends gets it from the seed.

    Attributes:
        id: secret, random, valid for one use.
        caller, answerer: ids of the two ends. The caller asked for the circuit, and speaks first.
        side: which of them gets this record.
        host, port: of the meeting point, which this end dials. Empty and 0: this end is the meeting point itself.
        relay: name of the third that is the meeting point; empty if the caller is.
        tries_direct: both ends also try to connect without the relay, and use it if they fail.
    """

    id: CircuitId
    caller: Id
    answerer: Id
    side: Side
    host: Host = ""
    port: Annotated[int, Bound(0, 65535)] = 0
    relay: Annotated[str, Bound(0, 64)] = ""
    tries_direct: bool = False


class CircuitOffer(Message, kind=30):
    """Seed to peer: join this circuit. ``trial``: only to find its way, then close it."""

    circuit: Circuit
    trial: bool = False


class CircuitOrder(Message, kind=31):
    """Seed to relay: connect the two ends, of these ``peers``, that name this circuit within ``lives_s``."""

    id: CircuitId
    lives_s: Annotated[float, Bound(0, 600)]
    peers: Annotated[list[Id], Bound(0, 2)]


class JoinCircuit(Message, kind=7):
    """End of a circuit to the meeting point: the first frame of its connection, never inside TLS.

    Ends that try to connect directly also send it to each other: the answerer on each path that opens, the caller then
    on the one that it chose, which may be the relay's.

    ``addresses``: where else the other end may reach this end; empty if it does not try.
    """

    id: CircuitId
    side: Side
    addresses: EndAddresses = field(default_factory=list)


class CircuitJoined(Message, kind=8):
    """Meeting point to both ends: both are there. What follows comes from the other end.

    ``addresses``: of the other end; first that which the meeting point sees, then its own.
    """

    addresses: Annotated[list[SocketAddress], Bound(1, MAX_END_ADDRESSES + 1)]
