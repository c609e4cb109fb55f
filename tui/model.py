"""What the viewer knows: a pure store that updates feed and panels read.

Everything here is bounded, whatever a seed sends: peers, jobs, checkpoints, rows, events, and the length of every text.
Control characters are removed, so that a peer's name can neither move the cursor nor break a table. ``versions`` counts
the changes of each topic; a panel redraws when the versions of its topics have grown.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeGuard, TypeVar

from p2ptrain.core.errors import P2PTrainError, ProtocolError
from p2ptrain.core.texts import TEXT_CHARS, printable
from wire.records import (
    TOPICS,
    CheckpointInfo,
    ClusterInfo,
    EventInfo,
    JobInfo,
    MetricRow,
    PartInfo,
    PeerInfo,
    RecoveryInfo,
    ServingInfo,
)
from wire.schema import Record

MAX_RECORDS = 1024
"""Of each kind."""
MAX_FIGURES = 256
"""Figures of one serving peer."""
MAX_PACES = 600
"""Kept reports of a serving peer's tokens per second; it sends one a second."""
MAX_EVENTS = 500
MAX_SERIES = 32
MAX_ROWS = 4000
RECENT_ROWS = 512
"""The newest rows of a series are never thinned: the throughput line shows every step."""
MAX_VALIDATIONS = 1000

R = TypeVar("R", bound=Record)
_GOING = frozenset({"peers", "jobs", "checkpoints", "parts", "serving"})
"""Topics whose records have text ids, and can be removed."""
_TOPIC_OF = {kind: topic for topic, kind in TOPICS.items()}


class LinkPhase(StrEnum):
    """State of the connection to the seed."""

    CONNECTING = "connecting"
    LIVE = "live"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class SeedConnection:
    """The connection to the seed, for display. Times are those of the viewer's monotonic clock.

    Attributes:
        since: start of this phase; for ``LOST`` when the seed was last heard (or first dialled).
        retry_at: time of the next dial; None if none is scheduled.
        rtt_ms: round trip of the last request; None before the first one.
        problem, remedy: why it is not live.
    """

    phase: LinkPhase = LinkPhase.CONNECTING
    since: float = 0.0
    retry_at: float | None = None
    rtt_ms: float | None = None
    problem: str = ""
    remedy: str = ""


def _clean(record: R) -> R:
    """The record with clean texts. Raises ``ProtocolError``."""
    changes: dict[str, Any] = {}
    for entry in dataclasses.fields(record):
        value = getattr(record, entry.name)
        if isinstance(value, str) and (len(value) > TEXT_CHARS or not value.isprintable()):
            changes[entry.name] = printable(value)
        elif isinstance(value, list):
            if len(value) > MAX_RECORDS:
                raise ProtocolError(f"{type(record).__name__}.{entry.name} is not a short list")
            changes[entry.name] = [printable(part) if isinstance(part, str) else part for part in value]
        elif entry.name == "ways":
            changes[entry.name] = {target: printable(way) for target, way in [*value.items()][:MAX_RECORDS]}
    return dataclasses.replace(record, **changes) if changes else record


class Series:
    """The metric rows of one job in the order of their steps. Old rows are thinned evenly, so the curve keeps its
    shape.

    Generations never fall along the steps. A row of a newer generation at an earlier step (a job restored from a
    checkpoint) removes the rows that it invalidates.
    """

    def __init__(self) -> None:
        self.rows: list[MetricRow] = []
        self.validations: dict[int, float] = {}  # step → loss
        self._stride = 1

    def add(self, row: MetricRow) -> bool:
        """Insert ``row``; False if a newer generation already covers its step."""
        rows, generation = self.rows, row.generation or 0
        at = bisect_left(rows, row.step, key=lambda known: known.step)
        if at and (rows[at - 1].generation or 0) > generation:
            return False
        if at < len(rows) and rows[at].step == row.step and (rows[at].generation or 0) > generation:
            return False
        stop = at
        while stop < len(rows) and (rows[stop].step == row.step or (rows[stop].generation or 0) < generation):
            stop += 1
        if stop > at and rows[stop - 1].step > row.step:  # the job went back
            self.validations = {step: loss for step, loss in self.validations.items() if step <= row.step}
        rows[at:stop] = [row]
        if row.val_loss is not None:
            self.validations[row.step] = row.val_loss
            if len(self.validations) > MAX_VALIDATIONS:
                self.validations = dict(sorted(self.validations.items())[::2])
        if len(rows) > MAX_ROWS:
            self._thin()
        return True

    def _thin(self) -> None:
        """Keep every ``_stride``-th of the old rows, and double the stride until three quarters of the limit are left.
        So thinning happens once in a thousand rows. It ends, because steps are distinct."""
        old, recent = self.rows[:-RECENT_ROWS], self.rows[-RECENT_ROWS:]
        old = [row for row in old if row.step % self._stride == 0]
        while len(old) + len(recent) > MAX_ROWS * 3 // 4:
            self._stride *= 2
            old = [row for row in old if row.step % self._stride == 0]
        self.rows = old + recent

    def curve(self, column: str) -> tuple[list[int], list[float]]:
        pairs = [(row.step, value) for row in self.rows if is_finite(value := getattr(row, column))]
        return [step for step, _ in pairs], [value for _, value in pairs]

    def validation_curve(self) -> tuple[list[int], list[float]]:
        pairs = [pair for pair in sorted(self.validations.items()) if is_finite(pair[1])]
        return [step for step, _ in pairs], [value for _, value in pairs]

    def recent(self, count: int) -> Sequence[MetricRow]:
        return self.rows[-count:] if count > 0 else []


