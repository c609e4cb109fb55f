"""Stop strings in a text that arrives in pieces. The text ends before the first stop string that is complete.

A pure state machine. The division into pieces does not matter. The string that is complete first wins; of several that
end at the same character, the longest. A tail that may become a stop string is held back, so no part of one is shown.
"""

from __future__ import annotations

from collections.abc import Iterable

from p2ptrain.core.errors import UserError


class StopStrings:
    """The stop strings of one text.

    Attributes:
        found: the stop string that ended the text, or None.

    Raises:
        UserError: a string is empty.
    """

    def __init__(self, strings: Iterable[str] = ()) -> None:
        self.found: str | None = None
        self._strings = tuple(dict.fromkeys(strings))
        self._held = ""
        if "" in self._strings:
            raise UserError("a stop string is empty", remedy="give the text at which to stop, or leave out --stop")

    def feed(self, piece: str) -> str:
        """Take the next piece. Returns what is now certain to be part of the text."""
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
        """End the text. Returns what was held back."""
        rest, self._held = self._held, ""
        return rest

    def _may_begin(self, text: str) -> int:
        longest = max(map(len, self._strings), default=1) - 1
        for size in range(min(longest, len(text)), 0, -1):
            tail = text[-size:]
            if any(string.startswith(tail) for string in self._strings):
                return size
        return 0
