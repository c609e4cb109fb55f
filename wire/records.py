"""Records about the cluster that the seed sends, shared by its store, the command line and the TUI.

Every record is a ``wire.schema.Record``, checked by its annotations. None means unknown.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Iterable, Sequence
from typing import Annotated

from p2ptrain.core.errors import ProtocolError
from wire.chain_messages import HeldPart
from wire.job_messages import MAX_WINDOWS, LedgerRow, SettingChange
from wire.messages import GpuInfo
from wire.schema import Amount, Bound, Count, Lineage, Port, Record, Share
from wire.text_messages import ServingFacts


def _figure(value: float | None) -> float | None:
    return float(value) if value is not None and math.isfinite(value) and value >= 0 else None


class ClusterInfo(Record):
    """The seed itself. ``started_at`` is in Unix seconds. ``policy``: by which the pool gives workers their tasks.
    ``moves``: of workers from one task to another so far. ``http``: address of its HTTP server; empty: it has none."""

    cluster_id: str
    name: str
    version: str
    address: str
    started_at: float
    peers: int
    jobs: int
    policy: str = ""
    moves: Count = 0
    http: str = ""


ABSENT_STATES = frozenset({"failed", "leaving", "away", "lost", "left", "evicted"})
"""States of peers that can be given no work."""


class PeerInfo(Record):
    """One peer, as the seed sees it now.

    Attributes:
        state: ``joining``, ``idle``, ``building``, ``waiting``, ``following``, ``healing``, ``training``, ``held``,
            ``paused`` (its job is), ``failed``, ``leaving``, ``away`` (only its link to the seed is lost: its ring may
            run), ``lost``, ``left``, ``evicted``; ``serving``: an active verifier or drafter, or a worker with
            parts of a served model; ``drafting``: a worker that drafts.
        in_bps, out_bps: bits per second over the ring.
        gpu_load, gpus: the load of the first GPU of its machine, from 0 to 1; all of its GPUs.
        rank: position in its job's ring; None outside a ring.
        share: micro-batches that it computed of the newest step.
        stage, stages: index of the part of a split model that it holds, and number of parts; None and 1 without one.
        fetched_bytes: what it fetched outside the ring (``Report``); 0 for nothing.
        model, sessions: of a verifier or a drafter: the models that it serves, and the number of open sessions.
        accepted, refused: with strategy 'server': gradients of this worker that became part of a version, and others.
        staleness, most_staleness: of those accepted: the mean and the maximum, in versions.
        group: of a process in a process group of torch: the group's script and id.
        sent_bytes: all that its process sent to other members for its jobs, without states that others fetched.
        router: where the seed sees a peer that it cannot dial, which others reach over circuits; empty: it can.
        ways: as ``Heartbeat.ways``.
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
    gpus: list[GpuInfo] = dataclasses.field(default_factory=list)
    job: str = ""
    rank: int | None = None
    generation: int = 0
    step: int = 0
    share: int = 0
    fetched_bytes: int = 0
    stage: int | None = None
    stages: int = 1
    model: str = ""
    sessions: int = 0
    accepted: int = 0
    refused: int = 0
    staleness: float = 0.0
    most_staleness: int = 0
    group: str = ""
    flops: Annotated[int, Bound(0, 10**18)] = 0
    part_bytes: Count = 0
    cores: Count = 0
    threads: Count = 0
    sent_bytes: Count = 0
    router: str = ""
    ways: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def place(self) -> str:
        """Where it is, for people."""
        return f"behind a router at {self.router}" if self.router else self.address


def ways_text(peers: Sequence[PeerInfo]) -> str:
    """The way of each open circuit: ``a → b relayed by c, b → d punched``; empty if there is none."""
    names = {peer.id: peer.name for peer in peers}
    circuits = [(peer.name, names.get(target, target), way) for peer in peers for target, way in peer.ways.items()]
    return ", ".join(f"{origin} → {target} {way}" for origin, target, way in circuits)


FINISHED_STATES = frozenset({"done", "cancelled", "failed"})
"""States of a job that does not go on by itself."""


