"""Checks and converts messages between drafters and verifiers for the cores.

The messages' declarations have the bounds. The cores check whether drafts and verdicts fit the conversation.
"""

from __future__ import annotations

from collections.abc import Iterable

from p2ptrain.core.activations import ID_BYTES, decode_ids
from p2ptrain.core.errors import ProtocolError, Refused, UserError
from p2ptrain.core.serving import Sampling, check_sampling
from p2ptrain.core.texts import printable
from roles.drafter.drafting import DraftVerdict
from wire.text_messages import MOST_TOKEN_BYTES, DraftOpen, StreamRefused, Verdict

# codes of ``StreamRefused``
OTHER_TOKENIZER, TOO_LONG, FULL, ENGINE = "other-tokenizer", "too-long", "full", "engine"


def sampling_untrusted(opening: DraftOpen) -> Sampling:
    """How a verifier samples. Raises ``ProtocolError``: no correct verifier opens a session like this."""
    sampling = Sampling(opening.temperature, opening.top_k, opening.top_p, opening.seed, opening.vocab_size)
    try:
        check_sampling(sampling)
    except UserError as error:
        raise ProtocolError(error.message) from error
    return sampling


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


def verdict_untrusted(message: Verdict, number: int, *, verified: int, vocab_size: int) -> DraftVerdict:
    """A verdict as its core takes it. Raises ``ProtocolError``: no correct verifier sends it.

    Args:
        number: number of the verdict, from the header. verified: positions verified before it.
    """
    tokens = tokens_untrusted(message.tokens, vocab_size=vocab_size)
    return DraftVerdict(number, verified + message.right, tokens, message.depth)


def refused_untrusted(message: StreamRefused) -> Refused:
    """A drafter's refusal, made printable. Never raises."""
    return Refused(printable(message.code, 64), printable(message.reason), remedy=printable(message.remedy))
