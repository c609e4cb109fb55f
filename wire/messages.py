"""Every message of the protocol, as a frozen dataclass. This file *is* the protocol, ``PROTOCOL_VERSION`` its version.

Who says what to whom::

    anyone → anyone    Hello → Welcome | Refuse                       (handshake; 4 KiB, 5 s)
    newcomer → seed    CaRequest → CaOffer; EnrolRequest → EnrolChallenge, EnrolProof → EnrolGranted (see wire.enrol)
    peer   → seed      Heartbeat, Report, StepMetrics, EventNotice, CheckpointSaved, Leave
    seed   → peer      HeartbeatAck, Assign, ViewAnnounced, Hold, Release
    operator ↔ seed    Request ↔ Response; after ``subscribe``: seed → operator Update
    seed   → peer      Request → Response                             (delete a checkpoint, dial-back, ...)
    seed   → peer      Seeds                                          (which seeds come after it)
    seed   → standby   Seeds; Rows → RowsTaken; Heartbeat, Leave the other way (see roles.seed.followers)
    member → member    bulk frames only (see ``ring.session``); heal: HealRequest → HealOffer, ChunkRequest → bulk
                       frame; StepLogged as the donor's ring commits, StepRequest → bulk frame | StepGone; StillHere;
                       files: FilesRequest → FilesOffer, TensorRequest → bulk frame | TensorGone

A message is encoded as a msgpack map of its fields in the frame's header; the frame's ``kind`` names the class. (Those
of split models, of speculation and of who asks for text are in ``wire.chain_messages``, ``wire.speculation_messages``
and ``wire.generate_messages``.)
Decoding checks every type and bound (``wire.codec``); an unknown, missing or ill-typed field is a ``ProtocolError``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

PROTOCOL_VERSION = 5
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
            member to its right neighbour), ``heal`` (to a donor), ``files`` (to a worker that has a stage's
            checkpoint), ``probe`` (only to see whether somebody answers), ``enrol`` (a newcomer to a seed, for a
            certificate), ``standby`` (a second seed to the one that leads); of split models ``chain`` (a client to a
            worker), ``stage`` (a stage to the next one), ``model`` and ``give`` (to take and to give tensors; see
            ``roles.worker.stages``); ``generate`` (a client to a verifier), ``draft`` (a verifier to a drafter).
        job, generation: the view that the caller believes in; empty and 0 where there is none. Of split models the
            session and the index of the stage that is called, or the model.
        port: where this peer listens for other peers, 0 where it does not.
        host: the address under which others reach this peer; empty to let the other side use the one it sees.
        cluster, term: the highest term of a leading seed that the caller has seen, and in which cluster.
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
        term: of a seed that leads: grows with every take-over.
        seeds: where the next ones of the cluster are found when this one is lost, in their order; an address without
            a host is on the machine of this one.
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
    seeds: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Refuse(Message):
    """The answer that does not, or the last word before a connection is closed for cause.

    Attributes:
        elsewhere: addresses of who may say yes, where that is known.
    """

    KIND: ClassVar[int] = 3
    code: str
    message: str
    remedy: str = ""
    elsewhere: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class CaRequest(Message):
    """Newcomer to seed: show me the run's CA; I know its hash from my ticket."""

    KIND: ClassVar[int] = 4


@dataclass(frozen=True, slots=True)
class CaOffer(Message):
    """The run's CA certificate, in DER."""

    KIND: ClassVar[int] = 5
    ca_der: bytes


@dataclass(frozen=True, slots=True)
class EnrolRequest(Message):
    """Newcomer to seed, over TLS under the run's CA: sign this, on the strength of this ticket.

    Attributes:
        ticket_id: which ticket; its secret does not travel.
        csr_der: the certificate request (PKCS #10), which names the peer id.
    """

    KIND: ClassVar[int] = 6
    ticket_id: str
    csr_der: bytes


@dataclass(frozen=True, slots=True)
class EnrolChallenge(Message):
    """Prove the secret over this nonce (32 random bytes, for this connection only)."""

    KIND: ClassVar[int] = 7
    nonce: bytes


@dataclass(frozen=True, slots=True)
class EnrolProof(Message):
    """``wire.ticket.proof`` of the ticket's secret, the nonce and the request."""

    KIND: ClassVar[int] = 8
    mac: bytes


