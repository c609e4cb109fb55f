"""Links that keep breaking though nobody died: the two members are parted, or one of them sits out for a while."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from ring.formation import Edge, arranged

STRIKES = 2
"""Breaks of the same link, without a step in between, before something is done about it."""
MAX_COOLDOWN_S = 600.0


class LinkJudge:
    """Remembers the breaks of one job. Pure; ``now`` is passed in.

    Args:
        cooldown_s: first time out; doubles with each, up to ``MAX_COOLDOWN_S``.

    Attributes:
        apart: pairs of peers that should not be neighbours.
        benched: peer id → until when it should be in no view.
    """

    def __init__(self, cooldown_s: float) -> None:
        self.apart: set[Edge] = set()
        self.benched: dict[str, float] = {}
        self._cooldown_s = cooldown_s
        self._strikes: Counter[Edge] = Counter()
        self._times_out: Counter[str] = Counter()

    def committed(self) -> None:
        """A step was applied: the links held for that long."""
        self._strikes.clear()

    def broke(self, reporter: str, suspect: str, members: Collection[str], now: float) -> str:
        """The link between two living members broke. Returns what is done about it, for people; often nothing."""
        edge = frozenset({reporter, suspect})
        self._strikes[edge] += 1
        if self._strikes[edge] < STRIKES:
            return ""
        del self._strikes[edge]
        if len(members) > 3 and arranged(sorted(members), self.apart | {edge}):
            self.apart.add(edge)
            return "they are no neighbours any more"
        cooldown_s = min(self._cooldown_s * 2.0 ** min(self._times_out[suspect], 16), MAX_COOLDOWN_S)
        self._times_out[suspect] += 1
        self.benched[suspect] = now + cooldown_s
        return f"the latter sits out {cooldown_s:.0f} s"

    def expire(self, now: float) -> None:
        """Whose time out is over may come back."""
        self.benched = {peer_id: until for peer_id, until in self.benched.items() if until > now}

    def forget(self, peer_id: str) -> None:
        """The peer is gone; another connection of it starts afresh."""
        self.benched.pop(peer_id, None)
        self.apart = {edge for edge in self.apart if peer_id not in edge}
