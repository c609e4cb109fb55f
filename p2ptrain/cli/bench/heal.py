"""``p2ptrain bench heal``: what members' steps cost while a newcomer fetches the state beside their ring.

A real seed and real workers, as a person starts them. A newcomer with an empty directory joins, is let in, and leaves;
so again and again. *Inside* are the members' steps from the newcomer's "fetches" to the last one before the view that
lets it in, the making of a copy for it included; *outside* those while there is no newcomer, before and after. Both are
told by the ring's rank 0, by its own clock. The pause for the new view is no part of either.

The newcomer's own work (libraries, its model, the steps it replays) would take a member's processor on one machine, as
it would not elsewhere. So where the system can, members and the newcomer are kept to different cores.
"""

from __future__ import annotations

import asyncio
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

from configs.schema import Profile
from p2ptrain.cli.bench.machine import Origin
from p2ptrain.cli.bench.plan import Samples
from p2ptrain.cli.bench.report import Report, Table, human_duration, human_size, human_spread
from p2ptrain.cli.bench.trial import Scene, Trial, started
from p2ptrain.cli.chaos.observer import Told
from p2ptrain.cli.children import Child
from p2ptrain.core.errors import JobFailed
from wire.records import MetricRow

GOAL = 0.05
"""The most that a step may take longer while somebody heals (the part that ``roles.worker.pace`` allows, too)."""
WARM_STEPS = 3  # of each view: the first ones load kernels and pages, or wait for a micro-batch given up
PATIENCE_S = 120.0  # for a worker that loads its libraries on a busy machine
LEAVE_S = 30.0
TINY = {
    "model.hidden_size": 192,
    "model.intermediate_size": 512,
    "data.sequence_tokens": 64,
    "batch.micro_batches": 24,
}
"""In the place of the profile tiny's own: a state of 22 MB, which takes some steps, and steps so long that they make no
more sums than a donor may give."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure.

    Attributes:
        heals: newcomers, one after the other.
        quiet: steps outside, before each and after the last.
    """

    name: str
    profile: Profile
    heals: int
    quiet: int

    @property
    def members(self) -> int:
        return self.profile.job.workers

    @property
    def threads(self) -> int:
        """Of each worker."""
        return self.profile.device.threads


@dataclass(frozen=True, slots=True)
class Pinned:
    """Which cores who is kept to; empty: nobody is."""

    members: tuple[frozenset[int], ...] = ()
    rest: frozenset[int] = frozenset()

    @property
    def described(self) -> str:
        if not self.rest:
            return "nothing is pinned to cores: the newcomer's own work disturbs the members"
        each = ", ".join(f"member {number}: {_cores(its)}" for number, its in enumerate(self.members, 1))
        return f"pinned to cores: {each}; the newcomer, the seed and this command: {_cores(self.rest)}"


def pinned(cores: Sequence[int], members: int, threads: int) -> Pinned:
    """Each member on cores of its own, the last ones for all else; nothing where there are too few."""
    ordered = sorted(cores)
    if members * threads >= len(ordered):
        return Pinned()
    each = [frozenset(ordered[number * threads : (number + 1) * threads]) for number in range(members)]
    return Pinned(tuple(each), frozenset(ordered[members * threads :]))


@dataclass(slots=True)
class Heal:
    """One newcomer. Seconds of steps, in order.

    Attributes:
        before, after: outside.
        transfer_s: from "fetches" to "fetched".
        pause_s: without a step, until the first one with the newcomer.
        beside: whether it was let in by following the ring; else it was healed within, where all wait.
    """

    before: list[float]
    inside: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)
    state_bytes: int = 0
    transfer_s: float = 0.0
    pause_s: float = 0.0
    beside: bool = False

    @property
    def added(self) -> float | None:
        """By which part the median step inside takes longer than outside."""
        outside = [*self.before, *self.after]
        if not self.inside or not outside:
            return None
        return statistics.median(self.inside) / statistics.median(outside) - 1

    @property
    def noise(self) -> float | None:
        """By which part the median steps before and after differ, though nobody heals in either."""
        if not self.before or not self.after:
            return None
        return abs(statistics.median(self.after) / statistics.median(self.before) - 1)


def inside_of(rows: Sequence[MetricRow], begun_wall: float, generation: int) -> tuple[list[float], float]:
    """Seconds of the steps from then to the view that lets the newcomer in, and the pause before that view's first.

    Args:
        rows: in order. begun_wall: by the seed's clock, as the rows' own.
        generation: of that view.
    """
    before = [row for row in rows if (row.generation or 0) < generation]
    first = next((row for row in rows if row.generation == generation), None)
    inside = [row.step_ms / 1e3 for row in before if row.wall > begun_wall and row.step_ms]
    pause_s = first.wall - before[-1].wall if first is not None and before else 0.0
    return inside, pause_s


