"""``bench pipeline``: pipeline schedules over slow links, step by step in turn, beside their ideal.

The stages only take time. They are processes in a real chain over emulated links.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from p2ptrain.core.texts import human_bytes, human_duration
from p2ptrain.lab.bench.report import BenchReport, Case, Contender, per_cent
from p2ptrain.lab.bench.runner import Answer, Bench, Members
from ring.planning.schedule import (
    StageCosts,
    StageSchedule,
    plan_extended,
    plan_gpipe,
    plan_one_f_one_b,
    simulate_step_s,
)

TITLES = {"extended": "extended 1F1B", "1f1b": "1F1B", "gpipe": "GPipe"}


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """What to measure: ``steps`` of each schedule at each of ``round_trips_ms``; all hops have the same one."""

    stages: int
    micro_batches: int
    round_trips_ms: list[float]
    forward_s: float
    backward_s: float
    steps: int
    payload_bytes: int

    @property
    def busy_s(self) -> float:
        return self.micro_batches * (self.forward_s + self.backward_s)

    def schedules(self, round_trips_s: list[float]) -> dict[str, StageSchedule]:
        """Contender → its schedule, for the measured round trips of the hops."""
        period_s = self.forward_s + self.backward_s
        return {
            "extended": plan_extended(self.micro_batches, round_trips_s, period_s),
            "1f1b": plan_one_f_one_b(self.stages, self.micro_batches),
            "gpipe": plan_gpipe(self.stages, self.micro_batches),
        }

    def report(self) -> BenchReport:
        work = f"{self.micro_batches} micro-batches of {1e3 * self.forward_s:g} + {1e3 * self.backward_s:g} ms"
        title = f"pipeline · {self.stages} stages · {work} · payloads of {human_bytes(self.payload_bytes)}"
        report = BenchReport("pipeline", title, "busy", "{:.3f}".format, asdict(self))
        report.columns = {
            "found_s": ("FOUND", human_duration),
            "ideal": ("IDEAL", lambda found: "/".join(f"{part:.3f}" for part in found)),
            "reached": ("EXTENDED OF IDEAL", per_cent),
        }
        report.notes = [
            "busy/s: the share of a step that each stage computes; ideal: if only computing and links took time, for "
            "each schedule; found: a payload there and one back, without computing, at the slowest hop",
        ]
        return report


async def measure_pipeline(bench: Bench, plan: PipelinePlan, report: BenchReport) -> None:
    for round_trip_ms in plan.round_trips_ms:
        async with bench.members(plan.stages) as members:
            bench.console.progress(f"{round_trip_ms:g} ms: forming the chain")
            await _measure_link(bench, members, plan, report, round_trip_ms)
    least = min(case.facts["reached"] for case in report.cases)
    report.facts = {"least_part_of_ideal": least}
    report.notes.append(f"extended 1F1B reaches {per_cent(least)} of its ideal at least")


async def _measure_link(
    bench: Bench, members: Members, plan: PipelinePlan, report: BenchReport, round_trip_ms: float
) -> None:
    link, payload_bytes = f"{round_trip_ms:g}ms" * bool(round_trip_ms), max(plan.payload_bytes, 1)
    ports = [answer["port"] for answer in await members.all("listen", link=link, credentials="")]
    *before, _ = await members.all("form_chain", ports=ports, payload_bytes=payload_bytes)
    found_s: list[float] = [answer["round_trip_s"] for answer in before]
    costs = StageCosts.of_equal_stages(plan.forward_s, plan.backward_s, [round_trip_ms / 1e3] * (plan.stages - 1))
    schedules = plan.schedules(found_s)
    ideal_s = {name: simulate_step_s(schedule, costs) for name, schedule in schedules.items()}
    passes: Answer = {"forward_s": plan.forward_s, "backward_s": plan.backward_s, "payload_bytes": payload_bytes}

    async def sample(name: str) -> list[float]:
        order: Answer = {"micro_batches": schedules[name].micro_batches, "warm_ups": list(schedules[name].warm_ups)}
        # The first stage begins first and ends last.
        return [float((await members.all("run_stage", seconds=ideal_s[name], **order, **passes))[0]["seconds"])]

    case = Case(f"{round_trip_ms:g} ms", plan.busy_s, {name: Contender(title) for name, title in TITLES.items()})
    case.facts = {
        "round_trip_ms": round_trip_ms,
        "measured_s": found_s,
        "found_s": max(found_s),
        "ideal": [plan.busy_s / ideal_s[name] for name in schedules],
    }
    for name, schedule in schedules.items():
        in_flight = [schedule.count_in_flight(stage) for stage in range(plan.stages)]
        case.contenders[name].facts = {"ideal_s": ideal_s[name], "in_flight": in_flight}
    await bench.interleave(report, case, sample, rounds=plan.steps)
    case.facts["reached"] = ideal_s["extended"] / case.contenders["extended"].median_s
