"""Messages between the seed and the workers of a job, and between those workers.

::

    seed   → worker    Assign, ViewAnnounced, CatchUp, Hold, SaveNow, Release
    worker → seed      Report, StepMetrics, LedgerRows, CheckpointSaved
    member → neighbour    bulk frames only (see ``ring.session``); MemberLost, on the heartbeat connection
    member → member       (``ring.direct``)     SendOffer → SendTaken → bulk frames
    member → source       (purpose ``heal``)    HealRequest → HealOffer
    source → member       StepLogged, as its ring commits
    member → member       (purpose ``files``)   FilesRequest → FilesOffer
    receiver → source     (these, and those of a model)   RangeRequest → bulk frame | RangeGone
    both ways when idle   KeepAlive
"""

from __future__ import annotations

import sys
from dataclasses import field
from typing import Annotated

from p2ptrain.core import plugins
from p2ptrain.core.errors import ProtocolError
from wire.messages import Message, Silence
from wire.schema import Bound, Count, Declared, Digest, Lineage, Port

LEAVE, MEMBERS = "job.leave", "job.members"
"""A worker's requests to the seed. Before it leaves: does no other worker, that stays, keep the state of its job? The
other asks for ``JobMembers``."""
MAX_STREAMS = 16
MAX_STAGES = 256
MAX_SENDERS = 64
MAX_CHANGES = 64
MAX_WINDOWS = 2**40
MAX_SUB_CHUNK_BYTES = 64 << 20

_Silence = Annotated[float, Bound(0, 86_400.0)]
_Finite = Annotated[float, Bound(-sys.float_info.max, sys.float_info.max)]
_Name = Annotated[str, Bound(0, 128)]


class PartOfModel(Declared, kw_only=True):
    """Index of a part of a model, and the number of parts; (0, 1): the whole model."""

    stage: Count = 0
    stages: Annotated[int, Bound(1, MAX_STAGES)] = 1

    def check(self) -> None:
        if self.stage >= self.stages:
            raise ProtocolError(f"part {self.stage} of a model in {self.stages} parts")


class Assign(PartOfModel, Message, kind=18):
    """Seed to worker: build what this job needs, then send ``Report(status="ready")``.

    Attributes:
        spec: the job's effective profile as JSON, at most 32 KiB, written by ``configs``.
        corpus: SHA-256 of the tokenized corpus that the job began with; empty until a member has reported it.
        restore_step: the step of the checkpoint to go back to; -1 to use the newest state of any member.
        stage, stages: the part that this worker holds.
        holders: workers with the files of ``restore_step``, of all stages, for a worker that lacks its own.
        lineage: of ``restore_step``; empty if any will do.
    """

    job: str
    spec: str
    corpus: str = ""
    restore_step: int = -1
    holders: list[MemberRecord] = field(default_factory=list)
    lineage: str = ""


