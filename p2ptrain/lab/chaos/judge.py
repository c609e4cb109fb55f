"""The schedule of faults, what a run observed, and the checks on that. Nothing here reads a clock.

A schedule depends only on its seed. It names an ``order`` of workers, and the first healthy one gets the fault. So the
schedule does not depend on the speed of the machine.

*Recovery* is the time from a fault to the next step that was committed after it. The seed sends changes at most ten
times a second, so rows of earlier commits may arrive after the fault. A row counts if it belongs to a later view. If
the fault need not end the view, a later step also counts if its row arrives more than that interval after the fault.
"""

from __future__ import annotations

import itertools
import math
import random
import shlex
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from p2ptrain.cluster.jobs import JobObserver
from p2ptrain.core.errors import UserError
from p2ptrain.core.texts import check_one_of, join_some
from roles.seed.events import INTERVAL_S
from wire.records import CheckpointInfo, EventInfo, JobInfo, MemberScore, MetricRow, PeerInfo, percentile
from wire.schema import Record

LASTS_S: dict[str, tuple[float, float]] = {
    "kill": (0.5, 3.0),
    "freeze": (0.5, 6.0),
    "cut": (0.5, 6.0),
    "slow": (2.0, 8.0),
    "corrupt": (1.0, 1.0),
    "seed": (0.2, 5.0),
    "disk": (2.0, 6.0),
}
"""Kind of fault → its shortest and longest duration in seconds; for a dead process, the time until its restart. A LAN
peer counts as dead after 2 s of silence; a shorter silence must not cost a peer its place."""
KINDS = tuple(LASTS_S)
CUTS = ("ring reset", "ring silent", "seed reset", "seed silent", "all silent")
"""Which links of a worker are cut, and how. Peers notice a reset at once. A silent link behaves like a pulled cable."""


@dataclass(frozen=True, slots=True)
class Action:
    """A planned fault.

    Attributes:
        number: 1, 2, ...
        gap_s: seconds since the previous action.
        order: numbers of the workers, in the order in which they are tried.
        lasts_s: seconds until the fault ends, or until a dead process is started again.
        rate_bps, delay_s: rate of a slow link in bytes per second, and its one-way delay.
        skip_bytes: bytes that pass before one is damaged.
    """

    number: int
    gap_s: float
    kind: str
    order: tuple[int, ...]
    lasts_s: float
    cut: str  # one of ``CUTS``
    rate_bps: float
    delay_s: float
    skip_bytes: int


def schedule(seed: int, *, workers: int, kinds: Sequence[str]) -> Iterator[Action]:
    """Yield faults without end. Every action uses the same number of random values, whatever its kind.

    Args:
        workers: number of workers; they are numbered from 1.
    """
    if not kinds:
        return
    draw = random.Random(seed).random  # noqa: S311 - a schedule, no secret

    def between(least: float, most: float) -> float:
        return least + (most - least) * draw()

    for number in itertools.count(1):
        gap_s = between(0.5, 2.0)
        kind = kinds[int(draw() * len(kinds))]
        yield Action(
            number=number,
            gap_s=gap_s,
            kind=kind,
            order=tuple(sorted(range(1, workers + 1), key=lambda _: draw())),
            lasts_s=between(*LASTS_S[kind]),
            cut=CUTS[int(draw() * len(CUTS))],
            rate_bps=1e5 * 100 ** draw(),  # from a poor uplink to a good one
            delay_s=between(0.005, 0.1),  # one way: another town to another continent
            skip_bytes=int(draw() * (1 << 20)),  # less than a step sends, so that the damage comes soon
        )


# ------------------------------------------------------------------------------------------------ what the user writes


def parse_kinds(text: str, *, tls: bool, here: Sequence[str]) -> tuple[str, ...]:
    """Parse a list of kinds of faults. An empty text means all kinds that make sense.

    Args:
        here: the kinds that this operating system supports.

    Raises:
        UserError: no kind is named, or one is unknown or not supported.
    """
    named = tuple(part.strip() for part in text.split(",") if part.strip())
    if not text.strip():  # plain TCP cannot detect a damaged byte
        return tuple(kind for kind in KINDS if kind in here and (tls or kind != "corrupt"))
    if not named:
        raise UserError(f"--kinds {text} names no fault", remedy=f"use {', '.join(KINDS)}, or only none")
    if named == ("none",):
        return ()
    for kind in named:
        check_one_of("--kinds", kind, KINDS, ", or only none")
        if kind not in here:
            raise UserError(f"this operating system does not support the fault {kind!r}", remedy="leave it out")
    return named


# ----------------------------------------------------------------------------------------------- what the seed reports


