"""Which piece of a state comes from which donor, and which donors are believed. Pure: no clock, no sockets.

Pieces are chunks of a state, or the reduced bytes of single steps. A piece counts once its bytes have the digest that
is wanted of it. All pieces stand in one queue from which every donor is served, so a faster donor gives more, and what
a donor that goes away had not delivered goes back to the queue's front: no piece that arrived is asked for again.

``Agreement`` decides what is wanted: each donor names a value (the digest of its table, the digest of a step), and the
one that most of them name leads. A change of the lead costs only the pieces in which the two differ.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

WINDOW = 4
"""Pieces asked of one donor ahead of their arrival: its link stays busy for a round trip."""
STRIKES = 3
"""Wrong pieces of a donor beside which there is no other; one that can be done without is given up at the first."""

V = TypeVar("V", bound=Hashable)


class Agreement(Generic[V]):
    """What most donors say. Ties go to what was said first."""

    def __init__(self) -> None:
        self._said: dict[str, V] = {}

    def says(self, donor: str, value: V) -> None:
        self._said[donor] = value

    def withdraw(self, donor: str) -> None:
        self._said.pop(donor, None)

    @property
    def lead(self) -> V | None:
        """What most say; None where nobody says anything."""
        values = list(self._said.values())
        return max(dict.fromkeys(values), key=values.count, default=None)

    def settled(self, waiting: int) -> bool:
        """Whether another value may not win any more, should ``waiting`` donors more say something."""
        values = list(self._said.values())
        counts = sorted((values.count(value) for value in dict.fromkeys(values)), reverse=True)
        return not waiting or len(counts) == 1 or (len(counts) > 1 and counts[0] > counts[1])

    def said_by(self, value: V | None) -> list[str]:
        return [donor for donor, its in self._said.items() if its == value]

    def odd(self) -> list[str]:
        """Donors that say something else than the lead."""
        lead = self.lead
        return [donor for donor, its in self._said.items() if its != lead]


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask ``donor`` for piece ``key``."""

    donor: str
    key: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Close the connection to ``donor``: what it sent was wrong."""

    donor: str
    reason: str


@dataclass(slots=True)
class _Donor:
    has: Container[int] = ()
    under_way: list[int] = field(default_factory=list)  # in the order of asking
    piece_s: float = 0.0  # between two arrivals, averaged; 0: none arrived yet
    busy_since: float = 0.0  # when the piece that is due began to be the next one
    strikes: int = 0


class Transfer:
    """One fetch from several donors.

    Args:
        limit: pieces that may be under way in all, where memory bounds them; 0: as many as the donors take.
    """

    def __init__(self, limit: int = 0) -> None:
        self._limit = limit
        self._wanted: dict[int, bytes] = {}
        self._landed: dict[int, bytes] = {}  # what lies in its place, right or wrong
        self._waiting: deque[int] = deque()
        self._donors: dict[str, _Donor] = {}

    # ---------------------------------------------------------------------------------------------------- what is known

    @property
    def donors(self) -> list[str]:
        return list(self._donors)

    @property
    def complete(self) -> bool:
        """Whether all that is wanted has arrived."""
        return not self._waiting and not any(donor.under_way for donor in self._donors.values())

    def has(self, key: int) -> bool:
        """Whether the piece lies in its place, as it is wanted."""
        return key in self._wanted and self._landed.get(key) == self._wanted[key]

    def under_way(self, donor: str) -> tuple[int, ...]:
        return tuple(self._donors[donor].under_way) if donor in self._donors else ()

    def validate(self) -> None:
        """Raise ``AssertionError`` where an invariant does not hold."""
        under_way = [key for donor in self._donors.values() for key in donor.under_way]
        queued = [*under_way, *self._waiting]
        assert len(queued) == len(set(queued)), "a piece is asked for twice"
        assert set(queued) == {key for key in self._wanted if not self.has(key)}, "a piece was forgotten"
        assert all(len(donor.under_way) <= WINDOW for donor in self._donors.values())
        assert not self._limit or len(under_way) <= self._limit

    # ----------------------------------------------------------------------------------------------------- what happens

    def want(self, key: int, digest: bytes) -> None:
        """The piece is wanted with this digest. What lies there with another one is fetched anew."""
        if self._wanted.get(key) == digest:
            return
        fresh = key not in self._wanted or self.has(key)
        self._wanted[key] = digest
        if fresh and not self.has(key):
            self._waiting.append(key)
        elif self.has(key):
            self._drop_from_queue(key)

    def forget(self, key: int) -> None:
        """The piece has been used up, or is wanted no more; it must not be under way."""
        self._wanted.pop(key, None)
        self._landed.pop(key, None)
        self._drop_from_queue(key)

    def offers(self, donor: str, has: Container[int], now: float) -> list[Ask]:
        """``donor`` can give the pieces in ``has``, which may grow; nothing, if it is not believed any more."""
        self._donors.setdefault(donor, _Donor()).has = has
        return self.asks(now)

    def lost(self, donor: str, now: float) -> list[Ask]:
        """``donor`` is gone: what was under way from it goes to the others."""
        gone = self._donors.pop(donor, None)
        if gone is not None:
            self._give_back(gone.under_way)
        return self.asks(now)

    def gone(self, donor: str, key: int, now: float) -> list[Ask]:
        """``donor`` has the piece no more."""
        it = self._donors.get(donor)
        if it is not None and key in it.under_way:
            it.under_way.remove(key)
            self._give_back([key])
        return self.asks(now)

    def arrived(self, donor: str, key: int, digest: bytes, now: float) -> list[Ask | GiveUp]:
        """The bytes of a piece that ``donor`` was asked for lie in their place, and have ``digest``."""
        it = self._donors.get(donor)
        if it is None or key not in it.under_way:
            return []  # of a donor that was given up meanwhile
        it.under_way.remove(key)
        self._landed[key] = digest
        took_s = max(now - it.busy_since, 0.0)
        it.piece_s = (3 * it.piece_s + took_s) / 4 if it.piece_s else took_s
        it.busy_since = now
        if self.has(key):
            return list(self.asks(now))
        self._give_back([key])
        it.strikes += 1
        if it.strikes >= STRIKES or any(key in other.has for other in self._donors.values() if other is not it):
            return [GiveUp(donor, f"what it sent as piece {key} is something else"), *self.lost(donor, now)]
        return list(self.asks(now))

    def asks(self, now: float) -> list[Ask]:
        """Fill the donors' windows from the queue."""
        asks: list[Ask] = []
        rest = sum(len(donor.under_way) for donor in self._donors.values())
        while self._waiting and not (self._limit and rest >= self._limit):
            ask = self._next(rest)
            if ask is None:
                break
            donor = self._donors[ask.donor]
            if not donor.under_way:
                donor.busy_since = now
            donor.under_way.append(ask.key)
            self._waiting.remove(ask.key)
            self._landed.pop(ask.key, None)  # it is being overwritten
            asks.append(ask)
            rest += 1
        return asks

    # ---------------------------------------------------------------------------------------------------------- helpers

    def _next(self, rest: int) -> Ask | None:
        """The next piece in the queue that a donor should be asked for: by whoever would be done with it first."""
        finish_s = self._finish_s(rest + len(self._waiting))
        order = sorted(self._donors.items(), key=lambda item: (len(item[1].under_way) + 1) * item[1].piece_s)
        for name, donor in order:
            window = WINDOW if donor.piece_s else 1  # an unknown one shows first what it can
            its_s = (len(donor.under_way) + 1) * donor.piece_s
            # Near the end a slow donor is not asked for what faster ones have brought before it would.
            late = its_s > finish_s and any(other.piece_s and other.piece_s < donor.piece_s for _, other in order)
            if len(donor.under_way) < window and not late:
                key = next((key for key in self._waiting if key in donor.has), None)
                if key is not None:
                    return Ask(name, key)
        return self._last_resort(order) if not rest else None

    def _last_resort(self, order: list[tuple[str, _Donor]]) -> Ask | None:
        """Nothing is under way: whoever has anything is asked, be it slow."""
        for name, donor in order:
            key = next((key for key in self._waiting if key in donor.has), None)
            if key is not None:
                return Ask(name, key)
        return None

    def _finish_s(self, pieces: int) -> float:
        """How long all donors together need for so many pieces, as far as is known."""
        rate = sum(1 / donor.piece_s for donor in self._donors.values() if donor.piece_s)
        return pieces / rate if rate else 0.0

    def _give_back(self, keys: list[int]) -> None:
        self._waiting.extendleft(key for key in reversed(keys) if key in self._wanted and not self.has(key))

    def _drop_from_queue(self, key: int) -> None:
        if key in self._waiting:
            self._waiting.remove(key)
