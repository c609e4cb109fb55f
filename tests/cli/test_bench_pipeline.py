"""``p2ptrain bench pipeline``: what it orders and makes of the answers, and what it refuses before anything starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from p2ptrain.cli.bench import plan
from p2ptrain.cli.bench.machine import origin
from p2ptrain.cli.bench.pipeline import EXTENDED, GPIPE, PLAIN, WARM_MICRO_BATCHES, Pipeline, Plan
from p2ptrain.core.errors import JobFailed, ResourceError, UserError
from ring.schedule import Costs, Schedule, simulate

Command = Callable[..., Any]


def a_plan(**changes: Any) -> Plan:
    values: dict[str, Any] = {
        "stages": 2,
        "micro_batches": 16,
        "round_trips_ms": [0.0, 20.0, 80.0, 200.0],
        "forward_s": 0.04,
        "backward_s": 0.08,
        "steps": 3,
        "payload_bytes": 1 << 20,
    }
    return Plan(**(values | changes))


class IdealMembers:
    """Stages that take the ideal time, times ``slower`` where their schedule is the extended one."""

    def __init__(self, stages: int, *, slower: float = 1.0) -> None:
        self.stages, self.slower = stages, slower
        self.orders: list[tuple[str, dict[str, Any]]] = []
        self.rtt_s = 0.0

    def __len__(self) -> int:
        return self.stages

    async def all(self, do: str, *, seconds: float = 0.0, **arguments: Any) -> list[dict[str, Any]]:
        self.orders.append((do, arguments))
        answer: dict[str, Any] = {}
        if do == "listen as a stage":
            self.rtt_s, answer = arguments["rtt_ms"] / 1e3, {"port": 1}
        elif do == "form a chain":
            answer = {"round_trips_s": [self.rtt_s + 0.0005] * (self.stages - 1)}
        elif do == "run a step":
            schedule = Schedule(arguments["name"], arguments["micro_batches"], tuple(arguments["warm_ups"]))
            step_s = simulate(schedule, Costs.even(0.04, 0.08, [self.rtt_s] * (self.stages - 1))).step_s
            factor = self.slower if arguments["name"] == EXTENDED else 1.0
            answer = {"seconds": step_s * factor, "computed_s": 1.92, "waited_s": 0.1}
        return [answer] + [{"seconds": 99.0, "computed_s": 99.0, "round_trips_s": []} | answer] * (self.stages - 1)


async def measured(stages: int = 2, *, slower: float = 1.0, **changes: Any) -> tuple[Pipeline, IdealMembers]:
    work, members = Pipeline(a_plan(stages=stages, **changes)), IdealMembers(stages, slower=slower)
    await work.measure(members, lambda text: None)  # type: ignore[arg-type]
    return work, members


async def test_ideal_stages_reach_the_known_figures() -> None:
    work, members = await measured()
    found = [[round(work.efficiency(ran), 2) for ran in distance.ran.values()] for distance in work.distances]
    assert found == [[0.94, 0.94, 0.94], [0.93, 0.87, 0.93], [0.91, 0.72, 0.91], [0.86, 0.53, 0.86]]
    assert work.least == pytest.approx(1.0)
    report = work.report(origin(), complete=True)
    assert report.results["held"] is True
    assert [row[-1] for row in report.tables[0].rows] == ["2/2/16", "3/2/16", "3/2/16", "4/2/16"]
    assert len(report.samples) == 4 * 3 * 3
    assert any("at 200 ms it is 1.63×" in note for note in report.notes)
    steps = [arguments for do, arguments in members.orders if do == "run a step"]
    assert len(steps) == 4 * (1 + 3 * 3)
    assert steps[0]["micro_batches"] == WARM_MICRO_BATCHES
    assert [step["name"] for step in steps[1:10]] == [
        EXTENDED,
        PLAIN,
        GPIPE,
        PLAIN,
        GPIPE,
        EXTENDED,
        GPIPE,
        EXTENDED,
        PLAIN,
    ]
    assert [do for do, _ in members.orders].count("leave the chain") == 4
    assert report.chart is not None
    assert "extended 1F1B, ideal" in report.chart()


async def test_what_is_too_slow_is_told() -> None:
    work, _ = await measured(slower=1.06)
    report = work.report(origin(), complete=True)
    assert report.results["held"] is False
    assert work.least == pytest.approx(1 / 1.06)
    assert any("reaches 94 % of its ideal at least; to reach 95 %: not reached" in note for note in report.notes)


async def test_a_cap_is_kept_on_every_stage() -> None:
    work, _ = await measured(3, max_in_flight=2, round_trips_ms=[80.0], steps=1)
    (distance,) = work.distances
    assert distance.ran[EXTENDED].in_flight == [2, 2, 1]
    assert distance.ran[GPIPE].in_flight == [16, 16, 16]


async def test_what_was_not_measured_is_not_shown() -> None:
    work, _ = await measured(round_trips_ms=[0.0], steps=1)
    work.distances[0].ran[GPIPE].samples.seconds.clear()
    report = work.report(origin(), complete=False)
    assert report.tables[0].rows == []
    assert report.results["held"] is True
    nothing = Pipeline(a_plan()).report(origin(), complete=False)
    assert nothing.results["held"] is None


def test_lists_of_milliseconds() -> None:
    assert plan.milliseconds_of("200, 0,80.5,0") == [0.0, 80.5, 200.0]
    for text in ("", "-1", "20ms", "1e3", "nan", "10000", "٣"):
        with pytest.raises(UserError, match="no list of milliseconds"):
            plan.milliseconds_of(text)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--rtt", "20,far"), "'20,far' is no list of milliseconds"),
        (("--stages", "1"), "Invalid value"),
        (("--micro-batches", "0"), "Invalid value"),
        (("--payload", "none"), "'none' is no size"),
        (("--json", "/nowhere/a.json"), "no place for a file"),
        (("--plot", "a.png"), "only SVG"),
    ],
)
def test_a_bad_argument_is_refused_before_anything_starts(
    command: Command, arguments: tuple[str, ...], words: str
) -> None:
    outcome = command("bench", "pipeline", *arguments)
    assert outcome.code == 2
    assert words in outcome.err
    assert outcome.out == ""


def test_payloads_that_there_is_no_memory_for(command: Command) -> None:
    outcome = command("bench", "pipeline", "--payload", "900G")
    assert outcome.code == ResourceError.exit_code
    assert "payloads of 900 GiB need" in outcome.err


def test_it_shows_how_it_is_used(command: Command) -> None:
    outcome = command("bench", "pipeline", "--help")
    assert outcome.code == 0
    assert "p2ptrain bench pipeline --stages 4" in outcome.out


async def test_members_that_fail_are_no_result() -> None:
    class Failing(IdealMembers):
        async def all(self, do: str, *, seconds: float = 0.0, **arguments: Any) -> list[dict[str, Any]]:
            if do == "run a step" and arguments["name"] == PLAIN:
                raise JobFailed("member 1: lost the stage before")
            return await super().all(do, seconds=seconds, **arguments)

    work = Pipeline(a_plan(round_trips_ms=[0.0], steps=1))
    with pytest.raises(JobFailed):
        await work.measure(Failing(2), lambda text: None)  # type: ignore[arg-type]
