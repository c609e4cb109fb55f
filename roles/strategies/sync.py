"""Synchronous data parallelism: each member computes its micro-batches, one all-reduce, one identical step."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import xxhash

from ring.collectives import owned_range
from ring.session import RingSession
from roles.compute_thread import ComputeThread
from roles.engine import Applied, Engine
from roles.strategies import Contribution


class SyncStrategy:
    """The global batch is fixed; who computes which part of it changes nothing but the time."""

    def __init__(self, engine: Engine, compute: ComputeThread, progress: Callable[[], None]) -> None:
        self._engine = engine
        self._compute = compute
        self._progress = progress

    async def compute(self, step: int, first: int, count: int) -> None:
        await self._compute.run(self._engine.begin_step, step)
        for index in range(first, first + count):
            await self._compute.run(self._engine.micro_batch, step, index)
            self._progress()
        await self._compute.run(self._engine.finish_gradients)

    async def reduce(self, session: RingSession, *, patience_s: float) -> Contribution:
        buffer = self._engine.reduce_buffer
        await session.all_reduce(buffer, patience_s=patience_s)
        # Each member squares only the chunk it owns; the tokens bring the parts together, so clipping costs 1/n.
        start, stop = owned_range(session.rank, session.size, buffer.size)
        return await self._compute.run(self._summarize, start, stop)

    async def commit(self, step: int, square_sum: float) -> Applied:
        return await self._compute.run(self._engine.apply, step, square_sum)

    def _summarize(self, start: int, stop: int) -> Contribution:
        digest = xxhash.xxh3_128_digest(self._engine.reduce_buffer.view(np.uint8).data)
        return Contribution(digest, self._engine.partial_square_sum(start, stop))
