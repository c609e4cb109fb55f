"""Who leads: terms, and when a standby takes over. Pure.

Rules
    1. A seed leads in a *term*, which is in its store before it leads. A take-over begins a higher one. A standby has a
       *seat*, given by the leader, and its terms are those that leave the seat's number when divided by ``SEATS``: two
       standbys that take over without knowing of one another never do so in the same term.
    2. Generations of term t begin above t << 40, so that none is ever minted twice, however far the copy is behind.
    3. A standby takes over when it has heard nothing of the leader for ``takeover_s``, cannot dial it, nobody else
       leads, and at its door a majority of the members of the last view of some job stands (any worker, where no
       running job has a view). The next one in the order of the list waits as much longer, and as long as a knock
       counts at least: those that knock at the first one's door do not knock any more once it leads.
    4. A standby whose copy is behind what the workers have seen (a newer generation, a job, a term) never leads by
       itself: the members' state would be given up for a seed that was promised to lose nothing. Their ring trains on.
       A person may start it as a seed nevertheless.
    5. *Two sides.* Whoever has seen a higher term refuses a seed of a lower one: workers do, and standbys. A seed that
       hears of a higher term from a seed leads no more, at once. The lineage of the higher term survives. What the side
       of the lower one minted, and computed with changed membership since the cut, is given up: its workers come in as
       newcomers. A ring with unchanged membership is taken back as it is (rule 8 of ``ring.coordinator``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from p2ptrain.core.errors import StorageError
from ring.view import View
from wire.messages import MAX_TERM

SEATS = 16
"""The first seed's, which is 0, and one for each standby."""
GENERATION_BITS = 40
KNOCK_S = 15.0
"""So long does a knock count: a worker that looks for a seed comes within two rounds of its back-off (5 s and half as
much), one of which may wait for a machine that is gone."""
MAX_KNOCKS = 1024


def next_term(term: int, seat: int) -> int:
    """The next term that is of this seat. Raises ``StorageError`` where there is none."""
    found = term + 1 + (seat - term - 1) % SEATS
    if found >= MAX_TERM:
        raise StorageError(f"term {term} was one of the last", remedy="start a new cluster, with another --state")
    return found


def first_generation(term: int) -> int:
    """Generations of a term are above this one."""
    return term << GENERATION_BITS


@dataclass(frozen=True, slots=True)
class Knock:
    """What a worker said at a standby's door."""

    job: str
    generation: int
    term: int
    at: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether to take over, and why or why not. ``wait_s``: at the earliest after so long, where that is the reason."""

    take_over: bool
    reason: str
    wait_s: float = 0.0


class Succession:
    """What one standby knows of its leader and of who knocks. ``now`` is monotonic seconds."""

    def __init__(self, takeover_s: float, now: float) -> None:
        self.rank = 0
        self._takeover_s = takeover_s
        self._heard_at = now
        self._knocks: dict[str, Knock] = {}

    @property
    def patience_s(self) -> float:
        """How long the leader may be silent."""
        return self._takeover_s + self.rank * max(self._takeover_s, KNOCK_S)

    def heard(self, now: float) -> None:
        """The leader is there."""
        self._heard_at = now

    def knocked(self, peer_id: str, knock: Knock) -> None:
        self._knocks[peer_id] = knock
        for old in [other for other, item in self._knocks.items() if knock.at - item.at > KNOCK_S]:
            del self._knocks[old]
        if len(self._knocks) > MAX_KNOCKS:
            del self._knocks[min(self._knocks, key=lambda other: self._knocks[other].at)]

    def silent_for(self, now: float) -> float:
        return max(0.0, now - self._heard_at)

    def verdict(self, views: Mapping[str, View | None], live: Collection[str], term: int, now: float) -> Verdict:
        """Whether to take over with a copy of this term, whose jobs have these last views; ``live`` ones go on."""
        left_s = self.patience_s - self.silent_for(now)
        if left_s > 0:
            return Verdict(False, "the leader was heard not long ago", left_s)
        knocks = {peer_id: knock for peer_id, knock in self._knocks.items() if now - knock.at <= KNOCK_S}
        for knock in knocks.values():
            view = views.get(knock.job)
            if knock.term > term:
                return Verdict(False, f"workers have seen term {knock.term}, and the copy here is of term {term}")
            if knock.generation and knock.generation > (view.generation if view else 0):
                return Verdict(False, f"workers are in generation {knock.generation}, which the copy here lacks")
        running = [view for job, view in views.items() if view is not None and job in live]
        if not running:
            return Verdict(True, "no job has a view, and a worker came") if knocks else Verdict(False, "nobody came")
        counts = []
        for view in running:
            members = {member.peer_id for member in view.members}
            counts.append((len(members & knocks.keys()), len(members)))
            if 2 * counts[-1][0] > counts[-1][1]:
                return Verdict(True, f"{counts[-1][0]} of the {counts[-1][1]} members of a job came")
        here, of = max(counts)
        return Verdict(False, f"only {here} of the {of} members of a job came here")