@dataclass(frozen=True, slots=True)
class EnrolGranted(Message):
    """The certificate asked for, in DER. The connection ends here; the newcomer comes again with it."""

    KIND: ClassVar[int] = 9
    certificate_der: bytes


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
class Assign(Message):
    """Seed to peer: build what this job needs, then say ``Report(status="ready")``.

    Attributes:
        spec: the job's effective profile as JSON (at most 32 KiB), as ``configs`` wrote it.
        corpus: SHA-256 of the tokenized corpus that the job began with; empty where no member has named it yet.
        restore_step: the step to go back to from a checkpoint; -1 to use the newest state that any member has.
        stage, stages: which part of the model this worker holds, of how many; (0, 1) where the model is not split.
        holders: who has all stages' files of ``restore_step``, for a worker that lacks its own.
    """

    KIND: ClassVar[int] = 18
    job: str
    spec: str
    corpus: str = ""
    restore_step: int = -1
    stage: int = 0
    stages: int = 1
    holders: list[MemberRecord] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Report(Message):
    """Peer to seed: where I stand in a job. The seed mints views from nothing else.

    Attributes:
        status: ``ready`` (built, may be put into a view), ``held`` (stopped at a step boundary as asked),
            ``training`` (after the control link was lost and found again: the view still runs),
            ``broken`` (a neighbour was lost, the step was aborted), ``healed`` (state fetched, as the view asked),
            ``following`` (outside the ring: what was fetched in the background is at most a step behind it, or that
            cannot be; may be put into a view), ``done`` (the last step is committed and saved), ``failed`` (cannot go
            on; ``reason`` says why).
        generation: the view that this reports on; 0 for ``ready`` and ``following``.
        applied: steps applied to the parameters.
        prepared: ``applied + 1`` where a fully reduced, not yet committed step is kept as the redo buffer, else
            ``applied``.
        lineage: hex digest of the chain of applied reductions; two members with equal ``applied`` and ``lineage`` hold
            the same bits.
        prepared_lineage: what ``lineage`` becomes if the prepared step is committed; empty where none is prepared.
        square_sum: the squared gradient norm that step ``applied`` was committed with; 0 where it is not known.
        suspect: peer id of the neighbour that was lost, for ``broken``.
        reduce_bytes: of the array that every step reduces, 0 where it is not known: the ring is planned with it.
        unit_us: microseconds that a micro-batch takes here, averaged; 0 where it is not known. Shares follow it.
        windows: training sequences in the corpus, 0 where it is not known: the ledger is audited with it.
        cause: of ``broken``: empty (a neighbour or a link was lost), ``digest`` (members held different sums),
            ``contribution`` (that of ``suspect`` is not finite, or absurdly large), ``hop`` (what ``suspect`` sent is
            not what ``beside`` received).
        beside: the other end of the hop; where a neighbour was lost, the neighbour that saw it.
        fetched_bytes, donors: of ``healed`` and ``following``: what was fetched, and from how many; 0 for unknown.
        received_bytes: for it came so many, with what is said, and with what came in vain.
        lost_donors: so many went away while the state came.
    """

    KIND: ClassVar[int] = 19
    job: str
    generation: int
    status: str
    applied: int
    prepared: int
    lineage: str
    prepared_lineage: str = ""
    square_sum: float = 0.0
    corpus: str = ""
    suspect: str = ""
    reason: str = ""
    reduce_bytes: int = 0
    unit_us: int = 0
    windows: int = 0
    cause: str = ""
    beside: str = ""
    fetched_bytes: int = 0
    donors: int = 0
    received_bytes: int = 0
    lost_donors: int = 0


@dataclass(frozen=True, slots=True)
class MemberRecord:
    """One member of a view, in rank order.

    Attributes:
        host: where its data port is reached; empty: on the seed's own machine, dial the host that you dialled for it.
        first, count: its share of the step's micro-batches, ``range(first, first + count)``.
        healthy: it holds the state of the view's start (it applied ``step``, or can redo it from its redo buffer).
    """

    peer_id: str
    name: str
    host: str
    port: int
    first: int
    count: int
    healthy: bool


