"""What the seed tells about the cluster: records shared by its store, the command line and the TUI.

Every record is a ``wire.schema.Record``: its annotations are its check. None stands for unknown.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

from p2ptrain.core.errors import ProtocolError
from wire.chain_messages import HeldPart
from wire.job_messages import LedgerRow
from wire.schema import Amount, Bound, Count, Lineage, Port, Record, Share
from wire.text_messages import Served


def _figure(value: float | None) -> float | None:
    return float(value) if value is not None and math.isfinite(value) and value >= 0 else None


@dataclass(frozen=True, slots=True)
class ClusterInfo(Record):
    """The seed itself. ``started_at`` is Unix seconds."""

    cluster_id: str
    name: str
    version: str
    address: str
    started_at: float
    peers: int
    jobs: int


@dataclass(frozen=True, slots=True)
class PeerInfo(Record):
    """One peer, as the seed sees it now.

    Attributes:
        state: ``joining``, ``idle``, ``building``, ``waiting``, ``following``, ``healing``, ``training``, ``held``,
            ``failed``, ``leaving``, ``away`` (only its link to the seed is lost: its ring may run), ``lost``;
            ``serving``: a verifier or a drafter at work.
        in_bps, out_bps: bits per second over the ring.
        rank: position in its job's ring; None outside one.
        share: micro-batches of the newest step that it computed.
        stage, stages: which part of a split model it holds, from 0, of how many; None, and 1, where it holds none.
        next_ms, next_bps: one-way latency and bandwidth to its right neighbour, as they were measured last.
        fetched_bytes: of what it fetched beside the ring (``Report``); 0 where it did not.
        model, sessions: of a verifier or a drafter: which one it serves, and how many sessions it has open.
    """

    id: str
    name: str
    roles: list[str]
    device: str
    state: str
    address: str
    joined_at: float
    heartbeat_age_s: float = 0.0
    rtt_ms: float | None = None
    in_bps: float = 0.0
    out_bps: float = 0.0
    tokens_per_s: float = 0.0
    memory_bytes: int = 0
    memory_total_bytes: int = 0
    gpu_load: float | None = None
    job: str = ""
    rank: int | None = None
    generation: int = 0
    step: int = 0
    share: int = 0
    next_ms: float | None = None
    next_bps: float | None = None
    fetched_bytes: int = 0
    stage: int | None = None
    stages: int = 1
    model: str = ""
    sessions: int = 0


FINISHED_STATES = frozenset({"done", "cancelled", "failed"})
"""Of a job: it will not go on by itself."""


@dataclass(frozen=True, slots=True)
class JobInfo(Record):
    """One job.

    Attributes:
        state: ``queued`` (another job runs), ``waiting`` (for its first members), ``forming``, ``running``, ``paused``,
            ``done``, ``cancelled``, ``failed``.
        members: peer ids in rank order.
        edge_ms, edge_bps: one-way latency and bandwidth from each member to its right neighbour, None where unknown;
            empty where all are.
        streams, codec: how gradients travel in the present view (``ring.view.View``); 0 and empty where there is none.
        stages: parts that the model is split into, each held by another member; 1: it is not.
        cuts: the layers with which the second and each later part begin; empty where that is left to the workers.
        reason: why it is in this state, for people.
    """

    id: str
    name: str
    profile: str
    strategy: str
    state: str
    created_at: float
    steps_total: int
    step: int = 0
    generation: int = 0
    members: list[str] = dataclasses.field(default_factory=list)
    started_at: float | None = None
    finished_at: float | None = None
    loss: float | None = None
    val_loss: float | None = None
    lr: float | None = None
    grad_norm: float | None = None
    tokens_per_s: float | None = None
    step_ms: float | None = None
    compute_ms: float | None = None
    communicate_ms: float | None = None
    wait_ms: float | None = None
    tokens_total: int = 0
    reason: str = ""
    edge_ms: list[float | None] = dataclasses.field(default_factory=list)
    edge_bps: list[float | None] = dataclasses.field(default_factory=list)
    streams: int = 0
    codec: str = ""
    stages: int = 1
    cuts: list[int] = dataclasses.field(default_factory=list)

    def edges(self) -> list[tuple[float | None, float | None]]:
        """Latency in ms and bandwidth in bits per second from each member to its right neighbour, None for unknown; no
        edge at all where what the seed says is none."""
        if not len(self.edge_ms) == len(self.edge_bps) == len(self.members):
            return []
        return [
            (_figure(latency_ms), _figure(rate_bps))
            for latency_ms, rate_bps in zip(self.edge_ms, self.edge_bps, strict=True)
        ]

    def slowest_edge(self) -> int | None:
        """The rank whose way to the right has least bandwidth, then most latency; None where none is measured."""
        known = [
            (rate_bps if rate_bps is not None else math.inf, -latency_ms, rank)
            for rank, (latency_ms, rate_bps) in enumerate(self.edges())
            if latency_ms is not None
        ]
        return min(known)[2] if known else None


@dataclass(frozen=True, slots=True)
class MetricRow(Record):
    """One committed step of a job. Times are rank 0's."""

    job: str
    step: int
    wall: float
    loss: float | None = None
    val_loss: float | None = None
    lr: float | None = None
    grad_norm: float | None = None
    tokens_per_s: float | None = None
    step_ms: float | None = None
    compute_ms: float | None = None
    communicate_ms: float | None = None
    wait_ms: float | None = None
    members: int | None = None
    generation: int | None = None


