"""Prompts through a chain: shown in order while they are computed at once, and measured. The chain is a stand-in."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from p2ptrain.cli.generate import Shown
from p2ptrain.cli.output import Console
from p2ptrain.cli.split import LoadingLine
from p2ptrain.cli.split_generate import Order, Writing, _write
from p2ptrain.cli.split_options import SplitWish
from p2ptrain.cli.split_stats import Meter, print_split_facts, split_facts
from p2ptrain.compute.text import ModelText
from p2ptrain.compute.tokenizer import Tokenizer
from p2ptrain.core.errors import ConnectionLost
from p2ptrain.core.serving import Sampling, SamplingWish
from ring.placement import Peer, Placement, Stage
from roles.chain.client import Progress
from roles.chain.generation import Token
from roles.chain.peer import WorkerAt

DEADLINE_S = 10.0
PLACEMENT = Placement(
    stages=tuple(
        Stage(Peer(f"id{index}", f"box{index}", 1 << 30, 1e-9), 2 * index, 2 * index + 2, 1000, 9, 5, 0.002, 0.001, 0.0)
        for index in range(2)
    ),
    client_hop_s=0.001,
    client_occupied_s=0.0,
)
LOADED = SimpleNamespace(
    width=8, device="cpu", read_bytes=900, received_bytes=100, weights_bytes=1000, resident_bytes=5 << 20
)


class Session:
    """Gives one byte of its text whenever the chain lets it."""

    def __init__(self, chain: StandIn, prompt: str, text: str) -> None:
        self.chain, self.prompt, self.text = chain, prompt, text
        self.mendings = [("box1", 0.5)] if "lost" in prompt else []
        self.cancelled = self.closed = False

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.closed = True
        self.chain.news.set()

    def cancel(self) -> None:
        self.cancelled = True

    async def __aiter__(self) -> AsyncIterator[Token]:
        for number, byte in enumerate(self.text.encode()):
            await self.chain.turn(self.prompt)
            if byte == ord("!"):
                raise ConnectionLost("box1 is lost", remedy="start another")
            mended = byte == ord("~")
            yield Token(byte, number, (2000, 3000), 5.0 if mended else 0.009, mended=mended)


class StandIn:
    """A chain that answers from a map, in any order it is told."""

    def __init__(self, answers: dict[str, str]) -> None:
        self.answers = answers
        self.asked: list[dict[str, Any]] = []
        self.sessions: list[Session] = []
        self.gates: dict[str, asyncio.Event] = {}
        self.news = asyncio.Event()
        self.plan = SimpleNamespace(
            placement=PLACEMENT,
            stages=[
                SimpleNamespace(
                    worker=WorkerAt(f"id{index}", f"box{index}", "h", 1), start=index * 2, stop=index * 2 + 2
                )
                for index in range(2)
            ],
        )
        self.loaded = [LOADED, LOADED]

    async def turn(self, prompt: str) -> None:
        if prompt in self.gates:
            await self.gates[prompt].wait()
        await asyncio.sleep(0)

    async def until(self, fits: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not fits():
                self.news.clear()
                await self.news.wait()

    async def generate(self, ids: Sequence[int], **settings: Any) -> Session:
        prompt = bytes(ids).decode()
        self.asked.append({"prompt": prompt} | settings)
        self.sessions.append(Session(self, prompt, self.answers[prompt]))
        self.news.set()
        return self.sessions[-1]


@pytest.fixture
def text(tmp_path: Path) -> ModelText:
    Tokenizer.of_bytes().save(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    return ModelText(tmp_path)


def order(prompts: list[str], **changes: Any) -> Order:
    settings: dict[str, Any] = {
        "is_one": False,
        "max_new_tokens": 50,
        "sampling": SamplingWish(temperature=1.0, top_k=0, seed=3),
        "stop": ("END",),
        "sessions": 3,
        "dry_run": False,
        "stats": False,
        "as_json": False,
    }
    return Order(prompts=prompts, **(settings | changes))


def plan_of(text: ModelText, wire: str = "") -> Any:
    return SimpleNamespace(text=text, wish=SplitWish(2, wire=wire), label="here", encoding=wire or "fp32")


async def written(text: ModelText, chain: StandIn, wanted: Order) -> Writing:
    writing = Writing(plan_of(text), chain, wanted, Shown(quiet=wanted.as_json))  # type: ignore[arg-type]
    texts = await writing.run()
    assert [item.prompt for item in texts] == wanted.prompts
    assert all(session.closed for session in chain.sessions)
    return writing


async def test_texts_are_shown_in_order_however_they_end(text: ModelText, capsys: pytest.CaptureFixture[str]) -> None:
    chain = StandIn({"a": "first", "b": "second", "c": "third", "d": "fourth"})
    chain.gates["a"] = asyncio.Event()
    writing = asyncio.create_task(written(text, chain, order(["a", "b", "c", "d"])))
    await chain.until(lambda: len(chain.sessions) == 4 and chain.sessions[3].closed)
    assert capsys.readouterr().out == "", "what is behind waits"
    chain.gates["a"].set()
    await writing
    assert capsys.readouterr().out == "afirst\n\nbsecond\n\ncthird\n\ndfourth\n"
    assert [call["prompt"] for call in chain.asked] == ["a", "b", "c", "d"]


async def test_the_first_that_is_not_whole_is_shown_as_it_comes(
    text: ModelText, capsys: pytest.CaptureFixture[str]
) -> None:
    chain = StandIn({"a": "1", "b": "234"})
    chain.gates["b"] = asyncio.Event()
    writing = asyncio.create_task(written(text, chain, order(["a", "b"])))
    await chain.until(lambda: bool(chain.sessions) and chain.sessions[0].closed)
    await asyncio.sleep(0)  # what closed it goes on
    assert capsys.readouterr().out == "a1\n"
    chain.gates["b"].set()
    await writing
    assert capsys.readouterr().out == "\nb234\n"


async def test_no_more_sessions_than_asked_for(text: ModelText) -> None:
    chain = StandIn(dict.fromkeys("abcd", "x"))
    for name in "ab":
        chain.gates[name] = asyncio.Event()
    writing = asyncio.create_task(written(text, chain, order(list("abcd"), sessions=2, as_json=True)))
    await chain.until(lambda: len(chain.sessions) == 2)
    chain.gates["b"].set()
    await chain.until(lambda: len(chain.sessions) == 4)
    assert not chain.sessions[0].closed
    chain.gates["a"].set()
    await writing


async def test_a_stop_string_ends_the_session(text: ModelText, capsys: pytest.CaptureFixture[str]) -> None:
    chain = StandIn({"a": "oneENDtwo"})
    await written(text, chain, order(["a"]))
    assert capsys.readouterr().out == "aone\n"
    assert chain.sessions[0].cancelled


async def test_what_the_chain_is_asked_for(text: ModelText) -> None:
    chain = StandIn({"a": "x"})
    writing = Writing(plan_of(text, "int8"), chain, order(["a"], as_json=True), Shown(quiet=True))  # type: ignore[arg-type]
    await writing.run()
    assert chain.asked == [
        {
            "prompt": "a",
            "max_new_tokens": 50,
            "sampling": Sampling(seed=3),
            "stop_ids": frozenset(),
            "encoding": "",
            "prefill_encoding": "int8",
        }
    ]


async def test_a_chain_that_breaks_ends_all_and_leaves_the_line(
    text: ModelText, capsys: pytest.CaptureFixture[str]
) -> None:
    chain = StandIn({"a": "on!", "b": "never"})
    chain.gates["b"] = asyncio.Event()
    with pytest.raises(ConnectionLost, match="box1 is lost"):
        await _write(plan_of(text), chain, order(["a", "b"]), Shown(quiet=False))  # type: ignore[arg-type]
    assert capsys.readouterr().out == "aon\n"
    assert all(session.closed for session in chain.sessions)


# ------------------------------------------------------------------------------------------------- what is measured


async def test_json_tells_all(text: ModelText, capsys: pytest.CaptureFixture[str]) -> None:
    chain = StandIn({"a": "xyz", "lost": "x~z"})
    await _write(plan_of(text, "bf16"), chain, order(["a", "lost"], as_json=True), Shown(quiet=True))  # type: ignore[arg-type]
    document = json.loads(capsys.readouterr().out)
    assert [(item["prompt"], item["text"], item["ended"]) for item in document["texts"]] == [
        ("a", "xyz", "length"),
        ("lost", "x~z", "length"),
    ]
    split = document["split"]
    # 9 ms a token: 2 + 3 computing, 1 + 1 + 1 on the way, 1 the rest. First tokens and mended ones count apart.
    known = ("token_ms", "compute_ms", "link_ms", "rest_ms", "prompt_ms")
    assert [round(split[name], 6) for name in known] == [9.0, 5.0, 3.0, 1.0, 9.0]
    assert [stage["compute_ms"] for stage in split["stages"]] == [2.0, 3.0]
    assert [stage["wire_bytes"] for stage in split["stages"]] == [16, 4], "the last one sends a token"
    assert split["mendings"] == [{"lost": "box1", "seconds": 0.5}]
    assert document["plan"]["stages"][0]["name"] == "box0"
    await _write(plan_of(text), chain, order(["a"], is_one=True, as_json=True), Shown(quiet=True))  # type: ignore[arg-type]
    assert json.loads(capsys.readouterr().out)["text"] == "xyz"


async def test_the_table_for_people(text: ModelText, capsys: pytest.CaptureFixture[str]) -> None:
    chain = StandIn({"lost": "xyz"})
    await _write(plan_of(text), chain, order(["lost"], stats=True), Shown(quiet=False))  # type: ignore[arg-type]
    captured = capsys.readouterr()
    rows = [line.split() for line in captured.out.splitlines()]
    assert rows[2] == ["PEER", "LAYERS", "READ", "RECEIVED", "WEIGHTS", "MEMORY", "MS/TOKEN", "WIRE"]
    assert rows[3] == ["box0", "0–1", "900", "B", "100", "B", "1000", "B", "5.0", "MiB", "2.00", "32", "B"]
    assert "a token took 9.00 ms: 5.00 computing + 3.00 on the way + 1.00 the rest; a prompt 9.00 ms" in captured.out
    assert "box1 was lost; the text went on 0.50 s later" in captured.out
    assert captured.err.endswith(" tokens/s, 2 stages, here)\n")


def test_before_the_first_token_nothing_is_known_of_times(capsys: pytest.CaptureFixture[str]) -> None:
    facts = split_facts(StandIn({}), Meter(), "fp32")  # type: ignore[arg-type]
    assert (facts["token_ms"], facts["prompt_ms"], facts["stages"][0]["compute_ms"]) == (None, None, None)
    print_split_facts(facts)
    out = capsys.readouterr().out
    assert "MS/TOKEN" not in out
    assert "a token took" not in out


def test_progress_of_all_stages_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    clock = [0.0]
    line = LoadingLine(StandIn({}).plan, Console(lambda: clock[0]))  # type: ignore[arg-type]
    line.show(Progress(0, "box0", 500, 1000))
    clock[0] = 2.0
    line.show(Progress(1, "box9", 1000, 1000))
    line.show(Progress(1, "box9", 1000, 1000, ready=True))
    line.show(Progress(0, "box0", 1000, 1000, ready=True))
    assert capsys.readouterr().err.splitlines() == [
        "loading  500 B of 2.0 KiB  box0 50 %  box1 0 %",
        "loading  1.5 KiB of 2.0 KiB  box0 50 %  box9 100 %",
        "loading  2.0 KiB of 2.0 KiB  box0 ready  box9 ready",
    ]


Command = Callable[..., Any]


def test_several_prompts_are_checked_before_anybody_is_asked(command: Command, tmp_path: Path) -> None:
    outcome = command("generate", "x", "--split", "-c", str(tmp_path))
    assert outcome.err.startswith(f"error: {tmp_path} holds no checkpoint\n")
