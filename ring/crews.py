"""Crews: the workers of a job whose model is split, p for each replica of it, as peers of the job's coordinator.

The coordinator (``ring.coordinator``) decides who trains together, from which step; its peers are crews. This core
stands between it and the workers' links: it is told what workers do and say, and says what workers are to be told.

Rules
    1. A worker keeps its stage while it holds that part of the state. Spares have none until a crew can be made whole
       with them; then they build. The stage outlives the worker's process, as its checkpoints do (``held``).
    2. The *places* of a view are its crews' ids. While its ring may run, whatever happens to links, the coordinator
       sees all places training. It hears of an end when every worker of the view that is linked stands still, or was
       struck off: never before, so no view is minted while one of an older view trains.
    3. *Muster.* Then the places are filled from those that stand: with whole crews that share the newest state which
       somebody applied and every stage holds (applied, or prepared). Who was with whom before does not matter: the rest
       of one crew and the rest of another carry the run's state on together. Places that nobody fills are lost.
    4. Everybody else comes in as a newcomer, in a whole crew of a new id. Where its workers share a state it says so;
       where they do not, it is said to hold nothing, and heals stage by stage. Such a crew is only told of while there
       is somebody to heal it, and withdrawn before that one is: no view begins from nothing.
    5. Where no place is filled, crews are made of workers that share what they loaded. Where none can be, the run goes
       back to the newest step of which every stage has a checkpoint at somebody who is here: at once where nobody who
       is away could bring more, else after patience, for it sets newer checkpoints aside. A checkpoint of the whole
       model counts for every stage, whoever has it: workers that are told to go back are told who they are.
    6. What concerns one worker is settled here: its corpus, its failure, its silence while others stand, its deaths
       again and again, its neighbours' doubt.
    7. Where the model's sizes are known (``training``) the first stages are given to so many at once as the first view
       wants, and how the model is cut is decided with it (``ring.crew_planning``), for good.
    8. Later a spare takes a stage that it has the memory for, or none. Who says nothing of it can hold anything.
"""

from __future__ import annotations

from dataclasses import replace

from ring import coordination as co
from ring.coordination import BESIDE, ENDED, Phase
from ring.crew_making import Making
from ring.crewing import NOTHING, Worker, report_of
from wire.job_messages import Report