@dataclass(frozen=True, slots=True)
class EventInfo(Record):
    """One line of the cluster's diary. ``id`` grows by one per event."""

    id: int
    wall: float
    level: str
    kind: str
    text: str
    peer: str = ""
    job: str = ""


@dataclass(frozen=True, slots=True)
class CheckpointInfo(Record):
    """One durable checkpoint and where it lies. ``id`` is ``<job>@<step>@<peer>``, with ``@whole`` behind it where the
    job's other checkpoints are those of stages.

    Attributes:
        stage: of a split model: the one whose files alone it has; None: it is the whole model's.
    """

    id: str
    job: str
    step: int
    path: str
    peer_id: str
    peer_name: str
    digest: str
    size_bytes: int
    created_at: float
    val_loss: float | None = None
    stage: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PartInfo(HeldPart, Record):
    """One part of a model (layers [start, stop) of ``layers``), and the worker that holds it. ``id`` is
    ``<peer>/<part>``.

    Attributes:
        model: where the part is in training, its job's id.
        peer, peer_name: who holds it.
    """

    id: str
    peer: str
    peer_name: str
    busy: Share = 0.0

    @property
    def used_bytes(self) -> int:
        return self.weights_bytes + self.cache_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingInfo(Served, Record):
    """What a verifier or a drafter serves. ``id`` is the peer's.

    Attributes:
        role: ``verifier`` or ``drafter``.
        host, port: where it is dialled, as the seed sees it: a loopback address means the seed's machine.
    """

    id: str
    name: str
    role: str
    host: str
    port: Port


@dataclass(frozen=True, slots=True)
class StagePlanInfo(Record):
    """One stage of a plan for the training of a split model (``ring.training_placement``).

    Attributes:
        peers, names: the workers that hold it, one for each replica.
        start, stop: layers [start, stop).
        weights_bytes, need_bytes: of its weights, and of all that training takes.
        limit_bytes: the least that one of its workers gives; 0: unknown.
        in_flight: micro-batches.
        compute_s: of a micro-batch, both ways; None: unknown. hop_s: to the next stage and back.
    """

    stage: Count
    peers: list[str]
    names: list[str]
    start: Count
    stop: Count
    weights_bytes: Count
    need_bytes: Count
    limit_bytes: Count = 0
    in_flight: Count = 1
    compute_s: Amount | None = None
    hop_s: Amount | None = None

    def check(self) -> None:
        if not self.start < self.stop:
            raise ProtocolError(f"a stage of layers [{self.start}, {self.stop})")


@dataclass(frozen=True, slots=True)
class TrainingPlanInfo(Record):
    """A plan for the training of a split model.

    Attributes:
        stages, replicas, micro_batches: of a step, of all replicas.
        schedule: its name.
        bubble, efficiency: 0 to 1, of a step without what follows. None, as all that follows, where no speed is known.
        step_s, reduce_s: of a step; and, of that, what summing gradients takes.
        tokens_per_s: of all replicas.
        spares: names of the workers that have no place in it.
    """

    stages: Count
    replicas: Count
    micro_batches: Count
    schedule: str
    bubble: Amount | None = None
    efficiency: Amount | None = None
    step_s: Amount | None = None
    reduce_s: Amount | None = None
    tokens_per_s: Amount | None = None
    spares: list[str] = dataclasses.field(default_factory=list)


PHASES = ("detect", "agree", "form", "transfer", "commit")
"""Of a recovery, in order (``ring.recovery``)."""


