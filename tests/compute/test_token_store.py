"""Token stores: the digests of before, made once, found, continued, private, and refused where they do not fit."""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from p2ptrain.compute import data, rows, tokenizing
from p2ptrain.compute.data import Corpus, DataSpec, load_corpus, split_windows
from p2ptrain.compute.token_store import DISK, StoreFacts, TokenStore, lock_store, read_facts, stores_dir
from p2ptrain.compute.tokenizer import Tokenizer
from p2ptrain.core.errors import ConfigError, DiskFull, UserError

BYTES = Tokenizer.of_bytes()
CASES: dict[str, dict[str, Any]] = {
    "text": {},
    "text:joined": {"document_end": "none"},
    "text:limited": {"limit_bytes": 5001},
    "rows.jsonl": {"bad_rows": 0.1},
    "chat.jsonl": {"format": "chat", "sequence_tokens": 96},
    "chat.jsonl:limited": {"format": "chat", "sequence_tokens": 96, "limit_bytes": 9000, "bad_rows": 0.1},
    "pairs.jsonl": {"format": "preference", "sequence_tokens": 96, "bad_rows": 0.1},
}
DIGESTS = {
    ("text", "bytes"): "5a4b9c6ae750a6fb",
    ("text", "bpe"): "a8eb9b09f9f13885",
    ("text:joined", "bytes"): "5a4b9c6ae750a6fb",
    ("text:joined", "bpe"): "ead4be3210e56827",
    ("text:limited", "bytes"): "557c81fffe5e1fe4",
    ("text:limited", "bpe"): "14ba67948829e5e4",
    ("rows.jsonl", "bytes"): "d1452876f780214b",
    ("rows.jsonl", "bpe"): "26a097309a7982bd",
    ("chat.jsonl", "bytes"): "ef677644f344038a",
    ("chat.jsonl", "bpe"): "d15dffd918da7968",
    ("chat.jsonl:limited", "bytes"): "42ff37d3d112423e",
    ("chat.jsonl:limited", "bpe"): "da1a332e8e3e1fd9",
    ("pairs.jsonl", "bytes"): "62a147a54c5c1600",
    ("pairs.jsonl", "bpe"): "bc7e3b243b2b172a",
}
"""Of the code that held texts and tokens in memory."""


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, words = tmp_path_factory.mktemp("texts"), random.Random(7)
    some = ["ring", "peer", "é", "\U0001f600", "seed", "x =", "1234567", "  ", "\r\n", "\n", "ein", "Straße", "語"]
    texts = [" ".join(words.choice(some) for _ in range(words.randrange(1, 90))) for _ in range(60)]
    (root / "text").mkdir()
    (root / "text" / "a.txt").write_bytes(b"\xef\xbb\xbf" + " ".join(texts[:40]).encode())
    (root / "text" / "b.md").write_bytes("\r\n".join(texts[40:]).encode())
    (root / "text" / "c.txt.gz").write_bytes(gzip.compress("".join(texts[10:20]).encode()))
    (root / "text" / "empty.txt").touch()
    lines = [json.dumps({"text": text}) for text in [*texts, "", "end\n"]]
    (root / "rows.jsonl").write_text("\r\n".join([*lines[:30], "{", *lines[30:]]), "utf-8")
    talks = []
    for at in range(300):
        said = [texts[(at * 7 + turn) % 60][: words.randrange(2, 50)] for turn in range(2 + at % 4)]
        talks.append([{"role": ("user", "assistant")[turn % 2], "content": text} for turn, text in enumerate(said)])
    talks[70] = [{"role": "assistant", "content": "no question"}]
    (root / "chat.jsonl").write_text("\n".join(json.dumps({"messages": talk}) for talk in talks), "utf-8")
    pairs = [{"prompt": texts[at][:40], "chosen": texts[at + 1][:50], "rejected": texts[at + 2]} for at in range(50)]
    (root / "pairs.jsonl").write_text("\n".join(json.dumps(pair) for pair in [*pairs, {"prompt": "?"}]), "utf-8")
    return root


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory, vocabulary = tmp_path_factory.mktemp("model"), BYTES.backend.get_vocab()
    merges = [("e", "r"), ("Ġ", "p"), ("r", "i"), ("n", "g"), ("ri", "ng"), ("Ġ", "ring"), ("1", "2"), ("Ġ", "Ġ")]
    backend = Backend(BPE(vocab=vocabulary | {a + b: 256 + at for at, (a, b) in enumerate(merges)}, merges=merges))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=True), decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 264)])
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    return Tokenizer.of_directory(directory)


