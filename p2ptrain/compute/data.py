"""The corpus: text that is read, checked, tokenized once, and cut into training and validation windows.

Every member reads its own copy of the text, and all must get the same tokens. So files are read in the order of their
relative paths, and line ends become ``\\n``. Members compare the digest, unless the text is private.

Running text is cut into windows wherever they end. A conversation is tokenized whole, as it is when the model answers,
and cut to a window. (If the chat template changes earlier turns, each answer is in a text of its own, with the turns
before it.) It goes into the first of the windows being filled that has room, and the rest of a window is padding. The
conversations of a window are kept apart by their positions. Only the assistant's tokens are targets, and each window
has at least one: a conversation that is cut before its first answer is left out, and counted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt

from p2ptrain.compute.device import HOST, available_bytes, check_memory
from p2ptrain.compute.rows import BadRow, Messages, Rows
from p2ptrain.compute.sampling import Indices, permuted
from p2ptrain.compute.text import ASSISTANT, USER, ChatFormat, TrainingText
from p2ptrain.compute.tokenizer import Tokenizer, Tokens
from p2ptrain.core.errors import ConfigError, UserError
from p2ptrain.core.text_files import STDLIB, search_files, unreadable
from p2ptrain.core.texts import human_bytes

_BLOCK_WINDOWS = 16
NO_TARGET = -100
"""In place of a target that does not count: ``cross_entropy`` ignores it."""
Marks = npt.NDArray[np.uint8]
TARGET, FIRST = 1, 2
"""Bits of a token's mark: it is a target; it is the first of a conversation. Padding has neither."""

_TEXTS_PER_CALL = 256
_WINDOWS_PER_CHECK = 4096
_FILLED_AT_ONCE = 16  # windows: more waste less padding, and move text further from its place in the files
_PROBE = [{"role": role, "content": content} for role, content in zip([USER, ASSISTANT] * 2, "abcd", strict=True)]


@dataclass(frozen=True, slots=True)
class DataSpec:
    """The ``[data]`` table, whose values ``configs.schema`` has checked.

    Attributes:
        path: ``stdlib`` (the running Python's own sources), a file, a directory or a glob.
        sequence_tokens: targets in one window, T; a window has T + 1 tokens.
        format: how the files are read, see ``core.text_files``; ``chat`` for conversations.
        text_key: the field of a row that holds its text or messages; empty for ``text`` or ``messages``.
        bad_rows: largest share of rows that may be left out.
        limit_bytes: most bytes of UTF-8 text to read; 0 for all.
        validation_fraction: fraction of the windows that is held out, at least one window; 0: none.
        document_end: ``auto``: texts begin and end as ``Tokenizer`` says; ``none``: they are joined by line ends.
        date: what chat templates print as today's, as ``2026-11-28``; empty: today's, in UTC.
    """

    path: str = STDLIB
    sequence_tokens: int = 128
    format: str = "auto"
    text_key: str = ""
    bad_rows: float = 0.01
    limit_bytes: int = 0
    validation_fraction: float = 0.05
    document_end: str = "auto"
    date: str = ""


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """What a model computes of some windows.

    Attributes:
        inputs: (B, T).
        targets: (B, T), the next token of each, or ``NO_TARGET``.
        positions: (B, T), of each input in its conversation; a lower one than before begins the next. None for running
            text, where they count from 0 to T - 1.
    """

    inputs: Indices
    targets: Indices
    positions: Indices | None


@dataclass(frozen=True, slots=True)
class Corpus:
    """Tokenized text, divided into training and validation windows.

    Window ``w`` of running text is ``tokens[w T : w T + T + 1]``. The last target of a window is the first input of the
    next one, so every token but the first is a target exactly once. Windows of conversations share no token.

    Attributes:
        tokens: shape (n,), uint8, uint16 or int32.
        digest: SHA-256 over the dtype's name, the vocabulary's size, the tokens (little-endian) and the marks, hex.
        training, validation: disjoint window numbers. The held-out windows are blocks of 16 consecutive windows, so
            that their neighbouring text is not trained on. The blocks are pseudo-random over the whole corpus, and the
            same for every seed. ``validation`` starts with one window of each block, so that a few batches represent
            the corpus.
        marks: of conversations: the mark of each token, shape (n,).
        note: what was left out or cut; empty if nothing was.
    """

    tokens: Tokens
    vocab_size: int
    sequence_tokens: int
    digest: str
    training: Indices
    validation: Indices
    marks: Marks | None = None
    note: str = ""

    def window_tokens(self, windows: Indices) -> Indices:
        """The tokens of ``windows`` (B,), shape (B, T + 1), int64."""
        windows_tokens: Indices = self.tokens[self._places(windows)].astype(np.int64)
        return windows_tokens

    def target_counts(self) -> Indices:
        """Number of targets in each window, shape (windows,)."""
        if self.marks is None:
            return np.full(len(self.training) + len(self.validation), self.sequence_tokens)
        marks = self.marks.reshape(-1, self.sequence_tokens + 1)[:, 1:]
        counts: Indices = np.count_nonzero(marks & TARGET, axis=1).astype(np.int64)
        return counts

    def batch(self, windows: Indices) -> TokenBatch:
        tokens = self.window_tokens(windows)
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        if self.marks is None:
            return TokenBatch(inputs, targets, None)
        marks, at = self.marks[self._places(windows)], np.arange(self.sequence_tokens)
        firsts = np.maximum.accumulate(np.where(marks[:, :-1] & FIRST, at, 0), axis=1)
        return TokenBatch(inputs, np.where(marks[:, 1:] & TARGET, targets, NO_TARGET), at - firsts)

    def _places(self, windows: Indices) -> Indices:
        width = self.sequence_tokens + 1
        places: Indices = windows[:, None] * (width if self.marks is not None else width - 1) + np.arange(width)
        return places


