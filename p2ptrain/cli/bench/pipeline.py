"""``p2ptrain bench pipeline``: schedules of a pipeline over slow links, step by step in turn, beside their ideal."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, field
from typing import Any

from p2ptrain.cli.bench.conduct import Progress
from p2ptrain.cli.bench.drawing import FILLS, Bar, Line, Point, bars, chart_svg
from p2ptrain.cli.bench.machine import Origin
from p2ptrain.cli.bench.members import Members
from p2ptrain.cli.bench.plan import Samples, check_fits, rotated
from p2ptrain.cli.bench.report import Report, Table, human_duration, human_size, per_cent, screen_columns, times
from ring.schedule import Costs, Schedule, extended, gpipe, one_f_one_b, simulate

EXTENDED, PLAIN, GPIPE = "extended", "1f1b", "gpipe"
TITLES = {EXTENDED: "extended 1F1B", PLAIN: "1F1B", GPIPE: "GPipe"}
MUST_REACH = 0.95
"""Of the ideal efficiency."""

WARM_MICRO_BATCHES = 2  # of a step that is not counted: the first payloads find TCP with its smallest windows
STAGE_BYTES = 80 << 20
"""Resident memory of a member without torch."""


def check_memory(stages: int, micro_batches: int, payload_bytes: int, available_bytes: int) -> None:
    """All payloads of a step may wait at a stage, out and in. Raises ``ResourceError``."""
    need_bytes = stages * (STAGE_BYTES + 2 * micro_batches * payload_bytes)
    check_fits(
        f"{stages} stages with {micro_batches} payloads of {human_size(payload_bytes)}", need_bytes, available_bytes
    )


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure: ``steps`` of each schedule at each of ``round_trips_ms``, the same for every hop."""

    stages: int
    micro_batches: int
    round_trips_ms: list[float]
    forward_s: float
    backward_s: float
    steps: int
    payload_bytes: int
    max_in_flight: int = 0

    @property
    def period_s(self) -> float:
        return self.forward_s + self.backward_s

    @property
    def busy_s(self) -> float:
        """What a stage computes in a step."""
        return self.micro_batches * self.period_s

    def schedules(self, round_trips_s: list[float]) -> dict[str, Schedule]:
        """By contender, for hops that were measured so."""
        caps = [self.max_in_flight] * self.stages if self.max_in_flight else []
        return {
            EXTENDED: extended(self.micro_batches, round_trips_s, self.period_s, max_in_flight=caps),
            PLAIN: one_f_one_b(self.stages, self.micro_batches, max_in_flight=caps),
            GPIPE: gpipe(self.stages, self.micro_batches),
        }


@dataclass(slots=True)
class Ran:
    """One schedule at one round trip.

    Attributes:
        ideal_s: the step where nothing but computing and links takes time.
        in_flight: micro-batches kept at once, of each stage.
        samples: seconds of each step, from the first stage's first forward to its last backward.
        computed_s: of each step, of the first stage, on its compute thread.
    """

    schedule: Schedule
    ideal_s: float
    samples: Samples
    computed_s: list[float] = field(default_factory=list)

    @property
    def in_flight(self) -> list[int]:
        return [self.schedule.in_flight(stage) for stage in range(self.schedule.stages)]


@dataclass(slots=True)
class Distance:
    """One emulated round trip. ``measured_s``: of each hop, with a payload there and back, as the stages found it."""

    round_trip_ms: float
    measured_s: list[float]
    ran: dict[str, Ran]


