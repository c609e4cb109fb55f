"""Runs the steps of a way to train: the work fills the reduce buffer, the exchange reduces it with the others'.

The contribution is reduced in buckets (``compute.gradients``). Each bucket is submitted as soon as the backward pass of
this member's last micro-batch has completed it, and a GPU has copied it, so that pass hides most of the exchange. A
codec may shrink the buckets. The loss and the vectors (norms, biases) follow as a small operation of their own, exact
with every codec.

Each piece is measured just before it is submitted, because the ring reduces in place. The squared norm of a member's
own contribution shows whether it is finite, and which member corrupted a sum. Sums that come piece by piece are
measured meanwhile (``ReducedBytes``), so no such step waits for a pass over the whole buffer.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from p2ptrain.compute.gradients import bucket_bounds
from p2ptrain.core.errors import P2PTrainError
from p2ptrain.core.training import Applied
from p2ptrain.core.world import LoopClock, Probe
from ring.session import PATIENCE_S, RingSession
from roles.compute_thread import ComputeThread
from roles.engine import Engine
from roles.strategies.interface import (
    Bounds,
    ConnectPeers,
    Contribution,
    Exchange,
    Progress,
    RingPiece,
    Work,
)
from roles.strategies.parts import PartRings
from roles.strategies.reduced import ReducedBytes

BeforeStep = Callable[[int, int, RingSession], Awaitable[None]]
"""Called before a step with its number, this member's number of micro-batches, and the ring."""


class BucketTransfer:
    """Reduces one step's pieces round the ring, each while later ones are still being computed.

    Pieces are submitted in the same order on every member. The ring reduces a piece in place, so nothing else touches
    it from its release until the transfer is finished. Use it on the event loop only. To give a step up, close its
    session: that fails all operations.

    Args:
        patience_s: see ``RingSession.submit``.
        on_reduced: called when the first pieces have ended, with their number.
    """

    def __init__(
        self,
        session: RingSession,
        pieces: Sequence[RingPiece],
        *,
        patience_s: float,
        on_reduced: Callable[[int], None],
    ) -> None:
        self._session = session
        self._pieces = pieces
        self._on_reduced, self._reduced = on_reduced, 0
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
        before = self._reduced
        while self._reduced < len(self._operations) and self._operations[self._reduced].done():
            self._reduced += 1
        if self._reduced > before:
            self._on_reduced(self._reduced)


class _Outgoing:
    """Releases this member's contribution to one step, on the thread that computes or runs backward. ``own`` adds up
    its squared norm."""

    def __init__(self, engine: Engine, exchange: Exchange, bounds: Bounds, release: Callable[[int], object]) -> None:
        self._engine, self._exchange, self._bounds, self._release = engine, exchange, bounds, release
        self._stops = [stop for _, stop in bounds]
        self._released = 0
        self.own = 0.0

    def front_final(self, numel: int) -> None:
        """Measure and release the pieces that are complete now; called as ``roles.engine.OnFinal``."""
        for start, stop in self._bounds[self._released : bisect_right(self._stops, numel)]:
            self.own += self._exchange.prepare(start, stop)
            self._released += 1
            self._release(self._released)

    def finish(self) -> None:
        self._engine.finish_gradients(self.front_final)
        self._exchange.complete()
        self.front_final(self._stops[-1])