class Report(Message, kind=19):
    """Worker to seed: its state in a job. The seed mints views from reports only.

    Attributes:
        status: ``ready``: built, may join a view. ``held``: stopped at a step boundary as asked. ``training``: the link
            to the seed is back, and the view still runs. ``broken``: a neighbour was lost, the step was aborted.
            ``hung``: its computing does not move, and the others wait for it; see ``reason``.
            ``healed``: it fetched the state of the view. ``following``: outside the ring, its background fetch is at
            most a step behind, or is not possible; may join a view. ``done``: the last step is committed;
            ``reason`` says why it came early, if it did.
            ``failed``: it cannot go on; see ``reason``.
        generation: the view that the report is about; 0 for ``ready`` and ``following``.
        applied: steps applied to the parameters.
        prepared: ``applied + 1`` if the redo buffer holds a fully reduced step that is not committed; otherwise
            ``applied``.
        lineage: hex digest of the chain of applied reductions; equal ``applied`` and ``lineage`` mean equal bits.
        prepared_lineage: what ``lineage`` becomes if the prepared step is committed; empty without one.
        square_sum: squared gradient norm that step ``applied`` was committed with; 0 if unknown.
        suspect: for ``broken``: peer id of the neighbour that was lost, or of the member whose token failed the step.
        reduce_bytes: bytes of the array that every step reduces, for planning the ring; 0 if unknown.
        unit_us: average microseconds per micro-batch at this worker, for its share; 0 if unknown.
        windows: training sequences in the corpus, for auditing the ledger and for shares by size; 0 if unknown.
        cause: for ``broken``: empty (a neighbour or a link was lost), ``dial`` (``suspect`` was not reached),
            ``digest`` (members had different sums), ``contribution`` (that of ``suspect`` is not finite, or an
            outlier; without a suspect: no member said that it caused a wrong sum), ``figure`` (``suspect`` told a
            number that others know to be false), ``protocol`` (``beside`` received invalid bytes from ``suspect``),
            ``stalled`` (it did not receive what ``suspect`` owes).
        beside: for a lost neighbour, the neighbour that noticed it.
        fetched_bytes, sources: for ``healed`` and ``following``: bytes fetched, and from how many sources; 0 if
            unknown.
        first_row: the sender holds the ledger rows of the steps ``first_row`` to ``applied``; ``applied + 1``: of none.
        unsaved: for ``done``: why this member could not save the state; empty if it could, or did not try.
    """

    job: str
    generation: Count
    status: str
    applied: Count
    prepared: Count
    lineage: str
    prepared_lineage: str = ""
    square_sum: _Finite = 0.0
    corpus: _Name = ""
    suspect: _Name = ""
    reason: str = ""
    reduce_bytes: Count = 0
    unit_us: Count = 0
    windows: Annotated[int, Bound(0, MAX_WINDOWS)] = 0
    cause: _Name = ""
    beside: _Name = ""
    fetched_bytes: Count = 0
    sources: Count = 0
    first_row: Count = 0
    unsaved: str = ""


class SettingChange(Declared):
    """A setting of a job that a person changed while it ran.

    Attributes:
        step: the first step, counted from 0, that is computed with it.
        key: dotted, such as ``optimizer.lr``. value, before: the new and the old value, as JSON.
    """

    step: Count
    key: Annotated[str, Bound(1, 64)]
    value: Annotated[str, Bound(1, 64)]
    before: Annotated[str, Bound(1, 64)]


SettingChanges = Annotated[tuple[SettingChange, ...], Bound(0, MAX_CHANGES)]
"""All changes of a job, in the order in which they were asked for. The list only grows. A later one wins."""


class MemberRecord(Declared):
    """One member of a view. Members are in rank order.

    Attributes:
        host: address of its data port, as the seed knows it (``wire.address.advertised_host``).
        first, count: its share of the step's micro-batches, ``range(first, first + count)``.
        healthy: it holds the state that the view starts from: it applied ``step``, or can redo it from its redo buffer.
    """

    peer_id: str
    name: str
    host: str
    port: Port
    first: Count
    count: Count
    healthy: bool


class JobMembers(Declared):
    """The answer to ``MEMBERS``: other workers of the caller's job. Their shares are empty."""

    members: Annotated[list[MemberRecord], Bound(0, MAX_SENDERS)]


class ViewAnnounced(Message, kind=20, long=True):
    """Seed to members: the membership from now on. It is stored before it is sent. Member to a restored seed: its view.

    Attributes:
        generation: increases with every view of the job. Every frame between members has it.
        step: steps already applied when the view begins.
        lineage: lineage at ``step``; a member with another one first fetches the state from a healthy member.
        members: in rank order; the right neighbour of rank r is rank (r + 1) mod n.
        square_sum: squared gradient norm with which step ``step`` was committed; members that redo the step clip by it.
        heartbeat_s, death_s: between neighbours: those of the profile, or those that fit the member that is farthest
            from the seed. All members use the same; else one with shorter ones would declare its neighbour dead.
        streams: bulk connections from each member to its right neighbour; an array is striped over them.
        sub_chunk_bytes: size of the pieces that are reduced and passed on over far links; 0: the members are near each
            other, and the session chooses.
        codec: name of the encoding in which gradients travel (``ring.codecs``, or a plugin of the members).
        lenient: a finite outlier is applied, because the data is its cause (``ring.quarantine``).
        ledger_step: the seed has the ledger row and the metrics of each step up to this one.
        stages: number of parts of the model; rank r holds part r mod ``stages``. 1: each member holds all of it. The
            members of one replica have consecutive ranks; the replica's share is that of its stage 0.
        reduce_bytes: size of the largest array that a step reduces at any stage; 0: not known.
        changes: the settings that differ from those of the job's beginning.
    """

    job: str
    generation: Annotated[int, Bound(1, 2**53)]
    step: Count
    lineage: Lineage
    members: Annotated[tuple[MemberRecord, ...], Bound(1, 4096)]
    square_sum: _Finite = 0.0
    heartbeat_s: _Silence = 0.0
    death_s: _Silence = 0.0
    streams: Annotated[int, Bound(1, MAX_STREAMS)] = 1
    sub_chunk_bytes: Annotated[int, Bound(0, MAX_SUB_CHUNK_BYTES)] = 0
    codec: Annotated[str, Bound(pattern=plugins.NAME)] = "fp32"
    lenient: bool = False
    ledger_step: Count = 0
    stages: Annotated[int, Bound(1, MAX_STAGES)] = 1
    reduce_bytes: Count = 0
    changes: SettingChanges = ()

    def check(self) -> None:
        if len({member.peer_id for member in self.members}) < len(self.members):
            raise ProtocolError("a view that names a member twice")
        if len(self.members) % self.stages:
            raise ProtocolError(f"a view of {len(self.members)} members in {self.stages} stages")
        covered = 0
        for rank, member in enumerate(self.members):
            if member.first != covered:
                raise ProtocolError("a view whose shares do not cover the micro-batches in order")
            if member.count and rank % self.stages:
                raise ProtocolError("a view that gives a share to a member beyond its replica's first stage")
            covered += member.count


