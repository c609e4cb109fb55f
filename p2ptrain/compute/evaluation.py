"""How well a model predicts a text: loss and perplexity of a token, bits of a byte, of each document and of all.

Windows are those of training: documents joined, cut wherever a window ends, with a shorter last one. With a stride each
document is alone, and a window begins ``stride`` tokens after the one before; of it only tokens count that no earlier
window had, so each has the tokens before it as context (transformers' guide "Perplexity of fixed-length models").

The first token of a document, or of all if they are joined, has nothing before it and does not count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the field's name
from torch import Tensor

from p2ptrain.compute.data import NO_TARGET, Corpus, DataSpec, load_corpus
from p2ptrain.compute.device import check_memory, pick_device, translate_out_of_memory
from p2ptrain.compute.rows import Rows
from p2ptrain.compute.sampling import Indices
from p2ptrain.compute.served_part import load_module
from p2ptrain.compute.split_check import check_packs
from p2ptrain.compute.tokenizer import Tokenizer, Tokens
from p2ptrain.core.errors import ConfigError
from p2ptrain.core.text_files import format_of, search_files

_PASS_TOKENS = 1 << 12
_PASS_LOGITS = 1 << 26
_MOST_NATS = 700.0  # exp of more is no number


@dataclass(slots=True)
class TextScore:
    """The losses of a text's tokens. ``nats``: their sum over ``tokens`` targets. ``text_bytes``: of its UTF-8; 0: not
    known. ``name``: its file, and the number of its row."""

    name: str
    text_bytes: int = 0
    tokens: int = 0
    nats: float = 0.0

    def to_map(self) -> dict[str, Any]:
        """JSON. ``loss`` in nats a token; what is not known, or no finite number, is None."""
        loss = self.nats / self.tokens if self.tokens and math.isfinite(self.nats) else None
        perplexity = None if loss is None or loss > _MOST_NATS else math.exp(loss)
        bits = self.nats / math.log(2) / self.text_bytes if loss is not None and self.text_bytes else None
        figures = {"loss": loss, "perplexity": perplexity, "bits_a_byte": bits}
        return {"name": self.name, **figures, "tokens": self.tokens, "bytes": self.text_bytes}


class Window(NamedTuple):
    """Tokens (n,) and the number of each one's document. Those before ``first`` are context."""

    tokens: Tokens
    owners: Indices
    first: int


