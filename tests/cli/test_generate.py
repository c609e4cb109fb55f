"""``p2ptrain generate``: which checkpoint it takes, and what it writes. The model is a stand-in."""

from __future__ import annotations

import ast
import dataclasses
import io
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import p2ptrain.compute
from p2ptrain.core.errors import UserError
from p2ptrain.core.serving import Sampling
from wire.records import CheckpointInfo

Command = Callable[..., Any]


class StandIn:
    """``compute.generate``: a model that answers every prompt alike."""

    def __init__(self, calls: list[dict[str, Any]]) -> None:
        self.calls = calls

    def local_model(self, directory: Path, *, device: str) -> SimpleNamespace:
        text = SimpleNamespace(
            directory=directory,
            prompt_ids=list,
            checked=self.checked,
            sampling=lambda wish: wish.of({"do_sample": "odd" in directory.parts, "top_p": 0.5}),
            unused_settings=lambda: {"min_p": 0.1} if "odd" in directory.parts else {},
        )
        return SimpleNamespace(directory=directory, device=device, text=text)

    @staticmethod
    def checked(ids: list[str], max_new_tokens: int) -> list[str]:
        if "".join(ids) == "too long":
            raise UserError("the prompt is too long", remedy="shorten it")
        return ids

    def generate(
        self, model: SimpleNamespace, prompt: str, *, on_text: Callable[[str], None], **settings: Any
    ) -> GenerateResult:
        self.calls.append({"directory": model.directory, "device": model.device, "prompt": prompt} | settings)
        if prompt == "interrupt":
            on_text("half")
            raise KeyboardInterrupt
        for piece in ("ab", "\x1b[2J", "é\n"):
            on_text(piece)
        return GenerateResult(text="ab\x1b[2Jé\n", tokens=8, seconds=2.0, ended="length")


