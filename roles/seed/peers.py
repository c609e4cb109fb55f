"""The peers as the seed knows them: control links, heartbeats, the requests that they answer, and what they serve.

A peer reports the parts of models that it holds, or the model that it serves, over every new link and after every
change. The seed keeps that in memory only, and forgets it when the link ends.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from p2ptrain.core.errors import ConnectionLost, ProtocolError
from p2ptrain.core.ids import is_id
from p2ptrain.core.plugins import MOST_OFFERED, OFFER
from p2ptrain.core.texts import printable
from ring.coordination import STATUSES, JobWorker
from ring.detector import FailureDetector, beat_defaults
from ring.token import is_lineage
from roles.circuits import MADE, OPEN
from roles.member import allowed_kinds
from wire.chain_messages import PartsHeld
from wire.circuits import peer_of_host
from wire.client import PendingCalls
from wire.connection import Connection
from wire.enrol import RENEW
from wire.job_messages import CheckpointSaved, MemberRecord, Report, StepMetrics
from wire.messages import EventNotice, Heartbeat, Hello, Message
from wire.records import PartInfo, ServingInfo
from wire.text_messages import MAX_DRAFTERS, MODEL_CHARS, MOST_MODELS, DrafterAddress, DrafterList, Serving

NAME_CHARS = 64
REASON_BYTES = 480
"""Limit of a report's reason: the cause and the remedy of a failed job."""
TEXT_BYTES = 1000
"""Limit of an event's text."""
MAX_WHOLE = 2**53
"""Largest whole number accepted from a peer; the least is 0. SQLite, msgpack and JSON viewers can all hold it."""
SPEED = "compute_flops"
"""Key in a heartbeat's stats: floating-point operations per second, measured by the worker."""
GAUGES = "gauges"
"""Capability in a ``Hello``: the worker will measure ``SPEED``."""


class Reach(NamedTuple):
    """How the seed reaches a peer: ``host`` for others to dial, and the round trip. ``unreached``: why others dial a
    circuit; empty: the seed has dialled it."""

    host: str
    rtt_ms: float
    unreached: str


