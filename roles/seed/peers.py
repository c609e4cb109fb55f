"""One peer, as the seed knows it: its control link, its last beat, and the requests that wait for its answer."""

from __future__ import annotations

import asyncio
import dataclasses
import difflib
import math
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from p2ptrain.core.errors import ConnectionLost, DeadlineExceeded, P2PTrainError, ProtocolError
from p2ptrain.core.ids import is_id
from p2ptrain.core.world import Clock
from ring.coordination import STATUSES, Peer
from ring.detector import FailureDetector, beat_defaults
from ring.order import LinkQuality
from ring.token import is_lineage
from ring.view import View
from wire.address import format_address, is_loopback
from wire.client import PendingCalls
from wire.connection import Connection, Received, last_word
from wire.handshake import RefusalCode
from wire.job_messages import CheckpointSaved, MemberRecord, Report, StepMetrics, ViewAnnounced
from wire.messages import Heartbeat, Hello, Message
from wire.records import CheckpointInfo, PeerInfo, ServingInfo

NAME_CHARS = 64
REASON_BYTES = 480
"""Of a report's reason: the cause and the remedy of a job that failed."""
TEXT_BYTES = 1000
"""Of an event's text: what happened and what to do, with a path."""
MAX_WHOLE = 2**53
"""No number that a peer sends is larger, or less than 0: SQLite, msgpack and viewers of any kind hold these."""
SPEED = "compute_flops"
"""In a beat: floating-point operations per second, as the worker has measured."""
GAUGES = "gauges"
"""In a greeting: it is going to measure that."""
_STATES = frozenset(
    (
        "joining",
        "idle",
        "building",
        "waiting",
        "healing",
        "following",
        "training",
        "held",
        "failed",
        "leaving",
        "serving",
    ),
)
"""What a worker may call its own state (``Heartbeat.state``)."""


