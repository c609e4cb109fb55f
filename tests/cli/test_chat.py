"""``p2ptrain chat``: what it reads, what it shows, what it keeps. The model is a stand-in that answers from a list."""

from __future__ import annotations

import io
import json
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import pytest

from p2ptrain.cli import sources
from p2ptrain.cli.sources import Leaving, LocalSource, pumped
from p2ptrain.compute.text import ModelText
from p2ptrain.compute.tokenizer import Tokenizer
from p2ptrain.core.errors import ConnectionLost, ResourceError

Command = Callable[..., Any]
CTRL_C = "\x03"


class Scripted:
    """A source that answers from a list; ``CTRL_C`` in an answer is the person's."""

    def __init__(self, directory: Path, answers: list[str]) -> None:
        self.text = ModelText(directory)
        self.label, self.context = str(directory), self.text.context
        self.answers = answers
        self.prompts: list[str] = []
        self.asked: list[dict[str, Any]] = []
        self.given = 0
        self.closed = False

    def tokens(self, ids: Sequence[int], **settings: Any) -> Generator[int, None, None]:
        self.prompts.append(bytes(ids).decode())
        self.asked.append(settings)
        answer = self.answers.pop(0).encode()
        for token in answer[: settings["max_new_tokens"]]:
            if token == ord(CTRL_C):
                raise KeyboardInterrupt
            self.given += 1
            yield token

    def facts(self) -> dict[str, Any]:
        return {"checkpoint": self.label}

    def close(self) -> None:
        self.closed = True


class Typed(io.StringIO):
    """Standard input with a person before it who presses Ctrl+C."""

    def isatty(self) -> bool:
        return True

    def readline(self, *_: Any) -> str:
        if (line := super().readline()) == CTRL_C + "\n":
            raise KeyboardInterrupt
        return line


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

    def run(lines: list[str], answers: list[str], *options: str, piped: bool = False) -> tuple[Any, Scripted]:
        source = Scripted(checkpoint, answers)
        monkeypatch.setattr(sources, "LocalSource", lambda directory, device: source)
        content = "".join(line + "\n" for line in lines)
        stdin = io.TextIOWrapper(io.BytesIO(content.encode())) if piped else Typed(content)
        monkeypatch.setattr(sys, "stdin", stdin)
        outcome = command("chat", "-c", str(checkpoint), *options)
        assert source.closed
        return outcome, source

    return run


def test_a_conversation(chat: Callable[..., Any]) -> None:
    outcome, source = chat(["hello", "", " /and now "], [" hi\nUser: no", " fine"], "--system", "Be brief.")
    assert (outcome.code, outcome.out) == (0, "> hi\n> > fine\n> \n")
    assert source.prompts == [
        "Be brief.\n\nUser: hello\nAssistant:",
        "Be brief.\n\nUser: hello\nAssistant: hi\nUser: /and now\nAssistant:",
    ]
    assert source.given == len(" hi\nUser:") + len(" fine"), "nothing more is computed once an answer ended"
    lines = outcome.err.splitlines()
    assert lines[0].endswith("no chat template: plain turns, 300 tokens of context. /help lists commands)")
    assert lines[1].startswith("(9 tokens, ")


def test_options_reach_the_model(chat: Callable[..., Any]) -> None:
    options = ["-n", "9", "--temperature", "0.5", "--top-k", "3", "--top-p", "0.9", "--random-seed", "4"]
    outcome, source = chat(["x"], ["one.two"], *options, "--stop", ".")
    asked = source.asked[0]
    sampling = asked["sampling"]
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed) == (0.5, 3, 0.9, 4)
    assert (asked["max_new_tokens"], outcome.out) == (9, "> one\n> \n")


def test_a_cancelled_answer_keeps_the_conversation_and_a_second_ctrl_c_leaves(chat: Callable[..., Any]) -> None:
    outcome, source = chat(["a", "b", CTRL_C, "never"], ["first", "sec" + CTRL_C])
    assert (outcome.code, outcome.out) == (0, "> first\n> sec\n> \n")
    assert "(3 tokens" in outcome.err
    assert "cancelled. Ctrl+C again leaves" in outcome.err
    outcome, source = chat(["a", "b", "c", "/quit"], ["one", "sec" + CTRL_C, "three"])
    assert source.prompts[-1] == "User: a\nAssistant: one\nUser: b\nAssistant: sec\nUser: c\nAssistant:"


def test_an_answer_cancelled_before_it_began_is_no_turn(chat: Callable[..., Any]) -> None:
    outcome, source = chat(["a", "b"], [CTRL_C, "fine"])
    assert "(cancelled, the question is forgotten)" in outcome.err
    assert source.prompts[-1] == "User: b\nAssistant:"


