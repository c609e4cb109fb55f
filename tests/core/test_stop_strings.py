"""Stop strings, beside a reference that sees the whole text letter by letter."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.core.errors import UserError
from p2ptrain.core.serving import StopStrings

LETTERS = st.text("ab\n", max_size=30)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=4)


def reference(text: str, stops: list[str]) -> tuple[str, str | None]:
    """What is before the stop that is complete after the fewest letters, the longest of several."""
    for size in range(len(text) + 1):
        ending = [stop for stop in stops if text[:size].endswith(stop)]
        if ending:
            found = max(ending, key=len)
            return text[: size - len(found)], found
    return text, None


@given(LETTERS, STOPS, st.data())
def test_any_cut_gives_what_the_whole_text_gives(text: str, stops: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    machine, shown = StopStrings(stops), ""
    expected, found = reference(text, stops)
    for piece in pieces:
        shown += machine.feed(piece)
        assert expected.startswith(shown), "a part of a stop string was shown"
    shown += machine.finish()
    assert (shown, machine.found) == (expected, found)
    assert machine.feed("more") == "" or found is None


@given(LETTERS, STOPS)
def test_nothing_is_held_back_that_cannot_become_a_stop(text: str, stops: list[str]) -> None:
    machine, taken, shown = StopStrings(stops), "", ""
    for letter in text:
        taken += letter
        shown += machine.feed(letter)
        if machine.found is not None:
            return
        held = taken[len(shown) :]
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(UserError, match="empty"):
        StopStrings(["a", ""])
