"""The failure detector: pure arithmetic of times."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ring.detector import FailureDetector, beat_defaults


def detector() -> FailureDetector:
    return FailureDetector(heartbeat_s=0.5, death_s=2.0)


def test_silence_kills_at_the_deadline_and_not_before():
    watch = detector()
    assert [watch.waited(watch.wait_s, now, 0.0) for now in (0.5, 1.0, 1.5)] == [False] * 3
    assert watch.wait_s == 0.5
    assert not watch.waited(0.4, 1.9, 0.0)
    assert watch.wait_s == pytest.approx(0.1)
    assert watch.waited(0.1, 2.0, 0.0)


def test_every_sign_of_life_moves_the_deadline():
    watch = detector()
    for now, heard_at in ((0.5, 0.0), (1.0, 0.0), (1.5, 0.0), (2.0, 1.8), (22.5, 2.1)):
        assert not watch.waited(0.5, now, heard_at)
    assert watch.silent_s == 0.5
    assert not watch.waited(0.5, 23.0, 22.9)
    assert watch.silent_s == pytest.approx(0.1)


@given(st.lists(st.tuples(st.floats(0.01, 0.5), st.floats(0, 100)), max_size=40))
def test_time_in_which_the_own_loop_was_late_does_not_count(waits):
    watch, now, planned_s = detector(), 10.0, 0.0
    for wait_s, late_s in waits:
        planned_s, now = planned_s + wait_s, now + wait_s + late_s
        dead = watch.waited(wait_s, now, 10.0)
        assert watch.silent_s == pytest.approx(planned_s)
        assert dead == (watch.silent_s >= 2.0)


def test_a_peer_that_was_late_before_is_granted_more_for_a_while():
    watch = detector()
    for now in (0.5, 1.0, 1.5):  # it comes a second late
        assert not watch.waited(0.5, now, 0.0)
    assert not watch.waited(0.5, 2.0, 1.9)
    assert silence_until_death(watch, 1.9) == pytest.approx(2.0 + 2 * 1.0)
    watch = detector()
    for number in range(1, 200):
        assert not watch.waited(0.5, 4.0 * number, 4.0 * number - (1.9 if number == 1 else 0.1))
    assert silence_until_death(watch, 795.9) == pytest.approx(2.0, abs=0.05)


def silence_until_death(watch: FailureDetector, heard_at: float) -> float:
    now = heard_at
    for _ in range(100):
        wait_s = watch.wait_s
        now += wait_s
        if watch.waited(wait_s, now, heard_at):
            return now - heard_at
    raise AssertionError("it never dies")


def test_near_peers_are_judged_fast_and_far_ones_slowly():
    assert beat_defaults(0.05) == (0.25, 2.0)
    assert beat_defaults(4.9) == (0.25, 2.0)
    assert beat_defaults(50.0) == (5.0, 15.0)
    assert beat_defaults(800.0) == (5.0, 15.0)


@given(st.floats(0, 1000), st.floats(0, 1000))
def test_beats_grow_with_distance_and_a_death_is_at_least_three_beats(one, other):
    near, far = sorted((one, other))
    assert beat_defaults(near) <= beat_defaults(far)
    heartbeat_s, death_s = beat_defaults(far)
    assert death_s >= 3 * heartbeat_s
