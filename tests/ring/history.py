"""Workers in random histories of a job: simple members that obey the protocol, and their disks."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from ring import coordination as co
from ring.view import View
from wire.job_messages import Report


@dataclass
class Disk:
    """What a worker's disk holds, by stage: (step, lineage), oldest first; and of the whole model."""

    saved: dict[int, list[tuple[int, str]]] = field(default_factory=dict)
    wholes: list[tuple[int, str]] = field(default_factory=list)

    def of(self, stage: int) -> list[tuple[int, str]]:
        return self.saved.setdefault(stage, [(0, "0")])

    def adopt(self, stage: int, state: tuple[int, str]) -> None:
        """The stage's part of somebody's whole checkpoint."""
        self.saved[stage] = [*(saved for saved in self.of(stage) if saved[0] < state[0]), state]


@dataclass
class Member:
    """One worker process, as simple as the protocol allows."""

    peer_id: str
    alive: bool = False
    linked: bool = False  # to the seed
    building: bool = False
    status: str = ""  # ready, following, training, pending, held, broken, done
    catching_up: bool = False  # was asked to catch up; until it follows, what it holds is half replaced
    frozen: bool = False
    view: View | None = None
    applied: int = 0
    lineage: str = "0"
    prepared_lineage: str = ""
    torn: bool = False
    hold: bool = False
    sent: deque[co.Event] = field(default_factory=deque)  # on their way to the seed, in order
    disk: Disk = field(default_factory=Disk)  # that of its machine
    stage: int | None = None  # of the job, by what it knows
    restore: int = -1
    holders: list[Member] = field(default_factory=list, repr=False)  # of what it was told to go back to

    @property
    def reached(self) -> bool:
        """Whether what the seed says arrives. The link of one that is frozen ends before it thaws."""
        return self.alive and self.linked and not self.frozen

    @property
    def trains(self) -> bool:
        return self.alive and self.status == "training"

    def say(self, status: str, suspect: str = "", cause: str = "") -> None:
        if status != "healed":
            self.status = status
        generation = self.view.generation if self.view and status not in co.OUTSIDE else 0
        prepared = self.applied + bool(self.prepared_lineage)
        report = Report("job", generation, status, self.applied, prepared, self.lineage, self.prepared_lineage,
                        square_sum=1.0, corpus="C", suspect=suspect, cause=cause)  # fmt: skip
        if self.linked:
            self.sent.append(co.PeerReported(self.peer_id, report))

    def newest_saved(self) -> tuple[int, str]:
        assert self.stage is not None
        known, wholes = self.disk.of(self.stage), self.disk.wholes
        if self.restore >= 0:
            known[:] = [saved for saved in known if saved[0] <= self.restore]
            wholes[:] = [saved for saved in wholes if saved[0] <= self.restore]
            there = [holder.disk.wholes for holder in self.holders if holder.alive and not holder.frozen]
            wholes = [whole for those in (wholes, *there) for whole in those if whole[0] == self.restore]
        if wholes and wholes[0][0] > known[-1][0]:
            self.disk.adopt(self.stage, max(wholes, key=lambda whole: whole[0]))
        self.restore = -1
        return self.disk.of(self.stage)[-1]

    def load(self) -> None:
        """Its newest checkpoint, or that it was told to go back to."""
        (self.applied, self.lineage), self.prepared_lineage, self.torn = self.newest_saved(), "", False
        self.building = self.catching_up = False
        pending = self.view if self.status == "pending" else None
        self.view = None
        self.say("ready")
        if pending is not None:
            self.enter(pending)

    def enter(self, view: View) -> None:
        if self.building:
            self.view, self.status = view, "pending"
            return
        half_replaced, self.catching_up = self.catching_up, False
        self.view, self.hold, self.status = view, False, "training"
        if self.prepared_lineage and (self.applied + 1, self.prepared_lineage) == (view.step, view.lineage):
            self.applied, self.lineage = view.step, view.lineage
        self.prepared_lineage = ""
        rank = view.rank_of(self.peer_id)
        assert rank is not None
        assert view.stage_of(rank) == self.stage, "at a stage that it does not hold"
        if view.members[rank].healthy:
            assert (self.applied, self.lineage) == (view.step, view.lineage), "called healthy, and is not"
            assert not half_replaced, "called healthy, and is half replaced"
        self.torn = half_replaced or (self.applied, self.lineage) != (view.step, view.lineage)
