"""Sums on raw memory, compared with torch and with exact arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ring.dtypes import REDUCTIONS, check_reduction, divide, reduce_into, storage_dtype


def torch_sum(left: np.ndarray, right: np.ndarray) -> torch.Tensor:
    def tensor(stored: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(stored.view(np.int16).copy()).view(torch.bfloat16)

    return tensor(left) + tensor(right)


def assert_same_as_torch(left: np.ndarray, right: np.ndarray) -> None:
    expected = torch_sum(left, right)
    reduce_into(left, left, right, "bfloat16")
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
    reduce_into(dst, dst, np.array([0, 0, 0, largest, infinity | 0x8000], np.uint16), "bfloat16")
    assert dst.tolist() == [0x7FC0, 0x7FC0, 0x7FC0, infinity, 0x7FC0]


@pytest.mark.parametrize("name", ["sum", "product", "min", "max"])
def test_bfloat16_is_reduced_as_torch_does(name):
    draw = np.random.default_rng(2)
    left, right = (torch.from_numpy(draw.standard_normal(1000).astype(np.float32)).bfloat16() for _ in range(2))
    operation = {"sum": torch.add, "product": torch.mul, "min": torch.minimum, "max": torch.maximum}[name]
    out = np.empty(1000, np.uint16)
    stored = [tensor.view(torch.uint16).numpy() for tensor in (left, right)]
    before = [array.copy() for array in stored]
    reduce_into(out, *stored, "bfloat16", REDUCTIONS[name])
    assert torch.equal(torch.from_numpy(out).view(torch.bfloat16), operation(left, right))
    assert all(np.array_equal(*pair) for pair in zip(stored, before, strict=True))


def test_means_and_what_has_none():
    for dtype in ("float64", "float32", "float16"):
        array = np.array([3, -5, 0], dtype)
        divide(array, 2, dtype)
        assert array.tolist() == [1.5, -2.5, 0]
    stored = torch.tensor([3, -5, 0], dtype=torch.bfloat16).view(torch.uint16).numpy()
    divide(stored, 2, "bfloat16")
    assert torch.from_numpy(stored).view(torch.bfloat16).tolist() == [1.5, -2.5, 0]
    with pytest.raises(ValueError, match="a mean is for floating-point elements, these are int8"):
        divide(np.ones(3, np.int8), 2, "int8")
    with pytest.raises(ValueError, match="bitwise_or is for integers, the elements are bfloat16"):
        check_reduction("bfloat16", np.bitwise_or)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_overflow_and_nan_are_values_not_warnings(dtype):
    limit = np.finfo(dtype).max
    dst = np.array([limit, np.inf, np.nan], dtype)
    reduce_into(dst, dst, np.array([limit, -np.inf, 0], dtype), dtype)
    assert np.isinf(dst[0])
    assert np.isnan(dst[1:]).all()
    limits = np.iinfo("int32")
    integers = np.array([1, limits.max], "int32")
    reduce_into(integers, integers, np.array([2, 1], "int32"), "int32")
    assert integers.tolist() == [3, limits.min], "integers wrap around"


def test_an_unknown_type_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="'complex64' cannot be reduced; known types are float64"):
        storage_dtype("complex64")
