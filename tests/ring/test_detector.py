"""The failure detector: pure arithmetic of times."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ring.detector import FailureDetector, beat_defaults

seconds = st.floats(0, 100)


def detector(*, now: float = 10.0) -> FailureDetector:
    return FailureDetector(heartbeat_s=0.5, death_s=2.0, now=now)


def test_silence_kills_at_the_deadline_and_not_before():
    watch = detector()
    assert watch.next_deadline() == 12.0
    assert not watch.dead(11.999)
    assert watch.dead(12.0)


def test_every_sign_of_life_moves_the_deadline():
    watch = detector()
    watch.heard(11.5)
    assert watch.next_deadline() == 13.5
    assert watch.silent_for(12.0) == 0.5
    watch.heard(11.0)  # an older sign, told late
    assert watch.next_deadline() == 13.5


def test_a_peer_whose_own_loop_was_late_doubts_itself_until_the_next_sign_of_life():
    watch = detector()
    watch.loop_late(0.12)  # the usual unrest of a loop
    assert watch.next_deadline() == 12.0
    watch.loop_late(20.0)  # asleep from 10 to 30: the beats lie unread
    assert not watch.dead(30.0)
    assert watch.dead(32.0)
    watch.heard(30.0)
    assert watch.next_deadline() == 32.0


@given(st.lists(st.tuples(st.sampled_from(["heard", "late"]), seconds)))
def test_two_beats_are_always_waited_for(events):
    watch, last = detector(now=0.0), 0.0
    for what, value in events:
        if what == "late":
            watch.loop_late(value)
        else:
            last += value
            watch.heard(last)
        assert last + 1.0 <= watch.next_deadline()


def test_a_death_after_no_silence_is_refused():
    with pytest.raises(ValueError, match=r"death_s 0\.0: 0 < heartbeat_s"):
        FailureDetector(heartbeat_s=0.5, death_s=0.0, now=0.0)


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