def load_corpus(spec: DataSpec, tokenizer: Tokenizer, model_tokens: int | None = None) -> Corpus:
    """Find, read and tokenize the text that ``spec`` names, for a model with the ids below ``model_tokens``; None: with
    all of the tokenizer's. Raises ``ConfigError``: ``path`` names no text, or too little; the rows have no such field;
    it has a token that the model lacks; or as ``pack_conversations``; ``UserError``: a file cannot be read or is not
    text, or too many rows cannot be used; ``ResourceError``: the text does not fit into memory."""
    files, not_read = search_files(spec.path, spec.format)
    total = sum(_size(file) for file in files)
    read_bytes = min(total, spec.limit_bytes or total)
    copies = 3 if tokenizer.is_bytes else 8
    remedy = f"set data.limit_bytes = {available_bytes(HOST) // copies}"
    check_memory(read_bytes * copies, HOST, f"the text ({human_bytes(read_bytes)} in data.path)", remedy)
    is_chat, width = spec.format == "chat", spec.sequence_tokens + 1
    rows = Rows(spec.path, spec.format, spec.text_key or ("messages" if is_chat else "text"), spec.bad_rows)
    marks, cut = None, ""
    if is_chat:
        form, found = ChatFormat(tokenizer, spec.date), rows.conversations(files)
        tokens, marks, cut = pack_conversations(found, form, rows, width=width, limit_bytes=spec.limit_bytes)
    else:
        documents = spec.document_end == "auto"
        texts = rows.texts(files, line_end="" if documents and tokenizer.end else "\n")
        tokens = tokenizer.encode(_limited(texts, spec.limit_bytes), documents=documents)
    highest, known = int(tokens.max(initial=0)), model_tokens or tokenizer.vocab_size
    if highest >= known:  # a token that no text has, such as one for padding, may be beyond
        name = tokenizer.backend.id_to_token(highest)
        text = f"the text has the token {name!r}, id {highest}, but the model has only the ids 0 to {known - 1}"
        raise ConfigError(text, remedy="put the tokenizer there that the model was trained with")
    left_out = list(filter(None, (not_read, rows.note(), cut)))
    windows = len(tokens) // width if is_chat else max(0, len(tokens) - 1) // spec.sequence_tokens
    training, validation = split_windows(spec, windows, left_out)
    note = "; ".join(filter(None, (*left_out, _large_part(spec, len(validation), windows))))
    hasher = hashlib.sha256(f"{tokens.dtype.name} {tokenizer.vocab_size} ".encode())
    hasher.update(np.ascontiguousarray(tokens, tokens.dtype.newbyteorder("<")).data)
    hasher.update(b"" if marks is None else marks.data)
    digest = hasher.hexdigest()
    return Corpus(tokens, tokenizer.vocab_size, spec.sequence_tokens, digest, training, validation, marks, note)


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError as error:
        raise unreadable(file, error) from error


def split_windows(spec: DataSpec, windows: int, left_out: Sequence[str] = ()) -> tuple[Indices, Indices]:
    """Training and validation window numbers (see ``Corpus``); the former ascend. ``left_out``: for the error. Raises
    ``ConfigError``."""
    fraction = spec.validation_fraction
    block = min(_BLOCK_WINDOWS, max(1, round(windows * fraction)))  # smaller blocks for a tiny corpus
    blocks, least = windows // block, 2 if fraction else 1
    if blocks < least:
        text = f"data.path = {spec.path!r} has too few tokens: they fill {windows} windows of {spec.sequence_tokens}"
        raise ConfigError(
            "; ".join([text, *left_out]),
            remedy=f"give at least {least * spec.sequence_tokens + 1} tokens of text, or a smaller "
            "data.sequence_tokens; with data.validation_fraction = 0 one window is enough",
        )
    chosen = np.arange(max(1, min(blocks - 1, round(blocks * fraction))) if fraction else 0)
    held = (np.sort(permuted(chosen, blocks, key=0))[:, None] * block + np.arange(block)).astype(np.int64)
    is_training = np.ones(windows, dtype=np.bool_)
    is_training[held] = False
    return np.flatnonzero(is_training).astype(np.int64), held.T.reshape(-1)


