"""Between the coordinator and the workers of a split model: each hears of the other in its own words.

The lowest layer of ``ring.crews``, where the rules are; it holds what all layers know.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from ring import coordination as co
from ring.coordination import ENDED, Phase
from ring.coordinator import Coordinator
from ring.crewing import Crew, Worker, as_peer, between_crews, contracted, newest_kept, told_stage
from ring.formation import holds
from ring.suspects import Bench, LinkJudge
from ring.training_costs import Trainee, Training
from ring.view import View
from wire.job_messages import MemberRecord, Report

MAX_HOLDERS = 8
"""Of a checkpoint, who are told to a worker that lacks it."""


class Dealing:
    """One job's knowledge, and its coordinator. See ``ring.crews.Crews`` for what it is made with."""

    def __init__(
        self,
        job: str,
        terms: co.Terms,
        stages: int,
        *,
        past: co.Past | None = None,
        held: Mapping[str, int] | None = None,
        saved: co.Saved | None = None,
        training: Training | None = None,
        now: float = 0.0,
    ) -> None:
        past = past or co.Past()
        self.job, self.terms, self.stages, self.held = job, terms, stages, dict(held or {})
        self.view = replace(past.view, stages=stages) if past.view is not None else None
        self.training = training
        self._planned = training is None or past.view is not None or bool(held)
        self._plan_due: float | None = None
        self._tell_due: float | None = None
        self._survey_due: float | None = None
        self._surveyed: frozenset[str] = frozenset()  # between whom the ways were measured, or asked for
        self._asked_for: frozenset[Trainee] = frozenset()  # for whom there is no plan
        self._unfit = ""  # why
        self._too_small: set[tuple[str, int]] = set()  # (worker, stage) of which people were told
        self._workers: dict[str, Worker] = {}
        self._crews: dict[str, Crew] = {}
        self._made = 0
        self._branch = None if past.branch is None else set(past.branch)
        self._steps = dict(saved.steps) if saved is not None else {}
        self._wholes = dict(saved.wholes) if saved is not None else {}
        self._measured = co.Measured({})
        self._corpus = past.corpus
        self._banned: set[str] = set()
        self._failures: dict[str, str] = {}  # of workers of the present view
        self._fallen: set[str] = set()
        self._witnesses: dict[str, set[str]] = {}
        self._bench = Bench()
        self._flapping = LinkJudge(self._bench, terms.cooldown_s)
        self._broke = False
        self._held = ""  # why the ring was asked to stop, if it was
        self._committed = True
        self._tried: int | None = None  # the step that it went back to since the last view, without finding one
        self._back: int | None = None  # the step that it is going back to
        self._absence: float | None = None
        self._stop: float | None = None
        self._build: float | None = None
        self._short: float | None = None
        self._back_due: float | None = None
        self._now = now
        self._out: list[co.Instruction] = []
        self._batch: list[co.Event] | None = None
        self._history: deque[str] = deque(maxlen=60)
        self._unheard: set[str] = set()
        self._mustered = True
        places = self._places_of(self.view) if self.view is not None else []
        branch = past.branch
        if branch is not None:
            branch = frozenset(crew.crew_id for crew in places if set(crew.members) <= branch)
        seen = contracted(self.view, [crew.crew_id for crew in places]) if self.view is not None else None
        self.core = Coordinator(job, terms, past=replace(past, view=seen, saved={}, branch=branch), now=now)
        if self.view is not None:
            self.held = {member.peer_id: rank % stages for rank, member in enumerate(self.view.members)} | self.held
        if self.view is not None and self.core.phase not in ENDED:
            self._crews = {crew.crew_id: crew for crew in places}
            self._unheard = {member.peer_id for member in self.view.members}
            self._mustered, self._absence = False, now + terms.grace_s

    @property
    def story(self) -> str:
        """The last events, for whoever looks for a defect."""
        return "; ".join(self._history)

    def _hold(self, reason: str) -> None:
        """Bring whoever trains to a standstill."""
        raise NotImplementedError

    def _crew_released(self, crew_id: str, reason: str) -> None:
        """The coordinator lets a crew go."""
        raise NotImplementedError

    def _stays(self) -> bool:
        """There is no reason to go back. Always False."""
        raise NotImplementedError

    # ---------------------------------------------------------------------------------- to the coordinator, and from it

    def _tell(self, event: co.Event) -> None:
        if self._batch is not None:
            self._batch.append(event)
            return
        for instruction in self.core.handle(event, self._now):
            self._translate(instruction)

    @contextmanager
    def _together(self) -> Iterator[None]:
        """What is told inside, the coordinator hears at once."""
        batch: list[co.Event] = []
        self._batch = batch
        yield
        self._batch = None
        self._tell(co.Together(tuple(batch)))

    def _translate(self, instruction: co.Instruction) -> None:
        match instruction:
            case co.SendAssign(crew_id, _, restore_step):
                self._asked(crew_id, restore_step)
            case co.SendHold(_, _, reason):
                self._hold(reason)
            case co.SendCatchUp(crew_id, generation, donors):
                self._catch_up(crew_id, generation, [donor.peer_id for donor in donors])
            case co.Doubt():
                pass  # of a crew; workers are doubted one by one
            case co.SendSave():
                self._out.append(co.SendSave(tuple(sorted(worker.peer_id for worker in self._training()))))
            case co.SendRelease(crew_id, reason):
                self._crew_released(crew_id, reason)
            case co.Mint():
                self._minted(instruction)
            case co.Emit(level, kind, text, _):
                self._say(level, kind, text)
            case _:
                self._out.append(instruction)

    def _asked(self, crew_id: str, restore_step: int) -> None:
        crew = self._crews.get(crew_id)
        if crew is not None:
            crew.due, crew.said = True, None
            for member in self._here(crew):
                if self._workers[member].moving:
                    self._assign(self._workers[member])  # called back: there is no ring left to follow
        if restore_step >= 0:
            for worker in self._workers.values():
                if worker.stage is not None:
                    self._go_to(worker, restore_step)

    def _go_to(self, worker: Worker, step: int | None = None) -> None:
        """Have it load the checkpoint of a step, unless it just did."""
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
            return  # two answers to one question: the second could be taken for news
        worker.asked = True
        holders = self._holders(worker, restore_step)
        self._out.append(co.SendAssign(worker.peer_id, self._corpus, restore_step, worker.stage, self.stages, holders))

    def _keeps_later(self, peer_id: str, step: int) -> bool:
        kept = self._steps.get(peer_id, frozenset()) | self._wholes.get(peer_id, frozenset())
        return any(each > step for each in kept)

    def _holders(self, worker: Worker, step: int) -> tuple[co.Peer, ...]:
        """Who else is here and has the whole model's checkpoint of ``step``; each stage is to ask another one first."""
        found = [key for key in sorted(self._workers) if key != worker.peer_id and step in self._wholes.get(key, ())]
        turn = (worker.stage or 0) % len(found) if found else 0
        return tuple(self._workers[key].peer for key in [*found[turn:], *found[:turn]][:MAX_HOLDERS])

    def _catch_up(self, crew_id: str, generation: int, donors: list[str]) -> None:
        crew, view = self._crews.get(crew_id), self.view
        if crew is None or view is None:
            return
        ranks = [replica for replica, place in enumerate(self.core.view.members if self.core.view else ())
                 if place.peer_id in donors]  # fmt: skip
        crew.said, crew.due = None, False
        for stage, member in enumerate(crew.members):
            worker = self._workers[member]
            worker.moving, worker.report = True, None
            alike = view.same_stage(stage)
            given = tuple(alike[replica] for replica in ranks)
            self._out.append(co.SendCatchUp(member, generation, given))

    def _minted(self, mint: co.Mint) -> None:
        """The view of crews as one of workers."""
        small = mint.view
        before = self.view
        members: list[MemberRecord] = []
        for place in small.members:
            first, count = place.first, place.count
            for member in self._crews[place.peer_id].members:
                peer, report = self._workers[member].peer, self._workers[member].report
                moving = self._workers[member].moving
                healthy = report is not None and not moving and holds(report, small.step, small.lineage)
                members.append(MemberRecord(member, peer.name, peer.host, peer.port, first, count, healthy))
                first, count = first + count, 0
        self.view = replace(small, members=tuple(members), stages=self.stages)
        self._cool_down(before)
        for crew in list(self._crews.values()):
            crew.in_view = small.rank_of(crew.crew_id) is not None
            if not crew.in_view and not crew.known:
                del self._crews[crew.crew_id]
            elif crew.in_view:
                crew.known, crew.said, crew.due = True, None, False
        for record in members:
            worker = self._workers[record.peer_id]
            worker.trains, worker.report, worker.moving, worker.returned = True, None, False, False
            worker.healing, worker.restored = not record.healthy, -1
        self._mustered, self._committed, self._broke, self._held = False, False, False, ""
        self._absence = self._stop = self._build = None
        self._stays()
        self._tried = self._back = None
        self._unheard.clear()
        self._failures.clear()
        self._fallen.clear()
        self._witnesses.clear()
        self._flapping.view_began()
        if mint.branch is not None:
            kept = set() if mint.restored or self._branch is None else self._branch
            names = {crew.crew_id: crew.members for crew in self._crews.values()}
            self._branch = kept | {member for crew_id in mint.branch for member in names.get(crew_id, ())}
        branch = None if self._branch is None else frozenset(self._branch)
        self._out.append(co.Mint(self.view, mint.restored, branch))

    def _cool_down(self, before: View | None) -> None:
        """Members of the view before that died, unless they are in again."""
        assert self.view is not None
        for peer_id in sorted(self._fallen - self._flapping.excused):
            if self.view.rank_of(peer_id) is not None or before is None:
                continue
            if seconds := self._flapping.flaps(peer_id, self._now):
                rank = before.rank_of(peer_id)
                name = before.members[rank].name if rank is not None else peer_id
                text = f"{name} dies again and again: it is not let in for {seconds:.0f} s"
                self._say("warning", "flapping", text, peer_id)

    def _progress(self, event: co.Progress) -> None:
        if self.view is not None and event.step > self.view.step and not self._mustered:
            self._committed = True
            for worker in self._workers.values():
                worker.healing = False  # a step is committed by all members or by none
        self._tell(event)

    def _saved(self, steps: Mapping[str, frozenset[int]], wholes: Mapping[str, frozenset[int]]) -> None:
        self._steps, self._wholes = dict(steps), dict(wholes)
        known: list[list[frozenset[int]]] = [[] for _ in range(self.stages)]
        for key, stage in self.held.items():
            known[stage].append(steps.get(key, frozenset()))
        newest = newest_kept(known, wholes.values())
        self._tell(co.Saved({"": newest} if newest else {}))

    def _tell_measured(self) -> None:
        crews = {crew.crew_id: crew.members for crew in self._crews.values() if crew.known}
        if self._measured.links:
            links = between_crews(self._measured.links, crews)
            self._tell(co.Measured(links, self._measured.compute_s))

    # ---------------------------------------------------------------------------------------------------- small helpers

    @property
    def _restoring(self) -> bool:
        return self.core.restore is not None and self.core.phase is Phase.WAITING

    def _is_member(self, peer_id: str) -> bool:
        return self.view is not None and self.view.rank_of(peer_id) is not None

    def _here(self, crew: Crew) -> list[str]:
        return [member for member in crew.members if member in self._workers]

    def _training(self) -> list[Worker]:
        return [worker for worker in self._workers.values() if worker.trains]

    def _by_stage(self, reports: Mapping[str, Report]) -> list[dict[str, Report]]:
        found: list[dict[str, Report]] = [{} for _ in range(self.stages)]
        for key, report in reports.items():
            stage = self._workers[key].stage
            if stage is not None:
                found[stage][key] = report
        return found

    def _peer_of(self, crew: Crew) -> co.Peer:
        here = [self._workers[member] for member in self._here(crew)]
        if not here:
            return co.Peer(crew.crew_id, crew.crew_id, "", 1)
        return as_peer(crew.crew_id, here)

    def _places_of(self, view: View) -> list[Crew]:
        return [
            Crew(f"{view.generation}-{rank // self.stages}", tuple(m.peer_id for m in view.crew(rank)), in_view=True)
            for rank in range(0, view.size, self.stages)
        ]

    def _new_id(self) -> str:
        self._made += 1
        return f"crew-{self._made}"

    def _say(self, level: str, kind: str, text: str, peer_id: str = "") -> None:
        self._out.append(co.Emit(level, kind, text, peer_id))
