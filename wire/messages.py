"""The messages of the protocol, as frozen dataclasses. With the files named below this *is* the protocol,
``PROTOCOL_VERSION`` its version.

Who says what to whom::

    anyone → anyone    Hello → Welcome | Refuse                       (handshake; 4 KiB, 5 s)
    peer   → seed      Heartbeat → HeartbeatAck; EventNotice, Leave
    operator ↔ seed    Request ↔ Response; after ``subscribe``: seed → operator Update
    seed   → peer      Request → Response                             (delete a checkpoint, dial-back, ...)
    where two peers talk at length, and have nothing to say: StillHere

Conversations with a file of their own: of a seed and the workers of a job in ``wire.job_messages``, of split models in
``wire.chain_messages``, of text and speculation in ``wire.text_messages``. A newcomer's (``wire.enrol``) are here.

A message is encoded as a msgpack map of its fields in the frame's header; the frame's ``kind`` names the class.
Decoding checks every type and bound (``wire.codec``); an unknown, missing or ill-typed field is a ``ProtocolError``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from wire.schema import Bound

PROTOCOL_VERSION = 8
MAX_TERM = 1 << 13
"""Terms of leading seeds are less: a generation of term t is above t << 40, and every number here below 2**53."""

Scalar = str | int | float | bool | None
"""What a free-form map may hold."""


@dataclass(frozen=True, slots=True)
class Message:
    """Base of all messages. ``KIND`` is the frame kind, unique per class; 1 to 15 belong to the handshake.

    Of messages that come by the thousand, ``KEYED`` is false: they are the values of their fields, numbers, one behind
    the other; the last field is bytes, and all the rest of the body.
    """

    KIND: ClassVar[int]
    KEYED: ClassVar[bool] = True


# ---------------------------------------------------------------------------------------------------------- handshake


@dataclass(frozen=True, slots=True)
class Hello(Message):
    """First frame of whoever dials.

    Attributes:
        purpose: ``peer`` (a worker, verifier or drafter to its seed), ``operator`` (a command line or TUI), ``ring`` (a
            member to its right neighbour), ``heal`` (to a source), ``files`` (to a worker that has a stage's
            checkpoint), ``probe`` (only to see whether somebody answers), ``enrol`` (a newcomer to a seed, for a
            certificate); of split models ``chain`` (a client to a
            worker), ``stage`` (a stage to the next one), ``model`` and ``give`` (to take and to give tensors; see
            ``roles.worker.stages``); ``generate`` (a client to a verifier), ``draft`` (a verifier to a drafter).
        job, generation: the view that the caller believes in; empty and 0 where there is none. Of split models the
            session and the index of the stage that is called, or the model.
        port: where this peer listens for other peers, 0 where it does not.
        host: the address under which others reach this peer; empty to let the other side use the one it sees.
        cluster, term: the highest term of a seed that the caller has seen, and in which cluster.
    """

    KIND: ClassVar[int] = 1
    version: int
    software: str
    peer_id: str
    name: str
    roles: list[str]
    purpose: str
    capabilities: dict[str, Scalar] = field(default_factory=dict)
    job: str = ""
    generation: int = 0
    host: str = ""
    port: int = 0
    cluster: str = ""
    term: int = 0


@dataclass(frozen=True, slots=True)
class Welcome(Message):
    """The answer that lets the caller in.

    Attributes:
        heartbeat_s, death_s: beat interval, and silence after which the caller counts as dead; 0 where no beats are
            wanted.
        wall: the answerer's wall clock in Unix seconds, to show a skew.
        term: of a seed: grows when it is restored from a backup.
    """

    KIND: ClassVar[int] = 2
    version: int
    software: str
    peer_id: str
    name: str
    cluster_id: str
    heartbeat_s: float
    death_s: float
    wall: float
    term: int = 0


@dataclass(frozen=True, slots=True)
class Refuse(Message):
    """The answer that does not, or the last word before a connection is closed for cause."""

    KIND: ClassVar[int] = 3
    code: str
    message: str
    remedy: str = ""


# --------------------------------------------------------------------------------------------------- peer and its seed


@dataclass(frozen=True, slots=True)
class Heartbeat(Message):
    """I am alive, and this far.

    Attributes:
        progress: grows with every micro-batch and sub-chunk handled; a beat without progress tells a stuck peer.
        loop_lag_ms: by how much the peer's own event loop was late; a peer that lags doubts itself first.
        stats: gauges for people: ``rtt_ms``, ``in_bps``, ``out_bps``, ``tokens_per_s``, ``memory_bytes``,
            ``memory_total_bytes``, ``gpu_load`` (0 to 1, absent where there is none), ``compute_ms``,
            ``communicate_ms``, ``wait_ms``; ``compute_flops`` (once it has measured that; 0 where it cannot).
    """

    KIND: ClassVar[int] = 16
    seq: int
    progress: int
    step: int
    state: str
    loop_lag_ms: float
    stats: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HeartbeatAck(Message):
    """The seed heard beat ``seq``."""

    KIND: ClassVar[int] = 17
    seq: int


@dataclass(frozen=True, slots=True)
class EventNotice(Message):
    """Something a person should be able to read later. ``level`` is ``info``, ``warning`` or ``error``."""

    KIND: ClassVar[int] = 25
    level: str
    kind: str
    text: str
    job: str = ""


@dataclass(frozen=True, slots=True)
class Leave(Message):
    """I go, on purpose. The connection is closed after this."""

    KIND: ClassVar[int] = 27
    reason: str


# ------------------------------------------------------------------------------------------------- requests, updates


@dataclass(frozen=True, slots=True)
class Request(Message):
    """A call. ``params`` and results are JSON-like: maps with string keys, lists, scalars; at most 8 levels deep."""

    KIND: ClassVar[int] = 32
    id: int
    method: str
    params: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Response(Message):
    """The answer to ``Request`` ``id``: ``error_code`` is empty when it went well."""

    KIND: ClassVar[int] = 33
    id: int
    result: dict[str, Any] = field(default_factory=dict)
    error_code: str = ""
    error_message: str = ""
    error_remedy: str = ""


@dataclass(frozen=True, slots=True)
class Update(Message):
    """Seed to subscriber: what changed since the last update, coalesced, at most ten a second.

    Attributes:
        topic: ``cluster``, ``peers``, ``jobs``, ``metrics``, ``events``, ``checkpoints``, ``recoveries``,
            ``parts``; ``peers-gone``, ``jobs-gone``, ``checkpoints-gone`` and ``parts-gone``, whose items hold ``id``
            only.
        items: maps as made by ``to_map`` of the topic's record in ``wire.records``; metrics carry ``job`` besides.
    """

    KIND: ClassVar[int] = 34
    topic: str
    items: list[dict[str, Any]]


# ------------------------------------------------------------------------------------------------------- between peers


@dataclass(frozen=True, slots=True)
class KeepAlive(Message):
    """Nothing to send: a step is long, or the pace slow. Both ends say it, so that silence means death."""

    KIND: ClassVar[int] = 55


BULK_KIND = 64
"""Frame kind of raw payload: empty header, length exactly as the receiver planned, on the stream it planned."""


# ------------------------------------------------------------------------------------------------------------ enrolment


@dataclass(frozen=True, slots=True)
class EnrolOffer(Message):
    """Seed to newcomer, at once: the run's CA, whose hash the newcomer knows from its ticket, and a fresh nonce.

    Attributes:
        ca_der: the CA's certificate.
        nonce: random, for this connection only.
    """

    KIND: ClassVar[int] = 4
    ca_der: bytes
    nonce: Annotated[bytes, Bound(32, 32)]


@dataclass(frozen=True, slots=True)
class EnrolRequest(Message):
    """Newcomer to seed, over TLS under the run's CA: sign this, on the strength of this ticket.

    Attributes:
        ticket_id: which ticket; its secret does not travel.
        csr_der: the certificate request (PKCS #10), which names the peer id.
        mac: ``wire.address.proof`` of the ticket's secret, the nonce and the request.
    """

    KIND: ClassVar[int] = 5
    ticket_id: str
    csr_der: bytes
    mac: Annotated[bytes, Bound(32, 32)]


@dataclass(frozen=True, slots=True)
class EnrolGranted(Message):
    """The certificate asked for, in DER. The connection ends here; the newcomer comes again with it."""

    KIND: ClassVar[int] = 6
    certificate_der: bytes
