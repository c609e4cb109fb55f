"""How well a model predicts a text: loss and perplexity of a token, bits of a byte, of each document and of all.

Windows are those of training: documents joined, cut wherever a window ends, with a shorter last one. With a stride each
document is alone, and a window begins ``stride`` tokens after the one before; of it only tokens count that no earlier
window had, so each has the tokens before it as context (transformers' guide "Perplexity of fixed-length models").
A conversation has a window of its own, as it counts in training, and of it only the answers count.

The first token of a document, or of all if they are joined, has nothing before it and does not count. Texts are read
and tokenized in pieces, so memory does not grow with them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812 - the field's name

from p2ptrain.compute.data import NO_TARGET, DataSpec
from p2ptrain.compute.device import ComputeDevice, check_memory, pick_device, translate_out_of_memory
from p2ptrain.compute.packing import TARGET, WindowPacker, check_template, encode_conversations
from p2ptrain.compute.rows import Rows, TextPart
from p2ptrain.compute.sampling import Indices
from p2ptrain.compute.served_part import load_module
from p2ptrain.compute.text import ChatFormat
from p2ptrain.compute.tokenizer import Tokenizer, Tokens
from p2ptrain.compute.tokenizing import Place, encode_texts
from p2ptrain.core.errors import ConfigError
from p2ptrain.core.text_files import format_of, search_files

_PASS_TOKENS = 1 << 12
_PASS_LOGITS = 1 << 26
_MOST_NATS = 700.0  # exp of more is no number
_NOBODY = -1


@dataclass(slots=True)
class TextScore:
    """The losses of a text's tokens. ``nats``: their sum over ``tokens`` targets, exact, so that the order of windows
    does not matter. ``text_bytes``: of its UTF-8; 0: not known. ``name``: its file, and the number of its row."""

    name: str
    text_bytes: int = 0
    tokens: int = 0
    nats: Fraction | float = Fraction(0)

    def to_map(self) -> dict[str, Any]:
        """JSON. ``loss`` in nats a token; what is not known, or no finite number, is None."""
        nats = float(self.nats)
        loss = nats / self.tokens if self.tokens and math.isfinite(nats) else None
        perplexity = None if loss is None or loss > _MOST_NATS else math.exp(loss)
        bits = nats / math.log(2) / self.text_bytes if loss is not None and self.text_bytes else None
        figures = {"loss": loss, "perplexity": perplexity, "bits_a_byte": bits}
        return {"name": self.name, **figures, "tokens": self.tokens, "bytes": self.text_bytes}


class Window(NamedTuple):
    """Tokens (n,), and for each the number of the document for which it counts, or -1: it is context."""

    tokens: Tokens
    owners: Indices

    @property
    def first(self) -> int:
        """The first token that counts."""
        return int(np.argmax(self.owners != _NOBODY))


class Evaluation:
    """The windows of the text ``data.path``, and the scores that a model gives them. Blocking.

    Args:
        stride: None: the windows of training.

    Attributes:
        documents: those read so far. total: of all.
        total_bytes: of the files. done_bytes: about how much of them is scored. began: when the first window was made.
        notes: what was left out, when all windows were made.

    Raises:
        UserError, ConfigError: there is no such text.
    """

    def __init__(self, tokenizer: Tokenizer, data: DataSpec, *, stride: int | None) -> None:
        self.documents: list[TextScore] = []
        self.total = TextScore("total")
        self._files, note = search_files(data.path, data.format)
        self.notes = [note] if note else list[str]()
        self.total_bytes = sum(file.stat().st_size for file in self._files)
        self._tokenizer, self._data, self._stride, self.width = tokenizer, data, stride, data.sequence_tokens
        self._rows = Rows(data.path, data.format, data.text_key, data.reader)
        self._read_tokens = self._done_tokens = 0
        self.began = time.monotonic()

    @property
    def done_bytes(self) -> int:
        return self._rows.read_bytes * self._done_tokens // max(1, self._read_tokens)

    def windows(self, vocab_size: int) -> Iterator[Window]:
        """All windows, for a model with the ids below ``vocab_size``.

        Raises:
            ConfigError: the text has a token that the model lacks, or none that counts.
            UserError: a file cannot be read, or too many rows cannot be used.
        """
        self.began, found = time.monotonic(), 0
        for window in self._conversations() if self._data.format == "chat" else self._running_text():
            if (highest := int(window.tokens.max(initial=0))) >= vocab_size:
                name = self._tokenizer.backend.id_to_token(highest)
                problem = f"the text has the token {name!r}, id {highest}, and the model only {vocab_size} ids"
                raise ConfigError(problem, remedy="put the tokenizer there that the model was trained with")
            if (window.owners != _NOBODY).any():
                found += 1
                yield window
        self.notes += [note] if (note := self._rows.counts.note(self._data.bad_rows)) else []
        if not found:
            raise ConfigError("the text has no two tokens, or no answer", remedy="name files with text: --data")

    def add(self, window: Window, scores: npt.NDArray[np.float32]) -> None:
        """Take the natural log-probabilities of a window's tokens, from the first that counts on, (n - first,)."""
        owners = window.owners[window.first :]
        counted = owners != _NOBODY
        numbers, places = np.unique(owners[counted], return_inverse=True)
        sums, counts = np.bincount(places, -scores[counted]), np.bincount(places)
        for number, nats, count in zip(numbers.tolist(), sums.tolist(), counts.tolist(), strict=True):
            for score in (self.documents[number], self.total):
                score.nats += Fraction(nats) if math.isfinite(nats) else math.nan
                score.tokens += count
        self._done_tokens += len(owners)

    # --------------------------------------------------------------------------------------------------------- windows

    def _running_text(self) -> Iterator[Window]:
        size, stride = (self.width + 1, self.width) if self._stride is None else (self.width, self._stride)
        tokens, owners, first = np.zeros(0, self._tokenizer.dtype), np.zeros(0, np.int64), 1
        for ids, number, ends in self._texts():
            tokens, owners = np.concatenate([tokens, ids]), np.concatenate([owners, np.full(len(ids), number)])
            while len(tokens) > size or (ends and len(tokens)):
                counted = owners[:size].copy()
                counted[:first] = _NOBODY
                yield Window(tokens[:size], counted)
                is_last = len(tokens) <= size
                tokens, owners = (array[len(tokens) if is_last else stride :] for array in (tokens, owners))
                first = 1 if is_last else max(1, size - stride)

    def _texts(self) -> Iterator[tuple[Tokens, int, bool]]:
        """Tokens, as in training; the number of their document; and whether they are the last ones of it, or of all if
        documents are joined."""
        is_document, dtype = self._data.document_end == "auto", self._tokenizer.dtype
        begin, end = (
            np.array(ids if is_document else [], dtype) for ids in (self._tokenizer.begin, self._tokenizer.end)
        )
        number = -1
        for part in encode_texts(self._read("" if len(end) else "\n"), self._tokenizer, Place()):
            number += part.begins
            ids = np.concatenate([begin if part.begins else begin[:0], part.ids, end if part.ends else end[:0]])
            self._read_tokens += len(ids)
            yield ids, number, part.ends and self._stride is not None
        yield np.zeros(0, dtype), number, True

    def _read(self, line_end: str) -> Iterator[TextPart]:
        """The texts of the files, each of which becomes a document."""
        for file in self._files:
            is_row, number, begins = format_of(file, self._data.format) != "text", 0, True
            for part in self._rows.texts([file], line_end=line_end):
                if begins:
                    number += 1
                    self.documents.append(TextScore(f"{file}:{number}" if is_row else str(file)))
                for score in (self.documents[-1], self.total):
                    score.text_bytes += len(part.text.encode())
                begins = part.ends
                yield part

    def _conversations(self) -> Iterator[Window]:
        form, packer = ChatFormat(self._tokenizer, self._data.date), WindowPacker(self.width + 1, self._tokenizer.dtype)
        check_template(form)
        for file in self._files:
            before = self._rows.counts.count
            for texts in self._rows.made_of_rows([file], lambda values: form.training_texts(values[0])):
                self.documents.append(TextScore(f"{file}:{self._rows.counts.count - before}"))
                for ids, marks in encode_conversations(texts, form):
                    packer.add(ids, marks)
                    for item in packer.open:
                        owners = np.where(item.marks & TARGET, len(self.documents) - 1, _NOBODY)
                        window = Window(item.tokens[: item.used], owners[: item.used])
                        self._read_tokens += item.used - window.first
                        yield window
                    packer.open.clear()
        self.notes += [note] if (note := packer.note(self._rows.counts.count - self._rows.counts.bad)) else []


