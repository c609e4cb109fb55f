"""Newcomers that fetch the state beside a running ring, so that nobody waits for it. Pure; ``now`` is passed in.

A newcomer is asked to *catch up*, and says that it *follows* when it is at most a step behind, or that it cannot be.
Then it comes in, and the ring stops for no more than a new view. It comes in all the same when what it was given to
catch up is over: then it heals within the ring.

Who follows waits for those that still catch up, but no longer than it took itself. So several come in with one hold,
and none waits more than twice what it needed.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from ring.view import REDUCED_TO_STATE

FED = 2
"""Newcomers that catch up at a time, for each member: each gives to two, so any crowd is in after few rounds."""
ASKS = 4
"""A newcomer that had to begin anew so often heals within the ring, where all wait for it. How much members may give
beside their steps they find out by giving: the first tries are for that."""
DONORS = 3
"""To each newcomer; more would only slow down more members' steps."""
SLOWEST_BYTES_PER_S = 1e6
"""A transfer that gets on more slowly than that is not waited for; members that heal within a ring have as long."""


@dataclass(slots=True)
class _Chase:
    """``due``: of one that catches up, when it comes in anyway; of one that follows, until when it waits for others;
    None: it comes in at once. ``anew``: it has lost what it had and must be asked again."""

    began: float
    due: float | None
    following: bool = False
    anew: bool = False
    asks: int = 1


class Admission:
    """Who catches up with the present ring, by peer id."""

    def __init__(self) -> None:
        self._chases: dict[str, _Chase] = {}

    @property
    def moving(self) -> frozenset[str]:
        """Whose state changes beside the ring, so that nothing it said of it before can be relied on."""
        return frozenset(peer_id for peer_id, chase in self._chases.items() if not chase.anew)

    def next(self) -> list[float]:
        """When to ``expire`` at the latest."""
        return [chase.due for chase in self._chases.values() if chase.due is not None]

    def expire(self, now: float) -> None:
        for chase in self._chases.values():
            if chase.due is not None and chase.due <= now:
                chase.following, chase.due = True, None

    def to_ask(self, beside: Collection[str], members: int, room: int) -> list[str]:
        """Of those that stand beside a ring of ``members`` with ``room`` for more, whom to ask now."""
        under_way = [chase for peer_id, chase in self._chases.items() if peer_id in beside and not chase.anew]
        chasing = sum(not chase.following for chase in under_way)
        wanted = sorted(peer_id for peer_id in beside if self._is_to_ask(peer_id))
        return wanted[: max(min(FED * members - chasing, room - len(under_way)), 0)]

    def _is_to_ask(self, peer_id: str) -> bool:
        chase = self._chases.get(peer_id)
        return chase is None or (chase.anew and not chase.following)

    def asked(self, peer_id: str, now: float, reduce_bytes: int, grace_s: float) -> None:
        """It was asked to catch up with a state of that size."""
        chase = self._chases.get(peer_id)
        if chase is not None:  # its time runs from the first time on
            chase.anew, chase.asks = False, chase.asks + 1
            return
        patience_s = grace_s + REDUCED_TO_STATE * reduce_bytes / SLOWEST_BYTES_PER_S
        self._chases[peer_id] = _Chase(now, now + patience_s)

    def took_up(self, peer_id: str, now: float) -> None:
        """It follows already, as it was asked to before its link to the seed was lost."""
        self._chases[peer_id] = _Chase(now, now)

    def let_in(self, peer_id: str, now: float) -> None:
        """The ring stops for it: it has what the ring began with, and comes in however far that is by then."""
        self._chases.setdefault(peer_id, _Chase(now, None, following=True, anew=True))

    def said(self, peer_id: str, status: str, now: float) -> None:
        """``following``, or ``ready`` where it had to begin anew."""
        chase = self._chases.get(peer_id)
        if chase is None:
            return
        chase.anew = status == "ready"
        if status == "following" and not chase.following:
            chase.following, chase.due = True, 2 * now - chase.began
        elif chase.anew:
            overdue = chase.asks >= ASKS or (chase.following and chase.due is None)
            chase.following = overdue
            chase.due = None if overdue else chase.due

    def may_come(self, beside: Collection[str]) -> list[str]:
        """Of those beside the ring that were asked, who comes in now."""
        through = [peer_id for peer_id in sorted(beside) if peer_id in self._chases and self._chases[peer_id].following]
        waits = any(not chase.following for peer_id, chase in self._chases.items() if peer_id in beside)
        if waits and all(self._chases[peer_id].due is not None for peer_id in through):
            return []
        return through

    def through(self, peer_id: str) -> bool:
        """Whether it follows, or has had its time."""
        return peer_id in self._chases and self._chases[peer_id].following

    def forget(self, peer_id: str) -> None:
        """It is in, or gone, or must tell anew what it has."""
        self._chases.pop(peer_id, None)

    def clear(self) -> None:
        self._chases.clear()
