"""What goes out with a beat."""

from __future__ import annotations

import math

import pytest

from roles.gauges import SMOOTHING_S, Gauges


def test_a_steady_flow_is_shown_as_what_it_is_however_often_it_is_looked_at() -> None:
    now = 0.0
    gauges = Gauges(lambda: now)
    assert gauges.rate("in", 0) == 0.0
    shown = 0.0
    for tick in range(1, 200):
        now = 0.5 * tick
        shown = gauges.rate("in", 100.0 * now)
    assert shown == pytest.approx(100.0)


def test_a_burst_is_spread_over_the_smoothing_time() -> None:
    now = 0.0
    gauges = Gauges(lambda: now)
    gauges.rate("tokens", 0)
    now = 0.5
    assert gauges.rate("tokens", 500) == pytest.approx(1000 * (1 - math.exp(-0.5 / SMOOTHING_S)))


def test_a_total_that_starts_anew_is_no_negative_rate() -> None:
    now = 0.0
    gauges = Gauges(lambda: now)
    gauges.rate("in", 1000)
    now = 1.0
    assert gauges.rate("in", 5) == 0.0


def test_the_machine_has_memory() -> None:
    values = Gauges(lambda: 0.0).machine()
    assert 0 < values["memory_bytes"] < values["memory_total_bytes"]
