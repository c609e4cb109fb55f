"""Messages between the seed and the workers of a job, and between those workers, as those of ``wire.messages``.

::

    seed   → worker    Assign, ViewAnnounced, CatchUp, Hold, SaveNow, Release
    worker → seed      Report, StepMetrics, LedgerRows, CheckpointSaved
    member → neighbour    bulk frames only (see ``ring.session``); MemberLost, on the beats' connection
    member → source       (purpose ``heal``)    HealRequest → HealOffer
    source → member       StepLogged, as its ring commits
    member → member       (purpose ``files``)   FilesRequest → FilesOffer
    receiver → source     (these, and those of a model)   RangeRequest → bulk frame | RangeGone
    both ways when idle   StillHere
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from wire.messages import Message


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
        fetched_bytes, sources: of ``healed`` and ``following``: what was fetched, and from how many; 0 for unknown.
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
    sources: int = 0


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
        lenient, ledger_step, stages, reduce_bytes: see ``ring.view.View``.
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
    lenient: bool = False
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
    """Seed to a worker that stands ready beside a running ring: fetch the state from ``sources`` in the background.

    It answers with ``Report(status="following")`` when it is at most a step behind, or when that cannot be.
    """

    KIND: ClassVar[int] = 29
    job: str
    generation: int
    sources: list[MemberRecord]


# ------------------------------------------------------------------------------------------------------ between workers


RANGE_BYTES = 4 << 20
"""Of what lies on a disk, asked for and sent at a time."""


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
        have_step, have_lineage: what the caller holds, -1 and empty where that is nothing: where the source has kept
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
    """The source's answer: what there is to fetch. It stays unchanged until the connection ends.

    Attributes:
        step, lineage, square_sum: of the state that is given; without ``blobs``, those that the caller holds.
        blobs: parts of the state; none where the caller needs only the steps after ``step`` (``StepLogged``).
        root: xxh3-128 of the table, which has the xxh3-128 of every chunk; equal for sources that hold the same bits.
    """

    KIND: ClassVar[int] = 49
    step: int
    lineage: str
    blobs: list[BlobRecord]
    chunk_bytes: int
    root: bytes = b""
    square_sum: float = 0.0


@dataclass(frozen=True, slots=True)
class StepLogged(Message):
    """The source keeps the reduced bytes of a step that its ring committed.

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
class RangeRequest(Message):
    """Send bytes [start, stop) of what the offer calls ``name`` as one bulk frame on ``stream``, or ``RangeGone``.

    Names are those of the state's blobs, of a model's tensors and small files, and of a checkpoint's files. ``#table``
    is a state's table of digests, ``#step 12`` the reduced bytes of step 12.
    """

    KIND: ClassVar[int] = 45
    name: str
    start: int
    stop: int
    stream: int


@dataclass(frozen=True, slots=True)
class RangeGone(Message):
    """Those bytes cannot be given: the file changed, or the log, which is bounded, keeps the step no more."""

    KIND: ClassVar[int] = 46
    stream: int
    reason: str


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

    ``RangeRequest``s follow.
    """

    KIND: ClassVar[int] = 58
    manifest: bytes
    reason: str = ""
