"""Ids of long texts, encoded in pieces, beside the library's of the whole text."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from p2ptrain.compute import tokenizing
from p2ptrain.compute.rows import TextPart
from p2ptrain.compute.tokenizer import Tokenizer
from p2ptrain.compute.tokenizing import Place, encode_texts

WORDS = ["def", "the", "ring", "peer", "straße", "naïve", "e\u0301", "語彙", "\U0001f600\U0001f3fd", "don't", "1234567"]
WORDS += ["x", "=", "(", ");", "\n", "\n\n    ", "   ", "\t", "3.14", "ABCdef", "unbelievably"]
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
LLAMA3 += r"|\s*[\r\n]+|\s+(?!\S)|\s+"
KINDS = ["bytes", "gpt2", "llama3", "llama2", "unigram", "wordpiece"]


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    words = random.Random(3)
    lines = [" ".join(words.choices(WORDS, k=30)) for _ in range(300)]
    byte_level: Any = pre_tokenizers.ByteLevel(add_prefix_space=kind == "gpt2", use_regex=kind == "gpt2")
    trainer: Any = trainers.BpeTrainer(vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    backend: Any = Backend(models.BPE())
    if kind == "bytes":
        return Tokenizer.of_bytes()
    if kind == "gpt2":
        backend.pre_tokenizer = byte_level
    elif kind == "llama3":
        split = pre_tokenizers.Split(Regex(LLAMA3), "isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    elif kind == "llama2":  # no words: merges see the whole text
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        trainer = trainers.BpeTrainer(vocab_size=600, max_token_length=12)
        lines = [line[at : at + 40] for line in lines[:40] for at in range(0, 200, 40)]
    elif kind == "unigram":
        backend = Backend(models.Unigram())
        backend.normalizer, backend.pre_tokenizer = normalizers.NFKC(), pre_tokenizers.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=400, unk_token="<unk>", special_tokens=["<unk>"])
    else:
        backend = Backend(models.WordPiece(unk_token="[UNK]"))
        backend.normalizer, backend.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
        trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=["[UNK]"])
    backend.train_from_iterator(lines, trainer)
    return Tokenizer(backend)


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizing, "PIECE_CHARS", 200)
    monkeypatch.setattr(tokenizing, "OVERLAP_CHARS", 120)
    monkeypatch.setattr(tokenizing, "MOST_CHARS", 4000)
    monkeypatch.setattr(tokenizing, "_BATCH_PIECES", 3)


def whole(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.backend.encode(text, add_special_tokens=False).ids)


def in_parts(text: str, sizes: list[int]) -> Iterator[TextPart]:
    at = 0
    for size in sizes:
        yield TextPart(text[at : at + size], ends=False)
        at += size
    yield TextPart(text[at:], ends=True)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40)
@given(
    words=st.lists(st.sampled_from(WORDS), min_size=100, max_size=300),
    between=st.sampled_from([" ", "", "  ", "\n"]),
    strange=st.text(max_size=300),
    sizes=st.lists(st.integers(0, 900), max_size=3),
)
def test_ids_are_those_of_the_whole_text(
    kind: str, words: list[str], between: str, strange: str, sizes: list[int]
) -> None:
    tokenizer = tokenizer_of(kind)
    text = between.join([*words[:50], strange, *words[50:]]).replace("\0", " ")
    text = text.encode(errors="ignore").decode()
    parts = [*in_parts(text, sizes), *in_parts("short", [])]
    found = list(encode_texts(parts, tokenizer, Place()))
    ends = [at for at, part in enumerate(found) if part.ends]
    first = np.concatenate([part.ids for part in found[: ends[0] + 1]])
    assert first.tolist() == whole(tokenizer, text)
    assert found[-1].ids.tolist() == whole(tokenizer, "short")
    assert [at for at, part in enumerate(found) if part.begins] == [0, ends[0] + 1]
    for at, part in enumerate(found):
        if part.place is not None:
            rest = list(encode_texts(parts, tokenizer, part.place))
            assert [ids.ids.tolist() for ids in rest] == [ids.ids.tolist() for ids in found[at + 1 :]]


@pytest.mark.parametrize("kind", ["gpt2", "llama3", "unigram"])
def test_pieces_without_a_common_token_are_encoded_as_one(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    text = "ring " + "1234567" * 200 + " the peer don't " * 60
    found = list(encode_texts([TextPart(text, ends=True)], tokenizer, Place()))
    assert np.concatenate([part.ids for part in found]).tolist() == whole(tokenizer, text)


def test_a_word_without_end_takes_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, longest = tokenizer_of("wordpiece"), 0
    encodings = tokenizer.encodings

    def measured(texts: list[str], *, add_special_tokens: bool) -> Any:
        nonlocal longest
        longest = max(longest, *map(len, texts))
        return encodings(texts, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(tokenizer, "encodings", measured)
    found = list(encode_texts([TextPart("ab" * 30_000, ends=True)], tokenizer, Place()))
    assert longest <= 4000 + 320
    assert 10 < sum(len(part.ids) for part in found) < 100, "an unknown word for each of the longest pieces"
