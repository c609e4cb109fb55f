"""``p2ptrain bench``: its arithmetic, its report, its sockets, and what it refuses before anything starts."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from configs.loader import load
from configs.schema import Profile
from p2ptrain.cli.bench import make_table, print_report
from p2ptrain.cluster.console import Console
from p2ptrain.core.errors import JobFailed, ResourceError
from p2ptrain.lab.bench.generate import GeneratedText, GeneratePlan, _measure_texts
from p2ptrain.lab.bench.network import AllReducePlan, BenchRing, measure_allreduce
from p2ptrain.lab.bench.report import (
    BenchReport,
    Case,
    Contender,
    human_rate,
)
from p2ptrain.lab.bench.runner import Bench
from p2ptrain.lab.bench.serve import ServeCase, ServePlan
from p2ptrain.lab.bench.training import (
    COMPILED,
    PLAIN,
    TIMES,
    StepPlan,
    compare_losses,
    measure_steps,
    summarize_device,
)
from roles.timed_model import text_after

from .conftest import Command


class OpenBench(Bench):
    """What a benchmark is given, with members that are here already."""

    def __init__(self, members: Any) -> None:
        super().__init__(Console(quiet=True), Path())
        self._members = members

    def members(self, count: int, *, threads: int = 1) -> Any:
        return nullcontext(self._members)


# ------------------------------------------------------------------------------------------------------- arithmetic


async def test_contenders_take_turns_in_going_first_and_the_first_round_does_not_count() -> None:
    report, case = BenchReport("x", "", "bytes", str), Case("", 1, {name: Contender(name) for name in "abc"})
    asked: list[str] = []

    async def sample(name: str) -> list[float]:
        asked.append(name)
        return [float(len(asked))]

    await OpenBench(None).interleave(report, case, sample, rounds=3)
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
    plan = AllReducePlan(2, [1 << 20], BenchRing(**ring), rounds)
    report = plan.report()
    await measure_allreduce(OpenBench(members), plan, report)
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


# ------------------------------------------------------------------------------------------------------------- device


def test_a_worker_beside_the_loops_on_its_device() -> None:
    """4 s a step of 1,000 tokens, of 3 MFLOP each, on a device of 1 GFLOP/s."""
    times = {"passes_s": [2.0, 3.0], "digests_s": [0.5, 0.5], "vote_s": [0.25, 0.25], "apply_s": [0.25, 0.25]}
    worker = Contender("this worker", [4.0, 4.0], {"losses": [2.0, 1.0], **times})
    plain = Contender("plain loop", [3.0, 3.0], {"losses": [2.0, 1.001]})
    compiled = Contender("compiled loop", [2.0, 2.0], {"losses": [2.0, 1.0]})
    found = {"device": "a device", "parameters": 5, "flops_per_token": 3e6, "peak_flops": 1e9}
    case = Case("tiny", 1000, {"ring": worker, "plain": plain, "compiled": compiled}, found)
    notes = summarize_device(case)
    assert (case.facts["worker_to_plain"], case.facts["worker_to_compiled"]) == (0.75, 0.5)
    assert [each.facts["mfu"] for each in (worker, plain, compiled)] == [0.75, 1.0, 1.5]
    assert list(case.facts["phases_s"].values()) == [2.5, 0.5, 0.25, 0.25, 0.5]
    assert any("75.0 %" in note for note in notes)
    assert compare_losses(case) == ["losses of the same 2 steps differ by 1.0e-03 at most, relative"]
    case.facts["flops_per_token"] = 0  # only a part of the model trains
    del worker.facts["mfu"]
    summarize_device(case)
    assert "mfu" not in worker.facts


class FakeTrainers:
    """Members whose steps take a second. ``built``: the order to build."""

    def __init__(self, count: int) -> None:
        self.count, self.built = count, dict[str, Any]()

    def __len__(self) -> int:
        return self.count

    async def all(self, do: str, **order: Any) -> list[dict[str, Any]]:
        answer: dict[str, Any] = {"port": 1, "missing": "", "torch": "2"}
        assert self.count > 1 or do != "open_gloo"
        if do == "build":
            self.built = order
            answer = {"tokens_per_step": 100, "reduce_bytes": 1, "torch": "2"}
            answer |= {"device": "a device", "parameters": 5, "flops_per_token": 0, "peak_flops": 1.0}
        elif do == "train":
            is_first, ours = order["first"] == 0, order["contender"] in self.built["specs"]
            answer = {name: [0.1] * order["count"] * ours for name in TIMES}
            answer |= {"seconds": [1.0] * order["count"], "losses": [1.0] * order["count"]}
            answer["notices"] = ["compiled"] * (is_first and order["contender"] == "blocks")
        return [answer] * self.count


async def steps_of(workers: int, rivals: Sequence[str], *sets: str) -> tuple[dict[str, Any], BenchReport]:
    profile, members = load("tiny", {}, sets).profile, FakeTrainers(workers)
    plan = StepPlan(profile, "tiny", workers, 1, 7, BenchRing(), rivals, "cuda")
    await measure_steps(OpenBench(members), plan, report := plan.report())
    return members.built, report


async def test_blocks_change_in_no_contender_while_it_is_measured() -> None:
    async def modes_of(workers: int, *sets: str) -> dict[str, str]:
        built, _ = await steps_of(workers, [PLAIN, COMPILED] if workers == 1 else ["ddp"], *sets)
        assert built["device"] == "cuda"
        return {name: Profile.from_spec_untrusted(spec).device.compile for name, spec in built["specs"].items()}

    assert await modes_of(1) == await modes_of(1, "device.compile=on") == {"ring": "off", "blocks": "on"}
    assert await modes_of(1, "device.precision=tf32") == {"ring": "off"}
    assert await modes_of(1, "job.exact=true") == {"ring": "off", "usual": "off"}
    assert await modes_of(2) == {"ring": "off"}
    assert await modes_of(2, "device.compile=on") == {"ring": "on"}


async def test_a_worker_alone_needs_no_gloo_and_tells_what_was_compiled() -> None:
    built, report = await steps_of(1, [PLAIN, COMPILED])
    assert built["rivals"] == [PLAIN, COMPILED]
    assert "compiled" in report.notes
    (case,) = report.cases
    assert list(case.contenders) == ["ring", "blocks", PLAIN, COMPILED]
    assert {len(each.seconds) for each in case.contenders.values()} == {7}
    assert (case.facts["worker_to_plain"], case.facts["blocks_to_compiled"], report.torch) == (1.0, 1.0, "2")
    assert (await steps_of(1, [PLAIN]))[0]["specs"].keys() == {"ring"}


# ----------------------------------------------------------------------------------------------------------- generate


def a_generation(**changes: Any) -> GeneratePlan:
    values: dict[str, Any] = {"verifier": "", "drafter": "", "stages": 0, "round_trips_ms": [0.0], "alphas": [0.8]}
    values |= {"pass_s": 0.05, "draft_s": 0.005, "tokens": 8, "texts": 2, "threads": 1}
    return GeneratePlan(**(values | changes))


async def test_a_text_that_is_not_the_verifiers_own_counts_for_nothing() -> None:
    spoilt: list[int] = []

    class FakePeers:
        def __init__(self) -> None:
            self.counts = {"auto": count(-1), "off": count(-1)}

        async def write(self, body: dict[str, Any]) -> GeneratedText:
            number = next(self.counts[body["speculate"]])
            text = text_after(f"TEXT {number}: ".encode(), 8).decode()
            is_spoilt = number in spoilt and body["speculate"] == "auto"
            return GeneratedText("x" + text[1:] if is_spoilt else text, 8, 0.0, [0.1, 0.8])

    async def written(plan: GeneratePlan, plain: list[dict[str, Any]]) -> Case:
        contenders = {name: Contender(name) for name in ("alone", "ahead")}
        case = Case("", 1, contenders, {"differ": 0, "round_trip_ms": 0.0, "alpha": 0.8})
        report = BenchReport("generate", "", "tokens", str)
        peers: Any = FakePeers()
        await _measure_texts(OpenBench(None), plan, peers, report, case, plain)
        return case

    case = await written(a_generation(), [])
    assert [each.seconds for each in case.contenders.values()] == [[0.1, 0.1]] * 2
    spoilt.append(1)
    with pytest.raises(JobFailed, match="text 1, ahead: not the verifier's own"):
        await written(a_generation(), [])
    plain = [{"text": text_after(f"TEXT {number}: ".encode(), 8).decode()} for number in range(2)]
    case = await written(a_generation(verifier="big", drafter="small"), plain)
    assert (case.facts["differ"], case.contenders["ahead"].seconds) == (1, [0.1]), "real ones may part by rounding"


# -------------------------------------------------------------------------------------------------------------- serve


class FakeServing:
    """Writes 8 tokens, one in 0.1 s, however many texts there are; a prompt is a number."""

    def __init__(self, spoilt: str) -> None:
        self.spoilt, self.asked = spoilt, list[dict[str, Any]]()

    async def write(self, body: dict[str, Any]) -> GeneratedText:
        self.asked.append(body)
        prompt = body["prompt"]
        came_s = [0.3 + 0.1 * number for number in range(body["max_tokens"])]
        text = f"after {prompt}" + "!" * (prompt == self.spoilt and len(self.asked) > 4)
        return GeneratedText(text, len(came_s), 0.0, came_s)


class FakeBatches:
    """Transformers, which writes twice as long as ``FakeServing``."""

    async def all(self, do: str, **order: Any) -> list[dict[str, Any]]:
        if do == "make_prompt":
            return [{"prompt": f"{order['seed']}"}]
        return [{"seconds": 2.0}]


async def measured_serving(plan: ServePlan, spoilt: str = "") -> tuple[BenchReport, FakeServing]:
    report, peers, members = plan.report(), FakeServing(spoilt), FakeBatches()
    case = ServeCase(OpenBench(None), plan, peers, members)  # type: ignore[arg-type]
    await case.measure(report, "whole", await case.write_alone(4), rivals=True)
    return report, peers


def a_serving(**changes: Any) -> ServePlan:
    values: dict[str, Any] = {"model": "", "sizes": ["22M"], "texts": [1, 4], "prompt_tokens": 64, "tokens": 8}
    values |= {"stages": [0], "round_trip_ms": 0.0, "threads": 1, "rounds": 2}
    return ServePlan(**(values | changes))


async def test_texts_at_a_time_are_compared_with_one_and_with_the_padded_batch() -> None:
    report, _ = await measured_serving(a_serving())
    (case,) = report.cases
    four = case.contenders["4"]
    assert four.seconds == pytest.approx([0.25, 0.25]), "a second for four texts"
    assert four.facts["times_one"] == pytest.approx([4, 4])
    assert four.facts["times_padded"] == pytest.approx([2, 2])
    assert case.contenders["4 padded"].facts["times_one"] == pytest.approx([4, 4])
    assert four.facts["first_s"] == pytest.approx([0.3] * 8), "of four texts in two rounds"
    assert four.facts["between_s"] == pytest.approx([0.1] * 8 * 7)
    assert four.facts["longest_s"] == pytest.approx([0.1, 0.1])


async def test_only_texts_of_the_first_round_are_known_before() -> None:
    _, peers = await measured_serving(a_serving())
    asked = [json.dumps(body) for body in peers.asked]
    assert len(asked) - len(set(asked)) == 1 + 4, "the first round has the texts that were written alone"


async def test_a_text_unlike_the_one_alone_is_counted() -> None:
    report, _ = await measured_serving(a_serving(), spoilt="2")
    assert [report.cases[0].contenders[name].facts["differ"] for name in ("1", "4")] == [0, 1]


async def test_a_row_shows_the_facts_of_its_contender() -> None:
    report, _ = await measured_serving(a_serving())
    heads, rows = make_table(report)
    shown = {row[1]: row[heads.index("× ONE")] for row in rows}
    of_one = dict.fromkeys(("1 text", "1 padded", "1 continuous"), "1.00×")
    of_four = dict.fromkeys(("4 texts", "4 padded", "4 continuous"), "4.00×")
    assert shown == {**of_one, **of_four}


# --------------------------------------------------------------------------------------------- what a person touches


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("allreduce", "--workers", "1"), "--workers: 1 "),
        (("allreduce", "--sizes", "4K,nothing"), "'nothing' is not a size"),
        (("allreduce", "--codec", "int9"), "no codec is named 'int9'"),
        (("allreduce", "--link", "moon"), "no link preset 'moon'"),
        (("step", "--workers", "9"), "9 workers cannot share the 8 micro-batches"),
        (("step", "--profile", "none-such"), "none-such"),
        (("step", "--device", "cuda:99"), "device 'cuda:99' was asked for and this machine has"),
        (("device", "--device", "moon"), "'moon' is not a device"),
        (("device", "--profile", "local"), "local has the strategy 'local'"),
        (("generate", "--draft-model", "/nowhere"), "--draft-model works only with --model"),
        (("serve", "--sizes", "9M"), "--sizes"),
        (("serve", "--at-once", "0,4"), "is not a list of whole numbers, 1 to 64"),
        (("serve", "--splits", "1.5"), "is not a list of whole numbers, 0 to 15"),
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
