"""Who is on a job, and what the coordinator knows of each."""

from __future__ import annotations

from dataclasses import dataclass, field

from ring.coordination import STANDSTILL, Peer
from ring.formation import Reports, holds
from ring.view import View
from wire.job_messages import Report


@dataclass(slots=True)
class Known:
    """One peer of the job.

    Attributes:
        standing: its report, where it stands still and so may be put into a view.
        returned: it came back with what it had, and may follow a ring that this link never asked it to.
    """

    peer: Peer
    standing: Report | None = None
    returned: bool = False


@dataclass(slots=True)
class Roster:
    """The peers of a job, and where the members of its last view are.

    Attributes:
        running: members whose standstill is not known.
        unheard: of those, who has said nothing since the seed, or its link, came back.
        away: members of a running view whose link to the seed ended; maybe all of them.
        healing: members that fetch the state.
    """

    peers: dict[str, Known] = field(default_factory=dict)
    running: set[str] = field(default_factory=set)
    unheard: set[str] = field(default_factory=set)
    away: set[str] = field(default_factory=set)
    healing: set[str] = field(default_factory=set)

    def name(self, peer_id: str) -> str:
        known = self.peers.get(peer_id)
        return known.peer.name if known else peer_id

    def forget(self, peer_id: str) -> None:
        self.peers.pop(peer_id, None)
        for group in (self.running, self.unheard, self.away, self.healing):
            group.discard(peer_id)

    def clear(self) -> None:
        for group in (self.running, self.unheard, self.away, self.healing):
            group.clear()
        self.peers.clear()

    def standing(self) -> Reports:
        """Everybody that stands still."""
        return {peer_id: known.standing for peer_id, known in self.peers.items() if known.standing}

    def heirs(self, view: View | None) -> Reports:
        """Members that stand still in ``view``, or before it with the state that it was to begin with, as they never
        heard of it: they carry the run's state in memory."""
        if view is None:
            return {}
        members = {member.peer_id for member in view.members}
        return {
            peer_id: report
            for peer_id, report in self.standing().items()
            if report.status in STANDSTILL
            and peer_id in members
            and (report.generation == view.generation or holds(report, view.step, view.lineage))
        }

    def all_back(self, view: View) -> bool:
        """Whether every member of ``view`` is here and has loaded its state anew: nobody has it in memory any more."""
        standing = self.standing()
        return all(member.peer_id in standing and standing[member.peer_id].status == "ready" for member in view.members)

    def undisturbed(self) -> bool:
        """Whether every member is heard of and holds the state."""
        return not self.unheard | self.away | self.healing

    def building(self) -> bool:
        """Whether somebody is not ready yet."""
        return any(known.standing is None for known in self.peers.values())

    def validate(self, view: View | None, story: str) -> None:
        """Assert how the sets relate."""
        members = {member.peer_id for member in view.members} if view else set()
        assert self.running <= members, story
        assert self.unheard <= self.running, story
        assert self.running <= set(self.peers) | self.unheard, story
        assert not self.running & (set(self.standing()) | self.away), story