class Hold(Message, kind=21):
    """Seed to members: stop together at the next step boundary and send ``Report(status="held")``."""

    job: str
    generation: int
    reason: str


class Release(Message, kind=22):
    """Seed to worker: drop this job. It was cancelled, paused for good, or given to other workers."""

    job: str
    reason: str


class SaveNow(Message, kind=23):
    """Seed to members: write a checkpoint at the next step boundary; after the last step, now."""

    job: str


class StepMetrics(Message, kind=24):
    """Rank 0 to seed, after a commit.

    ``values``: the columns of ``wire.records.MetricRow`` that are known. With a robust rule also ``excluded.R`` for
    each rank R that contributed: 1 if the rule left its vector out, else 0. And in some steps ``distance.R``: how far
    R's vector is from the aggregate, over the median of all distances.
    """

    job: str
    generation: Count
    step: Count
    values: dict[str, float]


def excluded_key(rank: int) -> str:
    return f"excluded.{rank}"


def distance_key(rank: int) -> str:
    return f"distance.{rank}"


class CheckpointSaved(PartOfModel, Message, kind=26):
    """Worker to seed: a checkpoint is durable on its disk. ``stage``, ``stages``: the part whose files it has.
    ``held``: the steps of all checkpoints of that part that the worker has now."""

    job: str
    step: Count
    path: str
    digest: str
    size_bytes: Count
    val_loss: float | None = None
    held: Annotated[list[Count], Bound(0, 4096)] = field(default_factory=list)


class LedgerRow(Declared):
    """Who computed a committed step.

    Attributes:
        step: steps applied, this one included; the first step has 1.
        generation: the view in which it was computed; it names the members.
        digest: 16-byte digest of the reduced bytes; with the lineage before the step it gives the lineage after it.
        counts: micro-batches of each member, in rank order, packed as big-endian uint32.
        made_of: of a version of strategy 'server': its contributions (``ring.staleness``).
    """

    step: Annotated[int, Bound(1, 2**53)]
    generation: Annotated[int, Bound(1, 2**53)]
    digest: Digest
    counts: bytes
    made_of: Annotated[bytes, Bound(0, 26 * 1024)] = b""


class LedgerRows(Message, kind=28):
    """Member to seed: committed steps, in order. ``lineage`` is the one before the first of them.

    Rank 0 sends each step as it commits. When a view begins, every member sends the steps that it has applied after the
    view's ``ledger_step``. The seed keeps one row per step.
    """

    job: str
    lineage: Lineage
    rows: Annotated[list[LedgerRow], Bound(1, 4096)]


class CatchUp(Message, kind=29):
    """Seed to a worker that is ready outside a running ring: fetch the state from ``sources`` in the background.

    It answers with ``Report(status="following")`` when it is at most a step behind, or if it cannot catch up.
    ``changes``: as of the running view.
    """

    job: str
    generation: int
    sources: list[MemberRecord]
    changes: SettingChanges = ()


# ------------------------------------------------------------------------------------------------------ between workers