@dataclass(frozen=True, slots=True)
class ViewAnnounced(Message):
    """Seed to members: the membership from now on (``ring.view.View``). Minted durably before it is sent.

    Attributes:
        step: steps already applied when this view begins.
        lineage: lineage at ``step``; members that differ fetch the state from a healthy member first.
        square_sum: the squared gradient norm that step ``step`` was committed with, for members that redo it.
        heartbeat_s, death_s: between neighbours, the same for all: those of the member that is farthest from the seed.
        streams, sub_chunk_bytes, codec: how gradients travel; see ``ring.view.View``.
        care, ledger_step, stages, reduce_bytes: see ``ring.view.View``.
    """

    KIND: ClassVar[int] = 20
    job: str
    generation: int
    step: int
    lineage: str
    members: list[MemberRecord]
    square_sum: float = 0.0
    heartbeat_s: float = 0.0
    death_s: float = 0.0
    streams: int = 1
    sub_chunk_bytes: int = 0
    codec: str = "fp32"
    care: int = 0
    ledger_step: int = 0
    stages: int = 1
    reduce_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Hold(Message):
    """Seed to members: stop together at the next step boundary and say ``Report(status="held")``."""

    KIND: ClassVar[int] = 21
    job: str
    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class Release(Message):
    """Seed to peer: drop this job (it was cancelled, paused for good, or given to others)."""

    KIND: ClassVar[int] = 22
    job: str
    reason: str


@dataclass(frozen=True, slots=True)
class SaveNow(Message):
    """Seed to members: write a checkpoint at the next step boundary."""

    KIND: ClassVar[int] = 23
    job: str


@dataclass(frozen=True, slots=True)
class StepMetrics(Message):
    """Rank 0 to seed, after a commit. ``values`` are the columns of ``wire.records.MetricRow`` that are known."""

    KIND: ClassVar[int] = 24
    job: str
    generation: int
    step: int
    values: dict[str, float]


@dataclass(frozen=True, slots=True)
class EventNotice(Message):
    """Something a person should be able to read later. ``level`` is ``info``, ``warning`` or ``error``."""

    KIND: ClassVar[int] = 25
    level: str
    kind: str
    text: str
    job: str = ""


@dataclass(frozen=True, slots=True)
class CheckpointSaved(Message):
    """A checkpoint is durable on this peer's disk.

    Attributes:
        stage, stages: which part's files it has, of how many; (0, 1): the whole model's.
    """

    KIND: ClassVar[int] = 26
    job: str
    step: int
    path: str
    digest: str
    size_bytes: int
    val_loss: float | None = None
    stage: int = 0
    stages: int = 1


@dataclass(frozen=True, slots=True)
class Leave(Message):
    """I go, on purpose. The connection is closed after this."""

    KIND: ClassVar[int] = 27
    reason: str


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """Who computed a committed step.

    Attributes:
        step: steps applied with this one included: the first has 1.
        generation: of the view in which it was computed; that names the members.
        digest: of the reduced bytes (16 bytes); with the lineage before it, it gives the lineage after it.
        counts: micro-batches of each member, in rank order, packed as big-endian uint32.
    """

    step: int
    generation: int
    digest: bytes
    counts: bytes


@dataclass(frozen=True, slots=True)
class LedgerRows(Message):
    """Member to seed: committed steps, in order. ``lineage`` is that before the first of them.

    Rank 0 tells each step as it commits; at the begin of a view every member tells what it has applied beyond the
    view's ``ledger_step``. The seed keeps one of each.
    """

    KIND: ClassVar[int] = 28
    job: str
    lineage: str
    rows: list[LedgerRow]


@dataclass(frozen=True, slots=True)
class CatchUp(Message):
    """Seed to a worker that stands ready beside a running ring: fetch the state from ``donors`` in the background.

    It answers with ``Report(status="following")`` when it is at most a step behind, or when that cannot be.
    """

    KIND: ClassVar[int] = 29
    job: str
    generation: int
    donors: list[MemberRecord]


@dataclass(frozen=True, slots=True)
class Seeds(Message):
    """Seed that leads to workers and standbys: where the next ones are, as in ``Welcome``, from now on.

    Attributes:
        seat: of the standby that hears it, which its terms are made of; 0 for a worker.
        rank: how many take over before it.
    """

    KIND: ClassVar[int] = 35
    term: int
    seeds: list[str]
    seat: int = 0
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Rows(Message):
    """Seed that leads to a standby: a part of a batch of rows of its store (``roles.seed.feed``).

    Attributes:
        number: of the batch; the first is 1, and empties the standby's store.
        data: a part of the batch's bytes.
        more: another part of the same batch follows.
        whole: with this batch the standby's store is what the leader's was at one moment.
    """

    KIND: ClassVar[int] = 36
    number: int
    data: bytes
    more: bool
    whole: bool


@dataclass(frozen=True, slots=True)
class RowsTaken(Message):
    """Standby to the seed that leads: batch ``number`` is taken in; where it was whole, all up to it is durable."""

    KIND: ClassVar[int] = 37
    number: int


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


# ---------------------------------------------------------------------------------------------------- member to member


