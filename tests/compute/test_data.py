"""The corpus: found, refused with a remedy, split without overlap."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing

from p2ptrain.compute.data import DataSpec, load_corpus, split_windows
from p2ptrain.compute.tokenizer import Tokenizer
from p2ptrain.core.errors import ConfigError, UserError
from p2ptrain.core.text_files import find_files, search_files

BYTES = Tokenizer.of_bytes()


def spec(path: Path | str, **changes: object) -> DataSpec:
    return DataSpec(path=str(path), sequence_tokens=8).model_copy(update=changes)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    for name, content in {
        "b.txt": "bbbb " * 20,
        "a/z.md": "zzzz\r\n" * 20,
        "a.py": "pppp\n" * 20,
        "picture.png": "\0\0",
        "a/lines.jsonl": '{"text": "one"}\n\n{"text": "two\\n"}\n',
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content.encode())
    return root


def corpus_text(path: Path | str, **changes: object) -> str:
    return bytes(load_corpus(spec(path, **changes), BYTES).tokens).decode()


def test_a_directory_in_the_order_of_relative_paths(tree: Path) -> None:
    assert [file.relative_to(tree).as_posix() for file in find_files(str(tree))] == [
        "a.py",
        "a/lines.jsonl",
        "a/z.md",
        "b.txt",
    ]
    assert corpus_text(tree) == "pppp\n" * 20 + "one\ntwo\n" + "zzzz\n" * 20 + "bbbb " * 20 + "\n"


def test_what_is_hidden_is_skipped_and_what_may_hold_text_is_said(tree: Path, tmp_path: Path) -> None:
    before = load_corpus(spec(tree), BYTES)
    assert before.note == ""
    for hidden in (".git/x.txt", "a/.ipynb_checkpoints/x.py", ".x.txt"):
        (tree / hidden).parent.mkdir(exist_ok=True)
        (tree / hidden).write_text("hidden " * 99)
    assert load_corpus(spec(tree), BYTES).digest == before.digest
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "x.txt").write_text("elsewhere " * 99)
    (tree / "linked").symlink_to(elsewhere)
    (tree / "gone.txt").symlink_to("nowhere")
    (tree / "a" / "rows.json").write_text("[]")
    corpus = load_corpus(spec(tree), BYTES)
    assert corpus.digest == before.digest
    assert corpus.note == (
        f"not read: {tree}/linked (a link to a folder), {tree}/gone.txt (a broken link, or no file), "
        f"{tree}/a/rows.json (a .json may be anything); a glob in data.path can name them"
    )
    (tree / "a" / "Z.TXT").symlink_to(elsewhere / "x.txt")
    assert "elsewhere" in corpus_text(tree), "a link to a file, and a suffix in capitals"
    (tree / "b.txt.zst").write_bytes(b"")
    with pytest.raises(ConfigError, match="compressed"):
        find_files(str(tree))


def test_a_glob_of_any_depth_reads_each_file_once(tree: Path) -> None:
    expected = [file.relative_to(tree).as_posix() for file in find_files(f"{tree}/**/*.*")]
    assert expected == ["a/lines.jsonl", "a/z.md", "a.py", "b.txt", "picture.png"]
    assert find_files(f"{tree}/**") == find_files(f"{tree}/**/**/*.*") == find_files(f"{tree}/**/*.*")
    (tree / "a" / "link").symlink_to(tree / "a")
    (tree / "a" / "loop").symlink_to(tree)
    (tree / "z.txt").symlink_to(tree / "b.txt")
    found, note = search_files(f"{tree}/**/*.*", "auto")
    assert [file.relative_to(tree).as_posix() for file in found] == expected
    assert note == (
        f"not read: {tree}/a/link (a link to a folder), {tree}/a/loop (a link to a folder); a glob in data.path can "
        "name them; 1 links to files that are read already are left out"
    )
    assert find_files(f"{tree}/a/link/*.md") == [tree / "a" / "link" / "z.md"], "a link that is named is followed"


def test_the_standard_library() -> None:
    names = [file.as_posix() for file in find_files("stdlib")]
    assert any(name.endswith("/asyncio/tasks.py") for name in names)
    assert not [name for name in names if "/test/" in name or "site-packages" in name or "/idlelib/" in name]
    corpus = load_corpus(DataSpec(limit_bytes=200_000), BYTES)
    assert len(corpus.tokens) == 200_000
    assert corpus.digest == load_corpus(DataSpec(limit_bytes=200_000), BYTES).digest


def test_documents_begin_as_prompts_do_and_end_with_the_end_token(tmp_path: Path) -> None:
    backend = Tokenizer.of_bytes().backend
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    tokenizer = Tokenizer.of_directory(tmp_path)
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in ("one", "", "two\n") * 9))
    given = spec(tmp_path / "a.jsonl")
    written = tokenizer.backend.decode(load_corpus(given, tokenizer).tokens, skip_special_tokens=False)
    assert written == "<s>one</s><s>two\n</s>" * 9
    plain = load_corpus(given.model_copy(update={"document_end": "none"}), tokenizer)
    assert tokenizer.backend.decode(plain.tokens) == "one\ntwo\n" * 9
    assert bytes(load_corpus(given, BYTES).tokens) == b"one\ntwo\n" * 9


def test_the_limit_cuts_between_characters(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_text("aé" * 100, "utf-8")
    assert corpus_text(path, limit_bytes=60) == "aé" * 20
    assert corpus_text(path, limit_bytes=62) == "aé" * 20 + "a"  # the next character has two bytes
    assert corpus_text(path, limit_bytes=10_000) == "aé" * 100 + "\n"


def test_the_digest_names_tokens_and_vocabulary(tmp_path: Path) -> None:
    first, second = tmp_path / "1.txt", tmp_path / "2.txt"
    first.write_bytes(b"some text\r\n" * 20)
    second.write_bytes(b"some text\n" * 20)
    assert load_corpus(spec(first), BYTES).digest == load_corpus(spec(second), BYTES).digest
    second.write_bytes(b"some text\n" * 19 + b"some test\n")
    assert load_corpus(spec(first), BYTES).digest != load_corpus(spec(second), BYTES).digest


def test_missing_empty_and_unreadable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="does not exist") as caught:
        load_corpus(spec(tmp_path / "nothing.txt"), BYTES)
    assert "relative to where the worker runs" in caught.value.remedy
    with pytest.raises(ConfigError, match="matches no file"):
        load_corpus(spec(tmp_path / "*.txt"), BYTES)
    with pytest.raises(ConfigError, match="no text files") as caught:
        load_corpus(spec(tmp_path), BYTES)
    assert ".txt" in caught.value.remedy
    path = tmp_path / "x.txt"
    path.touch()
    with pytest.raises(ConfigError, match="names only empty files"):
        load_corpus(spec(path), BYTES)
    path.write_text("x")
    with pytest.raises(ConfigError, match="too few") as caught:
        load_corpus(spec(path), BYTES)
    assert "at least 17 tokens" in caught.value.remedy

    def denied(self: Path, *_: str) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", denied)  # before any text is read
    with pytest.raises(UserError, match=r"cannot read .*x\.txt: Permission denied"):
        load_corpus(spec(path), BYTES)


@pytest.mark.parametrize(("content", "cause"), [(b"text\xff\xfe" * 40, "byte 4"), (b"text\0" * 40, "byte 4 is zero")])
def test_what_is_not_text(tmp_path: Path, content: bytes, cause: str) -> None:
    path = tmp_path / "x.txt"
    path.write_bytes(content)
    with pytest.raises(UserError, match=cause) as caught:
        load_corpus(spec(path), BYTES)
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("windows", "fraction", "held_out"),
    [(2, 0.05, 1), (20, 0.05, 1), (20, 0.5, 10), (100, 0.05, 5), (1000, 0.05, 48), (1543, 0.1, 160), (1, 0.0, 0)],
)
def test_a_small_corpus_is_split_as_was_asked_for(windows: int, fraction: float, held_out: int) -> None:
    training, held = split_windows(spec("x", validation_fraction=fraction), windows)
    assert (len(training), len(held)) == (windows - held_out, held_out)
    assert sorted([*training[:], *held]) == list(range(windows))


def test_holding_out_more_than_was_asked_for_is_said(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_text("a" * 32)
    assert "holds out 1 of 4 sequences" in load_corpus(spec(path), BYTES).note
    assert load_corpus(spec(path, validation_fraction=0.0), BYTES).note == ""
    assert load_corpus(spec(path, validation_fraction=0.25), BYTES).note == ""


def test_the_split_holds_out_blocks_from_all_over() -> None:
    _, held = split_windows(spec("x", validation_fraction=0.1), 16 * 1000)
    assert len(held) == 1600
    blocks = held // 16
    assert len(set(blocks.tolist())) == 100
    assert len(set(blocks[:100].tolist())) == 100, "the first windows come from all blocks"
    assert max(np.bincount(np.unique(blocks) // 100, minlength=10)) < 30, "no part of the text has them all"


def test_targets_of_training_and_validation_never_meet(tmp_path: Path) -> None:
    """Each token but the first is a target once, in training or in validation."""
    corpus = load_corpus(spec(_numbered(tmp_path), validation_fraction=0.2), BYTES)
    windows = np.concatenate([corpus.training[:], corpus.validation])
    tokens = corpus.window_tokens(windows)
    assert tokens.shape == (len(windows), 9)
    assert tokens.dtype == np.int64
    order = np.argsort(windows)
    assert np.array_equal(tokens[order, 1:].ravel(), corpus.tokens[1 : 1 + 8 * len(windows)])
    assert np.array_equal(tokens[order][1:, 0], tokens[order][:-1, 8]), "neighbours share one token"


def _numbered(tmp_path: Path) -> Path:
    path = tmp_path / "numbers.txt"
    path.write_text(" ".join(map(str, range(1000))))
    return path