def score_here(evaluation: Evaluation, directory: Path, device: str, dtype: str, weights: str = "") -> str:
    """Load a whole model in this process, and score all windows. Returns the dtype in which it computes.

    Raises as ``load_module`` and ``Evaluation.windows``; ``ResourceError``: a window's logits do not fit into memory.
    """
    place, width = pick_device(device), evaluation.width
    model, computed = load_module(directory, place, dtype, weights)
    vocab_size = int(model.config.get_text_config().vocab_size)
    check_memory(12 * width * vocab_size, place, f"the logits of {width} tokens", "choose a smaller --window")
    most, batch, longest = min(_PASS_TOKENS, _PASS_LOGITS // vocab_size), list[Window](), 0
    for window in evaluation.windows(vocab_size):
        longest = max(longest, len(window.tokens))
        if batch and (len(batch) + 1) * longest > most:
            _score(batch, model, place, evaluation)
            batch, longest = [], len(window.tokens)
        batch.append(window)
    _score(batch, model, place, evaluation)
    return computed


def _score(batch: list[Window], model: Any, place: ComputeDevice, evaluation: Evaluation) -> None:
    longest = max(len(window.tokens) for window in batch) - 1
    inputs = np.zeros((len(batch), longest), np.int64)  # what comes behind changes nothing before it
    targets = np.full((len(batch), longest), NO_TARGET, np.int64)
    for row, window in enumerate(batch):
        inputs[row, : len(window.tokens) - 1] = window.tokens[:-1]
        targets[row, window.first - 1 : len(window.tokens) - 1] = window.tokens[window.first :]
    ids, wanted = (torch.from_numpy(array).to(place.torch_device) for array in (inputs, targets))
    with torch.inference_mode(), translate_out_of_memory("a window", "choose a smaller --window"):
        logits = model(input_ids=ids, use_cache=False).logits
        losses = F.cross_entropy(logits.flatten(0, 1).float(), wanted.flatten(), reduction="none")
    for window, row in zip(batch, losses.neg().view(wanted.shape).cpu().numpy(), strict=True):
        evaluation.add(window, row[window.first - 1 : len(window.tokens) - 1])