def pooled(heals: Sequence[Heal]) -> tuple[list[float], list[float]]:
    """Steps outside and inside, of all heals; what lies between two of them counts once."""
    outside = [seconds for heal in heals for seconds in heal.before]
    outside += heals[-1].after if heals else []
    return outside, [seconds for heal in heals for seconds in heal.inside]


class Heals:
    """One run; ``heals`` grows while it measures."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.heals: list[Heal] = []
        self.notes: list[str] = []
        cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set[int]()
        self.pinned = pinned(sorted(cores), plan.members, plan.threads)

    async def measure(self, scene: Scene) -> None:
        """Raises ``P2PTrainError``, ``Interrupted``."""
        scene.console.event("info", "starting a seed and the members")
        with _kept_to(self.pinned.rest):
            async with started(scene, "heal", self.plan.profile, cores=self.pinned.members) as trial:
                quiet = await self._quiet(trial)
                for number in range(1, self.plan.heals + 1):
                    heal = await self._heal(scene, trial, number, Heal(quiet))
                    heal.after = quiet = await self._quiet(trial)
                    self.heals.append(heal)

    async def _quiet(self, trial: Trial) -> list[float]:
        """Seconds of so many steps of the members alone, but for the first ones."""
        observer = trial.observer
        await trial.until(lambda: observer.step > 0 and len(observer.members) == self.plan.members, "a ring of members")
        first = trial.step + WARM_STEPS
        await trial.until(lambda: trial.step >= first + self.plan.quiet, "undisturbed steps")
        return [row.step_ms / 1e3 for row in _rows(trial, first) if row.step_ms]

    async def _heal(self, scene: Scene, trial: Trial, number: int, heal: Heal) -> Heal:
        """One newcomer from its start to its end."""
        observer, first_line, step = trial.observer, len(trial.observer.told), trial.step
        newcomer = await trial.start_worker(self.plan.members + number)
        try:
            scene.console.progress(f"heal {number} of {self.plan.heals}: a newcomer starts")
            await _until(trial, newcomer, lambda: len(observer.members) > self.plan.members, "was not let in")
            generation = observer.generation
            await _until(trial, newcomer, lambda: observer.rows[-1].generation >= generation, "made no step")
            peer = observer.peers[newcomer.name]
            told = [line for line in observer.told[first_line:] if line.event.peer == peer.id]
            begun, fetched = _first(told, "fetching"), _first(told, "fetched")
            if begun is None or fetched is None or not peer.fetched_bytes:
                return heal
            heal.inside, heal.pause_s = inside_of(_rows(trial, step), begun.event.wall, observer.rows[-1].generation)
            heal.state_bytes, heal.transfer_s = peer.fetched_bytes, fetched.event.wall - begun.event.wall
            heal.beside = True
        finally:
            newcomer.ask_to_leave()
            await newcomer.ended(LEAVE_S)
        return heal

    # ------------------------------------------------------------------------------------------------------ the report

    @property
    def added(self) -> float | None:
        """The median of what the heals added, as a part of a step."""
        parts = [heal.added for heal in self._counted if heal.added is not None]
        return statistics.median(parts) if parts else None

    @property
    def added_mean(self) -> float | None:
        """The mean step inside against the mean step outside, over all: what is spread unevenly counts whole."""
        outside, inside = pooled(self._counted)
        return statistics.fmean(inside) / statistics.fmean(outside) - 1 if outside and inside else None

    @property
    def noise(self) -> float | None:
        """The median of what steps change by themselves from one quiet stretch to the next."""
        parts = [heal.noise for heal in self.heals if heal.noise is not None]
        return statistics.median(parts) if parts else None

    @property
    def held(self) -> bool | None:
        """Whether the goal is; None where nothing was measured, or the machine does more by itself."""
        if self.added is None or self.noise is None or self.noise > GOAL:
            return None
        return self.added <= GOAL

    @property
    def _counted(self) -> list[Heal]:
        return [heal for heal in self.heals if heal.beside]

    def report(self, origin: Origin, *, complete: bool) -> Report:
        plan, many = self.plan, "s" * (self.plan.members > 1)
        title = f"a newcomer heals · {plan.name} · {plan.members} member{many} × {plan.threads} thread, loopback"
        settings = {"heals": plan.heals, "quiet_steps": plan.quiet, "profile": plan.profile.model_dump(mode="json")}
        report = Report("heal", title, origin, settings, complete=complete)
        outside, inside = (Samples("", seconds=part) for part in pooled(self._counted))
        parts = Samples("added", seconds=[heal.added for heal in self._counted if heal.added is not None])
        report.results = {
            "goal": GOAL,
            "held": self.held,
            "noise": self.noise,
            "added": self.added,
            "added_mean": self.added_mean,
            "pinned": self.pinned.described,
            "outside": outside.to_json(1, "steps_per_s"),
            "inside": inside.to_json(1, "steps_per_s"),
            "heals": [asdict(heal) | {"added": heal.added} for heal in self.heals],
        }
        report.tables = [_table(self.heals)]
        report.notes = [*self._findings(outside, inside, parts), self.pinned.described, *self.notes]
        report.samples = [
            {"heal": number, "where": where, "sample": index, "seconds": seconds}
            for number, heal in enumerate(self.heals, 1)
            for where in ("before", "inside", "after")
            for index, seconds in enumerate(getattr(heal, where))
        ]
        return report

    def _findings(self, outside: Samples, inside: Samples, parts: Samples) -> list[str]:
        notes = []
        if parts.seconds and self.added is not None and self.added_mean is not None and self.noise is not None:
            low, high = parts.quantile_s(0.1), parts.quantile_s(0.9)
            notes.append(
                f"while a newcomer heals a step takes {self.added:+.1%} (median of {len(parts.seconds)} heals, p10-p90 "
                f"{low:+.1%} to {high:+.1%}; by the mean of all steps {self.added_mean:+.1%})"
            )
            verdict = {
                True: f"that is within the {GOAL:.0%} that it may",
                False: f"that is MORE than the {GOAL:.0%} that it may",
                None: f"whether that is within {GOAL:.0%} cannot be told here: the machine has other things to do",
            }[self.held]
            notes.append(f"{verdict}; from one quiet stretch to the next, steps differ by {self.noise:.1%}")
            notes.append(
                f"steps: {human_duration(outside.median_s)} outside (median of {len(outside.seconds)}), "
                f"{human_duration(inside.median_s)} inside ({len(inside.seconds)})"
            )
        within = sum(not heal.beside for heal in self.heals)
        if within:
            notes.append(f"{within} did not get level beside the ring and healed within it: they are not counted")
        return notes


def _table(heals: Sequence[Heal]) -> Table:
    rows = []
    for number, heal in enumerate(heals, 1):
        outside = Samples("", seconds=[*heal.before, *heal.after])
        spread = human_spread(outside.quantile_s(0.1), outside.quantile_s(0.9))
        row = [human_size(heal.state_bytes), human_duration(heal.transfer_s), str(len(heal.inside))]
        row += [human_duration(outside.median_s), spread]
        row += [human_duration(statistics.median(heal.inside)) if heal.inside else "-"]
        row += [f"{heal.added:+.1%}" if heal.added is not None else "-", human_duration(heal.pause_s)]
        rows.append([str(number), *(row if heal.beside else ["within", *["-"] * (len(row) - 1)])])
    columns = ["HEAL", "STATE", "TRANSFER", "STEPS", "OUTSIDE", "P10-P90", "INSIDE", "ADDED", "PAUSE"]
    return Table(columns, rows, columns)


# ---------------------------------------------------------------------------------------------------------- the cluster


async def _until(trial: Trial, newcomer: Child, test: Callable[[], bool], problem: str) -> None:
    """Raises ``JobFailed`` and as ``Trial.until``."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            await trial.until(lambda: test() or not newcomer.alive, "a step")
    except TimeoutError:
        raise JobFailed(f"{newcomer.name} {problem}", remedy="a machine with less to do may be needed") from None
    if not newcomer.alive:
        raise newcomer.failed(f"{newcomer.name} ended")


def _rows(trial: Trial, after: int) -> list[MetricRow]:
    """Of the steps since, in order."""
    metrics = trial.observer.metrics
    return [metrics[step] for step in sorted(metrics) if step > after]


@contextmanager
def _kept_to(cores: frozenset[int]) -> Iterator[None]:
    """This process, and what it starts, stays on these cores; anywhere where there are none."""
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _first(told: Sequence[Told], kind: str) -> Told | None:
    return next((line for line in told if line.event.kind == kind), None)


def _cores(cores: frozenset[int]) -> str:
    return " ".join(str(core) for core in sorted(cores))
