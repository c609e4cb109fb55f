"""Synchronous data parallelism: ``MicroBatches`` computes gradients, and ``GradientSum`` has the ring sum them.

The error of a lossy codec in this member's contribution stays in its *residual*, and is added to the next step's.
The residual is not part of the replicated state: it changes what a member contributes, never how the reduced bytes,
equal everywhere, are applied. So it may be dropped at any time, at the cost of one step's rounding. It is dropped with
every new view, hence after every aborted step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from configs.schema import Plugins
from p2ptrain.core.training import OnFinal
from ring.codecs import Codec, codec_named
from ring.session import RingSession
from roles.compute_thread import ComputeThread
from roles.engine import Engine
from roles.strategies.interface import Bounds, Exchange, Progress, RingPiece, Work


def codec_of(session: RingSession, plugins: Plugins) -> Codec | None:
    """Return the codec of the session's view; None for plain gradients. Raises as ``codec_named``."""
    name = session.view.codec
    return None if name == "fp32" else codec_named(name, plugins.settings_of(name))


class MicroBatches(Work):
    """Whole micro-batches, one after the other."""

    def __init__(self, engine: Engine, compute: ComputeThread, progress: Progress) -> None:
        self._engine, self._compute, self._progress = engine, compute, progress

    async def compute(self, step: int, first: int, count: int, on_final: OnFinal | None, *, patience_s: float) -> None:
        passes = self._passes(first, count)
        for number, (index, counts) in enumerate(passes, start=1):
            at_the_end = on_final if number == len(passes) else None
            await self._compute.run(self._micro_batch, step, index, at_the_end, counts)
            self._progress()

    async def validate(self, first: int, count: int, *, patience_s: float) -> tuple[float, int]:
        total, targets = 0.0, 0
        for index, counts in self._passes(first, count):
            loss, number = await self._compute.run(self._engine.validate, index)
            if counts:
                total, targets = total + loss, targets + number
            self._progress()
        return total, targets

    def _passes(self, first: int, count: int) -> Sequence[tuple[int, bool]]:
        """This member's passes for a share: the micro-batch's index, and whether it counts."""
        return [(index, True) for index in range(first, first + count)]

    def _micro_batch(self, step: int, index: int, on_final: OnFinal | None, counts: bool) -> None:
        self._engine.micro_batch(step, index, on_final)


class GradientSum(Exchange):
    """The ring sums the members' contributions in the reduce buffer, in the codec of the view."""

    sums_in_place = True

    def __init__(self, engine: Engine, plugins: Plugins) -> None:
        self._engine, self._plugins = engine, plugins
        self._codec: Codec | None = None
        self._residual: npt.NDArray[np.float32] | None = None
        self.scores = {}  # only robust rules score members

    async def begin_view(self, ring: RingSession) -> None:
        codec = self._codec = None if self._engine.exact else codec_of(ring, self._plugins)
        feedback = codec is not None and codec.feedback
        self._residual = np.zeros(self._engine.codec_numel, np.float32) if feedback else None

    def begin_step(self, step: int, count: int, bounds: Bounds) -> list[RingPiece]:
        buffer, residual = self._engine.reduce_buffer, self._residual
        return [
            RingPiece(buffer[start:stop], self._codec, residual[start:stop] if residual is not None else None)
            if start < self._engine.codec_numel
            else RingPiece(buffer[start:stop])
            for start, stop in bounds
        ]

    def prepare(self, start: int, stop: int) -> float:
        return self._engine.contributed_square_sum(start, stop)
