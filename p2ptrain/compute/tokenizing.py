"""From texts to tokens, in pieces: memory does not grow with a text, and all cores work.

A long text is cut into pieces that overlap. The pieces are encoded at the same time, by the threads of the
``tokenizers`` library. Two neighbours are joined inside their overlap, in the middle of the longest run of tokens that
both have at the same characters: there the left one does not depend on what it lacks behind it, and the right one does
not depend on what it lacks before it. So the ids are those of the whole text. Without such a run both pieces are
encoded again as one. If that piece becomes too long (a text of a million digits), it is cut at a token's end, where
the ids may then differ; they are the same at every member.

The next batch of pieces is encoded while the tokens of this one are stored. Batches have a fixed size, so memory is
bounded: the library takes about 100 bytes for each token.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from difflib import SequenceMatcher
from itertools import islice, takewhile
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from p2ptrain.compute.rows import TextPart
from p2ptrain.compute.tokenizer import Tokenizer, Tokens

if TYPE_CHECKING:
    from tokenizers import Encoding

PIECE_CHARS, OVERLAP_CHARS = 1 << 16, 1 << 10
"""A piece begins so many characters after the one before it, and goes on into the next one for the overlap. ``Place``
counts in them, so ``token_store.FORMAT`` changes with them."""
MOST_CHARS = 1 << 20
"""A piece that cannot be joined with the next one grows to this length before it is cut."""
LEAST_RUN = 8
"""Equal tokens around a join; half of them before it."""
_BATCH_PIECES = max(8, min(32, 2 * (os.cpu_count() or 1)))
_BATCH_TEXTS = 4096

S = TypeVar("S")
T = TypeVar("T")


class Piece(NamedTuple):
    """A part of a text that is encoded in one call. ``begins``, ``ends``: whether the text begins and ends with it."""

    text: str
    begins: bool
    ends: bool


class Place(NamedTuple):
    """What is stored: the first ``pieces`` pieces, and of the next one the first ``tokens`` tokens."""

    pieces: int = 0
    tokens: int = 0


class EncodedPart(NamedTuple):
    """The ids that come next, shape (n,).

    Attributes:
        begins, ends: whether a text begins and ends with them.
        place: behind them; None: from here nothing can go on.
    """

    ids: Tokens
    begins: bool
    ends: bool
    place: Place | None


def cut_into_pieces(parts: Iterable[TextPart]) -> Iterator[Piece]:
    """Every piece but a text's last has ``PIECE_CHARS + OVERLAP_CHARS`` characters."""
    held, begins = "", True
    for text, ends in parts:
        held, at = held + text, 0
        while len(held) - at > PIECE_CHARS + OVERLAP_CHARS:
            yield Piece(held[at : at + PIECE_CHARS + OVERLAP_CHARS], begins, ends=False)
            at, begins = at + PIECE_CHARS, False
        held = held[at:]
        if ends:
            yield Piece(held, begins, ends=True)
            held, begins = "", True


def encode_texts(parts: Iterable[TextPart], tokenizer: Tokenizer, after: Place) -> Iterator[EncodedPart]:
    """The ids of texts behind ``after``, without special tokens. Raises ``ConfigError``: the tokenizer fails; and what
    ``parts`` raises."""
    pieces = cut_into_pieces(parts)
    for _ in islice(pieces, after.pieces):  # they are read again, which takes little time beside their encoding
        pass
    if not tokenizer.is_bytes:
        yield from _join_pieces(pieces, tokenizer, after)
        return
    for number, (text, begins, ends) in enumerate(pieces, after.pieces + 1):
        encoded = (text if ends else text[:PIECE_CHARS]).encode()
        yield EncodedPart(np.frombuffer(encoded, np.uint8), begins, ends, Place(number))


