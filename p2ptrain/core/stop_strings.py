"""Where a text that comes in pieces ends: before the first of some strings that is complete.

Pure. What was cut into which pieces makes no difference: the string that is complete first counts, of several that end
at the same letter the longest. What may yet become one of them is held back, so that whoever shows the text never shows
a part of a string that it ends before.
"""

from __future__ import annotations

from collections.abc import Iterable

from p2ptrain.core.errors import UserError


class StopStrings:
    """One text, as it comes.

    Attributes:
        found: the string that ended it, or None while it goes on.

    Raises:
        UserError: one of the strings is empty: every text ends before that.
    """

    def __init__(self, strings: Iterable[str] = ()) -> None:
        self.found: str | None = None
        self._strings = tuple(dict.fromkeys(strings))
        self._held = ""
        if "" in self._strings:
            raise UserError("a stop string is empty", remedy="name the text before which to end, or leave --stop out")

    def feed(self, piece: str) -> str:
        """Take the next piece. Returns what can be shown now: all that is certain to be part of the text."""
        if self.found is not None:
            return ""
        text = self._held + piece
        ends = [(at + len(string), at, string) for string in self._strings if (at := text.find(string)) >= 0]
        if ends:
            _, at, self.found = min(ends)
            self._held = ""
            return text[:at]
        certain = len(text) - self._may_begin(text)
        self._held = text[certain:]
        return text[:certain]

    def finish(self) -> str:
        """The text is over: what was held back is part of it after all."""
        rest, self._held = self._held, ""
        return rest

    def _may_begin(self, text: str) -> int:
        longest = max(map(len, self._strings), default=1) - 1
        for size in range(min(longest, len(text)), 0, -1):
            tail = text[-size:]
            if any(string.startswith(tail) for string in self._strings):
                return size
        return 0
