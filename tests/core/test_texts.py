"""Texts for people elsewhere."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.core.texts import TEXT_CHARS, printable, shortened


@given(st.text(max_size=40), st.integers(1, 20))
def test_what_is_cut_says_so(text: str, most_chars: int) -> None:
    short = shortened(text, most_chars)
    assert len(short) <= most_chars
    assert short == text or (short.endswith("…") and text.startswith(short[:-1]))
    assert printable(text, most_chars).isprintable()


def test_a_path_has_room() -> None:
    text = f"the model in /{'d' * 255}/{'f' * 255} is damaged: fetch it again"
    assert shortened(text) == text
    assert len(shortened("x" * 5000)) == TEXT_CHARS
    assert printable("a\x1b[2Jb") == "a?[2Jb"
