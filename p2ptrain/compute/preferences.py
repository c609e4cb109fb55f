"""Direct preference optimization (DPO, arXiv 2305.18290) with LoRA: from pairs of answers, of which one is preferred.

A row has a prompt, a chosen and a rejected answer: texts, or lists of messages. With log p(y) the sum of the log
probabilities of an answer's tokens, of the model and of the reference, the loss of a pair is::

    -log sigmoid(beta ((log p(chosen) - log p_ref(chosen)) - (log p(rejected) - log p_ref(rejected))))

The reference is the model without its adapters, so it takes no memory of its own, and no worker can have another one.
The loss of a step is the mean over its pairs. A pair is one sample: a window of two sequences, each the prompt with one
of the answers, cut to ``data.sequence_tokens``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch.nn.functional as F  # noqa: N812 - the field's name
from torch import Tensor

from p2ptrain.compute.data import NO_TARGET, Corpus, DataSpec, TokenBatch, split_windows
from p2ptrain.compute.packing import FIRST, TARGET, Marks
from p2ptrain.compute.rows import ROLES, BadRow, Rows, is_unicode
from p2ptrain.compute.sampling import Indices
from p2ptrain.compute.text import ASSISTANT, ChatFormat
from p2ptrain.compute.tokenizer import Tokenizer, Tokens
from p2ptrain.core.errors import ConfigError, UserError
from p2ptrain.core.text_files import search_files

PREFERENCE = "preference"
KEYS = ("prompt", "chosen", "rejected")


class PairCorpus(Corpus):
    """A corpus whose windows are pairs: two sequences of T + 1 tokens, that with the chosen answer first."""

    def batch(self, windows: Indices) -> TokenBatch:
        """Of B pairs: inputs and targets (2 B, T). Sequences of one text need no positions."""
        tokens, places = self.window_tokens(windows), self._places(windows)[:, 1:]
        marks = cast(Marks, self.marks)[places]
        return TokenBatch(tokens[:, :-1], np.where(marks & TARGET, tokens[:, 1:], NO_TARGET), None)

    def target_count(self, windows: Indices) -> int:
        """1 for each pair: a loss is a mean over pairs."""
        return len(windows)

    def _places(self, windows: Indices) -> Indices:
        sequences = (2 * windows[:, None] + np.arange(2)).reshape(-1)
        width = self.sequence_tokens + 1
        places: Indices = sequences[:, None] * width + np.arange(width)
        return places


def load_pairs(spec: DataSpec, tokenizer: Tokenizer, model_tokens: int) -> PairCorpus:
    """The pairs of the files that ``spec`` names, for a model with the ids below ``model_tokens``. Raises as
    ``load_corpus``."""
    files, not_read = search_files(spec.path, spec.format)
    rows = [Rows(spec.path, spec.format, key) for key in KEYS]
    form, width, cut = ChatFormat(tokenizer, spec.date), spec.sequence_tokens + 1, 0
    tokens: list[Tokens] = []
    marks: list[Marks] = []
    for place, values in _pairs(files, rows):
        try:
            pair = [_encode(values[0], answer, form) for answer in values[1:]]
        except ConfigError:  # a limit of this machine must not decide which rows are learned
            raise
        except UserError as problem:
            rows[0].counts.leave_out(
                place, BadRow(f"is not usable: {problem.message}", problem.remedy or "leave it out")
            )
            continue
        if not all((made[:width] & TARGET).any() for _, made in pair):
            rows[0].counts.leave_out(place, BadRow("has no room for both answers", "set a larger data.sequence_tokens"))
            continue
        cut += any(len(ids) > width for ids, _ in pair)
        for ids, made in pair:
            missing = max(0, width - len(ids))
            tokens.append(np.pad(ids[:width], (0, missing)))
            marks.append(np.pad(made[:width], (0, missing)))
    all_tokens = np.concatenate([np.zeros(0, tokenizer.dtype), *tokens])
    all_marks = np.concatenate([np.zeros(0, np.uint8), *marks])
    if (highest := int(all_tokens.max(initial=0))) >= model_tokens:
        text = f"the text has the token id {highest}, but the model has only the ids 0 to {model_tokens - 1}"
        raise ConfigError(text, remedy="put the tokenizer there that the model was trained with")
    long = f"{cut:,} pairs have more than data.sequence_tokens and are cut" if cut else ""
    left_out = list(filter(None, (not_read, rows[0].counts.note(spec.bad_rows), long)))
    training, validation = split_windows(spec, len(tokens) // 2, left_out)
    hasher = hashlib.sha256(f"pairs {all_tokens.dtype.name} {tokenizer.vocab_size} ".encode())
    hasher.update(np.ascontiguousarray(all_tokens, all_tokens.dtype.newbyteorder("<")).data)
    hasher.update(all_marks.data)
    sizes = tokenizer.vocab_size, spec.sequence_tokens
    return PairCorpus(all_tokens, *sizes, hasher.hexdigest(), training, validation, all_marks, "; ".join(left_out))


def _pairs(files: Sequence[Path], rows: Sequence[Rows]) -> Iterator[tuple[str, list[Any]]]:
    """The rows with a prompt and two answers of one kind, each with its place; the first of ``rows`` counts others."""
    for file in files:
        found = [dict(of_key.values(file)) for of_key in rows]
        for place in found[0]:
            values = [of_key.get(place) for of_key in found]
            if all(isinstance(value, str) and is_unicode(value) for value in values) or all(map(_is_chat, values)):
                yield place, values
            else:
                remedy = "give each row prompt, chosen and rejected: three texts, or three lists of {role, content}"
                rows[0].counts.leave_out(place, BadRow("is no pair of answers", remedy))


def _is_chat(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(message, dict)
        and message.get("role") in ROLES
        and isinstance(message.get("content"), str)
        and is_unicode(message["content"])
        for message in value
    )


def _encode(prompt: Any, answer: Any, form: ChatFormat) -> tuple[Tokens, Marks]:
    """The tokens of a prompt and one answer, and their marks. Raises ``UserError``: the chat template refuses it."""
    tokenizer = form.tokenizer
    if isinstance(prompt, str):  # each is tokenized alone, as TRL does: then both answers follow the same prompt
        asked, answered = (encoding.ids for encoding in tokenizer.encodings([prompt, answer], add_special_tokens=False))
        asked, answered = [*tokenizer.begin, *asked], [*answered, *tokenizer.end]
    else:
        turns = [message | {"weight": 0} for message in prompt]
        texts = form.training_texts([*turns, *answer])
        if len(texts) != 1 or answer[-1]["role"] != ASSISTANT:
            raise UserError("its answers are not one answer of the assistant", remedy="end it with one")
        (text, (start, *_)) = texts[0]
        asked, answered = (encoding.ids for encoding in form.encode([text[:start], text[start:]]))
    marks = np.zeros(len(asked) + len(answered), np.uint8)
    marks[len(asked) :] = TARGET
    marks[:1] = FIRST  # and no target: it has no token before it
    return np.array([*asked, *answered], tokenizer.dtype), marks


def sequence_log_probs(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum of the log probabilities of each sequence's targets, shape (N,), of logits (N, T, vocab), targets (N, T)."""
    each = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
    return -each.view(targets.shape).sum(1)


def preference_loss(log_probs: Tensor, reference: Tensor, counts: Tensor, beta: float) -> Tensor:
    """Sum of the losses of B pairs. ``log_probs``, ``reference``: (2 B,). ``counts``: (B,), whether a pair counts."""
    chosen, rejected = (log_probs - reference).view(-1, 2).unbind(1)
    return -(F.logsigmoid(beta * (chosen - rejected)) * counts).sum()


def counted_pairs(targets: Tensor) -> Tensor:
    """Whether each of B pairs counts, shape (B,), of targets (2 B, T)."""
    return (targets != NO_TARGET).any(1)[::2]
