"""Conversations as windows: several in each, kept apart by their positions, with a mark on each token that is a target.

A conversation is tokenized whole, as it is when the model answers, and cut to a window. (If the chat template changes
earlier turns, each answer is in a text of its own, with the turns before it.) It goes into the first of the windows
being filled that has room, and the rest of a window is padding. Only the assistant's tokens are targets. Each window
has at least one: a conversation that is cut before its first answer is left out, and counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

import numpy as np
import numpy.typing as npt

from p2ptrain.compute.device import HOST, check_memory
from p2ptrain.compute.rows import BadRow, Messages, Rows
from p2ptrain.compute.text import ASSISTANT, USER, ChatFormat
from p2ptrain.compute.tokenizer import Tokens
from p2ptrain.core.errors import ConfigError, UserError

Marks = npt.NDArray[np.uint8]
TARGET, FIRST = 1, 2
"""Bits of a token's mark: it is a target; it is the first of a conversation. Padding has neither."""

_TEXTS_PER_CALL = 256
_WINDOWS_PER_CHECK = 4096
_FILLED_AT_ONCE = 16  # windows: more waste less padding, and move text further from its place in the files
_PROBE = [{"role": role, "content": content} for role, content in zip([USER, ASSISTANT] * 2, "abcd", strict=True)]


def packed(
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
        form.learned(_PROBE)
    except UserError as problem:
        raise ConfigError(problem.message, remedy=problem.remedy) from problem
    windows: list[tuple[Tokens, Marks]] = []
    filled: list[tuple[int, Tokens, Marks]] = []  # the newest windows, each after the number of its tokens
    count = cut = unanswered = 0
    for ids, marks in _examples(_written(conversations, form, rows, limit_bytes), form):
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


def _written(
    conversations: Iterable[tuple[str, Messages]], form: ChatFormat, rows: Rows, limit_bytes: int
) -> Iterator[tuple[str, list[int]]]:
    """The conversations that the chat template accepts, as ``ChatFormat.learned`` writes them."""
    left = limit_bytes
    for place, messages in conversations:
        try:
            texts = form.learned(messages)
        except ConfigError:  # a limit of this machine must not decide which rows are learned
            raise
        except UserError as problem:
            rows.leave_out(place, BadRow(f"is not usable: {problem.message}", problem.remedy or "leave it out"))
            continue
        left -= sum(len(text.encode()) for text, _ in texts)
        if limit_bytes and left < 0:
            return
        yield from texts or [("", [])]


def _examples(written: Iterator[tuple[str, list[int]]], form: ChatFormat) -> Iterator[tuple[Tokens, Marks]]:
    while batch := list(islice(written, _TEXTS_PER_CALL)):
        for encoding, (_, bounds) in zip(form.encoded([text for text, _ in batch]), batch, strict=True):
            starts, stops = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
            begun = np.searchsorted(bounds[::2], np.maximum(stops, starts + 1), side="left")
            ended = np.searchsorted(bounds[1::2], starts, side="right")
            marks = (begun > ended).astype(np.uint8)  # characters of an answer are in the token
            marks[:1] = FIRST  # and no target: it has no token before it
            yield np.array(encoding.ids, form.tokenizer.dtype), marks
