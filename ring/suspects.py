"""Links that keep breaking though nobody died: the two members are parted, or one of them sits out for a while."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection

from ring.formation import Edge, Reports, arranged

STRIKES = 2
"""Breaks of the same link, without a step in between, before something is done about it."""
MAX_COOLDOWN_S = 600.0


class LinkJudge:
    """Remembers the breaks of one job. Pure; ``now`` is passed in.

    Args:
        cooldown_s: first time out; doubles with each, up to ``MAX_COOLDOWN_S``.

    Attributes:
        broken: whether the ring of the present view is.
        somebody_died: a member of the present view is gone, which explains any break.
        apart: pairs of peers that should not be neighbours.
        benched: peer id → until when it should be in no view.
    """

    def __init__(self, cooldown_s: float) -> None:
        self.broken = False
        self.somebody_died = False
        self.apart: set[Edge] = set()
        self.benched: dict[str, float] = {}
        self._cooldown_s = cooldown_s
        self._first: tuple[str, str] | None = None  # reporter and suspect; later ones are its wake
        self._strikes: Counter[Edge] = Counter()
        self._times_out: Counter[str] = Counter()

    def committed(self) -> None:
        """A step was applied: the links held for that long."""
        self._strikes.clear()

    def reported(self, reporter: str, suspect: str) -> None:
        """A member says that the ring is broken."""
        self._first = self._first or (reporter, suspect)

    def judge(self, heirs: Reports, began_at: int, name: Callable[[str], str], now: float) -> str:
        """All stand still. Returns which link keeps breaking and what is done about it, for people; mostly nothing.

        Args:
            heirs: the members that live. began_at: the step at which the view began. name: of a peer.
        """
        if self._first is None:
            return ""
        if any(report.applied > began_at for report in heirs.values()):
            self.committed()
        reporter, suspect = self._first
        if self.somebody_died or reporter == suspect or not {reporter, suspect} <= set(heirs):
            return ""
        done = self._broke(reporter, suspect, heirs, now)
        return f"the link between {name(reporter)} and {name(suspect)} keeps breaking: {done}" if done else ""

    def view_began(self) -> None:
        """A new ring: nothing is broken."""
        self.broken = self.somebody_died = False
        self._first = None

    def expire(self, now: float) -> None:
        """Whose time out is over may come back."""
        self.benched = {peer_id: until for peer_id, until in self.benched.items() if until > now}

    def forget(self, peer_id: str) -> None:
        """The peer is gone; another connection of it starts afresh."""
        self.benched.pop(peer_id, None)
        self.apart = {edge for edge in self.apart if peer_id not in edge}

    def _broke(self, reporter: str, suspect: str, members: Collection[str], now: float) -> str:
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
