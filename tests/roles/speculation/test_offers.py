"""Weights of drafts stay with the drafts that a session's core keeps."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roles.speculation.events import Drafted
from roles.speculation.lines import Line
from roles.speculation.offers import Offers


def weight(epoch: int, position: int, token: int) -> float:
    """Another one for each draft."""
    return epoch + position / 100 + token / 10_000


def drafted(epoch: int, position: int, *tokens: int) -> Drafted:
    weights = tuple(weight(epoch, at, token) for at, token in enumerate(tokens, position))
    return Drafted(1, epoch, position, tokens, weights)


_TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=3)
_STEPS = st.lists(
    st.tuples(st.just("drafts"), st.integers(-1, 0), st.integers(-2, 1), _TOKENS)
    | st.tuples(st.just("text"), st.just(0), st.just(0), _TOKENS)
    | st.tuples(st.just("verdict"), st.just(0), st.just(0), st.just([])),
    max_size=30,
)


@settings(max_examples=300, deadline=None)
@given(_STEPS)
def test_whatever_is_drafted_told_and_written(steps: list[tuple[str, int, int, list[int]]]) -> None:
    """``Line`` says which drafts may be judged: those have their weights, and no others are kept for long."""
    text, line, offers = [0, 0], Line(2, 8), Offers()
    for what, back, offset, tokens in steps:
        match what:
            case "drafts":
                epoch = max(0, line.number + back)
                position = (line.told if epoch > line.epoch else line.end) + offset
                event = drafted(epoch, position, *tokens)
                offers.came(event)
                if line.receive_untrusted(epoch, position, tokens, text)[0]:
                    return  # it is cut off
            case "text":
                text += tokens
                line.grew(tokens)
            case "verdict":
                line.verdict(len(text), 8)
        offers.grew(len(text))
        wanted = tuple(weight(line.epoch, at, token) for at, token in enumerate(line.ahead, len(text)))
        assert offers.of(1, len(text), line.ahead) == wanted
        assert len(offers._weights.get(1, ())) <= 8 + 8


def test_what_never_came_is_a_mistake() -> None:
    offers = Offers()
    offers.came(drafted(0, 3, 7, 8))
    assert offers.of(1, 3, (7, 8)) == (weight(0, 3, 7), weight(0, 4, 8))
    for drafter, position, tokens in ((2, 3, (7,)), (1, 2, (7,)), (1, 3, (8,)), (1, 3, (7, 8, 9))):
        with pytest.raises(KeyError):
            offers.of(drafter, position, tokens)
    offers.came(drafted(2, 4, 5))
    offers.came(drafted(1, 4, 6))
    assert offers.of(1, 4, (5,)) == (weight(2, 4, 5),)
    offers.lost(1)
    with pytest.raises(KeyError):
        offers.of(1, 4, (5,))
