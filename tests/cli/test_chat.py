"""``p2ptrain chat``: what it reads, what it shows, what it keeps. The text service is a stand-in that answers from a
list."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from p2ptrain.cli import text as text_module
from p2ptrain.cli.text import TextSource
from p2ptrain.cluster.loops import ServiceThread
from p2ptrain.compute.tokenizer import Tokenizer
from p2ptrain.core.errors import ConnectionLost, Unreachable
from roles.serving.texts import TextRequest
from tests.compute.tiny_trainer import TINY
from tests.roles.stage_stand_in import stand_in_part
from tests.roles.verifier.doubles import CONFIG, model_text, reference, text_of
from tests.roles.verifier.scripted import ScriptedService, ScriptedWriting

from .conftest import CTRL_C, Command, Typed

LOST = "\x04"


def answer(text: str, request: TextRequest, left_out: int) -> ScriptedWriting:
    """It comes letter by letter; ``CTRL_C`` in it is the person's, at ``LOST`` the model is lost."""
    most = request.max_new_tokens or 99
    letters, sign, _ = text.partition(CTRL_C if CTRL_C in text else LOST)
    return ScriptedWriting(
        letters[:most],
        ends="length" if len(letters) > most else "end",
        left_out=left_out,
        held_at=len(letters) if sign == CTRL_C else None,
        on_hold=lambda: os.kill(os.getpid(), signal.SIGINT),
        fails=ConnectionLost("box1 is lost", remedy="start another") if sign == LOST else None,
    )


def questions(service: ScriptedService, index: int = -1) -> list[str]:
    return [turn.text for turn in service.wishes[index].turns]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    Tokenizer.of_bytes().save(path)
    (path / "config.json").write_text('{"max_position_embeddings": 300}')
    return path