@dataclass(slots=True, eq=False)
class ConnectedPeer:
    """A peer that the seed has admitted, and its control connection.

    Attributes:
        job: id of the job that it is assigned to; empty while it is free.
        task: another task that it has in the pool (``roles.seed.pool``); empty without one.
        last_job: id of its job before. Reports that the peer stored without a connection arrive late.
        rows: steps of its job of which it has ledger rows, as last reported; None before its first report.
        newest_fetch: its newest report with status ``following``; None before the first.
        lost_at: monotonic time at which it was lost; None while it is connected. end: then ``lost``, ``left`` or
            ``evicted``.
        speed_reported: set once it has reported its speed, or is lost.
        serving: what a verifier or a drafter serves, by the model's name, in the order of its reports.
        role: of a process in a process group of torch ``group member``: it takes no job, so it is no worker here.
        idle_reason: the last notice sent to it of why no job has it; empty if one has.
    """

    connection: Connection
    hello: Hello
    host: str
    port: int
    rtt_ms: float
    joined_at: float
    detector: FailureDetector
    job: str = ""
    task: str = ""
    last_job: str = ""
    lost_at: float | None = None
    end: str = "lost"
    heartbeat: Heartbeat | None = None
    rows: range | None = None
    newest_fetch: Report | None = None
    calls: PendingCalls = field(default_factory=PendingCalls)
    speed_reported: asyncio.Event = field(default_factory=asyncio.Event)
    serving: dict[str, ServingInfo] = field(default_factory=dict)
    parts: dict[str, PartInfo] = field(default_factory=dict)
    idle_reason: str = ""
    is_leaving: bool = False
    name: str = field(init=False)
    group: str = field(init=False)
    role: str = field(init=False)

    @property
    def id(self) -> str:
        return self.hello.peer_id

    @property
    def origin(self) -> str:
        """The address at which it says it is, or from which it dialled the seed: perhaps that of a router."""
        return self.hello.host or str(self.connection.ends.remote[0])

    @property
    def is_dialled(self) -> bool:
        """Whether others dial it. If not, they reach it over circuits."""
        return not peer_of_host(self.host)

    @property
    def trains(self) -> bool:
        return self.role == "worker"

    @property
    def allowed(self) -> frozenset[str]:
        return allowed_kinds(self.hello.capabilities)

    @property
    def draft_tokenizer(self) -> str:
        """Digest of the tokenizer of a worker's draft model; empty: it has none."""
        return str(self.hello.capabilities.get("draft_tokenizer", ""))

    @property
    def weight(self) -> float:
        """How much a verifier's models matter beside jobs (``job.weight``)."""
        weight = self.hello.capabilities.get("weight", 1.0)
        return min(max(weight, 1e-3), 1e3) if isinstance(weight, float) and math.isfinite(weight) else 1.0

    def release(self) -> None:
        self.last_job, self.job, self.rows = self.job, "", None

    def __post_init__(self) -> None:
        self.name = self.hello.name[:NAME_CHARS] or self.id
        self.group = clip(str(self.hello.capabilities.get("group", "")), NAME_CHARS)
        self.role = "group member" if self.group else self.hello.roles[0]

    @property
    def offer(self) -> JobWorker:
        capabilities = self.hello.capabilities
        return JobWorker(
            self.id,
            self.name,
            self.host,
            self.port,
            memory_bytes=whole(capabilities.get("parts_memory_bytes")),
            flops=self.flops,
            on_host=not str(capabilities.get("device", "")).startswith(("cuda", "mps")),
        )

    @property
    def flops(self) -> float | None:
        """Its reported speed, in floating-point operations per second; 0: not measured, None: not measured yet."""
        speed = self.heartbeat.stats.get(SPEED) if self.heartbeat else None
        if speed is None:
            return None if self.hello.capabilities.get(GAUGES) is True else 0.0
        return float(whole(speed, 10**18))

    def take_heartbeat(self, heartbeat: Heartbeat) -> bool:
        """Take in a heartbeat. Returns whether ``flops`` changed."""
        known, self.heartbeat = self.flops, heartbeat
        if self.flops is not None and SPEED in heartbeat.stats:
            self.speed_reported.set()
        return self.flops != known

    def send(self, message: Message) -> None:
        send_if_open(self.connection, message)

    async def ask(self, method: str, params: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
        """Send a request and await the answer. Raises ``Refused``, ``DeadlineExceeded`` or ``ConnectionLost``."""
        return await self.calls.ask(self.connection.send, method, params, whom=self.name, timeout_s=timeout_s)

    def lost(self, now: float, end: str) -> None:
        self.lost_at, self.end, self.job, self.task = now, end, "", ""
        self.speed_reported.set()
        self.calls.fail_all(self.name)


class PeerTable:
    """The connected peers, and those lost within the last minute, which people still see. Both: peer id → peer."""

    def __init__(self) -> None:
        self.connected: dict[str, ConnectedPeer] = {}
        self.lost: dict[str, ConnectedPeer] = {}

    def is_current(self, peer: ConnectedPeer) -> bool:
        """Whether this is still the peer's connection."""
        return self.connected.get(peer.id) is peer

    def of_job(self, job: str) -> list[ConnectedPeer]:
        return [peer for peer in self.connected.values() if peer.job == job]

    def in_job(self, peer_id: str, job: str) -> ConnectedPeer | None:
        peer = self.connected.get(peer_id)
        return peer if peer is not None and peer.job == job else None

    def add(self, peer: ConnectedPeer) -> None:
        """Add a peer, or its new connection. Of two peers of one name, such as that of a cloned machine, the later one
        has the beginning of its id behind it, so that people can tell them apart."""
        if any(other.name == peer.name and other.id != peer.id for other in self.connected.values()):
            peer.name = f"{peer.name[: NAME_CHARS - 5]}-{peer.id[:4]}"
        self.lost.pop(peer.id, None)
        self.connected[peer.id] = peer

    def remove(self, peer: ConnectedPeer, now: float, end: str) -> None:
        del self.connected[peer.id]
        peer.lost(now, end)
        self.lost[peer.id] = peer


BEATS_PER_S = 200
"""Heartbeats of all peers together that the seed reads in a second: about 4 % of a core."""


def seed_beats(rtt_ms: float, peers: int) -> tuple[float, float]:
    """(heartbeat_s, death_s) between the seed and a peer, of ``peers`` in all. The more there are, the longer: the
    neighbours of a member notice its death themselves."""
    heartbeat_s, death_s = beat_defaults(rtt_ms)
    heartbeat_s = max(heartbeat_s, peers / BEATS_PER_S)
    return heartbeat_s, max(death_s, 3 * heartbeat_s)


def ring_beats(rtts_ms: Sequence[float], latencies_s: Sequence[float | None]) -> tuple[float, float]:
    """(heartbeat_s, death_s) between the neighbours of a ring: those that fit the member farthest from the seed.

    The seed timed a single handshake with each member, perhaps while the member imported torch. If the members have
    measured all links of the ring, and these give a smaller value, that one is used.

    ``latencies_s``: one way, from each member to its right neighbour.
    """
    if not rtts_ms:
        return 0.0, 0.0
    usual = beat_defaults(max(rtts_ms))
    known = [latency_s for latency_s in latencies_s if latency_s is not None]
    if not known or len(known) < len(latencies_s):
        return usual
    return min(usual, beat_defaults(2e3 * max(known)))


def addresses_of(peers: Iterable[JobWorker]) -> list[MemberRecord]:
    return [MemberRecord(peer.peer_id, peer.name, peer.host, peer.port, 0, 0, True) for peer in peers]


def check_hello(hello: Hello) -> None:
    """Raise ``ProtocolError`` if the peer id, the host, the port or the offered plugins are invalid."""
    if not is_id(hello.peer_id):
        raise ProtocolError(f"invalid peer id {hello.peer_id[:40]!r}")
    if not hello.port or len(hello.host) > 255:
        raise ProtocolError(f"invalid port {hello.port}, or invalid host of {len(hello.host)} characters")
    if OFFER.fullmatch(str(hello.capabilities.get("plugins", ""))) is None:
        raise ProtocolError(f"more than {MOST_OFFERED} plugins, or a wrong name of one")


def check_step(message: StepMetrics | CheckpointSaved, steps_total: int) -> None:
    """Raise ``ProtocolError`` if the job has no such step."""
    if message.step > steps_total:
        raise ProtocolError(f"{type(message).__name__} of step {message.step}, but the job has {steps_total} steps")


def clean_report(report: Report, steps_total: int) -> Report:
    """The report with its reason as one line for people. Raises ``ProtocolError`` if the report is invalid."""
    if report.status not in STATUSES:
        raise ProtocolError(f"a report with the unknown status {report.status[:40]!r}")
    if report.applied > steps_total or report.prepared not in (report.applied, report.applied + 1):
        raise ProtocolError(f"a report with invalid steps: {report.applied} applied, {report.prepared} prepared")
    nothing_loaded = report.status == "failed" and not report.lineage
    prepared = is_lineage(report.prepared_lineage) if report.prepared > report.applied else not report.prepared_lineage
    if not (nothing_loaded or is_lineage(report.lineage)) or not prepared:
        raise ProtocolError("a report with an invalid lineage")
    reason, unsaved = clip(report.reason, REASON_BYTES), clip(report.unsaved, REASON_BYTES)
    return dataclasses.replace(report, reason=reason, unsaved=unsaved)


def clip(text: str, limit_bytes: int = TEXT_BYTES) -> str:
    line = " ".join("".join(char if char.isprintable() else " " for char in text[: 4 * limit_bytes]).split())
    raw = line.encode(errors="replace")
    return raw.decode() if len(raw) <= limit_bytes else raw[: limit_bytes - 3].decode(errors="ignore") + "…"


def whole(value: object, most: int = MAX_WHOLE) -> int:
    """A worker's measurement as a whole number from 0 to ``most``; 0 if it is missing or not finite."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return 0
    return int(min(max(value, 0), most))


def send_if_open(connection: Connection, message: Message) -> None:
    with suppress(ConnectionLost):
        connection.send(message)


def part_infos_of(peer_id: str, peer_name: str, message: PartsHeld) -> dict[str, PartInfo]:
    """The records of the parts that a worker reported, by their ids."""
    infos = {}
    for part in message.parts:
        shown = {
            "name": clip(part.name, NAME_CHARS) or part.model[:12],
            "dtype": clip(part.dtype, 16),
            "busy": min(part.busy, 1.0),  # the worker's clock may give a little more than 1
        }
        part_id = f"{peer_id}/{part.part}"
        infos[part_id] = PartInfo(id=part_id, peer=peer_id, peer_name=peer_name, **asdict(part) | shown)
    return infos


EVERY_PEER_ASKS = frozenset({RENEW, OPEN, MADE})
"""Requests of all peers over their links: to renew the certificate, and for circuits."""
_LISTS = frozenset({"workers.list", "peers.list", "parts.list", "checkpoints.list", "serving.list"})
ASKED_BY = {"verifier": EVERY_PEER_ASKS | _LISTS}
"""Role → its requests. A verifier may look for workers as an operator does, but change nothing."""


class Services:
    """What verifiers and drafters serve. Each peer's records are in ``ConnectedPeer.serving``. ``touch`` is called with
    the ids of records that are new, changed or gone."""

    def __init__(self, peers: Mapping[str, ConnectedPeer], touch: Callable[[str], None]) -> None:
        self._peers, self._touch = peers, touch

    def reported(self, peer: ConnectedPeer, message: Serving) -> None:
        """Store a peer's report of one model. Raises ``ProtocolError`` if the model changed, or for too many models:
        that requires a new link."""
        fields = asdict(message) | {"model": printable(message.model, MODEL_CHARS), "http": clip(message.http, 255)}
        info = ServingInfo(
            id=f"{peer.id}/{fields['model']}",
            peer=peer.id,
            name=clip(peer.name, NAME_CHARS),
            role="drafter" if peer.trains else peer.role,
            host=peer.host,
            port=peer.port,
            **fields,
        )
        before = peer.serving.get(info.model)
        if info.model not in peer.serving and len(peer.serving) >= (MOST_MODELS if peer.role == "verifier" else 1):
            raise ProtocolError(f"a {peer.role} reported {len(peer.serving) + 1} models")
        if before is not None and not before.is_ready:
            before = None  # what is known of the model comes with its last byte
        if before is not None and any(getattr(before, name) != getattr(info, name) for name in _OF_THE_MODEL):
            raise ProtocolError(f"a {peer.role} changed its model {before.model!r} without a new connection")
        peer.serving[info.model] = info
        if info != before:
            self._touch(info.id)
        if before is None:
            self._warn_of_other_tokenizers(info)
            if info.role == "drafter":
                self.send_drafters(self._peers.values())

    def models(self) -> list[ServingInfo]:
        return [info for peer in self._peers.values() for info in peer.serving.values()]

    def _warn_of_other_tokenizers(self, new: ServingInfo) -> None:
        """Warn drafters whose tokenizer differs from a verifier's. That verifier does not dial them."""
        for other in self.models():
            if {other.role, new.role} != {"verifier", "drafter"}:
                continue
            verifier, drafter = (new, other) if new.role == "verifier" else (other, new)
            if verifier.tokenizer and drafter.tokenizer not in ("", verifier.tokenizer):
                text = f"{verifier.name} uses {verifier.model}, whose tokenizer differs from that of {drafter.model}"
                remedy = "that verifier requests no drafts here; use a draft model of the same family"
                self._peers[drafter.peer].send(EventNotice("warning", "other-tokenizer", f"{text}: {remedy}"))

    def lost(self, peer: ConnectedPeer) -> None:
        serving, peer.serving = peer.serving, {}
        if serving:
            self._touch(*(info.id for info in serving.values()))
            if any(info.role == "drafter" for info in serving.values()):
                self.send_drafters(self._peers.values())

    def send_drafters(self, peers: Iterable[ConnectedPeer]) -> None:
        """Send the list of drafters to the verifiers among ``peers``. If it is too long, those that joined first stay
        in it."""
        infos = [info for info in self.models() if info.role == "drafter"]
        infos = sorted(infos, key=lambda info: self._peers[info.peer].joined_at)[:MAX_DRAFTERS]
        listed = [
            DrafterAddress(info.peer, info.name, info.host, info.port, info.model, info.tokenizer,
                           self._peers[info.peer].role)
            for info in infos
        ]  # fmt: skip
        for peer in peers:
            if peer.role == "verifier":
                peer.send(DrafterList(listed))


_OF_THE_MODEL = ("vocab_size", "tokenizer", "weights")