FAR = 3.0
"""From this distance on a member's vectors are suspicious. Those of honest members are about equally far from the
aggregate, unless their texts differ much."""


class MemberScore(Record):
    """What a job's robust rule made of one member's vectors, as rank 0 reports it.

    Attributes:
        peer: id of the member.
        steps: in how many its vector was given to the rule since it came to the present view. excluded: in how many of
            these the rule left it out.
        distance: of its vector to the aggregate, over the median of the members' distances: the mean of the last ones
            that were measured; None before the first one.
    """

    peer: str
    steps: int = 0
    excluded: int = 0
    distance: float | None = None

    @property
    def is_far(self) -> bool:
        return self.distance is not None and self.distance > FAR

    def __str__(self) -> str:
        far = "" if self.distance is None else f", {self.distance:.1f} times as far as usual"
        return f"left out of {self.excluded} of {self.steps} steps{far}"


class JobInfo(Record):
    """One job.

    Attributes:
        state: ``queued`` (another job runs), ``waiting`` (for its first members), ``forming``, ``running``, ``paused``,
            ``saving`` (all steps are done, and their result is on no disk yet), ``done``, ``cancelled``, ``failed``.
        members: peer ids in rank order.
        edge_ms, edge_bps: latency (one way) and bandwidth from each member to its right neighbour; empty: all unknown.
        streams, codec: how gradients travel in the present view (``ring.view.View``); 0 and empty without a view.
        stages: parts that the model is split into, each held by another member; 1: it is not split.
        cuts: first layer of the second and each later part; empty: chosen by the workers' speed and memory.
        trained_s: time of all committed steps, without the time in which the job waited.
        scores: if the job has a robust rule: of the members of its last view, in rank order.
        reason: why the job is in this state, for display.
        changes: of its settings, in the order in which they were asked for.
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
    trained_s: float = 0.0
    reason: str = ""
    edge_ms: list[float | None] = dataclasses.field(default_factory=list)
    edge_bps: list[float | None] = dataclasses.field(default_factory=list)
    streams: int = 0
    codec: str = ""
    stages: int = 1
    cuts: list[int] = dataclasses.field(default_factory=list)
    epsilon: float | None = None
    delta: float | None = None
    scores: list[MemberScore] = dataclasses.field(default_factory=list)
    changes: list[SettingChange] = dataclasses.field(default_factory=list)

    def edges(self) -> list[tuple[float | None, float | None]]:
        """Latency (ms) and bandwidth (bit/s) from each member to its right neighbour; empty if they are invalid."""
        if not len(self.edge_ms) == len(self.edge_bps) == len(self.members):
            return []
        return [
            (_figure(latency_ms), _figure(rate_bps))
            for latency_ms, rate_bps in zip(self.edge_ms, self.edge_bps, strict=True)
        ]

    def slowest_edge(self) -> int | None:
        """Rank whose link to the right has the least bandwidth, then the most latency; None if none is measured."""
        known = [
            (rate_bps if rate_bps is not None else math.inf, -latency_ms, rank)
            for rank, (latency_ms, rate_bps) in enumerate(self.edges())
            if latency_ms is not None
        ]
        return min(known)[2] if known else None

    def suspects(self) -> list[MemberScore]:
        """The members whose vectors a robust rule trusts least: the farthest first, then the most often left out."""
        return sorted(self.scores, key=lambda score: (-(score.distance or 0), -score.excluded))[:8]


class MetricRow(Record):
    """One committed step of a job. Times are rank 0's. ``epsilon``, ``delta``: the privacy that the job has spent."""

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
    epsilon: float | None = None
    delta: float | None = None


class EventInfo(Record):
    """One entry of the event log. ``id`` grows by one per event."""

    id: int
    wall: float
    level: str
    kind: str
    text: str
    peer: str = ""
    job: str = ""


