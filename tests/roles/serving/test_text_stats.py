"""What is told of a text."""

from __future__ import annotations

from roles.serving.decoding import DecodingStats
from roles.serving.text_stats import MOST_DRAFTERS, DrafterFacts, TextStats
from wire.codec import encode
from wire.frame import CONTROL_FRAME_BYTES
from wire.text_messages import TextWritten


def facts(peer_id: str, accepted: int = 0) -> DrafterFacts:
    return DrafterFacts(peer_id, "n" * 64, "m" * 64, 0.01, 10, 20, accepted)


def test_figures_name_each_drafter_once_and_fit_a_message() -> None:
    stats = TextStats(DecodingStats(), began_at=0.0, prompt_tokens=1, cached_tokens=0)
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
    assert len(encode(TextWritten("length", said))) < CONTROL_FRAME_BYTES
