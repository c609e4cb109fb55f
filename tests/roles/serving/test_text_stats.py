"""The figures of one text, and of the recent ones."""

from __future__ import annotations

import msgpack
import pytest

from roles.serving.model import DecodingStats
from roles.serving.text_stats import (
    MOST_DRAFTERS,
    RECENT_S,
    DrafterFacts,
    RecentPace,
    RecentSums,
    TextStats,
    figures_of,
)
from wire.http_messages import PART_BYTES
from wire.text_messages import TextNews


def facts(peer_id: str, accepted: int = 0) -> DrafterFacts:
    return DrafterFacts(peer_id, "n" * 64, "m" * 64, 0.01, 10, 20, accepted)


def test_figures_name_each_drafter_once_and_fit_a_message() -> None:
    stats = TextStats(DecodingStats(), began_at=0.0, prompt_tokens=1, cached_tokens=0, pace=RecentPace())
    right = {1: 5, 2: 3, 999: 4}
    came = [facts(f"{number % 2}" * 32, right.get(number, 0)) for number in range(1, 1001)]
    said = stats.as_map(1.0, [facts("", 7), *came])
    assert [(each["peer_id"][:1], each["accepted"], each["bytes_in"]) for each in said["drafters"]] == [
        ("", 7, 10),
        ("1", 9, 5000),
        ("0", 3, 5000),
    ]
    assert said["bytes_in"] == 10_010
    others = [facts(f"{number:032}", right.get(number, 0)) for number in range(1, 2000)]
    said = stats.as_map(1.0, others)
    assert len(said["drafters"]) == MOST_DRAFTERS
    assert {each["accepted"] for each in said["drafters"]} == {5, 4, 3, 0}
    assert len(msgpack.packb(TextNews(ended="length", stats=said).to_map())) < PART_BYTES


FACTS = [DrafterFacts(f"d{at}", "", "", 0.0, 200, 5, right) for at, right in ((1, 6), (2, 2))]


def test_pace_of_the_last_minutes() -> None:
    pace = RecentPace()
    for number in range(100):
        pace.add_next(0.02 if number < 90 else 0.5, 10.0 + 0.01 * number)
    pace.add_first(2.0, 300, 128, 11.0)
    pace.add_first(4.0, 100, 0, 12.0)
    found = pace.as_map(12.5)
    assert {name: round(value, 2) for name, value in found.items() if not name.endswith("ms")} == {
        "prompt_tokens_per_s": round(400 / 1.5, 2),
        "cached_share": 0.32,
    }
    times = {"first_ms": 2000, "first_p95_ms": 4000, "between_ms": 20, "between_p95_ms": 500}
    assert {name: found[name] for name in times} == {name: pytest.approx(ms, rel=0.03) for name, ms in times.items()}
    assert pace.as_map(12.5 + RECENT_S).keys() == {"prompt_tokens_per_s"}, "it is long ago"


def stats() -> DecodingStats:
    """A text of 41 tokens, of which 40 are behind the first, in ten passes."""
    made = {"passes": 10, "self_steps": 2, "tokens": 41, "drafted": 60, "wasted": 15, "judged": 16, "right": 8}
    return DecodingStats(**made, verify_s=1.0, draft_s=0.75)


def test_the_figures_of_a_text() -> None:
    text = TextStats(stats(), began_at=0.0, prompt_tokens=1, cached_tokens=0, pace=RecentPace())
    text.add_tokens(1, 10.0)
    text.add_tokens(40, 12.0)
    text.add_pass(0.375, 0.25, prefill=False)
    recent = RecentSums()
    assert recent.add(text.sums(FACTS)) == 41
    found = figures_of(recent.grown, 0.1)
    assert found == {
        "alpha": 0.5,
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
