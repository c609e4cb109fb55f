"""The failure detector: pure arithmetic of times, and what it makes of a real, loaded machine's beats."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ring.detector import (
    ENOUGH,
    PEERS_KEPT,
    FailureDetector,
    Memory,
    Rhythm,
    beat_defaults,
)

seconds = st.floats(0, 100)
HEARTBEAT_S, DEATH_S = beat_defaults(0.1)
# Gaps between beats every 250 ms, in ms: one line for each of eight workers that trained on two cores, all cores busy.
RECORDED = [
    [int(gap) / 1e3 for gap in line.split()]
    for line in (Path(__file__).parent / "data" / "beat_gaps_ms.txt").read_text().splitlines()
]


def detector(rhythm: Rhythm | None = None, *, now: float = 10.0) -> FailureDetector:
    return FailureDetector(heartbeat_s=0.5, death_s=2.0, now=now, rhythm=rhythm)


def rhythm_of(*gaps: float) -> Rhythm:
    rhythm = Rhythm()
    for gap in gaps:
        rhythm.add(gap)
    return rhythm


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


def test_a_peer_whose_own_loop_was_late_doubts_itself_first():
    watch = detector()
    watch.loop_late(20.0)  # asleep from 10 to 30: the beats lie unread
    assert not watch.dead(30.0)
    assert watch.dead(32.0)


@given(st.lists(st.tuples(st.sampled_from(["heard", "beat", "late"]), seconds)))
def test_two_beats_are_always_waited_for(events):
    watch, now = detector(now=0.0), 0.0
    last = now
    for what, value in events:
        now += value
        if what == "late":
            watch.loop_late(value)
        else:
            (watch.heard if what == "heard" else watch.beat)(now)
            last = now
        watch.validate()
        assert last + 1.0 <= watch.next_deadline()


def test_a_death_after_no_silence_is_refused():
    with pytest.raises(ValueError, match="s of silence"):
        FailureDetector(heartbeat_s=0.5, death_s=0.0, now=0.0)


# -------------------------------------------------------------------------------------------------------------- learned


@given(st.lists(st.floats(0, 1e6), max_size=40), st.floats(0.01, 10), st.floats(2, 10))
def test_patience_is_bounded_whatever_was_seen(gaps, heartbeat_s, beats):
    death_s = beats * heartbeat_s
    least_s = max(0.75 * death_s, 3 * heartbeat_s)
    assert least_s <= rhythm_of(*gaps).patience_s(heartbeat_s, death_s) <= max(death_s, least_s)


def test_what_the_judge_slept_through_is_not_learned_as_the_peers():
    rhythm = rhythm_of(*[0.5] * ENOUGH)
    watch = detector(rhythm)
    watch.beat(10.5)
    watch.loop_late(300.0)
    watch.beat(311.0)
    assert rhythm.patience_s(0.5, 2.0) == 1.5


def test_memory_of_peers_is_bounded_and_outlives_connections():
    memory = Memory()
    rhythm = memory.of("a")
    for number in range(PEERS_KEPT - 1):
        memory.of(f"p{number}")
    assert memory.of("a") is rhythm
    for number in range(PEERS_KEPT):
        memory.of(f"q{number}")
    assert memory.of("a") is not rhythm


def test_busy_workers_are_never_evicted_and_frozen_ones_within_two_seconds():
    """Replayed beat by beat. The least margin seen was 2.9: the deadline is so many times the gap that followed."""
    assert len(RECORDED) == 8
    for gaps in RECORDED:
        rhythm, now = Rhythm(), 0.0
        watch = FailureDetector(heartbeat_s=HEARTBEAT_S, death_s=DEATH_S, now=now, rhythm=rhythm)
        for gap in gaps:
            patience_s = watch.next_deadline() - now
            assert gap * 2.5 < patience_s <= 2.0 + 1e-9  # whenever it freezes, it is noticed within two seconds
            now += gap
            watch.beat(now)


# ---------------------------------------------------------------------------------------------------------------- beats


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
