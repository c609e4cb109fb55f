"""What passes take, as far as it was measured."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roles.speculation.estimates import FAR_OFF, PRIOR_SLOPE, PassTimes

STEP_S = 0.05


def times(*passes: tuple[int, float]) -> PassTimes:
    made = PassTimes()
    for drafts, seconds in passes:
        made.add(drafts, seconds)
    return made


def test_what_was_not_tried_lies_on_a_line() -> None:
    assert times((0, STEP_S)).seconds(4) == pytest.approx(STEP_S * (1 + 4 * PRIOR_SLOPE))
    assert times(*[(drafts, STEP_S * (1 + drafts / 4)) for drafts in (0, 2, 4) * 9]).seconds(8) == pytest.approx(
        3 * STEP_S, rel=0.05
    )
    assert times(*[(drafts, STEP_S) for drafts in (0, 2, 4) * 9]).seconds(8) == pytest.approx(STEP_S, rel=0.05)


def test_what_was_tried_often_is_what_it_was() -> None:
    """A step takes half of what any pass with drafts takes: no line goes through both."""
    made = times(*[(drafts, STEP_S * (1 + (drafts > 0))) for drafts in (0, 1, 4, 8) * 9])
    for drafts in (0, 1, 4, 8):
        assert made.seconds(drafts) == pytest.approx(STEP_S * (1 + (drafts > 0)), rel=0.25)


def test_one_unlucky_pass_is_not_held_against_such_passes_for_good() -> None:
    made = times((0, STEP_S), (2, STEP_S), (4, 3 * STEP_S))
    assert made.seconds(4) > 1.5 * STEP_S
    for _ in range(40):
        made.add(0, STEP_S)
        made.add(2, STEP_S)
    assert made.seconds(4) < 1.2 * STEP_S


def test_a_lucky_step_of_long_ago_is_none() -> None:
    made = times((0, STEP_S / 2), *[(2, STEP_S)] * 99)
    assert made.seconds(0) > 0.7 * STEP_S
    assert made.copy().seconds(0) == made.seconds(0)


def test_one_pass_that_stood_still_counts_little() -> None:
    made = times(*[(0, STEP_S)] * 9, (0, 1000 * STEP_S))
    assert made.seconds(0) < (1 + FAR_OFF / 10) * STEP_S


@given(st.lists(st.tuples(st.integers(0, 64), st.floats(0, 1e6)), max_size=50))
def test_more_drafts_never_take_less_than_a_step(passes: list[tuple[int, float]]) -> None:
    made = times((0, STEP_S), *passes)
    for drafts in range(65):
        assert 0 < made.seconds(0) <= made.seconds(drafts) < math.inf
