"""The order of the samples: every training window exactly once per epoch, whoever asks for what."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2ptrain.compute.sampling import WindowSampler, permuted


@given(size=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
@settings(max_examples=60)
def test_a_permutation_at_every_size(size: int, key: int) -> None:
    result = permuted(np.arange(size), size, key)
    assert np.array_equal(np.sort(result), np.arange(size))


def test_it_shuffles() -> None:
    size = 20_000
    first, second = (permuted(np.arange(size), size, key) for key in (1, 2))
    assert abs(np.corrcoef(np.arange(size), first)[0, 1]) < 0.03
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.03
    assert abs(np.abs(np.diff(first)).mean() / size - 1 / 3) < 0.02  # the mean distance of two uniform numbers


@pytest.mark.parametrize(("windows", "sequences"), [(96, 3), (101, 3), (7, 8), (1, 2)])
def test_every_window_once_per_epoch(windows: int, sequences: int) -> None:
    sampler = WindowSampler(windows, 11)
    epochs = 5
    samples = range(0, epochs * windows, sequences)
    order = np.concatenate([sampler.numbered(first, sequences) for first in samples])
    runs = order[: epochs * windows].reshape(epochs, windows)
    assert (np.sort(runs, axis=1) == np.arange(windows)).all()
    if windows > 50:
        assert len({run.tobytes() for run in runs}) == epochs, "each epoch has its own order"


def test_the_order_is_the_same_for_ever() -> None:
    """Members of different versions must agree: a change here is a change of the protocol."""
    assert WindowSampler(1000, 42).numbered((3 * 8 + 2) * 4, 4).tolist() == [165, 519, 210, 609]
