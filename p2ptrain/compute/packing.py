"""Conversations and pairs in windows: which tokens of each are targets, and which conversations share a window.

A conversation is tokenized whole, as it is when the model answers, and cut to a window. (If the chat template changes
earlier turns, each answer is in a text of its own, with the turns before it.) It goes into the first of the windows
being filled that has room, and the rest of a window is padding. Only the assistant's tokens are targets, and each
window has at least one: a conversation that is cut before its first answer is left out, and counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from p2ptrain.compute.rows import BadRow
from p2ptrain.compute.text import ASSISTANT, USER, ChatFormat, TrainingText
from p2ptrain.compute.tokenizer import Tokens
from p2ptrain.core.errors import ConfigError, UserError

Marks = npt.NDArray[np.uint8]
TARGET, FIRST = 1, 2
"""Bits of a token's mark: it is a target; it is the first of a conversation. Padding has neither."""

_FILLED_AT_ONCE = 16  # windows: more waste less padding, and move text further from its place in the files
_PROBE = [{"role": role, "content": content} for role, content in zip([USER, ASSISTANT] * 2, "abcd", strict=True)]


@dataclass(slots=True)
class FilledWindow:
    """Tokens and marks of a window, each of shape (width,), and how many of its tokens are used."""

    used: int
    tokens: Tokens
    marks: Marks


@dataclass(slots=True)
class WindowPacker:
    """Packs texts of conversations into windows of ``width`` tokens.

    Attributes:
        count, cut, unanswered: number of texts, of those that were cut, and of those that have no target.
        open: the newest windows, which are being filled.
    """

    width: int
    dtype: np.dtype[np.generic]
    count: int = 0
    cut: int = 0
    unanswered: int = 0
    open: list[FilledWindow] = field(default_factory=list)

    def add(self, ids: Tokens, marks: Marks) -> FilledWindow | None:
        """Place a text. Returns the window that is complete now, if one is."""
        self.count, self.cut = self.count + 1, self.cut + (len(ids) > self.width)
        ids, marks = ids[: self.width], marks[: self.width]
        if not (marks & TARGET).any():
            self.unanswered += 1
            return None
        window = next((window for window in self.open if window.used + len(ids) <= self.width), None)
        if window is None:
            window = FilledWindow(0, np.zeros(self.width, self.dtype), np.zeros(self.width, np.uint8))
            self.open.append(window)
        end = window.used + len(ids)
        window.tokens[window.used : end], window.marks[window.used : end] = ids, marks
        window.used = end
        return self.open.pop(0) if len(self.open) > _FILLED_AT_ONCE else None

    def note(self, usable: int) -> str:
        """What was cut or left out of ``usable`` conversations; empty if nothing was."""
        texts, note = "conversations", ""
        if self.count > usable:
            note = f"; the chat template changes earlier turns, so {usable:,} conversations make {self.count:,} texts"
            texts = "texts"
        if self.cut:
            note += f"; {self.cut:,} of {self.count:,} {texts} have more than data.sequence_tokens and are cut"
        if self.unanswered:
            note += f"; {self.unanswered:,} have no answer in what is left, or an empty one, and are left out"
        return note.removeprefix("; ")

    def state(self) -> dict[str, Any]:
        """For ``restore``, as JSON."""
        windows = [(window.used, window.tokens.tolist(), window.marks.tolist()) for window in self.open]
        return {"count": self.count, "cut": self.cut, "unanswered": self.unanswered, "open": windows}

    def restore(self, state: dict[str, Any]) -> None:
        self.count, self.cut, self.unanswered = state["count"], state["cut"], state["unanswered"]
        self.open = [
            FilledWindow(used, np.array(tokens, self.dtype), np.array(marks, np.uint8))
            for used, tokens, marks in state["open"]
        ]


def check_template(form: ChatFormat) -> None:
    """Raise ``ConfigError`` if the chat template does not show where an answer begins."""
    try:
        form.training_texts(_PROBE)
    except UserError as problem:
        raise ConfigError(problem.message, remedy=problem.remedy) from problem


def encode_conversations(texts: Sequence[TrainingText], form: ChatFormat) -> Iterator[tuple[Tokens, Marks]]:
    """Ids and marks of each text."""
    for encoding, (_, bounds) in zip(form.encode([text for text, _ in texts]), texts, strict=True):
        starts, stops = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
        begun = np.searchsorted(bounds[::2], np.maximum(stops, starts + 1), side="left")
        ended = np.searchsorted(bounds[1::2], starts, side="right")
        marks = (begun > ended).astype(np.uint8)  # characters of an answer are in the token
        marks[:1] = FIRST  # and no target: it has no token before it
        yield np.array(encoding.ids, form.tokenizer.dtype), marks


def encode_pair(values: Sequence[Any], form: ChatFormat, width: int) -> list[tuple[Tokens, Marks]]:
    """Ids and marks of a prompt with each of two answers, all texts or lists of messages. Raises ``UserError``: the
    chat template refuses it; an answer begins behind ``width`` tokens."""
    tokenizer, (prompt, *answers) = form.tokenizer, values
    pair = list[tuple[Tokens, Marks]]()
    for answer in answers:
        if isinstance(prompt, str):  # each is tokenized alone, as TRL does: then both answers follow the same prompt
            encodings = tokenizer.encodings([prompt, answer], add_special_tokens=False)
            asked, answered = [*tokenizer.begin, *encodings[0].ids], [*encodings[1].ids, *tokenizer.end]
        else:
            texts = form.training_texts([*(turn | {"weight": 0} for turn in prompt), *answer])
            if len(texts) != 1 or answer[-1]["role"] != ASSISTANT:
                raise UserError("its answers are not one answer of the assistant", remedy="end it with one")
            (text, (start, *_)) = texts[0]
            asked, answered = (encoding.ids for encoding in form.encode([text[:start], text[start:]]))
        marks = np.zeros(len(asked) + len(answered), np.uint8)
        marks[len(asked) :] = TARGET
        marks[:1] = FIRST  # and no target: it has no token before it
        if not (marks[:width] & TARGET).any():
            raise BadRow("has no room for both answers", remedy="set a larger data.sequence_tokens")
        pair.append((np.array([*asked, *answered], tokenizer.dtype), marks))
    return pair
