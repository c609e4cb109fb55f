"""The failure detector: pure arithmetic of times."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ring.detector import FailureDetector, beat_defaults

seconds = st.floats(0, 100)


def test_silence_kills_at_the_deadline_and_not_before():
    detector = FailureDetector(death_s=2.0, now=10.0)
    assert detector.next_deadline() == 12.0
    assert not detector.dead(11.999)
    assert detector.dead(12.0)


def test_every_sign_of_life_moves_the_deadline():
    detector = FailureDetector(death_s=2.0, now=10.0)
    detector.heard(11.5)
    assert detector.next_deadline() == 13.5
    assert detector.silent_for(12.0) == 0.5
    detector.heard(11.0)  # an older sign, told late
    assert detector.next_deadline() == 13.5


def test_a_peer_whose_own_loop_was_late_doubts_itself_first():
    detector = FailureDetector(death_s=2.0, now=10.0)
    detector.loop_late(20.0)  # asleep from 10 to 30: the beats lie unread
    assert not detector.dead(30.0)
    assert detector.dead(32.0)


def test_doubt_ends_with_the_next_beat():
    detector = FailureDetector(death_s=2.0, now=10.0)
    detector.loop_late(20.0)
    detector.heard(30.0)
    assert detector.next_deadline() == 32.0


def test_being_early_is_no_reason_for_haste():
    detector = FailureDetector(death_s=2.0, now=10.0)
    detector.loop_late(-1.0)
    assert detector.next_deadline() == 12.0


@given(st.lists(st.tuples(st.sampled_from(["heard", "late"]), seconds)))
def test_it_never_calls_a_death_within_death_s_of_a_sign_of_life(events):
    detector, now = FailureDetector(death_s=2.0, now=0.0), 0.0
    last = now
    for what, value in events:
        now += value
        if what == "heard":
            detector.heard(now)
            last = now
        else:
            detector.loop_late(value)
        detector.validate()
        assert detector.next_deadline() >= last + 2.0


def test_a_death_after_no_silence_is_refused():
    with pytest.raises(ValueError, match="s of silence"):
        FailureDetector(death_s=0.0, now=0.0)


def test_near_peers_are_judged_fast_and_far_ones_slowly():
    assert beat_defaults(0.05) == (0.5, 2.0)
    assert beat_defaults(4.9) == (0.5, 2.0)
    assert beat_defaults(50.0) == (5.0, 15.0)
    assert beat_defaults(800.0) == (5.0, 15.0)


@given(st.floats(0, 1000), st.floats(0, 1000))
def test_beats_grow_with_distance_and_a_death_is_at_least_three_beats(one, other):
    near, far = sorted((one, other))
    assert beat_defaults(near) <= beat_defaults(far)
    heartbeat_s, death_s = beat_defaults(far)
    assert death_s >= 3 * heartbeat_s
