"""Error feedback in a ring of several members, and the errors that are stated for each codec."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from ring.codecs import CODECS, codec_named
from ring.codecs.kinds import F32, Codec
from ring.collectives import owned_range
from ring.planning.ring_plan import STATED_ERROR


def exchange(gradients: Sequence[F32], codecs: Sequence[Codec], residuals: Sequence[F32] | None = None) -> F32:
    """The sum of n gradients of shape (numel,), as the ring with a codec makes it. Each member encodes each element
    once, so ``residuals``, of each member and updated, hold all that encoding lost; None: what is lost is lost."""
    n, numel = len(gradients), gradients[0].size
    result = np.zeros(numel, np.float32)
    for owner in range(n):
        start, stop = owned_range(owner, n, numel)
        total = result[start:stop]
        for hop in range(1, n + 1):
            member = (owner + hop) % n
            value = gradients[member][start:stop] + total
            if residuals is not None:
                value += residuals[member][start:stop]
            encoded = np.empty(codecs[member].encoded_bytes(value.size), np.uint8)
            codecs[member].encode(value, encoded)
            codecs[member].decode(encoded, total)
            if residuals is not None:
                np.subtract(value, total, out=residuals[member][start:stop])
    return result


def relative_error(got: np.ndarray, exact: np.ndarray) -> float:
    return float(np.linalg.norm(got.astype(np.float64) - exact) / np.linalg.norm(exact))


def gradients_of(n: int, numel: int, seed: int = 0) -> list[np.ndarray]:
    draw = np.random.default_rng(seed)
    return [draw.standard_t(3, numel).astype(np.float32) for _ in range(n)]


@pytest.mark.parametrize("name", ["int8", "int4", "topk"])
def test_the_running_mean_converges_with_feedback_and_not_without(name):
    n = 8
    gradients = gradients_of(n, 1500)
    exact = np.asarray(np.sum(gradients, axis=0, dtype=np.float64))
    codecs = [codec_named(name) for _ in range(n)]
    residuals, total, errors = [np.zeros(1500, np.float32) for _ in range(n)], np.zeros(1500), {}
    for turn in range(1, 121):
        total += exchange(gradients, codecs, residuals)
        errors[turn] = relative_error(total / turn, exact)
    without = relative_error(exchange(gradients, codecs), exact)  # every round gives these same bits
    assert errors[120] < errors[30] / 2, "the error of a mean over T rounds falls as 1 / T"
    assert errors[120] < without / 5
    assert exchange(gradients, codecs).tobytes() == exchange(gradients, codecs).tobytes()


@pytest.mark.parametrize("name", CODECS)
def test_the_stated_errors_hold_and_are_not_idle(name):
    worst = 0.0
    for n in (2, 8):
        normal = [np.random.default_rng([n, rank]).standard_normal(1 << 16).astype(np.float32) for rank in range(n)]
        for gradients in (normal, gradients_of(n, 1 << 16)):
            exact = np.asarray(np.sum(gradients, axis=0, dtype=np.float64))
            worst = max(worst, relative_error(exchange(gradients, [codec_named(name) for _ in range(n)]), exact))
    assert worst <= STATED_ERROR[name] <= 2 * worst