@dataclass(frozen=True, slots=True)
class ObservedStep:
    """A committed step. ``at_s``: monotonic time of its arrival here."""

    at_s: float
    step: int
    generation: int


@dataclass(frozen=True, slots=True)
class ObservedView:
    """The members of a running view. ``at_s``: monotonic time of their arrival here."""

    at_s: float
    generation: int
    members: tuple[str, ...]


class ChaosObserver(JobObserver):
    """Keeps what the seed reported of the run's only job, in order of arrival by ``clock``, in monotonic seconds.

    Attributes:
        steps: a repeated row is kept once. events: with their times.
        saved: checkpoints by id, as they were reported first.
        rtt_ms: the longest reported round trip of a worker's connection, from which the seed derives deadlines.
    """

    def __init__(self, job: str, clock: Callable[[], float]) -> None:
        super().__init__(job)
        self.steps: list[ObservedStep] = []
        self.views: list[ObservedView] = []
        self.events: list[tuple[float, EventInfo]] = []
        self.saved: dict[str, CheckpointInfo] = {}
        self.rtt_ms = 0.0
        self._clock = clock
        self._step_keys: set[tuple[int, int]] = set()
        self._last_event = 0

    def holders(self, step: int) -> set[str]:
        """Names of the workers that have saved this step."""
        return {info.peer_name for info in self.saved.values() if info.step == step}

    def take(self, record: Record) -> None:
        super().take(record)
        at_s = self._clock()
        match record:
            case JobInfo() if self.members:
                view = record.generation, self.members
                if not self.views or (self.views[-1].generation, self.views[-1].members) != view:
                    self.views.append(ObservedView(at_s, *view))
            case MetricRow():
                key = (record.step, record.generation or 0)
                if key not in self._step_keys:
                    self._step_keys.add(key)
                    self.steps.append(ObservedStep(at_s, *key))
            case EventInfo() if record.id > self._last_event:
                self._last_event = record.id
                self.events.append((at_s, record))
            case PeerInfo() if record.rtt_ms is not None:
                self.rtt_ms = max(self.rtt_ms, record.rtt_ms)
            case CheckpointInfo():
                self.saved.setdefault(record.id, record)


# ----------------------------------------------------------------------------------------------------- injected faults


@dataclass(slots=True)
class InjectedFault:
    """A fault that was injected.

    Attributes:
        at_s, until_s: monotonic start and end. The end is the repair or the restart; ``inf`` before it.
        generation, step: the newest ones that were known at the start.
        peers: names of the peers that were hit.
        excused: ids of peers that may lose their place: the peer that was hit, or for a link both of its ends.
        whole_s: when the peer that was hit was a member again.
        recovery_s: seconds to the next committed step; None if there was none.
    """

    number: int
    kind: str
    at_s: float
    generation: int
    step: int
    peers: tuple[str, ...] = ()
    excused: frozenset[str] = frozenset()
    detail: str = ""
    until_s: float = math.inf
    whole_s: float = math.inf
    recovery_s: float | None = None


@dataclass(frozen=True, slots=True)
class InvariantResult:
    """The result of one check. ``held`` is None if the check was not possible; ``text`` has the reason."""

    name: str
    held: bool | None
    text: str = ""


def find_recovery(injected: InjectedFault, rows: Iterable[ObservedStep]) -> ObservedStep | None:
    """Return the first row that shows recovery from the fault."""
    for row in rows:
        later = row.generation > injected.generation
        in_time = injected.kind != "kill" and row.at_s > injected.at_s + INTERVAL_S and row.step > injected.step
        if row.at_s > injected.at_s and (later or in_time):
            return row
    return None


def list_evictions(
    views: Sequence[ObservedView], injected_faults: Sequence[InjectedFault], names: Mapping[str, str], grace_s: float
) -> list[str]:
    """List the peers that lost their place in a view and that no fault excuses; one line each.

    Args:
        grace_s: time after its end in which a fault still excuses a loss, because silence is noticed late.
    """
    return [
        f"{names.get(peer, peer)} left view {before.generation} without a fault"
        for before, after in itertools.pairwise(views)
        for peer in before.members
        if peer not in after.members and not is_excused(peer, after.at_s, injected_faults, grace_s)
    ]


def is_excused(peer: str, at_s: float, injected_faults: Iterable[InjectedFault], grace_s: float) -> bool:
    return any(
        peer in injected.excused and injected.at_s <= at_s <= max(injected.until_s + grace_s, injected.whole_s)
        for injected in injected_faults
    )


def check_every_step(steps: Iterable[int], last: int) -> InvariantResult:
    """Check that the metrics have each step from 1 to ``last`` exactly once."""
    found = sorted(steps)
    missing = sorted(set(range(1, last + 1)) - set(found))
    twice = sorted({step for step, after in itertools.pairwise(found) if step == after})
    parts = [f"{name}: {join_some(odd)}" for name, odd in (("missing", missing), ("twice", twice)) if odd]
    return InvariantResult("every step is on record once", not parts, "; ".join(parts) or f"steps 1 to {last}")


