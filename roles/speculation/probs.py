"""Probabilities of drafts, as they travel where drafts are rejected by them.

With each draft goes its own (a float32 behind the token), and on a rejection those of all tokens in its place, once: a
``ProbsHere`` and a bulk frame of the ids (int32) and the probabilities (float32) of the tokens that may come, or of the
probabilities alone where these are most. What cannot be the probabilities that the draft was drawn from is a fault; a
drafter that tells others on purpose is not found out, and can make texts of this kind less like the verifier's own.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from p2ptrain.core.errors import ProtocolError
from p2ptrain.core.serving import DraftProbs
from roles.speculation.received import MAX_DEPTH, MAX_NUMBER, packed, token_bytes, tokens_untrusted
from roles.worker.stage_requests import MAX_POSITIONS
from wire.speculation_messages import Drafts, ProbsHere, ProbsWanted

WEIGHT_BYTES = 4
ID_BYTES, PROB_BYTES = 4, 4
SUM_ERROR = 1e-3
"""By which a sum of a hundred thousand float32 may differ from 1."""


def packed_weighed(tokens: Iterable[int], weights: Iterable[float], vocab_size: int) -> bytes:
    """Drafts with their weights as they travel: all tokens, then all weights."""
    return packed(tokens, vocab_size) + np.array(list(weights), "<f4").tobytes()


def weighed_untrusted(message: Drafts, epoch: int, *, vocab_size: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Tokens and weights. Raises ``ProtocolError``: no correct drafter sends this. ``epoch``: from the header."""
    if not 0 <= epoch <= MAX_NUMBER or not 0 <= message.position <= MAX_POSITIONS:
        raise ProtocolError(f"drafts of epoch {epoch} from position {message.position}")
    size = token_bytes(vocab_size) + WEIGHT_BYTES
    count, rest = divmod(len(message.tokens), size)
    if rest or not 0 < count <= MAX_DEPTH:
        raise ProtocolError(f"drafts and their probabilities of {len(message.tokens)} bytes")
    cut = token_bytes(vocab_size) * count
    weights = np.frombuffer(message.tokens[cut:], "<f4")
    if not ((weights > 0) & (weights <= 1)).all():  # NaN is neither
        raise ProtocolError("a draft that was drawn with no probability, or more than 1")
    return tokens_untrusted(message.tokens[:cut], vocab_size=vocab_size), tuple(weights.tolist())


def wanted_untrusted(message: ProbsWanted) -> int:
    """The position. Raises ``ProtocolError``: there is none."""
    if not 0 < message.position <= MAX_POSITIONS:
        raise ProtocolError(f"the probabilities of position {message.position} are asked for")
    return message.position


def announced(position: int, probs: DraftProbs) -> tuple[ProbsHere, bytes]:
    """What is said, and the bulk frame behind it."""
    return ProbsHere(position, len(probs.probs) // PROB_BYTES, bool(probs.ids)), probs.ids + probs.probs


def probs_bytes_untrusted(message: ProbsHere, *, vocab_size: int) -> int:
    """Of the bulk frame, before it is allocated. Raises ``ProtocolError``: it cannot be of such a vocabulary."""
    if not 0 < message.position <= MAX_POSITIONS or not 0 < message.entries <= vocab_size:
        raise ProtocolError(f"{message.entries} probabilities of {vocab_size} tokens at position {message.position}")
    return message.entries * (PROB_BYTES + (ID_BYTES if message.sparse else 0))


def probs_untrusted(
    message: ProbsHere, data: bytes | bytearray, *, vocab_size: int, token: int, weight: float
) -> DraftProbs:
    """The probabilities that a draft was drawn from.

    Args:
        data: of ``probs_bytes_untrusted`` bytes. token, weight: the draft, and what it came with.

    Raises:
        ProtocolError: they are none, or others than those that the draft came from.
    """
    cut = ID_BYTES * message.entries if message.sparse else 0
    ids, probs = np.frombuffer(data[:cut], "<i4"), np.frombuffer(data[cut:], "<f4")
    if not ((probs >= 0) & (probs <= 1)).all() or abs(float(probs.sum(dtype=np.float64)) - 1) > SUM_ERROR:
        raise ProtocolError("probabilities that are none, or not 1 together")
    place = token
    if message.sparse:
        if ids[0] < 0 or ids[-1] >= vocab_size or not (np.diff(ids.astype(np.int64)) > 0).all():
            raise ProtocolError("probabilities of tokens that are not in order, or none of the vocabulary")
        place = int(np.searchsorted(ids, token))
        if place == len(ids) or ids[place] != token:
            raise ProtocolError("a draft that could not come by what its drafter says")
    if place >= len(probs) or float(probs[place]) != weight:
        raise ProtocolError("a draft came with another probability than its drafter says now")
    return DraftProbs(bytes(data[:cut]), bytes(data[cut:]))
