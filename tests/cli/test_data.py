"""``p2ptrain data``: what a text holds, with samples; and which kept tokens are removed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from p2ptrain.compute.tokenizer import Tokenizer

Command = Callable[..., Any]
TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello\nyou"}]


@pytest.fixture(autouse=True)
def _own_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join([*[json.dumps({"messages": TALK})] * 199, '{"other": 1}']))
    return path


def test_what_a_text_holds_is_shown(command: Command, chats: Path) -> None:
    typed = ("data", "show", str(chats), "--format", "chat", "--set", "data.sequence_tokens=70")
    shown = command(*typed, "--json").json
    length = len("User: hi\nAssistant: hello\nyou\nUser:")
    whole = {key: shown[key] for key in ("files", "rows", "rows_left_out", "documents", "text_bytes", "tokens")}
    assert whole == {
        "files": {".jsonl": 1}, "rows": 200, "rows_left_out": 1, "documents": 199, "text_bytes": 199 * length,
        "tokens": 100 * 71,
    }  # fmt: skip
    assert shown["training_sequences"] + shown["validation_sequences"] == 100
    assert shown["steps_per_epoch"] == shown["training_sequences"] / 32
    assert "1 of 200 rows of the data are left out" in shown["note"]
    for sample in shown["samples"]:
        assert len(sample["tokens"]) == len(sample["texts"]) == len(sample["learned"])
        learned = "".join(text for text, is_ in zip(sample["texts"], sample["learned"], strict=True) if is_)
        assert learned == " hello\nyou\nUser:" * len(sample["starts"])
        assert sample["targets"] == len(learned)
    for_people = command(*typed)
    assert "199" in for_people.out
    assert "User: hi⏎\nAssistant: hello⏎\nyou⏎\nUser:" in for_people.out
    assert "1 of 200 rows" in for_people.err
    assert command("data", "show", str(chats), "--format", "xml").code == 2


def test_both_answers_of_a_pair_are_shown(command: Command, tmp_path: Path) -> None:
    pairs, model = tmp_path / "pairs.jsonl", tmp_path / "model"
    pairs.write_text(json.dumps({"prompt": "Now? ", "chosen": "yes", "rejected": "never"}) + "\n")
    Tokenizer.of_bytes().save(model)
    (model / "config.json").write_text('{"model_type": "llama", "vocab_size": 300}')
    typed = ("data", "show", str(pairs), "--format", "preference", "--profile", "lora", "--model", str(model))
    outcome = command(*typed, "--set", "data.validation_fraction=0")
    assert (outcome.code, outcome.err) == (0, "")
    shown = outcome.out.partition("\n\n")[2]
    assert shown.startswith("pair 0, chosen: 3 targets\nNow? yes\n\npair 0, rejected: 5 targets\nNow? never\n")


def test_ctrl_c_tells_that_tokens_are_kept(command: Command, chats: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2ptrain.compute.data.load_corpus", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    outcome = command("data", "show", str(chats), "--format", "chat")
    assert (outcome.code, "goes on from the tokens" in outcome.err) == (130, True)


def test_tokens_of_changed_texts_are_removed(command: Command, chats: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("some text " * 500)
    for path in (chats, other):
        assert command("data", "show", str(path), "--format", "auto" if path == other else "chat").code == 0
    os.utime(other, (1, 1))
    assert command("data", "clean").code == 2, "there is no terminal to ask"
    cleaned = command("data", "clean", "--yes", "--json").json
    assert {Path(store["path"]).name: (store["state"], store["removed"]) for store in cleaned["stores"]} == {
        "chats.jsonl": ("current", False),
        "other.txt": ("changed", True),
    }
    assert command("data", "show", str(other), "--format", "chat").code == 2, "it has no conversation"
    stores = command("data", "clean", "--yes", "--json").json["stores"]
    assert sorted((store["state"], store["removed"]) for store in stores) == [("current", False), ("empty", True)]
    chats.unlink()
    (left,) = command("data", "clean", "--all", "--yes", "--json").json["stores"]
    assert (left["state"], left["removed"]) == ("gone", True)
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []


def test_a_fetched_model_is_kept_and_a_damaged_store_is_not(command: Command, tmp_path: Path) -> None:
    """The adapters of a job that is done need the model, which no job fetches again."""
    for name, content in (("model", {"config.json": "{}"}), ("text", {"tokens.bin": "", "store.json": '{"path": 5}'})):
        place = tmp_path / "cache" / "p2ptrain" / "tokens" / name
        place.mkdir(parents=True)
        for file, text in content.items():
            (place / file).write_text(text)
    stores = command("data", "clean", "--yes", "--json").json["stores"]
    assert [(store["state"], store["removed"]) for store in stores] == [("fetched", False), ("unfinished", True)]