class CheckpointInfo(Record):
    """One durable checkpoint and its place.

    Attributes:
        id: ``<job>@<step>@<peer>``; ``@part<n>`` follows if it has only part n of a split model.
        stage: of a split model: the stage whose files it has; None: it has the whole model's.
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


class PartInfo(HeldPart, Record, kw_only=True):
    """One part of a model (layers [start, stop) of ``layers``) and its worker. ``id`` is ``<peer>/<part>``.

    Attributes:
        model: for a part in training, its job's id.
        peer, peer_name: the worker that holds it.
    """

    id: str
    peer: str
    peer_name: str
    busy: Share = 0.0

    @property
    def used_bytes(self) -> int:
        return self.weights_bytes + self.cache_bytes


class ServingInfo(ServingFacts, Record, kw_only=True):
    """One model that a verifier or a drafter serves. ``id``: the peer's id, a slash and the model's name.

    Attributes:
        peer, name: id and name of the verifier or drafter.
        role: ``verifier`` or ``drafter``.
        host, port: its address as the seed sees it; a loopback address means the seed's machine.
    """

    id: str
    peer: str
    name: str
    role: str
    host: str
    port: Port


class StagePlanInfo(Record):
    """One stage of a plan for training a split model (``ring.planning.pipeline``).

    Attributes:
        peers, names: the workers that hold it, one per replica.
        start, stop: layers [start, stop).
        weights_bytes, need_bytes: of its weights, and of all that training needs.
        limit_bytes: smallest memory limit among its workers; 0 if unknown.
        in_flight: micro-batches in flight.
        compute_s: forward and backward pass of a micro-batch; None if unknown.
        hop_s: to the next stage and back.
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
            raise ProtocolError(f"invalid stage: layers [{self.start}, {self.stop})")


class LinkInfo(Record):
    """A measured link from one peer to another. ``bandwidth_bps``: None if it is unknown."""

    source: str
    target: str
    latency_s: Amount
    bandwidth_bps: Amount | None = None


class TrainingPlanInfo(Record):
    """A plan for training a split model. Times, shares and rates are None without known speeds.

    Attributes:
        micro_batches: of a step, of all replicas.
        bubble: share of the stages' time, without ``reduce_s``, in which they wait.
        efficiency: share of the busiest stage's time in which it computes.
        step_s, reduce_s: duration of a step, and of its gradient reduction.
        tokens_per_s: of all replicas.
        spares: names of the workers without a place in the plan.
    """

    stages: Count
    replicas: Count
    micro_batches: Count
    bubble: Amount | None = None
    efficiency: Amount | None = None
    step_s: Amount | None = None
    reduce_s: Amount | None = None
    tokens_per_s: Amount | None = None
    spares: list[str] = dataclasses.field(default_factory=list)


PHASES = ("detect", "agree", "form", "transfer", "commit")
"""Phases of a recovery, in order (``ring.recovery``)."""