class Pipeline:
    """One run; ``distances`` grows while it measures."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.distances: list[Distance] = []

    async def measure(self, members: Members, progress: Progress) -> None:
        """Raises ``P2PTrainError``, ``Interrupted``."""
        for round_trip_ms in self.plan.round_trips_ms:
            await self._at(members, round_trip_ms, progress)

    async def _at(self, members: Members, round_trip_ms: float, progress: Progress) -> None:
        plan = self.plan
        progress(f"{round_trip_ms:g} ms: forming the chain")
        ports = [answer["port"] for answer in await members.all("listen as a stage", rtt_ms=round_trip_ms)]
        times_s: dict[str, Any] = {"forward_s": plan.forward_s, "backward_s": plan.backward_s}
        answers = await members.all("form a chain", ports=ports, payload_bytes=plan.payload_bytes, **times_s)
        measured_s: list[float] = answers[0]["round_trips_s"]
        hops = plan.stages - 1
        costs = Costs.even(plan.forward_s, plan.backward_s, [round_trip_ms / 1e3] * hops)
        distance = Distance(
            round_trip_ms,
            measured_s,
            {
                name: Ran(schedule, simulate(schedule, costs).step_s, Samples(TITLES[name]))
                for name, schedule in plan.schedules(measured_s).items()
            },
        )
        await self._step(members, gpipe(plan.stages, WARM_MICRO_BATCHES), plan.period_s * plan.stages * 4)
        self.distances.append(distance)
        for number in range(plan.steps):
            for name in rotated(list(distance.ran), number):
                ran = distance.ran[name]
                seconds, computed_s = await self._step(members, ran.schedule, ran.ideal_s)
                ran.samples.seconds.append(seconds)
                ran.computed_s.append(computed_s)
                done = f"{round_trip_ms:g} ms: step {number + 1} of {plan.steps}"
                progress(f"{done}, {ran.samples.title}: {per_cent(self.efficiency(ran))} of it computing")
        await members.all("leave the chain")

    async def _step(self, members: Members, schedule: Schedule, ideal_s: float) -> tuple[float, float]:
        """Seconds of one step, and those that the first stage computed: it begins first, and ends last."""
        order: dict[str, Any] = {
            "name": schedule.name,
            "micro_batches": schedule.micro_batches,
            "warm_ups": list(schedule.warm_ups),
        }
        first, *_ = await members.all("run a step", seconds=ideal_s, **order)
        return first["seconds"], first["computed_s"]

    # ------------------------------------------------------------------------------------------------------ the report

    def efficiency(self, ran: Ran) -> float:
        """Part of a step that a stage computes, of the median step, as it was ordered."""
        return self.plan.busy_s / ran.samples.median_s

    def ideal(self, ran: Ran) -> float:
        return self.plan.busy_s / ran.ideal_s

    @property
    def least(self) -> float | None:
        """The least part of its ideal efficiency that the extended schedule reached."""
        reached = [distance.ran[EXTENDED] for distance in self.distances]
        return min((ran.ideal_s / ran.samples.median_s for ran in reached if ran.samples.seconds), default=None)

    def report(self, origin: Origin, *, complete: bool) -> Report:
        plan = self.plan
        work = f"{plan.micro_batches} micro-batches of {1e3 * plan.forward_s:g} + {1e3 * plan.backward_s:g} ms"
        title = f"pipeline · {plan.stages} stages · {work} · payloads of {human_size(plan.payload_bytes)}"
        report = Report("pipeline", title, origin, asdict(plan), complete=complete)
        shown = [distance for distance in self.distances if all(ran.samples.seconds for ran in distance.ran.values())]
        report.results = {
            "least_part_of_ideal": self.least,
            "must_reach": MUST_REACH,
            "held": self.least >= MUST_REACH if self.least is not None else None,
            "distances": [self._result(distance) for distance in self.distances],
        }
        report.tables = [self._table(shown)]
        report.pictures = [self._picture(shown)]
        report.notes = self._findings(shown)
        report.samples = [
            {"round_trip_ms": distance.round_trip_ms, "schedule": name, "sample": number, "seconds": seconds}
            | {"efficiency": plan.busy_s / seconds, "ideal": self.ideal(ran)}
            for distance in self.distances
            for name, ran in distance.ran.items()
            for number, seconds in enumerate(ran.samples.seconds)
        ]
        report.chart = lambda: self._chart(report, shown)
        return report

    def _result(self, distance: Distance) -> dict[str, Any]:
        return {
            "round_trip_ms": distance.round_trip_ms,
            "measured_s": distance.measured_s,
            "schedules": {
                name: ran.samples.to_json(self.plan.busy_s, "efficiency")
                | {
                    "ideal_s": ran.ideal_s,
                    "ideal_efficiency": self.ideal(ran),
                    "in_flight": ran.in_flight,
                    "computed_s": ran.computed_s,
                }
                for name, ran in distance.ran.items()
            },
        }

    def _table(self, shown: list[Distance]) -> Table:
        names = [TITLES[name].upper() for name in (EXTENDED, PLAIN, GPIPE)]
        columns = ["ROUND TRIP", "FOUND", *(column for name in names for column in (name, "IDEAL")), "IN FLIGHT"]
        rows = []
        for distance in shown:
            found_s = max(distance.measured_s)
            row = [f"{distance.round_trip_ms:g} ms", human_duration(found_s)]
            for ran in distance.ran.values():
                row += [f"{self.efficiency(ran):.3f}", f"{self.ideal(ran):.3f}"]
            rows.append([*row, "/".join(str(ran.in_flight[0]) for ran in distance.ran.values())])
        return Table(columns, rows, columns)

    def _picture(self, shown: list[Distance]) -> list[str]:
        groups = [
            (
                f"{distance.round_trip_ms:g} ms",
                [
                    Bar(ran.samples.title, self.efficiency(ran), per_cent(self.efficiency(ran)), fill)
                    for ran, fill in zip(distance.ran.values(), FILLS, strict=False)
                ],
            )
            for distance in shown
        ]
        return bars(groups, width=screen_columns(), common=True)

    def _findings(self, shown: list[Distance]) -> list[str]:
        notes = [
            "efficiency: the part of a step that each stage computes; ideal: where nothing but computing and links "
            "takes time; found: a payload there and one back, without computing, at the slowest hop",
            "in flight: micro-batches whose activations the first stage keeps, at most, in the order of the schedules",
        ]
        if self.least is not None:
            verdict = "reached" if self.least >= MUST_REACH else "not reached"
            notes.append(
                f"{TITLES[EXTENDED]} reaches {per_cent(self.least)} of its ideal at least; to reach "
                f"{per_cent(MUST_REACH)}: {verdict}"
            )
        if computed := [seconds for item in shown for ran in item.ran.values() for seconds in ran.computed_s]:
            each_s = statistics.median(computed) / self.plan.micro_batches
            notes.append(
                f"a micro-batch took {human_duration(each_s)} on the first stage's thread, as its event loop saw it"
            )
        if shown:
            farthest = shown[-1]
            ratio = farthest.ran[PLAIN].samples.median_s / farthest.ran[EXTENDED].samples.median_s
            notes.append(f"at {farthest.round_trip_ms:g} ms it is {times(ratio)} as fast as {TITLES[PLAIN]}")
        return notes

    def _chart(self, report: Report, shown: list[Distance]) -> str:
        lines = []
        for name, title in TITLES.items():
            points: list[Point | None] = []
            for distance in shown:
                samples, busy_s = distance.ran[name].samples, self.plan.busy_s
                spread = (busy_s / samples.quantile_s(0.9), busy_s / samples.quantile_s(0.1))
                points.append(Point(busy_s / samples.median_s, *spread))
            lines.append(Line(title, points))
        ideal: list[Point | None] = [Point(*[self.ideal(distance.ran[EXTENDED])] * 3) for distance in shown]
        lines.append(Line(f"{TITLES[EXTENDED]}, ideal", ideal))
        labels = [f"{distance.round_trip_ms:g} ms" for distance in shown]
        subtitle = report.title.partition(" · ")[2] + " · by round trip"
        return chart_svg("Pipeline efficiency", subtitle, report.footer, labels, lines, unit="of a step")
