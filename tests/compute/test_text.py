"""Text from token ids: whole characters, stop strings across tokens, ends; beside the decoding of the whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE, WordLevel
from tokenizers.processors import TemplateProcessing

from p2ptrain.compute.text import ModelText, TextWriter
from p2ptrain.compute.tokenizer import Tokenizer
from p2ptrain.core.errors import ConfigError, UserError

BYTES = Tokenizer.of_bytes().backend


def written(ids: list[int], **options: Any) -> tuple[list[str], TextWriter]:
    writer = TextWriter(options.pop("backend", BYTES), **options)
    pieces = [writer.take(token) for token in ids] + [writer.finish()]
    assert "".join(pieces) == writer.text
    return [piece for piece in pieces if piece], writer


@given(st.lists(st.integers(0, 255)), st.lists(st.integers(0, 255), max_size=12))
def test_the_pieces_make_the_whole_for_any_bytes(ids: list[int], before: list[int]) -> None:
    pieces, writer = written(ids)
    assert "".join(pieces) == bytes(ids).decode(errors="replace")
    assert (writer.tokens, writer.ended) == (len(ids), "length")
    text = bytes(before).decode(errors="ignore")  # a prompt is whole characters
    assert "".join(written(ids, prompt=list(text.encode()))[0]) == bytes(ids).decode(errors="replace")


def test_a_character_is_never_cut() -> None:
    assert written(list("aé😀b".encode()))[0] == ["a", "é", "😀", "b"]
    assert written(list("a😀".encode()[:-1]))[0] == ["a", "\ufffd"]


def test_a_stop_string_that_spans_tokens_is_never_shown_in_part() -> None:
    pieces, writer = written(list(b"one\n\nEND two"), stop=["\n\nEND", "zzz"])
    assert (pieces, writer.text, writer.ended) == (["o", "n", "e"], "one", "stop")
    assert writer.tokens == 8, "what comes after the end is not taken"
    pieces, writer = written(list(b"one\n\nEN!"), stop=["\n\nEND"])
    assert (pieces, writer.ended) == (["o", "n", "e", "\n\nEN!"], "length")
    assert written(list(b"one\n\nEN"), stop=["\n\nEND"])[0] == ["o", "n", "e", "\n\nEN"]


def test_an_end_token_ends_the_text_and_is_no_part_of_it() -> None:
    pieces, writer = written([*b"ab", 0, *b"cd"], end_tokens=frozenset({0}), stop=["bX"])
    assert (pieces, writer.ended, writer.tokens) == (["a", "b"], "end", 3)
    unfinished = written(["😀".encode()[0], 0], end_tokens=frozenset({0}))[1]  # type: ignore[list-item]
    assert (unfinished.text, unfinished.ended) == ("\ufffd", "end")


def spaced() -> Backend:
    """Words whose decoder leaves out the space before the first one, as SentencePiece's."""
    backend = Backend(WordLevel({"▁a": 0, "▁b": 1, "c": 2, "<s>": 3}, unk_token="c"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    return backend


def test_the_first_word_keeps_its_space_behind_a_prompt() -> None:
    assert written([0, 2, 1], backend=spaced())[0] == ["a", "c", " b"]
    assert written([0, 2, 1], backend=spaced(), prompt=[1])[0] == [" a", "c", " b"]
    assert written([0, 3, 1], backend=spaced(), prompt=[3])[0][0] in ("a", " a"), "special tokens are left out"


def byte_fallback() -> Backend:
    """A SentencePiece-like vocabulary that spells what it does not know in bytes."""
    vocabulary = {"a": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    backend = Backend(BPE(vocabulary, [], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return backend


def test_a_prompt_that_ends_within_spelled_bytes() -> None:
    prompt = [byte + 1 for byte in "中中中".encode()]
    new = [byte + 1 for byte in "文文".encode()]
    assert written(new, backend=byte_fallback(), prompt=prompt)[0] == ["文", "文"]


# ------------------------------------------------------------------------------------------------- a model directory


def directory(root: Path, config: Any, generation: Any = None, backend: Backend = BYTES) -> Path:
    (root / "config.json").write_text(json.dumps(config))
    backend.save(str(root / "tokenizer.json"))
    if generation is not None:
        (root / "generation_config.json").write_text(json.dumps(generation))
    return root


@pytest.mark.parametrize(
    ("config", "generation", "context", "ends"),
    [
        ({"max_position_embeddings": 64, "eos_token_id": 7}, None, 64, {7}),
        ({"n_positions": 32, "eos_token_id": [7, 8]}, {"eos_token_id": [9]}, 32, {9}),
        ({"text_config": {"max_position_embeddings": 16}, "eos_token_id": 7}, {}, 16, set()),
        ({}, {"eos_token_id": None}, None, set()),
    ],
)
def test_what_a_directory_says(tmp_path: Path, config: Any, generation: Any, context: int, ends: set[int]) -> None:
    text = ModelText(directory(tmp_path, config, generation))
    assert (text.context, text.end_tokens) == (context, ends)


def test_settings_that_nothing_applies_are_told(tmp_path: Path) -> None:
    generation = {"repetition_penalty": 1.1, "temperature": 0.6, "min_length": 0, "no_repeat_ngram_size": 0, "x": 1}
    assert ModelText(directory(tmp_path, {}, generation)).unused_settings() == {"repetition_penalty": 1.1}


def test_a_prompt_gets_the_special_tokens_of_its_tokenizer(tmp_path: Path) -> None:
    backend = spaced()
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 3)])
    text = ModelText(directory(tmp_path, {}, backend=backend))
    assert (text.prompt_ids("a b"), text.plain_ids("a b")) == ([3, 0, 1], [0, 1])


@pytest.mark.parametrize("content", [b"", b"[1]", b"{", b"[" * 100_000])
def test_a_configuration_that_is_none(tmp_path: Path, content: bytes) -> None:
    (directory(tmp_path, {}) / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        ModelText(tmp_path)


def test_more_than_the_context_is_refused_with_the_numbers(tmp_path: Path) -> None:
    text = ModelText(directory(tmp_path, {"max_position_embeddings": 10}))
    assert text.checked([1] * 4, 6) == [1] * 4
    with pytest.raises(UserError) as refused:
        text.checked([1] * 10, 1)
    assert refused.value.remedy == "shorten the prompt"
    with pytest.raises(UserError, match="4 tokens of prompt and 7 new ones are more than the context of 10"):
        text.checked([1] * 4, 7)
    with pytest.raises(UserError, match="empty"):
        text.checked([], 1)
