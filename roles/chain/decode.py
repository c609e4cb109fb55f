"""A core of plain decoding, which says what to submit next: a prompt in chunks, then one position after another.

The prompt's chunks are under way together, so that all stages of a chain compute at once. After that each position
depends on the token before, so one is under way. (Speculative decoding submits works of its own, of several positions
with a pick for each; the next one cuts the history to what was right by its ``keep``: ``GenerationSession.run``.)
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from roles.chain.events import Submit
from roles.chain.works import CHUNK


class Decoding:
    """One generation.

    Args:
        history: token ids that the session has; what they have in common with ``ids`` is not computed again.
        ids: of the prompt.
        stop_ids: after one of these it ends.

    Attributes:
        tokens: new ones, in order.
        ended: why there are no more: ``length``, ``stop``, ``cancelled``; empty while there are.
    """

    def __init__(
        self, history: Sequence[int], ids: Sequence[int], *, max_new_tokens: int, stop_ids: Collection[int] = ()
    ) -> None:
        if not ids or max_new_tokens < 1:
            raise ValueError("a generation has a prompt, and makes a token")
        self.tokens: list[int] = []
        self.ended = ""
        self._max_new_tokens = max_new_tokens
        self._stop_ids = frozenset(stop_ids)
        self._ids = tuple(ids)
        self._next = common_prefix(history, ids[:-1])  # the last one is computed in any case: the first token follows
        self._last_index = -1  # of the work that picks

    def wants(self, room: int, submitted: int) -> list[Submit]:
        """What to submit now.

        Args:
            room: works that may be submitted. submitted: the number that were, which is the index of the next one.
        """
        works: list[Submit] = []
        while self._next < len(self._ids) and len(works) < room and not self.ended:
            stop = min(self._next + CHUNK, len(self._ids))
            picks = int(stop == len(self._ids))
            works.append(Submit(self._ids[self._next : stop], self._next, picks, 0, prefill=True))
            if picks:
                self._last_index = submitted + len(works) - 1
            self._next = stop
        return works

    def done(self, index: int, tokens: Sequence[int], submitted: int) -> tuple[tuple[int, ...], list[Submit]]:
        """The submitted work ``index`` was answered: the new tokens to give out, and what to submit then."""
        if self.ended or index != self._last_index or not tokens:
            return (), []
        token = tokens[0]
        self.tokens.append(token)
        if token in self._stop_ids:
            self.ended = "stop"
        elif len(self.tokens) == self._max_new_tokens:
            self.ended = "length"
        else:
            keep = len(self._ids) + len(self.tokens) - 1
            self._last_index = submitted
            return (token,), [Submit((token,), keep, 1, len(self.tokens))]
        return (token,), []

    def cancel(self) -> None:
        """No more tokens are wanted."""
        self.ended = self.ended or "cancelled"


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many elements both begin with."""
    for place, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return place
    return min(len(one), len(other))