@pytest.fixture
def chat(command: Command, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Run a chat: lines that are typed (or piped), answers, options. Returns its outcome and the source."""

    def run(lines: list[str], answers: list[str], *options: str, piped: bool = False, left_out: int = 0) -> Any:
        service = ScriptedService()
        service.context = 300
        service.script = lambda request: answer(answers.pop(0), request, left_out)

        @asynccontextmanager
        async def source(*_: Any, **more: Any) -> AsyncIterator[TextSource]:
            yield TextSource(service, "model", "plain turns", {"checkpoint": str(checkpoint)})

        monkeypatch.setattr(text_module, "text_source", source)
        content = "".join(line + "\n" for line in lines)
        stdin = io.TextIOWrapper(io.BytesIO(content.encode())) if piped else Typed(content)
        outcome = command("chat", "-c", str(checkpoint), *options, stdin=stdin)
        assert all(writing.closed.is_set() for writing in service.writings)
        return outcome, service

    return run


def test_a_conversation(chat: Callable[..., Any]) -> None:
    outcome, service = chat(["hello", "", " /and now "], [" hi", " fine"], "--system", "Be brief.")
    assert (outcome.code, outcome.out) == (0, "> hi\n> > fine\n> \n")
    assert [turn.role for turn in service.wishes[1].turns] == ["system", "user", "assistant", "user"]
    assert questions(service) == ["Be brief.", "hello", "hi", "/and now"]
    lines = outcome.err.splitlines()
    assert lines[0] == "(model: plain turns. /help lists commands)"
    assert lines[1].startswith("(3 tokens, ")


def test_options_reach_the_model(chat: Callable[..., Any]) -> None:
    options = ["-n", "9", "--temperature", "0.5", "--top-k", "3", "--top-p", "0.9", "--random-seed", "4"]
    _, service = chat(["x"], ["one"], *options, "--stop", ".")
    asked = service.wishes[0]
    sampling = asked.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed) == (0.5, 3, 0.9, 4)
    assert (asked.max_new_tokens, asked.stop, asked.speculate) == (9, (".",), True)


def test_a_cancelled_answer_keeps_the_conversation_and_a_second_ctrl_c_leaves(chat: Callable[..., Any]) -> None:
    outcome, source = chat(["a", "b", CTRL_C, "never"], ["first", "sec" + CTRL_C])
    assert (outcome.code, outcome.out) == (0, "> first\n> sec\n> \n")
    assert "(3 tokens" in outcome.err
    assert "cancelled. Ctrl+C again leaves" in outcome.err
    outcome, source = chat(["a", "b", "c", "/quit"], ["one", "sec" + CTRL_C, "three"])
    assert questions(source) == ["a", "one", "b", "sec", "c"]


def test_an_answer_cancelled_before_it_began_is_no_turn(chat: Callable[..., Any]) -> None:
    outcome, source = chat(["a", "b"], [CTRL_C, "fine"])
    assert "(cancelled, the question is forgotten)" in outcome.err
    assert questions(source) == ["b"]


def test_ctrl_c_where_a_question_is_typed(chat: Callable[..., Any]) -> None:
    outcome, source = chat([CTRL_C, "a", CTRL_C, CTRL_C, "never"], ["one"])
    assert (outcome.code, outcome.out, len(source.wishes)) == (0, "> \n> one\n> \n> \n", 1)
    assert outcome.err.count("Ctrl+C again leaves") == 2


def test_commands(chat: Callable[..., Any], tmp_path: Path) -> None:
    text, document = tmp_path / "talk.txt", tmp_path / "talk.json"
    lines = [
        "/help",
        "a",
        f"/save {text}",
        f"/save {document}",
        "/reset",
        "b",
        f"/save {text}",
        "/what",
        "/save",
        "/quit",
    ]
    (tmp_path / "mine").write_text("precious")
    lines.insert(2, f"/save {tmp_path / 'mine'}")
    outcome, source = chat([*lines, "never"], ["one", "two"])
    assert f"error: {tmp_path / 'mine'} exists\n" in outcome.err
    assert (tmp_path / "mine").read_text() == "precious"
    assert outcome.code == 0
    assert "/reset       begin a new conversation" in outcome.err
    assert [questions(source, index) for index in (0, 1)] == [["a"], ["b"]]
    assert json.loads(document.read_text()) == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "one"},
    ]
    assert text.read_text() == "User: b\nAssistant: two\n", "what it wrote it may write again"
    assert "error: there is no command /what\n  → /help lists them" in outcome.err
    assert "error: /save needs the name of a file" in outcome.err


def test_turns_that_are_left_out_are_told(chat: Callable[..., Any]) -> None:
    outcome, _ = chat(["a"], ["one"], left_out=2)
    assert "(the oldest 2 turns no longer fit the context of 300 tokens: the model does not see them" in outcome.err


def test_a_model_that_is_lost_ends_no_conversation(chat: Callable[..., Any], tmp_path: Path) -> None:
    lines = ["a", "b", f"/save {tmp_path / 'x.txt'}", "c"]
    outcome, service = chat(lines, ["one", "tw" + LOST, "three"])
    assert (outcome.code, outcome.out) == (0, "> one\n> tw\n> > three\n> \n")
    assert "error: box1 is lost\n  → start another\n" in outcome.err
    assert questions(service) == ["a", "one", "c"]
    assert (tmp_path / "x.txt").read_text() == "User: a\nAssistant: one\n"
    assert chat(["b"], ["tw" + LOST], piped=True)[0].code == 3
    broken = chat(["a", "b"], ["one", "tw" + LOST], "--json", piped=True)[0]
    assert (broken.code, broken.json["error"]["message"]) == (3, "box1 is lost")
    assert [answer["text"] for answer in broken.json["answers"]] == ["one"], "what had been said is there"
    assert broken.json["turns"] == [{"role": "user", "content": "a"}, {"role": "assistant", "content": "one"}]


def test_an_answer_that_was_cut_off_or_says_nothing_is_told(chat: Callable[..., Any]) -> None:
    assert "cut off, --tokens N allows more" in chat(["a"], ["x" * 9], "-n", "5")[0].err
    assert "cut off, the context is full" in chat(["x"], ["x" * 400], "-n", "300")[0].err
    outcome, source = chat(["a", "b"], ["\n  ", "x"])
    assert "(3 tokens, " in outcome.err
    assert "the question is forgotten" in outcome.err
    assert questions(source) == ["b"]


def test_over_a_pipe_lines_are_questions_and_only_answers_are_written(chat: Callable[..., Any]) -> None:
    outcome, source = chat(["a", "", "/reset", "b"], [" one", " two"], piped=True)
    assert (outcome.code, outcome.out, outcome.err) == (0, "one\ntwo\n", "")
    assert [questions(source, index) for index in (0, 1)] == [["a"], ["b"]]


def test_over_a_pipe_a_mistake_ends_it(chat: Callable[..., Any]) -> None:
    outcome, _ = chat(["/what", "b"], ["one"], piped=True)
    assert (outcome.code, outcome.err.splitlines()[0]) == (2, "error: there is no command /what")
    assert chat(["a", "b"], ["o" + CTRL_C, "x"], piped=True)[0].code == 130


def test_a_line_that_does_not_end_is_refused_before_it_is_read_to_its_end(
    chat: Callable[..., Any], command: Command, checkpoint: Path
) -> None:
    chat([], [])
    endless = io.TextIOWrapper(io.BytesIO(b"\0" * (20 << 20)), encoding="utf-8")
    outcome = command("chat", "-c", str(checkpoint), stdin=endless)
    assert (outcome.code, "a line of more than 16 Mi characters" in outcome.err) == (2, True)
    assert endless.read(1) == "\0"


def test_what_is_no_text_is_refused(chat: Callable[..., Any], command: Command, checkpoint: Path) -> None:
    chat([], [])
    no_text = io.TextIOWrapper(io.BytesIO(b"\xff\n"), encoding="utf-8")
    outcome = command("chat", "-c", str(checkpoint), stdin=no_text)
    assert (outcome.code, outcome.err.splitlines()[0]) == (2, "error: standard input is not UTF-8 text")


def test_json_is_one_document(chat: Callable[..., Any]) -> None:
    outcome, _ = chat(["a", "b"], ["one", "two"], "--json", piped=True)
    assert outcome.json["checkpoint"].endswith("model")
    assert [answer["text"] for answer in outcome.json["answers"]] == ["one", "two"]
    assert [turn["content"] for turn in outcome.json["turns"]] == ["a", "one", "b", "two"]
    assert outcome.json["answers"][0].keys() == {"prompt", "text", "tokens", "seconds", "first_s", "ended"}
    outcome, _ = chat(["a", "/stats"], ["one"], "--json", piped=True)
    assert [answer["text"] for answer in outcome.json["answers"]] == ["one"], "nothing stands beside the document"


def test_stats_are_shown(chat: Callable[..., Any]) -> None:
    assert "a token took 2.0 ms: 2.0 the rest" in chat(["a", "/stats"], ["one"])[0].out
    assert "error: no answer is complete yet" in chat(["/stats"], [])[0].err


def test_the_real_service_answers_as_transformers_does(command: Command, tmp_path: Path) -> None:
    import torch

    from p2ptrain.compute.model import build_model

    model: Any = build_model(TINY, 256, seed=1)
    model.save_pretrained(tmp_path)
    Tokenizer.of_bytes().save(tmp_path)
    ids = torch.tensor([list(b"hello")])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        made = model.eval().generate(ids, max_new_tokens=12, do_sample=True, top_k=0, pad_token_id=0)
    expected = bytes(made[0, 5:].tolist()).decode(errors="replace")
    drawn = ["--temperature", "1", "--top-k", "0", "--random-seed", "3", "-n", "12", "--json", "--device", "cpu"]
    assert command("generate", "hello", "-c", tmp_path, *drawn).json["text"] == expected


def test_a_model_of_this_machine_answers(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def load(directory: Path, compute: Any, **_: Any) -> tuple[Any, int]:
        return stand_in_part(CONFIG, 0, 2), 600

    monkeypatch.setattr("p2ptrain.cli.text.load_local_engine", load)
    model_text(tmp_path)
    question = "what is a ring of machines, and what is a chain?"
    outcome = command("chat", "-c", tmp_path, "-n", "12", "--json", stdin=io.StringIO(f"{question}\nand now?\n"))
    assert outcome.code == 0, outcome.err
    first, second = outcome.json["answers"]
    assert first["text"] == text_of(reference(f"User: {question}\nAssistant:", 12)).strip()
    assert (first["tokens"], second["tokens"]) == (12, 12)
    assert outcome.json["stats"]["cached_tokens"] == 64, "the second question goes on from the first one"


# --------------------------------------------------------------------------------------------------- the other thread


def test_what_is_entered_lives_on_the_thread_until_it_is_closed_and_is_left_there() -> None:
    left_on = list[str]()

    async def where() -> str:
        return threading.current_thread().name

    @asynccontextmanager
    async def opened() -> AsyncIterator[str]:
        try:
            yield "open"
        finally:
            await asyncio.sleep(0)
            left_on.append(await where())

    @asynccontextmanager
    async def refused() -> AsyncIterator[None]:
        raise Unreachable("nobody is there")
        yield

    thread = ServiceThread("text service")
    assert thread.enter(opened()) == "open"
    assert (thread.call(where()), left_on) == ("text service", [])
    with pytest.raises(Unreachable, match="nobody is there"):
        thread.enter(refused())
    thread.close()
    assert left_on == ["text service"]
