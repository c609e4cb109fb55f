"""``p2ptrain bench speculate``: its stand-ins, its protocol in turns, what it makes of texts, and what it refuses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from p2ptrain.cli.bench import plan as plans
from p2ptrain.cli.bench.foreseen import TimedModel, prompts_for, text_after
from p2ptrain.cli.bench.machine import origin
from p2ptrain.cli.bench.members import Interrupted
from p2ptrain.cli.bench.place import TimedThreads, this_process
from p2ptrain.cli.bench.progress import Remaining
from p2ptrain.cli.bench.sides import here
from p2ptrain.cli.bench.speculate import SpeculateBench
from p2ptrain.cli.bench.speculate_pair import PROMPTS, Drawn, PairBench, PairPlan, prompts_of
from p2ptrain.cli.bench.speculate_rows import Kill, Plan, Row, Texts, Where, pauses
from p2ptrain.cli.bench.speculated import DrafterSide, VerifierSide
from p2ptrain.cli.bench.timed_chain import StageSide
from p2ptrain.core.activations import IDS, encode_ids
from p2ptrain.core.errors import JobFailed, ProtocolError, UserError
from p2ptrain.core.serving import Sampling
from wire.virtual import run_virtual

Command = Callable[..., Any]
PLAN = Plan([0.8], [0.0, 80.0])
DRAFTER: dict[str, Any] = {
    "rtt_ms": 0.0,
    "jitter_ms": 0.0,
    "draft_s": 0.001,
    "alpha": 1.0,
    "model": "",
    "threads": 1,
}


def ran(model: TimedModel, keep: int, ids: list[int], picks: int) -> list[int]:
    payload = memoryview(encode_ids(ids))
    sizes = {"keep": keep, "count": len(ids), "picks": picks, "draw": 0}
    return list(model.run("s", payload=payload, encoding=IDS, out_encoding=IDS, **sizes).tokens)


def opened(model: TimedModel) -> TimedModel:
    model.open("s", positions=100, sampling=Sampling(0.0))
    return model


def test_a_stand_in_writes_its_text_in_any_number_of_passes() -> None:
    model, prompt = opened(TimedModel(0.0)), list(b"hello")
    text = text_after(prompt, 6)
    assert ran(model, 0, prompt, 1) == text[:1]
    assert ran(model, 5, text[:3], 3) == text[1:4]
    wrong = ran(model, 6, [(text[1] + 1) % 256, 7], 2)
    assert wrong != text[2:4], "behind another token another text"
    assert ran(model, 6, text[1:5], 4) == text[2:6], "what was wrong is cut off"
    with pytest.raises(ProtocolError):
        ran(model, 99, [1], 1)


def test_a_drafter_is_right_as_often_as_it_is_told_to_be() -> None:
    for alpha in (0.0, 0.3, 0.8, 1.0):
        for prompt in prompts_for(alpha, 41, 3):
            ids = list(prompt.encode())
            text = text_after(ids, 41)
            model = opened(TimedModel(0.0, alpha=alpha))
            drafted = ran(model, 0, [*ids, *text[:-1]], 41)
            assert sum(left == right for left, right in zip(drafted[1:], text[1:], strict=True)) == round(40 * alpha)


async def test_both_sides_and_the_one_that_waits_write_the_same_text(tmp_path: Path) -> None:
    drafter, verifier = DrafterSide(this_process()), VerifierSide(this_process())
    link = {"rtt_ms": 2.0, "jitter_ms": 0.0, "model": "", "threads": 1}
    at = await drafter.open(draft_s=0.0002, alpha=0.7, **link)  # type: ignore[arg-type]
    there = {"drafter": at, "texts": str(tmp_path / "texts")}
    await verifier.open(pass_s=0.002, row_s=0.0, **link, **there)  # type: ignore[arg-type]
    try:
        await verifier.meet(prompt="hello")
        prompts = prompts_for(0.7, 30, 2)
        expected = [text_after(prompt.encode(), 30) for prompt in prompts]
        ahead = await verifier.write(prompts=prompts, tokens=30, speculate=True, sampling={"temperature": 0.0})
        assert [text["ids"] for text in ahead["texts"]] == expected
        assert all(text["stats"]["drafters"] for text in ahead["texts"])
        for drafts in (1, 4):
            turns = await verifier.write_in_turns(prompts=prompts, tokens=30, drafts=drafts)
            assert [text["ids"] for text in turns["texts"]] == expected
            assert all(len(text["at_s"]) == 30 for text in turns["texts"])
    finally:
        await verifier.close()
        await drafter.close()


async def test_a_chain_of_stages_writes_the_same_text_with_a_drafter(tmp_path: Path) -> None:
    drafter, verifier = DrafterSide(this_process()), VerifierSide(this_process())
    stages = [StageSide(this_process()), StageSide(this_process())]
    sizes: dict[str, Any] = {"ring_s": 0.003, "pass_s": 0.002, "row_s": 0.0}
    there = [
        await stage.open(number=number, stages=2, root=str(tmp_path), **sizes) for number, stage in enumerate(stages)
    ]
    link: dict[str, Any] = {"rtt_ms": 0.0, "jitter_ms": 0.0, "model": "", "threads": 1}
    at = await drafter.open(draft_s=0.0002, alpha=0.7, **link)
    sizes |= {"drafter": at, "texts": str(tmp_path / "texts")}
    await verifier.open(**sizes, **link, stages=there)
    try:
        await verifier.meet(prompt="hello")
        prompts = prompts_for(0.7, 30, 1)
        expected = [text_after(prompt.encode(), 30) for prompt in prompts]
        for speculate in (False, True):
            made = await verifier.write(prompts=prompts, tokens=30, speculate=speculate, sampling={"temperature": 0.0})
            assert [text["ids"] for text in made["texts"]] == expected
            assert bool(made["texts"][0]["stats"]["drafters"]) == speculate
        turns = await verifier.write_in_turns(prompts=prompts, tokens=30, drafts=4)
        assert [text["ids"] for text in turns["texts"]] == expected
    finally:
        await verifier.close()
        await drafter.close()
        for stage in stages:
            await stage.close()


def texts(token_s: float, count: int = 11, **stats: Any) -> Texts:
    usual = {"tokens": count, "passes": 4, "drafted": 10, "wasted": 1, "self_steps": 1, "alpha": 0.8, "bytes_in": 99}
    return Texts([[number * token_s for number in range(count)]], [usual | stats])


def test_a_text_that_is_another_one_counts_for_nothing() -> None:
    told = [{"ids": [1, 2, 3], "at_s": [0.0, 0.1, 0.2], "stats": {}}]
    assert Texts.of(told, [[1, 2, 3]], "ahead").token_s == pytest.approx(0.1)
    with pytest.raises(JobFailed, match="text 1, ahead: not the verifier's own"):
        Texts.of(told, [[1, 2, 4]], "ahead")


def test_settled_is_what_comes_behind_the_first_tokens() -> None:
    slow_first = [0.1 * number if number <= 64 else 6.4 + 0.02 * (number - 64) for number in range(100)]
    assert Texts([slow_first]).settled_s == pytest.approx(0.02)


def test_pauses_from_a_token_on() -> None:
    assert pauses([0.0, 0.5, 0.6, 0.9], 1) == pytest.approx(0.5)
    assert pauses([0.0, 0.5, 0.6, 0.9], 2) == pytest.approx(0.3), "the pause in which it was killed counts"
    assert pauses([0.0], 1) == 0.0


def test_goals_are_those_of_the_settings_that_they_were_set_for() -> None:
    far = Where(80.0, 0.8)
    assert PLAN.goal_s(far, 0.05) == pytest.approx(0.0315)
    assert PLAN.goal_s(Where(81.0, 0.8), 0.05) is None
    assert PLAN.goal_s(Where(80.0, 0.9), 0.05) is None
    assert PLAN.goal_s(Where(80.0, 0.8, 4), 0.05) is None, "it is of the program as it is"
    assert replace(PLAN, growth=0.1).goal_s(far, 0.05) is None
    assert replace(PLAN, chain=True).goal_s(Where(0.0, 0.8), 0.15) == pytest.approx(0.15 / 3)


def test_formulas_are_of_the_depth_that_is_measured() -> None:
    near = Where(0.0, 0.8)
    assert PLAN.drafts_in_turns(near) == 6
    assert PLAN.drafts_in_turns(Where(200.0, 0.8)) > PLAN.drafts_in_turns(Where(80.0, 0.8)) > 6
    assert PLAN.drafts_in_turns(Where(80.0, 0.8, 3)) == 3
    assert PLAN.in_turns_s(near, 1) == pytest.approx(0.055 / 1.8)
    assert PLAN.ahead_s(near) == pytest.approx(0.018)
    assert PLAN.ahead_s(Where(0.0, 0.8, 1)) == pytest.approx(0.05 / 1.8), "a pass with one draft gives 1.8 tokens"
    plan = replace(PLAN, alphas=[0.3, 0.8], depths=[2, 0])
    assert [str(where) for where in plan.settings()][:3] == [
        "0 ms, alpha 0.3, depth 2",
        "0 ms, alpha 0.3",
        "0 ms, alpha 0.8, depth 2",
    ]


def test_what_is_told_of_rows() -> None:
    work = SpeculateBench(PLAN)
    work.rows = [
        Row(Where(0.0, 0.8), 6, texts(0.05), texts(0.018), texts(0.021), 0.0182),
        Row(Where(80.0, 0.8), 12, texts(0.05), texts(0.0527), texts(0.04), 0.029),
    ]
    work.kills = [Kill(80.0, 60, 0.12, 0.06, 0.1)]
    report = work.report(origin(), complete=True)
    near, far = report.results["rows"]
    assert (near["held"], far["held"], report.results["held"]) == (True, False, False)
    assert near["faster"] == pytest.approx(0.05 / 0.018)
    assert near["formula_ahead_s"] == pytest.approx(0.018)
    assert near["settled_s"] == 0, "too short a text"
    assert far["never_slower"] is False
    assert [row[6] for row in report.tables[0].rows] == ["20.0 yes", "slower NO"]
    assert report.tables[3].rows[0][4] == "100 ms NO"
    assert (report.tables[2].rows, report.results["depths"]) == ([], []), "one depth is compared with none"
    assert any("1 of 2 reached" in note for note in report.notes)
    assert any("not kept" in note for note in report.notes)
    assert len(report.pictures[0]) == 6
    assert SpeculateBench(PLAN).report(origin(), complete=False).results["held"] is None


def test_what_is_told_of_depths() -> None:
    work = SpeculateBench(PLAN)
    for depth, token_s in ((1, 0.03), (4, 0.019), (0, 0.0209)):
        work.rows.append(Row(Where(0.0, 0.8, depth), depth or 6, texts(0.05), texts(token_s), texts(0.021), 0.018))
    work.rows.append(Row(Where(80.0, 0.8, 4), 4, texts(0.05), texts(0.03), texts(0.04), 0.03))
    report = work.report(origin(), complete=False)
    assert [row[2] for row in report.tables[0].rows] == ["1", "4", "auto", "4"]
    assert report.tables[2].columns[2:] == ["≤1", "≤4", "AUTO", "BEST FIXED", "AUTO OF IT"]
    assert report.tables[2].rows == [
        ["0 ms", "0.8", "30.0", "19.0", "20.9", "4", "1.10×"],
        ["80 ms", "0.8", "-", "30.0", "-", "4", "-"],
    ]
    assert any("auto takes 1.10× to 1.10×" in note for note in report.notes)
    assert {sample["most_drafts"] for sample in report.samples} == {1, 4, "auto"}
    assert [line.split()[-5] for line in report.pictures[0][:4]][1:] == ["30.0", "19.0", "20.9"]


def measured(command: Command, *arguments: str) -> dict[str, Any]:
    outcome = command("bench", "speculate", "--virtual", "-t", "80", "--texts", "1", "--json", "-", *arguments)
    assert outcome.code == 0, outcome.err
    return outcome.json["results"]  # type: ignore[no-any-return]


def test_on_virtual_time_the_same_is_the_same_again(command: Command) -> None:
    first = measured(command, "--rtt", "0,80", "--depth", "1,auto")
    assert [(row["round_trip_ms"], row["most_drafts"]) for row in first["rows"]] == [
        (0.0, 1),
        (0.0, None),
        (80.0, 1),
        (80.0, None),
    ]
    for row in first["rows"]:
        assert row["alone_s"] == pytest.approx(0.05, rel=0.01)
        assert row["in_turns_s"] == pytest.approx(row["formula_in_turns_s"], rel=0.1)
        assert row["accepted_length"] <= 1 + (row["most_drafts"] or 64)
    assert first["rows"][1]["token_s"] < first["rows"][0]["token_s"]
    (again,) = measured(command, "--rtt", "80", "--depth", "1")["rows"]
    assert again == pytest.approx(first["rows"][2], rel=1e-9)


def test_who_presses_ctrl_c_waits_for_one_order_at_most() -> None:
    stop = asyncio.Event()

    async def main() -> None:
        async with here(stop)(1) as sides:
            assert await sides.all("speculate", part="be drafter", **DRAFTER)
            stop.set()
            await sides.all("speculate", part="close")

    with pytest.raises(Interrupted):
        run_virtual(main())


def test_a_chain_and_a_death_on_virtual_time(command: Command) -> None:
    found = measured(command, "--rtt", "20", "--chain", "--kill")
    (row,), (kill,) = found["rows"], found["kills"]
    assert row["alone_s"] == pytest.approx(0.13, rel=0.01)
    assert row["token_s"] < row["alone_s"] / 2
    assert kill["held"]


def test_calls_on_virtual_time_take_what_they_say() -> None:
    async def main() -> None:
        threads, now = TimedThreads(), asyncio.get_running_loop().time
        thread, other = threads.start("any"), threads.start("other")

        def call(seconds: float) -> float:
            threads.take(seconds, 0.0)
            return seconds

        calls = [thread.submit(partial(call, seconds)) for seconds in (0.25, 0.5)]
        never = thread.submit(partial(call, 100.0))
        never.cancel()
        failing = thread.submit(lambda: 1 // 0)
        assert await other.submit(partial(call, 0.125)) == 0.125
        assert now() == pytest.approx(0.125, rel=0.02), "beside the first thread's"
        assert await asyncio.gather(*calls) == [0.25, 0.5]
        over = now()
        assert over == pytest.approx(0.75, rel=0.02), "one after the other"
        assert over != 0.75, "nothing takes exactly as long as it says"
        with pytest.raises(ZeroDivisionError):
            await failing
        assert now() == over, "whoever does not wait any more takes no time"

    run_virtual(main())


def test_what_is_left_is_told_by_what_was_done() -> None:
    said: list[str] = []
    now = iter((0.0, 20.0, 20.0, 40.0))

    class Says:
        def progress(self, text: str) -> None:
            said.append(text)

    remaining = Remaining(Says(), [10.0, 10.0, 40.0], now=lambda: next(now))
    assert remaining.told == "; about 1 min 0 s left"
    for what in "ab":
        with remaining.next(what):
            pass
    assert said == ["1 of 3: a; about 1 min 0 s left", "2 of 3: b; about 1 min 40 s left"]
    assert Remaining(Says(), [0.0, 0.0]).told == "", "nobody knows"


def test_what_is_told_of_a_pair() -> None:
    work = PairBench(PairPlan("big", "small", ["a"], 11, [0.0]))
    plain, at = [{"tokens": [1, 2, 3], "seconds": 0.3}], (0.0, 0)
    work.drawn = [Drawn("greedy", 0.7, plain, plain, {at: texts(0.05, seconds=1.1)}, {at: texts(0.02, seconds=0.55)})]
    report = work.report(origin(), complete=True)
    (row,) = report.results["rows"]
    assert row["faster"] == pytest.approx(2.0)
    assert row["plain_per_s"] == pytest.approx(10.0)
    assert row["assisted_alike"] == 1
    assert report.tables[0].rows[0][:6] == ["greedy", "0 ms", "auto", "0.70", "0.75", "2.8"]
    work.drawn[0].assisted = []
    assert work.report(origin(), complete=True).tables[0].rows[0][-2:] == ["10.0/s", "-"]


def test_lists_of_shares() -> None:
    assert plans.shares_of("1, .8,0.25,0") == [0.0, 0.25, 0.8, 1.0]
    for text in ("", "1.1", "-1", "80%", "nan", "."):
        with pytest.raises(UserError):
            plans.shares_of(text)


def test_lists_of_depths() -> None:
    assert plans.depths_of("16, 1,auto,4,4") == [1, 4, 16, 0]
    assert plans.depths_of("auto") == [0]
    for text in ("", "0", "65", "-1", "deep", "1.5", "1000"):
        with pytest.raises(UserError):
            plans.depths_of(text)


def test_prompts_of_a_file(tmp_path: Path) -> None:
    assert prompts_of(None) == list(PROMPTS)
    file = tmp_path / "prompts.txt"
    with pytest.raises(UserError):
        prompts_of(file)
    file.write_text("\n\n")
    with pytest.raises(UserError):
        prompts_of(file)
    file.write_text("one\n\ntwo\n")
    assert prompts_of(file) == ["one", "two"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--alpha", "2"], "no list of numbers from 0 to 1"),
        (["--rtt", "far"], "no list of milliseconds"),
        (["--tokens", "3"], "too short a text"),
        (["--depth", "0"], "no list of depths"),
        (["--virtual", "--verifier", "big", "--drafter", "small"], "real models take real time"),
        (["--verifier", "big"], "a real pair has two models"),
    ],
)
def test_what_is_refused(command: Command, arguments: list[str], said: str) -> None:
    outcome = command("bench", "speculate", *arguments)
    assert outcome.code == 2
    assert said in outcome.err
