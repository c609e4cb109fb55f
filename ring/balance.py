"""Who computes how many micro-batches: shares that follow the members' measured speed.

Integers only, so every member comes to the same shares from the same tokens, whatever its machine. Units are
microseconds a micro-batch; a step's *makespan* is the time of its slowest share, max over ranks of count x unit.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

GAIN_PERCENT = 5
"""Shares stay as they are unless the makespan falls by more: measured times scatter by about as much."""
PROBE_PERCENT = 5
"""So much of a ring's time may go into asking whether a member without work has become faster."""


class Shares:
    """Who computes what in one step of a view: runs of micro-batches in rank order. Immutable.

    Args:
        counts: of micro-batches, by rank.
        idle_steps: for how many steps in a row each member has had nothing to do.
    """

    def __init__(self, counts: Iterable[int], idle_steps: Iterable[int] | None = None) -> None:
        self.counts = tuple(counts)
        self._idle_steps = tuple(idle_steps) if idle_steps is not None else (0,) * len(self.counts)

    def of(self, rank: int) -> tuple[int, int]:
        """(first, count) of a member's micro-batches."""
        return sum(self.counts[:rank]), self.counts[rank]

    def packed(self) -> bytes:
        """As ``LedgerRow.counts``."""
        return struct.pack(f"!{len(self.counts)}I", *self.counts)

    def after(self, unit_us: Sequence[int]) -> Shares:
        """The shares of the next step, given what the tokens of this one say."""
        idle = [0 if count else steps + 1 for count, steps in zip(self.counts, self._idle_steps, strict=True)]
        return Shares(probed(balanced(sum(self.counts), unit_us, self.counts), unit_us, idle), idle)


def balanced(micro_batches: int, unit_us: Sequence[int], before: Sequence[int] = ()) -> list[int]:
    """Counts in rank order that sum to ``micro_batches``, with the least makespan that whole micro-batches allow.

    Args:
        unit_us: microseconds a micro-batch takes at each member; 0 where it is not known, which counts as the median of
            the known ones.
        before: the counts until now. They are kept where nothing better than ``GAIN_PERCENT`` is to be had, unless they
            are others' (their number or their sum differs).

    Raises:
        ValueError: no member, or a number that cannot be.
    """
    if not unit_us or min(unit_us) < 0 or micro_batches < 0:
        raise ValueError(f"shares of {micro_batches} micro-batches for units {list(unit_us)}")
    units = _known(unit_us)
    best = _fastest(micro_batches, units)
    if len(before) == len(units) and sum(before) == micro_batches and min(before) >= 0:
        now = _makespan(before, units)
        if 100 * _makespan(best, units) >= (100 - GAIN_PERCENT) * now:
            return list(before)
    return best


def probed(counts: Sequence[int], unit_us: Sequence[int], idle_steps: Sequence[int]) -> list[int]:
    """``counts``, or, where it is time to look whether a member without work became faster, with one for it.

    It takes the micro-batch from whoever is busy longest, and is asked so rarely that the waiting for it, if it is as
    slow as it was, costs at most ``PROBE_PERCENT`` of the time. One member is asked at a time, the lowest rank first.

    Args:
        idle_steps: for how many steps in a row each member has had nothing to do.
    """
    units = _known(unit_us)
    span = max(1, _makespan(counts, units))
    for rank, (count, idle) in enumerate(zip(counts, idle_steps, strict=True)):
        wait = max(0, units[rank] - span)
        if count == 0 and idle > 0 and PROBE_PERCENT * idle * span >= 100 * wait:
            busiest = max(range(len(counts)), key=lambda other: (counts[other] * units[other], -other))
            if counts[busiest] > 1:
                return [value + (other == rank) - (other == busiest) for other, value in enumerate(counts)]
    return list(counts)


def _known(unit_us: Sequence[int]) -> list[int]:
    known = sorted(unit for unit in unit_us if unit)
    usual = known[len(known) // 2] if known else 1
    return [unit or usual for unit in unit_us]


def _makespan(counts: Sequence[int], units: Sequence[int]) -> int:
    return max(count * unit for count, unit in zip(counts, units, strict=True))


def _fastest(micro_batches: int, units: Sequence[int]) -> list[int]:
    """The least time in which so many can be done, by bisection; then everyone does what fits into it.

    What fits may be more than is wanted, by less than the number of members that are done just in time: of those, the
    highest ranks do one less.
    """
    low, high = -1, micro_batches * min(units)  # the fastest alone
    while high - low > 1:
        middle = (low + high) // 2
        if sum(middle // unit for unit in units) >= micro_batches:
            high = middle
        else:
            low = middle
    counts = [high // unit for unit in units]
    surplus = sum(counts) - micro_batches
    for rank in reversed(range(len(units))):
        if surplus and counts[rank] and counts[rank] * units[rank] == high:
            counts[rank] -= 1
            surplus -= 1
    return counts
