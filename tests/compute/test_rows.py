"""Rows of each format, also hostile ones: what cannot be used is counted and named, and refused past a limit."""

from __future__ import annotations

import csv
import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from p2ptrain.compute.data import Corpus, DataSpec, load_corpus
from p2ptrain.compute.tokenizer import Tokenizer
from p2ptrain.core import text_files
from p2ptrain.core.errors import ConfigError, ResourceError, UserError
from p2ptrain.core.text_files import find_files

BYTES = Tokenizer.of_bytes()
TEXTS = [f'line {index} é,\n"quoted"' for index in range(20)]
TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]


def corpus_of(path: Path, **changes: Any) -> Corpus:
    spec = DataSpec(path=str(path), sequence_tokens=8).model_copy(update=changes)
    return load_corpus(spec, BYTES)


def text_of(path: Path, **changes: Any) -> str:
    return bytes(corpus_of(path, **changes).tokens).decode()


def jsonl(path: Path, values: list[Any], key: str = "text") -> Path:
    path.write_text("\n".join(json.dumps({key: value}) for value in values), "utf-8")
    return path


def as_csv(path: Path, values: list[Any], key: str = "text") -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["id", key], *([number, value] for number, value in enumerate(values))])
    return path


def as_parquet(path: Path, values: Any, key: str = "text") -> Path:
    parquet.write_table(pa.table({key: values, "id": list(range(len(values)))}), path)
    return path


@pytest.mark.parametrize(("suffix", "write"), [("jsonl", jsonl), ("csv", as_csv), ("parquet", as_parquet)])
def test_a_text_in_each_row(tmp_path: Path, suffix: str, write: Callable[..., Path]) -> None:
    expected = "".join(text + "\n" for text in TEXTS)
    assert text_of(write(tmp_path / f"x.{suffix}", TEXTS)) == expected, "by the suffix"
    assert text_of(write(tmp_path / "rows", TEXTS, "body"), format=suffix, text_key="body") == expected
    (tmp_path / "tree").mkdir()
    write(tmp_path / "tree" / f"a.{suffix}", TEXTS)
    (tmp_path / "tree" / "a.txt").write_text("not a row\n")
    assert text_of(tmp_path / "tree", format=suffix) == expected, "a directory is searched for its suffix"
    with pytest.raises(UserError, match="'body'") as caught:
        text_of(write(tmp_path / f"x.{suffix}", TEXTS), text_key="body")
    assert "data.text_key" in caught.value.remedy


def tsv(path: Path, values: list[Any]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, delimiter="\t").writerows([["text", "id"], *([value, 1] for value in values)])
    return path


def array(path: Path, values: list[Any]) -> Path:
    path.write_text(json.dumps([{"text": value} for value in values], indent=1), "utf-8")
    return path


def packed(path: Path, values: list[Any]) -> Path:
    path.write_bytes(gzip.compress(jsonl(path, values).read_bytes()))
    return path


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("X.JSONL", jsonl), ("x.ndjson", jsonl), ("x.json", jsonl), ("x.json", array), ("x.jsonl", array),
        ("X.Csv", as_csv), ("x.tsv", tsv), ("x.PARQUET", as_parquet), ("x.jsonl.gz", packed), ("X.NDJSON.GZ", packed),
    ],
)  # fmt: skip
def test_a_file_is_read_as_what_its_suffix_says(tmp_path: Path, name: str, write: Callable[..., Path]) -> None:
    texts = [*TEXTS, 'a tab\t and a quote "']
    assert text_of(write(tmp_path / name, texts)) == "".join(text + "\n" for text in texts)


@pytest.mark.parametrize("name", ["x.jsonl.zst", "X.CSV.XZ", "x.txt.bz2", "x.zip", "x.parquet.gz"])
def test_a_compression_that_is_not_read_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"{}" * 99)
    with pytest.raises(ConfigError, match="it is compressed") as caught:
        find_files(str(tmp_path / name))
    assert caught.value.remedy.startswith("unpack it: ")
    assert caught.value.remedy.endswith(name)


