"""Strategy ``clipped``: as ``sync``, but each worker limits every number of its gradient before the ring sums them."""

from __future__ import annotations

import math

import numpy as np

from configs.schema import Profile
from roles.compute_thread import ComputeThread
from roles.engine import Engine
from roles.strategies.interface import Exchange, Progress, Work
from roles.strategies.sync import GradientSum, MicroBatches


class ClippedSum(GradientSum):
    """``limit``: the largest magnitude that a worker contributes."""

    sums_in_place = False  # ``prepare`` changes what the engine computed

    def __init__(self, engine: Engine, profile: Profile, limit: float) -> None:
        super().__init__(engine, profile.plugins)
        self._limit = np.float32(limit)

    def prepare(self, start: int, stop: int) -> float:
        square_sum = super().prepare(start, stop)
        if start >= self._engine.codec_numel or not math.isfinite(square_sum):
            return square_sum  # the loss, and the gradients of vectors: they come last
        part = self._engine.reduce_buffer[start:stop]
        np.clip(part, -self._limit, self._limit, out=part)
        return float(np.square(part, dtype=np.float64).sum())


def clipped(
    profile: Profile, engine: Engine, compute: ComputeThread, progress: Progress, *, limit: float = 1e-3
) -> tuple[Work, Exchange, None]:
    """The work is that of ``sync``: gradients of micro-batches. None: every worker holds the whole model."""
    return MicroBatches(engine, compute, progress), ClippedSum(engine, profile, limit), None