class Crews(Making):
    """One job's core, for a split model: the same interface as ``Coordinator``, whose events and instructions are about
    workers here.

    Args:
        terms: of crews: ``workers`` counts crews.
        stages: parts of the model, two or more.
        past: as for a coordinator; its view, branch and saved are of workers.
        held: worker → the stage that it held last. saved: the checkpoints that workers are known to have.
        training: what is trained, as far as placing it goes; its cuts where they are chosen already. None: not known.

    Attributes:
        held: the same, as it is now; what changes it must be durable before it is told to anybody.
        view: of workers, each crew's in a row; None before the first.
    """

    # ---------------------------------------------------------------------------------------------------- the interface

    @property
    def phase(self) -> Phase:
        return self.core.phase

    @property
    def state(self) -> str:
        return self.core.state

    @property
    def reason(self) -> str:
        return self._unfit if self._unfit and self.phase is Phase.WAITING else self.core.reason

    @property
    def paused(self) -> bool:
        return self.core.paused

    @property
    def restore(self) -> co.Restore | None:
        return self.core.restore

    @property
    def known_step(self) -> int:
        return self.core.known_step

    @property
    def peer_ids(self) -> frozenset[str]:
        """The workers that this job has now."""
        return frozenset(self._workers)

    @property
    def short(self) -> bool:
        """Whether it waits for workers."""
        enough = self.stages * (1 if self.view else self.terms.workers)
        return self.core.phase is Phase.WAITING and len(self._workers) < enough

    def wants(self, peer_id: str) -> bool:
        """Whether the free worker should be offered to this job."""
        if self.core.phase in {*ENDED, Phase.PAUSED} or self.core.paused or peer_id in self._banned:
            return False
        return peer_id in self.held or len(self._workers) < self.stages * self.terms.most

    def paused_heirs(self) -> dict[str, Report] | None:
        """Those that carry a paused job's state in memory; None where it is not paused, or has nobody to let go."""
        if self.core.paused_heirs() is None:
            return None
        return {key: worker.report for key, worker in self._workers.items() if worker.crew and worker.report}

    def stage_of(self, peer_id: str) -> int | None:
        """The stage of a worker of this job."""
        worker = self._workers.get(peer_id)
        return worker.stage if worker is not None else self.held.get(peer_id)

    def next_deadline(self) -> float | None:
        """When to ``handle(Tick())`` at the latest."""
        planning = self._plan_due if self._plan_due is not None and self._plan_due > self._now else None
        own = [self._absence, self._stop, self._build, self._back_due, planning, self.core.next_deadline()]
        return min([*(at for at in own if at is not None), *self._bench.next()], default=None)

    def handle(self, event: co.Event, now: float) -> list[co.Instruction]:
        """Take in one event; returns what to do, in order. ``now`` is monotonic seconds and never goes back."""
        self._out, self._now = [], now
        self._history.append(f"{now:.3f} {self.core.phase} {event}"[:300])
        if self._back_due is not None and self._back_due <= now:
            self._settle()  # first: the coordinator is about to begin from the little that a crew has at hand
        match event:
            case co.PeerOffered(peer):
                self._offered(peer)
            case co.PeerReturned(peer, generation):
                self._returned(peer, generation)
            case co.PeerReported(peer_id, report):
                self._reported(peer_id, report)
            case co.PeerLost(peer_id) | co.PeerLeft(peer_id):
                self._lost(peer_id, left=isinstance(event, co.PeerLeft))
            case co.Saved(_, steps, wholes):
                self._saved(steps, wholes)
            case co.Measured():
                self._measured = event
                self._tell_measured()
            case co.PeerTold(peer):
                if worker := self._workers.get(peer.peer_id):
                    worker.peer = peer
            case co.Surveyed():
                self._survey_due = None
            case co.Progress():
                self._progress(event)
            case co.Restore(step, _, lineage):
                self._tell(co.Restore(step, "", lineage))
            case co.Yield():
                self._yield()
            case _:
                self._tell(event)
        self._expire()
        self._settle()
        self._tell(co.Tick())
        self._settle()
        return self._out

    def validate(self) -> None:
        """Assert what must hold between events."""
        self.core.validate()
        story = self.story
        taken = [member for crew in self._crews.values() for member in crew.members]
        running = self.view is not None and not self._mustered
        assert running or len(set(taken)) == len(taken), f"a worker in two crews: {story}"
        for crew in self._crews.values():
            assert crew.in_view or len(crew.members) == self.stages, story
            for stage, member in enumerate(crew.members):
                worker = self._workers.get(member)
                if crew.in_view and not self._mustered:
                    continue  # its ring may well run
                assert worker is not None, f"{member} of {crew.crew_id} is not here: {story}"
                assert worker.stage == stage, f"{member} is not at its stage: {story}"
                assert worker.crew == crew.crew_id, story
        for worker in self._workers.values():
            assert worker.stage is None or self.held.get(worker.peer_id) == worker.stage, story
            assert not worker.trains or not self._mustered, f"{worker.peer_id} trains after the muster: {story}"
            assert not worker.crew or worker.crew in self._crews, story
        assert not self._banned & set(self._workers), story
        empty = [crew for crew in self._crews.values() if crew.known and crew.said is None and not crew.due]
        assert all(crew.in_view or self._is_moving(crew) for crew in empty), story
        void = [crew for crew in self._crews.values() if crew.known and crew.said == NOTHING]
        assert not void or self._anchored(), f"told of a crew that nobody can heal: {story}"

    # ---------------------------------------------------------------------------------------------- workers come and go

    def _offered(self, peer: co.Peer) -> None:
        if not self.wants(peer.peer_id):
            self._out.append(co.SendRelease(peer.peer_id, f"the job is {self.state} and takes no worker now"))
            return
        worker = self._workers[peer.peer_id] = Worker(peer, self.held.get(peer.peer_id), fresh=True)
        if worker.stage is not None:
            self._assign(worker)
        if self._is_member(peer.peer_id) and not self._mustered:  # it has no ring any more, so nobody of the view has
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
        elif self._is_member(peer.peer_id) and not self._mustered:
            worker.trains = True  # until it says how it stands
            self._unheard.discard(peer.peer_id)
            if self._all_linked() and not self._held:
                self._absence = None

    def _lost(self, peer_id: str, *, left: bool) -> None:
        self._banned.discard(peer_id)
        worker = self._workers.pop(peer_id, None)
        if worker is None:
            return
        if self._is_member(peer_id):
            self._flapping.excused.add(peer_id) if left else self._fallen.add(peer_id)
            if not self._mustered:
                self._member_lost(worker, left)
        self._leave_crew(worker)

    def _member_lost(self, worker: Worker, left: bool) -> None:
        """A lost link is not a death (the coordinator's rule 4), be it that of all."""
        if left or not self._committed:
            self._ring_is_over(f"{worker.peer.name} {'left' if left else 'is lost'}", broken=False)
        elif self._absence is None and not self._held:
            self._absence = self._now + self.terms.grace_s
        self._hurry()

    def _yield(self) -> None:
        if self.core.paused_heirs() is None:
            return
        self._tell(co.Yield())
        for worker in list(self._workers.values()):
            self._release(worker, "the job is paused, and another needs its workers")

    def _ban(self, worker: Worker, text: str, kind: str) -> None:
        """Let it go, and do not take it again until it connects anew."""
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
            return  # it was told to load a checkpoint: what it was before that is of no interest
        elif report.status == "training":
            if current:
                self._trains(worker, report)
            elif not worker.trains:
                self._release(worker, "the ring went on without it")
        elif report.status == "healed":
            if current:
                self._healed(worker, report)
        elif current or (worker.trains and worker.returned):
            self._stands(worker, report)
        elif not worker.trains:  # else it was said before the view that it is in now was announced
            worker.report = report

    def _trains(self, worker: Worker, report: Report) -> None:
        """After a reconnect: its ring still runs, whatever this seed thought."""
        worker.trains, worker.report, worker.moving = True, None, False
        self._unheard.discard(worker.peer_id)
        if self._mustered:
            self._mustered = False
            self._ring_is_over("its ring is over", broken=False)
            return
        if self._held and self.view:
            self._out.append(co.SendHold((worker.peer_id,), self.view.generation, self._held))
        for crew in self._places():
            if not crew.known or self.core.phase is Phase.WAITING:
                self._introduce(crew)
                training = report_of(
                    self.job, [report], (report.applied, report.lineage), "training", report.generation, self._crew_of
                )
                self._tell(co.PeerReported(crew.crew_id, training))

    def _healed(self, worker: Worker, report: Report) -> None:
        worker.healing = False
        crew = self._crews.get(worker.crew)
        if crew and not self._mustered and not any(self._workers[key].healing for key in self._here(crew)):
            state = report.applied, report.lineage
            told = report_of(self.job, [report], state, "healed", report.generation, self._crew_of)
            self._tell(co.PeerReported(crew.crew_id, told))

    def _stands(self, worker: Worker, report: Report) -> None:
        first = worker.trains
        worker.trains, worker.report, worker.healing = False, report, False
        self._unheard.discard(worker.peer_id)
        if self._mustered:
            if not first and worker.crew:
                return  # said again
            self._muster()
            return
        if report.status == "broken":
            self._broke = True
            self._doubt(report.suspect, worker.peer_id)
        if self._stop is None:
            self._stop = self._now + self.terms.hold_s
        self._hurry()

    def _doubt(self, suspect: str, reporter: str) -> None:
        """A frozen worker closes nothing: whoever stands beside it in a ring notices, and the seed need not wait as
        long for its beats as it would else."""
        view, worker = self.view, self._workers.get(suspect)
        rank = view.rank_of(suspect) if view is not None else None
        if view is None or rank is None or worker is None or not worker.trains:
            return
        ring = view.stage_ring(rank)
        place = view.replica_of(rank)
        beside = (view.left_of(rank), view.right_of(rank), ring.left_of(place), ring.right_of(place))
        if reporter in {member.peer_id for member in beside}:
            self._witnesses.setdefault(suspect, set()).add(reporter)
            self._out.append(co.Doubt(suspect, len(self._witnesses[suspect])))

    def _beside(self, worker: Worker, report: Report) -> None:
        """Ready, or following the ring. A member that is ready again has lost its ring."""
        crew = self._crews.get(worker.crew)
        if report.status == "following" and not worker.moving:
            if worker.returned:
                self._assign(worker)  # it followed before its link was lost: what has it got?
            return  # it was let in, or called back, meanwhile
        self._corpus = self._corpus or report.corpus
        if report.corpus != self._corpus:
            mine, ours = report.corpus[:12] or "none", self._corpus[:12]
            remedy = "give it the same files that the job began with"
            self._ban(worker, f"its data differs from the job's (SHA-256 {mine}, not {ours}); {remedy}", "corpus")
            return
        if 0 <= worker.restored < report.applied:
            return  # said before it was told to go back
        was_member, moved, worker.asked, worker.fresh = worker.trains, worker.moving, False, False
        worker.report, worker.trains, worker.healing = report, False, False
        worker.moving = report.status == "following"
        self._unheard.discard(worker.peer_id)
        if was_member and not self._mustered:
            self._ring_is_over(f"{worker.peer.name} has lost its state")
        if crew is None or (crew.in_view and not self._restoring):
            return
        if worker.moving:
            if all(self._workers[key].moving and self._workers[key].report for key in crew.members):
                self._tell_crew(crew, "following")
        elif moved and self._anchored():
            self._tell_crew(crew, "ready", nothing=True)  # it had to begin anew, so they all are asked again
        else:
            crew.due = True

    def _failed(self, worker: Worker, report: Report) -> None:
        reason = report.reason or "it did not say why"
        if self._is_member(worker.peer_id) and worker.trains:
            self._failures[worker.peer_id] = reason
        was_member = worker.trains
        worker.trains = False
        self._ban(worker, f"cannot go on: {reason}", "member-failed")
        if was_member and not self._mustered:
            self._ring_is_over(f"{worker.peer.name} cannot go on")
        if not self._workers and self.view is None:  # nobody is there who could go on, as the coordinator sees it
            nobody = self._new_id()
            self._tell(co.PeerOffered(co.Peer(nobody, worker.peer.name, "", 0)))
            self._tell(co.PeerReported(nobody, replace(report, generation=0)))
