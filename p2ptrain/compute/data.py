"""The corpus: text that is read, checked, tokenized once, and cut into training and validation windows.

Every member reads its own copy of the text, and all must get the same tokens. So files are read in the order of their
relative paths, and line ends become ``\\n``. Members compare the digest, unless the text is private.

Running text is cut into windows wherever they end; ``compute.packing`` makes those of conversations, which are kept
apart by their positions, and of pairs of answers. The tokens are in a store on disk (``compute.token_store``): memory
does not grow with the text, and the next start finds them.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from configs.schema import Data, PluginValue
from p2ptrain.compute.packing import (
    FIRST,
    TARGET,
    Marks,
    WindowPacker,
    check_template,
    encode_conversations,
    encode_pair,
)
from p2ptrain.compute.rows import RowCounts, Rows
from p2ptrain.compute.sampling import Indices, permuted
from p2ptrain.compute.text import ChatFormat, TrainingText
from p2ptrain.compute.token_store import (
    FORMAT,
    OnProgress,
    StoreFacts,
    StoreWriter,
    TokenStore,
    lock_store,
    no_progress,
    open_received,
    open_store,
    read_facts,
    sources_of,
    status_of,
    stores_dir,
)
from p2ptrain.compute.tokenizer import Tokenizer, Tokens
from p2ptrain.compute.tokenizing import Place, encode_texts
from p2ptrain.core import plugins
from p2ptrain.core.errors import ConfigError, UserError
from p2ptrain.core.text_files import FACTS, TOKENS, is_stdlib, search_files
from p2ptrain.core.texts import time_left

PREFERENCE = "preference"
_BLOCK_WINDOWS = 16
NO_TARGET = -100
"""In place of a target that does not count: ``cross_entropy`` ignores it."""
SYNC_S = 5.0
"""Seconds between the points from which a killed process goes on."""

_CHARS_PER_CALL, _TEXTS_PER_CALL = 1 << 20, 256
_BYTES_PER_TOKEN = 8  # more than tokenizers reach: what is written at least


class DataSpec(Data):
    """What a corpus is made of. A window has ``sequence_tokens`` targets, T, and so T + 1 tokens."""

    reader: dict[str, PluginValue] = {}  # noqa: RUF012 - a field
    """Settings of the plugin that ``format`` names."""


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """What a model computes of some windows.

    Attributes:
        inputs: (B, T); of B pairs (2 B, T).
        targets: (B, T), the next token of each, or ``NO_TARGET``.
        positions: (B, T), of each input in its conversation; a lower one than before begins the next. None for running
            text and for pairs, where they count from 0 to T - 1.
    """

    inputs: Indices
    targets: Indices
    positions: Indices | None


@dataclass(frozen=True, slots=True)
class Corpus:
    """Tokenized text, divided into training and validation windows.

    Window ``w`` of running text is ``tokens[w T : w T + T + 1]``. The last target of a window is the first input of the
    next one, so every token but the first is a target exactly once. Windows of conversations share no token. A window
    of a pair is two sequences of T + 1 tokens, that with the chosen answer first.

    Attributes:
        tokens: shape (n,), uint8, uint16 or int32.
        digest: SHA-256 over the dtype's name, the vocabulary's size, the tokens (little-endian) and the marks, hex.
        training, validation: disjoint window numbers. The held-out windows are blocks of 16 consecutive windows, so
            that their neighbouring text is not trained on. The blocks are pseudo-random over the whole corpus, and the
            same for every seed. ``validation`` starts with one window of each block, so that a few batches represent
            the corpus.
        store: where tokens and marks are.
        note: what was left out or cut; empty if nothing was.
        marks: of conversations and pairs: the mark of each token, shape (n,).
        sequences: in a window: 2 of pairs.
    """

    tokens: Tokens
    vocab_size: int
    sequence_tokens: int
    digest: str
    training: TrainingWindows
    validation: Indices
    store: TokenStore
    note: str
    marks: Marks | None
    sequences: int

    def window_tokens(self, windows: Indices) -> Indices:
        """The tokens of ``windows`` (B,), shape (B, T + 1), int64; of pairs (2 B, T + 1)."""
        windows_tokens: Indices = self.tokens[self._places(windows)].astype(np.int64)
        return windows_tokens

    def target_count(self, windows: Indices) -> int:
        """Number of targets in ``windows`` (B,); of pairs B, because a loss is a mean over pairs."""
        if self.sequences == 2:
            return len(windows)
        if self.marks is None:
            return len(windows) * self.sequence_tokens
        return int(np.count_nonzero(self.marks[self._places(windows)[:, 1:]] & TARGET))

    def batch(self, windows: Indices) -> TokenBatch:
        tokens = self.window_tokens(windows)
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        if self.marks is None:
            return TokenBatch(inputs, targets, None)
        marks, at = self.marks[self._places(windows)], np.arange(self.sequence_tokens)
        firsts = np.maximum.accumulate(np.where(marks[:, :-1] & FIRST, at, 0), axis=1)
        positions = at - firsts if self.sequences == 1 else None
        return TokenBatch(inputs, np.where(marks[:, 1:] & TARGET, targets, NO_TARGET), positions)

    def _places(self, windows: Indices) -> Indices:
        width = self.sequence_tokens + 1
        sequences = (self.sequences * windows[:, None] + np.arange(self.sequences)).reshape(-1)
        places: Indices = sequences[:, None] * (width if self.marks is not None else width - 1) + np.arange(width)
        return places


class TrainingWindows:
    """The numbers of the windows that are not held out, ascending, without an array of all of them.

    Args:
        held: the first window of each held-out block, ascending. block: windows in a block.
    """

    def __init__(self, windows: int, held: Indices, block: int) -> None:
        self._count = windows - len(held) * block
        self._before, self._block = held - block * np.arange(len(held)), block  # training windows before each block

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, at: Indices | slice) -> Indices:
        """The windows at positions (B,), or at a slice of them."""
        positions = np.arange(*at.indices(self._count)) if isinstance(at, slice) else at
        assert not positions.size or 0 <= positions.min() <= positions.max() < self._count
        windows: Indices = positions + self._block * np.searchsorted(self._before, positions, side="right")
        return windows


def load_corpus(
    spec: DataSpec,
    tokenizer: Tokenizer,
    model_tokens: int | None = None,
    *,
    on_progress: OnProgress = no_progress,
) -> Corpus:
    """Find the text that ``spec`` names and its tokens, for a model with the ids below ``model_tokens``; None: with
    all of the tokenizer's. Tokens that were not stored yet are made, which takes long for a long text.

    Raises ``ConfigError``: ``path`` names no text, or too little; the rows have no such field; it has a token that the
    model lacks; the chat template cannot be used; ``UserError``: a file cannot be read or is not text, or too many rows
    cannot be used; ``ResourceError``: what must be held whole does not fit into memory; ``StorageError``: the tokens
    cannot be stored."""
    if all((Path(spec.path) / name).is_file() for name in (FACTS, TOKENS)):  # from another worker
        store, not_read = open_received(Path(spec.path), spec.format, tokenizer.vocab_size, on_progress), ""
    else:
        files, not_read = search_files(spec.path, spec.format)
        store = _find_or_make_store(spec, tokenizer, files, on_progress)
    facts, width, sequences = store.facts, spec.sequence_tokens + 1, 2 if spec.format == PREFERENCE else 1
    if facts.highest >= (known := model_tokens or tokenizer.vocab_size):  # ids that no text has may be beyond
        name = tokenizer.backend.id_to_token(facts.highest)
        text = f"the text has the token {name!r}, id {facts.highest}, but the model has only the ids 0 to {known - 1}"
        raise ConfigError(text, remedy="put the tokenizer there that the model was trained with")
    left_out = list(filter(None, (not_read, RowCounts(**facts.rows).note(spec.bad_rows), facts.note)))
    windows = facts.numel // width // sequences if facts.has_marks else max(0, facts.numel - 1) // spec.sequence_tokens
    training, validation = split_windows(spec, windows, left_out)
    if len(validation) > 1.5 * (fraction := spec.validation_fraction) * windows:  # as of a tiny corpus
        text = f"validation holds out {len(validation)} of {windows} sequences, more than data.validation_fraction = "
        left_out.append(f"{text}{fraction:g}: with 0 all are trained on")
    note = "; ".join(left_out)
    sizes = facts.vocab_size, spec.sequence_tokens
    return Corpus(store.tokens, *sizes, facts.digest, training, validation, store, note, store.marks, sequences)


# --------------------------------------------------------------------------------------------------- making the tokens


def store_key(spec: DataSpec, tokenizer: Tokenizer, files: Sequence[Path]) -> str:
    """The name of the store: a hash of all that decides its tokens. The files count by path, size and time."""
    parts: list[Any] = [FORMAT, spec.format, spec.text_key, spec.limit_bytes, is_stdlib(spec.path)]
    parts += [tokenizer.backend.to_str(), tokenizer.begin, tokenizer.end]
    if spec.format in _WRITERS:
        date = spec.date or f"{datetime.now(UTC):%Y-%m-%d}"
        parts += [spec.sequence_tokens, *ChatFormat(tokenizer, date).identity]
    else:
        parts.append(spec.document_end)
    if (reader := plugins.installed().get(f"readers:{spec.format}")) is not None:
        parts += [reader[1], spec.reader]
    return hashlib.sha256(json.dumps([*parts, sources_of(files)]).encode()).hexdigest()[:32]


def _find_or_make_store(
    spec: DataSpec, tokenizer: Tokenizer, files: Sequence[Path], on_progress: OnProgress
) -> TokenStore:
    directory = stores_dir() / store_key(spec, tokenizer, files)
    if (store := open_store(directory, on_progress)) is not None:
        return store

    def show_other() -> None:
        facts = read_facts(directory)
        share = facts.state.get("share", 0.0) if facts is not None else 0.0
        on_progress(f"another process makes the tokens of {spec.path}", share)

    with lock_store(directory, show_other):
        store = open_store(directory, on_progress)
        return store or _make_store(directory, spec, tokenizer, files, on_progress)


def _make_store(
    directory: Path, spec: DataSpec, tokenizer: Tokenizer, files: Sequence[Path], on_progress: OnProgress
) -> TokenStore:
    path = spec.path if is_stdlib(spec.path) else os.path.abspath(os.path.expanduser(spec.path))
    sources, dtype, write = sources_of(files), tokenizer.dtype, _WRITERS.get(spec.format, _write_texts)
    has_marks = write is not _write_texts
    writer = StoreWriter(directory, StoreFacts(path, spec.format, sources, dtype.name, tokenizer.vocab_size, has_marks))
    rows = Rows(spec.path, spec.format, spec.text_key, spec.reader)
    total_bytes = sum(status_of(file).st_size for file in files)
    least = min(total_bytes, spec.limit_bytes or total_bytes) // (1 if tokenizer.is_bytes else _BYTES_PER_TOKEN)
    writer.check_room(least * dtype.itemsize - writer.facts.size_bytes)

    def check_unchanged() -> None:
        if sources_of(files) != writer.facts.sources:
            text = f"files of data.path = {spec.path!r} changed while they were read"
            raise UserError(text, remedy="start again when nothing writes to them, or name a copy")

    began = synced = time.monotonic()
    first: float | None = None
    for make_state in write(writer, spec, tokenizer, rows, files):
        now, share = time.monotonic(), rows.read_bytes / total_bytes
        share = max(share, rows.text_bytes / spec.limit_bytes if spec.limit_bytes else 0)
        first = share if first is None else first  # what an earlier process read takes no time
        left = time_left((share - first) / max(1 - first, 1e-9), now - began)
        on_progress(f"tokenizing {spec.path}{left}", share)
        if now >= synced + SYNC_S and make_state is not None:
            check_unchanged()
            writer.check_room(writer.facts.size_bytes * (1 / max(share, 1e-9) - 1))
            writer.sync(make_state() | {"share": share})
            synced = now
    check_unchanged()
    writer.facts.rows, writer.facts.text_bytes = asdict(rows.counts), rows.text_bytes
    return writer.finish(on_progress)


MakeState = Callable[[], dict[str, Any]]
"""Makes what ``StoreWriter.sync`` takes, of what was written so far."""


def _write_texts(
    writer: StoreWriter, spec: DataSpec, tokenizer: Tokenizer, rows: Rows, files: Sequence[Path]
) -> Iterator[MakeState | None]:
    documents = spec.document_end == "auto"
    begin, end = (np.array(ids if documents else [], tokenizer.dtype) for ids in (tokenizer.begin, tokenizer.end))
    texts = rows.texts(files, line_end="" if len(end) else "\n", limit_bytes=spec.limit_bytes)
    for part in encode_texts(texts, tokenizer, Place(**writer.facts.state.get("place", {}))):
        if part.begins and len(begin):
            writer.append(begin)
        writer.append(part.ids)
        if part.ends:
            writer.append(end)
            writer.facts.documents += 1
        place = part.place
        yield None if place is None else partial(dict, place=place._asdict())


def _write_conversations(
    writer: StoreWriter, spec: DataSpec, tokenizer: Tokenizer, rows: Rows, files: Sequence[Path]
) -> Iterator[MakeState]:
    state, batch, form = writer.facts.state, list[TrainingText](), ChatFormat(tokenizer, spec.date)
    packer = WindowPacker(spec.sequence_tokens + 1, tokenizer.dtype)

    def pack() -> None:
        for ids, marks in encode_conversations(batch, form):
            if (window := packer.add(ids, marks)) is not None:
                writer.append(window.tokens, window.marks)
        batch.clear()

    check_template(form)
    if state:
        packer.restore(state["packer"])
    for texts in rows.made_of_rows(files, lambda values: form.training_texts(values[0]), state):
        size_bytes = sum(len(text.encode()) for text, _ in texts)
        if spec.limit_bytes and rows.text_bytes + size_bytes > spec.limit_bytes:
            break
        rows.text_bytes += size_bytes
        batch += texts or [TrainingText("", [])]
        if len(batch) >= _TEXTS_PER_CALL or sum(len(text) for text, _ in batch) >= _CHARS_PER_CALL:
            pack()
            yield lambda: rows.state() | {"packer": packer.state()}
    pack()
    for window in packer.open:
        writer.append(window.tokens, window.marks)
    writer.facts.documents = packer.count - packer.unanswered
    writer.facts.note = packer.note(rows.counts.count - rows.counts.bad)


def _write_pairs(
    writer: StoreWriter, spec: DataSpec, tokenizer: Tokenizer, rows: Rows, files: Sequence[Path]
) -> Iterator[MakeState]:
    state, form, width = writer.facts.state, ChatFormat(tokenizer, spec.date), spec.sequence_tokens + 1
    long = {"cut": state.get("cut", 0)}
    for pair in rows.made_of_rows(files, lambda values: encode_pair(values, form, width), state):
        writer.facts.documents += 1
        long["cut"] += any(len(ids) > width for ids, _ in pair)
        for ids, marks in pair:
            missing = max(0, width - len(ids))
            writer.append(np.pad(ids[:width], (0, missing)), np.pad(marks[:width], (0, missing)))
        yield lambda: rows.state() | long
    if long["cut"]:
        writer.facts.note = f"{long['cut']:,} pairs have more than data.sequence_tokens and are cut"


_WRITERS = {"chat": _write_conversations, PREFERENCE: _write_pairs}
"""Formats whose tokens have marks."""


# -------------------------------------------------------------------------------------------------------------- windows


def split_windows(spec: DataSpec, windows: int, left_out: Sequence[str] = ()) -> tuple[TrainingWindows, Indices]:
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
    firsts = np.sort(permuted(chosen, blocks, key=0)) * block
    return TrainingWindows(windows, firsts, block), (firsts[:, None] + np.arange(block)).T.reshape(-1)
