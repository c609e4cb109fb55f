"""Random histories of a job: what must hold after each event, whatever happens to its members."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from ring import coordination as co
from ring.coordinator import Coordinator
from ring.view import View
from tests.ring import history
from tests.ring.history import PEERS, History

TERMS = co.JobOptions(replicas=2, micro_batches=3)
FOLLOW = {"a", "c", "e"}
"""Those that can catch up beside a ring."""


@dataclass
class Member(history.Member):
    """``assigned``: by the seed's word. ``older``: all checkpoints that its disk holds."""

    assigned: bool = False  # type: ignore[assignment]
    disk: tuple[int, str] = (0, "0")
    older: list[tuple[int, str]] = field(default_factory=lambda: [(0, "0")])

    def newest_saved(self) -> tuple[int, str]:
        return self.disk


class Cluster(History):
    @initialize(running=st.sampled_from([0, 2, 3, 3, 4]))
    def begin(self, running: int) -> None:
        self.core = Coordinator("job", TERMS)
        self.members = {}
        self.began()
        self.begins_with(running)

    def new_member(self, peer_id: str) -> Member:
        before = self.members.get(peer_id)
        return Member(peer_id, disk=before.disk, older=before.older) if before else Member(peer_id)

    def peer_of(self, peer_id: str) -> co.Peer:
        return co.Peer(peer_id, peer_id, "h", 1, peer_id in FOLLOW)

    def carry_out(self, item: co.Instruction, before: View | None) -> None:
        if isinstance(item, co.SendAssign):
            member = self.members[item.peer_id]
            if member.reached:
                member.assigned = True
                if item.restore_step >= 0:
                    member.older = [saved for saved in member.older if saved[0] <= item.restore_step]
                    member.disk = member.older[-1]
                    self.leave_ring(member)
                    member.building, member.status, member.view = True, "", None
                    member.catching_up = False
                elif member.catching_up:
                    member.building, member.status, member.view = True, "", None
                elif member.status == "":
                    member.building = True
                elif member.status in co.BESIDE:
                    member.say("ready")
        elif isinstance(item, co.SendCatchUp):
            assert self.core.view is not None
            assert {source.peer_id for source in item.sources} <= {one.peer_id for one in self.core.view.members}
            member = self.members[item.peer_id]
            if member.reached and not member.trains and not member.building:
                member.catching_up, member.prepared_lineage = True, ""
        elif isinstance(item, co.SendRelease):
            self.offered.discard(item.peer_id)
            member = self.members[item.peer_id]
            if member.reached:
                self.leave_ring(member)
                member.assigned = member.building = member.catching_up = False
                member.status, member.view, member.prepared_lineage = "", None, ""
                member.applied, member.lineage = member.disk
        else:
            self.carry_out_alike(item, before)

    def check_mint(self, item: co.Mint, before: View | None) -> None:
        view = item.view
        assert before is None or view.generation > before.generation
        assert self.linked >= {record.peer_id for record in view.members}, "a lost peer in a view"
        assert sum(record.count for record in view.members) == TERMS.micro_batches
        assert len(view.members) <= TERMS.micro_batches
        assert view.sources()
        for record in before.members if before else ():
            member = self.members[record.peer_id]
            report = self.heard.get(record.peer_id)
            if record.peer_id not in self.core.peer_ids or not member.linked:
                continue
            if before and member.view is before and member.alive and not item.restored:
                assert not (member.trains and not member.torn), f"{record.peer_id} still trains in {before}"
                if report and report.generation == before.generation:
                    assert view.step >= report.applied, "a surviving member had applied more"
        self.minted.append(view)
        assert item.branch is not None or not item.restored
        self.branch = item.branch

    @rule()
    def everything_restarts(self) -> None:
        """After a power cut each has only what is on its disk."""
        for peer_id in PEERS:
            self.die(peer_id)
        for peer_id in PEERS[:3]:
            self.start(peer_id)

    @rule()
    def heal(self) -> None:
        for member in self.ring():
            if member.torn and member.view:
                member.applied, member.lineage, member.torn = member.view.step, member.view.lineage, False
                member.say("healed")
                member.status = "training"

    @rule(peer_id=st.sampled_from(PEERS))
    def save(self, peer_id: str) -> None:
        member = self.members[peer_id]
        if member.alive and member.status in ("training", "held", "done") and not member.torn:
            member.disk = (member.applied, member.lineage)
            member.older.append(member.disk)
            if member.linked:
                self.tell(self.all_saved())

    def all_saved(self) -> co.Saved:
        kept = {peer_id: frozenset(step for step, _ in it.older) for peer_id, it in self.members.items()}
        return co.Saved(kept)

    @rule(peer_id=st.sampled_from(PEERS), index=st.integers(0, 3))
    @precondition(lambda self: any(member.older[1:] for member in self.members.values()))
    def restore(self, peer_id: str, index: int) -> None:
        member = self.members[peer_id]
        if member.linked:
            step, lineage = member.older[index % len(member.older)]
            self.tell(co.Restore(step, peer_id, lineage))
            self.offer()

    @rule()
    def another_job_waits(self) -> None:
        """The shell lets a paused job's workers go where one of them has the state on its disk."""
        survivors = self.core.paused_survivors()
        newest = max((report.applied for report in survivors.values()), default=0) if survivors else 0
        if survivors and any(
            (newest, survivors[peer_id].lineage) == self.members[peer_id].disk for peer_id in survivors
        ):
            self.tell(co.Signal.YIELD)
            assert not self.core.peer_ids

    @rule()
    def restart_the_seed(self) -> None:
        core = self.core
        ended = core.state in ("done", "cancelled", "failed")
        past = co.StoredJob(
            state=core.state if ended else "waiting", reason=core.reason, paused=core.paused, view=core.view,
            corpus=core.corpus, known_step=core.known_step, saved=self.all_saved(), branch=self.branch,
        )  # fmt: skip
        for member in self.members.values():
            member.linked = False
            member.sent.clear()
        self.linked.clear()
        self.offered.clear()
        self.core = Coordinator("job", TERMS, past=past, now=self.now)

    def teardown(self) -> None:
        self.comes_to_run(["a", "b"], 60)


def test_random_histories() -> None:
    history.check(Cluster, 200)