def is_finite(value: float | None) -> TypeGuard[float]:
    return value is not None and -1e300 < value < 1e300


@dataclass
class RecordStore:
    """Everything that the panels show. Only its methods change it; anyone may read it.

    Attributes:
        peer_changes: peer id → viewer's monotonic time of its last record, to which ``heartbeat_age_s`` refers.
        versions: topic → number of changes; topics as in ``wire.messages.Update``, and ``link``.
        malformed: number of refused items, which no correct seed sends.
    """

    link: SeedConnection = field(default_factory=SeedConnection)
    cluster: ClusterInfo | None = None
    peers: dict[str, PeerInfo] = field(default_factory=dict)
    peer_changes: dict[str, float] = field(default_factory=dict)
    jobs: dict[str, JobInfo] = field(default_factory=dict)
    series: dict[str, Series] = field(default_factory=dict)
    events: dict[int, EventInfo] = field(default_factory=dict)
    checkpoints: dict[str, CheckpointInfo] = field(default_factory=dict)
    recoveries: dict[tuple[str, int], RecoveryInfo] = field(default_factory=dict)
    parts: dict[str, PartInfo] = field(default_factory=dict)
    serving: dict[str, ServingInfo] = field(default_factory=dict)
    versions: Counter[str] = field(default_factory=Counter)
    malformed: int = 0
    _untold: dict[str, set[str]] = field(default_factory=dict)
    _paces: dict[str, deque[tuple[float, float]]] = field(default_factory=dict)

    # ------------------------------------------------------------------------------------------------------- updates

    def apply(self, topic: str, items: Iterable[object], now: float) -> None:
        """Apply an update. An unknown topic is ignored: the seed may be newer. Raises ``ProtocolError`` if some items
        were malformed; the others are applied."""
        kind = topic.removesuffix("-gone")
        if kind not in (TOPICS if topic == kind else _GOING):
            return
        bad: ProtocolError | None = None
        for item in items:
            try:
                if topic == kind:
                    self.take(TOPICS[topic].from_map_untrusted(item), now)
                else:
                    self._drop(kind, item)
            except ProtocolError as error:
                self.malformed += 1
                bad = error
        if bad is not None:
            self.versions["link"] += 1
            raise ProtocolError(f"a malformed item in an update of {printable(topic, 40)}: {bad.message}")

    def begin(self) -> None:
        """Expect all records anew, up to ``settle``. It removes those that were not told again."""
        self._untold = {topic: set(getattr(self, topic)) for topic in _GOING}

    def settle(self) -> None:
        for topic, removed in self._untold.items():
            self.apply(f"{topic}-gone", [{"id": id_} for id_ in removed], 0.0)
        self._untold = {}

    def set_link(self, link: SeedConnection) -> None:
        self.link = link
        self.versions["link"] += 1

    def lost(self, error: P2PTrainError, now: float, retry_at: float) -> None:
        """Note that the seed cannot be reached. ``since`` stays that of the first failure in a row."""
        since = now if self.link.phase is LinkPhase.LIVE else self.link.since
        self.set_link(
            SeedConnection(LinkPhase.LOST, since, retry_at, None, printable(error.message), printable(error.remedy))
        )

    def take(self, received: Record, now: float) -> None:
        """Keep one record. Raises ``ProtocolError`` if it is too large."""
        record: Any = _clean(received)
        topic = _TOPIC_OF[type(record)]
        self.versions[topic] += 1
        if isinstance(record, ClusterInfo):
            self._enter(record)
        elif isinstance(record, MetricRow):
            if record.job not in self.series:
                _put(self.series, record.job, Series(), MAX_SERIES)
            self.series[record.job].add(record)
        elif isinstance(record, EventInfo):
            self.events[record.id] = record
            if len(self.events) > MAX_EVENTS:
                del self.events[min(self.events)]
        elif isinstance(record, RecoveryInfo):
            _put(self.recoveries, (record.job, record.number), record, MAX_RECORDS)
        else:
            if isinstance(record, ServingInfo):
                if len(record.stats) > MAX_FIGURES:
                    raise ProtocolError(f"a serving peer sent {len(record.stats)} figures, limit {MAX_FIGURES}")
                if record.id not in self._paces:
                    _put(self._paces, record.id, deque(maxlen=MAX_PACES), MAX_RECORDS)
                self._paces[record.id].append((now, record.stats.get("tokens_per_s", 0.0)))
            _put(getattr(self, topic), record.id, record, MAX_RECORDS)
            self._untold.get(topic, set()).discard(record.id)
            if isinstance(record, PeerInfo):
                _put(self.peer_changes, record.id, now, MAX_RECORDS)

    def _enter(self, cluster: ClusterInfo) -> None:
        if self.cluster is not None and self.cluster.cluster_id != cluster.cluster_id:
            # Another cluster answers at this address: no record belongs to it.
            for topic in TOPICS.keys() - {"cluster", "metrics"}:
                getattr(self, topic).clear()
            for known in (self.peer_changes, self.series, self._paces):
                known.clear()
            self.versions.update(tuple(TOPICS))
        self.cluster = cluster

    def _drop(self, kind: str, item: object) -> None:
        if not isinstance(item, dict) or not isinstance(item.get("id"), str):
            raise ProtocolError("a removed item has no id")
        getattr(self, kind).pop(item["id"], None)
        self.versions[kind] += 1

    # ------------------------------------------------------------------------------------------------------- reading

    def paces(self, id_: str, now: float, seconds: int) -> list[float | None]:
        """Tokens per second of a serving peer for each of the last ``seconds``; shorter if they are not all known."""
        reports, found = [*self._paces.get(id_, ())], list[float | None]()
        for ago in range(seconds):
            while reports and reports[-1][0] > now - ago:
                reports.pop()
            if not reports:
                break
            found.append(reports[-1][1])
        return found[::-1]

    def way(self, origin: str, target: str) -> str:
        """The way of the circuit that one peer has dialled to another; empty: it needs none, or is not known."""
        peer = self.peers.get(origin)
        return peer.ways.get(target, "") if peer is not None else ""

    def peers_in_order(self) -> list[PeerInfo]:
        """Ring members by job and rank, then the others by name."""
        return sorted(self.peers.values(), key=lambda p: (p.rank is None, p.job, p.rank or 0, p.name, p.id))

    def jobs_in_order(self) -> list[JobInfo]:
        return sorted(self.jobs.values(), key=lambda job: (-job.created_at, job.id))

    def current_job(self) -> JobInfo | None:
        """The job to show if the user chose none: a running one, else one that waits to run, else the newest."""
        urgency = {"running": 0, "forming": 1, "saving": 2, "paused": 3, "waiting": 4, "queued": 5}
        return min(self.jobs_in_order(), key=lambda job: urgency.get(job.state, 6), default=None)

    def events_in_order(self) -> list[EventInfo]:
        return [self.events[event_id] for event_id in sorted(self.events, reverse=True)]

    def checkpoints_in_order(self, job: str = "") -> list[CheckpointInfo]:
        """The newest first; only those of ``job`` if it is given."""
        chosen = [item for item in self.checkpoints.values() if item.job == job or not job]
        return sorted(chosen, key=lambda item: (-item.created_at, item.id))

    def recoveries_in_order(self, job: str) -> list[RecoveryInfo]:
        return sorted((item for item in self.recoveries.values() if item.job == job), key=lambda item: item.number)

    def heartbeat_age_s(self, peer: PeerInfo, now: float) -> float:
        return peer.heartbeat_age_s + max(0.0, now - self.peer_changes.get(peer.id, now))


