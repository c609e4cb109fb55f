"""What is done to a cluster, and what must have held, decided from what was seen. Pure.

A schedule is a function of a number, and names *turns*, not processes: ``order`` says in which order workers are tried
for a fault, and the first that is whole takes it. So the schedule does not depend on how fast a machine is.

*Recovery* is the time from a fault to the next step that was committed after it. What was committed before may still
arrive later, because the seed tells changes ten times a second at most: so a row counts when it is of a later view, or,
where the fault need not end the view, when it came more than that interval after the fault.
"""

from __future__ import annotations

import itertools
import math
import random
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field

import typer

from p2ptrain.cli.local_cluster import Row, Seen
from p2ptrain.core.errors import UserError

LASTS_S: dict[str, tuple[float, float]] = {
    "kill": (0.5, 3.0),
    "freeze": (0.5, 6.0),
    "cut": (0.5, 6.0),
    "slow": (2.0, 8.0),
    "corrupt": (1.0, 1.0),
    "seed": (0.2, 5.0),
    "disk": (2.0, 6.0),
}
"""The kinds of faults, and seconds from a fault to its end (of the dead: to their restart). Silences lie on both sides
of the 2 s after which a LAN peer counts as dead: shorter ones must cost nobody its place."""
KINDS = tuple(LASTS_S)
CUTS = ("ring reset", "ring silent", "seed reset", "seed silent", "all silent")
"""Which of a worker's links, and how: a reset is known at once, a silent one is a pulled cable."""