def test_hostile_gzip(tmp_path: Path, limit_host: Callable[[int], None]) -> None:
    path = tmp_path / "x.jsonl.gz"
    whole = gzip.compress(json.dumps({"text": "word " * 1000}).encode())
    for content in (b"", b"{}", whole[:-9], whole[:20] + b"\xff" * 9 + whole[29:], whole + b"rest"):
        path.write_bytes(content)
        with pytest.raises(UserError) as caught:
            corpus_of(path)
        assert "x.jsonl.gz" in caught.value.message or not content
    path.write_bytes(gzip.compress(bytes(1 << 27)))  # of 0.1 MB
    limit_host(1 << 27)
    with pytest.raises(ResourceError, match=r"a line of .*x.jsonl.gz \(\d+.0 MiB so far\) needs \d+.0 MiB"):
        corpus_of(path)


def test_a_wrong_byte_costs_its_row(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"text {index}", "x": "-"}).encode() for index in range(200)]
    good = b"\n".join(lines[:70] + lines[71:])
    lines[70], lines[90] = lines[70].replace(b"text 70", b"caf\xe9"), lines[90].replace(b'"-"', b'"\xe9"')
    for name, content in {
        "x.jsonl": b"\n".join(lines),
        "x.json": b"[" + b",".join(lines) + b"]",
        "x.csv": b"text\n" + b"".join(b"text %d\n" % at if at != 70 else b"caf\xe9\n" for at in range(200)),
        "x.tsv": b"text\n" + b"".join(b"text %d\n" % at if at != 70 else b"z\0\n" for at in range(200)),
    }.items():
        (tmp_path / name).write_bytes(content)
        corpus = corpus_of(tmp_path / name)
        assert "1 of 200 rows of the data are left out" in corpus.note, name
        assert "not UTF-8" in corpus.note or name == "x.tsv"
        (tmp_path / "good.jsonl").write_bytes(good)
        assert corpus.digest == corpus_of(tmp_path / "good.jsonl").digest


def test_an_array_that_is_broken_is_refused(tmp_path: Path) -> None:
    path = array(tmp_path / "x.json", TEXTS)
    for content in (path.read_text()[:-2], "[" * 100_000, "[]", '["a", 3, null]'):
        path.write_text(content)
        with pytest.raises(UserError, match="cannot be used"):
            corpus_of(path)


def test_any_file_may_be_read_as_text(tmp_path: Path) -> None:
    assert text_of(jsonl(tmp_path / "x.jsonl", ["one", "two"]), format="text") == '{"text": "one"}\n{"text": "two"}\n'


def test_the_package_for_parquet_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        find_files(str(as_parquet(tmp_path / "x.parquet", ["a"])))
    assert "pip install 'pyarrow" in caught.value.remedy
    assert find_files(str(jsonl(tmp_path / "x.jsonl", ["a"])))


def test_bad_rows_are_left_out_counted_and_named(tmp_path: Path) -> None:
    path, good = tmp_path / "x.jsonl", tmp_path / "good.jsonl"
    lines = [json.dumps({"text": f"line {index}"}) for index in range(20)]
    good.write_text("\n".join(lines))
    bad = ["{", "3", '{"text": 3}', "[" * 100_000, '{"text": "\\ud800"}', '{"text": ' + "9" * 5000 + "}"]
    path.write_text("\n".join([*lines[:7], *bad, *lines[7:]]))
    corpus = corpus_of(path, bad_rows=0.25)
    assert corpus.digest == corpus_of(good).digest
    assert corpus.note == (
        f"6 of 26 rows of the data are left out: {path}:8 is not JSON; {path}:9 has no text under 'text'; "
        f"{path}:10 has no text under 'text'; and 3 more"
    )
    with pytest.raises(UserError) as caught:
        corpus_of(path, bad_rows=0.2)
    assert re.search(r"x\.jsonl:8 is not JSON; 6 of 26 rows .* 0.2 allows 5$", caught.value.message)
    assert "data.bad_rows" in caught.value.remedy


