"""The figures of late: sums that grow, and what they say."""

from __future__ import annotations

import pytest

from roles.serving.decoding import DecodingStats
from roles.serving.text_stats import DrafterFacts, RecentSums, figures_of, shares_of, sums_of

FACTS = [DrafterFacts(f"d{at}", "", "", 0.0, 200, 5, right) for at, right in ((1, 6), (2, 2))]
SPENT = {"all": 2.0, "verify": 1.0, "draft": 0.75, "wait": 0.125}


def stats() -> DecodingStats:
    """A text of 41 tokens, of which 40 are behind the first, in ten passes."""
    made = DecodingStats(passes=10, self_steps=2, tokens=41, drafted=60, wasted=15, verify_s=1.0, wait_s=0.75)
    made.tried_at[:3], made.accepted_at[:3] = [8, 6, 2], [6, 2, 0]
    return made


def test_the_figures_of_a_text() -> None:
    sums = sums_of(stats(), SPENT, FACTS)
    recent = RecentSums()
    recent.add(sums, 0.1)
    found = figures_of(recent.grown, 0.1)
    assert found == {
        "alpha": 0.5,
        "right_at_1": 0.75,
        "right_at_2": pytest.approx(1 / 3),
        "right_at_3": 0.0,
        "accepted_length": 4.0,
        "alone_share": 0.2,
        "wasted_share": 0.25,
        "bytes_per_token": 10.0,
        "token_ms": 50.0,
        "verify_ms": 25.0,
        "draft_ms": 18.75,
        "wait_ms": 3.125,
        "rest_ms": 3.125,
        "alone_ms": 100.0,
        "speed_up": pytest.approx(0.1 * 40 / 1.75),
    }
    assert shares_of(sums) == {"d1": 0.75, "d2": 0.25}