class Strategy:
    """The activities of a step. A broken ring cancels them, except ``commit``, which runs to its end.

    The global batch is fixed. Which member computes which part of it changes only the time.

    Args:
        bucket_bytes: of a bucket; 0: automatic.
        parts: the rings of a split model; None: each member holds the whole model.

    Attributes:
        exposed_s: time that the last step waited for the ring after this member's own share was computed.
        communicating_s: time that its operations were under way, also during the computing.
    """

    def __init__(
        self,
        engine: Engine,
        compute: ComputeThread,
        bucket_bytes: int,
        *,
        work: Work,
        exchange: Exchange,
        parts: PartRings | None = None,
        before_step: BeforeStep | None = None,
    ) -> None:
        self._engine, self._compute, self._bucket_bytes = engine, compute, bucket_bytes
        self.work, self._exchange, self._parts, self._before_step = work, exchange, parts, before_step
        self._session: RingSession | None = None  # of the members that hold the same part
        self._sending: tuple[BucketTransfer, _Outgoing] | None = None
        self._reduced: ReducedBytes | None = None
        self._patience_s, self._probe = PATIENCE_S, Probe()
        self._computed_at = 0.0
        self.exposed_s = self.communicating_s = 0.0

    @property
    def scores(self) -> dict[str, float]:
        return self._exchange.scores

    async def begin_view(self, session: RingSession, connect: ConnectPeers) -> None:
        """Begin a view, whose ring is ``session``, and form further connections with ``connect``. Raises as those."""
        self._session = self._sending = None
        ring = session if self._parts is None else await self._parts.begin_view(session, connect)
        await self._exchange.begin_view(ring)
        await self.work.begin_view(session, connect)
        self._session, self._probe = ring, session.world.probe

    async def compute(self, step: int, first: int, count: int, *, patience_s: float) -> None:
        """Compute this member's share of ``step``: micro-batches ``range(first, first + count)``.

        The ring may reduce the contribution in place at once, so afterwards the buffer holds sums, not contributions.
        To give a step up, close the session first; then compute the step again from zero. ``patience_s``: see
        ``RingSession.submit``.
        """
        assert self._session is not None, "no view has begun"
        engine, run, self._patience_s = self._engine, self._compute.run, patience_s
        if self._before_step is not None:
            await self._before_step(step, count, self._session)
        bounds = self._bounds(step)
        pieces = self._exchange.begin_step(step, count, bounds)
        sums_early = self._exchange.sums_in_place and (self._parts is None or not self._parts.sums_tied)
        is_own = sums_early and self._session.size == 1 and not engine.exact  # summed by chunk, as others do
        reduced = self._reduced = ReducedBytes(engine, self._compute, is_own=is_own)
        on_reduced = (lambda count: reduced.final(bounds[count - 1][1])) if sums_early else (lambda count: None)
        transfer = BucketTransfer(self._session, pieces, patience_s=patience_s, on_reduced=on_reduced)
        wake = asyncio.get_running_loop().call_soon_threadsafe
        outgoing = _Outgoing(engine, self._exchange, bounds, lambda number: wake(transfer.release, number))
        self._sending = transfer, outgoing
        is_ready = await run(engine.begin_step, step, first, count)
        if is_ready:
            await run(outgoing.finish)
        on_final = None if is_ready else outgoing.front_final
        await self.work.compute(step, first, count, on_final, patience_s=patience_s)
        if not is_ready:
            await run(outgoing.finish)
        self._computed_at = LoopClock().now()

    async def reduce(self) -> Contribution:
        """Wait until the members' contributions are reduced. Then all that hold the same part hold the same bytes."""
        if self._sending is None or self._reduced is None:
            raise RuntimeError("nothing was computed in this view")
        (transfer, outgoing), self._sending = self._sending, None
        await transfer.finished()
        if self._parts is not None:
            await self._parts.sum_tied(patience_s=self._patience_s)
        await self._exchange.finish()
        self.exposed_s = LoopClock().now() - self._computed_at
        self.communicating_s = transfer.communicating_s
        self._probe.event("step-reduced", engine=self._engine)
        contribution = Contribution(*await self._reduced.finish(outgoing.own), outgoing.own)
        if self._parts is None:
            return contribution
        contribution, units_s = await self._parts.join(contribution, self.work.unit_s, patience_s=self._patience_s)
        self.work.on_replica_timed(units_s)
        return contribution

    async def commit(self, step: int, square_sum: float) -> Applied:
        """Apply the reduced bytes. Must give the same bits on every member."""
        is_own = self._reduced is not None and self._reduced.is_own
        applied = await self._compute.run(self._engine.apply, step, square_sum, is_own=is_own)
        return applied if self._parts is None else replace(applied, loss=self._parts.loss)

    async def validate(self, first: int, count: int) -> tuple[float, int]:
        """Return the sum of the losses (nats) and the number of targets over validation micro-batches [first, first +
        count) of this member's replica. In a split model one member returns them, and the others return 0."""
        return await self.work.validate(first, count, patience_s=self._patience_s)

    def _bounds(self, step: int) -> Bounds:
        """The operations of a step, as ranges of the buffer: buckets of what may be encoded, then the exact rest."""
        codec_numel, bounds = self._engine.codec_numel, []
        for start, stop in self._engine.exchanged(step):
            lossy = min(stop, codec_numel) - start
            if lossy > 0:
                buckets = bucket_bounds(lossy, self._engine.reduce_buffer.itemsize, self._bucket_bytes)
                bounds += [(start + low, start + high) for low, high in buckets]
            if stop > codec_numel:
                bounds.append((max(start, codec_numel), stop))
        return bounds


Factory = Callable[[Engine, ComputeThread, Progress, int], Strategy]
"""Takes the engine, its thread, a callback for progress, and the bytes of a bucket (0: automatic)."""
