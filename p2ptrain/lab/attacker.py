"""An engine that contributes wrong vectors on purpose, for ``p2ptrain chaos --attack``, the simulator and examples.

The attacks, on the vector that a member contributes:

- ``sign-flip``: ``FLIP`` times the true vector.
- ``scale``: ``SCALE`` times the true vector.
- ``noise``: normal noise, as long as the true vector times ``NOISE``.
- ``alie``: "A Little Is Enough" (Baruch et al., arXiv 1902.06156): mean minus ``ALIE_Z`` standard deviations of each
  coordinate over the members. The attacker does not see the others' vectors. It takes its own true vector for the mean,
  and estimates the deviation from how far its own was from the aggregate in the steps before.
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


def check_attacked(job: Job) -> None:
    """Raise ``ConfigError`` if a member of such a job contributes no vector that could be changed."""
    if job.exact or job.strategy not in ("sync", "local", "federated"):
        remedy = "use the strategy sync, local or federated, and no exact mode"
        raise ConfigError("attacks change whole vectors of floating-point numbers", remedy=remedy)


def attacking(engine: Engine, attack: str, *, micro_batches: int, seed: int) -> Engine:
    """The engine, but for what it contributes. ``attack``: one of ``ATTACKS``; empty: none. ``micro_batches``: of a
    global batch."""
    return cast(Engine, _Attacker(engine, attack, micro_batches, seed)) if attack else engine


class _Attacker:
    def __init__(self, engine: Any, attack: str, micro_batches: int, seed: int) -> None:
        self._engine, self._attack, self._micro_batches = engine, attack, micro_batches
        self._random, self._scale = np.random.default_rng(seed), np.float32(1)
        self._vector = engine.reduce_buffer[: -engine.scalars]
        self._own = self._variance = np.zeros(0, np.float32)  # with 'alie', shape (numel,)
        self._applied_steps = 0
        if attack == "label-flip":
            engine.batches.corpus = _with_wrong_targets(engine.batches.corpus)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def begin_step(self, step: int, first: int = 0, count: int = -1) -> bool:
        self._scale = np.float32(self._micro_batches / max(count, 1))  # of a contribution that stands for the step
        return bool(self._engine.begin_step(step, first, count))

    def micro_batch(self, step: int, index: int, on_final: OnFinal | None = None) -> None:
        self._engine.micro_batch(step, index)  # nothing is final before ``finish_gradients``

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
            self._own = vector * self._scale
            if self._applied_steps:
                vector -= ALIE_Z / self._scale * np.sqrt(self._variance)

    def apply(self, step: int, square_sum: float) -> Applied:
        if self._own.size:
            self._applied_steps = min(self._applied_steps + 1, ALIE_STEPS)
            square = (self._own - self._vector) ** 2
            before = self._variance if self._variance.size else square
            self._variance = before + (square - before) / np.float32(self._applied_steps)
        return cast(Applied, self._engine.apply(step, square_sum))


def _with_wrong_targets(corpus: Any) -> Any:
    from p2ptrain.compute.data import NO_TARGET, Corpus, TokenBatch

    class Wrong(Corpus):
        def batch(self, windows: Any) -> TokenBatch:
            right = Corpus.batch(self, windows)
            if np.isin(windows, self.validation).any():
                return right
            wrong = np.where(right.targets == NO_TARGET, NO_TARGET, self.vocab_size - 1 - right.targets)
            return replace(right, targets=wrong)

    return Wrong(*(getattr(corpus, name) for name in Corpus.__slots__))
