"""Buckets, how far gradients are final, and their sums in fixed point: exact, in any order, without silent overflow."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.compute.gradients import (
    FRACTION_BITS,
    bucket_bounds,
    largest,
    to_fixed,
    to_float,
)
from p2ptrain.compute.reduce_buffer import BackwardProgress, FixedSum


@given(
    numel=st.integers(0, 10**9),
    itemsize=st.sampled_from([2, 4, 8]),
    bucket_bytes=st.one_of(st.just(0), st.integers(1, 2**30)),
)
def test_buckets_cover_everything_in_order_and_are_about_equal(numel: int, itemsize: int, bucket_bytes: int) -> None:
    bounds = bucket_bounds(numel, itemsize, bucket_bytes)
    assert len(bounds) <= 256
    assert [start for start, _ in bounds] == [0, *(stop for _, stop in bounds)][: len(bounds)]
    assert (bounds[-1][1] if bounds else 0) == numel
    assert all(start < stop and start % 16 == 0 for start, stop in bounds)
    sizes = [stop - start for start, stop in bounds]
    assert not sizes or max(sizes) - min(sizes) <= 32


@given(sizes=st.lists(st.integers(0, 50), min_size=1, max_size=12), seed=st.integers(0, 2**32))
def test_the_front_ends_at_the_first_gradient_that_is_not_final(sizes: list[int], seed: int) -> None:
    stops = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    watch, told = BackwardProgress(stops, None), list[int]()
    for _ in range(2):
        watch.begin()
        marked: set[int] = set()
        for index in random.Random(seed).sample(range(len(sizes)), len(sizes)):
            marked.add(index)
            missing = min(set(range(len(sizes))) - marked, default=len(sizes))
            with watch.reporting_to(told.append):
                watch.gradient_final(index, None)
            assert told[-1] == (stops[missing - 1] if missing else 0)


fp32 = st.floats(-(2.0**15), 2.0**15, width=32)  # such as fit into one of eight


def by_python(value: float) -> int:
    """The format's definition, in exact arithmetic: Python rounds a fraction's ties to even."""
    return round(Fraction(value) * 2**FRACTION_BITS)


def nearest_fp32(value: Fraction) -> np.float32:
    """Rounded once, ties to even; a detour by fp64 would round twice."""
    about = np.float32(float(value))
    near = [about, np.nextafter(about, np.float32(-np.inf)), np.nextafter(about, np.float32(np.inf))]
    return min(near, key=lambda each: (abs(Fraction(float(each)) - value), int(each.view(np.uint32)) & 1))


def added(parts: list[list[float]], micro_batches: int, cuts: list[int]) -> FixedSum:
    gradients = torch.zeros(len(parts[0]))
    total = FixedSum(gradients, "cpu", micro_batches)
    total.begin()
    for part in parts:
        total.begin_micro_batch()
        assert not gradients.any()
        gradients.copy_(torch.tensor(part))
        for cut in sorted(min(cut, len(part)) for cut in cuts):
            total.add(cut)
        total.add(len(part))
    return total


@given(parts=st.lists(st.lists(fp32, min_size=3, max_size=3), min_size=1, max_size=8), cuts=st.lists(st.integers(0, 3)))
def test_sums_are_those_of_pythons_integers_in_any_order(parts: list[list[float]], cuts: list[int]) -> None:
    expected = [sum(by_python(part[place]) for part in parts) for place in range(3)]
    forward, backward = added(parts, 8, cuts), added(parts[::-1], 8, [])
    assert forward.total.tolist() == backward.total.tolist() == expected
    assert forward.fits
    plain = [to_fixed(np.array(part, np.float32), 8) for part in parts]
    assert np.sum([fixed for fixed, _ in plain], axis=0).tolist() == expected
    for place, number in enumerate(expected):
        true = sum(Fraction(part[place]) for part in parts)
        assert abs(Fraction(number, 2**FRACTION_BITS) - true) <= Fraction(len(parts), 2 ** (FRACTION_BITS + 1))
        assert to_float(np.array([number]))[0] == nearest_fp32(Fraction(number, 2**FRACTION_BITS))


@given(st.floats(2.0**-20, 2.0**15, width=32))
def test_values_from_2_to_the_minus_20_keep_every_bit(value: float) -> None:
    fixed, fits = to_fixed(np.array([value, -value], np.float32), 8)
    assert fits
    assert to_float(fixed).tolist() == [value, -value]


@pytest.mark.parametrize("micro_batches", [1, 3, 8, 1000, 65536])
def test_the_largest_contribution_never_overflows(micro_batches: int) -> None:
    most = float(np.nextafter(np.float32(largest(micro_batches) * (1 + 2.0**-23)), np.float32(0)))
    while most > largest(micro_batches):  # the limit of three lies between two numbers of fp32
        most = float(np.nextafter(np.float32(most), np.float32(0)))
    fixed, fits = to_fixed(np.array([most, -most], np.float32), micro_batches)
    assert fits
    assert micro_batches * int(fixed[0]) <= 2**62
    assert micro_batches * int(fixed[1]) >= -(2**62)
    assert added([[most, -most]], micro_batches, []).fits


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 2.0**15 + 0.01, -(2.0**15) - 0.01, 3e38])
@pytest.mark.parametrize("numel", [1, 40_000, 100_000])
def test_a_value_out_of_range_is_found_at_every_place(value: float, numel: int) -> None:
    for place in {0, numel // 2, numel - 1}:
        values = [0.5] * numel
        values[place] = value
        assert not added([[0.5] * numel, values, [0.5] * numel], 8, [1, numel // 3]).fits
        fixed, fits = to_fixed(np.array(values, np.float32), 8)
        assert not fits
        assert not fixed.any()


def test_a_new_step_forgets_values_out_of_range() -> None:
    total = added([[math.nan, 1.0]], 8, [])
    assert not total.fits
    total.begin()
    assert total.fits
    assert not total.total.any()