_UNITS_S = {"ms": 1e-3, "s": 1.0, "": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


@dataclass(frozen=True, slots=True)
class Action:
    """A fault to come.

    Attributes:
        number: 1, 2, ...
        gap_s: seconds after the one before.
        order: numbers of workers, whom to try first.
        lasts_s: seconds until it is mended, or the dead are started again.
        cut: one of ``CUTS``.
        rate_bps, delay_s: of a slow link, bytes per second.
        skip_bytes: so many pass before one is damaged.
    """

    number: int
    gap_s: float
    kind: str
    order: tuple[int, ...]
    lasts_s: float
    cut: str
    rate_bps: float
    delay_s: float
    skip_bytes: int


def schedule(seed: int, *, workers: int, kinds: Sequence[str]) -> Iterator[Action]:
    """Faults without end. Every action draws the same numbers whatever its kind.

    Args:
        workers: they are numbered from 1.
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


# ------------------------------------------------------------------------------------------------ what a person writes


def seconds_of(text: str) -> float:
    """``60``, ``60s``, ``500ms``, ``30m``, ``1h``. Raises ``UserError``."""
    match = re.fullmatch(r"\s*([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*(ms|s|min|m|h|)\s*", text, re.ASCII)
    if not match:
        raise UserError(f"{text!r} is not a duration", remedy="write 60s, 30m or 1h")
    return float(match[1]) * _UNITS_S[match[2]]


def kinds_of(text: str, *, tls: bool, here: Sequence[str]) -> tuple[str, ...]:
    """The kinds that a person named, or (an empty text) all that make sense.

    Args:
        here: those that this system can do.

    Raises:
        UserError: one is not known, or cannot be.
    """
    if not text:  # plain TCP cannot know of a damaged byte
        return tuple(kind for kind in KINDS if kind in here and (tls or kind != "corrupt"))
    named = tuple(part.strip() for part in text.split(",") if part.strip())
    if named == ("none",):
        return ()
    for kind in named:
        if kind not in KINDS:
            raise UserError(f"{kind!r} is no kind of fault", remedy=f"use some of {', '.join(KINDS)}, or none alone")
        if kind not in here:
            raise UserError(f"this system has no way to do {kind!r} to a process", remedy="leave it out")
    if not named:
        raise UserError("no kind of fault is named", remedy=f"use some of {', '.join(KINDS)}, or none")
    return named


# ------------------------------------------------------------------------------------------------------- what was done


@dataclass(slots=True)
class InjectedFault:
    """A fault that was done.

    Attributes:
        at_s, until_s: monotonic; until it was mended or the dead were started again, ``inf`` while it lasts.
        generation, step: what was known when it was done.
        peers: who was hit, by name.
        excused: ids of the peers that may lose their place for it: those hit, and both ends of a link.
        whole_s: when all workers were members again.
        recovery_s: None where no step followed.
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
class Verdict:
    """An invariant. ``held`` is None where it could not be looked at; ``text`` says why, or what broke it."""

    name: str
    held: bool | None
    text: str = ""


def recovered(injury: InjectedFault, rows: Iterable[Row], interval_s: float) -> Row | None:
    """The first row by which the injury is over.

    Args:
        interval_s: at most so long a row waits at the seed.
    """
    for row in rows:
        later = row.generation > injury.generation
        in_time = injury.kind != "kill" and row.at_s > injury.at_s + interval_s and row.step > injury.step
        if row.at_s > injury.at_s and (later or in_time):
            return row
    return None


def evictions(
    views: Sequence[Seen], injuries: Sequence[InjectedFault], names: Mapping[str, str], grace_s: float
) -> list[str]:
    """Who lost its place in a view though nothing was done to it; one line each.

    Args:
        grace_s: so long after its end an injury still explains a loss: silence is noticed late.
    """
    return [
        f"{names.get(peer, peer)} left view {before.generation} for no fault of its own"
        for before, after in itertools.pairwise(views)
        for peer in before.members
        if peer not in after.members and not excuse(peer, after.at_s, injuries, grace_s)
    ]


def excuse(peer: str, at_s: float, injuries: Iterable[InjectedFault], grace_s: float) -> bool:
    return any(
        peer in injury.excused and injury.at_s <= at_s <= max(injury.until_s + grace_s, injury.whole_s)
        for injury in injuries
    )


def every_step_once(steps: Iterable[int], last: int) -> Verdict:
    """The rows of metrics hold each step from 1 to ``last`` exactly once."""
    found = sorted(steps)
    missing = sorted(set(range(1, last + 1)) - set(found))
    twice = sorted({step for step, after in itertools.pairwise(found) if step == after})
    parts = [f"{name}: {_some(odd)}" for name, odd in (("missing", missing), ("twice", twice)) if odd]
    return Verdict("every step is on record once", not parts, "; ".join(parts) or f"steps 1 to {last}")


def same(name: str, hashes: Mapping[str, str]) -> Verdict:
    """All hold the same."""
    if not hashes:
        return Verdict(name, None, "there is nothing to compare")
    groups: dict[str, list[str]] = {}
    for holder, value in hashes.items():
        groups.setdefault(value, []).append(holder)
    text = "; ".join(f"{value[:16]}… at {', '.join(holders)}" for value, holders in groups.items())
    return Verdict(name, len(groups) == 1, text)


def none_of(name: str, found: Sequence[str]) -> Verdict:
    return Verdict(name, not found, _some(found))


def steps_per_s(rows: Sequence[Row], begin_s: float, end_s: float) -> float:
    """Progress of the newest known step from ``begin_s`` to ``end_s``, per second: a step done again counts once."""
    before = max((row.step for row in rows if row.at_s <= begin_s), default=0)
    after = max((row.step for row in rows if row.at_s <= end_s), default=0)
    return (after - before) / (end_s - begin_s) if end_s > begin_s else 0.0


def quantile(values: Sequence[float], share: float) -> float:
    """The least value that at least ``share`` of them do not exceed (nearest rank): one that was really seen."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def _some(items: Sequence[object], most: int = 6) -> str:
    shown = ", ".join(str(item) for item in items[:most])
    return f"{shown}, and {len(items) - most} more" if len(items) > most else shown


# ---------------------------------------------------------------------------------------------------------- the report


@dataclass(slots=True)
class Report:
    """Everything that is told.

    Attributes:
        baseline_steps_per_s, steps_per_s: without faults, and under them.
        complete: it was not interrupted.
    """

    workers: int
    tls: bool
    seconds: float = 0.0
    steps: int = 0
    baseline_steps_per_s: float = 0.0
    steps_per_s: float = 0.0
    injuries: list[InjectedFault] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    complete: bool = False

    @property
    def broken(self) -> bool:
        return any(verdict.held is False for verdict in self.verdicts)

    @property
    def goodput(self) -> float | None:
        return self.steps_per_s / self.baseline_steps_per_s if self.baseline_steps_per_s else None

    def recoveries(self) -> dict[str, dict[str, float]]:
        """Seconds to the next committed step, by kind: how many, p50, p99, max."""
        found: dict[str, list[float]] = {}
        for injury in self.injuries:
            if injury.recovery_s is not None:
                found.setdefault(injury.kind, []).append(injury.recovery_s)
        shares = {"p50": 0.5, "p99": 0.99, "max": 1.0}
        return {
            kind: {"n": len(values)} | {name: round(quantile(values, share), 3) for name, share in shares.items()}
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
                {name: getattr(injury, name) for name in ("number", "kind", "peers", "detail", "step", "recovery_s")}
                for injury in self.injuries
            ],
            "invariants": [asdict(verdict) for verdict in self.verdicts],
            "notes": self.notes,
        }

    def print(self) -> None:
        """For a person, on standard output."""
        from p2ptrain.cli.output import human_seconds, print_pairs, print_table, printable

        under = f"{len(self.injuries)} faults in {human_seconds(self.seconds)}"
        pairs = [("faults", under if self.complete else f"{under}, interrupted"), ("steps", str(self.steps))]
        if (goodput := self.goodput) is not None:
            text = f"{100 * goodput:.0f} %: {self.steps_per_s:.2f} of {self.baseline_steps_per_s:.2f} steps/s"
            pairs.append(("goodput", text))
        print_pairs(pairs)
        if recoveries := self.recoveries():
            typer.echo()
            rows = [[kind, *(f"{value:g}" for value in found.values())] for kind, found in recoveries.items()]
            print_table(["to the next step", "n", "p50", "p99", "max"], rows, right=["n", "p50", "p99", "max"])
        typer.echo()
        for verdict in self.verdicts:
            mark = {True: "held", False: "BROKEN", None: "not seen"}[verdict.held]
            typer.echo(printable(f"{mark:<8}  {verdict.name}" + (f": {verdict.text}" if verdict.text else "")))
        for note in self.notes:
            typer.echo(printable(f"note      {note}"))
