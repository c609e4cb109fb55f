"""How crews are made of workers that are in none, and when the run goes back for want of a part of its state.

A layer of ``ring.crews``, where the rules are: the first, the fourth and the fifth.
"""

from __future__ import annotations

from collections.abc import Iterable

from ring import coordination as co
from ring.coordination import BESIDE, ENDED, Phase
from ring.crew_planning import Planning
from ring.crewing import NOTHING, Crew, State, holding, in_groups, newest_kept, report_of, shared_states

MOST_ROUNDS = 1000
"""Of settling after one event; more are a defect."""


class Making(Planning):
    """Settles what follows from what is known, one thing after the other."""

    def _settle(self) -> None:
        """Do what follows from what is known, until nothing does."""
        for _ in range(MOST_ROUNDS):
            if self.core.phase in ENDED:
                self._end()
                return
            if self._is_over():
                self._muster()
            elif not (
                self._withdraw_one() or self._tell_one() or self._give_stages() or self._make_crew() or self._go_back()
            ):
                return
        raise AssertionError(f"it does not come to rest: {self.story}")

    def _end(self) -> None:
        for worker in list(self._workers.values()):
            done = worker.report is not None and worker.report.status == "done"
            if not (self.core.phase is Phase.DONE and done):
                self._out.append(co.SendRelease(worker.peer_id, self.core.reason))
        self._workers.clear()
        self._crews.clear()
        self._failures.clear()
        self._banned.clear()
        self._unheard.clear()
        self._bench.out.clear()
        self._mustered, self._held, self._broke, self._tried, self._back = True, "", False, None, None
        self._absence = self._stop = self._build = self._short = self._back_due = self._plan_due = None
        self._unfit = ""

    def _anchored(self) -> bool:
        """Whether there is a whole state that others can be brought to."""
        if self.view is not None and not self._mustered:
            return True
        said = [crew.said for crew in self._crews.values() if crew.known and crew.said is not None and crew.members]
        if self._restoring and self.core.restore is not None:
            return (self.core.restore.step, self.core.restore.lineage) in said
        return any(
            state is not None and state[0] > 0  # of step 0 the coordinator could not tell one from the other
            for crew in self._crews.values()
            if crew.known and crew.members
            for state in [crew.said]
        )

    def _withdraw_one(self) -> bool:
        """Rule 4: nobody is there any more who could heal it. Rule 5: what all stages have saved is newer."""
        if (late := self._outdone()) is not None:
            self._dissolve(late, "there are newer checkpoints of all stages")
            return True
        if self._anchored():
            return False
        void = next((crew for crew in self._crews.values() if crew.known and crew.said == NOTHING), None)
        if void is not None:
            self._withdraw(void)
        return void is not None

    def _outdone(self) -> Crew | None:
        """A crew of a state that is older than what all stages here have saved, where nobody carries on the run's."""
        least = self._least()
        return next((crew for crew in self._loaded() if crew.said and crew.said[0] < least), None)

    def _least(self) -> int:
        """The step below which nobody need begin, for every stage has a checkpoint of it at somebody who is settled.
        0: there is none, or the run's state is carried on, or a crew has loaded that one or a later one."""
        waiting = self.core.phase is Phase.WAITING and self.core.restore is None and self._mustered
        if not waiting or self.view is None or any(crew.members for crew in self._places()):
            return 0
        settled = {
            key: worker.report
            for key, worker in self._workers.items()
            if worker.settled and worker.report and self._is_own((key,))
        }
        by_stage = self._by_stage(settled)
        wholes = [self._untried(self._wholes.get(key, frozenset())) for key in settled]
        kept = newest_kept([[self._kept(key) for key in stage] for stage in by_stage], wholes)
        if any(self._is_own(crew.members) and crew.said and crew.said[0] >= kept for crew in self._loaded()):
            return 0
        return kept if kept <= self.core.known_step else 0  # what is later is of a course that was given up

    def _loaded(self) -> list[Crew]:
        """Crews beside the view that hold a state, and said which."""
        crews = [crew for crew in self._crews.values() if crew.known and not crew.in_view]
        return [crew for crew in crews if crew.said not in (None, NOTHING)]

    def _is_own(self, members: Iterable[str]) -> bool:
        """Whether these workers' checkpoints are of this run, and not of a course that it gave up."""
        return self._branch is None or self._branch.issuperset(members)

    def _withdraw(self, crew: Crew) -> None:
        if crew.in_view:
            for member in self._here(crew):
                if self._workers[member].crew == crew.crew_id:
                    self._workers[member].crew = ""
            crew.members, crew.due = (), False
            self._place_lost(crew)
        else:
            self._dissolve(crew, "its workers share no state")

    def _tell_one(self) -> bool:
        """What a crew holds, now that all its workers have said so: first of those that hold something."""
        due = [
            crew
            for crew in self._crews.values()
            if crew.due and crew.members and all(self._is_settled(member) for member in crew.members)
        ]
        if not due:
            return False
        crew = min(due, key=lambda crew: (self._state_of(crew.members) is None, crew.crew_id))
        if self._state_of(crew.members) is None and not self._anchored():
            self._withdraw(crew)
        else:
            self._tell_crew(crew, "ready")
            if crew.said is not None and crew.said[0] == self._back and self.core.restore is None:
                self._back = None
                self._tell(co.Restore(crew.said[0], crew.crew_id, crew.said[1]))
        return True

    def _tell_crew(self, crew: Crew, status: str, *, nothing: bool = False) -> None:
        reports = [report for key in crew.members if (report := self._workers[key].report) is not None]
        state = None if nothing else self._state_of(crew.members)
        crew.said, crew.due = state or NOTHING, False
        self._tell(co.PeerReported(crew.crew_id, report_of(self.job, reports, state, status, 0, self._crew_of)))

    def _is_settled(self, peer_id: str) -> bool:
        return peer_id in self._workers and self._workers[peer_id].settled

    def _state_of(self, members: Iterable[str]) -> State | None:
        """What they share, one for each stage."""
        reports = [self._workers[key].report for key in members]
        states = shared_states([{"": report} if report else {} for report in reports])
        return states[0] if states else None

    def _give_stages(self) -> bool:
        """Rules 1, 7 and 8."""
        if not self._takes_crews():
            return False
        if not self._planned:
            return self._plan()
        counts = [0] * self.stages
        for worker in self._workers.values():
            if worker.stage is not None:
                counts[worker.stage] += 1
        spares = sorted(key for key, worker in self._workers.items() if worker.stage is None)
        idle = self._idle(counts)
        for key in idle:
            counts[self._workers[key].stage or 0] -= 1
        given = self._dealt(counts, spares, idle)
        for key, stage in given.items():
            self._give(self._workers[key], stage)
        return bool(given)

    def _idle(self, counts: list[int]) -> list[str]:
        """Workers of a stage that has too many, who hold nothing that anybody could need: they may take another."""
        over = [count - min(counts) for count in counts]
        found = []
        for key, worker in sorted(self._workers.items()):
            if worker.stage is None or worker.crew or worker.trains or worker.moving or over[worker.stage] <= 0:
                continue
            if self._is_member(key) and not (self._mustered and self._anchored()):
                continue
            fresh = worker.report is not None and worker.report.applied == 0 and not self._steps.get(key)
            if fresh or (self._anchored() and worker.report is not None):
                over[worker.stage] -= 1
                found.append(key)
        return found

    def _takes_crews(self) -> bool:
        core = self.core
        if core.phase in {*ENDED, Phase.PAUSED} or core.paused:
            return False
        return len(core.peer_ids) < core.terms.most

    def _make_crew(self) -> bool:
        """Offer the coordinator one more crew, if one can be made."""
        if not self._takes_crews():
            return False
        anchored = self._anchored()
        runs = self.view is not None and not self._mustered
        if not anchored and self._awaits_builders():
            return False
        free = {key for key, worker in self._workers.items() if worker.settled and not worker.crew}
        free = {key for key in free if not (anchored and key in self._bench.out)}
        if runs:
            free = {key for key in free if not self._is_member(key) or self._said_ready(key)}
        loose = set() if runs else {member for crew in self._void() for member in crew.members}
        reports = {key: report for key in free | loose if (report := self._workers[key].report) is not None}
        by_stage = self._by_stage(reports)
        least = self._least()
        for state in shared_states(by_stage):
            if state[0] < least:
                break  # it goes back to what is newer, see ``_go_back``
            holders = holding(reports, state)
            group = next(in_groups([holders & stage.keys() for stage in by_stage]), None)
            if group is not None:
                for crew in [crew for crew in self._void() if set(crew.members) & set(group)]:
                    self._dissolve(crew, "its workers can do better")
                self._offer(group)
                return True
        rest = next(in_groups([free & stage.keys() for stage in by_stage]), None)
        if rest is None or not anchored:
            return False
        self._offer(rest)
        return True

    def _said_ready(self, peer_id: str) -> bool:
        """Of a member of the running view: it lost what it had, so it waits for nobody's muster."""
        report = self._workers[peer_id].report
        return report is not None and report.status in BESIDE

    def _void(self) -> list[Crew]:
        return [
            crew
            for crew in self._crews.values()
            if crew.known and not crew.in_view and crew.said == NOTHING and not self._is_moving(crew)
        ]

    def _offer(self, group: tuple[str, ...]) -> None:
        """To the coordinator, in a place of the last view where its workers are members of that."""
        void = self._state_of(group) is None
        members = all(self._is_member(key) for key in group) and self._mustered and not void
        place = next((crew for crew in self._places() if not crew.members), None) if members else None
        crew = place or Crew(self._new_id(), ())
        crew.members, crew.known, crew.due = group, True, True
        self._crews[crew.crew_id] = crew
        for member in group:
            self._workers[member].crew = crew.crew_id
        own = not void and self._is_own(group)
        peer = self._peer_of(crew)
        self._tell(co.PeerOffered(peer, own))
        self._tell_measured()

    def _awaits_builders(self) -> bool:
        """Whether somebody builds who may bring what others could go on from; for so long and no longer."""
        builders = [worker for key, worker in self._workers.items() if worker.report is None and self._may_bring(key)]
        if not builders:
            self._build = None
            return False
        if self._build is None:
            self._build = self._now + self.terms.build_s
        return self._now < self._build

    def _may_bring(self, peer_id: str) -> bool:
        worker = self._workers[peer_id]
        if worker.stage is None or worker.trains:
            return False
        kept = self._steps.get(peer_id) or self._wholes.get(peer_id)
        return worker.restored >= 0 or worker.returned or self._is_member(peer_id) or bool(kept)

    def _go_back(self) -> bool:
        """Rule 5, its second half."""
        waiting = self.core.phase is Phase.WAITING and self.core.restore is None and self._mustered
        if not waiting or self._anchored() or self._awaits_builders():
            return self._stays()
        settled = {key: worker.report for key, worker in self._workers.items() if worker.settled and worker.report}
        by_stage = self._by_stage(settled)
        if not all(by_stage) or self._tried == 0:
            return self._stays()
        if self._back is not None:
            if any(worker.stage is not None and worker.report is None for worker in self._workers.values()):
                return self._stays()
            self._back = None  # not every stage has found that step
        wholes = [self._untried(self._wholes.get(key, frozenset())) for key in self._workers]
        step = newest_kept([[self._kept(key) for key in stage] for stage in by_stage], wholes)
        at_hand = [crew.said[0] for crew in self._crews.values() if crew.known and crew.said not in (None, NOTHING)]
        if at_hand and step <= max(at_hand):
            return self._stays()
        if self._could_be_more(step):
            self._short = self._short if self._short is not None else self._now
            self._back_due = self._short + self.core.patience_s(step)
            if self._now < self._back_due:
                return False
        self._say("warning", "steps-lost", f"goes back to step {step}: no part of a later state has all the others")
        self._tried = self._back = step
        self._stays()
        for crew in [crew for crew in self._crews.values() if not crew.in_view]:
            self._dissolve(crew, "the run goes back")
        for worker in self._workers.values():
            if worker.stage is not None:
                self._go_to(worker, step)
        return True

    def _stays(self) -> bool:
        self._short = self._back_due = None
        return False

    def _kept(self, peer_id: str) -> frozenset[int]:
        return self._untried(self._steps.get(peer_id, frozenset()))

    def _untried(self, steps: frozenset[int]) -> frozenset[int]:
        return steps if self._tried is None else frozenset(step for step in steps if step < (self._tried or 0))

    def _could_be_more(self, step: int) -> bool:
        """Whether somebody who is away may hold a later state than this, or the part of one that is missing."""
        if self.view is not None and not self._all_linked():
            return True
        known: list[list[frozenset[int]]] = [[] for _ in range(self.stages)]
        for key, stage in self.held.items():
            known[stage].append(self._kept(key))
        return newest_kept(known, [self._untried(steps) for steps in self._wholes.values()]) > step
