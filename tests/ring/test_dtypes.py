"""Sums on raw memory, compared with torch and with exact arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ring.dtypes import storage_dtype, sum_into


def torch_sum(left: np.ndarray, right: np.ndarray) -> torch.Tensor:
    def tensor(stored: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(stored.view(np.int16).copy()).view(torch.bfloat16)

    return tensor(left) + tensor(right)


def assert_same_as_torch(left: np.ndarray, right: np.ndarray) -> None:
    expected = torch_sum(left, right)
    sum_into(left, right, "bfloat16")
    got = torch.from_numpy(left.view(np.int16)).view(torch.bfloat16)
    assert torch.equal(torch.isnan(got), torch.isnan(expected))
    known = ~torch.isnan(expected)
    assert torch.equal(got.view(torch.int16)[known], expected.view(torch.int16)[known])


def test_bfloat16_adds_as_torch_does_for_every_value():
    every = np.arange(2**16, dtype=np.uint16)
    draw = np.random.default_rng(0)
    for _ in range(4):
        assert_same_as_torch(draw.permutation(every), draw.permutation(every))
    nearby = every ^ draw.integers(0, 512, every.size).astype(np.uint16)  # close exponents, where rounding ties are
    assert_same_as_torch(every.copy(), nearby)


def test_bfloat16_keeps_nan_and_overflows_to_infinity():
    largest, infinity = 0x7F7F, 0x7F80
    dst = np.array([0x7FFF, 0xFFFF, 0x7F81, largest, infinity], np.uint16)
    sum_into(dst, np.array([0, 0, 0, largest, infinity | 0x8000], np.uint16), "bfloat16")
    assert dst.tolist() == [0x7FC0, 0x7FC0, 0x7FC0, infinity, 0x7FC0]


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_floats_add_as_torch_does(dtype):
    draw = np.random.default_rng(1)
    left, right = (draw.standard_normal(1000).astype(dtype) for _ in range(2))
    expected = (torch.from_numpy(left.copy()) + torch.from_numpy(right)).numpy()
    sum_into(left, right, dtype)
    assert left.tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", ["int64", "int32", "int8", "uint8"])
def test_integers_add_exactly_and_wrap_around(dtype):
    limits = np.iinfo(dtype)
    dst = np.array([1, limits.max, limits.min], dtype)
    sum_into(dst, np.array([2, 1, 0], dtype), dtype)
    assert dst.tolist() == [3, limits.min, limits.min]


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_overflow_and_nan_are_values_not_warnings(dtype):
    limit = np.finfo(dtype).max
    dst = np.array([limit, np.inf, np.nan], dtype)
    sum_into(dst, np.array([limit, -np.inf, 0], dtype), dtype)
    assert np.isinf(dst[0])
    assert np.isnan(dst[1:]).all()


def test_an_unknown_type_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="'complex64' cannot be summed; known types are float64"):
        storage_dtype("complex64")
