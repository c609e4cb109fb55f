"""An engine that contributes wrong vectors on purpose, for ``p2ptrain chaos --attack``, the simulator and examples.

The attacks, on the vector that a member contributes:

- ``sign-flip``: ``FLIP`` times the true vector.
- ``scale``: ``SCALE`` times the true vector.
- ``noise``: normal noise, as long as the true vector times ``NOISE``.
- ``alie``: "A Little Is Enough" (Baruch et al., arXiv 1902.06156): the members' mean minus ``ALIE_Z`` standard
  deviations, coordinate by coordinate. The attacker does not see the others' vectors. It estimates the mean by its own
  true vector, and the variance by the squared differences of its own vector and the aggregate in earlier steps.
- ``label-flip``: the true vector of wrong targets: token t becomes the last token minus t.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np

from configs.schema import Job
from p2ptrain.core.errors import ConfigError
from p2ptrain.core.training import Applied, OnFinal
from roles.engine import Engine

ATTACKS = ("sign-flip", "scale", "noise", "alie", "label-flip")
FLIP, SCALE, NOISE, ALIE_Z = np.float32(-4), np.float32(100), np.float32(10), np.float32(1.5)
ALIE_STEPS = 10
"""Window of the moving average of a coordinate's variance."""


def check_attackable(job: Job) -> None:
    """Raise ``ConfigError`` if the members of this job contribute no whole vectors, which an attack could change."""
    if job.exact or job.strategy not in ("sync", "local", "federated"):
        remedy = "use the strategy sync, local or federated, and no exact mode"
        raise ConfigError("attacks change whole vectors of floating-point numbers", remedy=remedy)


def add_attack(engine: Engine, attack: str, *, micro_batches: int, seed: int) -> Engine:
    """Return ``engine`` with a wrong contribution.

    Args:
        attack: one of ``ATTACKS``; empty: return the engine as it is.
        micro_batches: of a global batch.
    """
    return cast(Engine, _Attacker(engine, attack, micro_batches, seed)) if attack else engine


class _Attacker:
    def __init__(self, engine: Any, attack: str, micro_batches: int, seed: int) -> None:
        self._engine, self._attack, self._micro_batches = engine, attack, micro_batches
        self._random = np.random.default_rng(seed)
        self._vector = engine.reduce_buffer[: -engine.scalars]  # the losses behind it stay true
        # Of 'alie', shape (numel,): this member's estimate of the aggregate, and its squared error.
        self._own_estimate = self._variance = np.zeros(0, np.float32)
        self._whole_step_factor = np.float32(1)  # times a contribution: as if it were of the whole global batch
        self._applied_steps = 0  # ALIE_STEPS at most
        if attack == "label-flip":
            engine.batches.corpus = _flip_labels(engine.batches.corpus)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def begin_step(self, step: int, first: int = 0, count: int = -1) -> bool:
        self._whole_step_factor = np.float32(self._micro_batches / max(count, 1))
        return bool(self._engine.begin_step(step, first, count))

    def micro_batch(self, step: int, index: int, on_final: OnFinal | None = None) -> None:
        self._engine.micro_batch(step, index)  # without on_final: ``finish_gradients`` still changes the vector

    def finish_gradients(self, on_final: OnFinal | None = None) -> None:
        self._engine.finish_gradients()
        vector = self._vector
        if self._attack == "sign-flip":
            vector *= FLIP
        elif self._attack == "scale":
            vector *= SCALE
        elif self._attack == "noise":
            length = np.linalg.norm(vector)
            vector[:] = self._random.standard_normal(vector.size, np.float32)
            vector *= NOISE * length / np.sqrt(np.float32(vector.size))
        elif self._attack == "alie":
            self._own_estimate = vector * self._whole_step_factor
            if self._applied_steps:
                vector -= ALIE_Z / self._whole_step_factor * np.sqrt(self._variance)

    def apply(self, step: int, square_sum: float, *, is_own: bool = False) -> Applied:
        if self._own_estimate.size:
            self._applied_steps = min(self._applied_steps + 1, ALIE_STEPS)
            # The ring has replaced the contribution by the aggregate.
            squared_error = (self._own_estimate - self._vector) ** 2
            variance = self._variance if self._variance.size else squared_error
            self._variance = variance + (squared_error - variance) / np.float32(self._applied_steps)
        return cast(Applied, self._engine.apply(step, square_sum, is_own=is_own))


def _flip_labels(corpus: Any) -> Any:
    from p2ptrain.compute.data import NO_TARGET, Corpus, TokenBatch

    class FlippedCorpus(Corpus):
        def batch(self, windows: Any) -> TokenBatch:
            batch = Corpus.batch(self, windows)
            if np.isin(windows, self.validation).any():
                return batch
            flipped = np.where(batch.targets == NO_TARGET, NO_TARGET, self.vocab_size - 1 - batch.targets)
            return replace(batch, targets=flipped)

    return FlippedCorpus(*(getattr(corpus, name) for name in Corpus.__slots__))