@dataclass(slots=True, eq=False)
class Link:
    """A registered peer and its connection.

    Attributes:
        host, port: where other peers reach it.
        job: id of the job that it was given to; empty while it is free.
        last_job: the one that it was on before, here or over a link that broke: what it kept of that comes late.
        fetched: the report by which it followed a ring; None before it did.
        lost_at: monotonic time at which it was lost; None while it is here.
        told: set once it has said how fast it computes, or is gone.
        serving: of a verifier or a drafter, what it serves; None before it said so.
        early: what it said before its job was settled (``roles.seed.jobs``).
    """

    connection: Connection
    hello: Hello
    host: str
    port: int
    rtt_ms: float
    joined_at: float
    heard_at: float
    detector: FailureDetector
    job: str = ""
    last_job: str = ""
    lost_at: float | None = None
    beat: Heartbeat | None = None
    fetched: Report | None = None
    calls: PendingCalls = field(default_factory=PendingCalls)
    told: asyncio.Event = field(default_factory=asyncio.Event)
    serving: ServingInfo | None = None
    early: deque[Message] = field(default_factory=deque)

    @property
    def id(self) -> str:
        return self.hello.peer_id

    @property
    def role(self) -> str:
        return self.hello.roles[0]

    @property
    def trains(self) -> bool:
        return self.role == "worker"

    def let_go(self) -> None:
        self.last_job, self.job = self.job, ""

    @property
    def heartbeat_s(self) -> float:
        return self.detector.heartbeat_s

    @property
    def death_s(self) -> float:
        return self.detector.death_s

    @property
    def name(self) -> str:
        return self.hello.name[:NAME_CHARS] or self.id

    @property
    def peer(self) -> Peer:
        said = self.hello.capabilities
        return Peer(
            self.id,
            self.name,
            self.host,
            self.port,
            said.get("follows") is True,
            memory_bytes=_told(said.get("parts_memory_bytes"), MAX_WHOLE),
            flops=self.flops,
            on_host=not str(said.get("device", "")).startswith(("cuda", "mps")),
        )

    @property
    def flops(self) -> float | None:
        """How fast it computes, by its own word; 0 where it does not say, None where it is going to."""
        told = self.beat.stats.get(SPEED) if self.beat else None
        if told is None:
            return None if self.hello.capabilities.get(GAUGES) is True else 0.0
        return float(_told(told, 10**18))

    def beaten(self, beat: Heartbeat) -> bool:
        """Take in a beat. True where it is the first that tells how fast the worker computes."""
        known, self.beat = self.flops, beat
        if self.flops is not None and SPEED in beat.stats:
            self.told.set()
        return self.flops != known

    def say(self, message: Message) -> None:
        try:
            self.connection.send(message)
        except ConnectionLost:
            return

    async def receive(self, clock: Clock) -> Received:
        """Its next message. The seed looks once a beat: by how much it is late itself, it doubts itself.

        Raises:
            DeadlineExceeded: it was silent for longer than its past allows. ConnectionLost, ProtocolError: as usual.
        """
        detector = self.detector
        while True:
            now = clock.now()
            planned = min(detector.next_deadline(), now + detector.heartbeat_s)
            try:
                return await self.connection.receive(timeout_s=max(planned - now, 0.0))
            except DeadlineExceeded:
                if self.connection.close_cause is not None:
                    raise
            now = clock.now()
            detector.heard(self.connection.last_heard)
            detector.loop_late(now - planned)
            if detector.dead(now):
                raise DeadlineExceeded(f"{self.name} was silent for {detector.silent_for(now):.1f} s")

    async def ask(self, method: str, params: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
        """A request to the worker.

        Raises:
            Refused: what it answered. DeadlineExceeded, ConnectionLost: it did not.
        """
        return await self.calls.ask(self.connection.send, method, params, whom=self.name, timeout_s=timeout_s)

    def lost(self, now: float) -> None:
        self.lost_at, self.job = now, ""
        self.told.set()
        self.calls.lost(self.name)

    def info(
        self,
        now: float,
        view: View | None,
        edge: LinkQuality | None = None,
        shares: Sequence[int] = (),
        stage: int | None = None,
        stages: int = 1,
    ) -> PeerInfo:
        """What people see. ``view``: the running view of its job, None where it is in none; ``edge``: what is known of
        the way to its right neighbour; ``shares``: of the members in the newest step, in rank order; ``stage``: the
        part of a split model that it holds, of ``stages``, which computes what its replica's first one has for a
        share."""
        beat, gone = self.beat, self.lost_at is not None
        stats = {name: value for name, value in beat.stats.items() if math.isfinite(value)} if beat and not gone else {}
        rank = view.rank_of(self.id) if view else None
        head = rank - view.stage_of(rank) if view and rank is not None else None
        said = beat.state if beat else "joining"
        known = said if said in _STATES else "idle"
        state = known if not gone else "lost" if rank is None else "away"
        return PeerInfo(
            id=self.id,
            name=self.name,
            roles=list(self.hello.roles)[:8],
            device=str(self.hello.capabilities.get("device", ""))[:NAME_CHARS],
            state=state,
            address=format_address(self.host, self.port),
            joined_at=self.joined_at,
            heartbeat_age_s=now - self.heard_at,
            rtt_ms=stats.get("rtt_ms", self.rtt_ms),
            in_bps=stats.get("in_bps", 0.0),
            out_bps=stats.get("out_bps", 0.0),
            tokens_per_s=stats.get("tokens_per_s", 0.0),
            memory_bytes=whole(stats.get("memory_bytes")),
            memory_total_bytes=whole(stats.get("memory_total_bytes")),
            gpu_load=stats.get("gpu_load"),
            job=self.job,
            rank=rank,
            generation=view.generation if view and rank is not None else 0,
            step=beat.step if beat else 0,
            share=shares[head] if head is not None and head < len(shares) else 0,
            stage=stage,
            stages=stages if stage is not None else 1,
            next_ms=edge.latency_s * 1e3 if edge else None,
            next_bps=edge.bandwidth_bps if edge else None,
            fetched_bytes=self.fetched.fetched_bytes if self.fetched else 0,
            model=self.serving.model if self.serving else "",
            sessions=self.serving.sessions if self.serving else 0,
        )


def ring_beats(links: Sequence[Link], latencies_s: Sequence[float | None]) -> tuple[float, float]:
    """(heartbeat_s, death_s) between the neighbours of a ring: those of the member that is farthest from the seed.

    The seed timed one handshake with each, perhaps while it imported torch. Where the members have measured the ways
    between them, the shortest of many round trips, that counts where it is less; not where a person set the beats.

    Args:
        links: of the members that are connected. latencies_s: one way, from each member to its right neighbour.
    """
    farthest = max(links, key=lambda link: link.death_s, default=None)
    if farthest is None:
        return 0.0, 0.0
    usual = (farthest.heartbeat_s, farthest.death_s)
    known = [latency_s for latency_s in latencies_s if latency_s is not None]
    if not known or len(known) < len(latencies_s) or usual != beat_defaults(farthest.rtt_ms):
        return usual
    return min(usual, beat_defaults(2e3 * max(known)))


def announced_to(host: str, view: View) -> ViewAnnounced:
    """The view as a member at ``host`` is told it: elsewhere, a loopback address means the seed's machine."""
    return dataclasses.replace(view.to_message(), members=seen_from(host, view.members))


def seen_from(host: str, members: Iterable[MemberRecord]) -> list[MemberRecord]:
    return [dataclasses.replace(member, host=host_seen_from(host, member.host)) for member in members]


def host_seen_from(here: str, host: str) -> str:
    """The host as one at ``here`` is told it: elsewhere, a loopback address means the seed's machine, which is ""."""
    return "" if is_loopback(host) and not is_loopback(here) else host


def check_hello(hello: Hello) -> None:
    """Raise ``ProtocolError`` where a peer's introduction cannot be worked with."""
    check_numbers(hello)
    if not is_id(hello.peer_id):
        raise ProtocolError("the peer id is none")
    if not 0 < hello.port < 65536 or len(hello.host) > 255:
        raise ProtocolError(f"a peer must listen on a port of its own, {hello.port} is none")


def check_numbers(message: Message) -> None:
    """Raise ``ProtocolError`` where a whole number in a worker's message cannot be kept or shown."""
    for item in dataclasses.fields(message):
        value = getattr(message, item.name)
        if type(value) is int and not 0 <= value <= MAX_WHOLE:
            raise ProtocolError(f"{type(message).__name__}.{item.name} is {value}")


def check_step(message: StepMetrics | CheckpointSaved, steps_total: int) -> None:
    """Raise ``ProtocolError`` where a worker tells of a step that its job does not have."""
    if message.step > steps_total:
        raise ProtocolError(f"{type(message).__name__} of step {message.step}, and the job has {steps_total}")


def check_part(message: CheckpointSaved, stages: int) -> None:
    """Raise ``ProtocolError`` where it is of a part that the job's model does not have."""
    if message.stages not in (1, stages) or message.stage >= message.stages:
        raise ProtocolError(f"a checkpoint of stage {message.stage} of {message.stages}, and there are {stages}")


def checked_report(report: Report, steps_total: int) -> Report:
    """The report with its reason as a line for people. Raises ``ProtocolError`` where it says what cannot be."""
    if report.status not in STATUSES:
        raise ProtocolError(f"a report of status {report.status[:40]!r}")
    if report.applied > steps_total or report.prepared not in (report.applied, report.applied + 1):
        raise ProtocolError(f"a report of {report.applied} applied and {report.prepared} prepared steps")
    if not math.isfinite(report.square_sum):
        raise ProtocolError("a report of a norm that is not finite")
    nothing_loaded = report.status == "failed" and not report.lineage
    prepared = is_lineage(report.prepared_lineage) if report.prepared > report.applied else not report.prepared_lineage
    if not (nothing_loaded or is_lineage(report.lineage)) or not prepared:
        raise ProtocolError("a report with a lineage that is none")
    if any(len(text) > 128 for text in (report.corpus, report.suspect, report.beside, report.cause)):
        raise ProtocolError("a report with a digest or id that is none")
    return dataclasses.replace(report, reason=clipped(report.reason, REASON_BYTES))


def clipped(text: str, limit_bytes: int = TEXT_BYTES) -> str:
    line = " ".join("".join(char if char.isprintable() else " " for char in text[: 4 * limit_bytes]).split())
    raw = line.encode(errors="replace")
    return raw.decode() if len(raw) <= limit_bytes else raw[: limit_bytes - 3].decode(errors="ignore") + "…"


def did_you_mean(text: str, known: Iterable[str]) -> str:
    """What to add to a refusal of ``text``, which is none of ``known``; empty where none is like it."""
    close = difflib.get_close_matches(text, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def _told(value: object, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return 0
    return int(min(max(value, 0), most))


def whole(value: float | None) -> int:
    """What a worker measured, as a number that can be kept and shown; 0 for what is none."""
    return int(min(max(value, 0.0), MAX_WHOLE)) if value is not None and math.isfinite(value) else 0


def checkpoint_of(link: Link, message: CheckpointSaved, wall: float, *, split: bool = False) -> CheckpointInfo:
    """What a worker says is durable on its disk. ``split``: the job's model is."""
    stage = message.stage if message.stages > 1 else None
    return CheckpointInfo(
        id=f"{message.job}@{message.step}@{link.id}{'@whole' if split and stage is None else ''}",
        job=message.job,
        step=message.step,
        path=clipped(message.path, 1024),
        peer_id=link.id,
        peer_name=link.name,
        digest=message.digest[:128],
        size_bytes=message.size_bytes,
        created_at=wall,
        val_loss=message.val_loss if message.val_loss is not None and math.isfinite(message.val_loss) else None,
        stage=stage,
    )


def say_last(connection: Connection, problem: P2PTrainError) -> None:
    code = RefusalCode.PROTOCOL if isinstance(problem, ProtocolError) else RefusalCode.TOO_SLOW
    say(connection, last_word(code, problem))


def say(connection: Connection, message: Message) -> None:
    with suppress(P2PTrainError):
        connection.send(message)