@pytest.fixture(autouse=True)
def _own_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files, texts and batches are cut everywhere, and every report of progress is a point to go on from."""
    for module, name, value in (
        (rows, "_PART_BYTES", 7), (tokenizing, "PIECE_CHARS", 150), (tokenizing, "OVERLAP_CHARS", 100),
        (tokenizing, "_BATCH_PIECES", 2), (tokenizing, "_BATCH_TEXTS", 3), (data, "_TEXTS_PER_CALL", 8),
        (data, "SYNC_S", 0.0),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)


def corpus_of(texts: Path, case: str, tokenizer: Tokenizer, **options: Any) -> Corpus:
    spec = DataSpec(path=str(texts / case.partition(":")[0]), sequence_tokens=24)
    return load_corpus(spec.model_copy(update=CASES.get(case, {})), tokenizer, **options)


@pytest.mark.parametrize("case", ["text", "chat.jsonl", "pairs.jsonl"])
def test_a_store_from_another_worker_is_the_same_text(texts: Path, case: str, bpe: Tokenizer, tmp_path: Path) -> None:
    made = corpus_of(texts, case, bpe)
    assert made.store is not None
    received = tmp_path / "received"
    shutil.copytree(made.store.directory, received)
    spec = DataSpec(sequence_tokens=24).model_copy(update={**CASES.get(case, {}), "path": str(received)})
    found = load_corpus(spec, bpe)
    assert (found.digest, len(found.training)) == (made.digest, len(made.training))
    windows = np.arange(2)
    assert np.array_equal(found.batch(windows).targets, made.batch(windows).targets)
    with pytest.raises(ConfigError, match="of another format"):
        load_corpus(spec, BYTES)
    facts = json.loads((received / "store.json").read_text())
    (received / "store.json").write_text(json.dumps(facts | {"highest": 3}))  # no id of the model would be checked
    with pytest.raises(ConfigError, match="they are damaged"):
        load_corpus(spec, bpe)
    (received / "store.json").write_text(json.dumps(facts))
    with (received / "tokens.bin").open("r+b") as file:
        file.write(b"\x07\x07\x07\x07")
    with pytest.raises(ConfigError, match="they are damaged"):
        load_corpus(spec, bpe)


def test_a_text_may_be_beside_a_file_named_like_a_store(texts: Path, tmp_path: Path) -> None:
    shutil.copytree(texts / "text", tmp_path / "text")
    (tmp_path / "text" / "store.json").write_text("{}")
    assert corpus_of(tmp_path, "text", BYTES).digest.startswith(DIGESTS["text", "bytes"])


def known(directory: Path) -> StoreFacts:
    facts = read_facts(directory)
    assert facts is not None
    return facts


def only_store() -> Path:
    (store,) = (path for path in stores_dir().iterdir() if path.is_dir())
    return store


@pytest.mark.parametrize(("case", "kind"), DIGESTS)
def test_digests_are_those_of_before(texts: Path, bpe: Tokenizer, case: str, kind: str) -> None:
    corpus = corpus_of(texts, case, bpe if kind == "bpe" else BYTES)
    assert corpus.digest.startswith(DIGESTS[case, kind])


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize(("case", "kind"), DIGESTS)
def test_a_process_that_ends_half_way_is_continued(
    texts: Path, bpe: Tokenizer, monkeypatch: pytest.MonkeyPatch, case: str, kind: str
) -> None:
    """An exception leaves on disk what a kill leaves: what was flushed, and some of what was not."""
    tokenizer, calls, reported = bpe if kind == "bpe" else BYTES, 0, list[float]()

    def end(text: str, share: float) -> None:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise KeyboardInterrupt

    states = list[Any]()
    for _ in range(2):
        calls = 0
        with pytest.raises(KeyboardInterrupt):
            corpus_of(texts, case, tokenizer, on_progress=end)
        states.append(known(only_store()).state)
        with (only_store() / "tokens.bin").open("ab") as file:
            file.write(b"not flushed")
    corpus = corpus_of(texts, case, tokenizer, on_progress=lambda _, share: reported.append(share))
    assert corpus.digest.startswith(DIGESTS[case, kind])
    assert states[0] != states[1] != {}, "the second one went on"
    assert 0 < reported[0] <= reported[-1] <= 1
    alone = corpus.store.facts
    monkeypatch.setenv("XDG_CACHE_HOME", os.environ["XDG_CACHE_HOME"] + "/other")
    assert corpus_of(texts, case, tokenizer).store.facts == alone, "counts and notes as without an end"


def test_a_store_is_found_by_sizes_and_times_and_verified(
    texts: Path, bpe: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = corpus_of(texts, "text", bpe)
    assert first.store.facts.documents == 3
    made = list[Path]()
    make: Callable[..., TokenStore] = data._make_store

    def record(directory: Path, *args: Any) -> TokenStore:
        made.append(directory)
        return make(directory, *args)

    monkeypatch.setattr(data, "_make_store", record)
    assert corpus_of(texts, "text", bpe).digest == first.digest
    assert not made, "the text is not read again"
    damaged = bytearray((only_store() / "tokens.bin").read_bytes())
    damaged[100] ^= 1
    (only_store() / "tokens.bin").write_bytes(damaged)
    assert corpus_of(texts, "text", bpe).digest == first.digest
    assert len(made) == 1
    assert corpus_of(texts, "text:joined", bpe).digest != first.digest
    os.utime(texts / "text" / "a.txt", (1, 1))
    assert corpus_of(texts, "text", bpe).digest == first.digest
    assert len({*made}) == 3


def test_only_this_user_may_read_a_store(texts: Path) -> None:
    corpus_of(texts, "chat.jsonl", BYTES)
    assert only_store().stat().st_mode & 0o777 == only_store().parent.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in only_store().iterdir()} == {0o600}


def test_one_process_makes_a_store_and_others_wait(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus_of(texts, "text", BYTES)
    directory, waits, digests = only_store(), threading.Event(), list[str]()
    unfinished = asdict(known(directory)) | {"digest": "", "numel": 0, "documents": 0, "state": {"share": 0.43}}
    (directory / "store.json").write_text(json.dumps(unfinished))

    def wait_for(text: str, share: float) -> None:
        if text.startswith("another process makes the tokens of ") and share == 0.43:
            waits.set()

    def load() -> None:
        digests.append(corpus_of(texts, "text", BYTES, on_progress=wait_for).digest)

    waiting = threading.Thread(target=load)
    with lock_store(directory, lambda: None):
        waiting.start()
        assert waits.wait(60)
        assert not digests
    waiting.join(60)
    assert digests[0].startswith(DIGESTS["text", "bytes"])


def test_a_disk_without_room_is_said_before(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DISK, "free_bytes", lambda path: 1000)
    monkeypatch.setattr(rows.Rows, "texts", lambda *args, **kwargs: pytest.fail("read before the check"))
    with pytest.raises(DiskFull, match=r"need about .* more, and .* has 1000 B free") as caught:
        corpus_of(texts, "text", BYTES)
    assert "p2ptrain data clean" in caught.value.remedy


def test_a_text_that_changes_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, texts = tmp_path / "x.txt", rows.Rows.texts
    path.write_text("before " * 99)

    def grow(*args: Any, **kwargs: Any) -> Iterator[rows.TextPart]:
        yield from texts(*args, **kwargs)
        path.write_text("before " * 100)

    monkeypatch.setattr(rows.Rows, "texts", grow)
    with pytest.raises(UserError, match="changed while they were read"):
        corpus_of(tmp_path, "x.txt", BYTES)
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert bytes(corpus_of(tmp_path, "x.txt", BYTES).tokens).decode() == "before " * 100 + "\n"


@pytest.mark.usefixtures("small_pieces")
def test_a_text_that_changes_is_not_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, texts = tmp_path / "x.txt", rows.Rows.texts
    path.write_text("before " * 99)

    def touch(*args: Any, **kwargs: Any) -> Iterator[rows.TextPart]:
        for part in texts(*args, **kwargs):
            os.utime(path, ns=(1, 1))
            yield part
        pytest.fail("read to the end")

    monkeypatch.setattr(rows.Rows, "texts", touch)
    with pytest.raises(UserError, match="changed while they were read"):
        corpus_of(tmp_path, "x.txt", BYTES)


@pytest.mark.usefixtures("small_pieces")
def test_a_disk_that_fills_is_said_on_the_way(texts: Path, bpe: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    free: Iterator[int] = iter([1 << 30, 1 << 30])
    monkeypatch.setattr(DISK, "free_bytes", lambda path: next(free, 500))
    with pytest.raises(DiskFull, match="has 500 B free"):
        corpus_of(texts, "text", bpe)


@given(windows=st.integers(2, 700), fraction=st.floats(0.0, 0.5))
def test_training_windows_are_those_that_are_not_held_out(windows: int, fraction: float) -> None:
    training, held = split_windows(DataSpec(validation_fraction=fraction), windows)
    expected = np.setdiff1d(np.arange(windows), held)
    assert np.array_equal(training[:], expected)
    assert len(training) == len(expected)
    with pytest.raises(AssertionError):
        training[np.array([len(expected)])]
