"""The core of a drafter: one session, and the encoding of drafts and verdicts. Pure.

It drafts ahead of the verified text, and verdicts tell it what is verified.

Its tokens are the ``verified`` ones followed by its *line*, the tokens that it drafted. A verdict that agrees with the
line, or continues beyond its end, keeps the line's *epoch*. A verdict that contradicts the line cuts it there, and the
verdict's number is the new epoch. So both sides know on which tokens a draft is based, whatever was on its way.

A pass's sample is based on all tokens of the session. If one of these was cut off during the pass, the sample is
dropped, and the model's cache is valid only up to the cut. The next pass's ``keep`` is that position.

The declarations of ``wire.text_messages`` bound what a peer sends; the functions at the end check and decode it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from p2ptrain.core.activations import ID_BYTES, decode_ids
from p2ptrain.core.errors import ProtocolError
from roles.serving.model import PassRequest
from wire.chain_messages import MAX_REQUEST_POSITIONS
from wire.text_messages import Verdict

OTHER_TOKENIZER, TOO_LONG = "other-tokenizer", "too-long"
"""Codes of ``StreamRefused``, beside those of ``Refused``."""
GROUP = 2
"""Drafts that are sent together: a message costs more than a token."""


@dataclass(frozen=True, slots=True)
class DraftVerdict:
    """A verdict, as ``wire.text_messages.Verdict``: newly verified are the next ``right`` drafts, then ``tokens``."""

    number: int
    right: int
    tokens: tuple[int, ...]
    depth: int


@dataclass(frozen=True, slots=True)
class DraftSending:
    """Drafts for the verifier."""

    epoch: int
    position: int
    tokens: tuple[int, ...]


DraftInstruction = PassRequest | DraftSending


class DraftedText:
    """One session of a drafter. Its arguments are as in ``wire.text_messages.DraftOpen``.

    Attributes:
        known: number of the verified tokens. epoch: epoch of the line. number: number of the last verdict.
        ready: the model has processed the ids from the opening.
    """

    def __init__(self, ids: Sequence[int], *, prompt: int, positions: int, depth: int) -> None:
        if not 0 < prompt <= len(ids) <= positions:
            raise ProtocolError("the session has no prompt, or more tokens than positions")
        self.epoch = 0
        self.number = 0
        self.ready = False
        self._prompt = prompt
        self._positions = positions
        self._depth = depth
        self._ids = list(ids)  # verified tokens, then the line
        self.known = len(ids)
        self._opened = len(ids)
        self._sent = len(ids)  # positions that the verifier has, or will have, without a further message
        self._held = 0  # valid positions in the model's cache
        self._reach = 0  # valid positions after the pass under way
        self._running = False

    def next_instructions(self) -> list[DraftInstruction]:
        return [*self._sends(), *self._passes()]

    def take_verdict(self, verdict: DraftVerdict) -> list[DraftInstruction]:
        """Take a verdict. Raises ``ProtocolError``: no correct verifier sends it."""
        start = self.known + verdict.right
        end = start + len(verdict.tokens)
        if verdict.number != self.number + 1:
            raise ProtocolError(f"verdict {verdict.number} arrived after verdict {self.number}")
        if start > len(self._ids):
            raise ProtocolError(f"a verdict accepts drafts up to position {start}, but they end at {len(self._ids)}")
        if end > self._positions:
            raise ProtocolError(f"a verdict ends at position {end}, but the session has {self._positions}")
        self.number = verdict.number
        self._depth = verdict.depth
        cut = next(
            (at for at, token in enumerate(verdict.tokens, start) if at < len(self._ids) and self._ids[at] != token),
            None,
        )
        if cut is not None:
            del self._ids[cut:]
            self.epoch = verdict.number
            self._held = min(self._held, cut)
            self._reach = min(self._reach, cut)
            self._sent = min(self._sent, cut)
        self._ids += verdict.tokens[len(self._ids) - start :]
        self.known = end
        self._sent = max(self._sent, end)
        return self.next_instructions()

    def take_samples(self, samples: Sequence[int]) -> list[DraftInstruction]:
        """Take the sample of the requested pass. Empty: none was requested, or it is not a token of the verifier."""
        if self._running:
            self._running = False
            self._held = self._reach  # fewer than requested if tokens were cut off meanwhile
            self.ready = self.ready or self._held >= self._opened
            if self._held == len(self._ids) < self._positions:
                self._ids += samples
        return self.next_instructions()

    def _passes(self) -> list[PassRequest]:
        size = len(self._ids)
        if self._running or self._held == size:  # the last sample is no token of the verifier
            return []
        if self.ready and size >= self._limit:
            if self._depth:
                return []
            # At rest the model takes in all but the last token, so that drafting can start soon. The sample is unused:
            # for some models samples must be taken in order.
            size = self.known - 1
            if self._held >= size:
                return []
        stop = min(self._held + MAX_REQUEST_POSITIONS, size)
        samples = int(stop == size)
        self._running = True
        self._reach = stop
        return [PassRequest(self._held, tuple(self._ids[self._held : stop]), samples)]

    @property
    def _limit(self) -> int:
        return min(self.known + self._depth, self._positions)

    def _sends(self) -> list[DraftSending]:
        stop = min(len(self._ids), self._limit)
        ended = self._held == len(self._ids) and not self._running  # the last sample is no token of the verifier
        if stop <= self._sent or (stop - self._sent < GROUP and not ended):
            return []
        send = DraftSending(self.epoch, self._sent, tuple(self._ids[self._sent : stop]))
        self._sent = stop
        return [send]


def ids_untrusted(data: bytes | bytearray, *, vocab_size: int) -> tuple[int, ...]:
    """Decode token ids. Raises ``ProtocolError``: they are not in the vocabulary."""
    if len(data) % ID_BYTES:
        raise ProtocolError(f"{len(data)} bytes are not a whole number of token ids")
    ids = decode_ids(bytes(data))
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        raise ProtocolError(f"a token id is not in the vocabulary of {vocab_size} tokens")
    return ids


def verdict_untrusted(message: Verdict, number: int, *, vocab_size: int) -> DraftVerdict:
    """A verdict as its core takes it. ``number``: from the header. Raises ``ProtocolError``: no correct verifier sends
    it."""
    return DraftVerdict(number, message.right, ids_untrusted(message.tokens, vocab_size=vocab_size), message.depth)
