"""Which codec an edge needs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ring.planning.codec import CANDIDATES, NEARLY_BEST, STATED_ERROR, choose_codec
from ring.planning.measurements import LinkQuality

MIB = 1 << 20


@pytest.mark.parametrize(
    ("edge_bps", "compute_s", "budget", "chosen"),
    [
        (1e9, 1.0, 1.0, "fp32"),
        (3e8, 1.0, 1.0, "bf16"),
        (1e8, 1.0, 1.0, "int8"),
        (5e7, 1.0, 1.0, "int4"),
        (1e7, 1.0, 1.0, "topk"),
        (1e7, 1.0, 0.3, "int4"),
        (1e7, 1.0, 0.03, "int8"),
        (1e7, 1.0, 0.005, "bf16"),
        (1e7, 1.0, 0.0, "fp32"),
    ],
)
def test_the_least_lossy_that_fits_is_chosen(edge_bps, compute_s, budget, chosen):
    assert choose_codec(LinkQuality(0.01, edge_bps), 2, 40 * MIB, compute_s, budget)[0] == chosen


def test_where_round_trips_take_the_time_fewer_bytes_are_not_worth_the_loss():
    assert choose_codec(LinkQuality(2.5, 1e9), 2, 40 * MIB, 0.1, 1.0)[0] == "fp32"


def test_the_reason_is_told():
    assert (
        choose_codec(LinkQuality(0.01, 1e8), 2, 40 * MIB, 1, 1)[1]
        == "int8 takes 885 ms at 100 Mbit/s, computing takes 1.00 s"
    )
    assert (
        choose_codec(LinkQuality(0.01, 5e6), 2, 40 * MIB, 1, 0)[1]
        == "fp32 takes 67.13 s at 5.00 Mbit/s, computing takes 1.00 s"
    )


times = st.floats(0, 100)


@given(st.floats(1e3, 1e12), times, st.integers(0, 1 << 34), times, st.floats(0, 2), st.floats(0, 2))
def test_a_budget_is_kept_and_more_of_it_is_never_slower(edge_bps, latency_s, total_bytes, compute_s, budget, more):
    chosen, reason = choose_codec(LinkQuality(latency_s, edge_bps), 2, total_bytes, compute_s, budget)
    assert chosen == CANDIDATES[0] or STATED_ERROR[chosen] <= budget
    assert reason.startswith(f"{chosen} takes ")
    freer, _ = choose_codec(LinkQuality(latency_s, edge_bps), 2, total_bytes, compute_s, budget + more)
    assert CANDIDATES.index(freer) >= CANDIDATES.index(chosen)
    faster, _ = choose_codec(LinkQuality(latency_s, 2 * edge_bps), 2, total_bytes, compute_s, budget)
    assert CANDIDATES.index(faster) <= CANDIDATES.index(chosen)


def test_candidates_lose_more_in_their_order_and_the_margin_is_one():
    errors = [STATED_ERROR[name] for name in CANDIDATES]
    assert errors == sorted(errors)
    assert NEARLY_BEST > 1
