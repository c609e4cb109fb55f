"""``p2ptrain bench chain``: how it divides a token's time, when it kills whom, what it makes of it, what it refuses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from p2ptrain.cli.bench.chain import ChainBench, Distance, Plan, parts, rate
from p2ptrain.cli.bench.chain_kills import (
    BETWEEN,
    DECODE,
    PREFILL,
    Kill,
    Strike,
    Turns,
    conversation,
    hit_of,
    kill,
    moment_s,
    pause_of,
    positions_of,
)
from p2ptrain.cli.bench.chained import Text, link_name
from p2ptrain.cli.bench.machine import origin
from p2ptrain.core.errors import ConnectionLost, ResourceError
from p2ptrain.core.serving import Sampling
from roles.chain.around import Token

Command = Callable[..., Any]
STAGES_US = (10_000, 20_000, 6_000)


def a_plan(**changes: Any) -> Plan:
    values: dict[str, Any] = {
        "stages": 3,
        "round_trips_ms": [0.0, 20.0],
        "layers": 12,
        "width": 512,
        "vocab": 4096,
        "prompt": 256,
        "tokens": 5,
        "sessions": 2,
        "threads": 1,
        "kill": True,
    }
    return Plan(**(values | changes))


def a_text(*took_s: float, began_s: float = 0.0, first_s: float = 1.0) -> Text:
    """The first token comes after ``first_s``, the others after ``took_s`` each; stages compute 36 ms on each."""
    text, at = Text(began_s), began_s
    for number, took in enumerate((first_s, *took_s)):
        at += took
        text.tokens.append(Token(number, number, STAGES_US, took))
        text.came_s.append(at)
    return text


def test_a_token_is_computing_links_and_the_rest() -> None:
    found = parts(a_text(0.090, 0.084, 0.088), 4 * 0.01)
    assert found.token_s == pytest.approx(0.088)
    assert found.compute_s == pytest.approx(0.036)
    assert found.rest_s == pytest.approx(0.012), "the prompt's token, which took a second, is not among them"


def test_rates_count_what_came_after_the_first_token_of_all() -> None:
    assert rate([a_text(0.1, 0.1, 0.1, 0.1)]) == pytest.approx(10)
    assert rate([a_text(0.1, 0.1), a_text(0.1, 0.1, began_s=0.2)]) == pytest.approx(10)


def test_a_stage_is_struck_in_the_middle_of_its_work() -> None:
    assert moment_s(0, 0.01, STAGES_US) == pytest.approx(0.010 + 0.005)
    assert moment_s(1, 0.01, STAGES_US) == pytest.approx(0.020 + 0.010 + 0.010)
    assert moment_s(2, 0.01, STAGES_US) == pytest.approx(0.030 + 0.030 + 0.003)


def test_where_a_kill_hit_and_how_long_the_text_stopped() -> None:
    first, second = a_text(0.1, 0.1), a_text(0.1, began_s=2.0, first_s=0.5)
    assert [hit_of(at, first) for at in (0.5, 1.15, 1.3)] == [PREFILL, DECODE, BETWEEN]
    assert [pause_of(at, [first, second]) for at in (0.4, 1.15, 1.3)] == pytest.approx([0.6, 0.05, 1.2])


def test_first_middle_and_last_are_each_killed_once() -> None:
    assert [positions_of(stages) for stages in (1, 2, 3, 5)] == [
        [(0, "first")],
        [(0, "first"), (1, "last")],
        [(0, "first"), (1, "middle"), (2, "last")],
        [(0, "first"), (2, "middle"), (4, "last")],
    ]


@pytest.mark.parametrize(
    ("changes", "held"),
    [
        ({}, True),
        ({"pause_s": 2.5}, True),
        ({"pause_s": 2.51}, False),
        ({"alike": False}, False),
        ({"failed": "nobody is left"}, False),
    ],
)
def test_what_holds(changes: dict[str, Any], held: bool) -> None:
    values: dict[str, Any] = {"hit": DECODE, "pause_s": 0.4, "prefill_s": 0.5, "alike": True}
    assert Kill(1, DECODE, **(values | changes)).held is held


class FakeSession:
    """Tokens of two turns: the sums of what came before, so that one that is lost changes all that follow."""

    def __init__(self, ids: list[int], tokens: int, *, fails: Callable[[], bool] = lambda: False) -> None:
        self.history, self.mendings = list(ids), [("stage 1: it closed the connection", 0.25)]
        self._left, self._number, self._fails = tokens, 0, fails

    async def __aenter__(self) -> FakeSession:
        return self

    async def __aexit__(self, *exc: object) -> None:
        return

    def go_on(self, ids: list[int], *, max_new_tokens: int) -> None:
        self.history, self._left, self._number = list(ids), max_new_tokens, 0

    def __aiter__(self) -> AsyncIterator[Token]:
        return self

    async def __anext__(self) -> Token:
        await asyncio.sleep(0)
        if self._fails():
            raise ConnectionLost("nobody is left")
        if not self._left:
            raise StopAsyncIteration
        self._left -= 1
        token = Token(sum(self.history) % 97, self._number, (0, 0, 0), 0.5 if self._number == 0 else 0.01)
        self._number += 1
        if self._left:
            self.history.append(token.id)
        return token


class FakeChain:
    """A chain of one that names its only worker."""

    def __init__(self, fails: Callable[[], bool] = lambda: False) -> None:
        self.sessions: list[FakeSession] = []
        self._fails = fails

        class At:
            name = "worker-2"

        class Stage:
            worker = At()

        class Of:
            stages = [Stage()] * 3

        self.plan = Of()

    async def generate(self, ids: list[int], *, max_new_tokens: int, **_: Any) -> FakeSession:
        self.sessions.append(FakeSession(ids, max_new_tokens, fails=self._fails))
        return self.sessions[-1]


class FakeCluster:
    def __init__(self) -> None:
        self.killed: list[str] = []

    def kill(self, name: str) -> None:
        self.killed.append(name)


TURNS = Turns([5, 6, 7], [8, 9], 6, Sampling())


@pytest.mark.parametrize("phase", [PREFILL, DECODE, BETWEEN])
async def test_a_stage_is_killed_once_and_in_its_phase(phase: str) -> None:
    chain, killed_after = FakeChain(), list[int]()
    strike = Strike(phase, 0.0, lambda: killed_after.append(chain.sessions[0]._number))
    (first, second), mended_s = await conversation(chain, TURNS, strike)  # type: ignore[arg-type]
    assert len(killed_after) == 1
    if phase == PREFILL:
        assert killed_after[0] <= 1
    else:
        assert killed_after[0] in ((3, 4) if phase == DECODE else (6,))
    assert (len(first.ids), len(second.ids), mended_s) == (6, 6, 0.25)
    assert chain.sessions[0].history[:11] == [5, 6, 7, *first.ids, 8, 9], "the second turn goes on with all of it"


async def test_a_kill_is_judged_by_the_text_that_nobody_disturbed() -> None:
    cluster = FakeCluster()
    found, victim = await kill(FakeChain(), cluster, TURNS, 1, BETWEEN, 0.01)  # type: ignore[arg-type]
    assert (victim, cluster.killed) == ("worker-2", ["worker-2"])
    assert (found.alike, found.hit, found.prefill_s, found.failed, found.held) == (True, BETWEEN, 0.5, "", True)
    assert 0 < found.pause_s < 2

    hurt = FakeCluster()
    found, _ = await kill(FakeChain(lambda: bool(hurt.killed)), hurt, TURNS, 1, BETWEEN, 0.01)  # type: ignore[arg-type]
    assert (found.failed, found.held, found.alike) == ("nobody is left", False, False)


def measured(*, rest_s: float = 0.004, **changes: Any) -> ChainBench:
    """Both distances, with that rest on each token."""
    work = ChainBench(a_plan(**changes))
    work.whole_s, work.whole_prompt_s = [0.03, 0.03, 0.9], 0.4
    for round_trip_ms in work.plan.round_trips_ms:
        token_s = 0.036 + 4 * round_trip_ms / 2e3 + rest_s
        many = [a_text(*[token_s] * 4), a_text(*[token_s] * 4)]
        work.distances.append(Distance(round_trip_ms, a_text(*[token_s] * 4), many, alike=True))
    return work


def test_the_report_of_all() -> None:
    work = measured()
    work.distances[0].kills = [
        Kill(0, PREFILL, PREFILL, 0.8, 0.5, 0.4, alike=True),
        Kill(2, DECODE, "", failed="nobody is left"),
    ]
    report = work.report(origin(), complete=True)
    tokens, sessions, killed = report.tables
    assert [list(row)[2:] for row in tokens.rows] == [
        ["36.0 ms", "0.0 ms", "4.0 ms", "1.0 ms", "30.0 ms", "30.0 ms", "yes"],
        ["36.0 ms", "40.0 ms", "4.0 ms", "1.0 ms", "30.0 ms", "70.0 ms", "yes"],
    ]
    assert [row[3:] for row in sessions.rows] == [["2.00×", "2.00×"], ["2.00×", "2.00×"]]
    assert [list(row)[1:] for row in killed.rows] == [
        ["0", "prefill", "the same", "0.80 s", "0.50 s", "0.40 s", "yes"],
        ["2", "decode", "none", "0.00 s", "0.00 s", "0.00 s", "no"],
    ]
    assert all(item["held"] for item in report.results["distances"])
    assert report.results["distances"][1]["stages_us"] == list(STAGES_US)
    notes = " ".join(report.notes)
    assert "1.00 ms a hop at most; to reach 2.00 ms: reached" in notes
    assert "killed with -9, 2 times: 1 went on" in notes
    assert "stage 2, decode: nobody is left" in notes
    assert len(report.samples) == 2 * 5


def test_what_is_too_slow_is_told() -> None:
    report = measured(rest_s=0.0088, kill=False, sessions=1).report(origin(), complete=True)
    assert [item["held"] for item in report.results["distances"]] == [False, False]
    assert any("2.20 ms a hop at most; to reach 2.00 ms: not reached" in note for note in report.notes)
    assert len(report.tables) == 1


def test_what_was_not_measured_is_not_shown() -> None:
    work = measured()
    work.distances[1].one = None
    report = work.report(origin(), complete=False)
    assert [len(table.rows) for table in report.tables] == [1, 1, 0]
    nothing = ChainBench(a_plan()).report(origin(), complete=False)
    assert [table.rows for table in nothing.tables] == [[], [], []]


def test_links_have_the_name_that_workers_take() -> None:
    assert [link_name(each) for each in (0.0, 20.0, 80.5)] == ["", "20ms", "80.5ms"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--rtt", "20,far"), "'20,far' is no list of milliseconds"),
        (("--stages", "0"), "Invalid value"),
        (("--stages", "5", "--layers", "4"), "a model of 4 layers has no 5 stages"),
        (("--width", "100"), "no multiple of 64"),
        (("--json", "/nowhere/a.json"), "no place for a file"),
    ],
)
def test_a_bad_argument_is_refused_before_anything_starts(
    command: Command, arguments: tuple[str, ...], words: str
) -> None:
    outcome = command("bench", "chain", *arguments)
    assert outcome.code == 2
    assert words in outcome.err
    assert outcome.out == ""


def test_a_model_that_there_is_no_memory_for(command: Command) -> None:
    outcome = command("bench", "chain", "--layers", "200", "--width", "16384")
    assert outcome.code == ResourceError.exit_code
    assert "GiB are free" in outcome.err


def test_it_shows_how_it_is_used(command: Command) -> None:
    outcome = command("bench", "chain", "--help")
    assert outcome.code == 0
    assert "p2ptrain bench chain --rtt 20 --kill" in outcome.out
