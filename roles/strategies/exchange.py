"""One step's gradients on their way round the ring, piece by piece while later pieces are still being computed.

Pieces go out in their order, which is the same on every member; when each is ready is each member's own affair. The
ring sums a piece in place, so nothing but the ring touches it from its release until the exchange is finished.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from p2ptrain.core.errors import P2PTrainError
from p2ptrain.core.world import LoopClock
from ring.codecs import Codec, codec_named
from ring.session import RingSession

PLAIN = "fp32"
"""The codec that changes nothing: gradients travel as they lie in memory."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One all-reduce of a step.

    Attributes:
        array: shape (numel,), a view of the reduce buffer.
        residual: this member's error feedback for it, float32, where the codec wants one.
    """

    array: npt.NDArray[Any]
    codec: Codec | None = None
    residual: npt.NDArray[np.float32] | None = None


class Exchange:
    """The operations of one step. Use it on the event loop only.

    A step that is given up needs no word here: its session is closed, which fails its operations and takes no more.

    Args:
        patience_s: see ``RingSession.submit``.
    """

    def __init__(self, session: RingSession, pieces: Sequence[Piece], *, patience_s: float) -> None:
        self._session = session
        self._pieces = pieces
        self._patience_s = patience_s
        self._operations: list[asyncio.Future[None]] = []
        self._problem: P2PTrainError | None = None
        self._clock = LoopClock().now
        self._under_way = 0
        self._since = 0.0
        self._communicating_s = 0.0

    @property
    def communicating_s(self) -> float:
        """How long at least one operation was under way, until now."""
        return self._communicating_s + (self._clock() - self._since if self._under_way else 0.0)

    def release(self, count: int) -> None:
        """The first ``count`` pieces are final: submit those of them that are not yet."""
        for piece in self._pieces[len(self._operations) : count]:
            if self._problem is not None:
                return
            try:
                operation = self._session.submit(
                    piece.array, codec=piece.codec, residual=piece.residual, patience_s=self._patience_s
                )
            except P2PTrainError as problem:  # told by ``finished``: this may be a callback, with nobody to hear it
                self._problem = problem
                return
            if not self._under_way:
                self._since = self._clock()
            self._under_way += 1
            self._operations.append(operation)
            operation.add_done_callback(self._ended)

    async def finished(self) -> None:
        """Release what is left, and wait until every piece is reduced.

        Raises:
            ConnectionLost, DeadlineExceeded, ProtocolError: see ``RingSession.submit``.
        """
        self.release(len(self._pieces))
        if self._operations:
            # Not gather: whoever gives up waiting here must not cancel what is the session's.
            await asyncio.wait(self._operations, return_when=asyncio.FIRST_EXCEPTION)
        if self._problem is not None:
            raise self._problem
        for operation in self._operations:
            operation.result()

    def _ended(self, operation: asyncio.Future[None]) -> None:
        self._under_way -= 1
        if not self._under_way:
            self._communicating_s += self._clock() - self._since


def codec_of(session: RingSession) -> Codec | None:
    """A codec for the gradients of this session's view; None where they travel as they are.

    Raises:
        ConfigError: the view names one that this version does not know.
    """
    name = session.view.codec
    return None if name == PLAIN else codec_named(name)
