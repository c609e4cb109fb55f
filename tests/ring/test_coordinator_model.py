"""Random histories of a job: what must hold after each event, whatever happens to its workers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from p2ptrain.core.footprint import ModelSizes
from ring import coordination as co
from ring.coordinator import Coordinator
from ring.planning.workloads import ModelShape, TrainingWorkload
from ring.view import View
from tests.invariants import check_invariants
from tests.ring.history import Disk, Member
from wire.codec import encode
from wire.job_messages import Report

PEERS = ["a", "b", "c", "d", "e", "f"]
LAST_STEP = 40
SHAPE = ModelShape.of(ModelSizes((1 << 20,) * 6, (0,) * 6, 1 << 20, 1 << 20, 0), 8, 8, 8)
MEMORY = {"a": 0, "b": 64 << 20, "c": 48 << 20, "d": 64 << 20, "e": 12 << 20, "f": 2 << 20}
"""``e`` can hold a small part, ``f`` none, the others any."""
SPEED = {"a": 1e9, "b": 2e9, "c": 1e9, "d": 4e9, "e": 1e9, "f": 9e9}


class Cluster(RuleBasedStateMachine):
    """A job's core, its shell and its workers."""

    stages = 2
    replicas, micro_batches = 1, 2
    enough = "abcdef"  # with these the job must come to run
    training: TrainingWorkload | None = None

    @property
    def options(self) -> co.JobOptions:
        return co.JobOptions(self.replicas, self.micro_batches, parts=self.stages, training=self.training)

    @initialize(running=st.sampled_from([0, 2, 3, 4, 4, 5]))
    def begin(self, running: int) -> None:
        self.core = Coordinator("job", self.options)
        self.cuts: tuple[int, ...] = ()  # as they are kept
        self.surveys = 0
        self.wanted: set[int] = set()  # steps that a person went back to
        self.full: set[str] = set()  # those whose disks take nothing more
        self.kept: set[tuple[int | None, tuple[int, str]]] = set()  # part and state of every save of a result
        self.now = 0.0
        self.disks = {peer_id: Disk() for peer_id in PEERS}
        self.members = {peer_id: Member(peer_id, disk=self.disks[peer_id]) for peer_id in PEERS}
        self.offered: set[str] = set()  # to this job, as the shell keeps it
        self.linked: set[str] = set()  # as the seed knows it
        self.minted: list[View] = []
        self.heard: dict[str, Report] = {}
        self.nonce = 0
        self.last_step = LAST_STEP
        self.branch: frozenset[str] | None = None
        for peer_id in PEERS[:running]:
            self.start(peer_id)
        for _ in range(3):
            self.settle()
            self.step(0, True)

    # ---- the shell

    def peer_of(self, peer_id: str) -> co.JobWorker:
        return co.JobWorker(peer_id, peer_id, "h", 1, memory_bytes=MEMORY[peer_id], flops=SPEED[peer_id])

    def tell(self, event: co.Event) -> None:
        had = {peer_id: self.core.part_of(peer_id) for peer_id in self.core.peer_ids}
        if isinstance(event, co.PeerReported):
            self.heard[event.peer_id] = event.report
        before = self.core.view
        items = self.core.handle(event, self.now)
        check_invariants(self.core)
        for item in items:
            self.carry_out(item, before)
        there = self.core.peer_ids
        assert {part for peer_id, part in had.items() if peer_id in there and part is not None} <= {
            self.core.part_of(peer_id) for peer_id in there
        }, "the last worker of a part took another"

    def carry_out(self, item: co.Instruction, before: View | None) -> None:
        if isinstance(item, co.CutsChosen):
            assert not self.cuts, "cuts never change"
            assert not self.minted
            self.cuts = item.cuts
        elif isinstance(item, co.SendSurvey):
            self.surveys += 1
        elif isinstance(item, co.SendAssign):
            self.check_restore(item)
            self.check_memory(item)
            self.assigned(self.members[item.peer_id], item)
        elif isinstance(item, co.SendCatchUp):
            self.catches_up(item)
        elif isinstance(item, co.SendSave):
            for peer_id in item.peer_ids:
                self.save_result(self.members[peer_id])
        elif isinstance(item, co.SetState) and item.state == "done":
            done = {member.stage: (member.applied, member.lineage) for member in self.members.values()
                    if member.status == "done" and member.view is self.core.view}  # fmt: skip
            saved = {(stage, state) for disk in self.disks.values() for stage in disk.saved for state in disk.of(stage)}
            assert done.items() <= saved | self.kept, "a result is on no disk"
            self.offered.clear()
        elif isinstance(item, co.SetState) and item.state in ("cancelled", "failed"):
            self.offered.clear()
        elif isinstance(item, co.SendRelease):
            self.offered.discard(item.peer_id)
            member = self.members[item.peer_id]
            if member.reached:
                self.leave_ring(member)
                member.stage, member.building, member.catching_up = None, False, False
                member.status, member.view, member.prepared_lineage = "", None, ""
        elif isinstance(item, co.Mint):
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

    @rule(peer_id=st.sampled_from(PEERS))
    def fill_or_free_the_disk(self, peer_id: str) -> None:
        self.full ^= {peer_id}

    @rule(rare=st.integers(0, 7))
    def take_the_last_step(self, rare: int) -> None:
        if not rare and (ring := self.ring()) and ring[0].applied:
            self.last_step = ring[0].applied
            self.step_and_settle(True)

    def save_result(self, member: Member) -> None:
        if member.reached and member.status == "done" and member.stage is not None:
            state = member.applied, member.lineage
            if member.peer_id not in self.full and member.disk.of(member.stage)[-1] != state:
                member.disk.of(member.stage).append(state)
                self.kept.add((member.stage, state))
                member.sent.append(self.what_is_saved())
            member.say("done")

    def check_memory(self, item: co.SendAssign) -> None:
        """No worker is given a part that it has no memory for, and none before the model is cut."""
        if self.training is None:
            return
        assert self.cuts
        known = replace(self.training, cuts=self.cuts)
        bounds, peer = (0, *self.cuts, known.layers), self.peer_of(item.peer_id)
        need = known.need_bytes(item.stage, bounds[item.stage], bounds[item.stage + 1])
        assert not peer.memory_bytes or need <= peer.memory_bytes, f"{item.peer_id} has no memory for {item.stage}"

    def check_restore(self, item: co.SendAssign) -> None:
        """Of itself it goes back no further than it must: to the newest step that workers here keep as a whole."""
        if item.restore_step >= 0 and item.restore_step not in self.wanted:
            kept = self.kept_as_a_whole()
            assert not kept or item.restore_step >= kept[-1][0], f"goes back to {item.restore_step}, there is {kept}"

    def kept_as_a_whole(self) -> list[tuple[int, str]]:
        kept: dict[tuple[int, str], set[int]] = {}
        for peer_id in sorted(self.linked):
            stage = self.core.part_of(peer_id)
            for state in self.disks[peer_id].of(stage) if stage is not None else ():
                kept.setdefault(state, set()).add(stage or 0)
            for state in self.disks[peer_id].wholes if peer_id in self.core.peer_ids else ():
                kept.setdefault(state, set()).update(range(self.stages))
        return sorted(state for state, stages in kept.items() if len(stages) == self.stages)

    def assigned(self, member: Member, item: co.SendAssign) -> None:
        assert item.stages == self.stages
        if not member.reached:
            return
        member.holders = [self.members[peer.peer_id] for peer in item.holders]
        if member.stage != item.stage:
            self.leave_ring(member)
            member.stage, member.restore, member.building, member.status = item.stage, item.restore_step, True, ""
            member.view, member.catching_up = None, False
        elif item.restore_step >= 0:
            self.leave_ring(member)
            member.building, member.status, member.view, member.catching_up = True, "", None, False
            member.restore = item.restore_step
        elif member.catching_up:
            member.building, member.status, member.view = True, "", None
        elif member.status in co.OUTSIDE:
            member.say("ready")
        elif member.status not in ("", "pending"):
            member.say(member.status)

    def catches_up(self, item: co.SendCatchUp) -> None:
        view, member = self.core.view, self.members[item.peer_id]
        assert view is not None
        assert item.sources, "nobody to catch up with"
        for source in item.sources:
            rank = view.rank_of(source.peer_id)
            assert rank is not None
            assert view.stage_of(rank) == self.core.part_of(item.peer_id), "a source of another stage"
        if member.reached and not member.trains and not member.building:
            member.catching_up, member.prepared_lineage = True, ""

    def check_mint(self, item: co.Mint, before: View | None) -> None:
        view = item.view
        assert before is None or view.generation > before.generation
        assert self.linked >= {record.peer_id for record in view.members}, "a lost worker in a view"
        assert view.stages == self.stages
        assert view.size % self.stages == 0, "half a replica"
        assert sum(record.count for record in view.members) == self.micro_batches
        assert view.replicas <= self.micro_batches
        encode(replace(view, lineage="ab" * 16))  # a valid message
        for stage in range(self.stages):
            assert any(record.healthy for record in view.same_stage(stage)), f"nobody holds stage {stage}"
        for record in before.members if before else ():
            member, report = self.members[record.peer_id], self.heard.get(record.peer_id)
            if not member.linked or member.view is not before or not member.alive or item.restored:
                continue
            assert not (member.trains and not member.torn and not member.sent), f"{record.peer_id} still trains"
            assert report is None or report.generation != view.generation
        if before is not None and not item.restored:
            assert view.step >= self.whole_step(before), "a step that the survivors hold together was given up"
        self.minted.append(view)
        assert item.branch is not None or not item.restored
        self.branch = item.branch

    def whole_step(self, before: View) -> int:
        """The newest step that the survivors of a view hold together, as they told."""
        states = []
        for record in before.members:
            member, report = self.members[record.peer_id], self.heard.get(record.peer_id)
            told = report is not None and report.generation == before.generation and member.view is before
            if told and report is not None and member.linked and report.status in co.STANDSTILL:
                states.append((member.stage, report))
        best = 0
        for _, report in states:
            state = (report.applied, report.lineage)
            stages = {
                stage
                for stage, other in states
                if state in ((other.applied, other.lineage), (other.prepared, other.prepared_lineage))
            }
            if len(stages) == self.stages:
                best = max(best, state[0])
        return best

    @rule()
    def survey(self) -> None:
        if self.surveys:
            self.surveys -= 1
            self.tell(co.Signal.SURVEYED)

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
            self.members[peer_id] = member = Member(peer_id, disk=self.disks[peer_id])
            member.alive = True
            self.connect(member)

    def connect(self, member: Member) -> None:
        member.linked = True
        self.linked.add(member.peer_id)
        if member.stage is not None:
            self.offered.add(member.peer_id)
            self.tell(co.PeerReturned(self.peer_of(member.peer_id), member.view.generation if member.view else 0))
            if member.stage is not None and member.status not in ("", "pending") and not member.catching_up:
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
        self.survey()
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

    @rule(rank=st.integers(0, 5), cause=st.sampled_from(["contribution", "digest"]), again=st.integers(1, 3))
    def refuse(self, rank: int, cause: str, again: int) -> None:
        for _ in range(again):
            ring = self.ring()
            if not ring or any(member.torn for member in ring) or ring[0].applied >= self.last_step:
                return
            suspect = ring[rank % len(ring)]
            for member in ring:
                member.say("broken", suspect.peer_id, cause)
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
            check_invariants(self.core)
            self.core.kept_out()  # raises nothing

    @rule(one=st.sampled_from(PEERS), other=st.sampled_from(PEERS), committers=st.integers(0, 3))
    def two_die(self, one: str, other: str, committers: int) -> None:
        self.settle()
        if committers:
            self.step(committers, False)
        self.die(one)
        self.die(other)

    @rule(count=st.integers(2, 6))
    def everything_restarts(self, count: int) -> None:
        for peer_id in PEERS:
            self.die(peer_id)
        for peer_id in PEERS[:count]:
            self.start(peer_id)

    @rule()
    def heal(self) -> None:
        ring = self.ring()
        for member in ring:
            if member.torn and member.view:
                whole = [o for o in ring if o.stage == member.stage and not o.torn]
                if whole:
                    member.applied, member.lineage, member.torn = member.view.step, member.view.lineage, False
                    member.say("healed")
                    assert member.status == "training"

    @rule(replicas=st.integers(1, 2))
    def save(self, replicas: int) -> None:
        """The members of the first replicas save the confirmed step."""
        members = self.ring()
        if not members or any(member.torn for member in members):
            return
        for member in members[: replicas * self.stages]:
            assert member.stage is not None
            known = member.disk.of(member.stage)
            if known[-1] != (member.applied, member.lineage):
                known.append((member.applied, member.lineage))
        self.tell_saved()

    def tell_saved(self) -> None:
        self.tell(self.what_is_saved())

    def what_is_saved(self) -> co.CheckpointsSaved:
        parts = {}
        for peer_id, disk in self.disks.items():
            for stage, saved in disk.saved.items():
                if len(saved) > 1:
                    parts[peer_id, stage] = frozenset(step for step, _ in saved)
        wholes = {peer_id: frozenset(step for step, _ in disk.wholes) for peer_id, disk in self.disks.items()}
        if self.stages == 1:
            parts, wholes = {}, {peer_id: steps for (peer_id, _), steps in parts.items()}
        return co.CheckpointsSaved(wholes, parts)

    @rule(peer_id=st.sampled_from(PEERS))
    def gather(self, peer_id: str) -> None:
        """It has the parts of a state that workers saved put together."""
        parts: dict[tuple[int, str], set[int]] = {}
        for other in PEERS:
            if self.members[other].reached:
                for stage, saved in self.disks[other].saved.items():
                    for state in saved:
                        parts.setdefault(state, set()).add(stage)
        there = [state for state, stages in parts.items() if len(stages) == self.stages and state[0] > 0]
        member = self.members[peer_id]
        if self.stages > 1 and there and member.reached and not member.building and member.stage is not None:
            wholes = member.disk.wholes
            if max(there) not in wholes:
                wholes[:] = [*(whole for whole in wholes if whole[0] < max(there)[0]), max(there)]
            self.tell_saved()

    @rule(peer_id=st.sampled_from(PEERS))
    def lose_the_disk(self, peer_id: str) -> None:
        self.die(peer_id)
        self.disks[peer_id] = self.members[peer_id].disk = Disk()

    @rule(lost=st.integers(0, 2), keeper=st.integers(0, 2))
    def lose_a_stage(self, lost: int, keeper: int) -> None:
        """All that hold it, and their disks: others may have it on theirs."""
        members = self.ring()
        if members and not any(member.torn for member in members):
            self.save(1)
            self.gather(members[keeper % self.stages].peer_id)
            self.step_and_settle(True)
            for member in list(self.members.values()):
                if member.stage == lost % self.stages:
                    self.lose_the_disk(member.peer_id)
            for _ in range(3):
                self.settle()
                self.wait(700.0)

    @rule(index=st.integers(0, 3))
    def restore(self, index: int) -> None:
        """To a step of which every stage has a checkpoint at somebody who is here, as the seed sees to."""
        whole = self.kept_as_a_whole()
        if whole and self.core.phase is not co.JobPhase.CANCELLED:
            step, lineage = whole[index % len(whole)]
            self.wanted.add(step)
            holders = [
                peer_id for peer_id in sorted(self.linked) if whole[index % len(whole)] in self.disks[peer_id].of(0)
            ]
            self.tell(co.Restore(step, holders[0] if self.stages == 1 else "a", lineage))
            self.offer()

    @rule(peer_id=st.sampled_from(PEERS))
    def another_task_needs(self, peer_id: str) -> None:
        self.tell(co.PeerWithdrawn(peer_id))

    @rule()
    def links_become_better(self) -> None:
        self.tell(co.Signal.REFORM)

    @rule()
    def another_job_waits(self) -> None:
        survivors = self.core.paused_survivors()
        if not survivors:
            return
        newest = max(report.applied for report in survivors.values())
        kept = Counter(
            self.members[peer_id].stage
            for peer_id, report in survivors.items()
            if (newest, report.lineage) in self.disks[peer_id].of(self.members[peer_id].stage or 0)
        )
        if len(kept) == self.stages:
            self.tell(co.Signal.YIELD)
            assert not self.core.peer_ids

    @rule()
    def restart_the_seed(self) -> None:
        core = self.core
        ended = core.state in ("done", "cancelled", "failed")
        past = co.StoredJob(
            state=core.state if ended else "waiting", reason=core.reason, paused=core.paused, view=core.view,
            corpus="C", known_step=core.known_step, held=core.held, branch=self.branch,
        )  # fmt: skip
        for member in self.members.values():
            member.linked = False
            member.sent.clear()
        self.linked.clear()
        self.offered.clear()
        training = replace(self.training, cuts=self.cuts) if self.training is not None else None
        self.surveys = 0
        self.core = Coordinator("job", replace(self.options, training=training), past=past, now=self.now)
        self.tell_saved()

    def teardown(self) -> None:
        """All faults stop, and enough workers are there: the job must come to run, or be done."""
        if not hasattr(self, "core"):
            return
        self.full.clear()
        self.tell(co.Signal.RESUME)
        for peer_id in self.enough:
            if not self.members[peer_id].alive:
                self.start(peer_id)
        for _ in range(80):
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


