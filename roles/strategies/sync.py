"""Synchronous data parallelism: each member computes its micro-batches, one all-reduce, one identical step.

The gradients are reduced in buckets (``compute.buckets``), each as soon as the backward pass of this member's last
micro-batch has made it, so most of the exchange is hidden behind that pass. A codec may carry the buckets in fewer
bytes; the loss and the vectors (norms, biases) follow as a small operation of their own, exact whatever the codec.

What a lossy codec left out of this member's contributions is kept in its *residual* and goes out with the next step's.
The residual is no part of the replicated state: it changes what a member contributes, never how the reduced bytes,
which are equal everywhere, are applied. So it may be dropped at any time at the cost of one step's rounding, and it is:
with every new view, hence after every step that was aborted.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Callable

import numpy as np
import xxhash

from p2ptrain.compute.buckets import bucket_bounds
from p2ptrain.core.world import LoopClock
from ring.collectives import owned_range
from ring.session import RingSession
from roles.compute_thread import ComputeThread
from roles.engine import Applied, Engine
from roles.strategies import Contribution
from roles.strategies.exchange import Exchange, Piece, codec_of


class SyncStrategy:
    """The global batch is fixed; who computes which part of it changes nothing but the time."""

    def __init__(
        self, engine: Engine, compute: ComputeThread, progress: Callable[[], None], bucket_bytes: int = 0
    ) -> None:
        self._engine = engine
        self._compute = compute
        self._progress = progress
        self._bounds = bucket_bounds(engine.exact_from, engine.reduce_buffer.itemsize, bucket_bytes)
        self._stops = [stop for _, stop in self._bounds]
        self._session: RingSession | None = None
        self._pieces: list[Piece] = []
        self._exchange: Exchange | None = None
        self._computed_at = 0.0
        self._now = LoopClock().now
        self.exposed_s = self.communicating_s = 0.0

    async def compute(self, step: int, first: int, count: int, session: RingSession, *, patience_s: float) -> None:
        if session is not self._session:
            self._session, self._pieces = session, self._pieces_for(session)
        exchange = self._exchange = Exchange(session, self._pieces, patience_s=patience_s)
        loop = asyncio.get_running_loop()
        told = 0

        def on_final(numel: int) -> None:
            """On the thread of the backward pass: wake the loop only where one more bucket is whole."""
            nonlocal told
            whole = bisect_right(self._stops, numel)
            if whole > told:
                told = whole
                loop.call_soon_threadsafe(exchange.release, whole)

        await self._compute.run(self._engine.begin_step, step)
        last = first + count - 1
        for index in range(first, first + count):
            await self._compute.run(self._engine.micro_batch, step, index, on_final if index == last else None)
            self._progress()
        await self._compute.run(self._engine.finish_gradients, on_final)
        exchange.release(len(self._pieces))
        self._computed_at = self._now()

    async def reduce(self, session: RingSession) -> Contribution:
        if self._exchange is None or session is not self._session:
            raise RuntimeError("nothing was computed in this session")
        exchange, self._exchange = self._exchange, None
        await exchange.finished()
        self.exposed_s = self._now() - self._computed_at
        self.communicating_s = exchange.communicating_s
        # Each member squares only the chunk it owns; the tokens bring the parts together, so clipping costs 1/n.
        start, stop = owned_range(session.rank, session.size, self._engine.reduce_buffer.size)
        return await self._compute.run(self._summarize, start, stop)

    async def commit(self, step: int, square_sum: float) -> Applied:
        return await self._compute.run(self._engine.apply, step, square_sum)

    def _pieces_for(self, session: RingSession) -> list[Piece]:
        """The operations of every step in this session."""
        buffer, exact_from = self._engine.reduce_buffer, self._engine.exact_from
        codec = codec_of(session)
        residual = np.zeros(exact_from, np.float32) if codec is not None and codec.feedback else None
        buckets = [
            Piece(buffer[start:stop], codec, residual[start:stop] if residual is not None else None)
            for start, stop in self._bounds
        ]
        return [*buckets, Piece(buffer[exact_from:])]

    def _summarize(self, start: int, stop: int) -> Contribution:
        digest = xxhash.xxh3_128_digest(self._engine.reduce_buffer.view(np.uint8).data)
        return Contribution(digest, self._engine.partial_square_sum(start, stop), 0.0)
