"""What random histories of a job have in common: simple members that obey the protocol, faults as hypothesis likes."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from ring import coordination as co
from ring.view import View
from wire.job_messages import Report

PEERS = ["a", "b", "c", "d", "e", "f"]
LAST_STEP = 40


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

    @property
    @abstractmethod
    def assigned(self) -> bool:
        """Whether it is on the job, by what it knows."""

    @abstractmethod
    def newest_saved(self) -> tuple[int, str]:
        """What it loads."""

    @property
    def reached(self) -> bool:
        """Whether what the seed says arrives. The link of one that is frozen ends before it thaws."""
        return self.alive and self.linked and not self.frozen

    @property
    def trains(self) -> bool:
        return self.alive and self.status == "training"

    def say(self, status: str, suspect: str = "", cause: str = "", beside: str = "") -> None:
        if status != "healed":
            self.status = status
        generation = self.view.generation if self.view and status not in co.OUTSIDE else 0
        prepared = self.applied + bool(self.prepared_lineage)
        report = Report("job", generation, status, self.applied, prepared, self.lineage, self.prepared_lineage,
                        square_sum=1.0, corpus="C", suspect=suspect, cause=cause, beside=beside)  # fmt: skip
        if self.linked:
            self.sent.append(co.PeerReported(self.peer_id, report))

    def check_place(self, view: View, rank: int) -> None:
        """Whether the view has it where it belongs."""

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
        self.check_place(view, rank)
        if view.members[rank].healthy:
            assert (self.applied, self.lineage) == (view.step, view.lineage), "called healthy, and is not"
            assert not half_replaced, "called healthy, and is half replaced"
        self.torn = half_replaced or (self.applied, self.lineage) != (view.step, view.lineage)


class History(RuleBasedStateMachine):
    """A job's core, its shell and its workers. A subclass makes the core, and carries out what it says."""

    core: Any

    def began(self) -> None:
        """Forget everything: a history begins."""
        self.now = 0.0
        self.members: dict[str, Any] = {peer_id: self.new_member(peer_id) for peer_id in PEERS}
        self.offered: set[str] = set()  # to this job, as the shell keeps it
        self.linked: set[str] = set()  # as the seed knows it
        self.minted: list[View] = []
        self.heard: dict[str, Report] = {}
        self.nonce = 0
        self.last_step = LAST_STEP
        self.branch: frozenset[str] | None = None

    def begins_with(self, running: int) -> None:
        for peer_id in PEERS[:running]:
            self.start(peer_id)
        for _ in range(3):
            self.settle()
            self.step(0, True)

    @abstractmethod
    def new_member(self, peer_id: str) -> Member:
        """A new process, with the disk that is there."""

    @abstractmethod
    def peer_of(self, peer_id: str) -> co.JobWorker:
        """As the seed is told of it."""

    @abstractmethod
    def carry_out(self, item: co.Instruction, before: View | None) -> None:
        """As the shell does."""

    @abstractmethod
    def check_mint(self, item: co.Mint, before: View | None) -> None:
        """What must hold of every view."""

    def settle_first(self) -> None:
        """What a subclass has under way besides."""

    @abstractmethod
    def heal(self) -> None:
        """Members of the ring that are torn fetch the state."""

    # ---- the shell

    def tell(self, event: co.Event) -> None:
        if isinstance(event, co.PeerReported):
            self.heard[event.peer_id] = event.report
        before = self.core.view
        items = self.core.handle(event, self.now)
        self.core.validate()
        for item in items:
            self.carry_out(item, before)

    def carry_out_alike(self, item: co.Instruction, before: View | None) -> None:
        if isinstance(item, co.Mint):
            self.check_mint(item, before)
            for record in item.view.members:
                if record.peer_id in self.linked and self.members[record.peer_id].reached:
                    self.members[record.peer_id].enter(item.view)
        elif isinstance(item, co.SendHold):
            for peer_id in item.peer_ids:
                member = self.members[peer_id]
                if member.reached and member.view and member.view.generation == item.generation:
                    if member.status in ("held", "done"):
                        member.say(member.status)
                    member.hold = True
        elif isinstance(item, co.SetState) and item.state in ("done", "cancelled", "failed"):
            self.offered.clear()

    # ---- the ring

    def leave_ring(self, member: Member) -> None:
        """Its neighbours see their sockets close, and so on round the ring."""
        was_training, view = member.trains, member.view
        member.status = ""
        if was_training and view:
            self.break_ring(view, member.peer_id)

    def break_ring(self, view: View, suspect: str) -> None:
        for record in view.members:
            member = self.members[record.peer_id]
            if member.trains and member.view is view and not member.frozen:
                if member.torn:
                    member.building, member.view, member.status = True, None, ""
                else:
                    member.say("broken", suspect)

    def ring(self) -> list[Member]:
        """The members of a view that can take a step: all are in it, whole and alike."""
        for view in reversed(self.minted):
            members = [self.members[record.peer_id] for record in view.members]
            if all(member.trains and member.view is view and not member.frozen for member in members):
                return members
        return []

    # ---- what happens

    @rule(peer_id=st.sampled_from(PEERS))
    def start(self, peer_id: str) -> None:
        if not self.members[peer_id].alive:
            self.members[peer_id] = member = self.new_member(peer_id)
            member.alive = True
            self.connect(member)

    def connect(self, member: Member) -> None:
        member.linked = True
        self.linked.add(member.peer_id)
        if member.assigned:
            self.offered.add(member.peer_id)
            self.tell(co.PeerReturned(self.peer_of(member.peer_id), member.view.generation if member.view else 0))
            if member.assigned and member.status not in ("", "pending") and not member.catching_up:
                member.say("ready" if member.status in co.OUTSIDE else member.status)
        self.offer()

    def offer(self) -> None:
        """Free workers go to the job, as the seed's scheduler has it."""
        for peer_id in sorted(self.linked - self.offered):
            if not self.core.refusal(peer_id):
                self.offered.add(peer_id)
                self.tell(co.PeerOffered(self.peer_of(peer_id)))

    @rule(peer_id=st.sampled_from(PEERS))
    def build(self, peer_id: str) -> None:
        member = self.members[peer_id]
        if member.alive and member.building and not member.frozen:
            member.load()

    @rule(peer_id=st.sampled_from(PEERS))
    def deliver(self, peer_id: str) -> None:
        member = self.members[peer_id]
        if member.sent:
            self.tell(member.sent.popleft())
            self.offer()

    @rule()
    def settle(self) -> None:
        """Everything that is on its way arrives."""
        self.settle_first()
        for _ in range(3):
            for peer_id in PEERS:
                self.build(peer_id)
            self.deliver_all()
        self.heal()
        for peer_id in PEERS:
            self.catch_up(peer_id)
        self.deliver_all()

    @rule(peer_id=st.sampled_from(PEERS))
    def catch_up(self, peer_id: str) -> None:
        """It has fetched what the ring holds; from now on it takes each step with the first that commits it."""
        member, ring = self.members[peer_id], self.ring()
        if member.catching_up and ring and not any(other.torn for other in ring):
            member.catching_up, member.applied, member.lineage = False, ring[0].applied, ring[0].lineage
            member.say("following")

    @rule(peer_id=st.sampled_from(PEERS))
    def lose_the_sources(self, peer_id: str) -> None:
        """What it fetched is worth nothing: it loads its own checkpoint and begins anew."""
        member = self.members[peer_id]
        if member.catching_up:
            member.building, member.status = True, ""

    @rule(peer_id=st.sampled_from(PEERS))
    def freeze(self, peer_id: str) -> None:
        """Its neighbours notice; what is on its way from it still arrives."""
        member = self.members[peer_id]
        if member.trains and not member.frozen and member.view:
            member.frozen = True
            self.break_ring(member.view, peer_id)

    @rule(peer_id=st.sampled_from(PEERS))
    def thaw(self, peer_id: str) -> None:
        """It finds all its connections closed."""
        member = self.members[peer_id]
        if member.frozen:
            self.unlink(member)
            member.frozen = False
            if member.torn:
                member.building, member.view, member.status = True, None, ""
            else:
                member.status = "broken"

    @rule(rank=st.integers(0, 5), cause=st.sampled_from(["contribution", "digest", "hop"]), again=st.integers(1, 3))
    def refuse(self, rank: int, cause: str, again: int) -> None:
        for _ in range(again):
            ring = self.ring()
            if not ring or any(member.torn for member in ring) or ring[0].applied >= self.last_step:
                return
            suspect, beside = ring[rank % len(ring)], ring[(rank + 1) % len(ring)]
            for member in ring:
                member.say("broken", suspect.peer_id, cause, beside.peer_id)
            self.settle()

    @rule(then=st.booleans())
    def step_and_settle(self, then: bool) -> None:
        self.step(0, True)
        if then:
            self.settle()

    @rule(committers=st.integers(1, 3))
    def die_in_mid_commit(self, committers: int) -> None:
        self.settle()
        self.step(committers, False)

    @rule(peer_id=st.sampled_from(PEERS))
    def restart(self, peer_id: str) -> None:
        self.die(peer_id)
        self.start(peer_id)
        self.settle()

    @rule(committers=st.integers(0, 6), told=st.booleans())
    def step(self, committers: int, told: bool) -> None:
        """All prepare; the first ``committers`` apply, then one that did dies, unless all did."""
        members = self.ring()
        if not members or any(member.torn for member in members):
            return
        assert len({(member.applied, member.lineage) for member in members}) == 1, "a fork"
        if members[0].applied >= self.last_step:
            for member in members:
                member.say("done")
            return
        self.nonce += 1
        lineage = f"{members[0].lineage[:20]}.{self.nonce}"
        for member in members:
            member.prepared_lineage = lineage
        applied = members[: committers or len(members)]
        before = members[0].applied, members[0].lineage
        for member in applied:
            member.applied, member.lineage, member.prepared_lineage = member.applied + 1, lineage, ""
        for other in self.members.values():
            if other.alive and other.status == "following" and (other.applied, other.lineage) == before:
                other.applied, other.lineage = members[0].applied, lineage
        if len(applied) < len(members):
            self.kill(applied[0])
            return
        if told and members[0].linked:
            members[0].sent.append(co.StepCommitted(members[0].applied))
        if any(member.hold for member in members):
            for member in members:
                member.say("held")

    @rule(peer_id=st.sampled_from(PEERS))
    def die(self, peer_id: str) -> None:
        if self.members[peer_id].alive:
            self.kill(self.members[peer_id])

    def kill(self, member: Member) -> None:
        self.leave_ring(member)
        member.alive = False
        self.unlink(member)

    def unlink(self, member: Member) -> None:
        if member.linked:
            member.linked = False
            member.sent.clear()
            self.linked.discard(member.peer_id)
            self.offered.discard(member.peer_id)
            self.tell(co.PeerLost(member.peer_id, "closed"))
            self.offer()

    @rule(peer_id=st.sampled_from(PEERS))
    def leave(self, peer_id: str) -> None:
        member = self.members[peer_id]
        if member.reached:
            self.leave_ring(member)
            member.alive = member.linked = False
            member.sent.clear()
            self.linked.discard(peer_id)
            self.offered.discard(peer_id)
            self.tell(co.PeerLost(peer_id, "stopped", left=True))

    @rule(peer_id=st.sampled_from(PEERS))
    def lose_the_seed(self, peer_id: str) -> None:
        self.unlink(self.members[peer_id])

    @rule(peer_id=st.sampled_from(PEERS))
    def find_the_seed(self, peer_id: str) -> None:
        member = self.members[peer_id]
        if member.alive and not member.linked and not member.frozen:
            self.connect(member)

    @rule(rank=st.integers(0, 5))
    def cut(self, rank: int) -> None:
        members = self.ring()
        if len(members) > 1 and members[0].view:
            self.break_ring(members[0].view, members[rank % len(members)].peer_id)

    @rule(seconds=st.sampled_from([0.5, 3.0, 30.0]))
    def wait(self, seconds: float) -> None:
        """Reports that are on their way arrive long before a deadline: a stuck peer is a fault of its own."""
        if seconds > 1.0:
            self.deliver_all()
            for member in self.members.values():
                if member.frozen:
                    self.unlink(member)
        self.now += seconds
        self.tell(co.Signal.TICK)
        self.offer()

    def deliver_all(self) -> None:
        while any(member.sent for member in self.members.values()):
            for peer_id in PEERS:
                self.deliver(peer_id)

    @rule()
    def pause(self) -> None:
        self.tell(co.Signal.PAUSE)

    @rule()
    def resume(self) -> None:
        self.tell(co.Signal.RESUME)
        self.offer()

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "core"):
            self.core.validate()
            self.core.kept_out()  # raises nothing

    def comes_to_run(self, peer_ids: list[str], rounds: int) -> None:
        """All faults stop, and these workers are there: the job must come to run, or be done."""
        if not hasattr(self, "core"):
            return
        self.tell(co.Signal.RESUME)
        for peer_id in peer_ids:
            if not self.members[peer_id].alive:
                self.start(peer_id)
        for _ in range(rounds):
            for peer_id in PEERS:
                self.thaw(peer_id)
                self.find_the_seed(peer_id)
            self.settle()
            self.deliver_all()
            ring = self.ring()
            if self.core.state == "done" or "cannot be computed" in self.core.reason:
                return
            runs = ring and ring[0].view is self.core.view and not any(member.torn or member.hold for member in ring)
            if self.core.state == "running" and runs:
                return
            self.step(0, True)
            self.wait(30.0)
        stuck = "\n".join(str(member) for member in self.members.values())
        pytest.fail(f"{self.core.state}: {self.core.reason}\n{stuck}\n" + self.core.history.replace("; ", "\n"))


def check(cluster: type[RuleBasedStateMachine], examples: int) -> None:
    """Play that many histories of a cluster."""
    run_state_machine_as_test(
        cluster,
        settings=settings(
            max_examples=examples,
            stateful_step_count=50,
            suppress_health_check=list(HealthCheck),
            derandomize=True,
        ),
    )
