"""Digest and squared norm of a step's reduced bytes, taken chunk by chunk while later bytes still travel."""

from __future__ import annotations

import asyncio

import numpy as np

from roles.compute_thread import ComputeThread
from roles.engine import Engine
from roles.snapshots import CHUNK_BYTES, digest_of, digest_of_chunks


class ReducedBytes:
    """What a member votes for: that the reduce buffer has these bytes, of this norm.

    Threads for hashing measure each chunk as soon as it is final. The rest is measured on the compute thread: the last
    chunk, or everything if sums are not final before the exchange ends. Use it on the event loop only.

    Args:
        is_own: this member is alone in its ring: the sum is its own contribution, whose norm is known.
    """

    def __init__(self, engine: Engine, compute: ComputeThread, *, is_own: bool) -> None:
        self._engine, self._compute, self.is_own = engine, compute, is_own
        self._data = engine.reduce_buffer.view(np.uint8).reshape(-1).data
        self._measured_bytes = 0
        self._measures: list[asyncio.Future[tuple[list[bytes], float]]] = []

    def final(self, numel: int) -> None:
        """The members' sums of elements [0, ``numel``) are final: begin to measure the whole chunks among them."""
        start, final_bytes = self._measured_bytes, numel * self._engine.reduce_buffer.itemsize
        self._measured_bytes = max(start, final_bytes // CHUNK_BYTES * CHUNK_BYTES)
        if self._measured_bytes > start:
            self._measures.append(self._compute.submit_hashing(self._measure, start, self._measured_bytes))

    async def finish(self, own: float) -> tuple[bytes, float]:
        """All is final. Returns the digest of all bytes (``digest_of``), and their squared norm for
        ``Contribution.part``. ``own``: squared norm of this member's contribution."""
        rest = self._compute.submit(self._measure, self._measured_bytes, len(self._data))
        digests: list[bytes] = []
        square_sum = own if self.is_own else 0.0
        for measure in (*self._measures, rest):
            made, squares = await measure
            digests += made
            square_sum += squares
        return digest_of_chunks(digests), square_sum

    def _measure(self, start: int, stop: int) -> tuple[list[bytes], float]:
        """Digests of the chunks of bytes [start, stop), and their squared norm. Both read a chunk while it is in the
        processor's cache."""
        itemsize, digests, square_sum = self._engine.reduce_buffer.itemsize, list[bytes](), 0.0
        for at in range(start, stop, CHUNK_BYTES):
            end = min(at + CHUNK_BYTES, stop)
            digests.append(digest_of(self._data[at:end]))
            if not self.is_own:  # each member squares all of it: so no other one can tell it a wrong norm
                square_sum += self._engine.partial_square_sum(at // itemsize, end // itemsize)
        return digests, square_sum
