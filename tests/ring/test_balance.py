"""Shares that follow speed, against brute force."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ring.token import PROBE_PERCENT, ShareRule, Shares, add_probe, balance_counts, by_size

UNITS = st.lists(st.integers(0, 1000), min_size=1, max_size=4)


def makespan(counts: tuple[int, ...] | list[int], units: list[int]) -> int:
    return max(count * unit for count, unit in zip(counts, units, strict=True))


def slowness(counts: tuple[int, ...] | list[int], units: list[int]) -> tuple[int, int]:
    """The makespan, and how many members need all of it."""
    last = makespan(counts, units)
    return last, sum(count * unit == last for count, unit in zip(counts, units, strict=True))


def known(units: list[int]) -> list[int]:
    measured = sorted(unit for unit in units if unit)
    return [unit or (measured[len(measured) // 2] if measured else 1) for unit in units]


def all_shares(micro_batches: int, members: int) -> list[tuple[int, ...]]:
    choices = itertools.product(range(micro_batches + 1), repeat=members - 1)
    return [(*some, micro_batches - sum(some)) for some in choices if sum(some) <= micro_batches]


@given(micro_batches=st.integers(0, 9), units=UNITS)
def test_no_other_shares_take_less_time(micro_batches: int, units: list[int]) -> None:
    counts = balance_counts(micro_batches, units)
    assert sum(counts) == micro_batches
    assert min(counts) >= 0
    best = min(slowness(shares, known(units)) for shares in all_shares(micro_batches, len(units)))
    assert slowness(counts, known(units)) == best


@pytest.mark.parametrize(
    ("units", "expected"),
    [
        ([10, 40], [7, 1]),  # a member four times slower does not set the pace
        ([0, 0, 0], [3, 3, 2]),
        ([10, 10, 0], [3, 3, 2]),  # a newcomer counts as the others
        ([10, 900], [8, 0]),
        ([20, 21, 20, 20], [2, 2, 2, 2]),
    ],
)
def test_some_shares_of_eight(units: list[int], expected: list[int]) -> None:
    assert balance_counts(8, units) == expected


@given(slow=st.integers(1, 2000), fast=st.integers(1, 1000))
def test_a_member_without_work_is_asked_now_and_then_at_a_bounded_cost(slow: int, fast: int) -> None:
    units, counts = [fast, slow], balance_counts(8, [fast, slow])
    if counts[1]:
        return
    idle, span = 1, makespan(counts, units)
    while add_probe(counts, units, [0, idle]) == counts:
        idle += 1
    assert add_probe(counts, units, [0, idle]) == [7, 1]
    lost = max(0, makespan([7, 1], units) - span)
    assert 100 * lost <= PROBE_PERCENT * idle * span
    assert idle == 1 or 100 * (slow - span) > PROBE_PERCENT * (idle - 1) * span, "not more rarely than that"


def test_shares_of_a_step_follow_from_those_before() -> None:
    shares = Shares([4, 4]).after([10, 200])
    assert [shares.of(rank) for rank in range(2)] == [(0, 8), (8, 0)]
    idle = 0
    while shares.counts == (8, 0):
        shares, idle = shares.after([10, 200]), idle + 1
    assert shares.counts == (7, 1), "is it still so slow?"
    assert PROBE_PERCENT * 80 * idle >= 100 * (200 - 80)


@given(sizes=st.lists(st.integers(0, 10**9), min_size=1, max_size=9).filter(any), spare=st.integers(0, 100))
def test_shares_by_size_are_proportional(sizes: list[int], spare: int) -> None:
    micro_batches = len(sizes) + spare
    counts = by_size(micro_batches, sizes)
    assert sum(counts) == micro_batches
    for count, size in zip(counts, sizes, strict=True):
        assert (count > 0) == (size > 0)
        assert count <= micro_batches * size / sum(sizes) + 1.001


def test_a_large_text_counts_as_no_more_than_allowed() -> None:
    assert by_size(100, [10, 10, 80]) == [10, 10, 80]
    assert by_size(100, [10, 10, 80], most=0.5) == [25, 25, 50]
    assert by_size(100, [5, 15, 80, 100], most=0.3) == [10, 30, 30, 30]
    assert by_size(100, [10, 10, 80], most=0.1) == [34, 33, 33]


def test_a_sample_is_drawn_anew_for_each_step_and_keeps_proportions() -> None:
    rule, counts = ShareRule(by_size=True, sample=2, seed=5), [10, 20, 30, 40]
    drawn = [rule.of_step(counts, step).counts for step in range(40)]
    assert drawn == [rule.of_step(counts, step).counts for step in range(40)]
    assert all(sum(shares) == 100 and sum(share > 0 for share in shares) == 2 for shares in drawn)
    assert len({tuple(share > 0 for share in shares) for shares in drawn}) == 6, "every pair has its turn"
    assert next(shares for shares in drawn if shares[0] and shares[3])[0] == 20
    assert max(ShareRule(True, 0.5, 2).of_step([1, 9, 90], 0).counts) == 50
    assert ShareRule(by_size=True).of_step(counts, 3).counts == tuple(counts)
