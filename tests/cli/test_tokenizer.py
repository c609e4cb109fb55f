"""``p2ptrain tokenizer train``, and what a start says of a tokenizer before any process begins."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from .conftest import Command


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    chat = [{"role": "user", "content": "one two three"}, {"role": "assistant", "content": "three two one"}]
    rows = [json.dumps({"text": "one two three", "messages": chat})] * 50 + ['{"other": 1}']
    path.write_text("\n".join(rows))
    return path


def test_a_tokenizer_is_trained_once(command: Command, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "mine"
    typed = ("tokenizer", "train", "--data", str(text), "--vocab", "300", "--out", str(out))
    made = command(*typed, "--json").json
    auto = AutoTokenizer.from_pretrained(out)
    assert (made["tokenizer"], made["tokens"]) == (str(out), len(auto))
    assert (made["text_bytes"], made["sample_bytes"]) == (700, 700)
    assert auto.tokenize("one two three") == ["one", "Ġtwo", "Ġthree"]
    assert "1 of 51 rows" in made["notes"][0]
    assert "only 266 of 300 tokens" in made["notes"][1]
    again = command(*typed)
    assert (again.code, f"{out} exists" in again.err) == (2, True)
    assert [path.name for path in tmp_path.iterdir() if "mine" in path.name] == ["mine"]


def test_conversations_and_their_template(command: Command, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "mine"
    typed = ("tokenizer", "train", "--data", str(text), "--format", "chat", "--vocab", "280", "--out", str(out))
    outcome = command(*typed, "--chat", "tokens")
    up = f"p2ptrain up --set model.tokenizer={out} --set data.path={text} --set data.format=chat\n"
    assert (outcome.code, outcome.err.endswith(up)) == (0, True)
    chat = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    ids = AutoTokenizer.from_pretrained(out).apply_chat_template(chat, return_dict=False)
    assert AutoTokenizer.from_pretrained(out).decode(ids) == "<|user|>\none\n<|assistant|>\ntwo<|endoftext|>"
    assert ids[0] == 2


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["--vocab", "256"], "give --vocab 257 or more"),
        (["--chat", "tokens", "--vocab", "259"], "give --vocab 260 or more"),
        (["--chat", "chatml"], "use plain, tokens"),
        (["--text-key", "nothing"], "no text for a tokenizer"),
        (["--sample", "some"], "is not a size"),
    ],
)
def test_what_cannot_be_trained_is_refused(
    command: Command, text: Path, tmp_path: Path, typed: list[str], said: str
) -> None:
    outcome = command("tokenizer", "train", "--data", str(text), "--out", str(tmp_path / "mine"), *typed)
    assert outcome.code == 2
    assert said in outcome.err
    assert [path.name for path in tmp_path.iterdir()] == [text.name]


def test_a_start_says_at_once_that_a_tokenizer_does_not_fit(command: Command, text: Path, tmp_path: Path) -> None:
    up, gone = ("up", "--plain", "--set"), tmp_path / "gone"
    lost = command(*up, f"model.tokenizer={gone}")
    assert (lost.code, "p2ptrain tokenizer train" in lost.err) == (2, True)
    own, small = tmp_path / "mine", tmp_path / "small"
    command("tokenizer", "train", "--data", str(text), "--vocab", "260", "--out", str(own))
    small.mkdir()
    (small / "config.json").write_text('{"model_type": "llama", "vocab_size": 100}')
    outcome = command(*up, f"model.tokenizer={own}", "--set", f"model.path={small}")
    assert (outcome.code, "set vocab_size = 260 in its config.json" in outcome.err) == (2, True)
