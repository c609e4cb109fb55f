"""What the diary tells of callers that were refused: whoever knocks a thousand times must not push out the news."""

from __future__ import annotations

from collections import OrderedDict

TOLD_EVERY_S = 1.0
MAX_KEPT = 1024


class Strangers:
    """Of equal refusals to one machine, one a second is told, with the number of those that were not. Pure."""

    def __init__(self) -> None:
        self._last: OrderedDict[tuple[str, str], tuple[float, int]] = OrderedDict()  # told at, left out since

    def told(self, host: str, reason: str, text: str, now: float) -> str | None:
        """What to write of this refusal; None where it is left out."""
        told_at, left_out = self._last.pop((host, reason), (-TOLD_EVERY_S, 0))
        if now - told_at < TOLD_EVERY_S:
            self._last[host, reason] = (told_at, left_out + 1)
            return None
        self._last[host, reason] = (now, 0)
        while len(self._last) > MAX_KEPT:
            self._last.popitem(last=False)
        return f"{text} ({left_out} more like it before)" if left_out else text
