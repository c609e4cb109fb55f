"""``p2ptrain generate``: which checkpoint it takes, and what it writes. The model is a stand-in."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from p2ptrain.cli.generate import GeneratedTexts, GenerateRequest, Prompt, TextPrinter
from p2ptrain.cli.text import TextSource
from p2ptrain.cli.text_options import TextOptions, write
from p2ptrain.core.errors import ConnectionLost
from p2ptrain.core.serving import Sampling
from tests.roles.stage_stand_in import stand_in_part
from tests.roles.verifier.doubles import CONFIG, GREEDY, model_text, reference, text_of
from tests.roles.verifier.scripted import ScriptedService, ScriptedWriting
from wire.records import CheckpointInfo

from .conftest import Command


@pytest.fixture(autouse=True)
def loads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, str, str]]:
    """Directory, device and type of the models that were loaded; each is the stand-in."""
    loaded = list[tuple[Path, str, str]]()

    async def load(directory: Path, compute: Any, *, device: str, dtype: str, **_: Any) -> tuple[Any, int]:
        loaded.append((directory, device, dtype))
        return stand_in_part(CONFIG, 0, 2), 600

    monkeypatch.setattr("p2ptrain.cli.text.load_local_engine", load)
    return loaded


def shown(prompt: str, tokens: int, sampling: Sampling = GREEDY) -> str:
    return text_of(reference(prompt, tokens, sampling))


def _checkpoint(root: Path, step: int, *, age_s: float = 0.0) -> Path:
    path = root / f"step-{step:08d}"
    model_text(path)
    (path / "manifest.json").write_text("{}")
    for name in ("config.json", "manifest.json"):
        written = 1.7e9 - age_s
        os.utime(path / name, (written, written))
    return path


def test_text_is_written_as_it_comes(command: Command, loads: list[Any], tmp_path: Path) -> None:
    path = _checkpoint(tmp_path, 100)
    outcome = command("generate", "def ", "--checkpoint", path, "--temperature", "0", "-n", "8", "--dtype", "bf16")
    assert (outcome.code, outcome.out) == (0, f"def {shown('def ', 8)}")
    assert re.fullmatch(rf"\(8 tokens, .* tokens/s, {re.escape(str(path))}\)\n", outcome.err)
    assert loads == [(path, "auto", "bf16")]


@pytest.mark.parametrize(
    ("options", "plain", "odd"),
    [
        ((), GREEDY, Sampling(1.0, 50, 0.5)),
        (("--temperature", "0.7"), Sampling(0.7, 50, 1.0), Sampling(0.7, 50, 0.5)),
        (("--top-k", "0", "--top-p", "1", "--random-seed", "3"), Sampling(1.0, 0, 1.0, 3), Sampling(1.0, 0, 1.0, 3)),
        (("--temperature", "0", "--top-k", "3"), GREEDY, GREEDY),
    ],
)
def test_what_the_model_says_counts_where_the_person_says_nothing(
    command: Command, tmp_path: Path, options: tuple[str, ...], plain: Any, odd: Any
) -> None:
    for name, sampling in (("plain", plain), ("odd", odd)):
        path = _checkpoint(tmp_path / name, 1)
        if name == "odd":
            (path / "generation_config.json").write_text('{"do_sample": true, "top_p": 0.5}')
        outcome = command("generate", "x", "-c", path, "-n", "20", "--json", *options)
        assert outcome.json["text"] == text_of(reference("x", 20, sampling))


def test_json_is_one_document(command: Command, tmp_path: Path) -> None:
    path = _checkpoint(tmp_path, 100)
    outcome = command("generate", "def ", "-c", path, "-n", "8", "--json")
    assert outcome.err == ""
    document = json.loads(outcome.out)
    assert {name: document[name] for name in ("checkpoint", "prompt", "text", "tokens", "ended")} == {
        "checkpoint": str(path),
        "prompt": "def ",
        "text": text_of(reference("def ", 8)),
        "tokens": 8,
        "ended": "length",
    }
    assert document["seconds"] >= document["first_s"] > 0
    assert document["stats"]["tokens"] == 8


def test_several_prompts(command: Command, tmp_path: Path) -> None:
    path, file = _checkpoint(tmp_path, 100), tmp_path / "prompts.txt"
    file.write_bytes("one\r\n\n  two\nü".encode())
    outcome = command("generate", "--prompts", file, "-c", path, "-n", "5", "--stats")
    texts = "\n\n".join(f"{prompt}{shown(prompt, 5)}" for prompt in ("one", "  two", "ü"))
    assert outcome.out.startswith(texts)
    assert outcome.out.count("a token took ") == 3
    assert outcome.err.startswith("(15 tokens, ")
    document = command("generate", "--prompts", file, "-c", path, "--json", "-n", "5", "--sessions", "3").json
    assert [item["prompt"] for item in document["texts"]] == ["one", "  two", "ü"]
    assert [item["text"] for item in document["texts"]] == [text_of(reference(p, 5)) for p in ("one", "  two", "ü")]


def test_prompts_from_standard_input(command: Command, tmp_path: Path) -> None:
    path, asked = _checkpoint(tmp_path, 100), list[str]()
    for arguments in (["-"], ["--prompts", "-"]):
        stdin = io.TextIOWrapper(io.BytesIO(b"one\ntwo\n"))
        document = command("generate", *arguments, "-c", path, "-n", "2", "--json", stdin=stdin).json
        asked += [item["prompt"] for item in document.get("texts", [document])]
    assert asked == ["one\ntwo\n", "one", "two"]


@pytest.mark.parametrize(("is_terminal", "written"), [(False, "\x1b[2Jx\u200dy\r\n"), (True, "�[2Jx\u200dy�\n")])
def test_a_pipe_gets_the_text_as_it_is_and_a_terminal_nothing_that_it_would_obey(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool, written: str
) -> None:
    stdout = io.TextIOWrapper(io.BytesIO())
    stdout.isatty = lambda: is_terminal  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdout", stdout)
    write("\x1b[2Jx\u200dy\r\n")
    assert stdout.buffer.getvalue() == written.encode()  # type: ignore[attr-defined]


def test_what_is_no_file_of_prompts(command: Command, loads: list[Any], tmp_path: Path) -> None:
    path, file = str(_checkpoint(tmp_path, 100)), tmp_path / "prompts.txt"
    for content, said in ((b"\n \n", "holds no prompt"), (b"a\n\xff", "is not UTF-8 text (byte 2)")):
        file.write_bytes(content)
        assert said in command("generate", "--prompts", str(file), "-c", path).err
    assert "cannot read" in command("generate", "--prompts", str(tmp_path / "none"), "-c", path).err
    file.write_text(f"fine\n\n{'too long' * 99}\n")
    outcome = command("generate", "--prompts", str(file), "-c", path)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith(
        f"error: line 3 of {file}: 792 tokens of prompt and 200 new ones are more than the context"
    )
    assert loads == []
    for arguments in ([], ["x", "--prompts", str(file)]):
        outcome = command("generate", *arguments, "-c", path)
        assert outcome.err.startswith("error: generate needs a prompt\n")


def test_stop_strings_are_read_as_a_person_writes_them(command: Command, tmp_path: Path) -> None:
    assert TextOptions(stop=[r"\ndef \t", r"\\n\q", "\\"]).stops == ("\ndef \t", r"\n\q", "\\")
    whole = text_of(reference("x", 40))
    path, stop = _checkpoint(tmp_path, 100), whole[5:7]
    outcome = command("generate", "x", "-c", path, "-n", "40", "--stop", stop, "--json")
    assert (outcome.json["text"], outcome.json["ended"]) == (whole[: whole.index(stop)], "stop")
    outcome = command("generate", "x", "-c", path, "--stop", "")
    assert (outcome.code, outcome.err.splitlines()[0]) == (2, "error: a stop string is empty")


async def test_texts_are_shown_in_order_however_they_end(capsys: pytest.CaptureFixture[str]) -> None:
    service, held = ScriptedService(), ScriptedWriting(["first"], held_at=0)
    writings = {"a": held, "b": ScriptedWriting(["second"]), "c": ScriptedWriting(["third"])}
    service.script = lambda asked: writings[asked.prompt]
    order = GenerateRequest([Prompt(letter, "line") for letter in writings], 50, 3, TextOptions())
    texts = GeneratedTexts(TextSource(service, "here", "", {}), order, TextPrinter(quiet=False))
    writing = asyncio.create_task(texts.write())
    await writings["c"].closed.wait()
    assert capsys.readouterr().out == "", "what is behind waits"
    held.go.set()
    await writing
    assert capsys.readouterr().out == "afirst\n\nbsecond\n\ncthird"


async def test_a_text_that_fails_ends_all_and_programs_get_what_had_come(capsys: pytest.CaptureFixture[str]) -> None:
    service, lost = ScriptedService(), ConnectionLost("box1 is lost", remedy="start another")
    writings = {"a": ScriptedWriting(["on"], fails=lost), "b": ScriptedWriting(held_at=0)}
    service.script = lambda asked: writings[asked.prompt]
    for as_json in (False, True):
        with pytest.raises(ConnectionLost, match="box1 is lost"):
            await two_texts(service, as_json=as_json).write()
        assert all(writing.closed.is_set() for writing in writings.values())
        out = capsys.readouterr().out
        if not as_json:
            assert out == "aon"
            continue
        document = json.loads(out)
        assert [text["ended"] for text in document["texts"]] == ["failed", "failed"]
        assert (document["texts"][0]["text"], document["error"]["exit_code"]) == ("on", 3)


async def test_output_that_fails_is_no_mistake_of_the_program() -> None:
    class Unread(TextPrinter):
        def print(self, text: str) -> None:
            raise BrokenPipeError

    service = ScriptedService()
    service.script = lambda asked: ScriptedWriting(["on"])
    order = GenerateRequest([Prompt("a")], 50, 1, TextOptions())
    with pytest.raises(BrokenPipeError):
        await GeneratedTexts(TextSource(service, "here", "", {}), order, Unread(quiet=False)).write()


def two_texts(service: ScriptedService, *, as_json: bool) -> GeneratedTexts:
    order = GenerateRequest([Prompt("a", "line 1"), Prompt("b", "line 2")], 50, 2, TextOptions(as_json=as_json))
    return GeneratedTexts(TextSource(service, "here", "", {"checkpoint": "here"}), order, TextPrinter(quiet=as_json))


async def test_interrupted_document_has_the_finished_texts(capsys: pytest.CaptureFixture[str]) -> None:
    service = ScriptedService()
    writings = {"a": ScriptedWriting(["whole"]), "b": ScriptedWriting(held_at=0)}
    service.script = lambda asked: writings[asked.prompt]
    writing = asyncio.create_task(two_texts(service, as_json=True).write())
    await writings["a"].closed.wait()
    await writings["b"].waits.wait()
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    document = json.loads(capsys.readouterr().out)
    assert [(text["text"], text["ended"]) for text in document["texts"]] == [("whole", "end"), ("", "failed")]
    assert document["error"]["exit_code"] == 130


def test_the_newest_checkpoint_below_a_directory(command: Command, loads: list[Any], tmp_path: Path) -> None:
    _checkpoint(tmp_path / "workers" / "1" / "job", 300, age_s=9)
    newest = _checkpoint(tmp_path / "workers" / "2" / "job", 200)
    (tmp_path / "step-notanumber").mkdir()
    (tmp_path / "step-notanumber" / "manifest.json").write_text("{}")
    assert command("generate", "x", "-c", str(tmp_path)).code == 0
    assert loads[0][0] == newest


def _records(*paths: Path) -> dict[str, Any]:
    found = [
        CheckpointInfo(f"j@{step}@p", "j", step, str(path), "p", f"box{step}", "", 1, 1.7e9)
        for step, path in enumerate(paths, start=1)
    ]
    return {"checkpoints": [item.to_map() for item in found]}


def test_the_newest_checkpoint_of_a_job_on_this_machine(
    command: Command, loads: list[Any], fake_seed: Any, tmp_path: Path
) -> None:
    here = _checkpoint(tmp_path, 2)
    fake_seed.answers["checkpoints.list"] = _records(_checkpoint(tmp_path, 1), here, tmp_path / "elsewhere")
    assert command("generate", "x", "--job", "tiny").code == 0
    assert loads[0][0] == here
    assert fake_seed.asked == [("checkpoints.list", {"job": "tiny"})]


def test_a_job_whose_checkpoints_lie_elsewhere(
    command: Command, loads: list[Any], fake_seed: Any, tmp_path: Path
) -> None:
    fake_seed.answers["checkpoints.list"] = _records(tmp_path / "a", tmp_path / "b")
    outcome = command("generate", "x", "--job", "tiny")
    assert (outcome.code, outcome.err) == (
        2,
        "error: no checkpoint of job tiny lies on this machine\n  → they lie on box1, box2: run it there\n",
    )
    fake_seed.answers["checkpoints.list"] = _records()
    assert "p2ptrain jobs save tiny" in command("generate", "x", "--job", "tiny").err
    assert loads == []
