"""The coordinator: which workers train together, and from which step. The seed runs one per job; no step waits for it.

Rules
    1. A view is minted only when no member of the previous view may still be training. Each of them is stopped (it
       reported so for that generation), is lost, or was struck off after a deadline.
    2. The run's state belongs to the *survivors*: the members of the last view that are stopped in it. A newcomer
       heals. The state on its own disk counts only if the survivors lack a part of the state.
    3. A view starts at the highest step that a survivor applied and of which survivors hold all parts. A member that
       can redo that step is healthy, too.
    4. A lost link to the seed is not a death: a neighbour in the ring notices a death at once and reports ``broken``.
       If a member stays away while the ring runs on, the coordinator holds the ring, and the next view is without that
       member. Before the first commit of a view there may be no ring that notices, so there a lost link counts as a
       death. If a member comes back as a new worker, its whole view has no ring.
    5. Without survivors, the coordinator gives up no state that may still come back. It starts from less than the
       newest known step only if no peer can have more, or after its patience: the time that the lost steps took to
       compute, within ``GRACE_S`` and ``BUILD_S``. The states of an abandoned branch do not count (``RecoveryPolicy``).
       If the loaded parts do not match, all go back to the newest step of which all parts have a checkpoint.
    6. A person's pause or restore happens when all members are stopped. A cancel happens at once.
    7. A newcomer fetches the state beside the running ring. The ring is held when newcomers for a whole replica follow
       it, or their time is over (``CatchUps``). A view of survivors does not wait for newcomers that do not follow yet.
       Their reported states do not count, because these states change; such a newcomer is never called healthy.
    8. *Two sides.* The newest generation that the seed minted wins, however far another side has come. A side that is
       cut off from the seed continues with unchanged members only. It never forms a new ring: when it breaks, it stops.
       The coordinator takes it back as it is, as long as no newer generation was minted. After that its members are
       released and come in as newcomers.
    9. A member that repeatedly dies, breaks links or spoils steps is excluded for a while (``ring.quarantine``). An
       excluded member is in a view only if no other member is there, or no other holds its part of the state.
   10. A *replica* is one worker for each part of the model; with one part it is one worker. Replicas are formed when a
       view is minted, from workers of any earlier replicas. A worker keeps its part as long as its disk may hold it.
       A spare gets a part if that completes a replica (``ring.parts``).
   11. A job is done when its result, the state after the last step, is on a disk. Until then the members keep it, and
       the coordinator asks one after another to save it, also newcomers. If only the parts of a split model are saved
       after every member has tried to assemble them, they are enough.
   12. A worker that the pool withdraws is released when it is stopped, or in no running ring, if workers that stay
       hold the newest state and are enough for a view. Else the job keeps it.

Theory of operation: ``Roster.running`` has the members that are not known to be stopped. Every event changes what the
coordinator knows; then ``_advance`` checks whether the phase changes. Time enters only as ``now``. Deadlines have
names, and expire with the next event after their time (``Signal.TICK`` tells nothing but the time).

    phase     what ends it                                             next        instruction
    WAITING   the state is available (first view: enough workers)      RUNNING     Mint
    WAITING   a member is back from a view that may still run          RUNNING
    WAITING   pause                                                    PAUSED
    RUNNING   a newcomer is ready (rule 7)                             RUNNING     SendCatchUp
    RUNNING   newcomer, pause, restore, change of settings, leave,     STOPPING    SendHold
              better links, withdrawal, a member stays away
    RUNNING   a member reports held, broken, done, failed or ready     STOPPING    SendHold
    RUNNING   no member is left, or none came back in time             WAITING
    STOPPING  all are stopped                                          WAITING     (then Mint, if the state is there)
    STOPPING  all are stopped, a pause was requested                   PAUSED
    STOPPING  all are stopped, all failed                              FAILED
    WAITING   all members are done, and a disk has the result          DONE
    WAITING   all members are done                                     WAITING     SendSave
    STOPPING  all are stopped, no member can compute the step          FAILED
    PAUSED    resume, restore, or a member that still trains           STOPPING    SendHold
    any live  cancel                                                   CANCELLED   SendRelease
    WAITING   every worker has failed, and there never was a view      FAILED
    ended     restore                                                  WAITING     SendAssign, as peers are offered
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Any

from ring import coordination as co
from ring.coordination import (
    ENDED,
    OUTSIDE,
    RETURN_S,
    SAVE_AGAIN_MOST_S,
    SAVE_AGAIN_S,
    STANDSTILL,
    TORN_S,
    TRANSITIONS,
    CatchUps,
    Deadlines,
    InvalidTransition,
    JobPhase,
    KnownPeer,
    Reports,
    Roster,
    Signal,
    holds,
)
from ring.parts import StagePlanner
from ring.planning.workloads import TrainingWorkload
from ring.quarantine import DIAL, Exclusions, Quarantine
from ring.replicas import (
    RecoveryPolicy,
    RingPlanner,
    State,
    describe_sizes,
    describe_view,
    members_of,
    newest,
    replicas_of,
    sources_for,
    square_sum,
)
from ring.view import View
from wire.job_messages import Report


class Coordinator:
    """The core of one job; see the top of this file. Only ``handle`` changes it."""

    def __init__(self, job: str, options: co.JobOptions, *, past: co.StoredJob | None = None, now: float = 0.0) -> None:
        stored, past = past, past or co.StoredJob()
        self.job, self.options, self.view, self.corpus = job, options, past.view, past.corpus
        self.paused = past.paused  # what a person requested; the phase follows
        self.restore: co.Restore | None = None
        self.settings = co.ChangedSettings(past.changes, options.least_steps)
        self.reason = past.reason
        self.phase = JobPhase.PAUSED if past.paused else JobPhase.WAITING
        if past.state in ENDED:
            self.phase = JobPhase(past.state)
        self._roster = Roster(options.parts, dict(past.held))
        self._planner = StagePlanner(options.parts, options.training, planned=bool(past.held or past.view))
        if self.view is not None and options.parts > 1:
            held = {member.peer_id: self.view.stage_of(rank) for rank, member in enumerate(self.view.members)}
            self._roster.held = held | self._roster.held
        self._recovery = RecoveryPolicy(past.known_step, past.saved, past.branch, past.step_s)
        self._deadlines = Deadlines()
        self._quarantine = Quarantine(masked=options.masked, witnesses=1 if options.asynchronous else 2)
        self._catch_ups = CatchUps()
        self._ring_planner = RingPlanner(options.ring_options)
        self._history: deque[tuple[float, JobPhase, co.Event]] = deque(maxlen=40)
        self._out: list[co.Instruction] = []
        if self.phase is JobPhase.WAITING and self.view is not None:  # its ring may still run: take it back as it is
            self.phase = JobPhase.RUNNING
            self._roster.running = {member.peer_id for member in self.view.members}
            self._roster.unheard = set(self._roster.running)
            self._deadlines.arm("absence", now + co.GRACE_S)
        self._announced = (stored.state, stored.reason) if stored is not None else (self.state, self.reason)

    # ---------------------------------------------------------------------------------------------------- the interface

    @property
    def state(self) -> str:
        """``JobInfo.state``: the phase, but ``forming`` while a view is being formed or taken back, ``saving`` while
        the result is on no disk."""
        if self.phase is JobPhase.WAITING and "save" in self._deadlines:
            return "saving"
        unheard = bool(self._roster.unheard) or not self._roster.running
        forming = self.phase is JobPhase.STOPPING or (self.phase is JobPhase.RUNNING and unheard)
        return "forming" if forming else self.phase.value

    @property
    def known_step(self) -> int:
        return self._recovery.known_step

    @property
    def training(self) -> TrainingWorkload | None:
        return self._planner.training

    @property
    def held(self) -> dict[str, int]:
        return self._roster.held

    def part_of(self, peer_id: str) -> int | None:
        return self._roster.part_of(peer_id)

    @property
    def peer_ids(self) -> frozenset[str]:
        return frozenset(self._roster.peers)

    def objection(self, peer_id: str) -> str:
        """Why the job takes this worker in no case now; empty if it does."""
        if self.phase in {*ENDED, JobPhase.PAUSED} or self.paused:
            return f"is {'paused' if self.paused else self.state}"
        return "has released it" if peer_id in self._roster.banned else ""

    def refusal(self, peer_id: str) -> str:
        """Why the job takes no such worker now; empty if it does."""
        if objection := self.objection(peer_id):
            return objection
        full = len(self._roster.peers) >= self.needs.most
        return f"has the {self.needs.most} workers that it can use" if full and not self.expects(peer_id) else ""

    def expects(self, peer_id: str) -> bool:
        """Whether the job's state may be on this worker's disk."""
        return peer_id in self._roster.held or (self.restore is not None and self.restore.peer_id == peer_id)

    @property
    def needs(self) -> co.WorkerNeeds:
        parts, options, here = self._roster.parts, self.options, len(self._roster.peers)
        floor = options.least * parts if self.view is not None else 0
        start = options.replicas * parts
        least = min(start, max(here // parts * parts, options.least * parts)) if self.view is not None else start
        return co.WorkerNeeds(floor, least, options.most * parts, parts)

    def may_withdraw(self, peer_id: str) -> bool:
        """Whether the pool may have this worker, as far as is known now (rule 12)."""
        roster = self._roster
        if self.phase in (JobPhase.STOPPING, JobPhase.PAUSED) or roster.unheard | roster.away or self.restore:
            return False
        in_view = self.view is not None and self.view.rank_of(peer_id) is not None
        return not in_view or (self.phase is JobPhase.RUNNING and self._roster.committed and not roster.healing)

    def is_withdrawn(self, peer_id: str) -> bool:
        return peer_id in self._roster.withdrawn

    @property
    def exclusions(self) -> Exclusions:
        return self._quarantine.exclusions

    def kept_out(self) -> dict[str, tuple[str, float]]:
        """Why workers of this job do not train now, and until when (``inf``: not known), for their own terminals."""
        reasons: dict[str, tuple[str, float]] = {}
        for peer_id, known in self._roster.peers.items():
            if peer_id in self._roster.running | self._catch_ups.moving:
                continue
            if peer_id in self.exclusions.peer_ids:
                reasons[peer_id] = self.exclusions.reason(peer_id)
            elif self.phase is JobPhase.PAUSED:
                reasons[peer_id] = "the job is paused", math.inf
            elif self.phase is JobPhase.WAITING and (known.standing or self._roster.part_of(peer_id) is None):
                reasons[peer_id] = self.reason, self._deadlines.at("grace")
            elif self.phase is JobPhase.RUNNING and self.view and self.view.replicas >= self.options.places:
                reasons[peer_id] = (
                    "each micro-batch of a step has a worker; this one replaces one that leaves",
                    math.inf,
                )
            elif self.phase is JobPhase.RUNNING and self._roster.parts > 1:
                text = f"more workers are needed: one for each of the model's {self._roster.parts} parts"
                reasons[peer_id] = text, math.inf
        return reasons

    @property
    def short(self) -> bool:
        enough = self._roster.parts * (self.options.least if self.view else self.options.replicas)
        return self.phase is JobPhase.WAITING and len(self._roster.peers) < enough

    def paused_survivors(self) -> Reports | None:
        """The reports of members that hold a paused job's state in memory; None if no member can be released."""
        quiet = self.phase is JobPhase.PAUSED and bool(self._roster.peers) and not self._roster.running
        return self._roster.survivors(self.view) if quiet else None

    def is_last_holder(self, peer_id: str, others: Collection[str]) -> bool:
        """Whether none of ``others`` keeps the run's state of that worker's part in memory."""
        roster, part = self._roster, self._roster.part_of(peer_id)
        holders = (roster.running | roster.survivors(self.view).keys()) - roster.healing
        return not any(key in holders and roster.part_of(key) == part for key in others)

    def next_deadline(self) -> float | None:
        plan_due = [self._planner.due] if self._planner.due is not None else []
        others = [*self._quarantine.exclusions.next(), *self._catch_ups.next(), *plan_due]
        return min([*self._deadlines.next(), *others], default=None)

    def handle(self, event: co.Event, now: float) -> list[co.Instruction]:
        """Take one event and return the instructions, in order. ``now`` is monotonic seconds and never goes back."""
        self._out = []
        self._history.append((now, self.phase, event))
        if handler := _HANDLERS.get(event if isinstance(event, Signal) else type(event)):
            handler(self, event, now)
        self._expire(now)
        self._advance(now)
        if self._announced != (self.state, self.reason):
            self._announced = (self.state, self.reason)
            self._out.append(co.SetState(*self._announced))
        return self._out

    # ----------------------------------------------------------------------------------------------------------- events

    def _take_offer(self, event: co.PeerOffered, now: float) -> None:
        peer_id = event.peer.peer_id
        if self.refusal(peer_id):
            self._out.append(co.SendRelease(peer_id, f"the job is {self.state} and accepts no workers now"))
            return
        self._roster.peers[peer_id] = KnownPeer(event.peer)
        self._recovery.arrived()
        if self._roster.part_of(peer_id) is not None:
            self._assign(peer_id)
        self._note_stop(peer_id, now)  # rule 4

    def _take_return(self, event: co.PeerReturned, now: float) -> None:
        peer_id = event.peer.peer_id
        if self.phase in ENDED or self._roster.part_of(peer_id) is None:
            self._out.append(co.SendRelease(peer_id, f"the job is {self.state}"))
            return
        self._roster.peers[peer_id] = KnownPeer(event.peer, returned=True)
        self._recovery.arrived()
        if self._goes_back:
            self._assign(peer_id)
        elif self._is_current(peer_id, event.generation):
            self._roster.away.discard(peer_id)
            self._roster.running.add(peer_id)
            self._roster.unheard.add(peer_id)
            if self.phase is JobPhase.WAITING:
                self._go(JobPhase.RUNNING, "a member is back")
            if self.phase is JobPhase.RUNNING:
                self._deadlines.start("absence", now + co.GRACE_S)

    def _take_report(self, event: co.PeerReported, now: float) -> None:
        known, report = self._roster.peers.get(event.peer_id), event.report
        if known is None or self._roster.part_of(event.peer_id) is None:
            return
        current = self._is_current(event.peer_id, report.generation)
        if report.status in OUTSIDE:
            self._take_outside(known, report, now)
        elif report.status == "failed":
            self._take_failure(known, report, now)
        elif self._goes_back:
            return  # it must load a checkpoint; the state before that does not matter
        elif current:
            self._take_member_report(known, report, now)
        elif report.status in STANDSTILL and self._never_got_view(event.peer_id, report):
            known.standing = report
            self._note_stop(event.peer_id, now)
        elif event.peer_id in self._roster.running or report.status not in {*STANDSTILL, "training"}:
            return  # of a view before the current one
        elif report.status == "training" or self.phase in (JobPhase.RUNNING, JobPhase.STOPPING):  # rule 8
            self._forget(event.peer_id)
            reason = "the ring continued without this worker; it will join again"
            self._out.append(co.SendRelease(event.peer_id, reason))
        else:
            known.standing = report  # its ring is over, and so is the ring after it

    def _never_got_view(self, peer_id: str, report: Report) -> bool:
        """Whether a member of the view, which reports an earlier one, did not receive the view because it or the seed
        was lost. Then the view has never begun: no step is committed without all of its members."""
        view = self.view
        if view is None or view.rank_of(peer_id) is None:
            return False
        if peer_id in self._roster.running:
            return peer_id in self._roster.unheard
        return holds(report, view.step, view.lineage)

    def _take_member_report(self, known: KnownPeer, report: Report, now: float) -> None:
        peer_id = known.peer.peer_id
        self._roster.unheard.discard(peer_id)
        self._recovery.known_step = max(self.known_step, report.applied)
        if report.status == "training":
            self._note_training(known, now)
        elif report.status == "healed":
            self._roster.healing.discard(peer_id)
        elif report.status == "hung" and peer_id in self._roster.running:
            self._take_hang(peer_id, report.reason, now)
        elif report.status in STANDSTILL:
            if report.status == "done" and report.applied < self.options.least_steps:
                report = replace(report, status="held")  # by the member's word alone
            known.standing = report
            if report.status == "broken":
                if report.cause == DIAL and self.view and self.view.rank_of(report.suspect) is not None:
                    self._ring_planner.undialled.add((peer_id, report.suspect))
                self._quarantine.take_report(peer_id, report)
            self._note_stop(peer_id, now, broken=report.status == "broken")

    def _note_training(self, known: KnownPeer, now: float) -> None:
        known.standing = None
        self._catch_ups.forget(known.peer.peer_id)  # it followed until it received its view
        self._roster.away.discard(known.peer.peer_id)
        self._roster.running.add(known.peer.peer_id)
        if self.phase is JobPhase.WAITING:
            self._go(JobPhase.RUNNING, "its ring is running")
        elif self.phase is JobPhase.STOPPING:
            self._hold([known.peer.peer_id], self.reason)
        elif self.phase is JobPhase.PAUSED:
            self._stop(now, "the job is paused")
        if self.phase is JobPhase.RUNNING and not self._roster.unheard | self._roster.away:
            self._deadlines.drop("absence")
            self.reason = ""

    def _take_outside(self, known: KnownPeer, report: Report, now: float) -> None:
        peer_id = known.peer.peer_id
        if report.status == "following" and peer_id not in self._catch_ups.moving:
            if not known.returned or peer_id in self._roster.running - self._roster.unheard:
                return  # it was let in or called back in the meantime
            self._catch_ups.take_status(peer_id, report.status)
        if report.corpus and not self.corpus:
            self.corpus = report.corpus
            self._out.append(co.SetCorpus(report.corpus))
        if report.corpus != self.corpus:
            difference = f"SHA-256 {report.corpus[:12] or 'none'}, not {self.corpus[:12]}"
            text = f"its data, tokenizer or base model differs from the job's ({difference}); give it the files "
            self._ban(known, text + "that the job started with", "corpus")
        elif not self._goes_back or self._answers_restore(known, report):
            known.standing, known.asked = report, None
            if peer_id in self._catch_ups:
                self._catch_ups.take_status(peer_id, report.status)
        self._note_stop(peer_id, now)

    @property
    def _goes_back(self) -> bool:
        return self.phase is JobPhase.WAITING and self.restore is not None

    @property
    def _awaits_holder(self) -> bool:
        """Whether the peer that verified the checkpoint to go back to may still be on its way back."""
        holder = self.restore.peer_id if self.restore is not None else ""
        return bool(holder) and holder not in self._roster.peers and "restore" not in self._deadlines.passed

    def _answers_restore(self, known: KnownPeer, report: Report) -> bool:
        """Whether the report answers the request to go back. If it answers an earlier request, asks again."""
        assert self.restore is not None
        step = self.restore.step
        if known.asked == step or report.applied == step:
            return report.applied <= step  # else sent before it was asked
        known.asked = None
        self._assign(known.peer.peer_id)
        return False

    def _take_failure(self, known: KnownPeer, report: Report, now: float) -> None:
        peer_id = known.peer.peer_id
        reason = report.reason or "it gave no reason"
        if self._is_current(peer_id, report.generation):
            self._roster.failures[peer_id] = reason
        self._ban(known, f"cannot continue: {reason}", "member-failed")
        self._note_stop(peer_id, now)
        if not self._roster.peers and self.view is None:
            self._end(JobPhase.FAILED, reason)
        elif not self._roster.peers and self.phase is JobPhase.WAITING:
            self.reason = f"waiting for another worker: {known.peer.name} cannot continue: {reason}"

    def _note_stop(self, peer_id: str, now: float, *, broken: bool = True) -> None:
        """A member no longer trains. ``broken``: the others report soon, too; else the slowest one's disk decides."""
        if peer_id not in self._roster.running | self._roster.away:
            return
        self._roster.note_stopped(peer_id)
        if self.phase is JobPhase.RUNNING:
            self._stop(now, "the ring stopped")
        if broken:
            self._hurry(now)

    def _take_hang(self, peer_id: str, why: str, now: float) -> None:
        """Remove a member whose computing does not move. If no other member holds its part, it has more time first."""
        part_of, others = self._roster.part_of, self._roster.running - {peer_id}
        if part_of(peer_id) not in map(part_of, others) and "hung" not in self._deadlines.passed:
            if "hung" not in self._deadlines:
                self._tell(
                    "warning", "hung", f"{self._name(peer_id)}: {why}, and no other member has its part", peer_id
                )
            self._deadlines.start("hung", now + co.GRACE_S)
            return
        self._roster.healing.discard(peer_id)
        self._strike_off({peer_id}, why)
        if self.phase is JobPhase.RUNNING:
            self._stop(now, f"{self._name(peer_id)} was removed")
        self._hurry(now)

    def _hurry(self, now: float) -> None:
        """The ring is broken: wait less long for those that have not stopped."""
        self._quarantine.broken = True
        if self.phase is JobPhase.STOPPING:
            patience_s = co.SETTLE_S if self._roster.running - self._roster.healing else TORN_S
            self._deadlines.hasten("stop", now + patience_s)

    def _take_loss(self, event: co.PeerLost, now: float) -> None:
        peer_id = event.peer_id
        self._roster.banned.discard(peer_id)
        self._planner.too_small.discard(peer_id)
        self._ring_planner.forget(peer_id)
        known = self._roster.peers.get(peer_id)
        was_running = peer_id in self._roster.running
        self._forget(peer_id)
        if known is None or self.view is None or self.view.rank_of(peer_id) is None:
            return
        self._quarantine.lost_members.add(peer_id)
        if event.left:
            self._quarantine.excused_members.add(peer_id)
        if was_running and self.phase is JobPhase.RUNNING:
            if event.left:
                self._stop(now, f"{known.peer.name} left")
            elif not self._roster.committed:  # no ring runs yet: members that form it would dial this one in vain
                self._stop(now, f"{known.peer.name} is lost")
            else:  # rule 4
                self._roster.away.add(peer_id)
                self._deadlines.start("absence", now + co.GRACE_S)
                if not self._roster.running:
                    self.reason = "no member is connected; the ring may still be running"
        if self._quarantine.broken:
            self._hurry(now)

    def _withdraw(self, event: co.PeerWithdrawn, now: float) -> None:
        peer_id = event.peer_id
        if peer_id in self._roster.peers and self.phase is not JobPhase.PAUSED:
            self._roster.withdrawn.add(peer_id)
            if peer_id in self._roster.running and self.phase is JobPhase.RUNNING:
                self._stop(now, f"{self._name(peer_id)} gets another task")

    def _release_withdrawn(self) -> None:
        """Rule 12."""
        roster = self._roster
        for peer_id in sorted(roster.withdrawn - roster.running) if self.phase is not JobPhase.STOPPING else ():
            survivors = roster.survivors(self.view)
            rest = {key: report for key, report in survivors.items() if key != peer_id}
            state = newest(roster.by_part(survivors))
            is_replaced = state is not None and newest(roster.by_part(rest)) == state
            ready = roster.candidates(self._quarantine.exclusions.peer_ids).keys() - {peer_id}
            is_outside = self.phase is JobPhase.RUNNING and not roster.unheard | roster.away
            if self.view is None or is_outside or (is_replaced and len(ready) >= self.needs.floor):
                self._out.append(co.SendRelease(peer_id, "it gets another task"))
                self._forget(peer_id)
            roster.withdrawn.discard(peer_id)

    def _take_commit(self, event: co.StepCommitted, now: float) -> None:
        if self.view and event.step <= self.view.step:
            return  # repeated or late: tells nothing about the speed of this ring
        self._recovery.progressed(event.step, event.step_s)
        if self.view:
            self._roster.committed = True
            self._deadlines.drop("hung")
            self._roster.healing.clear()  # a step is committed by all members or by none
            self._quarantine.take_commit(event.step)

    def _learn(self, event: co.Event, now: float) -> None:
        """Take in a fact that applies from the next decision on."""
        match event:
            case co.LinksMeasured():
                self._ring_planner.measured = event
            case co.CheckpointsSaved():
                self._recovery.saved = event
            case co.PeerTold(peer=peer) if known := self._roster.peers.get(peer.peer_id):
                known.peer = peer
            case Signal.SURVEYED:
                self._planner.surveyed()

    def _pause(self, event: Signal, now: float) -> None:
        """Pause the job. The members save the step at which they stop, so that ``_yield`` can release them."""
        if self.phase in ENDED:
            return
        self.paused = True
        self._save(Signal.SAVE, now)
        if self.phase is JobPhase.RUNNING:
            self._stop(now, "the job is pausing")
        elif self.phase is JobPhase.WAITING:
            self._go(JobPhase.PAUSED, "paused by a person")

    def _resume(self, event: Signal, now: float) -> None:
        self.paused = False
        if self.phase is JobPhase.PAUSED:
            self._stop(now, "the job resumes")

    def _yield(self, event: Signal, now: float) -> None:
        if self.paused_survivors() is not None:
            for peer_id in sorted(self._roster.peers):
                self._out.append(co.SendRelease(peer_id, "the job is paused, and another job needs its workers"))
                self._forget(peer_id)

    def _cancel(self, event: Signal, now: float) -> None:
        if self.phase not in ENDED:
            self._end(JobPhase.CANCELLED, "cancelled by a person")

    def _save(self, event: Signal, now: float) -> None:
        self._deadlines.drop("save")  # the result: tries again now
        members = tuple(sorted(self._roster.running - self._roster.unheard))
        if members and self.phase in (JobPhase.RUNNING, JobPhase.STOPPING):
            self._out.append(co.SendSave(members))

    def _restore(self, event: co.Restore, now: float) -> None:
        self.restore, self.paused = event, False
        if self.phase in (JobPhase.RUNNING, JobPhase.PAUSED):
            self._stop(now, f"going back to step {event.step}")
        elif self.phase is not JobPhase.STOPPING:
            self._begin_restore(now)

    def _change_settings(self, event: co.ChangeSettings, now: float) -> None:
        self.settings.ask(event)
        if self.phase is JobPhase.RUNNING:
            self._stop(now, "settings change")

    def _reform(self, event: Signal, now: float) -> None:
        if self.phase is JobPhase.RUNNING:
            self._stop(now, "members reach each other by better links")

    @property
    def history(self) -> str:
        return "; ".join(f"{now:.3f} {phase} {event}"[:300] for now, phase, event in self._history)

    # ----------------------------------------------------------------------------------------------------------- phases

    def _expire(self, now: float) -> None:
        self._quarantine.exclusions.expire(now)
        self._catch_ups.expire(now)
        due = self._deadlines.expire(now)
        if "absence" in due and self.phase in (JobPhase.RUNNING, JobPhase.STOPPING):
            self._strike_off(self._roster.unheard | self._roster.away, "it did not reconnect in time")
            if self._roster.running and self.phase is JobPhase.RUNNING:
                self._stop(now, "members did not reconnect in time")
        if "stop" in due:
            self._deadlines.arm("stop", now + co.HOLD_S)  # until the phase ends, which clears it
            if self._quarantine.broken or not self._roster.running & self._roster.healing:  # else a slow transfer
                self._strike_off(set(self._roster.running), "it did not stop in time")

    def _advance(self, now: float) -> None:
        if self.phase is JobPhase.RUNNING and not self._roster.running | self._roster.away:
            self._go(JobPhase.WAITING, "every member is gone")
        self._give_parts(now)
        disturbed = self._roster.unheard | self._roster.away | self._roster.healing
        if self.phase is JobPhase.RUNNING and not disturbed and (names := self._let_in(now)):
            self._stop(now, f"{', '.join(names)} joining")
        if self.phase is JobPhase.STOPPING and not self._roster.running:
            self._decide_after_stop(now)
        self._release_withdrawn()
        if self.phase is JobPhase.WAITING:
            self._try_mint(now)

    def _decide_after_stop(self, now: float) -> None:
        survivors = self._roster.survivors(self.view)
        if self.restore and self.paused:
            self._go(JobPhase.PAUSED, "paused by a person")  # the restore happens after the resume
        elif self.restore:
            self._begin_restore(now)
        elif self._all_done(survivors):
            self.paused = False
            self._go(JobPhase.WAITING, "every step is done")
        elif self.view and all(member.peer_id in self._roster.failures for member in self.view.members):
            self._end(JobPhase.FAILED, next(iter(self._roster.failures.values())))
        elif self.paused:
            self._go(JobPhase.PAUSED, "paused by a person")
        elif not self._apply_judgement(survivors, now):
            self._go(JobPhase.WAITING, "every member has stopped")

    def _apply_judgement(self, survivors: Reports, now: float) -> bool:
        """Exclude whom the reports blame. Where that cannot help, end or pause the job; returns whether it did."""
        judgement = self._quarantine.judge(survivors, self.view, self._roster, now) if self.view else None
        if judgement is None:
            return False
        if judgement.fails_job:
            self._end(JobPhase.FAILED, judgement.text)
            return True
        self._tell("error" if judgement.pauses_job else "warning", judgement.kind, judgement.text)
        if judgement.pauses_job:
            self.paused = True
            self._go(JobPhase.PAUSED, judgement.text)
        return judgement.pauses_job

    def _all_done(self, survivors: Reports) -> bool:
        return self._roster.whole(survivors) and all(report.status == "done" for report in survivors.values())

    def _save_result(self, now: float) -> bool:
        """Rule 11: whether the members have only the result to save. Ends the job if it is saved."""
        survivors, options, roster = self._roster.survivors(self.view), self.options, self._roster
        if self.restore or self.settings.asked or not self._all_done(survivors):
            return False
        step, tried = max(report.applied for report in survivors.values()), self._recovery.saves_asked > len(survivors)
        if self._recovery.has_saved(step, survivors, roster, in_parts=tried):
            early = next((report.reason for report in survivors.values() if report.reason), "")
            self._end(JobPhase.DONE, early or "every step is done")
            return True
        ready = roster.candidates(self._quarantine.exclusions.peer_ids)
        if min(options.places, *map(len, roster.by_part(ready))) > len(survivors) // roster.parts:
            for peer_id in ready.keys() - survivors.keys():
                self._catch_ups.let_in(peer_id)
            return False  # newcomers fetch the result, and may have room for it
        unsaved = {self._name(key): report.unsaved for key, report in sorted(survivors.items()) if report.unsaved}
        why = "; ".join(f"{name}: {text}" for name, text in list(unsaved.items())[:2]) or "no member has reported it"
        retry = f"The workers keep it in memory and try again; at once: p2ptrain jobs save {self.job}"
        self.reason = f"the result, step {step}, is not saved yet: {why}. {retry}"
        if "save" not in self._deadlines:
            order = sorted(survivors)
            rounds, turn = divmod(self._recovery.saves_asked, len(order))
            self._recovery.saves_asked += 1
            self._deadlines.arm("save", now + min(SAVE_AGAIN_S * 2 ** min(rounds, 9), SAVE_AGAIN_MOST_S))
            self._out.append(co.SendSave((order[turn],)))
        return True

    def _try_mint(self, now: float) -> None:
        if self._save_result(now):
            return
        if self.view is not None and self._too_few(len(self._roster.candidates(self._quarantine.exclusions.peer_ids))):
            return
        if self.restore and not self._try_restore(self.restore, now):
            return
        if (state := self._find_carried_state()) is not None:
            self._mint(state, now)
            return
        self._recall()  # they follow a ring that is gone, or that this seed does not know
        ready = self._roster.standing()  # rule 9: an excluded worker's state counts, too
        if not self._roster.whole(ready):
            self._recovery.short_since = None
            self._deadlines.drop("grace", "build")
            self.reason = "no worker is ready"
            if self._roster.parts > 1:
                vacant = [str(part) for part, reports in enumerate(self._roster.by_part(ready)) if not reports]
                text = f"a worker is needed for part {', '.join(vacant)} of the model's {self._roster.parts} parts"
                self.reason = self._planner.unfit or text
            return
        if self.view is None:
            lacking = sum(max(0, self.options.replicas - len(part)) for part in self._roster.by_part(ready))
            wanted = self.options.replicas * self._roster.parts
            self.reason = f"{_more_workers(lacking)} needed ({len(ready)} of {wanted} are ready)"
            if lacking:
                return
        passed = self._deadlines.passed
        patient = "grace" not in passed or ("build" not in passed and self._roster.building())
        state, reason = self._recovery.source(ready, self._roster, self.view, patient=patient)
        self.reason = reason
        if state is not None and state[1]:
            self._mint(state, now)
        elif state is not None:
            self._go_back(state[0], now)
        else:
            self._be_patient(ready, now)

    def _too_few(self, fit: int) -> bool:
        """Whether so many workers may form no view; then says so."""
        least = self.options.least * self._roster.parts
        if is_short := fit < least and self.options.least > 1:
            self.reason = f"{_more_workers(least - fit)} needed ({fit} of {least} are ready)"
        return is_short

    def _find_carried_state(self) -> State | None:
        """The state that the survivors carry on: the newest one of which they hold all parts."""
        state = newest(self._roster.by_part(self._roster.survivors(self.view))) if self.view else None
        return state if state is not None and self.view is not None and state[0] >= self.view.step else None

    def _be_patient(self, ready: Reports, now: float) -> None:
        if self._recovery.short_since is None:
            self._recovery.short_since = now
        if "grace" not in self._deadlines.passed:
            step, _ = self._recovery.best(ready, self._roster) or (0, "")
            patience_s = self._recovery.patience_s(step)
            self._deadlines.arm("grace", self._recovery.short_since + patience_s)
        self._deadlines.start("build", now + co.BUILD_S)

    def _go_back(self, step: int, now: float) -> None:
        """Load the newest step of which all parts have a checkpoint: the states that are loaded do not match."""
        self._tell("warning", "steps-lost", f"goes back to step {step}: of later steps some part of the model is lost")
        self.restore, self._recovery.tries = co.Restore(step, "", ""), step
        self._begin_restore(now)

    def _try_restore(self, restore: co.Restore, now: float) -> bool:
        """Mint a view from the chosen checkpoint, once all peers had the time to load it. The peer that verified it may
        still be on its way back. Returns True if no peer could load it, so another state is needed."""
        overdue = "restore" in self._deadlines.passed
        ready = self._roster.standing()
        loaded = {peer_id: report for peer_id, report in ready.items() if report.applied == restore.step
                  and restore.lineage in ("", report.lineage)}  # fmt: skip
        state = newest(self._roster.by_part(loaded))
        lacking, self.reason = self._roster.parts - len(self._roster.peers), f"going back to step {restore.step}"
        if lacking > 0:
            self._deadlines.drop("restore")
            self._deadlines.arm("restore", now + co.BUILD_S)
            here = f"{len(self._roster.peers)} of {self._roster.parts} workers are here"
            self.reason, overdue = f"{self.reason}: {here}, and a replica has one for each part", False
        elif self._awaits_holder:
            self.reason += ": waiting for the worker that holds it"
        # Of a split model, holders of other parts may be on their way back, too.
        comes = restore.peer_id and (self._roster.parts > 1 or restore.peer_id not in self._roster.peers)
        if not overdue and (self._roster.building() or not (state or (self._roster.whole(ready) and not comes))):
            return False
        if state is not None:
            self._mint(state, now)
            return False
        self._tell("error", "restore-failed", f"no worker could load the checkpoint of step {restore.step}")
        self.restore = None
        if restore.peer_id:
            self._deadlines.passed |= {"grace", "build"}  # newer states were set aside: there is nothing to wait for
        elif self._roster.whole(ready):
            self._recovery.failed = self._recovery.tries
        return True

    def _mint(self, state: State, now: float) -> None:
        (step, lineage), before, roster = state, self.view, self._roster
        carried, survivors = self._find_carried_state() is not None, roster.survivors(before)
        moving, may_enter = self._catch_ups.moving, self._catch_ups.may_enter
        if before is not None:
            self._out += self._quarantine.exclude_repeated_deaths(survivors, before, now)
        standing = roster.standing()
        healthy = {key for key, report in standing.items() if key not in moving and holds(report, step, lineage)}
        ready = roster.candidates(self._quarantine.exclusions.peer_ids, healthy)
        if carried and not self.options.asynchronous:  # rule 7
            at_once = healthy | survivors.keys()
            now_fit = {key: report for key, report in ready.items() if key in at_once or may_enter(key)}
            ready = now_fit if len(now_fit) >= self.options.least * roster.parts else ready
        formed = replicas_of(ready, roster, healthy, survivors, self.options.places)
        if self._too_few(len(formed) * roster.parts):  # one was excluded just now
            return
        reduce_bytes = max(report.reduce_bytes for report in ready.values())
        plan = self._ring_planner.plan(formed, roster, reduce_bytes)
        order = plan.order[::-1] if self._quarantine.reverses_ring else plan.order
        replicas = [formed[first] for first in order]
        if self.options.asynchronous:
            replicas = self._put_server_first(replicas, healthy)
        chosen = {peer_id: ready[peer_id] for replica in replicas for peer_id in replica}
        loses = before and (not carried or self.options.asynchronous)  # versions that nobody pulled are gone
        kind, text = self._recovery.abandoned(step, healthy, roster) if loses else ("", "")
        if kind and not self.restore:
            self._tell("warning", kind, text)
        went_back = bool(kind) or self.restore is not None
        self._recovery.begin(step, chosen, went_back=went_back, carried=survivors if carried else ())
        generation = max(before.generation if before else 0, self.options.minted_below) + 1
        changes = self.settings.begin_view(step)
        self.options = replace(self.options, least_steps=self.settings.least_steps)
        self.view = View(
            self.job,
            generation,
            step,
            lineage,
            members_of(replicas, ready, roster, healthy, self.options),
            square_sum(standing, step, lineage),
            streams=plan.streams,
            sub_chunk_bytes=plan.sub_chunk_bytes,
            codec=plan.codec,
            lenient=self._quarantine.refused.lenient,
            reduce_bytes=reduce_bytes,
            stages=roster.parts,
            changes=changes,
        )
        self._out.append(co.Mint(self.view, went_back, self._recovery.branch))
        self._tell("info", "view", describe_view(self.view, before))
        if self.options.share_rule.by_size:
            self._tell("info", "shares", describe_sizes(self.view, ready))
        self._out += self._ring_planner.notices(plan)
        for peer_id, report in chosen.items():
            roster.peers[peer_id].standing, roster.peers[peer_id].entered = None, (report.applied, report.lineage)
            self._catch_ups.forget(peer_id)
        roster.running, roster.healing = set(chosen), chosen.keys() - healthy
        self._quarantine.view_began()
        self.restore, roster.committed = None, False
        self._roster.failures.clear()
        self._go(JobPhase.RUNNING, "")

    def _put_server_first(self, replicas: list[tuple[str, ...]], healthy: Collection[str]) -> list[tuple[str, ...]]:
        """The same ring of an asynchronous view, beginning with its server: the former one, else the first member that
        holds the state."""
        former = self.view.members[0].peer_id if self.view else ""
        able = [peer_id for peer_id, *_ in replicas if peer_id in healthy]
        server = former if former in able else able[0]
        first = [peer_id for peer_id, *_ in replicas].index(server)
        return replicas[first:] + replicas[:first]

    def _is_current(self, peer_id: str, generation: int) -> bool:
        return self.view is not None and self.view.generation == generation and self.view.rank_of(peer_id) is not None

    def _give_parts(self, now: float) -> None:
        """Assign parts to spares, and to workers that are too many at their part (``StagePlanner``)."""
        roster, planner = self._roster, self._planner
        if roster.parts == 1 or self.paused or self.phase in {*ENDED, JobPhase.PAUSED}:
            planner.due = None
            return
        if self._goes_back and self._awaits_holder:
            return  # spares must be told who has the files
        peers = {peer_id: known.peer for peer_id, known in roster.peers.items()}
        idle = sorted(key for key, report in roster.standing().items() if self._may_change(key, report))
        links = self._ring_planner.measured.links
        assigned, notices = planner.assign(peers, roster.held, idle, links, self.options.most, now)
        self._out += notices
        for peer_id, part in assigned.items():
            roster.give(peer_id, part)
            self._catch_ups.forget(peer_id)
            self._assign(peer_id)

    def _may_change(self, peer_id: str, report: Report) -> bool:
        """Whether a stopped worker may take another part: a ring carries on its state, or it holds none."""
        if peer_id in self._catch_ups.moving:
            return False
        is_member = self.view is not None and self.view.rank_of(peer_id) is not None
        is_fresh = report.applied == 0 and not self._recovery.saved.parts.get((peer_id, self._roster.held[peer_id]))
        return self.phase is JobPhase.RUNNING or (is_fresh and not is_member)

    # -------------------------------------------------------------------------------------------------------- newcomers

    def _let_in(self, now: float) -> list[str]:
        """Rule 7: names of newcomers to let in now, if the view has room. Asks others to catch up."""
        view, catch_ups = self.view, self._catch_ups
        excluded = self._quarantine.exclusions.peer_ids
        standing = {key: report for key, report in self._roster.standing().items() if key not in excluded}
        by_part = self._roster.by_part(standing)
        room = min(self.options.places - view.replicas, *map(len, by_part)) if view else 0
        if view is None or room <= 0:
            return []
        coming: list[list[str]] = []
        for part, newcomers in enumerate(by_part):
            late = [peer_id for peer_id in newcomers if not self._is_at_start(peer_id, standing[peer_id], view)]
            for peer_id in catch_ups.choose(late, view.replicas, room):
                catch_ups.begin(peer_id, now, standing[peer_id].reduce_bytes)
                sources = sources_for(peer_id, part, view, self._ring_planner.measured.links)
                self._out.append(co.SendCatchUp(peer_id, view.generation, sources))
            coming.append([*sorted(newcomers.keys() - set(late)), *filter(catch_ups.may_enter, late)])
        together = [peer_id for replica in zip(*coming, strict=False) for peer_id in replica]
        for peer_id in together:
            catch_ups.let_in(peer_id)
        return sorted(self._roster.name(peer_id) for peer_id in together)

    def _is_at_start(self, peer_id: str, report: Report, view: View) -> bool:
        """Whether a newcomer need not catch up: it holds the state with which the view began, and no step was committed
        since. In an asynchronous view it pulls the state from the server, as all members do."""
        is_moving = self._roster.committed or peer_id in self._catch_ups.moving
        return self.options.asynchronous or (not is_moving and holds(report, view.step, view.lineage))

    def _recall(self) -> None:
        """Ask newcomers for their own state: the ring that they follow is gone, or this seed does not know it."""
        for peer_id in sorted(self._catch_ups.moving & self._roster.peers.keys()):
            self._roster.peers[peer_id].standing = None
            self._assign(peer_id)
        self._catch_ups.clear()

    # ---------------------------------------------------------------------------------------------------- small helpers

    def _go(self, phase: JobPhase, reason: str, *, keep: str = "") -> None:
        if phase not in TRANSITIONS[self.phase]:
            raise InvalidTransition(f"{self.phase} → {phase}: {self.history}")
        self.phase, self.reason = phase, reason
        self._deadlines.clear(keep=keep)  # each deadline belongs to one phase
        if phase is not JobPhase.RUNNING:
            self._roster.away.clear()

    def _stop(self, now: float, reason: str) -> None:
        self._go(JobPhase.STOPPING, reason, keep="absence" if self._roster.unheard else "")
        if "absence" in self._deadlines:
            self._deadlines.hasten("absence", now + RETURN_S)  # then unheard members are no longer waited for
        self._deadlines.arm("stop", now + co.HOLD_S)
        self._hold(sorted(self._roster.running - self._roster.unheard), reason)

    def _tell(self, level: str, kind: str, text: str, peer_id: str = "") -> None:
        self._out.append(co.Emit(level, kind, text, peer_id))

    def _hold(self, peer_ids: Iterable[str], reason: str) -> None:
        chosen = tuple(peer_ids)
        if chosen and self.view:
            self._out.append(co.SendHold(chosen, self.view.generation, reason))

    def _assign(self, peer_id: str) -> None:
        known, step = self._roster.peers[peer_id], self.restore.step if self.restore else -1
        known.returned = False
        if known.asked is not None:
            return
        known.asked, part = step, self._roster.part_of(peer_id) or 0
        lineage = self.restore.lineage if self.restore else ""
        holders = self._recovery.holders(step, part, self._roster.peers.keys() - {peer_id})
        there = tuple(self._roster.peers[key].peer for key in holders)
        self._out.append(co.SendAssign(peer_id, self.corpus, step, part, self._roster.parts, there, lineage))

    def _begin_restore(self, now: float) -> None:
        assert self.restore is not None
        if self.phase is not JobPhase.WAITING:
            self._go(JobPhase.WAITING, f"going back to step {self.restore.step}")
        self._deadlines.clear()
        self._deadlines.arm("restore", now + co.BUILD_S)
        self._roster.banned.clear()
        self._catch_ups.clear()
        self._recovery.saves_asked = 0
        for peer_id, known in self._roster.peers.items():
            if self._roster.part_of(peer_id) is not None:
                known.standing = None
                self._assign(peer_id)

    def _ban(self, known: KnownPeer, text: str, kind: str) -> None:
        peer_id = known.peer.peer_id
        place = f" (part {self._roster.part_of(peer_id)})" if self._roster.parts > 1 else ""
        del self._roster.peers[peer_id]
        self._roster.banned.add(peer_id)
        self._roster.healing.discard(peer_id)
        self._catch_ups.forget(peer_id)
        self._tell("error", kind, f"{known.peer.name}{place}: {text}", peer_id)
        self._out.append(co.SendRelease(peer_id, text))

    def _strike_off(self, peer_ids: set[str], why: str) -> None:
        for peer_id in sorted(peer_ids):
            known, loading, name = self._roster.peers.get(peer_id), peer_id in self._roster.healing, self._name(peer_id)
            self._forget(peer_id)
            self._quarantine.lost_members.add(peer_id)
            if known and loading:
                self._quarantine.excused_members.add(peer_id)
                self._roster.peers[peer_id] = KnownPeer(known.peer)
                continue
            if known:
                self._out.append(co.SendRelease(peer_id, f"removed from the ring: {why}"))
            self._tell("warning", "struck-off", f"{name} was removed from the ring: {why}", peer_id)

    def _name(self, peer_id: str) -> str:
        return self._roster.name(peer_id, self.view)

    def _forget(self, peer_id: str) -> None:
        self._roster.forget(peer_id)
        self._catch_ups.forget(peer_id)

    def _end(self, phase: JobPhase, reason: str) -> None:
        keep = self._roster.survivors(self.view) if phase is JobPhase.DONE else {}
        self._out += [co.SendRelease(peer_id, reason) for peer_id in sorted(self._roster.peers) if peer_id not in keep]
        self._tell("error" if phase is JobPhase.FAILED else "info", f"job-{phase}", reason)
        self._go(phase, reason)
        self._roster.clear()
        self._quarantine.exclusions.peer_ids.clear()
        self._planner.end()
        self._catch_ups.clear()
        self.restore, self.paused = None, False


def _more_workers(lacking: int) -> str:
    return "one more worker is" if lacking == 1 else f"{lacking} more workers are"


_HANDLERS: dict[Any, Callable[[Coordinator, Any, float], None]] = {
    co.PeerOffered: Coordinator._take_offer,
    co.PeerReturned: Coordinator._take_return,
    co.PeerReported: Coordinator._take_report,
    co.PeerLost: Coordinator._take_loss,
    co.PeerWithdrawn: Coordinator._withdraw,
    co.StepCommitted: Coordinator._take_commit,
    co.CheckpointsSaved: Coordinator._learn,
    co.LinksMeasured: Coordinator._learn,
    co.PeerTold: Coordinator._learn,
    Signal.SURVEYED: Coordinator._learn,
    co.Restore: Coordinator._restore,
    co.ChangeSettings: Coordinator._change_settings,
    Signal.PAUSE: Coordinator._pause,
    Signal.RESUME: Coordinator._resume,
    Signal.CANCEL: Coordinator._cancel,
    Signal.SAVE: Coordinator._save,
    Signal.REFORM: Coordinator._reform,
    Signal.YIELD: Coordinator._yield,
}
