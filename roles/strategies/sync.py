"""Synchronous data parallelism: each member computes its micro-batches, the sums are all-reduced, one identical step.

The gradients are reduced in buckets (``compute.gradients``). Each bucket is submitted as soon as the backward pass of
this member's last micro-batch has completed it, so that pass hides most of the exchange. A codec may shrink the
buckets. The loss and the vectors (norms, biases) follow as a small operation of their own, exact with every codec.

Each piece is measured just before it is submitted, because the ring sums in place. The squared norm of a member's own
contribution shows whether it is finite, and which member corrupted a sum.

What a lossy codec leaves out of this member's contributions stays in its *residual* and is added to the next step's.
The residual is not part of the replicated state: it changes what a member contributes, never how the reduced bytes,
equal everywhere, are applied. So it may be dropped at any time, at the cost of one step's rounding. It is dropped with
every new view, hence after every aborted step.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from p2ptrain.compute.gradients import OnFinal, bucket_bounds
from p2ptrain.core.errors import P2PTrainError
from p2ptrain.core.world import LoopClock
from ring.codecs import Codec, codec_named
from ring.session import RingSession
from roles.compute_thread import ComputeThread
from roles.engine import Applied, Engine
from roles.strategies.interface import ConnectPeers, Contribution, StageLoad

PLAIN = "fp32"
"""The codec that changes nothing."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One all-reduce, or all-gather, of a step.

    Attributes:
        array: shape (numel,), a view of the reduce buffer.
        residual: this member's error feedback for it, float32, if the codec needs one.
        gathered: ``array`` is all members' (``RingSession.gather``); it is not summed.
    """

    array: npt.NDArray[Any]
    codec: Codec | None = None
    residual: npt.NDArray[np.float32] | None = None
    gathered: bool = False


class Exchange:
    """Reduces one step's gradients round the ring, piece by piece while later pieces are still being computed.

    Pieces are submitted in the same order on every member. The ring sums a piece in place, so nothing else touches it
    from its release until the exchange is finished. Use it on the event loop only. To give a step up, close its
    session: that fails all operations. ``patience_s``: see ``RingSession.submit``.
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
        return self._communicating_s + (self._clock() - self._since if self._under_way else 0.0)

    def release(self, count: int) -> None:
        """Submit those of the first ``count`` pieces, all final now, that are not submitted yet."""
        for piece in self._pieces[len(self._operations) : count]:
            if self._problem is not None:
                return
            try:
                operation = (
                    self._session.gather(piece.array, patience_s=self._patience_s)
                    if piece.gathered
                    else self._session.submit(
                        piece.array, codec=piece.codec, residual=piece.residual, patience_s=self._patience_s
                    )
                )
            except P2PTrainError as problem:  # ``finished`` raises it: this may be a callback, which nobody awaits
                self._problem = problem
                return
            if not self._under_way:
                self._since = self._clock()
            self._under_way += 1
            self._operations.append(operation)
            operation.add_done_callback(self._ended)

    async def finished(self) -> None:
        """Release the remaining pieces, and wait until every piece is reduced. Raises as ``RingSession.submit``."""
        self.release(len(self._pieces))
        if self._operations:
            # Not gather: cancelling this wait must not cancel the session's operations.
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
    """Return the codec of the session's view; None for plain gradients. Raises ``ConfigError`` if it is unknown."""
    name = session.view.codec
    return None if name == PLAIN else codec_named(name)


class _Outgoing:
    """Releases this member's contribution to one step, on the compute thread.

    ``complete`` is called when the whole contribution is in the buffer. ``measure`` returns the squared norm of a range
    of it. ``own`` adds it up over the released pieces.
    """

    def __init__(
        self,
        engine: Engine,
        measure: Callable[[int, int], float],
        bounds: Sequence[tuple[int, int]],
        release: Callable[[int], object],
        complete: Callable[[], None],
    ) -> None:
        self._engine, self._measure, self._bounds, self._release = engine, measure, bounds, release
        self._complete = complete
        self._stops = [stop for _, stop in bounds]
        self._released = 0
        self.own = 0.0

    def front_final(self, numel: int) -> None:
        """Measure and release the pieces that are complete now; called as ``roles.engine.OnFinal``."""
        for start, stop in self._bounds[self._released : bisect_right(self._stops, numel)]:
            self.own += self._measure(start, stop)
            self._released += 1
            self._release(self._released)

    def finish(self) -> None:
        self._engine.finish_gradients(self.front_final)
        self._complete()
        self.front_final(self._stops[-1])