def test_hostile_csv(tmp_path: Path) -> None:
    long = "x" * 200_000
    assert text_of(as_csv(tmp_path / "long.csv", [long])) == long + "\n", "longer than the module's own limit"
    path, good = tmp_path / "x.csv", "good good good good"
    path.write_text(f'id,text\n1,{good}\n2,"' + "x" * (1 << 24) + "y\n" * 9 + '"')
    with pytest.raises(UserError, match=r"x\.csv:3 has a field of more than 16,777,216 characters"):
        corpus_of(path, bad_rows=0.9)
    path.write_text(f'id,text\n1,{good}\n2\n\n3,"a"b\n4,{good}\n5,"never closed\nand on')
    corpus = corpus_of(path, bad_rows=0.9)
    assert bytes(corpus.tokens).decode() == f"{good}\n" * 2
    assert f"3 of 5 rows of the data are left out: {path}:3 has no text under 'text'; {path}:5 is not" in corpus.note
    assert f"{path}:7 is not CSV (unexpected end of data)" in corpus.note
    for content in (b"", b"id\n1\n", b'"id'):
        path.write_bytes(content)
        with pytest.raises(UserError):
            corpus_of(path, bad_rows=1.0)
    path.write_bytes(b"id,text\n1,\xff\n")
    with pytest.raises(UserError, match="not UTF-8"):
        corpus_of(path)


def test_hostile_parquet(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    values = pa.array([b"good good good good", b"\xff\xfe", None, b"good good good good"], pa.binary())
    as_parquet(path, pa.Array.from_buffers(pa.string(), 4, values.buffers()))
    corpus = corpus_of(path, bad_rows=0.5)
    assert bytes(corpus.tokens) == b"good good good good\n" * 2
    assert f"{path}:2 holds a value that cannot be read, perhaps not UTF-8; {path}:3 has no text" in corpus.note
    as_parquet(path, [1, 2, 3])
    with pytest.raises(UserError, match="3 of 3 rows"):
        corpus_of(path)
    as_parquet(path, TEXTS)
    whole = path.read_bytes()
    for content in (b"PAR1", whole[:-9], whole[:50] + b"\xff" * 60 + whole[110:], b"text, not Parquet\n" * 9):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"cannot read .*x\.parquet"):
            corpus_of(path)


@pytest.mark.parametrize("write", [jsonl, as_parquet])
def test_conversations_in_rows(tmp_path: Path, write: Callable[..., Path]) -> None:
    path = write(tmp_path / f"x.{'jsonl' if write is jsonl else 'parquet'}", [TALK] * 4, "messages")
    corpus = corpus_of(path, format="chat", sequence_tokens=48)
    assert bytes(corpus.tokens[:32]) == b"User: hi\nAssistant: hello\nUser:\0"
    renamed = write(path, [TALK] * 4, "talk")
    assert corpus_of(renamed, format="chat", sequence_tokens=48, text_key="talk").digest == corpus.digest


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("hi", "no list of 1 to 1,024 messages under 'messages'"),
        ([], "no list of"),
        (TALK * 513, "no list of"),
        (["hi"], "in message 1"),
        ([TALK[0], {"role": "assistant"}], "in message 2"),
        ([TALK[0], {"role": "tool", "content": "x"}], "in message 2"),
        ([TALK[0], {"role": "assistant", "content": ["x"]}], "in message 2"),
        ([TALK[0], {"role": "assistant", "content": "\ud800"}], "surrogate"),
        (TALK[:1], "no question with an answer"),
        (TALK[1:], "no question with an answer"),
    ],
)
def test_a_conversation_that_is_none(tmp_path: Path, value: Any, why: str) -> None:
    path = jsonl(tmp_path / "x.jsonl", [*[TALK] * 4, value], "messages")
    with pytest.raises(UserError, match=r"x\.jsonl:5 .*" + why):
        corpus_of(path, format="chat", sequence_tokens=48)


def test_questions_about_the_standard_library() -> None:
    spec = DataSpec(format="chat", sequence_tokens=200, limit_bytes=20_000)
    corpus = load_corpus(spec, BYTES)
    text = bytes(corpus.tokens).decode()
    assert "User: What is abc?\nAssistant: Abstract Base Classes (ABCs) according to PEP 3119.\nUser:" in text
    assert "User: What does abc.abstractmethod do?\nAssistant: A decorator indicating abstract methods.\nUser:" in text
    assert corpus.digest == load_corpus(spec, BYTES).digest
    with pytest.raises(ConfigError, match=r"no files of data\.format"):
        find_files("stdlib", "csv")