def _large_part(spec: DataSpec, held_out: int, windows: int) -> str:
    """Says that more is held out than was asked for, as of a tiny corpus; empty if not."""
    if held_out <= 1.5 * spec.validation_fraction * windows:
        return ""
    return (
        f"validation holds out {held_out} of {windows} sequences, more than data.validation_fraction = "
        f"{spec.validation_fraction:g}: with 0 all are trained on"
    )


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


# ------------------------------------------------------------------------------------------------------ conversations


def pack_conversations(
    conversations: Iterable[tuple[str, Messages]], form: ChatFormat, rows: Rows, *, width: int, limit_bytes: int
) -> tuple[Tokens, Marks, str]:
    """Tokens and marks of all windows, each of ``width`` tokens, shape (windows * width,); and what to tell of those
    that were cut.

    Args:
        conversations: each with its place. rows: counts those that the chat template refuses.
        limit_bytes: most bytes of UTF-8 of the written conversations; 0 for all.

    Raises:
        ConfigError: the chat template does not show where an answer begins.
        ResourceError: the windows do not fit into memory.
        UserError: as ``Rows``.
    """
    try:
        form.training_texts(_PROBE)
    except UserError as problem:
        raise ConfigError(problem.message, remedy=problem.remedy) from problem
    windows: list[tuple[Tokens, Marks]] = []
    filled: list[tuple[int, Tokens, Marks]] = []  # the newest windows, each after the number of its tokens
    count = cut = unanswered = 0
    for ids, marks in _tokenize(_training_texts(conversations, form, rows, limit_bytes), form):
        count, cut = count + 1, cut + (len(ids) > width)
        ids, marks = ids[:width], marks[:width]
        if not (marks & TARGET).any():
            unanswered += 1
            continue
        at = next((at for at, (used, *_) in enumerate(filled) if used + len(ids) <= width), len(filled))
        if at == len(filled):
            if len(windows) % _WINDOWS_PER_CHECK == 0:  # texts that repeat earlier turns may be many times the files
                size_bytes = 2 * (len(windows) + _WINDOWS_PER_CHECK) * width * (ids.itemsize + 1)
                what = f"packing {count:,} texts of conversations"
                check_memory(size_bytes, HOST, what, "set a smaller data.limit_bytes")
            windows.append((np.zeros(width, ids.dtype), np.zeros(width, np.uint8)))
            filled.append((0, *windows[-1]))
        used, window, window_marks = filled[at]
        end = used + len(ids)
        window[used:end], window_marks[used:end] = ids, marks
        filled[at] = end, window, window_marks
        del filled[:-_FILLED_AT_ONCE]
    empty = np.zeros(0, form.tokenizer.dtype), np.zeros(0, np.uint8)
    tokens, all_marks = (np.concatenate(arrays) for arrays in zip(empty, *windows, strict=True))
    usable, texts, note = rows.count - rows.bad, "conversations", ""
    if count > usable:
        note = f"; the chat template changes earlier turns, so {usable:,} conversations make {count:,} texts"
        texts = "texts"
    if cut:
        note += f"; {cut:,} of {count:,} {texts} have more than data.sequence_tokens and are cut"
    if unanswered:
        note += f"; {unanswered:,} have no answer in what is left, or an empty one, and are left out"
    return tokens, all_marks, note.removeprefix("; ")


def _training_texts(
    conversations: Iterable[tuple[str, Messages]], form: ChatFormat, rows: Rows, limit_bytes: int
) -> Iterator[TrainingText]:
    """Those of the conversations that the chat template accepts."""
    left = limit_bytes
    for place, messages in conversations:
        try:
            texts = form.training_texts(messages)
        except ConfigError:  # a limit of this machine must not decide which rows are learned
            raise
        except UserError as problem:
            rows.leave_out(place, BadRow(f"is not usable: {problem.message}", problem.remedy or "leave it out"))
            continue
        left -= sum(len(text.encode()) for text, _ in texts)
        if limit_bytes and left < 0:
            return
        yield from texts or [TrainingText("", [])]


def _tokenize(texts: Iterator[TrainingText], form: ChatFormat) -> Iterator[tuple[Tokens, Marks]]:
    while batch := list(islice(texts, _TEXTS_PER_CALL)):
        for encoding, (_, bounds) in zip(form.encode([text for text, _ in batch]), batch, strict=True):
            starts, stops = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
            begun = np.searchsorted(bounds[::2], np.maximum(stops, starts + 1), side="left")
            ended = np.searchsorted(bounds[1::2], starts, side="right")
            marks = (begun > ended).astype(np.uint8)  # characters of an answer are in the token
            marks[:1] = FIRST  # and no target: it has no token before it
            yield np.array(encoding.ids, form.tokenizer.dtype), marks
