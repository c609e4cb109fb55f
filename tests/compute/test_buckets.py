"""Buckets, and how far the gradients are final."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.compute.gradients import (
    Ferry,
    Watch,
    bucket_bounds,
)


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


def test_buckets_that_choose_their_size() -> None:
    for total_bytes in (1000, (1 << 20), 3_400_000, 10**8, 10**10):
        bounds = bucket_bounds(total_bytes // 4, 4)
        assert len(bounds) == min(max(total_bytes // (1 << 20), 1), 16)
        assert len(bounds) == 1 or all((stop - start) * 4 >= (1 << 20) - 64 for start, stop in bounds)


def test_buckets_of_a_given_size() -> None:
    assert bucket_bounds(1000, 4, 1024) == [(0, 240), (240, 496), (496, 736), (736, 1000)]
    assert len(bucket_bounds(10**6, 4, 4096)) == 256, "so small that the number would run away"


@given(sizes=st.lists(st.integers(0, 50), min_size=1, max_size=12), seed=st.integers(0, 2**32))
def test_the_front_is_where_the_first_part_is_missing(sizes: list[int], seed: int) -> None:
    stops = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    watch, told = Watch(stops, None), list[int]()
    for _ in range(2):
        watch.begin()
        marked: set[int] = set()
        for index in random.Random(seed).sample(range(len(sizes)), len(sizes)):
            marked.add(index)
            missing = min(set(range(len(sizes))) - marked, default=len(sizes))
            with watch.telling(told.append):
                watch.gradient_final(index, None)
            assert told[-1] == (stops[missing - 1] if missing else 0)


def test_what_became_final_cannot_become_so_again() -> None:
    watch = Watch([4, 8], None)
    with watch.telling(lambda numel: None):
        watch.gradient_final(1, None)
        with pytest.raises(ValueError, match="twice"):
            watch.gradient_final(1, None)


class Stream:
    """Stands for a side stream: copies land when the test says so, in order."""

    def __init__(self) -> None:
        self.story: list[str] = []
        self.landed = 0
        self.started = 0

    def copy(self, start: int, stop: int) -> Landing:
        self.story.append(f"copy {start}-{stop}")
        self.started += 1
        return Landing(self, self.started)


class Landing:
    def __init__(self, stream: Stream, number: int) -> None:
        self._stream, self._number = stream, number

    def query(self) -> bool:
        return self._stream.landed >= self._number

    def synchronize(self) -> None:
        self._stream.story.append(f"wait {self._number}")
        self._stream.landed = max(self._stream.landed, self._number)


def test_a_ferry_copies_what_is_final_and_tells_what_has_landed() -> None:
    stream = Stream()
    ferry = Ferry(stream.copy, [10, 20, 30, 41])
    assert ferry.final(9) == 0
    assert stream.story == []
    assert ferry.final(25) == 0
    assert stream.story == ["copy 0-10", "copy 10-20"], "it waits for nothing"
    stream.landed = 1
    assert ferry.final(25) == 10
    stream.landed = 2
    told: list[int] = []
    ferry.finish(told.append)
    assert stream.story[2:] == ["copy 20-30", "copy 30-41", "wait 3", "wait 4"]
    assert told == [20, 30, 41]


def test_a_ferry_forgets_a_step_that_was_given_up() -> None:
    stream = Stream()
    ferry = Ferry(stream.copy, [10, 20])
    ferry.final(10)
    ferry.begin()
    assert ferry.final(0) == 0
    told: list[int] = []
    ferry.finish(told.append)
    assert stream.story == ["copy 0-10", "copy 0-10", "copy 10-20", "wait 2", "wait 3"]
    assert told == [0, 10, 20]


def test_a_watch_tells_of_the_last_pass_only() -> None:
    watch = Watch([5, 9], None)
    told: list[int] = []
    for _ in range(2):
        watch.begin()
        with watch.telling(None):
            watch.gradient_final(1, None)
            watch.gradient_final(0, None)
        with watch.telling(told.append):
            watch.gradient_final(1, None)
            watch.gradient_final(0, None)
        watch.gradient_final(0, None)  # validation, say: nobody is told
    assert told == [0, 9, 0, 9]
    assert all(before <= after for before, after in pairwise(told[:2]))
