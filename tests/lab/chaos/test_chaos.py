"""``p2ptrain chaos`` without a process: its schedule, its verdicts, its report."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import signal
from asyncio.subprocess import PIPE
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from configs.schema import Profile
from p2ptrain.cli.chaos import print_report
from p2ptrain.cluster.local_cluster import PeerProcess
from p2ptrain.core.errors import UserError
from p2ptrain.lab.chaos.conduct import ChaosPlan, ProxiedCluster, WorkerSlot
from p2ptrain.lab.chaos.judge import (
    CUTS,
    KINDS,
    LASTS_S,
    Attack,
    ChaosObserver,
    ChaosReport,
    InjectedFault,
    InvariantResult,
    ObservedStep,
    ObservedView,
    check_equal,
    check_every_step,
    find_recovery,
    list_evictions,
    parse_kinds,
    schedule,
    steps_per_s,
)
from p2ptrain.lab.chaos.proxy import Proxy
from wire.records import EventInfo, JobInfo, MemberScore, MetricRow

Command = Callable[..., Any]

# --------------------------------------------------------------------------------------------------------- schedule


def first(count: int, seed: int, kinds: tuple[str, ...] = KINDS, workers: int = 4) -> list[Any]:
    return list(itertools.islice(schedule(seed, workers=workers, kinds=kinds), count))


def test_the_same_number_gives_the_same_schedule_and_another_one_another() -> None:
    assert first(50, 7) == first(50, 7)
    assert first(50, 7) != first(50, 8)


def test_actions_lie_within_what_is_promised() -> None:
    actions = first(500, 3)
    assert {action.kind for action in actions} == set(KINDS)
    assert {action.cut for action in actions} == set(CUTS)
    assert all(0.5 <= action.gap_s <= 2.0 for action in actions)
    assert [action.number for action in actions] == list(range(1, 501))
    assert all(sorted(action.order) == [1, 2, 3, 4] for action in actions)
    assert all(LASTS_S[action.kind][0] <= action.lasts_s <= LASTS_S[action.kind][1] for action in actions)


def test_kinds_that_a_person_names() -> None:
    assert parse_kinds("kill, freeze", tls=False, here=KINDS) == ("kill", "freeze")
    assert parse_kinds("none", tls=False, here=KINDS) == ()
    with pytest.raises(UserError, match="--kinds kil is not a valid value"):
        parse_kinds("kil", tls=False, here=KINDS)
    with pytest.raises(UserError, match="does not support"):
        parse_kinds("disk", tls=False, here=("kill",))


def test_kinds_that_nobody_names() -> None:
    with pytest.raises(UserError, match="names no fault"):
        parse_kinds(" , ", tls=False, here=KINDS)
    plain = parse_kinds("", tls=False, here=KINDS)
    assert set(KINDS) - set(plain) == {"corrupt"}, "plain TCP cannot know of a damaged byte"
    assert parse_kinds("", tls=True, here=KINDS) == KINDS


# ---------------------------------------------------------------------------------------------------------- verdicts


def injected(**changes: Any) -> InjectedFault:
    return dataclasses.replace(InjectedFault(1, "kill", at_s=10.0, generation=3, step=50), **changes)


def test_a_step_of_the_old_view_is_no_recovery_from_a_death() -> None:
    rows = [ObservedStep(9.9, 50, 3), ObservedStep(10.3, 51, 3), ObservedStep(10.6, 52, 4), ObservedStep(10.9, 53, 4)]
    assert find_recovery(injected(), rows) == rows[2]
    assert find_recovery(injected(), rows[:2]) is None, "however late it was told"


def test_what_was_on_its_way_is_no_recovery_from_a_cut() -> None:
    rows = [ObservedStep(10.05, 51, 3), ObservedStep(10.3, 52, 3)]
    assert find_recovery(injected(kind="cut"), rows) == rows[1]
    later = [ObservedStep(10.05, 51, 4)]
    assert find_recovery(injected(kind="cut"), later) == later[0], "of a later view it counts at once"
    again = [ObservedStep(10.5, 50, 3)]
    assert find_recovery(injected(kind="cut"), again) is None, "told again, it is no new step"


def test_an_eviction_without_a_fault_is_told() -> None:
    views = [ObservedView(1.0, 1, ("a", "b", "c")), ObservedView(11.0, 2, ("a", "c"))]
    names = {"a": "one", "b": "two", "c": "three"}
    blamed = ["two left view 1 without a fault"]
    assert list_evictions(views, [], names, 2.0) == blamed
    hit = injected(excused=frozenset({"b"}), until_s=10.5)
    assert list_evictions(views, [hit], names, 2.0) == []
    assert list_evictions(views, [dataclasses.replace(hit, excused=frozenset({"a"}))], names, 2.0) == blamed
    assert list_evictions(views, [dataclasses.replace(hit, at_s=11.5)], names, 2.0) == blamed, "before the fault"
    early = dataclasses.replace(hit, at_s=2.0, until_s=8.0, whole_s=8.0)
    assert list_evictions(views, [early], names, 2.0) == blamed, "long after it"
    assert list_evictions(views, [early], names, 4.0) == []
    assert list_evictions(views, [dataclasses.replace(early, whole_s=12.0)], names, 2.0) == [], (
        "it never came back until now"
    )


def test_steps_on_record() -> None:
    assert check_every_step([3, 1, 2], 3) == InvariantResult("every step is on record once", True, "steps 1 to 3")
    assert check_every_step([1, 3, 3, 4], 4).text == "missing: 2; twice: 3"
    assert check_every_step([], 0).held
    lost = check_every_step([], 9)
    assert (lost.held, lost.text) == (False, "missing: 1, 2, 3, 4, 5, 6, 7, 8, 1 more")


def test_equal_states() -> None:
    assert check_equal("equal", {"a": "x" * 20, "b": "x" * 20}).held
    odd = check_equal("equal", {"a": "x" * 20, "b": "y" * 20, "c": "x" * 20})
    assert (odd.held, odd.text) == (False, f"{'x' * 16}… at a, c; {'y' * 16}… at b")
    assert check_equal("equal", {}).held is None
    assert check_equal("equal", {"a": "x" * 20}).held is None, "with strategy 'server' one worker saves"


def test_steps_that_are_done_again_are_no_goodput() -> None:
    rows = [
        ObservedStep(0.0, 10, 1),
        ObservedStep(1.0, 11, 1),
        ObservedStep(2.0, 12, 1),
        ObservedStep(3.0, 12, 2),
        ObservedStep(4.0, 13, 2),
    ]
    assert steps_per_s(rows, 0.0, 4.0) == 0.75
    assert steps_per_s(rows, 4.0, 4.0) == 0.0


# ------------------------------------------------------------------------------------------------------------ report


def test_a_report_says_what_a_program_needs(capsys: pytest.CaptureFixture[str]) -> None:
    report = ChaosReport(4, False, complete=True, baseline_steps_per_s=4.0, steps_per_s=3.0)
    report.injected_faults = [injected(recovery_s=0.5), injected(recovery_s=1.5), injected()]
    report.verdicts = [InvariantResult("this", True), InvariantResult("that", None)]
    document = report.to_json()
    assert document["recovery_s"] == {"kill": {"n": 2, "p50": 0.5, "p99": 1.5, "max": 1.5}}
    assert (document["goodput"], document["broken"]) == (0.75, False)
    report.verdicts.append(InvariantResult("the last", False, "why"))
    assert report.broken
    print_report(report)
    shown = capsys.readouterr().out
    assert "BROKEN    the last: why" in shown
    assert "not seen  that" in shown


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--duration", "5s", "--faults", "3"], "exclude each other"),
        (["--kinds", "none", "--faults", "3"], "does not work with --kinds none"),
        (["--kinds", "bite"], "--kinds bite is not a valid value"),
        (["--duration", "soon"], "not a duration"),
        (["--set", "job.workers=5", "--workers", "2"], "5 workers"),
        (["--set", "checkpoint.every=0"], "nothing to compare"),
        (["--profile", "federated", "--workers", "3"], "all workers here read one text"),
        (["--attack", "bite"], "--attack bite is not a valid value"),
        (["--attack", "scale", "--attackers", "4"], "none would be honest"),
        (["--attack", "scale", "--set", "job.exact=true"], "change whole vectors"),
    ],
)
def test_what_is_refused_before_anything_starts(command: Command, arguments: list[str], says: str) -> None:
    result = command("chaos", *arguments)
    assert result.code == 2
    assert says in result.err


def test_a_directory_that_is_not_empty_is_left_alone(command: Command, tmp_path: Any) -> None:
    (tmp_path / "mine").write_text("kept")
    result = command("chaos", "--state", str(tmp_path))
    assert result.code == 2
    assert "is not empty" in result.err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


# ----------------------------------------------------------------------------------------------------------- cluster


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="this system freezes no process")
async def test_whoever_is_frozen_goes_on_when_a_run_is_left(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec("cat", stdin=PIPE, stdout=PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        plan = ChaosPlan("tiny", Profile(), 1, tmp_path, (), 0, 0.0, seed=1, tls=False)
        cluster, child = ProxiedCluster(plan), PeerProcess("worker-1", process, tmp_path / "log", 0)
        cluster.slots[1] = WorkerSlot(1, Proxy(("127.0.0.1", 1)), Proxy(("127.0.0.1", 1)), child)
        process.send_signal(signal.SIGSTOP)
        process.stdin.write(b"hello\n")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(process.stdout.readline(), 0.2)
        await cluster.end()
        assert await asyncio.wait_for(process.stdout.readline(), 10) == b"hello\n"
    finally:
        process.kill()
        await process.wait()


# ---------------------------------------------------------------------------------------------------------- observer


def job(generation: int, members: list[str], state: str = "running") -> JobInfo:
    return JobInfo("j", "n", "p", "sync", state, 0.0, 9, generation=generation, members=members)


def test_what_a_seed_tells_again_is_kept_once_and_at_its_first_time() -> None:
    times_s = iter((1.0, 1.0, 2.0, 2.0, 3.0))
    observer = ChaosObserver("j", lambda: next(times_s))
    for _ in range(2):
        observer.take(MetricRow("j", 7, 0.0, generation=2))
        observer.take(EventInfo(3, 0.0, "info", "lost", "x"))
    observer.take(MetricRow("j", 7, 0.0, generation=3))
    assert observer.steps == [ObservedStep(1.0, 7, 2), ObservedStep(3.0, 7, 3)]
    assert [at_s for at_s, _ in observer.events] == [1.0]


def test_views_are_those_of_a_running_ring() -> None:
    times_s = iter((1.0, 2.0, 3.0, 4.0, 5.0))
    observer = ChaosObserver("j", lambda: next(times_s))
    reports = (job(1, ["a", "b"]), job(1, ["a", "b"]), job(1, [], "waiting"), job(2, ["a"]), job(2, ["a"], "done"))
    for info in reports:
        observer.take(info)
    assert observer.views == [ObservedView(1.0, 1, ("a", "b")), ObservedView(4.0, 2, ("a",))]


# ------------------------------------------------------------------------------------------------------------ attacks


def test_an_attack_is_found_if_the_attackers_are_the_farthest(capsys: pytest.CaptureFixture[str]) -> None:
    scores = [MemberScore("a", 40, 2, 0.9), MemberScore("b", 40, 38, 9.5), MemberScore("c", 40, 0, 4.0)]
    job = JobInfo("j", "robust", "robust", "sync", "done", 0.0, 40, step=40, loss=2.5, scores=scores)
    names = {"a": "worker-1", "b": "worker-2", "c": "worker-3"}
    assert Attack.of("scale", job, names, ["b"]).found is True
    assert Attack.of("scale", job, names, ["b", "c"]).found is True
    assert Attack.of("scale", job, names, ["c"]).found is False
    near = dataclasses.replace(job, scores=[MemberScore("b", 40, 40, 1.2)])
    assert Attack.of("alie", near, names, ["b"]).found is False, "left out, but not far: it may be any member"
    assert Attack.of("scale", dataclasses.replace(job, scores=[]), names, ["b"]).found is None
    report = ChaosReport(3, tls=False, attack=Attack.of("scale", job, names, ["b"]))
    print_report(report)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["worker-2", "yes", "38", "40", "9.5"] in lines
    assert ["worker-3", "0", "40", "4.0"] in lines
    told: Any = report.to_json()["attack"]
    assert (told["loss"], told["found"], told["attackers"]) == (2.5, True, ("worker-2",))
