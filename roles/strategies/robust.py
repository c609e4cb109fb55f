"""The exchange with a robust rule: members gather all vectors, and each applies the same rule (``compute.robust``).

As in ``sync`` each bucket enters the ring as soon as it is final, here as an all-gather in place. A member's vector is
its contribution divided by its share of the step. So it stands for the whole step: a mean gradient, or how far a model
came. The aggregate replaces the sum in the reduce buffer. So digests, norms, a redo and the lineage are those
of the aggregate.

'centered_clipping' begins at the aggregate of the step before, in a view's first step at zero: a new member has none.

A member that changes what it passes on is noticed, because the digests differ, but not withstood: the step is aborted.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from configs.schema import Robust
from p2ptrain.compute.robust import Scores, aggregate, aggregate_scalars
from ring.session import RingSession
from roles.compute_thread import ComputeThread
from roles.engine import Engine
from roles.strategies.interface import Bounds, Exchange, RingPiece
from wire.job_messages import distance_key, excluded_key

MEASURED_EVERY = 10
"""Steps from one measurement of the vectors' distances to the next."""


def scores_of(found: Scores, ranks: Sequence[int]) -> dict[str, float]:
    """The scores as in ``wire.job_messages.StepMetrics``. ``ranks``: whose vectors they are."""
    usual = median(found.distances or [0.0])
    left_out = {excluded_key(rank): float(place in found.excluded) for place, rank in enumerate(ranks)}
    far = zip(ranks, found.distances, strict=False)  # not always measured
    return left_out | {distance_key(rank): distance / usual for rank, distance in far if usual > 0}


def combine(
    robust: Robust,
    pieces: Sequence[npt.NDArray[Any]],
    buffer: npt.NDArray[Any],
    scalars: int,
    center: npt.NDArray[Any] | None,
    *,
    measured: bool,
) -> tuple[Scores, npt.NDArray[Any] | None]:
    """Put the aggregate of the vectors into ``buffer``. Returns what the rule made of them, and the next ``center``.

    ``pieces``: of all vectors, one vector per row; the last one ends with the ``scalars``.
    """
    *first, last = pieces
    rule, vector = robust.rule, buffer[:-scalars]
    found = aggregate(rule, robust.byzantine, [*first, last[:, :-scalars]], vector, center, measured=measured)
    buffer[-scalars:] = aggregate_scalars(last[:, -scalars:], rule)
    return found, vector.copy() if keeps_center(robust) else None


def keeps_center(robust: Robust) -> bool:
    return robust.rule == "centered_clipping"


class GatheredVectors(Exchange):
    """``micro_batches``: of a global batch."""

    def __init__(self, engine: Engine, compute: ComputeThread, robust: Robust, micro_batches: int) -> None:
        self._engine, self._compute, self._robust, self._micro_batches = engine, compute, robust, micro_batches
        self._rank, self._members = 0, 1
        self._vectors: npt.NDArray[Any] = np.empty(0, np.float32)
        self._center: npt.NDArray[Any] | None = None
        self._gathered: list[npt.NDArray[Any]] = []
        self._rows: dict[int, npt.NDArray[Any]] = {}  # this member's, by the start of the range
        self._scale = np.float32(1)
        self._measured = False
        self.scores = {}

    async def begin_view(self, ring: RingSession) -> None:
        from p2ptrain.compute.device import HOST, check_memory  # torch with it, which the simulator does without

        buffer, self._rank, self._members = self._engine.reduce_buffer, ring.rank, ring.size
        # Nothing may refer to the vectors of the view before: their memory is needed.
        self._vectors, self._gathered, self._rows, self._center = np.empty(0, np.float32), [], {}, None
        what = f"robust.rule = {self._robust.rule!r} with the vectors of {ring.size} members"
        need_bytes = (ring.size + keeps_center(self._robust)) * buffer.nbytes
        check_memory(need_bytes, HOST, what, "choose a smaller [model], or fewer job.workers")
        self._vectors = np.empty(ring.size * buffer.size, buffer.dtype)

    def begin_step(self, step: int, count: int, bounds: Bounds) -> list[RingPiece]:
        members = self._members
        self._gathered = [
            self._vectors[members * start : members * stop].reshape(members, stop - start) for start, stop in bounds
        ]
        self._rows = {start: piece[self._rank] for (start, _), piece in zip(bounds, self._gathered, strict=True)}
        self._scale = np.float32(self._micro_batches / max(count, 1))
        # Only rank 0 reports, and seldom: it takes a pass over all vectors.
        self._measured = self._rank == 0 and step % MEASURED_EVERY == 0
        return [RingPiece(piece.reshape(-1), gathered=True) for piece in self._gathered]

    def prepare(self, start: int, stop: int) -> float:
        """Put a final range of the contribution, as if the member had computed the whole step, among the vectors."""
        own = self._engine.contributed_square_sum(start, stop) * float(self._scale) ** 2
        part = self._engine.reduce_buffer[start:stop]
        part *= self._scale
        self._rows[start][:] = part
        return own

    async def finish(self) -> None:
        await self._compute.run(self._aggregate)

    def _aggregate(self) -> None:
        buffer, scalars, pieces = self._engine.reduce_buffer, self._engine.scalars, self._gathered
        found, self._center = combine(self._robust, pieces, buffer, scalars, self._center, measured=self._measured)
        self.scores = scores_of(found, range(len(pieces[-1])))