class Whole(Cluster):
    stages = 1
    replicas, micro_batches = 2, 3
    enough = "ab"

    @rule(peer_id=st.sampled_from(PEERS))
    def save_alone(self, peer_id: str) -> None:
        member = self.members[peer_id]
        if member.alive and member.status in ("training", "held", "done") and not member.torn:
            member.disk.of(0).append((member.applied, member.lineage))
            if member.linked:
                self.tell_saved()


class ThreeStages(Cluster):
    stages = 3


class Sized(Cluster):
    """The model's sizes are known, so the seed cuts it, and deals stages by memory and speed."""

    training = TrainingWorkload(SHAPE, 2, 1, tokens=8, sequence_tokens=8, micro_batches=2)


@pytest.mark.parametrize(("cluster", "examples"), [(Whole, 100), (Cluster, 70), (ThreeStages, 50), (Sized, 35)])
def test_random_histories(cluster: type[Cluster], examples: int) -> None:
    play = settings(
        max_examples=examples, stateful_step_count=50, suppress_health_check=list(HealthCheck), derandomize=True
    )
    run_state_machine_as_test(cluster, settings=play)


def test_an_excluded_worker_that_alone_loaded_its_part_counts_when_all_go_back() -> None:
    job = ThreeStages()
    job.begin(3)
    job.save(1)
    job.step_and_settle(False)
    job.restart("a")
    job.everything_restarts(6)
    job.die_in_mid_commit(3)
    job.restart("a")  # it is excluded for its earlier deaths, and no other disk has the saved state of its part
    assert (job.core.state, job.core.view.step, job.minted[-1].replicas) == ("running", 3, 2)
    job.teardown()
