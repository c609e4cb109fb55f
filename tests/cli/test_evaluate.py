"""``p2ptrain evaluate``: what it prints of a checkpoint and of a model from elsewhere."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from p2ptrain.cli.evaluate import trained_window
from p2ptrain.compute.tokenizer import Tokenizer
from p2ptrain.core.checkpoints import CheckpointStore
from p2ptrain.core.disk import RealDisk
from p2ptrain.core.training import FilePlan
from tests.compute.families import make

Command = Callable[..., Any]


@pytest.fixture
def typed(tmp_path: Path) -> tuple[str, ...]:
    make("llama", tmp_path / "model", vocab_size=256)
    Tokenizer.of_bytes().save(tmp_path / "model")
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(f"{name} text of some bytes\n" * 20)
    return ("evaluate", "-c", str(tmp_path / "model"), "--data", str(tmp_path / "*.txt"))


def test_each_document_and_the_total_are_shown(command: Command, typed: tuple[str, ...], tmp_path: Path) -> None:
    found = command(*typed, "--json").json
    assert (found["window"], found["stride"], found["dtype"]) == (128, None, "fp32")
    assert [Path(item["name"]).name for item in found["documents"]] == ["a.txt", "b.txt"]
    total = found["total"]
    assert (total["bytes"], total["tokens"]) == (840, 839)
    assert total["bits_a_byte"] == pytest.approx(total["loss"] * 839 / 840 / math.log(2))
    lines = command(*typed, "--stride", "100").out.splitlines()
    assert lines[0].split() == ["DOCUMENT", "LOSS", "PERPLEXITY", "BITS/BYTE", "TOKENS", "BYTES"]
    assert (lines[-1].split()[0], lines[-1].split()[-2:]) == ("total", ["838", "840"])


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--window", "200"], "give --window 128 at most"),
        (["--window", "50", "--stride", "51"], "would leave out tokens"),
        (["--format", "chat", "--stride", "9"], "not for conversations"),
        (["--format", "docx"], "use auto, text"),
        (["--dtype", "int3"], "use fp32, bf16, fp16"),
        (["--split", "2", "--device", "cpu"], "workers compute the model"),
        (["--window", "1048577"], "1048576"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    command: Command, typed: tuple[str, ...], more: list[str], said: str
) -> None:
    outcome = command(*typed, *more)
    assert (outcome.code, said in outcome.err) == (2, True), outcome.err


def test_without_workers_the_command_says_what_to_start(
    command: Command, typed: tuple[str, ...], fake_seed: Any, tmp_path: Path
) -> None:
    fake_seed.answers["peers.list"] = {"peers": []}
    outcome = command(*typed, "--split")
    assert (outcome.code, "p2ptrain join" in outcome.err) == (2, True), outcome.err
    outcome = command(*typed[:-1], str(tmp_path / "gone"), "--split")
    assert (outcome.code, "does not exist" in outcome.err) == (2, True), outcome.err


def test_the_window_is_that_of_the_job(tmp_path: Path) -> None:
    store = CheckpointStore(RealDisk(), tmp_path, 3)
    entry = store.write(5, [FilePlan("config.json", (b"{}",))], {}, {"sequence_tokens": 77})
    assert trained_window(entry.path) == 77
    manifest = json.loads((entry.path / "manifest.json").read_text())
    manifest["meta"]["sequence_tokens"] = "many"
    (entry.path / "manifest.json").write_text(json.dumps(manifest))
    assert trained_window(entry.path) == trained_window(tmp_path) == 0
