"""Options of a split model: a bare ``--split``, and what does not belong together."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2ptrain.cli.runtime import with_number
from p2ptrain.cli.text_options import SplitOptions

from .conftest import Command


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (["hi", "--split"], ["hi", "--split=0"]),
        (["--split", "hi"], ["--split=0", "hi"]),
        (["--split", "3", "hi"], ["--split", "3", "hi"]),
        (["--split=3", "hi"], ["--split=3", "hi"]),
        (["--split", "--json"], ["--split=0", "--json"]),
        (["--split", "-1"], ["--split=0", "-1"]),
        (["--", "--split"], ["--", "--split"]),
    ],
)
def test_a_bare_split_means_the_best_number(given: list[str], meant: list[str]) -> None:
    assert with_number(given) == meant


@pytest.mark.parametrize(("wire", "encodings"), [("", ("", "")), ("bf16", ("bf16", "bf16")), ("int8", ("", "int8"))])
def test_what_travels(wire: str, encodings: tuple[str, str]) -> None:
    assert SplitOptions(3, wire=wire).encodings == encodings


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["generate", "x", "--dtype", "bf16"], "--dtype bf16 does not apply: a verifier"),
        (["generate", "x", "--dry-run"], "--dry-run works only with --split"),
        (["chat", "--wire", "bf16"], "--wire works only with --split"),
        (["chat", "--split", "--dtype", "int8"], "--dtype int8 is not a valid value"),
        (["generate", "x", "--split", "--wire", "topk"], "--wire topk is not a valid value"),
        (["generate", "x", "--split"], "generate needs one checkpoint"),
        (["chat", "--split", "--job", "j", "-c", "d"], "chat needs one checkpoint"),
        (["generate", "x", "--split", "--job", "j", "--temperature", "inf"], "temperature = inf is not from 0"),
        (["generate", "x", "--split", "two"], "--split two is not a number of parts"),
        (["chat", "--split", "two"], "--split two is not a number of parts"),
        (["up", "--split", "2"], "up --split needs a model"),
        (
            ["up", "--workers", "1", "--set", "job.strategy=pipeline", "--set", "pipeline.stages=2"],
            "--set pipeline.stages=2: pipeline.stages = 2 is more than job.workers = 1: each part needs a worker",
        ),
        (["up", "--checkpoint", "d"], "--checkpoint works only with --split"),
        (["up", "--spare", "1"], "--spare works only with --split"),
        (["up", "--memory", "1GiB"], "--memory works only with --split"),
        (["up", "--split", "2", "-c", "d", "--memory", "much"], "--memory 'much' is not a size"),
        (["up", "--split", "2", "-c", "d", "--dtype", "fp8"], "--dtype fp8 is not a valid value"),
        (["up", "--split", "2", "-c", "no-such-directory"], "no-such-directory is not a directory"),
    ],
)
def test_what_does_not_belong_together_is_refused(command: Command, arguments: list[str], said: str) -> None:
    outcome = command(*arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith(f"error: {said}")
    assert "\n  → " in outcome.err


def test_more_stages_than_layers_are_refused_before_anything_starts(command: Command, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": 2}')
    state = tmp_path / "state"
    outcome = command("up", "--split", "3", "-c", str(tmp_path), "--state", str(state))
    assert outcome.err.startswith("error: a model of 2 layers cannot have 3 stages\n")
    assert not state.exists()