def _join_pieces(pieces: Iterator[Piece], tokenizer: Tokenizer, after: Place) -> Iterator[EncodedPart]:
    def encode(texts: list[str]) -> list[Encoding]:
        return tokenizer.encodings(texts, add_special_tokens=False)

    def ids(start: int, stop: int | None = None) -> Tokens:
        return np.array(encoding.ids[start:stop], tokenizer.dtype)

    text, start, begins = "", after.tokens, False
    encoding: Encoding  # of ``text``, whose tokens from ``start`` on were not returned yet

    def encode_batch(batch: list[Piece]) -> list[Encoding]:
        return encode([piece.text for piece in batch])

    encoded = (
        pair
        for batch, encodings in _ahead(encode_batch, _batches(pieces))
        for pair in zip(batch, encodings, strict=True)
    )
    for number, (piece, new) in enumerate(encoded, after.pieces):
        if not text:
            text, encoding, begins = piece.text, new, piece.begins
        elif (join := _find_join(encoding, len(text) - OVERLAP_CHARS, new)) is not None:
            yield EncodedPart(ids(start, join[0]), begins, False, Place(number, join[1]))
            text, encoding, start, begins = piece.text, new, join[1], False
        else:
            whole = text[:-OVERLAP_CHARS] + piece.text
            if len(whole) > MOST_CHARS:
                cut = len(text) - OVERLAP_CHARS // 2
                stop = bisect_left(range(start, len(encoding)), cut, key=lambda at: _span(encoding, at)[1]) + start
                if stop > start:
                    cut = _span(encoding, stop - 1)[1]  # else one token is longer than a piece
                yield EncodedPart(ids(start, stop if stop > start else None), begins, False, None)
                whole, start, begins = whole[cut:], 0, False
            text = whole
            (encoding,) = encode([text])
        if piece.ends:
            yield EncodedPart(ids(start), begins, True, Place(number + 1))
            text, start = "", 0


def _span(encoding: Encoding, at: int) -> tuple[int, int]:
    """First character of a token, and the one after its last."""
    return encoding.token_to_chars(at) or (0, 0)


def _find_join(left: Encoding, shared: int, right: Encoding) -> tuple[int, int] | None:
    """Two pieces share the characters of ``left`` from ``shared`` on. Returns how many tokens of ``left`` are used, and
    how many of ``right`` are not; None: there is no run of equal tokens in which to join them."""

    def tokens(encoding: Encoding, numbers: range, before: int) -> Iterator[tuple[int, int, int]]:
        ids = encoding.ids
        for at in numbers:
            first, stop = _span(encoding, at)
            yield first - before, stop - before, ids[at]

    lefts = list(takewhile(lambda token: token[0] >= 0, tokens(left, range(len(left))[::-1], shared)))[::-1]
    rights = list(takewhile(lambda token: token[0] < OVERLAP_CHARS, tokens(right, range(len(right)), 0)))
    at, there, run = SequenceMatcher(None, lefts, rights, autojunk=False).find_longest_match()
    inside = range(LEAST_RUN // 2, run - LEAST_RUN // 2 + 1)
    # A character may have several tokens, which stay together.
    clean = [number for number in inside if lefts[at + number][0] >= lefts[at + number - 1][1]]
    if not clean:
        return None
    middle = min(clean, key=lambda number: abs(2 * number - run))
    return len(left) - len(lefts) + at + middle, there + middle


def _batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    batch, chars = list[Piece](), 0
    for piece in pieces:
        batch.append(piece)
        chars += len(piece.text)
        if chars >= _BATCH_PIECES * PIECE_CHARS or len(batch) >= _BATCH_TEXTS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


def _ahead(call: Callable[[S], T], items: Iterable[S]) -> Iterator[tuple[S, T]]:
    """Each item with its result. The next one is computed meanwhile."""
    with ThreadPoolExecutor(1, "tokenize") as pool:
        before = None
        for item in items:
            computed = item, pool.submit(call, item)
            if before is not None:
                yield before[0], before[1].result()
            before = computed
        if before is not None:
            yield before[0], before[1].result()
