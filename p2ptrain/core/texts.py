"""Texts that travel to people elsewhere: short enough for a message, and never cut without a sign of it."""

from __future__ import annotations

TEXT_CHARS = 1000
"""Of a message, or of a remedy: with a path in it. A control frame holds sixteen of them in any script."""


def shortened(text: str, most_chars: int = TEXT_CHARS) -> str:
    """``text``, or its beginning where it is longer; an ellipsis says so."""
    return text if len(text) <= most_chars else text[: most_chars - 1] + "…"


def printable(text: str, most_chars: int = TEXT_CHARS) -> str:
    """The same, without what a terminal would obey."""
    short = shortened(text, most_chars)
    return short if short.isprintable() else "".join(each if each.isprintable() else "?" for each in short)
