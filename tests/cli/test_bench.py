"""``p2ptrain bench``: its arithmetic, its report, its sockets, and what it refuses before anything starts."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from configs.schema import Profile
from p2ptrain.cli.bench import print_report
from p2ptrain.core.disk import RealDisk
from p2ptrain.core.errors import JobFailed, ResourceError
from p2ptrain.lab.bench import runner
from p2ptrain.lab.bench.generate import GeneratedText, GeneratePlan, _conclude, _texts
from p2ptrain.lab.bench.network import AllReducePlan, BenchRing, measure_allreduce
from p2ptrain.lab.bench.pipeline import PipelinePlan, measure_pipeline
from p2ptrain.lab.bench.report import (
    BenchReport,
    Case,
    Contender,
    human_rate,
)
from p2ptrain.lab.bench.sockets import SocketRing, Traffic, make_credentials
from p2ptrain.lab.bench.training import (
    DDP,
    RING,
    StepPlan,
    add_block,
    conclude,
)
from ring.planning.schedule import StageCosts, StageSchedule, simulate
from roles.timed_model import text_after
from wire.credentials import Credentials

Command = Callable[..., Any]


def a_bench(members: Any) -> Any:
    """What a benchmark is given, with members that are here already."""

    class Opened:
        async def __aenter__(self) -> Any:
            return members

        async def __aexit__(self, *exc: object) -> None:
            return

    return SimpleNamespace(members=lambda count, **how: Opened(), progress=lambda text: None, root=Path())


# ------------------------------------------------------------------------------------------------------- arithmetic


async def test_contenders_take_turns_in_going_first_and_the_first_round_does_not_count() -> None:
    report, case = BenchReport("x", "", "bytes", str), Case("", 1, {name: Contender(name) for name in "abc"})
    asked: list[str] = []

    async def sample(name: str) -> float:
        asked.append(name)
        return float(len(asked))

    await runner.interleave(report, case, sample, rounds=3, budget_s=0.0, progress=lambda text: None)
    assert "".join(asked) == "abc" + "abc" + "bca" + "cab"
    assert case.contenders["a"].seconds == [4.0, 9.0, 11.0]
    assert report.cases == [case]


# ------------------------------------------------------------------------------------------------------------ report


def test_a_report_is_shown_to_people_and_to_programs(capsys: pytest.CaptureFixture[str]) -> None:
    contenders = {"ring": Contender("this ring", [0.5, 0.25], {"losses": [1.0]}), "gloo": Contender("Gloo", [1.0])}
    case = Case("1 MiB", 1 << 20, contenders, {"factor": 2.5, "missing": None})
    report = BenchReport("allreduce", "a title", "bytes", human_rate, {"peers": 2}, [case], complete=False)
    report.columns = {"factor": ("FACTOR", "{:.1f}×".format), "missing": ("MISSING", str)}
    report.notes = ["a note"]
    print_report(report)
    said = capsys.readouterr().out
    assert "interrupted" in said
    assert re.search(r"1 MiB\s+this ring\s+0\.0028 G\s+375 ms\s+250–500 ms\s+2\s+2\.5×\s+-", said)
    assert "· a note" in said
    assert max(len(line) for line in said.splitlines()[3:]) <= 80
    document = report.to_json()
    assert (document["complete"], document["settings"]) == (False, {"peers": 2})
    found = document["results"][0]["contenders"]["ring"]
    assert (found["median_s"], found["samples"], found["losses"]) == (0.375, 2, [1.0])
    assert found["bytes_per_s"] == (1 << 20) / 0.375
    assert {"cores", "system", "python", "torch", "date", "command", "load"} <= set(document["origin"])


# ------------------------------------------------------------------------------------------------------------ sockets


@pytest.fixture(params=["plain", "tls"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[SocketRing]]:
    """Two members' sockets, connected in a ring."""
    if request.param == "plain":
        made = [SocketRing(), SocketRing()]
    else:
        paths = make_credentials(tmp_path, ["member-0", "member-1"])
        own = [Credentials.load(RealDisk(), Path(path)) for path in paths]
        made = [SocketRing(each.server_context(), each.client_context()) for each in own]
    together(lambda: made[0].connect(made[1].port), lambda: made[1].connect(made[0].port))
    yield made
    for end in made:
        end.close()


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Results of calls that wait for one another."""
    results: list[Any] = [None] * len(calls)

    def call(number: int) -> None:
        results[number] = calls[number]()

    threads = [threading.Thread(target=call, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    return results


@pytest.mark.parametrize("sizes", [(300_001, 300_001), (5_000_000, 0), (0, 1), (1, 700_000)])
@pytest.mark.parametrize("piece_bytes", [1000, 262_144])
def test_every_byte_arrives_both_ways(pair: list[SocketRing], sizes: tuple[int, int], piece_bytes: int) -> None:
    landed = [bytearray(max(1, size)) for size in reversed(sizes)]
    patterns = [bytes(range(number, 251)) * 400 for number in (0, 7)]
    traffics = [
        Traffic(memoryview(patterns[rank]), memoryview(landed[rank]), sizes[rank], sizes[1 - rank], piece_bytes)
        for rank in (0, 1)
    ]
    together(*(partial(pair[rank].exchange, traffics[rank]) for rank in (0, 1)))
    for rank in (0, 1):
        repeated = patterns[rank] * (sizes[rank] // len(patterns[rank]) + 1)
        assert landed[1 - rank][: sizes[rank]] == repeated[: sizes[rank]]


# --------------------------------------------------------------------------------------------------------- all-reduce


class FakeMembers:
    """Members that answer from a table: seconds for each contender, digests and errors for the check."""

    def __init__(self, seconds: dict[str, Sequence[float]], digests: Sequence[str] = ("d", "d"), error: float = 0.0):
        self.seconds, self.digests, self.error = seconds, digests, error

    def __len__(self) -> int:
        return 2

    async def all(self, do: str, **arguments: Any) -> list[dict[str, Any]]:
        if do == "sample":
            return [{"seconds": seconds} for seconds in self.seconds[arguments["contender"]]]
        if do == "check":
            return [{"digest": digest, "error": self.error} for digest in self.digests]
        return [{"port": 1, "missing": "", "torch": "2", "store_port": 1}] * 2


SECONDS = {"ring": (0.010, 0.020), "gloo": (0.040, 0.030), "sockets": (0.005, 0.010)}


async def allreduce(members: FakeMembers, *, rounds: int = 4, **ring: Any) -> BenchReport:
    plan = AllReducePlan(2, [1 << 20], "float32", 4, BenchRing(**ring), rounds)
    report = plan.report()
    await measure_allreduce(a_bench(members), plan, report)
    return report


async def test_ratios_are_those_of_the_slowest_members() -> None:
    (case,) = (await allreduce(FakeMembers(SECONDS))).cases
    assert case.contenders["ring"].seconds == [0.020] * 4
    assert (case.facts["ring_to_gloo"], case.facts["ring_of_limit"]) == (2.0, 0.5)


async def test_members_that_differ_are_no_result() -> None:
    with pytest.raises(JobFailed, match="results differ"):
        await allreduce(FakeMembers(SECONDS, digests=("d", "e")))


async def test_a_wrong_sum_is_no_result() -> None:
    with pytest.raises(JobFailed, match="sum is wrong"):
        await allreduce(FakeMembers(SECONDS, error=1e-3))


async def test_a_lossy_codec_may_lose_but_its_rival_may_not() -> None:
    members = FakeMembers(SECONDS | {"ring plain": (0.030, 0.030)}, error=1e-3)
    with pytest.raises(JobFailed, match="sum is wrong"):
        await allreduce(members, codec="int8")
    members.error = 1e-8
    assert (await allreduce(members, codec="int8")).cases[0].facts["ring_to_fp32_ring"] == 1.5


async def test_an_emulated_link_has_a_limit_and_no_gloo() -> None:
    report = await allreduce(FakeMembers({"ring": (0.2, 0.2)}), link="wan", rounds=1)
    (case,) = report.cases
    assert set(case.contenders) == {"ring"}
    limit_s = ((1 << 20) - (32 << 10)) * 8 / 100e6 + 0.02
    assert case.facts["ring_of_limit"] == pytest.approx(limit_s / 0.2)
    assert any("Gloo is left out" in note for note in report.notes)


# --------------------------------------------------------------------------------------------------------------- step


def a_step(*contenders: str) -> tuple[BenchReport, Case]:
    report = StepPlan(Profile(), "tiny", 2, 1, 2, BenchRing()).report()
    facts = ("losses", "exposed_s", "communicating_s")
    made = {name: Contender(name, facts={fact: [] for fact in facts}) for name in contenders}
    return report, Case("", 100, made, {"reduce_bytes": 1})


def test_hidden_communication_and_losses() -> None:
    report, case = a_step(RING, DDP)
    ours = {"seconds": [1.0, 2.0], "losses": [4.0, 2.0], "exposed_s": [0.1, 0.1], "communicating_s": [0.4, 0.6]}
    other = ours | {"seconds": [1.5, 1.0], "exposed_s": [0.3, 0.3]}
    add_block(case.contenders[RING], [ours, other], counted=True)
    add_block(case.contenders[DDP], [{"seconds": [3.0, 4.0], "losses": [4.0, 2.002]}] * 2, counted=True)
    conclude(report, case)
    assert case.contenders[RING].seconds == [1.5, 2.0]
    assert case.facts["ring_to_ddp"] == pytest.approx(3.5 / 1.75)
    assert case.facts["hidden"] == pytest.approx(1 - 0.4 / 1.0)
    assert case.facts["largest_relative_loss_difference"] == pytest.approx(0.001, rel=0.01)
    add_block(case.contenders[RING], [ours, other], counted=False)
    assert len(case.contenders[RING].seconds) == 2


# ----------------------------------------------------------------------------------------------------------- pipeline


class IdealMembers:
    """Stages that take the ideal time, times ``slower`` where their schedule is the extended one."""

    def __init__(self, stages: int, slower: float = 1.0) -> None:
        self.stages, self.slower, self.rtt_s = stages, slower, 0.0

    async def all(self, do: str, *, part: str, seconds: float = 0.0, **arguments: Any) -> list[dict[str, Any]]:
        answer: dict[str, Any] = {}
        if part == "listen":
            self.rtt_s, answer = arguments["rtt_ms"] / 1e3, {"port": 1}
        elif part == "form":
            answer = {"round_trips_s": [self.rtt_s + 0.0005] * (self.stages - 1)}
        elif part == "run":
            schedule = StageSchedule(arguments["micro_batches"], tuple(arguments["warm_ups"]))
            step_s = simulate(schedule, StageCosts.even(0.04, 0.08, [self.rtt_s] * (self.stages - 1)))
            answer = {"seconds": step_s * self.slower}
        return [answer] + [{"seconds": 99.0, "round_trips_s": []} | answer] * (self.stages - 1)


async def pipeline(stages: int = 2, *, slower: float = 1.0, rtts: Sequence[float]) -> BenchReport:
    plan = PipelinePlan(stages, 16, list(rtts), 0.04, 0.08, 2, 1 << 20)
    report = plan.report()
    await measure_pipeline(a_bench(IdealMembers(stages, slower)), plan, report)
    return report


async def test_ideal_stages_reach_the_known_figures() -> None:
    report = await pipeline(rtts=[0.0, 20.0, 80.0, 200.0])
    found = [[round(case.amount / each.median_s, 2) for each in case.contenders.values()] for case in report.cases]
    assert found == [[0.94, 0.94, 0.94], [0.93, 0.87, 0.93], [0.91, 0.72, 0.91], [0.86, 0.53, 0.86]]
    assert (report.facts["held"], report.facts["least_part_of_ideal"]) == (True, pytest.approx(1.0))


async def test_a_schedule_that_is_too_slow_is_told() -> None:
    report = await pipeline(slower=1.06, rtts=[20.0])
    assert report.facts["held"] is False
    assert any("reaches 94.3 % of its ideal at least; goal 95.0 %: not reached" in note for note in report.notes)


# ----------------------------------------------------------------------------------------------------------- generate


def a_generation(**changes: Any) -> GeneratePlan:
    values: dict[str, Any] = {"verifier": "", "drafter": "", "stages": 0, "round_trips_ms": [0.0], "alphas": [0.8]}
    values |= {"pass_s": 0.05, "draft_s": 0.005, "tokens": 8, "texts": 2, "threads": 1}
    return GeneratePlan(**(values | changes))


def test_what_a_protocol_takes_whose_sides_wait_for_each_other() -> None:
    found_ms = [1e3 * a_generation().synchronous_s(0.8, round_trip_s) for round_trip_s in (0.0, 0.02, 0.08, 0.2)]
    assert found_ms == pytest.approx([20, 25, 39, 66], abs=0.6), "the known figures"


async def test_a_text_that_is_not_the_verifiers_own_counts_for_nothing() -> None:
    spoilt: list[int] = []

    class FakePeers:
        def __init__(self, plan: GeneratePlan) -> None:
            self.plan = plan

        async def write(self, number: int, speculate: str) -> GeneratedText:
            text = text_after(f"TEXT {number}: ".encode(), 8).decode()
            return GeneratedText(
                "x" + text[1:] if number in spoilt and speculate == "auto" else text, 8, 0.0, [0.1, 0.8]
            )

    async def written(plan: GeneratePlan, plain: list[dict[str, Any]]) -> Case:
        contenders = {name: Contender(name) for name in ("alone", "ahead")}
        case = Case("", 1, contenders, {"differ": 0, "round_trip_ms": 0.0, "alpha": 0.8})
        await _texts(a_bench(None), FakePeers(plan), case, plain)  # type: ignore[arg-type]
        return case

    case = await written(a_generation(), [])
    assert [each.seconds for each in case.contenders.values()] == [[0.1, 0.1]] * 2
    spoilt.append(1)
    with pytest.raises(JobFailed, match="text 1, ahead: not the verifier's own"):
        await written(a_generation(), [])
    plain = [{"text": text_after(f"TEXT {number}: ".encode(), 8).decode()} for number in range(2)]
    case = await written(a_generation(verifier="big", drafter="small"), plain)
    assert (case.facts["differ"], case.contenders["ahead"].seconds) == (1, [0.1]), "real ones may part by rounding"


def test_a_generation_is_held_against_its_goals() -> None:
    plan = a_generation()
    report = plan.report()
    for ahead_s, held in ((0.019, True), (0.021, False)):
        contenders = {"alone": Contender("alone", [0.05]), "ahead": Contender("ahead", [ahead_s])}
        case = Case("", 1, contenders, {"differ": 0, "round_trip_ms": 0.0, "alpha": 0.8})
        report.cases = [case]
        _conclude(plan, report, case)
        assert (case.facts["goal_s"], case.facts["held"], report.facts["held"]) == (0.02, held, held)
    split = a_generation(stages=3)
    contenders = {"alone": Contender("alone", [0.1]), "transformers": Contender("transformers", [0.05])}
    case = Case("", 1, contenders, {"differ": 0, "round_trip_ms": 20.0})
    _conclude(split, split.report(), case)
    assert case.facts["rest_a_hop_s"] == pytest.approx((0.1 - 0.05 - 4 * 0.01) / 4)


# --------------------------------------------------------------------------------------------- what a person touches


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("allreduce", "--workers", "1"), "--workers: 1 "),
        (("allreduce", "--sizes", "4K,nothing"), "'nothing' is not a size"),
        (("allreduce", "--codec", "int9"), "no codec is named 'int9'"),
        (("allreduce", "--codec", "int8", "--elements", "float64"), "is for float32"),
        (("allreduce", "--link", "moon"), "no link preset 'moon'"),
        (("step", "--workers", "9"), "9 workers cannot share the 8 micro-batches"),
        (("step", "--profile", "none-such"), "none-such"),
        (("generate", "--draft-model", "/nowhere"), "--draft-model works only with --model"),
        (("generate", "--model", "/nowhere"), "holds no model"),
        (("generate", "--alpha", "1.5"), "not a list of numbers, 0 to 1"),
        (("pipeline", "--rtt", "20,far"), "'20,far' is not a list of numbers"),
    ],
)
def test_a_bad_argument_is_refused_before_anything_starts(
    command: Command, arguments: tuple[str, ...], words: str
) -> None:
    outcome = command("bench", *arguments)
    assert outcome.code == 2
    assert words in outcome.err
    assert outcome.out == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("allreduce", "--sizes", "4K,900G"), r"2 peers with tensors of 921,600 MiB need [\d.]+ GiB, [\d.]+ GiB are f"),
        (("pipeline", "--payload", "900G"), "payloads of 900.0 GiB need"),
    ],
)
def test_memory_that_is_not_there(command: Command, arguments: tuple[str, ...], words: str) -> None:
    outcome = command("bench", *arguments)
    assert outcome.code == ResourceError.exit_code
    assert re.search(words, outcome.err)