RANGE_BYTES = 4 << 20
"""Bytes of a file on disk that are requested and sent at a time."""


class MemberLost(Message, kind=56):
    """Member to its other neighbour, on the heartbeat connection before it ends: a member is lost, so the ring ends.

    Attributes:
        peer_id: the lost member.
        beside: the neighbour that noticed the loss; other members may have passed the message on.
        reason: what the neighbour observed.
        left: the member left on purpose.
    """

    peer_id: str
    beside: str
    reason: str
    left: bool = False


class SendOffer(Message, kind=35):
    """Member to member: a message of ``size_bytes`` is ready. The receiver asks for it with ``SendTaken``.

    Attributes:
        number: of this message on its connection; also the stream of the bulk frames that carry it.
        tag: from the user; below 0: of a collective operation.
    """

    number: Annotated[int, Bound(0, 2**32 - 1)]
    tag: Annotated[int, Bound(-(2**53), 2**53)]
    size_bytes: Count


class SendTaken(Message, kind=36):
    """Member to member: send the bytes of message ``number`` now."""

    number: Annotated[int, Bound(0, 2**32 - 1)]


class HealRequest(Message, kind=48):
    """Member to source: send ``job``'s state of ``step`` and ``lineage``.

    Attributes:
        step: -1: the source's current step, and then each step that its ring commits.
        have_step, have_lineage: what the caller holds; -1 and empty for nothing. If the source has kept the steps
            since, it offers those instead of the state.
        silence_s: after this long without a message each side closes; each sends at least four times as often.
        stage: of a split model: the part that the caller holds, the only one that it can use.
    """

    job: str
    step: int
    lineage: str
    silence_s: Silence
    have_step: int = -1
    have_lineage: str = ""
    stage: int = 0


class BlobRecord(Declared):
    """A named array of bytes of the state, such as the flat parameters or the first Adam moment."""

    name: str
    size_bytes: int


class HealOffer(Message, kind=49):
    """Source to member: what can be fetched. It stays unchanged until the connection ends.

    Attributes:
        step, lineage, square_sum: of the offered state; without ``blobs``, what the caller holds.
        blobs: arrays of the state; empty if the caller needs only the steps after ``step`` (``StepLogged``).
        root: xxh3-128 of the table of the xxh3-128 sums of all chunks; equal for sources that hold the same bits.
    """

    step: Count
    lineage: Lineage
    blobs: list[BlobRecord]
    chunk_bytes: int
    root: Annotated[bytes, Bound(0, 16)] = b""
    square_sum: float = 0.0


class StepLogged(Message, kind=52):
    """Source to member: it keeps the reduced bytes of a step that its ring committed.

    Attributes:
        step: steps applied, this one included.
        digest: xxh3-128 of the reduced bytes; with the lineage before the step it gives the lineage after it.
        square_sum: squared gradient norm that the step was committed with.
        digests: of a split model: the digests of all stages' reduced bytes, ``digest`` among them, concatenated. The
            lineage is made from all of them (``ring.token.joined_digest``).
        changes: number of changes of settings that its ring knew. A receiver that knows another number cannot apply it.
    """

    step: Annotated[int, Bound(1, 2**53)]
    digest: Digest
    square_sum: float
    size_bytes: int
    digests: bytes = b""
    changes: Count = 0


class RangeRequest(Message, kind=45):
    """Send bytes [start, stop) of object ``name`` as one bulk frame on ``stream``, or answer ``RangeGone``.

    Names are those of the state's blobs, of a model's tensors and small files, and of a checkpoint's files. ``#table``
    is a state's table of digests, and ``#step 12`` is the reduced bytes of step 12.
    """

    name: str
    start: int
    stop: int
    stream: int


class RangeGone(Message, kind=46):
    """These bytes are not available: the file changed, or the bounded log has dropped the step."""

    reason: str


class FilesRequest(Message, kind=57):
    """Ask for the files of ``stage`` of ``stages`` in ``job``'s checkpoint of ``step``. Answered when they are durable.

    Attributes:
        lineage: of the state that the checkpoint must hold; empty for any.
    """

    job: str
    step: int
    lineage: str
    stage: int
    stages: int


class FilesOffer(Message, kind=58):
    """The checkpoint's manifest with file names and sums, or the reason why there is none. ``RangeRequest``s follow."""

    manifest: bytes
    reason: str = ""