@dataclass(frozen=True)
class GenerateResult:
    text: str
    tokens: int
    seconds: float
    ended: str


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What ``compute.generate`` was asked for."""
    stand_in = StandIn([])
    module = ModuleType("p2ptrain.compute.generate")
    module.generate = stand_in.generate  # type: ignore[attr-defined]
    module.LocalModel = stand_in.local_model  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "p2ptrain.compute.generate", module)
    return stand_in.calls


def _checkpoint(root: Path, step: int, *, age_s: float = 0.0) -> Path:
    path = root / f"step-{step:08d}"
    path.mkdir(parents=True)
    for name in ("config.json", "manifest.json"):
        (path / name).write_text("{}")
        written = 1.7e9 - age_s
        os.utime(path / name, (written, written))
    return path


def test_text_is_written_as_it_comes(command: Command, calls: list[dict[str, Any]], tmp_path: Path) -> None:
    path = _checkpoint(tmp_path, 100)
    outcome = command(
        "generate", "def ", "--checkpoint", str(path), "--temperature", "0", "-n", "8", "--random-seed", "3"
    )
    assert (outcome.code, outcome.out) == (0, "def ab�[2Jé\n\n")
    assert outcome.err == f"(8 tokens, 4 tokens/s, {path})\n"
    (call,) = calls
    assert call == {
        "directory": path,
        "prompt": "def ",
        "device": "auto",
        "max_new_tokens": 8,
        "sampling": Sampling(temperature=0.0, seed=3),
        "stop": (),
    }


@pytest.mark.parametrize(
    ("options", "greedy", "odd"),
    [
        ((), Sampling(0.0), Sampling(1.0, 50, 0.5)),
        (("--temperature", "0.7"), Sampling(0.7, 50, 0.5), Sampling(0.7, 50, 0.5)),
        (("--top-k", "0", "--top-p", "1"), Sampling(1.0, 0, 1.0), Sampling(1.0, 0, 1.0)),
        (("--temperature", "0", "--top-k", "3"), Sampling(0.0), Sampling(0.0)),
    ],
)
def test_what_the_model_says_counts_where_the_person_says_nothing(
    command: Command, calls: list[dict[str, Any]], tmp_path: Path, options: tuple[str, ...], greedy: Any, odd: Any
) -> None:
    for name, expected in (("plain", greedy), ("odd", odd)):
        assert command("generate", "x", "-c", str(_checkpoint(tmp_path / name, 1)), *options).code == 0
        assert calls.pop()["sampling"] == expected


def test_the_call_fits_the_real_function(command: Command, calls: list[dict[str, Any]], tmp_path: Path) -> None:
    command("generate", "x", "-c", str(_checkpoint(tmp_path, 1)))
    source = Path(p2ptrain.compute.__file__).with_name("generate.py").read_text(encoding="utf-8")
    functions = {node.name: node.args for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    real = functions["generate"]
    assert [argument.arg for argument in real.args] == ["model", "prompt"]
    given = set(calls[0]) - {"directory", "device", "prompt"} | {"on_text"}
    assert {argument.arg for argument in real.kwonlyargs} == given
    fields = [field.name for field in dataclasses.fields(GenerateResult)]
    (real_result,) = [
        node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == "GenerateResult"
    ]
    assert [item.target.id for item in real_result.body if isinstance(item, ast.AnnAssign)] == fields  # type: ignore[union-attr]


def test_json_is_one_document(command: Command, calls: list[dict[str, Any]], tmp_path: Path) -> None:
    path = _checkpoint(tmp_path, 100)
    outcome = command("generate", "def ", "-c", str(path), "--json")
    assert outcome.err == ""
    assert json.loads(outcome.out) == {
        "checkpoint": str(path),
        "prompt": "def ",
        "text": "ab\x1b[2Jé\n",
        "tokens": 8,
        "seconds": 2.0,
        "ended": "length",
    }


def test_several_prompts(command: Command, calls: list[dict[str, Any]], tmp_path: Path) -> None:
    path, file = _checkpoint(tmp_path, 100), tmp_path / "prompts.txt"
    file.write_bytes("one\r\n\n  two\nü".encode())
    outcome = command("generate", "--prompts", str(file), "-c", str(path))
    assert [call["prompt"] for call in calls] == ["one", "  two", "ü"]
    assert outcome.out == "oneab�[2Jé\n\n\n  twoab�[2Jé\n\n\nüab�[2Jé\n\n"
    assert outcome.err == f"(24 tokens, 4 tokens/s, {path})\n"
    document = command("generate", "--prompts", str(file), "-c", str(path), "--json").json
    assert [item["prompt"] for item in document["texts"]] == ["one", "  two", "ü"]


def test_prompts_from_standard_input(
    command: Command, calls: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(_checkpoint(tmp_path, 100))
    for arguments in (["-"], ["--prompts", "-"]):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"one\ntwo\n")))
        assert command("generate", *arguments, "-c", path).code == 0
    assert [call["prompt"] for call in calls] == ["one\ntwo", "one", "two"]


def test_what_is_no_file_of_prompts(command: Command, calls: list[dict[str, Any]], tmp_path: Path) -> None:
    path, file = str(_checkpoint(tmp_path, 100)), tmp_path / "prompts.txt"
    for content, said in ((b"\n \n", "holds no prompt"), (b"a\n\xff", "is not UTF-8 text (byte 2)")):
        file.write_bytes(content)
        assert said in command("generate", "--prompts", str(file), "-c", path).err
    assert "cannot read" in command("generate", "--prompts", str(tmp_path / "none"), "-c", path).err
    file.write_text("fine\ntoo long\n")
    outcome = command("generate", "--prompts", str(file), "-c", path)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err == "error: prompt 2: the prompt is too long\n  → shorten it\n"
    assert calls == []
    for arguments in ([], ["x", "--prompts", str(file)]):
        outcome = command("generate", *arguments, "-c", path)
        assert outcome.err.startswith("error: generate needs something to go on from\n")


def test_stop_strings_are_read_as_a_person_writes_them(
    command: Command, calls: list[dict[str, Any]], tmp_path: Path
) -> None:
    path = str(_checkpoint(tmp_path, 100))
    command("generate", "x", "-c", path, "--stop", r"\ndef \t", "--stop", r"\\n\q", "--stop", "\\")
    assert calls[0]["stop"] == ("\ndef \t", r"\n\q", "\\")
    outcome = command("generate", "x", "-c", path, "--stop", "")
    assert (outcome.code, outcome.err.splitlines()[0]) == (2, "error: a stop string is empty")


def test_settings_that_do_not_count_are_told(command: Command, calls: list[dict[str, Any]], tmp_path: Path) -> None:
    outcome = command("generate", "x", "-c", str(_checkpoint(tmp_path / "odd", 7)))
    assert "step-00000007/generation_config.json also says min_p = 0.1: not applied" in outcome.err


def test_an_interrupted_text_ends_its_line(command: Command, calls: list[dict[str, Any]], tmp_path: Path) -> None:
    outcome = command("generate", "interrupt", "-c", str(_checkpoint(tmp_path, 1)))
    assert (outcome.code, outcome.out) == (130, "interrupthalf\n")


def test_an_error_stands_alone(command: Command, calls: list[dict[str, Any]], tmp_path: Path) -> None:
    outcome = command("generate", "too long", "-c", str(_checkpoint(tmp_path, 1)))
    assert (outcome.code, outcome.out, outcome.err) == (2, "", "error: the prompt is too long\n  → shorten it\n")


def test_the_newest_checkpoint_below_a_directory(command: Command, calls: list[dict[str, Any]], tmp_path: Path) -> None:
    _checkpoint(tmp_path / "workers" / "1" / "job", 300, age_s=9)
    newest = _checkpoint(tmp_path / "workers" / "2" / "job", 200)
    (tmp_path / "step-notanumber").mkdir()
    (tmp_path / "step-notanumber" / "manifest.json").write_text("{}")
    assert command("generate", "x", "-c", str(tmp_path)).code == 0
    assert calls[0]["directory"] == newest


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--split"], "generate needs one checkpoint"),
        (["-c", "here", "--job", "tiny"], "generate needs one checkpoint"),
        (["-c", "no-such-directory"], "no-such-directory is not a directory"),
    ],
)
def test_no_checkpoint(command: Command, calls: list[dict[str, Any]], arguments: list[str], message: str) -> None:
    outcome = command("generate", "x", *arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith(f"error: {message}\n  → ")
    assert calls == []


def test_an_empty_directory(command: Command, calls: list[dict[str, Any]], tmp_path: Path) -> None:
    assert command("generate", "x", "-c", str(tmp_path)).err.startswith(f"error: {tmp_path} holds no checkpoint\n")


def _records(*paths: Path) -> dict[str, Any]:
    found = [
        CheckpointInfo(f"j@{step}@p", "j", step, str(path), "p", f"box{step}", "", 1, 1.7e9)
        for step, path in enumerate(paths, start=1)
    ]
    return {"checkpoints": [item.to_map() for item in found]}


def test_the_newest_checkpoint_of_a_job_on_this_machine(
    command: Command, calls: list[dict[str, Any]], fake_seed: Any, tmp_path: Path
) -> None:
    here = _checkpoint(tmp_path, 2)
    fake_seed.answers["checkpoints.list"] = _records(_checkpoint(tmp_path, 1), here, tmp_path / "elsewhere")
    assert command("generate", "x", "--job", "tiny").code == 0
    assert calls[0]["directory"] == here
    assert fake_seed.asked == [("checkpoints.list", {"job": "tiny"})]


def test_a_job_whose_checkpoints_lie_elsewhere(
    command: Command, calls: list[dict[str, Any]], fake_seed: Any, tmp_path: Path
) -> None:
    fake_seed.answers["checkpoints.list"] = _records(tmp_path / "a", tmp_path / "b")
    outcome = command("generate", "x", "--job", "tiny")
    assert (outcome.code, outcome.err) == (
        2,
        "error: no checkpoint of job tiny lies on this machine\n  → they lie on box1, box2: run it there\n",
    )
    fake_seed.answers["checkpoints.list"] = _records()
    assert "p2ptrain jobs save tiny" in command("generate", "x", "--job", "tiny").err
    assert calls == []
