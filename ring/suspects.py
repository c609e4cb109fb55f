"""Whom to keep out of the next view for a while, and which two apart: links that keep breaking, peers that keep dying.

One back-off for all reasons (``Bench``): whoever must sit out again before it was quiet for ten times as long as it sat
out last sits out twice as long; after that it starts afresh. So a peer that dies once a minute is hardly kept out, and
one that dies as often as it is let in is let in ever more rarely.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass

from ring.formation import Edge, Reports, arranged

STRIKES = 2
"""Breaks of the same link, without a step in between, before something is done about it."""
MAX_COOLDOWN_S = 600.0
QUIET = 10
"""So many times its last time out a peer must have been quiet to be forgiven."""
FIRST_FALL_S = 1.0
"""Less than what a ring loses by a death and a newcomer is not worth keeping anybody out for."""


@dataclass(frozen=True, slots=True)
class _Out:
    seconds: float
    until: float

    def forgiven(self, now: float) -> bool:
        return now - self.until >= QUIET * max(self.seconds, FIRST_FALL_S)


class Bench:
    """Who sits out. Pure; ``now`` is passed in. A new connection of a peer changes nothing.

    Attributes:
        out: who should be in no view.
    """

    def __init__(self) -> None:
        self.out: set[str] = set()
        self._last: dict[str, _Out] = {}

    def sit_out(self, peer_id: str, now: float, *, first_s: float, most_s: float) -> float:
        """Have it sit out; returns for how long."""
        last = self._last.get(peer_id)
        seconds = min(max(2 * last.seconds, first_s), most_s) if last and not last.forgiven(now) else first_s
        self._last[peer_id] = _Out(seconds, now + seconds)
        self.out.add(peer_id)
        return seconds

    def warned(self, peer_id: str, now: float) -> bool:
        """Whether something was held against it lately. If not, something is from now on."""
        last = self._last.get(peer_id)
        if last is not None and not last.forgiven(now):
            return True
        self._last[peer_id] = _Out(0.0, now)
        return False

    def next(self) -> list[float]:
        """When somebody may come back."""
        return [self._last[peer_id].until for peer_id in self.out]

    def absolve(self, peer_id: str) -> None:
        """It was not its fault."""
        self.out.discard(peer_id)
        self._last.pop(peer_id, None)

    def expire(self, now: float) -> None:
        """Whose time is over may come back; who was quiet for long is forgotten."""
        self.out = {peer_id for peer_id in self.out if self._last[peer_id].until > now}
        self._last = {
            peer_id: last for peer_id, last in self._last.items() if peer_id in self.out or not last.forgiven(now)
        }


class LinkJudge:
    """Remembers the breaks of one job. Pure; ``now`` is passed in.

    Args:
        bench: where those who sit out do so. cooldown_s: first time out.

    Attributes:
        broken: whether the ring of the present view is.
        fallen: members of the present view that are gone, which explains any break; ``excused``: of those, who left
            on purpose, or only lost the state that it was being given.
        apart: pairs of peers that should not be neighbours.
    """

    def __init__(self, bench: Bench, cooldown_s: float) -> None:
        self.broken = False
        self.fallen: set[str] = set()
        self.excused: set[str] = set()
        self.apart: set[Edge] = set()
        self._bench = bench
        self._cooldown_s = cooldown_s
        self._first: tuple[str, str] | None = None  # reporter and suspect; later ones are its wake
        self._strikes: Counter[Edge] = Counter()
        self._witnesses: dict[str, set[str]] = {}

    def committed(self) -> None:
        """A step was applied: the links held for that long."""
        self._strikes.clear()

    def reported(self, reporter: str, suspect: str) -> None:
        """A member says that the ring is broken."""
        self._first = self._first or (reporter, suspect)

    def witnessed(self, suspect: str, neighbour: str) -> int:
        """A neighbour of the suspect calls it lost. Returns how many do."""
        self._witnesses.setdefault(suspect, set()).add(neighbour)
        return len(self._witnesses[suspect])

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
        if self.fallen or reporter == suspect or not {reporter, suspect} <= set(heirs):
            return ""
        edge = frozenset({reporter, suspect})
        self._strikes[edge] += 1
        if self._strikes[edge] < STRIKES:
            return ""
        del self._strikes[edge]
        done = self.part(reporter, suspect, heirs, name, now)
        return f"the link between {name(reporter)} and {name(suspect)} keeps breaking: {done}"

    def part(self, one: str, suspect: str, members: Collection[str], name: Callable[[str], str], now: float) -> str:
        """Keep the two from being neighbours, or else the suspect out. Returns what is done."""
        edge = frozenset({one, suspect})
        if len(members) > 3 and arranged(sorted(members), self.apart | {edge}):
            self.apart.add(edge)
            return "they are no neighbours any more"
        return self.sits_out(suspect, name, now)

    def sits_out(self, suspect: str, name: Callable[[str], str], now: float) -> str:
        """Keep the suspect out for a while. Returns that."""
        seconds = self._bench.sit_out(suspect, now, first_s=self._cooldown_s, most_s=MAX_COOLDOWN_S)
        return f"{name(suspect)} sits out {seconds:.0f} s"

    def flaps(self, peer_id: str, now: float) -> float:
        """A member has died. Returns for how long it is not let in again: seconds, 0 for the first time."""
        if not self._bench.warned(peer_id, now):
            return 0.0
        return self._bench.sit_out(peer_id, now, first_s=FIRST_FALL_S, most_s=max(FIRST_FALL_S, self._cooldown_s))

    def view_began(self) -> None:
        """A new ring: nothing is broken."""
        self.broken = False
        self.fallen.clear()
        self.excused.clear()
        self._witnesses.clear()
        self._first = None

    def forget(self, peer_id: str) -> None:
        """The peer is gone; another connection of it may have other links."""
        self.apart = {edge for edge in self.apart if peer_id not in edge}