class RecoveryInfo(Record):
    """One interruption of a job, from the last commit before it to the first one after it.

    Attributes:
        number: grows by one per interruption of the job.
        wall: Unix seconds at which the seed first learned of it.
        kind: ``lost``, ``left``, ``broken`` (a link, or the cause is unknown), ``held`` (stopped by the seed: a
            newcomer, a restore), ``done``, ``failed``.
        text: the first report of it.
        peer_id: the peer concerned; empty for none.
        generation, step, members: of the view that ended it: its number, first step and number of members.
        attempts: views that it took.
        detect_s, agree_s, form_s, transfer_s, commit_s: duration of each phase; None if unknown, or without a transfer.
        fetched_bytes, sources: bytes that members fetched, and the most sources of one member; 0 if unknown.
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
        """Name and seconds of each known phase, in order; none is negative."""
        found = [(name, _figure(getattr(self, f"{name}_s"))) for name in PHASES]
        return [(name, seconds) for name, seconds in found if seconds is not None]


def percentile(values: Iterable[float], part: float) -> float | None:
    """Nearest-rank percentile, ``part`` from 0 to 1, of the finite values; None without any."""
    ordered = sorted(value for value in values if math.isfinite(value))
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)] if ordered else None


def recovery_spread(recoveries: Sequence[RecoveryInfo]) -> dict[str, tuple[float, float]]:
    """Map each phase and ``total`` to (median, 99th percentile) in seconds, over the recoveries that know it."""
    spread: dict[str, tuple[float, float]] = {}
    for name in (*PHASES, "total"):
        values = [value for item in recoveries if (value := _figure(getattr(item, f"{name}_s"))) is not None]
        middle, high = percentile(values, 0.5), percentile(values, 0.99)
        if middle is not None and high is not None:
            spread[name] = (middle, high)
    return spread


# ---------------------------------------------------------------------------------------------------------- the ledger


class LedgerHead(Record):
    """The extent of a ledger: rows of steps ``base_step + 1`` to ``step``, and the lineages before and after them."""

    base_step: Count
    base_lineage: Lineage
    step: Count
    lineage: Lineage


class LedgerRun(Record):
    """Consecutive steps with the same generation and shares.

    Attributes:
        first: the first step.
        counts: micro-batches of each member, in rank order.
        digests: of the reduced bytes of each step, 16 bytes in hex each, concatenated.
        made_of: of all steps, as long for each; in hex, concatenated.
    """

    first: Annotated[int, Bound(1, 2**53)]
    generation: Annotated[int, Bound(1, 2**53)]
    counts: Annotated[list[Annotated[int, Bound(0, 2**32 - 1)]], Bound(1, 4096)]
    digests: Annotated[str, Bound(pattern="([0-9a-f]{32})+")]
    made_of: Annotated[str, Bound(pattern="([0-9a-f]{2})*")] = ""

    def rows(self) -> list[LedgerRow]:
        counts, digests = struct.pack(f"!{len(self.counts)}I", *self.counts), bytes.fromhex(self.digests)
        made_of, found = bytes.fromhex(self.made_of), list[LedgerRow]()
        size = len(made_of) // (len(digests) // 16)
        for number in range(len(digests) // 16):
            digest, made = digests[16 * number : 16 * number + 16], made_of[size * number : size * number + size]
            found.append(LedgerRow(self.first + number, self.generation, digest, counts, made))
        return found


RUN_BYTES = 16 << 10
"""Limit of a run's ``made_of``, so that it fits into a control frame."""


def runs_of(rows: Iterable[LedgerRow]) -> list[LedgerRun]:
    found: list[list[LedgerRow]] = []
    for row in rows:
        last = found[-1][-1] if found and (len(found[-1]) + 1) * len(row.made_of) <= RUN_BYTES else None
        if last and (last.step + 1, last.generation, last.counts) == (row.step, row.generation, row.counts):
            found[-1].append(row)
        else:
            found.append([row])
    return [
        LedgerRun(
            run[0].step,
            run[0].generation,
            list(struct.unpack(f"!{len(run[0].counts) // 4}I", run[0].counts)),
            b"".join(row.digest for row in run).hex(),
            b"".join(row.made_of for row in run).hex(),
        )
        for run in found
    ]


class LedgerPage(Record):
    """A part of a job's ledger. ``windows``: training sequences in the corpus; 0 if unknown."""

    head: LedgerHead | None
    runs: list[LedgerRun]
    windows: Annotated[int, Bound(0, MAX_WINDOWS)] = 0


class ViewBegan(Record):
    """The fields of a view that an audit needs.

    Attributes:
        members: peer ids in rank order.
        stages: parts of the model in this view; 0: as many as the job has now.
    """

    generation: Annotated[int, Bound(1, 2**53)]
    step: Count
    lineage: Lineage
    members: list[str]
    stages: Count = 0


# ------------------------------------------------------------------------------------------------------------- tickets


class TicketInfo(Record):
    """A ticket without its secret. ``uses``, ``expires_at``: None for no limit."""

    id: str
    role: str
    state: str
    kind: str | None
    host: str
    created_at: float
    expires_at: float | None
    uses: int | None
    used: int


TOPICS: dict[str, type[Record]] = {
    "cluster": ClusterInfo,
    "peers": PeerInfo,
    "jobs": JobInfo,
    "metrics": MetricRow,
    "events": EventInfo,
    "checkpoints": CheckpointInfo,
    "recoveries": RecoveryInfo,
    "parts": PartInfo,
    "serving": ServingInfo,
}
"""Topic of an ``Update`` → its records."""