def check_equal(name: str, hashes: Mapping[str, str]) -> InvariantResult:
    if len(hashes) < 2:
        return InvariantResult(name, None, "there is nothing to compare")
    groups: dict[str, list[str]] = {}
    for holder, value in hashes.items():
        groups.setdefault(value, []).append(holder)
    text = "; ".join(f"{value[:16]}… at {', '.join(holders)}" for value, holders in groups.items())
    return InvariantResult(name, len(groups) == 1, text)


def check_none(name: str, found: Sequence[str]) -> InvariantResult:
    return InvariantResult(name, not found, join_some(found))


def steps_per_s(rows: Sequence[ObservedStep], begin_s: float, end_s: float) -> float:
    # Counts a repeated step once: it compares the newest known steps.
    before = max((row.step for row in rows if row.at_s <= begin_s), default=0)
    after = max((row.step for row in rows if row.at_s <= end_s), default=0)
    return (after - before) / (end_s - begin_s) if end_s > begin_s else 0.0


# ---------------------------------------------------------------------------------------------------------- the report


@dataclass(frozen=True, slots=True)
class Attack:
    """What an attack did, and whether it was seen.

    Attributes:
        loss, val_loss: the newest ones; the attackers tell the truth about theirs.
        scores: what the job's robust rule made of each member, the most suspicious first; empty without a rule.
        found: the attackers are the members that are farthest from the aggregate, and they are far (``MemberScore``);
            None without a rule.
    """

    kind: str
    step: int
    loss: float | None
    val_loss: float | None
    attackers: tuple[str, ...]
    scores: tuple[tuple[str, MemberScore], ...]
    found: bool | None

    @classmethod
    def of(cls, kind: str, job: JobInfo, names: Mapping[str, str], attackers: Collection[str]) -> Attack:
        """``names``: of all peers, by id. ``attackers``: their ids."""
        scores = job.suspects()
        first = scores[: len(attackers)]
        found = {score.peer for score in first if score.is_far} == set(attackers) if scores else None
        named_scores = tuple((names.get(score.peer, score.peer), score) for score in scores)
        wrong = tuple(names.get(peer, peer) for peer in attackers)
        return cls(kind, job.step, job.loss, job.val_loss, wrong, named_scores, found)


@dataclass(slots=True)
class ChaosReport:
    """The result of a run.

    Attributes:
        baseline_steps_per_s, steps_per_s: speed without faults, and with faults.
        complete: the run was not interrupted.
    """

    workers: int
    tls: bool
    seconds: float = 0.0
    steps: int = 0
    baseline_steps_per_s: float = 0.0
    steps_per_s: float = 0.0
    injected_faults: list[InjectedFault] = field(default_factory=list)
    verdicts: list[InvariantResult] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    complete: bool = False
    attack: Attack | None = None

    @property
    def broken(self) -> bool:
        return any(verdict.held is False for verdict in self.verdicts)

    @property
    def goodput(self) -> float | None:
        return self.steps_per_s / self.baseline_steps_per_s if self.baseline_steps_per_s else None

    def recoveries(self) -> dict[str, dict[str, float]]:
        """Kind of fault → the number of recoveries, and the p50, p99 and maximum of their seconds."""
        found: dict[str, list[float]] = {}
        for injected in self.injected_faults:
            if injected.recovery_s is not None:
                found.setdefault(injected.kind, []).append(round(injected.recovery_s, 3))
        shares = {"p50": 0.5, "p99": 0.99, "max": 1.0}
        return {
            kind: {"n": len(values)} | {name: percentile(values, part) or 0.0 for name, part in shares.items()}
            for kind, values in sorted(found.items())
        }

    def to_json(self) -> dict[str, object]:
        return {
            "command": shlex.join(["p2ptrain", *sys.argv[1:]]),
            "complete": self.complete,
            "broken": self.broken,
            "workers": self.workers,
            "tls": self.tls,
            "seconds": round(self.seconds, 3),
            "steps": self.steps,
            "steps_per_s": {"undisturbed": self.baseline_steps_per_s, "under faults": self.steps_per_s},
            "goodput": self.goodput,
            "recovery_s": self.recoveries(),
            "faults": [
                {name: getattr(injected, name) for name in ("number", "kind", "peers", "detail", "step", "recovery_s")}
                for injected in self.injected_faults
            ],
            "invariants": [asdict(verdict) for verdict in self.verdicts],
            "notes": self.notes,
            "attack": asdict(self.attack) if self.attack else None,
        }
