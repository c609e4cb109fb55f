"""Error feedback in a ring of several members, and the table of errors."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ring.codecs import CODECS, codec_named
from ring.codecs.choice import STATED_ERROR
from tests.ring.codec_error import (
    DISTRIBUTIONS,
    ErrorRow,
    error_table,
    exchange,
    mean_exchange,
    relative_error,
)


def gradients_of(n: int, numel: int, seed: int = 0) -> list[np.ndarray]:
    draw = np.random.default_rng(seed)
    return [draw.standard_t(3, numel).astype(np.float32) for _ in range(n)]


@pytest.mark.parametrize("name", CODECS)
@settings(max_examples=30)
@given(n=st.integers(2, 8), numel=st.integers(1, 700), rounds=st.integers(1, 4), seed=st.integers(0, 1000))
def test_what_came_out_and_what_is_kept_back_is_what_went_in(name, n, numel, rounds, seed):
    codecs = [codec_named(name) for _ in range(n)]
    residuals = [np.zeros(numel, np.float32) for _ in range(n)]
    put_in, came_out = np.zeros(numel), np.zeros(numel)
    for turn in range(rounds):
        gradients = gradients_of(n, numel, seed + turn)
        put_in += np.sum(gradients, axis=0, dtype=np.float64)
        came_out += exchange(gradients, codecs, residuals)
    came_out += np.sum(residuals, axis=0, dtype=np.float64)
    largest = 1 + np.abs(put_in).max() + max(np.abs(residual).max() for residual in residuals)
    assert np.abs(came_out - put_in).max() <= 2.0**-23 * n * rounds * largest


@pytest.mark.parametrize("n", [2, 5, 8])
@pytest.mark.parametrize("name", ["int8", "int4", "topk"])
def test_the_running_mean_converges_with_feedback_and_not_without(name, n):
    gradients = gradients_of(n, 1500)
    exact = np.asarray(np.sum(gradients, axis=0, dtype=np.float64))
    codecs = [codec_named(name) for _ in range(n)]
    early, late = (relative_error(mean_exchange(gradients, codecs, rounds), exact) for rounds in (50, 200))
    without = relative_error(exchange(gradients, codecs), exact)  # every round gives these same bits
    assert late < early / 2, "the error of a mean over T rounds falls as 1 / T"
    assert late < without / 5
    assert exchange(gradients, codecs).tobytes() == exchange(gradients, codecs).tobytes()


@pytest.fixture(scope="module")
def table() -> list[ErrorRow]:
    return list(error_table(codec_named, CODECS, members=(2, 8), numel=1 << 16, rounds=10))


def test_the_table_has_every_codec_distribution_and_ring(table):
    assert [(row.distribution, row.members, row.codec) for row in table] == [
        (distribution, n, name) for distribution in DISTRIBUTIONS for n in (2, 8) for name in CODECS
    ]
    assert all(row.bytes_per_element == codec_named(row.codec).encoded_bytes(1 << 16) / (1 << 16) for row in table)


def test_the_stated_errors_hold_and_are_not_idle(table):
    for name in CODECS:
        worst = max(row.one_shot for row in table if row.codec == name)
        assert worst <= STATED_ERROR[name] <= 2 * worst


@pytest.mark.parametrize(
    ("codec", "distribution", "one_shot", "averaged"),
    [
        ("fp32", "gaussian", 1e-7, 1e-7),
        ("bf16", "gaussian", 0.004, 0.004),
        ("fp16", "gaussian", 0.0005, 0.0005),
        ("int8", "gaussian", 0.014, 0.0014),
        ("int8", "heavy-tailed", 0.022, 0.0025),
        ("int4", "gaussian", 0.2, 0.02),
        ("int4", "heavy-tailed", 0.25, 0.03),
        ("topk", "gaussian", 0.98, 0.9),
        ("topk", "heavy-tailed", 0.9, 0.75),
    ],
)
def test_errors_of_eight_members_stay_below_bounds(table, codec, distribution, one_shot, averaged):
    (row,) = (row for row in table if (row.codec, row.distribution, row.members) == (codec, distribution, 8))
    assert row.one_shot <= one_shot
    assert row.averaged <= averaged


def test_a_lossless_exchange_is_the_sum():
    gradients = [np.array([1, 2, 3], np.float32), np.array([10, 20, 30], np.float32)]
    assert exchange(gradients, [codec_named("fp32")] * 2).tolist() == [11, 22, 33]