class Evaluation:
    """Scores a model on the text of ``data.path``. Blocking.

    Args:
        width: targets of a window. stride: None: the windows of training.

    Attributes:
        documents: those read so far. total: of all.
        total_bytes: of the files. done_bytes: of the text read so far.
        notes: what was left out, at the end.

    Raises:
        UserError, ConfigError: there is no such text, or as ``load_module``.
        ResourceError: the model, or a window's logits, do not fit into memory.
    """

    def __init__(
        self, directory: Path, tokenizer: Tokenizer, data: DataSpec, *, stride: int | None, device: str, dtype: str
    ) -> None:
        self.documents: list[TextScore] = []
        self.total = TextScore("total")
        self.notes = list[str]()
        self._files, note = search_files(data.path, data.format)
        self.notes += [note] if note else []
        self.total_bytes = sum(file.stat().st_size for file in self._files)
        self._tokenizer, self._data, self._width, self._stride = tokenizer, data, data.sequence_tokens, stride
        self._packed = 0.0  # share of the conversations' windows that are scored
        self._device = pick_device(device)
        self._model, self.dtype = load_module(directory, self._device, dtype)
        config = self._model.config.get_text_config()
        self._vocab = int(config.vocab_size)
        self._check_context(config)
        logits = self._width * self._vocab
        check_memory(12 * logits, self._device, f"the logits of {self._width} tokens", "choose a smaller --window")
        self._at_once = max(1, min(_PASS_TOKENS // self._width, _PASS_LOGITS // logits))

    def _check_context(self, config: Any) -> None:
        context = getattr(config, "max_position_embeddings", None)
        if context is not None and self._width > context:
            text = f"a window of {self._width} tokens is more than the model's context of {context}"
            raise ConfigError(text, remedy=f"give --window {context} at most")

    @property
    def done_bytes(self) -> int:
        return self.total.text_bytes or int(self._packed * self.total_bytes)

    def run(self) -> None:
        """Read the text and score it. Raises as the class, and ``UserError``: a file cannot be read."""
        if self._data.format == "chat":
            self._score_conversations()
            return
        texts = self._texts()
        windows = self._joined(texts) if self._stride is None else self._strided(texts, self._stride)
        self._score(window for window in windows if len(window.tokens) > 1)
        if not self.total.tokens:
            raise ConfigError("the text has no two tokens", remedy="name files with text: --data")

    # --------------------------------------------------------------------------------------------------------- windows

    def _texts(self) -> Iterator[tuple[Tokens, int]]:
        """The tokens of each document, as in training, and its number."""
        data = self._data
        is_document = data.document_end == "auto"
        rows, parts = Rows(data.path, data.format, data.text_key or "text"), list[str]()
        begin, end = (self._tokenizer.begin, self._tokenizer.end) if is_document else ([], [])
        line_end = "" if is_document and self._tokenizer.end else "\n"
        for file in self._files:
            is_row, number = format_of(file, data.format) != "text", 0
            for part, ends in rows.texts([file], line_end=line_end):
                parts.append(part)
                if not ends:
                    continue
                text, number = "".join(parts), number + 1
                parts.clear()
                dtype = self._tokenizer.dtype
                ids = [np.array(begin, dtype), self._tokenizer.encode([text]), np.array(end, dtype)]
                tokens: Tokens = np.concatenate(ids)
                if (highest := int(tokens.max(initial=0))) >= self._vocab:
                    name = self._tokenizer.backend.id_to_token(highest)
                    problem = f"the text has the token {name!r}, id {highest}, and the model only {self._vocab} ids"
                    raise ConfigError(problem, remedy="put the tokenizer there that the model was trained with")
                self.documents.append(TextScore(f"{file}:{number}" if is_row else str(file), len(text.encode())))
                self.total.text_bytes += self.documents[-1].text_bytes
                yield tokens, len(self.documents) - 1
        self.notes += [note] if (note := rows.counts.note(data.bad_rows)) else []

    def _joined(self, texts: Iterator[tuple[Tokens, int]]) -> Iterator[Window]:
        width, tokens, owners = self._width, np.zeros(0, self._tokenizer.dtype), np.zeros(0, np.int64)
        for ids, number in texts:
            tokens, owners = np.concatenate([tokens, ids]), np.concatenate([owners, np.full(len(ids), number)])
            full = max(0, len(tokens) - 1) // width * width
            for start in range(0, full, width):
                yield Window(tokens[start : start + width + 1], owners[start : start + width + 1], 1)
            tokens, owners = tokens[full:], owners[full:]
        if len(tokens) > 1:
            yield Window(tokens, owners, 1)

    def _strided(self, texts: Iterator[tuple[Tokens, int]], stride: int) -> Iterator[Window]:
        for ids, number in texts:
            owners, done = np.full(len(ids), number), 0
            for start in range(0, len(ids), stride):
                stop = min(start + self._width, len(ids))
                yield Window(ids[start:stop], owners[start:stop], max(1, done - start))
                done = stop
                if stop == len(ids):
                    break

    # --------------------------------------------------------------------------------------------------------- scoring

    def _score(self, windows: Iterator[Window]) -> None:
        while batch := list(islice(windows, self._at_once)):
            longest = max(len(window.tokens) for window in batch) - 1
            inputs = np.zeros((len(batch), longest), np.int64)  # what comes behind changes nothing before it
            targets = np.full((len(batch), longest), NO_TARGET, np.int64)
            for row, (tokens, _, first) in enumerate(batch):
                inputs[row, : len(tokens) - 1] = tokens[:-1]
                targets[row, first - 1 : len(tokens) - 1] = tokens[first:]
            losses = self._losses(inputs, targets)
            for row, (tokens, owners, first) in enumerate(batch):
                self._add(owners[first:], losses[row, first - 1 : len(tokens) - 1])

    def _add(self, owners: Indices, losses: Any) -> None:
        numbers, places = np.unique(owners, return_inverse=True)
        sums, counts = np.bincount(places, losses), np.bincount(places)
        for number, nats, count in zip(numbers.tolist(), sums.tolist(), counts.tolist(), strict=True):
            for score in (self.documents[number], self.total):
                score.nats, score.tokens = score.nats + nats, score.tokens + count

    def _losses(self, inputs: Indices, targets: Indices, positions: Indices | None = None) -> Any:
        """Losses in nats, (B, T), float64; 0 where there is no target."""
        place: Callable[[Indices], Tensor] = lambda array: torch.from_numpy(array).to(self._device.torch_device)  # noqa: E731
        more = {} if positions is None else {"position_ids": place(positions)}
        with torch.inference_mode(), translate_out_of_memory("a window", "choose a smaller --window"):
            logits = self._model(input_ids=place(inputs), use_cache=False, **more).logits
            found = F.cross_entropy(logits.flatten(0, 1).float(), place(targets).flatten(), reduction="none")
        return found.view(targets.shape).double().cpu().numpy()

    def _score_conversations(self) -> None:
        """All windows of the conversations. They are many to a window, and are not counted one by one."""
        check_packs(self._model.config, split=False)
        corpus: Corpus = load_corpus(replace(self._data, validation_fraction=0.0), self._tokenizer, self._vocab)
        self.notes = [corpus.note] if corpus.note else []
        windows = len(corpus.training)  # none is held out
        for start in range(0, windows, self._at_once):
            batch = corpus.batch(np.arange(start, min(windows, start + self._at_once)))
            losses = self._losses(batch.inputs, batch.targets, batch.positions)
            self.total.nats += float(losses.sum())
            self.total.tokens += int((batch.targets != NO_TARGET).sum())
            self._packed = min(1.0, (start + self._at_once) / windows)
