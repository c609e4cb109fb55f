"""Prompt look-up: against a search through all of the history, and its promises as an engine."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.core.activations import encode_ids
from p2ptrain.core.errors import P2PTrainError, ProtocolError, UserError
from p2ptrain.core.serving import Sampling
from roles.speculation.ngram import NgramEngine, NgramIndex
from roles.stage_engine import StageEngine


def searched(ids: list[int], longest: int, shortest: int) -> int | None:
    """The definition: longest suffix first, most recent occurrence first."""
    for length in range(min(longest, len(ids) - 1), shortest - 1, -1):
        for end in range(len(ids) - 1, length - 1, -1):
            if ids[end - length : end] == ids[-length:]:
                return ids[end]
    return None


STEPS = st.lists(st.tuples(st.integers(0, 12), st.lists(st.integers(0, 3), max_size=6)), max_size=12)


@given(STEPS, st.integers(1, 3), st.integers(0, 2))
def test_it_finds_what_a_search_finds_whatever_was_cut_before(
    steps: list[tuple[int, list[int]]], shortest: int, more: int
) -> None:
    index = NgramIndex(longest=shortest + more, shortest=shortest)
    ids: list[int] = []
    for keep, new in steps:
        index.cut(keep)
        index.extend(new)
        ids = ids[:keep] + new
        made = index.guesses(3)
        index.validate()
        assert index.ids == ids
        assert list(made[:1]) == [each for each in (searched(ids, shortest + more, shortest),) if each is not None]
        assert index.guess() == searched(ids, shortest + more, shortest)


def test_the_longest_match_counts_and_of_those_the_last() -> None:
    assert NgramIndex([1, 2, 3, 7, 2, 3, 8, 1, 2, 3]).guess() == 7
    assert NgramIndex([2, 3, 7, 5, 2, 3, 8, 1, 2, 3]).guess() == 8
    assert NgramIndex([3, 7, 1, 3]).guess() is None  # one token is too little
    assert NgramIndex([3, 7, 1, 3], shortest=1).guess() == 7


def test_a_look_up_costs_the_same_however_long_the_history_is() -> None:
    class Counting(list[int]):
        reads = 0

        def __getitem__(self, key: object) -> object:  # type: ignore[override]
            Counting.reads += 1
            return super().__getitem__(key)  # type: ignore[call-overload]

    costs = []
    for length in (100, 10_000):
        index = NgramIndex(number % 50 for number in range(length))
        index.ids = Counting(index.ids)
        Counting.reads = 0
        index.push(length % 50)
        assert index.guess() == (length + 1) % 50
        costs.append(Counting.reads)
    assert costs[0] == costs[1] < 10


def ran(engine: StageEngine, keep: int, ids: list[int], picks: int = 1) -> tuple[int, ...]:
    payload = memoryview(encode_ids(ids))
    return engine.run(
        "s", keep=keep, payload=payload, count=len(ids), encoding="ids", out_encoding="ids", picks=picks, draw=0
    ).tokens


def test_the_engine_copies_what_came_and_says_where_it_knows_nothing() -> None:
    engine = NgramEngine(100, ahead=3)
    engine.open("s", positions=20, sampling=Sampling())
    assert ran(engine, 0, [5, 6, 7, 8, 9, 5], 0) == ()
    assert ran(engine, 6, [6]) == (7, 8, 9)
    assert ran(engine, 7, [7]) == (8, 9, 5)
    assert ran(engine, 7, [1]) == ()
    assert ran(engine, 5, [7, 8]) == (9, 7, 8)
    engine.close("s")
    engine.close("s")
    engine.open("s", positions=20, sampling=Sampling())
    assert ran(engine, 0, [5, 6]) == ()


@pytest.mark.parametrize(
    ("keep", "ids", "picks"),
    [(4, [1], 1), (-1, [1], 1), (3, [1, 2, 3, 4], 1), (3, [100], 1), (3, [-1], 1), (3, [1], 2), (3, [], 1)],
)
def test_the_engine_refuses_what_no_engine_takes(keep: int, ids: list[int], picks: int) -> None:
    engine = NgramEngine(100)
    engine.open("s", positions=6, sampling=Sampling())
    ran(engine, 0, [1, 2, 3], 0)
    with pytest.raises(ProtocolError):
        ran(engine, keep, ids, picks)
    assert ran(engine, 3, [1, 2]) == (3, 1, 2, 3, 1, 2, 3, 1)  # nothing is changed by it
    with pytest.raises(UserError) as error:
        engine.open("s", positions=1, sampling=Sampling())
    assert isinstance(error.value, P2PTrainError)