@dataclass(frozen=True, slots=True)
class RecoveryInfo(Record):
    """One interruption of a job, from the last commit before it to the first one after it.

    Attributes:
        number: grows by one per interruption of the job.
        wall: when the seed first heard of it, Unix seconds.
        kind: ``lost``, ``left``, ``broken`` (a link, or nobody knows), ``held`` (stopped by the seed: a newcomer, a
            restore), ``done``, ``failed``. text: the first word of it. peer_id: whom it is about, empty for nobody.
        generation, step, members: of the view that ended it: the step that it began with, and how many it has.
        attempts: views that it took.
        detect_s ... commit_s: how long each phase took; None for what is not known, or did not happen (transfer).
        total_s: all of it.
        fetched_bytes, sources: what members fetched in it, and the most that one fetched from; 0 where it is not known.
    """

    job: str
    number: int
    wall: float
    kind: str
    text: str
    peer_id: str
    generation: int
    step: int
    members: int
    attempts: int
    detect_s: float | None
    agree_s: float | None
    form_s: float | None
    transfer_s: float | None
    commit_s: float | None
    total_s: float
    fetched_bytes: int = 0
    sources: int = 0

    def phases(self) -> list[tuple[str, float]]:
        """Name and seconds of each phase that is known, in order; none is negative."""
        found = [(name, _figure(getattr(self, f"{name}_s"))) for name in PHASES]
        return [(name, seconds) for name, seconds in found if seconds is not None]


def percentile(values: Iterable[float], part: float) -> float | None:
    """The least of the values that ``part`` of them do not exceed (nearest rank); None where there is none."""
    ordered = sorted(value for value in values if math.isfinite(value))
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)] if ordered else None


def recovery_spread(recoveries: Sequence[RecoveryInfo]) -> dict[str, tuple[float, float]]:
    """Phase, and ``total`` → (median, 99th percentile) in seconds, of those in which it is known."""
    spread: dict[str, tuple[float, float]] = {}
    for name in (*PHASES, "total"):
        values = [value for item in recoveries if (value := _figure(getattr(item, f"{name}_s"))) is not None]
        middle, high = percentile(values, 0.5), percentile(values, 0.99)
        if middle is not None and high is not None:
            spread[name] = (middle, high)
    return spread


# ---------------------------------------------------------------------------------------------------------- the ledger


@dataclass(frozen=True, slots=True)
class LedgerHead(Record):
    """How far a ledger goes: rows of steps ``base_step + 1`` to ``step`` are there, and lead from the one lineage to
    the other."""

    base_step: Count
    base_lineage: Lineage
    step: Count
    lineage: Lineage


@dataclass(frozen=True, slots=True)
class LedgerRun(Record):
    """Consecutive steps with the same generation and shares.

    Attributes:
        first: the first step. counts: micro-batches of each member, in rank order.
        digests: of the reduced bytes of each step, 16 bytes in hex, one behind the other.
    """

    first: Annotated[int, Bound(1, 2**53)]
    generation: Annotated[int, Bound(1, 2**53)]
    counts: Annotated[list[Annotated[int, Bound(0, 2**32 - 1)]], Bound(1, 4096)]
    digests: Annotated[str, Bound(pattern="([0-9a-f]{32})+")]

    def rows(self) -> list[LedgerRow]:
        counts, digests = struct.pack(f"!{len(self.counts)}I", *self.counts), bytes.fromhex(self.digests)
        return [
            LedgerRow(self.first + number, self.generation, digests[16 * number : 16 * number + 16], counts)
            for number in range(len(digests) // 16)
        ]


@dataclass(frozen=True, slots=True)
class LedgerPage(Record):
    """A part of a job's ledger. ``windows``: training sequences in the corpus; 0: not known."""

    head: LedgerHead | None
    runs: list[LedgerRun]
    windows: Annotated[int, Bound(0, 2**40)]


@dataclass(frozen=True, slots=True)
class ViewBegan(Record):
    """A view, as far as an audit needs it. ``members``: peer ids in rank order."""

    generation: Annotated[int, Bound(1, 2**53)]
    step: Count
    lineage: Lineage
    members: list[str]


# ------------------------------------------------------------------------------------------------------------- tickets


@dataclass(frozen=True, slots=True)
class TicketInfo(Record):
    """A ticket without its secret. ``uses``, ``expires_at``: None where there is no end."""

    id: str
    role: str
    state: str
    kind: str | None
    host: str
    created_at: float
    expires_at: float | None
    uses: int | None
    used: int
