"""Replicas of a split model: p workers, one for each stage, are one peer of the job's coordinator.

The coordinator (``ring.coordinator``) decides which peers train together, and from which step. Its peers are replicas.
This core stands between it and the workers: it takes events about workers, and returns instructions for workers.

Rules
    1. A worker keeps its stage while it holds that part of the state. A spare gets a stage, and builds it, when it can
       complete a replica. The stage outlives the worker's process, as its checkpoints do (``held``).
    2. The *places* of a view are its replicas' ids. While its ring may run, the coordinator sees all places train,
       whatever happens to links. It learns that the ring is over only when no connected worker of the view counts as
       training: each has reported that it stopped or has no ring, or missed a deadline and was struck off. Members that
       are away are waited for, up to a deadline, and not long once another has stopped. So no view is minted while a
       connected worker of an older view trains, unless it missed a deadline.
    3. *Regroup.* Then the places are filled with whole replicas of stopped workers, which share the newest state
       that some worker applied and every stage holds (applied or prepared). They may come from different replicas: the
       rests of two replicas carry the run's state on together. Places that stay empty are lost.
    4. All other workers come in as newcomers, in a whole replica with a new id. If its workers share a state, it
       reports that state. Otherwise it reports that it holds nothing, and heals stage by stage. The coordinator is told
       of such a replica only while another one can heal it (``_anchored``). When the last one that could is gone, the
       empty replica is withdrawn. So no view begins from nothing.
    5. If no place is filled, replicas are made of workers that share what they loaded. If that is impossible, the run
       goes back to the newest step of which every stage has a checkpoint at a worker that is here. It goes back at once
       if no absent worker could bring more, else after patience, because this sets newer checkpoints aside. A whole
       model's checkpoint counts for every stage, at any worker. Workers that go back are told which workers have one.
    6. This core handles each worker's corpus, failure, silence while others are stopped, and repeated deaths.
    7. If the model's sizes are known (``training``), all workers of the first view get their stages at once, together
       with the cuts of the model (``ring.training_placement``). The cuts never change.
    8. Later a spare takes only a stage that fits its memory. Any stage fits a worker that reports no memory.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from ring import coordination as co
from ring.coordination import BESIDE, ENDED, RETURN_S, STANDSTILL, TORN_S, Phase, holds
from ring.coordinator import Coordinator
from ring.quarantine import Quarantine
from ring.replica_assembly import (
    NOTHING,
    Replica,
    StagePlanner,
    State,
    Worker,
    as_peer,
    between_replicas,
    contracted,
    holding,
    in_groups,
    newest_kept,
    report_of,
    shared_states,
    standing_status,
    told_stage,
)
from ring.training_costs import Training
from ring.view import View
from wire.job_messages import MemberRecord, Report


class ReplicaCoordinator:
    """The core of one job with a split model. It has the interface of ``Coordinator``, but its events and instructions
    are about workers.

    Args:
        options: ``workers`` counts replicas.
        stages: parts of the model, two or more.
        past: as for ``Coordinator``; its view, branch and saved are of workers.
        held: worker → the stage that it held last. saved: the checkpoints that workers are known to have.
        training: the sizes that placement needs, and the cuts if they are chosen; None: not known.

    Attributes:
        held: as the argument, up to date. A change must be durable before any worker is told of it.
        view: of workers, those of each replica in a row; None before the first.
    """

    def __init__(
        self,
        job: str,
        options: co.JobOptions,
        stages: int,
        *,
        past: co.StoredJob | None = None,
        held: Mapping[str, int] | None = None,
        saved: co.Saved | None = None,
        training: Training | None = None,
        now: float = 0.0,
    ) -> None:
        past = past or co.StoredJob()
        self.job, self.options, self.stages, self.held = job, options, stages, dict(held or {})
        self.view = replace(past.view, stages=stages) if past.view is not None else None
        self._planner = StagePlanner(training, planned=past.view is not None or bool(held))
        self._workers: dict[str, Worker] = {}
        self._replicas: dict[str, Replica] = {}
        self._made = 0
        self._branch = None if past.branch is None else set(past.branch)
        self._steps = dict(saved.steps) if saved is not None else {}
        self._wholes = dict(saved.wholes) if saved is not None else {}
        self._measured = co.Measured({})
        self._corpus = past.corpus
        self._banned: set[str] = set()
        self._failures: dict[str, str] = {}  # worker → reason, in the current view
        self._quarantine = Quarantine(options.cooldown_s)
        self._broke = False
        self._stop_reason = ""  # why the ring was asked to stop; empty: it was not
        self._committed = True  # the current view has committed a step; assumed for a view of an earlier seed
        self._tried: int | None = None  # the step that the run last went back to since the last view
        self._back: int | None = None  # the step that it is going back to now
        self._back_wanted_since: float | None = None  # could go back since then; absent workers might bring more
        # Deadlines. absence: members are away; stop: they must stop; build: workers load a state; back: it goes back.
        self._due: dict[str, float] = {}
        self._now = now
        self._out: list[co.Instruction] = []
        self._batch: list[co.Event] | None = None
        self._history: deque[str] = deque(maxlen=60)
        self._unheard: set[str] = set()
        self._regrouped = True
        places = self._places_of(self.view) if self.view is not None else []
        branch = past.branch
        if branch is not None:
            branch = frozenset(replica.replica_id for replica in places if set(replica.members) <= branch)
        seen = contracted(self.view, [replica.replica_id for replica in places]) if self.view is not None else None
        self.core = Coordinator(job, options, past=replace(past, view=seen, saved={}, branch=branch), now=now)
        if self.view is not None:
            self.held = {member.peer_id: rank % stages for rank, member in enumerate(self.view.members)} | self.held
        if self.view is not None and self.core.phase not in ENDED:
            self._replicas = {replica.replica_id: replica for replica in places}
            self._unheard = {member.peer_id for member in self.view.members}
            self._regrouped, self._due["absence"] = False, now + options.grace_s

    @property
    def history(self) -> str:
        return "; ".join(self._history)

    # ---------------------------------------------------------------------------------------------------- the interface

    @property
    def phase(self) -> Phase:
        return self.core.phase

    @property
    def state(self) -> str:
        return self.core.state

    @property
    def reason(self) -> str:
        unfit = self._planner.unfit if self.phase is Phase.WAITING else ""
        return unfit or self.core.reason

    @property
    def paused(self) -> bool:
        return self.core.paused

    @property
    def restore(self) -> co.Restore | None:
        return self.core.restore

    @property
    def training(self) -> Training | None:
        return self._planner.training

    @property
    def known_step(self) -> int:
        return self.core.known_step

    @property
    def peer_ids(self) -> frozenset[str]:
        return frozenset(self._workers)

    @property
    def short(self) -> bool:
        enough = self.stages * (1 if self.view else self.options.workers)
        return self.core.phase is Phase.WAITING and len(self._workers) < enough

    def refusal(self, peer_id: str) -> str:
        if self.core.phase in {*ENDED, Phase.PAUSED} or self.core.paused:
            return self.core.refusal("")
        if peer_id in self._banned:
            return "has released it"
        most = self.stages * self.options.most
        return "" if peer_id in self.held or len(self._workers) < most else f"has the {most} workers that it can use"

    def kept_out(self) -> dict[str, tuple[str, float]]:
        said, replicas = dict[str, tuple[str, float]](), self.core.kept_out()
        away = [member.name for member in self.view.members if member.peer_id not in self._workers] if self.view else []
        names = " or ".join(away) or "others"
        for key, worker in self._workers.items():
            free = not worker.replica and (worker.stage is None or worker.settled)
            if key in self._quarantine.out:
                said[key] = self._quarantine.reason(key)
            elif "back" in self._due and worker.settled:
                said[key] = f"waiting for {names}, which may hold a later step", self._due["back"]
            elif worker.replica in replicas:
                said[key] = replicas[worker.replica]
            elif free and self.phase in (Phase.WAITING, Phase.RUNNING):
                text = f"waiting for workers of other stages: a replica has one for each of {self.stages}"
                said[key] = self._planner.unfit or text, math.inf
        return said

    def paused_survivors(self) -> dict[str, Report] | None:
        if self.core.paused_survivors() is None:
            return None
        return {key: worker.report for key, worker in self._workers.items() if worker.replica and worker.report}

    def stage_of(self, peer_id: str) -> int | None:
        worker = self._workers.get(peer_id)
        return worker.stage if worker is not None else self.held.get(peer_id)

    def next_deadline(self) -> float | None:
        others = self._planner.next_deadline(self._now), self.core.next_deadline()
        own = (at for at in self._due.values() if at > self._now)  # earlier ones were handled
        return min([*own, *(at for at in others if at is not None), *self._quarantine.next()], default=None)

    def handle(self, event: co.Event, now: float) -> list[co.Instruction]:
        """Take in one event; returns what to do, in order. ``now`` is monotonic seconds and never goes back."""
        self._out, self._now = [], now
        self._history.append(f"{now:.3f} {self.core.phase} {event}"[:300])
        if self._due.get("back", math.inf) <= now:
            self._run_rules()  # first, or the coordinator would begin from a replica's older state
        match event:
            case co.PeerOffered(peer):
                self._offered(peer)
            case co.PeerReturned(peer, generation):
                self._returned(peer, generation)
            case co.PeerReported(peer_id, report):
                self._reported(peer_id, report)
            case co.PeerLost(peer_id, _, left):
                self._lost(peer_id, left=left)
            case co.Saved(_, steps, wholes):
                self._saved(steps, wholes)
            case co.Measured():
                self._measured = event
                self._tell_measured()
            case co.PeerTold(peer):
                if worker := self._workers.get(peer.peer_id):
                    worker.peer = peer
            case co.Signal.SURVEYED:
                self._planner.surveyed()
            case co.Progress():
                self._progress(event)
            case co.Restore(step, _, lineage):
                self._tell(co.Restore(step, "", lineage))
            case co.Signal.YIELD:
                self._yield()
            case _:
                self._tell(event)
        self._expire()
        self._run_rules()
        self._tell(co.Signal.TICK)
        self._run_rules()
        return self._out

    def validate(self) -> None:
        self.core.validate()
        history = self.history
        taken = [member for replica in self._replicas.values() for member in replica.members]
        running = self.view is not None and not self._regrouped
        assert running or len(set(taken)) == len(taken), f"a worker in two replicas: {history}"
        for replica in self._replicas.values():
            assert replica.in_view or len(replica.members) == self.stages, history
            for stage, member in enumerate(replica.members):
                worker = self._workers.get(member)
                if replica.in_view and not self._regrouped:
                    continue  # its ring may still run
                assert worker is not None, f"{member} of {replica.replica_id} is not here: {history}"
                assert worker.stage == stage, f"{member} is not at its stage: {history}"
                assert worker.replica == replica.replica_id, history
        for worker in self._workers.values():
            assert worker.stage is None or self.held.get(worker.peer_id) == worker.stage, history
            assert not worker.trains or not self._regrouped, f"{worker.peer_id} trains after the regroup: {history}"
            assert not worker.replica or worker.replica in self._replicas, history
        assert not self._banned & set(self._workers), history
        silent = [replica for replica in self._known() if replica.said is None and not replica.due]
        assert all(replica.in_view or self._is_moving(replica) for replica in silent), history
        void = any(replica.said == NOTHING for replica in self._known())
        assert not void or self._anchored(), f"the coordinator knows a replica that cannot heal: {history}"

    # ---------------------------------------------------------------------------------------------- workers come and go

    def _offered(self, peer: co.Peer) -> None:
        if self.refusal(peer.peer_id):
            self._out.append(co.SendRelease(peer.peer_id, f"the job is {self.state} and accepts no workers now"))
            return
        worker = self._workers[peer.peer_id] = Worker(peer, self.held.get(peer.peer_id), fresh=True)
        if worker.stage is not None:
            self._assign(worker)
        if self._is_member(peer.peer_id) and not self._regrouped:  # it has no ring, so its whole view has none
            self._unheard.discard(peer.peer_id)
            self._ring_is_over(f"{peer.name} came back as a new worker")

    def _returned(self, peer: co.Peer, generation: int) -> None:
        stage = self.held.get(peer.peer_id)
        if self.core.phase in ENDED or stage is None:
            self._out.append(co.SendRelease(peer.peer_id, f"the job is {self.state}"))
            return
        worker = self._workers[peer.peer_id] = Worker(peer, stage, returned=True)
        if self._restoring:
            self._go_to(worker)
        elif self._is_member(peer.peer_id) and not self._regrouped:
            worker.trains = True  # until it reports
            self._unheard.discard(peer.peer_id)
            if self._all_linked() and not self._stop_reason:
                self._due.pop("absence", None)

    def _lost(self, peer_id: str, *, left: bool) -> None:
        self._banned.discard(peer_id)
        self._planner.too_small.discard(peer_id)
        worker = self._workers.pop(peer_id, None)
        if worker is None:
            return
        if self._is_member(peer_id):
            self._quarantine.excused.add(peer_id) if left else self._quarantine.fallen.add(peer_id)
            if not self._regrouped:
                self._member_lost(worker, left)
        self._leave_replica(worker)

    def _member_lost(self, worker: Worker, left: bool) -> None:
        if left or not self._committed:
            self._ring_is_over(f"{worker.peer.name} {'left' if left else 'is lost'}", broken=False)
        elif not self._stop_reason:
            self._due.setdefault("absence", self._now + self.options.grace_s)
        self._hurry()

    def _yield(self) -> None:
        if self.core.paused_survivors() is None:
            return
        self._tell(co.Signal.YIELD)
        for worker in list(self._workers.values()):
            self._release(worker, "the job is paused, and another job needs its workers")

    def _ban(self, worker: Worker, text: str, kind: str) -> None:
        self._banned.add(worker.peer_id)
        place = f" (stage {worker.stage})" if worker.stage is not None else ""
        self._say("error", kind, f"{worker.peer.name}{place}: {text}", worker.peer_id)
        self._release(worker, text)

    # ------------------------------------------------------------------------------------------------- what workers say

    def _reported(self, peer_id: str, report: Report) -> None:
        worker, view = self._workers.get(peer_id), self.view
        if worker is None or worker.stage is None:
            return
        current = view is not None and report.generation == view.generation and self._is_member(peer_id)
        if report.status == "failed":
            self._failed(worker, report)
        elif report.status in BESIDE:
            self._beside(worker, report)
        elif self._restoring or worker.fresh or worker.restored >= 0:
            return  # it must load a checkpoint; the state before that does not matter
        elif report.status == "training":
            if current:
                self._trains(worker, report)
            elif not worker.trains:
                self._release(worker, "the ring continued without this worker; it will join again")
        elif report.status == "healed":
            if current:
                self._healed(worker, report)
        elif current or (worker.trains and worker.returned):
            self._stopped(worker, report)
        elif not worker.trains:  # else the report was sent before the worker's current view was announced
            worker.report = report

    def _trains(self, worker: Worker, report: Report) -> None:
        worker.trains, worker.report, worker.moving = True, None, False
        self._unheard.discard(worker.peer_id)
        if self._regrouped:
            # It still trains in a ring that counted as over: that ring must stop first. Then the regroup is repeated.
            self._regrouped = False
            self._ring_is_over("its ring is over", broken=False)
            return
        if self._stop_reason and self.view:
            self._out.append(co.SendHold((worker.peer_id,), self.view.generation, self._stop_reason))
        for replica in self._places():
            if not replica.known or self.core.phase is Phase.WAITING:
                self._introduce(replica)
                self._report(replica, [report], (report.applied, report.lineage), "training", report.generation)

    def _healed(self, worker: Worker, report: Report) -> None:
        worker.healing = False
        replica = self._replicas.get(worker.replica)
        if replica and not self._regrouped and not any(self._workers[key].healing for key in self._here(replica)):
            self._report(replica, [report], (report.applied, report.lineage), "healed", report.generation)

    def _stopped(self, worker: Worker, report: Report) -> None:
        first = worker.trains
        worker.trains, worker.report, worker.healing = False, report, False
        self._unheard.discard(worker.peer_id)
        if self._regrouped:
            if not first and worker.replica:
                return  # a repeated report
            self._regroup()
            return
        if report.status == "broken":
            self._broke = True
        self._due.setdefault("stop", self._now + self.options.hold_s)
        self._hurry()

    def _beside(self, worker: Worker, report: Report) -> None:
        replica = self._replicas.get(worker.replica)
        if report.status == "following" and not worker.moving:
            if worker.returned:
                self._assign(worker)  # it followed before its link was lost: ask for its state
            return  # it was let in or called back in the meantime
        self._corpus = self._corpus or report.corpus
        if report.corpus != self._corpus:
            self._ban(worker, co.other_data(report.corpus, self._corpus), "corpus")
            return
        if 0 <= worker.restored < report.applied:
            return  # sent before it was told to go back
        was_member, moved, worker.asked, worker.fresh = worker.trains, worker.moving, False, False
        worker.report, worker.trains, worker.healing = report, False, False
        worker.moving = report.status == "following"
        self._unheard.discard(worker.peer_id)
        if was_member and not self._regrouped:
            self._ring_is_over(f"{worker.peer.name} has lost its state")
        if replica is None or (replica.in_view and not self._restoring):
            return
        if worker.moving:
            if all(self._workers[key].moving and self._workers[key].report for key in replica.members):
                self._tell_replica(replica, "following")
        elif moved and self._anchored():
            self._tell_replica(replica, "ready", nothing=True)  # it had to start over: the coordinator asks all again
        else:
            replica.due = True

    def _failed(self, worker: Worker, report: Report) -> None:
        reason = report.reason or "it gave no reason"
        if self._is_member(worker.peer_id) and worker.trains:
            self._failures[worker.peer_id] = reason
        was_member = worker.trains
        worker.trains = False
        self._ban(worker, f"cannot continue: {reason}", "member-failed")
        if was_member and not self._regrouped:
            self._ring_is_over(f"{worker.peer.name} cannot continue")
        if not self._workers and self.view is None:  # show the coordinator a failed peer, so that it ends the job
            nobody = self._new_id()
            self._tell(co.PeerOffered(co.Peer(nobody, worker.peer.name, "", 0)))
            self._tell(co.PeerReported(nobody, replace(report, generation=0)))

    # ------------------------------------------------------------------------------------------ the view and its places

    def _all_linked(self) -> bool:
        return self.view is not None and all(member.peer_id in self._workers for member in self.view.members)

    def _places(self) -> list[Replica]:
        return [replica for replica in self._replicas.values() if replica.in_view]

    def _replica_of(self, peer_id: str) -> str:
        rank = self.view.rank_of(peer_id) if self.view is not None else None
        if rank is None or self.core.view is None or self.view is None:
            return ""
        return self.core.view.members[self.view.replica_of(rank)].peer_id

    def _ring_is_over(self, reason: str, *, broken: bool = True) -> None:
        self._broke = self._broke or broken
        self._hold(reason)
        self._hurry()

    def _hold(self, reason: str) -> None:
        self._stop_reason = self._stop_reason or reason
        self._due.setdefault("stop", self._now + self.options.hold_s)
        training = tuple(sorted(worker.peer_id for worker in self._training()))
        if training and self.view is not None:
            self._out.append(co.SendHold(training, self.view.generation, reason))

    def _hurry(self) -> None:
        if self._unheard and "absence" in self._due:  # then unheard members are no longer waited for
            self._due["absence"] = min(self._due["absence"], self._now + RETURN_S)
        if self._broke and "stop" in self._due:
            usual = any(not worker.healing for worker in self._training())
            self._due["stop"] = min(self._due["stop"], self._now + (self.options.settle_s if usual else TORN_S))

    def _expire(self) -> None:
        now = self._now
        self._quarantine.expire(now)
        if self._due.get("absence", math.inf) <= now:
            del self._due["absence"]
            self._unheard.clear()
            if self._training():
                self._ring_is_over("members did not reconnect in time", broken=False)
        if self._due.get("stop", math.inf) <= now:
            self._due["stop"] = now + self.options.hold_s
            silent = self._training()
            if self._broke or not any(worker.healing for worker in silent):  # else a slow transfer
                for worker in silent:
                    self._strike_off(worker)

    def _strike_off(self, worker: Worker) -> None:
        worker.trains = False
        self._quarantine.fallen.add(worker.peer_id)
        if worker.healing:
            worker.healing = False
            self._quarantine.excused.add(worker.peer_id)
            return
        text = "it did not stop in time"
        self._say("warning", "struck-off", f"{worker.peer.name} was removed from the ring: {text}", worker.peer_id)
        self._release(worker, f"removed from the ring: {text}")

    def _is_over(self) -> bool:
        if self.view is None or self._regrouped or self._training():
            return False
        if self._unheard:
            return False  # the deadline "absence" clears this set
        stopped = any(worker.report is not None for key, worker in self._workers.items() if self._is_member(key))
        return stopped or self._broke or bool(self._stop_reason) or "absence" not in self._due

    def _regroup(self) -> None:
        view = self.view
        assert view is not None
        self._regrouped = True
        for name in ("absence", "stop"):
            self._due.pop(name, None)
        reports = {
            key: worker.report
            for key, worker in self._workers.items()
            if worker.report is not None and self._is_stopped_in(view, key, worker.report)
        }
        by_stage = self._by_stage(reports)
        states = shared_states(by_stage)
        state = states[0] if states else None
        places = self._places()
        for worker in self._workers.values():
            if worker.replica in self._replicas and self._replicas[worker.replica].in_view:
                worker.replica = ""
        holders = holding(reports, state) if state else set()
        stages = {key: self._workers[key].stage for key in holders}
        kept = [
            replica
            for replica in places
            if replica.members and [*map(stages.get, replica.members)] == [*range(self.stages)]
        ]
        taken = {member for replica in kept for member in replica.members}
        empty = [replica for replica in places if replica not in kept]
        groups = in_groups([(holders & stage.keys()) - taken for stage in by_stage])
        for replica, group in zip(list(empty), groups, strict=False):
            replica.members = group
            kept.append(replica)
            empty.remove(replica)
        for replica in empty:
            replica.members, replica.due = (), False
        with self._together():
            survivors = reports.keys()
            for replica in [each for each in self._beside_view() if survivors & set(each.members)]:
                self._dissolve(replica, "its workers hold the run's state")
            for replica in kept:
                for member in replica.members:
                    self._workers[member].replica = replica.replica_id
            if not kept:
                for replica in self._beside_view():
                    if replica.known and (replica.said in (None, NOTHING) or self._is_moving(replica)):
                        self._dissolve(replica, "no replica is left to catch up with")
            for replica in kept:
                self._fill_place(replica, state)
            for replica in empty:
                self._empty_place(replica)

    def _is_stopped_in(self, view: View, peer_id: str, report: Report) -> bool:
        if report.status not in STANDSTILL or view.rank_of(peer_id) is None or self._workers[peer_id].moving:
            return False
        return report.generation == view.generation or holds(report, view.step, view.lineage)

    def _fill_place(self, replica: Replica, state: State | None) -> None:
        """Report to the coordinator that the workers of a place are stopped with ``state``."""
        if replica.known and replica.said == state:
            return
        if not replica.known:
            self._introduce(replica)
        assert self.view is not None
        replica.said, replica.due = state, False
        reports = self._reports_of(replica)
        self._report(replica, reports, state, standing_status(reports), self.view.generation)

    def _empty_place(self, replica: Replica) -> None:
        """Report to the coordinator that a place has no workers any more."""
        replica.known, replica.said = False, None
        if self.view is not None and all(member.peer_id in self._failures for member in self.view.members):
            reason = next(iter(self._failures.values()))
            report = Report(self.job, self.view.generation, "failed", 0, 0, "", reason=reason)
            self._tell(co.PeerReported(replica.replica_id, report))
        else:
            self._tell(co.PeerLost(replica.replica_id, "its workers are gone", left=True))

    def _introduce(self, replica: Replica) -> None:
        assert self.view is not None
        replica.known = True
        self._tell(co.PeerReturned(self._peer_of(replica), self.view.generation))

    def _is_moving(self, replica: Replica) -> bool:
        return any(self._workers[key].moving for key in self._here(replica))

    def _dissolve(self, replica: Replica, why: str) -> None:
        del self._replicas[replica.replica_id]
        for member in self._here(replica):
            worker = self._workers[member]
            worker.replica = ""
            if worker.moving:
                self._assign(worker)  # ask for its state, which changes no more
        if replica.known:
            self._tell(co.PeerLost(replica.replica_id, why))

    def _leave_replica(self, worker: Worker) -> None:
        replica = self._replicas.get(worker.replica)
        if replica is None:
            return
        if not replica.in_view:
            self._dissolve(replica, f"{worker.peer.name} is gone")
        elif self._regrouped:
            self._regroup()

    def _release(self, worker: Worker, reason: str) -> None:
        self._workers.pop(worker.peer_id, None)
        self._out.append(co.SendRelease(worker.peer_id, reason))
        self._leave_replica(worker)

    def _replica_released(self, replica_id: str, reason: str) -> None:
        """Release the workers of a replica, except those that are stopped in the view while the job goes on."""
        replica = self._replicas.pop(replica_id, None)
        for member in self._here(replica) if replica is not None else ():
            worker = self._workers[member]
            worker.replica = ""
            view, report = self.view, worker.report
            stopped = view and report and not worker.trains and self._is_stopped_in(view, member, report)
            if self.core.phase in ENDED or not stopped:
                self._release(worker, reason)

    # ------------------------------------------------------------------------------------------------ replicas are made

    def _run_rules(self) -> None:
        """Apply the rules, one at a time, until none changes anything."""
        for _ in range(1000):  # more rounds after one event are a defect
            if self.core.phase in ENDED:
                self._end()
                return
            if self._is_over():
                self._regroup()
            elif not (
                self._withdraw_one()
                or self._tell_one()
                or self._give_stages()
                or self._make_replica()
                or self._go_back()
            ):
                return
        raise AssertionError(f"it does not come to rest: {self.history}")

    def _end(self) -> None:
        for worker in list(self._workers.values()):
            done = worker.report is not None and worker.report.status == "done"
            if not (self.core.phase is Phase.DONE and done):
                self._out.append(co.SendRelease(worker.peer_id, self.core.reason))
        self._workers.clear()
        self._replicas.clear()
        self._failures.clear()
        self._banned.clear()
        self._unheard.clear()
        self._quarantine.out.clear()
        self._regrouped, self._stop_reason, self._broke, self._tried, self._back = True, "", False, None, None
        self._back_wanted_since = None
        self._due.clear()
        self._planner.end()

    def _anchored(self) -> bool:
        """Whether a replica that holds nothing can be healed: the view's ring may still run, or the coordinator knows a
        replica with a state of a step above 0 (while a restore is under way: with the restored state)."""
        if self.view is not None and not self._regrouped:
            return True
        said = [replica.said for replica in self._known() if replica.said is not None and replica.members]
        if self._restoring and self.core.restore is not None:
            return (self.core.restore.step, self.core.restore.lineage) in said
        return any(step > 0 for step, _ in said)  # at step 0 the coordinator takes ``NOTHING`` for a state

    def _withdraw_one(self) -> bool:
        if (late := self._outdone()) is not None:
            self._dissolve(late, "there are newer checkpoints of all stages")
            return True
        if self._anchored():
            return False
        void = next((replica for replica in self._known() if replica.said == NOTHING), None)
        if void is not None:
            self._withdraw(void)
        return void is not None

    def _outdone(self) -> Replica | None:
        """A loaded replica whose state is older than a checkpoint that all stages have here, while no replica carries
        the run's state on."""
        least = self._least()
        return next((replica for replica in self._loaded() if replica.said and replica.said[0] < least), None)

    def _least(self) -> int:
        """The least step to begin from: every stage has a checkpoint of it at a settled worker. 0: there is none, the
        run's state is carried on, or a replica has loaded that step or a later one."""
        waiting = self.core.phase is Phase.WAITING and self.core.restore is None and self._regrouped
        if not waiting or self.view is None or any(replica.members for replica in self._places()):
            return 0
        settled = {key: stage for key, stage in self._settled_stages().items() if self._is_own((key,))}
        kept = self._newest_kept(settled, settled)
        loaded = [replica.said[0] for replica in self._loaded() if replica.said and self._is_own(replica.members)]
        # A later step than the newest known one is of an abandoned branch.
        return kept if max(loaded, default=-1) < kept <= self.core.known_step else 0

    def _known(self) -> list[Replica]:
        return [replica for replica in self._replicas.values() if replica.known]

    def _beside_view(self) -> list[Replica]:
        return [replica for replica in self._replicas.values() if not replica.in_view]

    def _loaded(self) -> list[Replica]:
        return [replica for replica in self._beside_view() if replica.known and replica.said not in (None, NOTHING)]

    def _is_own(self, members: Iterable[str]) -> bool:
        return self._branch is None or self._branch.issuperset(members)

    def _withdraw(self, replica: Replica) -> None:
        if replica.in_view:
            for member in self._here(replica):
                if self._workers[member].replica == replica.replica_id:
                    self._workers[member].replica = ""
            replica.members, replica.due = (), False
            self._empty_place(replica)
        else:
            self._dissolve(replica, "its workers share no state")

    def _tell_one(self) -> bool:
        due = [replica for replica in self._replicas.values() if replica.due and self._is_settled(replica)]
        if not due:
            return False
        replica = min(due, key=lambda replica: (self._state_of(replica.members) is None, replica.replica_id))
        if self._state_of(replica.members) is None and not self._anchored():
            self._withdraw(replica)
        else:
            self._tell_replica(replica, "ready")
            if replica.said is not None and replica.said[0] == self._back and self.core.restore is None:
                self._back = None
                self._tell(co.Restore(replica.said[0], replica.replica_id, replica.said[1]))
        return True

    def _is_settled(self, replica: Replica) -> bool:
        workers = [self._workers.get(member) for member in replica.members]
        return bool(workers) and all(worker is not None and worker.settled for worker in workers)

    def _tell_replica(self, replica: Replica, status: str, *, nothing: bool = False) -> None:
        state = None if nothing else self._state_of(replica.members)
        replica.said, replica.due = state or NOTHING, False
        self._report(replica, self._reports_of(replica), state, status)

    def _reports_of(self, replica: Replica) -> list[Report]:
        return [report for key in replica.members if (report := self._workers[key].report) is not None]

    def _report(
        self, replica: Replica, reports: list[Report], state: State | None, status: str, generation: int = 0
    ) -> None:
        told = report_of(self.job, reports, state, status, generation, self._replica_of)
        self._tell(co.PeerReported(replica.replica_id, told))

    def _state_of(self, members: Iterable[str]) -> State | None:
        reports = [self._workers[key].report for key in members]
        states = shared_states([{"": report} if report else {} for report in reports])
        return states[0] if states else None

    def _give_stages(self) -> bool:
        if not self._takes_replicas():
            return False
        peers = {key: worker.peer for key, worker in self._workers.items()}
        if not self._planner.planned:
            given, said = self._planner.plan(peers, self._measured.links, self._now)
        else:
            stages = [worker.stage for worker in self._workers.values()]
            counts = [stages.count(stage) for stage in range(self.stages)]
            spares = sorted(key for key, worker in self._workers.items() if worker.stage is None)
            homes = {key: self._workers[key].stage for key in self._idle(counts)}
            for home in homes.values():
                counts[home or 0] -= 1
            given, said = self._planner.deal(counts, peers, spares, homes, self.options.most)
        self._out += said
        for key, stage in given.items():
            self._give(self._workers[key], stage)
        return bool(given)

    def _idle(self, counts: list[int]) -> list[str]:
        over = [count - min(counts) for count in counts]
        found = []
        for key, worker in sorted(self._workers.items()):
            if worker.stage is None or worker.replica or worker.trains or worker.moving or over[worker.stage] <= 0:
                continue
            if self._is_member(key) and not (self._regrouped and self._anchored()):
                continue
            fresh = worker.report is not None and worker.report.applied == 0 and not self._steps.get(key)
            if fresh or (self._anchored() and worker.report is not None):
                over[worker.stage] -= 1
                found.append(key)
        return found

    def _takes_replicas(self) -> bool:
        core = self.core
        if core.phase in {*ENDED, Phase.PAUSED} or core.paused:
            return False
        return len(core.peer_ids) < core.options.most

    def _make_replica(self) -> bool:
        if not self._takes_replicas():
            return False
        anchored = self._anchored()
        runs = self.view is not None and not self._regrouped
        if not anchored and self._awaits_builders():
            return False
        out = self._quarantine.out if anchored else set()
        free = {key for key, worker in self._workers.items() if worker.settled and not worker.replica} - out
        if runs:
            free = {key for key in free if not self._is_member(key) or self._said_ready(key)}
        loose = set() if runs else {member for replica in self._void() for member in replica.members}
        reports = {key: report for key in free | loose if (report := self._workers[key].report) is not None}
        by_stage = self._by_stage(reports)
        least = self._least()
        for state in shared_states(by_stage):
            if state[0] < least:
                break  # ``_go_back`` takes a newer state
            holders = holding(reports, state)
            group = next(in_groups([holders & stage.keys() for stage in by_stage]), None)
            if group is not None:
                for replica in [replica for replica in self._void() if set(replica.members) & set(group)]:
                    self._dissolve(replica, "its workers hold a state that they can continue from")
                self._offer(group)
                return True
        rest = next(in_groups([free & stage.keys() for stage in by_stage]), None)
        if rest is None or not anchored:
            return False
        self._offer(rest)
        return True

    def _said_ready(self, peer_id: str) -> bool:
        report = self._workers[peer_id].report
        return report is not None and report.status in BESIDE

    def _void(self) -> list[Replica]:
        """Replicas outside the view that were reported as holding nothing and do not fetch a ring's state."""
        told = [replica for replica in self._beside_view() if replica.known and replica.said == NOTHING]
        return [replica for replica in told if not self._is_moving(replica)]

    def _offer(self, group: tuple[str, ...]) -> None:
        void = self._state_of(group) is None
        members = all(self._is_member(key) for key in group) and self._regrouped and not void
        place = next((replica for replica in self._places() if not replica.members), None) if members else None
        replica = place or Replica(self._new_id(), ())
        replica.members, replica.known, replica.due = group, True, True
        self._replicas[replica.replica_id] = replica
        for member in group:
            self._workers[member].replica = replica.replica_id
        self._tell(co.PeerOffered(self._peer_of(replica), own=not void and self._is_own(group)))
        self._tell_measured()

    def _awaits_builders(self) -> bool:
        builders = [worker for key, worker in self._workers.items() if worker.report is None and self._may_bring(key)]
        if not builders:
            self._due.pop("build", None)
            return False
        return self._now < self._due.setdefault("build", self._now + self.options.build_s)

    def _may_bring(self, peer_id: str) -> bool:
        worker = self._workers[peer_id]
        if worker.stage is None or worker.trains:
            return False
        kept = self._steps.get(peer_id) or self._wholes.get(peer_id)
        return worker.restored >= 0 or worker.returned or self._is_member(peer_id) or bool(kept)

    def _go_back(self) -> bool:
        waiting = self.core.phase is Phase.WAITING and self.core.restore is None and self._regrouped
        if not waiting or self._anchored() or self._awaits_builders():
            return self._stays()
        settled = self._settled_stages()
        if len(set(settled.values())) < self.stages or self._tried == 0:
            return self._stays()
        if self._back is not None:
            if any(worker.stage is not None and worker.report is None for worker in self._workers.values()):
                return self._stays()
            self._back = None  # not every stage could load that step
        step = self._newest_kept(settled, self._workers)
        at_hand = [replica.said[0] for replica in self._known() if replica.said not in (None, NOTHING)]
        if at_hand and step <= max(at_hand):
            return self._stays()
        if self._could_be_more(step):
            self._back_wanted_since = self._back_wanted_since if self._back_wanted_since is not None else self._now
            self._due["back"] = self._back_wanted_since + self.core.patience_s(step)
            if self._now < self._due["back"]:
                return False
        self._say("warning", "steps-lost", f"goes back to step {step}: no later state is held for every stage")
        self._tried = self._back = step
        self._stays()
        for replica in self._beside_view():
            self._dissolve(replica, "the run goes back")
        for worker in self._workers.values():
            if worker.stage is not None:
                self._go_to(worker, step)
        return True

    def _stays(self) -> bool:
        self._back_wanted_since = None
        self._due.pop("back", None)
        return False

    def _settled_stages(self) -> dict[str, int]:
        stages = ((key, worker.stage) for key, worker in self._workers.items() if worker.settled)
        return {key: stage for key, stage in stages if stage is not None}

    def _newest_kept(self, stages: Mapping[str, int], wholes: Iterable[str], *, tried: bool = False) -> int:
        """The newest step of which these workers have all parts; without ``tried`` it is below ``self._tried``."""
        most = math.inf if tried or self._tried is None else self._tried

        def kept(steps: Mapping[str, frozenset[int]], peer_id: str) -> frozenset[int]:
            return frozenset(step for step in steps.get(peer_id, ()) if step < most)

        known: list[list[frozenset[int]]] = [[] for _ in range(self.stages)]
        for key, stage in stages.items():
            known[stage].append(kept(self._steps, key))
        return newest_kept(known, [kept(self._wholes, key) for key in wholes])

    def _could_be_more(self, step: int) -> bool:
        if self.view is not None and not self._all_linked():
            return True
        return self._newest_kept(self.held, self._wholes) > step

    def _give(self, worker: Worker, stage: int) -> None:
        worker.stage, worker.report, worker.restored, worker.asked, worker.fresh = stage, None, -1, False, True
        kept = self._steps.get(worker.peer_id, frozenset()) | self._wholes.get(worker.peer_id, frozenset())
        if self._back is not None and max(kept, default=0) <= self._back:
            self._go_to(worker, self._back)  # like all others
        else:
            self._assign(worker)

    # ---------------------------------------------------------------------------------- to the coordinator, and from it

    def _tell(self, event: co.Event) -> None:
        if self._batch is not None:
            self._batch.append(event)
            return
        for instruction in self.core.handle(event, self._now):
            self._translate(instruction)

    @contextmanager
    def _together(self) -> Iterator[None]:
        batch: list[co.Event] = []
        self._batch = batch
        yield
        self._batch = None
        self._tell(co.Together(tuple(batch)))

    def _translate(self, instruction: co.Instruction) -> None:
        match instruction:
            case co.SendAssign(replica_id, _, restore_step):
                self._asked(replica_id, restore_step)
            case co.SendHold(_, _, reason):
                self._hold(reason)
            case co.SendCatchUp(replica_id, generation, sources):
                self._catch_up(replica_id, generation, [source.peer_id for source in sources])
            case co.SendSave():
                self._out.append(co.SendSave(tuple(sorted(worker.peer_id for worker in self._training()))))
            case co.SendRelease(replica_id, reason):
                self._replica_released(replica_id, reason)
            case co.Mint():
                self._minted(instruction)
            case co.Emit(level, kind, text, _):
                self._say(level, kind, text)
            case _:
                self._out.append(instruction)

    def _asked(self, replica_id: str, restore_step: int) -> None:
        replica = self._replicas.get(replica_id)
        if replica is not None:
            replica.due, replica.said = True, None
            for member in self._here(replica):
                if self._workers[member].moving:
                    self._assign(self._workers[member])  # called back: there is no ring left to follow
        if restore_step >= 0:
            for worker in self._workers.values():
                if worker.stage is not None:
                    self._go_to(worker, restore_step)

    def _go_to(self, worker: Worker, step: int | None = None) -> None:
        restore = self.core.restore
        step = restore.step if step is None and restore is not None else step
        if step is not None and worker.restored != step:
            worker.restored, worker.trains = step, False
            self._assign(worker, step)

    def _assign(self, worker: Worker, restore_step: int = -1) -> None:
        assert worker.stage is not None
        if restore_step < 0 and self._restoring and self.core.restore is not None:
            restore_step = worker.restored = self.core.restore.step
        worker.report, worker.moving = None, False
        self.held = told_stage(self.held, worker.peer_id, worker.stage, self._workers)
        if worker.asked and restore_step < 0:
            return  # a second answer could be taken for news
        worker.asked = True
        holders = self._holders(worker, restore_step)
        self._out.append(co.SendAssign(worker.peer_id, self._corpus, restore_step, worker.stage, self.stages, holders))

    def _holders(self, worker: Worker, step: int) -> tuple[co.Peer, ...]:
        found = [key for key in sorted(self._workers) if key != worker.peer_id and step in self._wholes.get(key, ())]
        turn = (worker.stage or 0) % len(found) if found else 0
        return tuple(self._workers[key].peer for key in [*found[turn:], *found[:turn]][:8])  # at most 8 are named

    def _catch_up(self, replica_id: str, generation: int, sources: list[str]) -> None:
        replica, view = self._replicas.get(replica_id), self.view
        if replica is None or view is None:
            return
        ranks = [number for number, place in enumerate(self.core.view.members if self.core.view else ())
                 if place.peer_id in sources]  # fmt: skip
        replica.said, replica.due = None, False
        for stage, member in enumerate(replica.members):
            worker = self._workers[member]
            worker.moving, worker.report = True, None
            alike = view.same_stage(stage)
            given = tuple(alike[number] for number in ranks)
            self._out.append(co.SendCatchUp(member, generation, given))

    def _minted(self, mint: co.Mint) -> None:
        small = mint.view
        before = self.view
        members: list[MemberRecord] = []
        for place in small.members:
            first, count = place.first, place.count
            for member in self._replicas[place.peer_id].members:
                peer, report = self._workers[member].peer, self._workers[member].report
                moving = self._workers[member].moving
                healthy = report is not None and not moving and holds(report, small.step, small.lineage)
                members.append(MemberRecord(member, peer.name, peer.host, peer.port, first, count, healthy))
                first, count = first + count, 0
        self.view = replace(small, members=tuple(members), stages=self.stages)
        if before is not None:
            called = {member.peer_id: member.name for member in before.members}
            back = [member.peer_id for member in self.view.members]
            self._out += self._quarantine.flapping(back, lambda peer_id: called.get(peer_id, peer_id), self._now)
        for replica in list(self._replicas.values()):
            replica.in_view = small.rank_of(replica.replica_id) is not None
            if not replica.in_view and not replica.known:
                del self._replicas[replica.replica_id]
            elif replica.in_view:
                replica.known, replica.said, replica.due = True, None, False
        for record in members:
            worker = self._workers[record.peer_id]
            worker.trains, worker.report, worker.moving, worker.returned = True, None, False, False
            worker.healing, worker.restored = not record.healthy, -1
        self._regrouped, self._committed, self._broke, self._stop_reason = False, False, False, ""
        self._back_wanted_since = None
        self._due.clear()
        self._tried = self._back = None
        self._unheard.clear()
        self._failures.clear()
        self._quarantine.view_began()
        if mint.branch is not None:
            kept = set() if mint.restored or self._branch is None else self._branch
            names = {replica.replica_id: replica.members for replica in self._replicas.values()}
            self._branch = kept | {member for replica_id in mint.branch for member in names.get(replica_id, ())}
        branch = None if self._branch is None else frozenset(self._branch)
        self._out.append(co.Mint(self.view, mint.restored, branch))

    def _progress(self, event: co.Progress) -> None:
        if self.view is not None and event.step > self.view.step and not self._regrouped:
            self._committed = True
            for worker in self._workers.values():
                worker.healing = False  # a step is committed by all members or by none
        self._tell(event)

    def _saved(self, steps: Mapping[str, frozenset[int]], wholes: Mapping[str, frozenset[int]]) -> None:
        self._steps, self._wholes = dict(steps), dict(wholes)
        newest = self._newest_kept(self.held, wholes, tried=True)
        self._tell(co.Saved({"": newest} if newest else {}))

    def _tell_measured(self) -> None:
        replicas = {replica.replica_id: replica.members for replica in self._replicas.values() if replica.known}
        if self._measured.links:
            links = between_replicas(self._measured.links, replicas)
            self._tell(co.Measured(links, self._measured.compute_s))

    # ---------------------------------------------------------------------------------------------------- small helpers

    @property
    def _restoring(self) -> bool:
        return self.core.restore is not None and self.core.phase is Phase.WAITING

    def _is_member(self, peer_id: str) -> bool:
        return self.view is not None and self.view.rank_of(peer_id) is not None

    def _here(self, replica: Replica) -> list[str]:
        return [member for member in replica.members if member in self._workers]

    def _training(self) -> list[Worker]:
        return [worker for worker in self._workers.values() if worker.trains]

    def _by_stage(self, reports: Mapping[str, Report]) -> list[dict[str, Report]]:
        found: list[dict[str, Report]] = [{} for _ in range(self.stages)]
        for key, report in reports.items():
            stage = self._workers[key].stage
            if stage is not None:
                found[stage][key] = report
        return found

    def _peer_of(self, replica: Replica) -> co.Peer:
        here = [self._workers[member] for member in self._here(replica)]
        if not here:
            return co.Peer(replica.replica_id, replica.replica_id, "", 1)
        return as_peer(replica.replica_id, here)

    def _places_of(self, view: View) -> list[Replica]:
        return [
            Replica(
                f"{view.generation}-{rank // self.stages}", tuple(m.peer_id for m in view.replica(rank)), in_view=True
            )
            for rank in range(0, view.size, self.stages)
        ]

    def _new_id(self) -> str:
        self._made += 1
        return f"replica-{self._made}"

    def _say(self, level: str, kind: str, text: str, peer_id: str = "") -> None:
        self._out.append(co.Emit(level, kind, text, peer_id))
