"""Bytes as a vocabulary, in memory and through a directory that AutoTokenizer opens."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE, Unigram, WordLevel
from tokenizers.pre_tokenizers import ByteLevel, Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from p2ptrain.compute.tokenizer import Tokenizer
from p2ptrain.core.errors import ConfigError, StorageError

BYTES = Tokenizer.of_bytes()
TEXT = "def  x(): \t'héllo €  😀'\r\n\n  \u200b end "


def plain_ids(tokenizer: Tokenizer, texts: Sequence[str]) -> list[int]:
    """Ids of some texts, one after another, without special tokens."""
    return [token for each in tokenizer.encodings(texts, add_special_tokens=False) for token in each.ids]


def test_bytes_are_ids() -> None:
    assert BYTES.is_bytes
    assert BYTES.vocab_size == 256
    assert BYTES.dtype == np.dtype(np.uint8)
    assert bytes(plain_ids(BYTES, [TEXT, "", "more"])) == (TEXT + "more").encode()


@given(st.text())
def test_the_equivalent_tokenizer_gives_the_same_ids(text: str) -> None:
    assert BYTES.backend.encode(text).ids == list(text.encode())
    assert BYTES.backend.decode(list(text.encode())) == text


def test_auto_tokenizer_opens_what_was_saved(tmp_path: Path) -> None:
    BYTES.save(tmp_path)
    auto = AutoTokenizer.from_pretrained(tmp_path)
    ids = auto(TEXT)["input_ids"]
    assert ids == list(TEXT.encode())
    assert auto.decode(ids) == TEXT
    assert auto.decode([0xC3]) == "\ufffd"  # half a character
    assert Tokenizer.of_directory(tmp_path).is_bytes


@pytest.fixture
def words(tmp_path: Path) -> Path:
    """A model directory with a vocabulary of 300 words."""
    directory = tmp_path / "words"
    directory.mkdir()
    backend = tokenizers.Tokenizer(WordLevel({f"w{index}": index for index in range(300)}, unk_token="w0"))
    backend.pre_tokenizer = Whitespace()
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return directory


def test_the_tokenizer_of_a_directory(words: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.of_directory(words)
    assert not tokenizer.is_bytes
    assert tokenizer.vocab_size == 300
    assert tokenizer.dtype == np.dtype(np.uint16)
    ids = plain_ids(tokenizer, [f"w{index % 300} w1" for index in range(600)])
    assert ids == [number for index in range(600) for number in (index % 300, 1)]
    target = tmp_path / "checkpoint"
    target.mkdir()
    tokenizer.save(target)
    assert sorted(path.name for path in target.iterdir()) == ["tokenizer.json", "tokenizer_config.json"]
    assert AutoTokenizer.from_pretrained(target)("w7 w8")["input_ids"] == [7, 8]


def test_nothing_to_encode(words: Path) -> None:
    assert plain_ids(Tokenizer.of_directory(words), []) == plain_ids(BYTES, []) == []


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"model": 3}'])
def test_a_broken_tokenizer_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match=r"tokenizer\.json") as caught:
        Tokenizer.of_directory(tmp_path)
    assert "save_pretrained" in caught.value.remedy


@pytest.mark.parametrize(
    "steps",
    [
        {"normalizer": normalizers.Sequence([normalizers.Replace("a", "aa")] * 30)},
        {"normalizer": normalizers.Sequence([normalizers.Replace(Regex(""), "a")] * 30)},
        {"normalizer": normalizers.Prepend("a" * 300)},
        {"pre_tokenizer": pre_tokenizers.Sequence([pre_tokenizers.ByteLevel()] * 30)},
        {"post_processor": processors.Sequence([processors.TemplateProcessing(single="$A $A")] * 30)},
        {"decoder": decoders.Sequence([decoders.Replace("a", "aa")] * 30)},
    ],
    ids=lambda steps: type(next(iter(steps.values()))).__name__,
)
def test_a_tokenizer_that_explodes_is_refused(tmp_path: Path, steps: dict[str, Any]) -> None:
    backend = tokenizers.Tokenizer(WordLevel({"a": 0}, unk_token="a"))
    for name, step in steps.items():
        setattr(backend, name, step)
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match="makes more than 256 characters of one"):
        Tokenizer.of_directory(tmp_path)


def test_a_table_of_texts_that_explodes_is_refused(tmp_path: Path) -> None:
    table = (8).to_bytes(4, "little") + bytes(8) + b"a" * 10_000 + b"\0"
    step = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}
    backend = tokenizers.Tokenizer(WordLevel({"a": 0}, unk_token="a"))
    document = json.loads(backend.to_str()) | {"normalizer": step}
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(ConfigError, match="makes more than 256 characters of one"):
        Tokenizer.of_directory(tmp_path)


def test_a_panic_of_the_library_is_told(tmp_path: Path) -> None:
    """It is no ``Exception``."""
    backend = tokenizers.Tokenizer(WordLevel({"a": 0}, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match=r"cannot use the tokenizer of .* retry-limit"):
        plain_ids(Tokenizer.of_directory(tmp_path), ["a" * 40 + "b"])
    document = json.loads(backend.to_str()) | {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(ConfigError, match=r"cannot use the tokenizer .*Precompiled"):
        Tokenizer.of_directory(tmp_path)


@pytest.mark.parametrize("content", ["", "[1]", "3", "[" * 100_000, '{"added_tokens_decoder": 3}', '{"eos_token": ['])
def test_broken_settings_of_a_tokenizer_are_refused(words: Path, content: str) -> None:
    (words / "tokenizer_config.json").write_text(content)
    with pytest.raises(ConfigError, match="cannot use the tokenizer") as caught:
        Tokenizer.of_directory(words)
    assert "tokenizer_config.json beside it" in caught.value.message or "added" in content


def test_nowhere_to_save_to(words: Path, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot write the tokenizer"):
        Tokenizer.of_directory(words).save(tmp_path / "missing")


def test_the_digest_is_of_what_ids_mean(words: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.of_directory(words)
    assert len(tokenizer.digest) == 32
    assert tokenizer.digest != BYTES.digest
    (words / "chat_template.jinja").write_text("another")
    text = (words / "tokenizer.json").read_text()
    (words / "tokenizer.json").write_text(" " + text)
    assert Tokenizer.of_directory(words).digest == tokenizer.digest
    BYTES.save(tmp_path)
    assert Tokenizer.of_directory(tmp_path).digest == BYTES.digest
    for old, new in (('"w7":7,', '"w7":8,'), ('"w8":8', '"w8":9'), ('"w299":299', '"w299":299,"w300":300')):
        assert old.replace(":", ": ") in text or old in text
        spaced = text if old in text else text.replace('": ', '":')
        (words / "tokenizer.json").write_text(spaced.replace(old, new))
        assert Tokenizer.of_directory(words).digest != tokenizer.digest


BEGINS = TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 257)])
BOTH = TemplateProcessing(single="<s> $A </s>", pair="<s> $A $B </s>", special_tokens=[("<s>", 257), ("</s>", 258)])
NAMES = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize(
    ("state", "settings", "begin", "end"),
    [
        ({}, {}, [], []),
        ({"truncation": 4}, {}, [], []),
        ({"padding": 64}, NAMES, [], [258]),
        ({"truncation": 4, "padding": 64, "dropout": 0.9}, NAMES, [], [258]),
        ({"post_processor": BEGINS}, NAMES, [257], [258]),
        ({"post_processor": BOTH, "truncation": 8}, {}, [257], [258]),
        ({"post_processor": BOTH}, NAMES | {"add_bos_token": False}, [257], [258]),
        (
            {},
            {"eos_token": {"__type": "AddedToken", "content": "</s>", "lstrip": True}, "add_bos_token": True},
            [],
            [258],
        ),
        ({}, {"split_special_tokens": True, "eos_token": "</s>"}, [], [258]),
        ({}, {"pad_token": "<pad>", "eos_token": "<end>", "extra_special_tokens": ["é"]}, [], [259]),
        ({}, {"added_tokens_decoder": {"259": {"content": "and", "lstrip": True, "special": False}}}, [], []),
    ],
)
def test_texts_are_encoded_as_auto_tokenizer_does_whatever_state_a_file_carries(
    tmp_path: Path, state: dict[str, Any], settings: dict[str, Any], begin: list[int], end: list[int]
) -> None:
    backend = tokenizers.Tokenizer(BPE(vocab=BYTES.backend.get_vocab() | {"Ġa": 256}, merges=[("Ġ", "a")]))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.add_special_tokens(["<s>", "</s>"])
    if "post_processor" in state:
        backend.post_processor = state["post_processor"]
    if "truncation" in state:
        backend.enable_truncation(state["truncation"])
    if "padding" in state:
        backend.enable_padding(length=state["padding"])
    backend.save(str(tmp_path / "tokenizer.json"))
    written = {"tokenizer_class": "PreTrainedTokenizerFast"} | settings
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(written))
    auto = AutoTokenizer.from_pretrained(tmp_path)
    if "dropout" in state:
        backend.model.dropout = state["dropout"]
        backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.of_directory(tmp_path)
    texts = [TEXT, "héllo </s> and <s><pad> <end>" * 9, ""]
    for text in texts:
        assert tokenizer.backend.encode(text).ids == auto(text)["input_ids"]
    plain = [auto(text, add_special_tokens=False)["input_ids"] for text in texts]
    assert plain_ids(tokenizer, texts) == [*chain(*plain)]
    assert (tokenizer.begin, tokenizer.end) == (begin, end)


def test_a_vocabulary_of_bytes_that_changes_its_text_is_no_bytes(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer.from_str(BYTES.backend.to_str())
    backend.normalizer = tokenizers.normalizers.Lowercase()
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.of_directory(tmp_path)
    assert not tokenizer.is_bytes
    assert bytes(plain_ids(tokenizer, ["ABC"])) == b"abc"


PIECES = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("<s>", 0.0), ("<mask>", 0.0)]
UNIGRAM = Unigram([*PIECES, ("▁", -2.0), *((letter, -3.0) for letter in "abcdehlo "), ("▁a", -4.0), ("ab", -4.0)], 2)
PAIRS = BPE(
    vocab={name: number for number, name in enumerate(["<unk>", "<s>", "</s>", "▁", "a", "b", "▁a", " ", "ab", "Ġ"])},
    merges=[("▁", "a"), ("a", "b")],
    unk_token="<unk>",
)
LSTRIP = {"content": "<s>", "lstrip": True, "normalized": False, "rstrip": False, "single_word": False, "special": True}


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        (PAIRS, {"tokenizer_class": "LlamaTokenizer"}),
        (PAIRS, {"tokenizer_class": "LlamaTokenizerFast", "legacy": False, "add_prefix_space": False}),
        (PAIRS, {"tokenizer_class": "CodeLlamaTokenizer"}),
        (PAIRS, {"tokenizer_class": "GemmaTokenizer"}),
        (PAIRS, {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}),
        (PAIRS, {"tokenizer_class": "Qwen2Tokenizer"}),
        (UNIGRAM, {"tokenizer_class": "T5Tokenizer", "extra_ids": 2}),
        (UNIGRAM, {"tokenizer_class": "XLMRobertaTokenizer"}),
        (PAIRS, {"tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": {"1": LSTRIP}}),
        (PAIRS, {"tokenizer_class": "OfNoLibrary"}),
    ],
    ids=lambda value: value.get("tokenizer_class") if isinstance(value, dict) else "",
)
def test_a_class_that_builds_its_tokenizer_anew_is_obeyed(tmp_path: Path, model: Any, settings: dict[str, Any]) -> None:
    backend = tokenizers.Tokenizer(model)
    backend.add_special_tokens(["<s>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    auto = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer = Tokenizer.of_directory(tmp_path)
    for text in ("ab a  b", "a ab <s> b\n a", " aab"):
        assert tokenizer.encodings([text], add_special_tokens=True)[0].ids == auto(text)["input_ids"]
        assert plain_ids(tokenizer, [text]) == auto(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.end == ([] if auto.eos_token_id is None else [auto.eos_token_id])


@pytest.mark.parametrize("name", ["precompiled_charsmap", "extra_ids"])
def test_what_claims_much_memory_is_refused_before_it_is_allocated(tmp_path: Path, name: str) -> None:
    document = json.loads(tokenizers.Tokenizer(UNIGRAM).to_str())
    settings: dict[str, Any] = {"tokenizer_class": "T5Tokenizer"}
    if name == "extra_ids":
        settings[name] = 1 << 40
    else:
        table = base64.b64encode((0xFFFFFFFC).to_bytes(4, "little") + bytes(64)).decode()
        normalizer = {"type": "Sequence", "normalizers": [{"type": "Precompiled", name: table}]}
        document["normalizer"] = normalizer
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match=r"claims 4294967292 bytes|extra_ids = 1099511627776"):
        Tokenizer.of_directory(tmp_path)


@pytest.mark.parametrize("file", ["tokenizer_config.json", "config.json"])
@pytest.mark.parametrize(
    "settings",
    [
        {"auto_map": {"AutoTokenizer": ["evil.T", "evil.T"]}},
        {"tokenizer_class": "RagTokenizer"},
        {"tokenizer_class": "AutoModelForCausalLM"},
        {"tokenizer_class": "pipeline"},
    ],
    ids=str,
)
def test_what_is_no_tokenizer_is_neither_run_nor_loaded(words: Path, file: str, settings: dict[str, Any]) -> None:
    (words / file).write_text(json.dumps(settings))
    (words / "evil.py").write_text("raise SystemExit(9)")
    assert plain_ids(Tokenizer.of_directory(words), ["w7"]) == [7]
