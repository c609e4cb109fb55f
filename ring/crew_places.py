"""The places of a split model's view: whose ring runs, when it is over, and who carries the run's state on.

A layer of ``ring.crews``, where the rules are: the second and the third.
"""

from __future__ import annotations

from ring import coordination as co
from ring.coordination import ENDED, RETURN_S, STANDSTILL, TORN_S
from ring.crew_dealing import Dealing
from ring.crewing import NOTHING, Crew, State, Worker, holding, in_groups, report_of, shared_states, standing_status
from ring.formation import holds
from ring.view import View
from wire.job_messages import Report


class Places(Dealing):
    """What is known of the ring that runs, and what follows when it does so no more."""

    def _all_linked(self) -> bool:
        return self.view is not None and all(member.peer_id in self._workers for member in self.view.members)

    def _places(self) -> list[Crew]:
        return [crew for crew in self._crews.values() if crew.in_view]

    def _crew_of(self, peer_id: str) -> str:
        """The place in the present view of a worker that a report names."""
        rank = self.view.rank_of(peer_id) if self.view is not None else None
        if rank is None or self.core.view is None or self.view is None:
            return ""
        return self.core.view.members[self.view.replica_of(rank)].peer_id

    def _ring_is_over(self, reason: str, *, broken: bool = True) -> None:
        """Bring whoever still trains to a standstill."""
        self._broke = self._broke or broken
        self._hold(reason)
        self._hurry()

    def _hold(self, reason: str) -> None:
        self._held = self._held or reason
        if self._stop is None:
            self._stop = self._now + self.terms.hold_s
        training = tuple(sorted(worker.peer_id for worker in self._training()))
        if training and self.view is not None:
            self._out.append(co.SendHold(training, self.view.generation, reason))

    def _hurry(self) -> None:
        if self._unheard and self._absence is not None:  # who is not back by then is not waited for any longer
            self._absence = min(self._absence, self._now + RETURN_S)
        if self._broke and self._stop is not None:
            usual = any(not worker.healing for worker in self._training())
            self._stop = min(self._stop, self._now + (self.terms.settle_s if usual else TORN_S))

    def _expire(self) -> None:
        now = self._now
        self._bench.expire(now)
        if self._absence is not None and self._absence <= now:
            self._absence = None
            self._unheard.clear()
            if self._training():
                self._ring_is_over("members stayed away", broken=False)
        if self._stop is not None and self._stop <= now:
            self._stop = now + self.terms.hold_s
            silent = self._training()
            if self._broke or not any(worker.healing for worker in silent):  # a long transfer is no reason
                for worker in silent:
                    self._strike_off(worker)
        for name in ("_build", "_back_due"):
            at = getattr(self, name)
            if at is not None and at <= now:
                setattr(self, name, now)  # whoever armed it looks

    def _strike_off(self, worker: Worker) -> None:
        """Go on without it. One whose transfer broke may be loading its state anew: it is in when it is ready."""
        worker.trains = False
        self._fallen.add(worker.peer_id)
        if worker.healing:
            worker.healing = False
            self._flapping.excused.add(worker.peer_id)
            return
        text = "it did not stop in time"
        self._say("warning", "struck-off", f"{worker.peer.name} is out of the ring: {text}", worker.peer_id)
        self._release(worker, f"out of the ring: {text}")

    def _is_over(self) -> bool:
        """Whether nobody of the view trains any more, as far as anybody can know."""
        if self.view is None or self._mustered or self._training():
            return False
        if self._unheard:
            return False  # until they had their time
        stands = any(worker.report is not None for key, worker in self._workers.items() if self._is_member(key))
        return stands or self._broke or bool(self._held) or self._absence is None

    def _muster(self) -> None:
        """Rule 3."""
        view = self.view
        assert view is not None
        self._mustered, self._absence, self._stop = True, None, None
        reports = {
            key: worker.report
            for key, worker in self._workers.items()
            if worker.report is not None and self._stands_in(view, key, worker.report)
        }
        by_stage = self._by_stage(reports)
        states = shared_states(by_stage)
        state = states[0] if states else None
        places = self._places()
        for worker in self._workers.values():
            if worker.crew in self._crews and self._crews[worker.crew].in_view:
                worker.crew = ""
        holders = holding(reports, state) if state else set()
        kept = [crew for crew in places if crew.members and self._is_manned(crew, holders)]
        taken = {member for crew in kept for member in crew.members}
        empty = [crew for crew in places if crew not in kept]
        groups = in_groups([(holders & stage.keys()) - taken for stage in by_stage])
        for crew, group in zip(list(empty), groups, strict=False):
            crew.members = group
            kept.append(crew)
            empty.remove(crew)
        for crew in empty:
            crew.members, crew.due = (), False
        with self._together():
            survivors = reports.keys()
            for crew in [crew for crew in self._crews.values() if not crew.in_view and survivors & set(crew.members)]:
                self._dissolve(crew, "its workers carry the run's state on")
            for crew in kept:
                for member in crew.members:
                    self._workers[member].crew = crew.crew_id
            if not kept:
                self._withdraw_empty_handed()
            for crew in kept:
                self._place_stands(crew, state)
            for crew in empty:
                self._place_lost(crew)

    def _is_manned(self, crew: Crew, holders: set[str]) -> bool:
        """Whether all its workers are among these, at their stages."""
        stages = ((key in holders and self._workers[key].stage == at) for at, key in enumerate(crew.members))
        return all(stages)

    def _stands_in(self, view: View, peer_id: str, report: Report) -> bool:
        """Whether it carries the state of ``view``, or what that was to begin with, as it never heard of it."""
        if report.status not in STANDSTILL or view.rank_of(peer_id) is None or self._workers[peer_id].moving:
            return False
        return report.generation == view.generation or holds(report, view.step, view.lineage)

    def _place_stands(self, crew: Crew, state: State | None) -> None:
        if crew.known and crew.said == state:
            return
        if not crew.known:
            self._introduce(crew)
        assert self.view is not None
        reports = [report for key in crew.members if (report := self._workers[key].report) is not None]
        crew.said, crew.due = state, False
        status = standing_status(reports)
        told = report_of(self.job, reports, state, status, self.view.generation, self._crew_of)
        self._tell(co.PeerReported(crew.crew_id, told))

    def _place_lost(self, crew: Crew) -> None:
        """It left, as the coordinator sees it: all that stay away were waited for."""
        crew.known, crew.said = False, None
        failed = self.view is not None and all(member.peer_id in self._failures for member in self.view.members)
        if failed and self.view is not None:
            reason = next(iter(self._failures.values()))
            report = Report(self.job, self.view.generation, "failed", 0, 0, "", reason=reason)
            self._tell(co.PeerReported(crew.crew_id, report))
        else:
            self._tell(co.PeerLeft(crew.crew_id, "its workers are gone"))

    def _introduce(self, crew: Crew) -> None:
        assert self.view is not None
        crew.known = True
        self._tell(co.PeerReturned(self._peer_of(crew), self.view.generation))

    def _withdraw_empty_handed(self) -> None:
        """Before the last that could heal them is told to be gone."""
        for crew in [crew for crew in self._crews.values() if crew.known and not crew.in_view]:
            if crew.said is None or crew.said == NOTHING or self._is_moving(crew):
                self._dissolve(crew, "there is nobody left to follow")

    def _is_moving(self, crew: Crew) -> bool:
        return any(self._workers[key].moving for key in self._here(crew))

    def _dissolve(self, crew: Crew, why: str) -> None:
        del self._crews[crew.crew_id]
        for member in self._here(crew):
            worker = self._workers[member]
            worker.crew = ""
            if worker.moving:
                self._assign(worker)  # what it has got is of interest again
        if crew.known:
            self._tell(co.PeerLost(crew.crew_id, why))

    def _leave_crew(self, worker: Worker) -> None:
        crew = self._crews.get(worker.crew)
        if crew is None:
            return
        if not crew.in_view:
            self._dissolve(crew, f"{worker.peer.name} is gone")
        elif self._mustered:
            self._muster()

    def _release(self, worker: Worker, reason: str) -> None:
        """It may come back as a newcomer: the shell offers it again."""
        self._workers.pop(worker.peer_id, None)
        self._out.append(co.SendRelease(worker.peer_id, reason))
        self._leave_crew(worker)

    def _crew_released(self, crew_id: str, reason: str) -> None:
        """All of it where the job is over or its ring went on without it; of one that was struck off, the silent."""
        crew = self._crews.pop(crew_id, None)
        for member in self._here(crew) if crew is not None else ():
            worker = self._workers[member]
            worker.crew = ""
            here = self.view is not None and worker.report is not None and not worker.trains
            stands = here and worker.report is not None and self._stands_in(self.view, member, worker.report)  # type: ignore[arg-type]
            if self.core.phase in ENDED or not stands:
                self._release(worker, reason)
