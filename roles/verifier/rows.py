"""What one drafter is asked about drafts that were rejected, and its answers: from which probabilities it drew them.

A row of probabilities may take long over a slow link, and while one comes nothing else does: who waits for the next one
has patience from then on. What was not asked for is not taken, so nobody makes the verifier read and check rows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from p2ptrain.core.errors import ProtocolError
from p2ptrain.core.serving import DraftProbs
from roles.speculation.probs import probs_bytes_untrusted, probs_untrusted
from roles.worker.stage_links import LATE, Line
from wire.connection import Received
from wire.speculation_messages import ProbsHere

ROW_S = 5.0
"""For a row, once announced."""
_MARGIN_S = 1e-3


@dataclass(slots=True)
class Asked:
    """From which probabilities a token with ``weight`` came. ``answer``: None: nobody says. ``announced``: it comes."""

    position: int
    token: int
    weight: float
    answer: asyncio.Future[DraftProbs | None]
    announced: bool = False


class Rows:
    """Of one connection.

    Args:
        now: seconds.
    """

    def __init__(self, vocab_size: int, now: Callable[[], float]) -> None:
        self._vocab_size, self._now = vocab_size, now
        self._owed: dict[int, Asked] = {}  # by the session's stream; of sessions that are over by now, too
        self._until = 0.0  # when the row that is on its way is due, or when the last one came

    async def wait(self, asked: Asked, stream: int, patience_s: float) -> None:
        """Until a question has its answer, or that took too long."""
        self._owed[stream] = asked
        began = self._now()
        while not asked.answer.done():
            due = self._until if asked.announced else max(began, self._until) + patience_s
            if (left_s := due - self._now()) < _MARGIN_S:
                return
            await asyncio.wait([asked.answer], timeout=left_s)
            if (now := self._now()) - due > patience_s / LATE:  # held up itself: what came meanwhile lies unread
                began = now
                self._until = now + ROW_S if asked.announced else self._until

    def ended(self, stream: int) -> None:
        """The drafter ended this session: it owes nothing."""
        self._owed.pop(stream, None)

    async def take_untrusted(self, line: Line, message: ProbsHere, received: Received) -> int:
        """An answer, and what it announces.

        Returns:
            Bytes of it.

        Raises:
            ProtocolError: no correct drafter says this; and as ``Line.bulk``.
        """
        asked = self._owed.get(received.stream)
        if asked is None or asked.announced:
            raise ProtocolError("it says what it drew a draft from, and was not asked")
        if message.position != asked.position:
            raise ProtocolError(f"it speaks of position {message.position}, and was asked about {asked.position}")
        size_bytes = probs_bytes_untrusted(message, vocab_size=self._vocab_size)
        asked.announced = True
        self._until = self._now() + ROW_S
        data = await line.bulk(size_bytes, stream=received.stream)
        self._until = self._now()
        self._owed.pop(received.stream, None)
        if not asked.answer.done():  # else the session was over when this was on its way
            vocab_size, token, weight = self._vocab_size, asked.token, asked.weight
            asked.answer.set_result(probs_untrusted(message, data, vocab_size=vocab_size, token=token, weight=weight))
        return received.body_bytes + size_bytes
