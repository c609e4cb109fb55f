"""Checks and converts messages between drafters and verifiers into events of the cores.

Only ranges of values are checked here. The cores check whether drafts and verdicts fit the conversation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from p2ptrain.core.activations import ID_BYTES, decode_ids
from p2ptrain.core.errors import ProtocolError, Refused, UserError
from p2ptrain.core.serving import Sampling, check_sampling
from p2ptrain.core.texts import printable
from roles.line import LONGEST_SILENCE_S, SHORTEST_SILENCE_S
from roles.speculation.events import VerdictReceived
from roles.worker.stage_requests import MAX_POSITIONS
from wire.text_messages import DraftOpen, DraftReady, Drafts, StreamRefused, Verdict

MAX_DEPTH = 256
"""Most drafts ahead of the verified text: more than a fast drafter makes during a round trip around the world."""
MAX_NUMBER = 1 << 53
MOST_TOKEN_BYTES = 3
MAX_VOCAB = 1 << 8 * MOST_TOKEN_BYTES
# codes of ``StreamRefused``
OTHER_TOKENIZER, TOO_LONG, FULL, ENGINE = "other-tokenizer", "too-long", "full", "engine"


def check_opening_untrusted(message: DraftOpen) -> None:
    """Raise ``ProtocolError`` if no correct verifier opens a session like this."""
    if not 0 < message.prompt <= message.count <= message.positions <= MAX_POSITIONS:
        raise ProtocolError(
            f"invalid session: {message.count} ids ({message.prompt} in the prompt), {message.positions} positions"
        )
    if not 0 < message.vocab_size <= MAX_VOCAB or len(message.tokenizer) > 128:
        raise ProtocolError("invalid session: the vocabulary's size or the tokenizer's name is out of range")
    _check_depth_untrusted(message.depth)
    if not SHORTEST_SILENCE_S <= message.silence_s <= LONGEST_SILENCE_S:
        raise ProtocolError(f"invalid session: a silence limit of {message.silence_s:g} s")
    try:
        check_sampling(sampling_of(message))
    except UserError as error:
        raise ProtocolError(error.message) from error


def sampling_of(opening: DraftOpen) -> Sampling:
    return Sampling(opening.temperature, opening.top_k, opening.top_p, opening.seed, opening.vocab_size)


def ids_untrusted(data: bytes | bytearray, *, vocab_size: int) -> tuple[int, ...]:
    """Decode token ids. Raises ``ProtocolError``: they are not in the vocabulary."""
    if len(data) % ID_BYTES:
        raise ProtocolError(f"{len(data)} bytes are not a whole number of token ids")
    ids = decode_ids(bytes(data))
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        raise ProtocolError(f"a token id is not in the vocabulary of {vocab_size} tokens")
    return ids


def token_bytes(vocab_size: int) -> int:
    """Bytes per token in drafts and verdicts. These messages are so frequent that one byte matters."""
    return 2 if vocab_size <= 1 << 16 else MOST_TOKEN_BYTES


def packed(tokens: Iterable[int], vocab_size: int) -> bytes:
    size = token_bytes(vocab_size)
    return b"".join(token.to_bytes(size, "little") for token in tokens)


def tokens_untrusted(data: bytes, *, vocab_size: int) -> tuple[int, ...]:
    """Decode the tokens of drafts or of a verdict. Raises ``ProtocolError``: they are not in the vocabulary."""
    size = token_bytes(vocab_size)
    if len(data) % size:
        raise ProtocolError(f"{len(data)} bytes are not a whole number of tokens")
    tokens = tuple(int.from_bytes(data[at : at + size], "little") for at in range(0, len(data), size))
    if tokens and max(tokens) >= vocab_size:
        raise ProtocolError(f"a token id is not in the vocabulary of {vocab_size} tokens")
    return tokens


def told_untrusted(message: Verdict, number: int, *, verified: int, vocab_size: int) -> VerdictReceived:
    """Check a verdict. Raises ``ProtocolError``: no correct verifier sends it.

    Args:
        number: number of the verdict, from the header. verified: positions verified before it.
    """
    if not 0 < number <= MAX_NUMBER or not 0 <= message.right <= MAX_POSITIONS:
        raise ProtocolError(f"invalid verdict {number}: it accepts {message.right} drafts")
    _check_depth_untrusted(message.depth)
    start = verified + message.right
    return VerdictReceived(number, start, tokens_untrusted(message.tokens, vocab_size=vocab_size), message.depth)


def drafts_untrusted(message: Drafts, epoch: int, *, vocab_size: int) -> tuple[int, ...]:
    """Decode drafts. ``epoch``: from the header. Raises ``ProtocolError``: no correct drafter sends them."""
    if not 0 <= epoch <= MAX_NUMBER or not 0 <= message.position <= MAX_POSITIONS:
        raise ProtocolError(f"invalid drafts: epoch {epoch}, position {message.position}")
    if not 0 < len(message.tokens) <= token_bytes(vocab_size) * MAX_DEPTH:
        raise ProtocolError(f"invalid drafts: {len(message.tokens)} bytes")
    return tokens_untrusted(message.tokens, vocab_size=vocab_size)


def step_untrusted(message: DraftReady) -> float:
    """Seconds that a draft takes; 0: unknown. Raises ``ProtocolError``."""
    if not (math.isfinite(message.step_ms) and 0 <= message.step_ms <= 3.6e6):
        raise ProtocolError(f"invalid time of a draft: {message.step_ms:g} ms")
    return message.step_ms / 1e3


def refused_untrusted(message: StreamRefused) -> Refused:
    """A drafter's refusal, made printable. Never raises."""
    return Refused(printable(message.code, 64), printable(message.reason), remedy=printable(message.remedy))


def _check_depth_untrusted(depth: int) -> None:
    if not 0 <= depth <= MAX_DEPTH:
        raise ProtocolError(f"invalid draft depth {depth}, expected 0 to {MAX_DEPTH}")
