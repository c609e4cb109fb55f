"""``p2ptrain generate``: which checkpoint it takes, and what it writes. The model is a stand-in."""

from __future__ import annotations

import ast
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import p2ptrain.compute
from p2ptrain.core.errors import UserError
from wire.records import CheckpointInfo

Command = Callable[..., Any]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What ``compute.generate`` was asked for."""
    made: list[dict[str, Any]] = []

    def generate(directory: Path, prompt: str, *, on_text: Callable[[str], None], **settings: Any) -> SimpleNamespace:
        made.append({"directory": directory, "prompt": prompt} | settings)
        if prompt == "too long":
            raise UserError("the prompt is too long", remedy="shorten it")
        for piece in ("ab", "\x1b[2J", "é\n"):
            on_text(piece)
        return SimpleNamespace(text="ab\x1b[2Jé\n", tokens=8, seconds=2.0)

    module = ModuleType("p2ptrain.compute.generate")
    module.generate = generate  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "p2ptrain.compute.generate", module)
    return made


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
        "max_new_tokens": 8,
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 0.95,
        "seed": 3,
        "device": "auto",
    }


def test_the_call_fits_the_real_function(command: Command, calls: list[dict[str, Any]], tmp_path: Path) -> None:
    command("generate", "x", "-c", str(_checkpoint(tmp_path, 1)))
    source = Path(p2ptrain.compute.__file__).with_name("generate.py").read_text(encoding="utf-8")
    functions = {node.name: node.args for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    real = functions["generate"]
    assert [argument.arg for argument in real.args] == ["directory", "prompt"]
    assert {argument.arg for argument in real.kwonlyargs} == set(calls[0]) - {"directory", "prompt"} | {"on_text"}


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
    }


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
        ([], "generate needs one checkpoint"),
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
