"""The works of a session: what was submitted, what is under way, what was answered, and what of it is sure. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from roles.chain.events import Submit

CHUNK = 2048
"""Positions in one work, at most."""
WINDOW = 8
"""Works under way at a time, at most: more than a chain has stages would only wait in queues, and take memory there."""
FIRST_PATIENCE_S = 120.0
POSITION_PATIENCE_S = 0.2
"""While nothing was measured: for a work, and for each position besides (a large model's prompt on slow processors)."""
LEAST_PATIENCE_S = 20.0
PATIENCE = 8.0
"""Times the slowest that was measured: other sessions, and a machine that is busy otherwise, are in the way at times.
Death is not noticed by this but by the end of a connection, or by silence."""


@dataclass(slots=True)
class Work:
    """A work under way.

    Attributes:
        index: of the submitted works; -1 where the session made it itself, to bring back what stages held.
        number: of now; it has another one each time that it is sent.
        due: when its answer is missed; 0: it was not sent in this attempt.
        sent: in any attempt.
    """

    index: int
    number: int
    keep: int
    ids: tuple[int, ...]
    last: int
    picks: int
    draw: int
    prefill: bool = False
    sent: bool = False
    sent_at: float = 0.0
    due: float = 0.0
    mended: bool = False


class Works:
    """See the module's docstring.

    Args:
        last: index of the last stage.
        alike: as of ``Session``.

    Attributes:
        ids: token ids of all positions, as submitted.
        flight: works under way, in order.
        submitted: works so far.
    """

    def __init__(self, last: int, *, alike: bool) -> None:
        self.ids: list[int] = []
        self.flight: deque[Work] = deque()
        self.submitted = 0
        self.last_number = 0
        self._last, self._alike = last, alike
        self._answered: list[int] = []
        self._prefilled = bytearray()  # of each answered position: whether it was a prompt's

    @property
    def answered(self) -> int:
        """Positions up to the end of the last answered work."""
        return len(self._answered)

    @property
    def room(self) -> int:
        """How many more may be submitted."""
        return WINDOW - sum(work.index >= 0 for work in self.flight)

    @property
    def sure(self) -> int:
        """Positions that every stage holds which was not lost since, and that will not change."""
        return min([len(self._answered), *(work.keep for work in self.flight if work.sent)])

    def submit(self, event: Submit) -> None:
        """Raises ``ValueError``: what cannot be."""
        if not 0 < len(event.ids) <= CHUNK:
            raise ValueError(f"a work has 1 to {CHUNK} positions, not {len(event.ids)}")
        if not 0 <= event.keep <= len(self.ids) or not 0 <= event.picks <= len(event.ids) or event.draw < 0:
            raise ValueError(f"work {self.submitted} keeps {event.keep} of {len(self.ids)} positions")
        if not self.room:
            raise ValueError(f"{WINDOW} works are under way")
        del self.ids[event.keep :]
        self.ids += event.ids
        number = self.number()
        made = Work(self.submitted, number, event.keep, event.ids, self._last, event.picks, event.draw, event.prefill)
        self.flight.append(made)
        self.submitted += 1

    def answer(self, work: Work) -> None:
        """``work``, the first under way until now, was answered."""
        if work.index >= 0:
            del self._answered[work.keep :], self._prefilled[work.keep :]
            self._answered += work.ids
            self._prefilled += bytes([work.prefill]) * len(work.ids)

    def stop(self) -> None:
        """What is under way counts no more: it will be sent again."""
        while self.flight and self.flight[0].index < 0:
            self.flight.popleft()
        for work in self.flight:
            work.mended = True

    def begin_again(self) -> None:
        """Every stage holds what is sure: what comes before the first one under way goes in front of it."""
        if self.flight:
            self.flight.extendleft(reversed(self.again(self.sure, self.flight[0].keep, self._last)))
        for work in self.flight:
            work.due, work.number = 0.0, self.number()

    def again(self, start: int, stop: int, last: int) -> list[Work]:
        """Works that bring answered positions [start, stop) to stages [0, last] once more."""
        works: list[Work] = []
        while start < stop:
            end = min(start + CHUNK, stop)
            prefill = bool(self._prefilled[start])
            if not self._alike and (other := self._prefilled.find(not prefill, start, end)) >= 0:
                end = other
            works.append(Work(-1, self.number(), start, tuple(self._answered[start:end]), last, 0, 0, prefill))
            start = end
        return works

    def number(self) -> int:
        """One that no work had before."""
        self.last_number += 1
        return self.last_number

    def validate(self) -> None:
        """Raise ``AssertionError`` where what must always be so is not."""
        numbers = [work.number for work in self.flight]
        assert numbers == sorted(set(numbers))
        assert not numbers or numbers[-1] <= self.last_number
        history = list(self._answered)
        for work in self.flight:
            assert work.keep <= len(history), "a work keeps more than there is"
            if work.index >= 0:
                del history[work.keep :]
                history += work.ids
        assert history == self.ids, "answered works and those under way make up what was submitted"
        assert self.room >= 0


@dataclass(slots=True)
class Pace:
    """How slow answers may be, from how slow they were.

    Attributes:
        turn_s: of a work of one position; position_s: of one of several, by position; both 0 before the first.
    """

    turn_s: float = 0.0
    position_s: float = 0.0

    def answered(self, positions: int, took_s: float) -> None:
        """A work that was alone on its way took so long. Old extremes fade."""
        if positions == 1:
            self.turn_s = max(took_s, 0.99 * self.turn_s)
        else:
            self.position_s = max(took_s / positions, 0.9 * self.position_s)

    def request_s(self) -> float:
        """For the answer to a request, before which a work of another session may have to end."""
        return self.patience_s(CHUNK) if self.turn_s or self.position_s else FIRST_PATIENCE_S

    def patience_s(self, positions: int) -> float:
        """For an answer before which so many positions have to be computed."""
        slowest_s = self.position_s or self.turn_s
        if not slowest_s:
            return FIRST_PATIENCE_S + POSITION_PATIENCE_S * positions
        return max(LEAST_PATIENCE_S, PATIENCE * (self.turn_s + slowest_s * positions))