K = TypeVar("K")
V = TypeVar("V")


def _put(known: dict[K, V], key: K, value: V, limit: int) -> None:
    if key not in known and len(known) >= limit:
        del known[next(iter(known))]
    known[key] = value


def eta_s(job: JobInfo, recent: Sequence[MetricRow]) -> float | None:
    """Seconds until the last step at the pace of the recent rows; None if unknown."""
    if job.state != "running" or len(recent) < 2:
        return None
    steps, seconds = recent[-1].step - recent[0].step, recent[-1].wall - recent[0].wall
    if steps <= 0 or seconds <= 0 or not is_finite(seconds):
        return None
    return max(0, job.steps_total - job.step) * seconds / steps


def split(rows: Sequence[MetricRow]) -> dict[str, float] | None:
    """Mean milliseconds of a step by activity, over the rows that report it; None if none does."""
    sums, reports = {"compute": 0.0, "communicate": 0.0, "wait": 0.0}, 0
    for row in rows:
        times = {name: getattr(row, f"{name}_ms") for name in sums}
        known = {name: value for name, value in times.items() if value is not None}
        if known and all(map(is_finite, known.values())):
            reports += 1
            for name, value in known.items():
                sums[name] += max(0.0, value)
    return {name: total / reports for name, total in sums.items()} if sum(sums.values()) > 0 else None
