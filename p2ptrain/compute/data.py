"""The corpus: text that is read, checked, tokenized once, and cut into training and validation windows.

Every member reads its own copy of the text, and all must get the same tokens. So files are read in the order of their
relative paths, and line ends become ``\\n``. Members compare the digest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from p2ptrain.compute.device import HOST, check_memory
from p2ptrain.compute.sampling import Indices, permuted
from p2ptrain.compute.tokenizer import Tokenizer, Tokens
from p2ptrain.core.errors import ConfigError, UserError
from p2ptrain.core.text_files import STDLIB, find_files

_BLOCK_WINDOWS = 16


@dataclass(frozen=True, slots=True)
class DataSpec:
    """The ``[data]`` table, whose values ``configs.schema`` has checked.

    Attributes:
        path: ``stdlib`` (the running Python's own sources), a file, a directory, a glob, or a ``.jsonl`` file.
        sequence_tokens: targets in one window, T; a window has T + 1 tokens.
        text_key: the field of each ``.jsonl`` line that holds the text.
        limit_bytes: most bytes of UTF-8 text to read; 0 for all.
        validation_fraction: fraction of the windows that is held out.
    """

    path: str = STDLIB
    sequence_tokens: int = 128
    text_key: str = "text"
    limit_bytes: int = 0
    validation_fraction: float = 0.05


@dataclass(frozen=True, slots=True)
class Corpus:
    """Tokenized text, divided into training and validation windows.

    Window ``w`` is ``tokens[w T : w T + T + 1]``. The last target of a window is the first input of the next one, so
    every token but the first is a target exactly once.

    Attributes:
        tokens: shape (n,), uint8, uint16 or int32.
        digest: SHA-256 over the dtype's name, the vocabulary's size and the tokens (little-endian), hex.
        training, validation: disjoint window numbers. The held-out windows are blocks of 16 consecutive windows, so
            that their neighbouring text is not trained on. The blocks are pseudo-random over the whole corpus, and the
            same for every seed. ``validation`` starts with one window of each block, so that a few batches represent
            the corpus.
    """

    tokens: Tokens
    vocab_size: int
    sequence_tokens: int
    digest: str
    training: Indices
    validation: Indices

    def window_tokens(self, windows: Indices) -> Indices:
        """The tokens of ``windows`` (B,), shape (B, T + 1), int64."""
        offsets = windows[:, None] * self.sequence_tokens + np.arange(self.sequence_tokens + 1)
        windows_tokens: Indices = self.tokens[offsets].astype(np.int64)
        return windows_tokens


def load_corpus(spec: DataSpec, tokenizer: Tokenizer) -> Corpus:
    """Find, read and tokenize the text that ``spec`` names.

    Raises:
        ConfigError: ``path`` names no text, or too little.
        UserError: a file cannot be read or is not text.
        ResourceError: the text does not fit into memory.
    """
    files = find_files(spec.path)
    total = sum(_size(file) for file in files)
    read_bytes = min(total, spec.limit_bytes or total)
    check_memory(read_bytes * (3 if tokenizer.is_bytes else 8), HOST, f"reading {read_bytes / 1e6:.1f} MB of text")
    tokens = tokenizer.encode(_limited(_texts(files, spec.text_key), spec.limit_bytes))
    training, validation = split_windows(spec, len(tokens))
    hasher = hashlib.sha256(f"{tokens.dtype.name} {tokenizer.vocab_size} ".encode())
    hasher.update(np.ascontiguousarray(tokens, tokens.dtype.newbyteorder("<")).data)
    return Corpus(tokens, tokenizer.vocab_size, spec.sequence_tokens, hasher.hexdigest(), training, validation)


def split_windows(spec: DataSpec, token_count: int) -> tuple[Indices, Indices]:
    """Training and validation window numbers (see ``Corpus``); the former ascend. Raises ``ConfigError``."""
    windows = max(0, token_count - 1) // spec.sequence_tokens
    block = min(_BLOCK_WINDOWS, max(1, windows // 8))  # smaller blocks for a tiny corpus
    blocks = windows // block
    if blocks < 2:
        raise ConfigError(
            f"data.path = {spec.path!r} has {token_count} tokens, too few for windows of {spec.sequence_tokens}",
            remedy=f"give at least {2 * spec.sequence_tokens + 1} tokens of text, or a smaller data.sequence_tokens",
        )
    chosen = np.arange(max(1, min(blocks - 1, round(blocks * spec.validation_fraction))))
    held = (np.sort(permuted(chosen, blocks, key=0))[:, None] * block + np.arange(block)).astype(np.int64)
    is_training = np.ones(windows, dtype=np.bool_)
    is_training[held] = False
    return np.flatnonzero(is_training).astype(np.int64), held.T.reshape(-1)


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError as error:
        raise _unreadable(file, error) from error


# ----------------------------------------------------------------------------------------------------------------- text


def _texts(files: list[Path], text_key: str) -> Iterator[str]:
    for file in files:
        text = _read_text(file)
        documents = _jsonl_texts(text, file, text_key) if file.suffix == ".jsonl" else [text]
        for document in documents:
            if document:
                yield document if document.endswith("\n") else document + "\n"


def _read_text(file: Path) -> str:
    try:
        data = file.read_bytes()
    except OSError as error:
        raise _unreadable(file, error) from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{file} is not UTF-8 text (byte {error.start})", remedy="convert it with iconv -t UTF-8, or leave it out"
        ) from error
    if "\0" in text:
        raise UserError(f"{file} is not text: byte {text.index(chr(0))} is zero", remedy="leave it out of data.path")
    return text.replace("\r\n", "\n")


def _jsonl_texts(text: str, file: Path, text_key: str) -> Iterator[str]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{file}:{number} is not JSON", remedy="a .jsonl has one JSON object a line") from error
        value = record.get(text_key) if isinstance(record, dict) else None
        if not isinstance(value, str):
            raise UserError(
                f"{file}:{number} has no text under {text_key!r}", remedy="set data.text_key to the field with the text"
            )
        yield value


def _limited(texts: Iterator[str], limit_bytes: int) -> Iterator[str]:
    """At most ``limit_bytes`` of UTF-8 of ``texts``, without cutting a character; 0 for all."""
    if not limit_bytes:
        yield from texts
        return
    left = limit_bytes
    for text in texts:
        encoded = text.encode()
        if len(encoded) >= left:
            yield encoded[:left].decode(errors="ignore")
            return
        yield text
        left -= len(encoded)


def _unreadable(file: Path, error: OSError) -> UserError:
    return UserError(f"cannot read {file}: {error.strerror or error}", remedy="check its permissions, or leave it out")
