"""Where the time of a step went."""

from __future__ import annotations

import pytest

from roles.worker.reports import StepClock


class Hands:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_parts_of_a_step() -> None:
    hands = Hands()
    clock = StepClock(hands)
    for _ in range(2):  # a step takes nothing over from the one before
        with clock.phase("compute"):
            hands.now += 2.0
        with clock.phase("communicate"):
            hands.now += 0.5
        clock.waited(0.125)
        clock.exchanged(exposed_s=0.25, communicating_s=1.0)
        with clock.phase("compute"):
            hands.now += 0.25
        assert clock.step_done() == pytest.approx(
            {"step_ms": 2750, "compute_ms": 2250, "communicate_ms": 375, "wait_ms": 125, "hidden_ms": 750}
        )
    assert clock.longest_s == pytest.approx(2.75)


def test_a_view_that_begins_forgets_the_step_that_it_broke() -> None:
    hands = Hands()
    clock = StepClock(hands)
    with clock.phase("compute"):
        hands.now += 5.0
    clock.waited(1.0)
    clock.exchanged(exposed_s=0.0, communicating_s=1.0)
    clock.view_began()
    hands.now += 1.0
    assert clock.step_done() == {"step_ms": 1000, "compute_ms": 0, "communicate_ms": 0, "wait_ms": 0, "hidden_ms": 0}
    assert clock.longest_s == 1.0