@dataclass(frozen=True, slots=True)
class MemberLost(Message):
    """To the other neighbour, on the beats' connection, before it ends: the ring is over, for this member is lost.

    Attributes:
        peer_id: who is lost. beside: who saw it, its neighbour; the news may have come a long way.
        reason: what was seen.
    """

    KIND: ClassVar[int] = 56
    peer_id: str
    beside: str
    reason: str


@dataclass(frozen=True, slots=True)
class HealRequest(Message):
    """Bring me to ``job``'s state of ``step`` and ``lineage``; ``step`` -1: as far as the ring is, and on from there.

    Attributes:
        have_step, have_lineage: what the caller holds, -1 and empty where that is nothing: where the donor has kept
            the steps since, it offers those and no state.
        silence_s: after which each side gives the other up; each says something four times as often.
        stage: of a split model: the part that the caller holds, which is the only one it can take.
    """

    KIND: ClassVar[int] = 48
    job: str
    step: int
    lineage: str
    silence_s: float
    have_step: int = -1
    have_lineage: str = ""
    stage: int = 0


@dataclass(frozen=True, slots=True)
class BlobRecord:
    """One named run of bytes of the state, such as the flat parameters or the first Adam moment."""

    name: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class HealOffer(Message):
    """The donor's answer: what there is to fetch. It stays unchanged until the connection ends.

    Attributes:
        step, lineage, square_sum: of the state that is given; without ``blobs``, those that the caller holds.
        blobs: parts of the state; none where the caller needs only the steps after ``step`` (``StepLogged``).
        root: xxh3-128 of the table, which has the xxh3-128 of every chunk; equal for donors that hold the same bits.
    """

    KIND: ClassVar[int] = 49
    step: int
    lineage: str
    blobs: list[BlobRecord]
    chunk_bytes: int
    root: bytes = b""
    square_sum: float = 0.0


@dataclass(frozen=True, slots=True)
class ChunkRequest(Message):
    """Send chunk ``index`` of the offered state, in the order of its blobs, as one bulk frame on ``stream``."""

    KIND: ClassVar[int] = 50
    index: int
    stream: int


@dataclass(frozen=True, slots=True)
class TableRequest(Message):
    """Send the table of the offered state, 16 bytes a chunk, as one bulk frame on ``stream``."""

    KIND: ClassVar[int] = 51
    stream: int


@dataclass(frozen=True, slots=True)
class StepLogged(Message):
    """The donor keeps the reduced bytes of a step that its ring committed.

    Attributes:
        step: steps applied with this one included.
        digest: xxh3-128 of the reduced bytes: with the lineage before, it makes the lineage after the step.
        square_sum: the squared gradient norm that it was committed with.
        digests: of a split model: those of all stages' reduced bytes, one after the other, for the lineage is made of
            all of them (``ring.token.joined_digest``); ``digest`` is among them.
    """

    KIND: ClassVar[int] = 52
    step: int
    digest: bytes
    square_sum: float
    size_bytes: int
    digests: bytes = b""


@dataclass(frozen=True, slots=True)
class StepRequest(Message):
    """Send the reduced bytes of ``step`` as one bulk frame on ``stream``; or say ``StepGone``."""

    KIND: ClassVar[int] = 53
    step: int
    stream: int


@dataclass(frozen=True, slots=True)
class StepGone(Message):
    """The log is bounded: the reduced bytes that were asked for on ``stream`` are kept no more."""

    KIND: ClassVar[int] = 54
    step: int
    stream: int


@dataclass(frozen=True, slots=True)
class FilesRequest(Message):
    """Which files has ``stage`` of ``stages`` in ``job``'s checkpoint of ``step``? Answered when they are durable.

    Attributes:
        lineage: of the state that it is to hold; empty: whichever.
    """

    KIND: ClassVar[int] = 57
    job: str
    step: int
    lineage: str
    stage: int
    stages: int


@dataclass(frozen=True, slots=True)
class FilesOffer(Message):
    """The answer: a checkpoint's manifest, which names them and their sums; or why there are none.

    ``TensorRequest``s for ranges of them follow, whose ``model`` is the job.
    """

    KIND: ClassVar[int] = 58
    manifest: bytes
    reason: str = ""


@dataclass(frozen=True, slots=True)
class StillHere(Message):
    """Nothing to send: a step is long, or the pace slow. Both sides of a heal say it, so that silence means death."""

    KIND: ClassVar[int] = 55


BULK_KIND = 64
"""Frame kind of raw payload: empty header, length exactly as the receiver planned, on the stream it planned."""