class SyncStrategy:
    """The global batch is fixed. Which member computes which part of it changes only the time.

    The arguments are those of ``Factory``. Subclasses pass them on as ``common``."""

    def __init__(
        self, engine: Engine, compute: ComputeThread, progress: Callable[[], None], bucket_bytes: int = 0
    ) -> None:
        self._engine = engine
        self._compute = compute
        self._progress = progress
        self._bucket_bytes = bucket_bytes
        self._session: RingSession | None = None
        self._codec: Codec | None = None
        self._residual: npt.NDArray[np.float32] | None = None
        self._exchange: Exchange | None = None
        self._outgoing: _Outgoing | None = None
        self._computed_at = 0.0
        self._now = LoopClock().now
        self.exposed_s = self.communicating_s = 0.0
        self.scores: dict[str, float] = {}

    async def begin(self, session: RingSession, meet: ConnectPeers) -> None:
        """No connections are needed besides the ring."""

    async def compute(self, step: int, first: int, count: int, session: RingSession, *, patience_s: float) -> None:
        if session is not self._session:
            self._session, self._codec = session, None if self._engine.exact else codec_of(session)
            feedback = self._codec is not None and self._codec.feedback
            self._residual = np.zeros(self._engine.exact_from, np.float32) if feedback else None
        bounds = self._bounds_of(step)
        exchange = self._exchange = Exchange(session, self._pieces_of(bounds), patience_s=patience_s)
        wake = asyncio.get_running_loop().call_soon_threadsafe
        outgoing = self._outgoing = _Outgoing(
            self._engine, self._contributed, bounds, lambda count: wake(exchange.release, count), self._complete
        )
        is_ready = await self._compute.run(self._engine.begin_step, step, first, count)
        if is_ready:
            await self._compute.run(outgoing.finish)
        await self._fill(step, first, count, None if is_ready else outgoing.front_final)
        if not is_ready:
            await self._compute.run(outgoing.finish)
        self._computed_at = self._now()

    async def _fill(self, step: int, first: int, count: int, front_final: OnFinal | None) -> None:
        last = first + count - 1
        for index in range(first, first + count):
            on_final: OnFinal | None = front_final if index == last else None
            await self._compute.run(self._engine.micro_batch, step, index, on_final)
            self._progress()

    async def reduce(self, session: RingSession) -> Contribution:
        exchange, self._exchange = self._exchange, None
        if exchange is None or self._outgoing is None or session is not self._session:
            raise RuntimeError("nothing was computed in this session")
        await exchange.finished()
        await self._summed()
        self.exposed_s = self._now() - self._computed_at
        self.communicating_s = exchange.communicating_s
        return await self._compute.run(self._summarize, self._outgoing.own)

    def _complete(self) -> None:
        """Called on the compute thread when this member's whole contribution is in the buffer, before any is sent."""

    def _contributed(self, start: int, stop: int) -> float:
        """Called on the compute thread when a range of this member's contribution is final. Its squared norm."""
        return self._engine.partial_square_sum(start, stop)

    async def _summed(self) -> None:
        """Run between the exchange and the hash of the buffer."""

    async def commit(self, step: int, square_sum: float) -> Applied:
        return await self._compute.run(self._engine.apply, step, square_sum)

    async def validate(self, first: int, count: int) -> tuple[float, int]:
        total, targets = 0.0, 0
        for index, counts in self._passes(first, count):
            part, number = await self._compute.run(self._engine.validate, index, 1)
            if counts:
                total, targets = total + part, targets + number
            self._progress()
        return total, targets

    def _passes(self, first: int, count: int) -> Iterable[tuple[int, bool]]:
        """This member's passes for such a share: the micro-batch's index, and whether it counts."""
        return ((index, True) for index in range(first, first + count))

    def stage_load(self) -> StageLoad | None:
        return None

    def _bounds_of(self, step: int) -> list[tuple[int, int]]:
        """The operations of a step, as ranges of the buffer: buckets of what may be encoded, then the exact rest."""
        exact_from, bounds = self._engine.exact_from, []
        for start, stop in self._engine.exchanged(step):
            lossy = min(stop, exact_from) - start
            if lossy > 0:
                buckets = bucket_bounds(lossy, self._engine.reduce_buffer.itemsize, self._bucket_bytes)
                bounds += [(start + low, start + high) for low, high in buckets]
            if stop > exact_from:
                bounds.append((max(start, exact_from), stop))
        return bounds

    def _pieces_of(self, bounds: Sequence[tuple[int, int]]) -> list[Piece]:
        buffer, exact_from = self._engine.reduce_buffer, self._engine.exact_from
        residual = self._residual
        return [
            Piece(buffer[start:stop], self._codec, residual[start:stop] if residual is not None else None)
            if start < exact_from
            else Piece(buffer[start:stop])
            for start, stop in bounds
        ]

    def _summarize(self, own: float) -> Contribution:
        buffer = self._engine.reduce_buffer
        digest = xxhash.xxh3_128_digest(buffer.view(np.uint8).data)
        # Each member squares all of it: so no other one can tell it a wrong norm.
        return Contribution(digest, self._engine.partial_square_sum(0, buffer.size), own)