def test_ctrl_c_where_a_question_is_typed(chat: Callable[..., Any]) -> None:
    outcome, source = chat([CTRL_C, "a", CTRL_C, CTRL_C, "never"], ["one"])
    assert (outcome.code, outcome.out, len(source.prompts)) == (0, "> \n> one\n> \n> \n", 1)
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
    outcome, source = chat([*lines, "never"], ["one", "two"])
    assert outcome.code == 0
    assert "/reset       begin a new conversation" in outcome.err
    assert source.prompts == ["User: a\nAssistant:", "User: b\nAssistant:"]
    assert json.loads(document.read_text()) == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "one"},
    ]
    assert text.read_text() == "User: b\nAssistant: two\n", "what it wrote it may write again"
    assert "error: there is no command /what\n  → /help lists them" in outcome.err
    assert "error: /save needs the name of a file" in outcome.err


def test_a_file_of_somebody_else_is_kept(chat: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    outcome, _ = chat(["a", f"/save {tmp_path / 'mine'}", f"/save {tmp_path}/none/x"], ["one"])
    assert f"error: {tmp_path / 'mine'} exists\n" in outcome.err
    assert "error: cannot write" in outcome.err
    assert (tmp_path / "mine").read_text() == "precious"


def test_the_oldest_turns_are_dropped_and_it_is_said(chat: Callable[..., Any]) -> None:
    outcome, source = chat(["x" * 100, "y" * 100, "z"], ["one", "two", "three"], "-n", "80")
    assert source.prompts[-1].startswith("User: " + "y" * 100)
    assert "(the oldest 2 turns no longer fit the context of 300 tokens: the model does not see them" in outcome.err


def test_a_question_that_is_too_long_ends_nothing(chat: Callable[..., Any]) -> None:
    outcome, source = chat(["x" * 400, "short"], ["fine"])
    assert (outcome.code, outcome.out) == (0, "> > fine\n> \n")
    assert "error: the question has 417 tokens, the model's context is 300" in outcome.err
    assert source.prompts == ["User: short\nAssistant:"]


def test_a_model_that_is_lost_ends_no_conversation(
    chat: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole = Scripted.tokens

    def tokens(self: Scripted, ids: Sequence[int], **settings: Any) -> Generator[int, None, None]:
        yield from whole(self, ids, **settings)
        if self.prompts[-1].endswith("User: b\nAssistant:"):
            raise ConnectionLost("box1 is lost", remedy="start another")

    monkeypatch.setattr(Scripted, "tokens", tokens)
    lines = ["a", "b", f"/save {tmp_path / 'x.txt'}", "c"]
    outcome, source = chat(lines, ["one", "tw", "three"])
    assert (outcome.code, outcome.out) == (0, "> one\n> tw\n> > three\n> \n")
    assert "error: box1 is lost\n  → start another\n" in outcome.err
    assert source.prompts[-1] == "User: a\nAssistant: one\nUser: c\nAssistant:"
    assert (tmp_path / "x.txt").read_text() == "User: a\nAssistant: one\n"
    assert chat(["b"], ["tw"], piped=True)[0].code == 3
    broken = chat(["a", "b"], ["one", "tw"], "--json", piped=True)[0]
    assert (broken.code, broken.json["error"]["message"]) == (3, "box1 is lost")
    assert [answer["text"] for answer in broken.json["answers"]] == ["one"], "what had been said is there"
    assert broken.json["turns"] == [{"role": "user", "content": "a"}, {"role": "assistant", "content": "one"}]


def test_why_an_answer_was_cut_off(chat: Callable[..., Any]) -> None:
    outcome, _ = chat(["a"], ["x" * 9], "-n", "5")
    assert "cut off, --tokens N allows more" in outcome.err
    outcome, _ = chat(["x" * 200], ["x" * 300], "-n", "300")
    assert "cut off, the context is full" in outcome.err


def test_what_a_terminal_would_obey_is_not_written(chat: Callable[..., Any]) -> None:
    assert chat(["a"], ["\x1b[2Jx\u200dy"])[0].out == "> �[2Jx\u200dy\n> \n"


def test_over_a_pipe_lines_are_questions_and_only_answers_are_written(chat: Callable[..., Any]) -> None:
    outcome, source = chat(["a", "", "/reset", "b"], [" one", " two"], piped=True)
    assert (outcome.code, outcome.out, outcome.err) == (0, "one\ntwo\n", "")
    assert source.prompts == ["User: a\nAssistant:", "User: b\nAssistant:"]


def test_over_a_pipe_a_mistake_ends_it(chat: Callable[..., Any]) -> None:
    outcome, _ = chat(["/what", "b"], ["one"], piped=True)
    assert (outcome.code, outcome.err.splitlines()[0]) == (2, "error: there is no command /what")
    assert chat(["a", "b"], ["o" + CTRL_C, "x"], piped=True)[0].code == 130


def test_a_line_that_does_not_end_is_refused_before_it_is_read_to_its_end(
    chat: Callable[..., Any], command: Command, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat([], [])
    endless = io.TextIOWrapper(io.BytesIO(b"\0" * (20 << 20)), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", endless)
    outcome = command("chat", "-c", str(checkpoint))
    assert (outcome.code, "a line of more than 16 Mi characters" in outcome.err) == (2, True)
    assert endless.read(1) == "\0"


def test_what_is_no_text_is_refused(
    chat: Callable[..., Any], command: Command, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat([], [])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n"), encoding="utf-8"))
    outcome = command("chat", "-c", str(checkpoint))
    assert (outcome.code, outcome.err.splitlines()[0]) == (2, "error: standard input is not UTF-8 text")


def test_json_is_one_document(chat: Callable[..., Any]) -> None:
    outcome, source = chat(["a", "b"], ["one", "two"], "--json", piped=True)
    assert outcome.json["checkpoint"] == source.label
    assert [answer["text"] for answer in outcome.json["answers"]] == ["one", "two"]
    assert [turn["content"] for turn in outcome.json["turns"]] == ["a", "one", "b", "two"]
    assert outcome.json["answers"][0].keys() == {"prompt", "text", "tokens", "seconds", "first_s", "ended"}
    outcome, _ = chat(["a", "/stats"], ["one"], "--json", piped=True)
    assert [answer["text"] for answer in outcome.json["answers"]] == ["one"], "nothing stands beside the document"


def test_an_answer_of_white_space_is_told(chat: Callable[..., Any]) -> None:
    outcome, source = chat(["a", "b"], ["\n  ", "x"])
    assert "(3 tokens, " in outcome.err
    assert ", nothing but white space: the question is forgotten" in outcome.err
    assert source.prompts[-1] == "User: b\nAssistant:"
    assert "(1 token, " in outcome.err


@pytest.mark.parametrize("arguments", [["--split"], ["-c", "here", "--job", "tiny"]])
def test_no_checkpoint(command: Command, arguments: list[str]) -> None:
    assert command("chat", *arguments).err.startswith("error: chat needs one checkpoint\n")


# ----------------------------------------------------------------------------------- tokens from another thread


def test_tokens_of_another_thread_come_in_order_and_its_error_too() -> None:
    def work(hand_over: Callable[[int], bool]) -> None:
        assert all(hand_over(token) for token in range(5))
        raise ResourceError("full")

    tokens = pumped(work, most=5)
    assert [next(tokens) for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(ResourceError):
        next(tokens)


def test_closing_ends_the_work_and_waits_for_it() -> None:
    ended = threading.Event()

    def work(hand_over: Callable[[int], bool]) -> None:
        token = 0
        while hand_over(token):
            token += 1
        ended.set()

    tokens = pumped(work, most=10_000_000)
    assert next(tokens) == 0
    tokens.close()
    assert ended.is_set()


def test_ctrl_c_while_a_cancelled_answer_is_computed_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def work(hand_over: Callable[[int], bool]) -> None:
        hand_over(1)
        release.wait(10)

    def join(self: threading.Thread, timeout: float | None = None) -> None:
        raise KeyboardInterrupt

    tokens = pumped(work, most=1, name="busy")
    assert next(tokens) == 1
    monkeypatch.setattr(threading.Thread, "join", join)
    with pytest.raises(Leaving):
        tokens.close()
    monkeypatch.undo()
    release.set()
    for thread in threading.enumerate():
        if thread.name == "busy":
            thread.join(10)


def test_the_real_source_gives_what_the_model_gives(tmp_path: Path) -> None:
    from p2ptrain.compute.generate import LocalModel
    from p2ptrain.compute.model import build_model
    from p2ptrain.core.serving import Sampling
    from tests.compute.tiny_trainer import TINY

    build_model(TINY, 256, seed=1).save_pretrained(tmp_path)
    Tokenizer.of_bytes().save(tmp_path)
    settings: dict[str, Any] = {"max_new_tokens": 12, "sampling": Sampling(temperature=1.0, seed=3)}
    expected: list[int] = []
    LocalModel(tmp_path, device="cpu").tokens(list(b"hello"), on_token=lambda t: not expected.append(t), **settings)
    source = LocalSource(tmp_path, device="cpu")
    assert list(source.tokens(list(b"hello"), end_tokens=frozenset(), **settings)) == expected
    ended = source.tokens(list(b"hello"), end_tokens=frozenset(expected[3:4]), **settings)
    assert list(ended) == expected[: expected.index(expected[3]) + 1]
