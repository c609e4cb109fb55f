"""What follows from what the coordinator knows: when its phase changes, who is let in, and how a view is made up.

The lower half of ``ring.coordinator``, where the rules are; the upper half takes events and says what each changes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from ring import coordination as co
from ring.admission import DONORS, Admission
from ring.coordination import ENDED, RETURN_S, TRANSITIONS, InvalidTransition, Phase
from ring.course import Course, carried
from ring.deadlines import Deadlines
from ring.formation import Reports, described, holds, newest, ordered, records, square_sum
from ring.order import Load, known_link, plan_ring
from ring.roster import Known, Roster
from ring.spoilt import StepJudge
from ring.suspects import Bench, LinkJudge
from ring.view import View
from wire.job_messages import MemberRecord, Report


class Decisions:
    """One job's knowledge, and what is decided by it. ``now`` is passed in; nothing here takes an event."""

    def __init__(self, job: str, terms: co.Terms, past: co.Past) -> None:
        self.job, self.terms, self.view, self.corpus = job, terms, past.view, past.corpus
        self.paused = past.paused  # what a person wants; the phase follows
        self.restore: co.Restore | None = None
        self.reason = past.reason
        self.phase = Phase(past.state) if past.state in ENDED else Phase.PAUSED if past.paused else Phase.WAITING
        self._who = Roster()
        self._banned: set[str] = set()  # failed, or have other data: not taken until they connect anew
        self._failures: dict[str, str] = {}  # in the last view
        self._last_failure = ""  # of a worker that nobody took the place of
        self._course = Course(past.known_step, past.saved, past.branch, past.step_s)
        self._deadlines = Deadlines()
        self._committed = True  # a step, in the present view; one from before this seed has had its time
        self._short_since: float | None = None  # when it began to wait for a state that is not at hand
        self._bench = Bench()
        self._links = LinkJudge(self._bench, terms.cooldown_s)
        self._steps = StepJudge(self._bench, self._links)
        self._admission = Admission()
        self._measured = co.Measured({})
        self._carriage = ""  # what was last said of streams and codec
        self._history: deque[tuple[float, Phase, co.Event]] = deque(maxlen=40)
        self._out: list[co.Instruction] = []

    @property
    def story(self) -> str:
        """The last events, for whoever looks for a defect."""
        return "; ".join(f"{now:.3f} {phase} {event}"[:300] for now, phase, event in self._history)

    # ----------------------------------------------------------------------------------------------------------- phases

    def _expire(self, now: float) -> None:
        self._bench.expire(now)
        self._admission.expire(now)
        due = self._deadlines.expire(now)
        if "absence" in due and self.phase in (Phase.RUNNING, Phase.STOPPING):
            self._strike_off(self._who.unheard | self._who.away, "it stayed away")
            if self._who.running and self.phase is Phase.RUNNING:
                self._stop(now, "members stayed away")
        if "return" in due and self._last_failure and not self._who.peers:
            self._end(Phase.FAILED, self._last_failure)
        if "stop" in due:
            self._deadlines.arm("stop", now + self.terms.hold_s)  # until the phase ends, which clears it
            if self._links.broken or not self._who.running & self._who.healing:  # a long transfer is no reason
                self._strike_off(set(self._who.running), "it did not stop in time")

    def _advance(self, now: float) -> None:
        if self.phase is Phase.RUNNING and not self._who.running | self._who.away:
            self._go(Phase.WAITING, "every member is gone")
        if self.phase is Phase.RUNNING and self._who.undisturbed() and (names := self._let_in(now)):
            self._stop(now, f"{', '.join(names)} joining")
        if self.phase is Phase.STOPPING and not self._who.running and "leave" not in self._deadlines:
            self._stood_still(now)
        if self.phase is Phase.WAITING:
            self._try_mint(now)

    def _stood_still(self, now: float) -> None:
        heirs = self._who.heirs(self.view)
        if self.restore and self.paused:
            self._go(Phase.PAUSED, "paused by a person")  # it goes back when it goes on
        elif self.restore:
            self._begin_restore(now)
        elif heirs and all(report.status == "done" for report in heirs.values()):
            self._end(Phase.DONE, "every step is done")
        elif self.view and all(member.peer_id in self._failures for member in self.view.members):
            self._end(Phase.FAILED, next(iter(self._failures.values())))
        elif self.paused:
            self._go(Phase.PAUSED, "paused by a person")
        elif not self._is_hopeless(heirs, now):
            self._go(Phase.WAITING, "every member stands still")

    def _is_hopeless(self, heirs: Reports, now: float) -> bool:
        """Why the ring broke, and whether it would for ever: then the job has failed."""
        if verdict := self._steps.judge(heirs, self._who.name, now, spare=bool(self._spares(heirs))):
            if verdict.hopeless:
                self._end(Phase.FAILED, verdict.text)
                return True
            self._say("warning", "step-refused", verdict.text)
        elif text := self._links.judge(heirs, self.view.step if self.view else 0, self._who.name, now):
            self._say("warning", "link", text)
        return False

    def _try_mint(self, now: float) -> None:
        """Rules 2, 3 and 5."""
        if self.restore and not self._restored(self.restore, now):
            return
        if self.view is None:
            self._recall()  # of a ring that this seed never heard of
            ready = self._candidates()
            if ready:
                self.reason = f"{len(ready)} of {self.terms.workers} workers are ready"
            if len(ready) >= self.terms.workers:
                self._mint(ready, now)
            return
        heirs = self._who.heirs(self.view)
        if not carried(heirs, self.view):
            self._recall()
        ready = {key: report for key, report in self._candidates().items() if key not in self._admission.moving}
        if not ready:
            self._short_since = None
            self._deadlines.drop("grace", "build")
            return
        spares = self._spares(heirs) if self._steps.company else []
        if spares and all(known.standing is None for known in spares):
            self._deadlines.start("build", now + self.terms.build_s)
            if "build" not in self._deadlines.passed:
                self.reason = "waiting for another worker that computes the step, too"
                return
        passed, in_memory = self._deadlines.passed, not self._who.all_back(self.view)
        patient = "grace" not in passed or ("build" not in passed and self._who.building())
        chosen, self.reason = self._course.sources(ready, heirs, self.view, in_memory=in_memory, patient=patient)
        if chosen:
            self._mint(chosen, now)
            return
        if self._short_since is None:
            self._short_since = now
        if "grace" not in passed:
            best = max((report.applied for report in ready.values()), default=0)
            patience_s = self._course.patience_s(best, self.terms.grace_s, self.terms.build_s)
            self._deadlines.arm("grace", self._short_since + patience_s)
        self._deadlines.start("build", now + self.terms.build_s)

    def _restored(self, restore: co.Restore, now: float) -> bool:
        """Mint from the checkpoint that a person chose when all had time to load it; whether to look for another. Who
        verified it may be on its way back, as others are that are here already."""
        overdue, holders = "restore" in self._deadlines.passed, self._holders(restore)
        if not overdue and (self._who.building() or not (holders or restore.peer_id in self._who.peers)):
            return False
        if holders:
            self._mint(holders, now)
            return False
        self._say("error", "restore-failed", f"nobody could load the checkpoint of step {restore.step}")
        self.restore = None
        self._deadlines.passed |= {"grace", "build"}  # what was newer has been set aside: there is nothing to wait for
        return True

    def _mint(self, chosen_from: Reports, now: float) -> None:
        """The next view, from the newest state among these, with all that stand still as far as there is work."""
        step, lineage = newest(chosen_from)
        self._cool_down(now)
        ready, heirs, moving = self._candidates(), self._who.heirs(self.view), self._admission.moving
        holders = {key for key, it in self._who.standing().items() if key not in moving and holds(it, step, lineage)}
        if not holders & ready.keys():
            ready = self._who.standing()  # they sit out: better a bad link than a lost step
        healthy = holders & ready.keys()
        if self.view and carried(heirs, self.view) and not self._steps.company:  # rule 7
            at_once = healthy | heirs.keys()
            ready = {key: it for key, it in ready.items() if key in at_once or not self._comes_after(key)}
        peers = {peer_id: self._who.peers[peer_id].peer for peer_id in ready}
        chosen = ordered(peers, ready, healthy, heirs, self.terms.micro_batches, self._links.apart)
        load = Load(max(report.reduce_bytes for report in ready.values()), self._measured.compute_s)
        wishes, apart = self.terms.wishes, self._links.apart
        plan = plan_ring(chosen, self._measured.links, wishes, load, apart=apart, name=self._who.name)
        units_us = [ready[peer_id].unit_us for peer_id in plan.order]
        members = records([peers[peer_id] for peer_id in plan.order], self.terms.micro_batches, healthy, units_us)
        kind, text = self._course.given_up(step, chosen_from, heirs, self.view) if self.view else ("", "")
        if kind and not self.restore:
            self._say("warning", kind, text)
        went_back = bool(kind) or self.restore is not None
        self._course.begin(step, {peer_id: ready[peer_id] for peer_id in chosen}, went_back=went_back)
        before = self.view
        generation = max(before.generation if before else 0, self.terms.minted_below) + 1
        self.view = View(
            self.job,
            generation,
            step,
            lineage,
            members,
            square_sum(chosen_from, step, lineage),
            streams=plan.streams,
            sub_chunk_bytes=plan.sub_chunk_bytes,
            codec=plan.codec,
            care=self._steps.care,
            reduce_bytes=load.total_bytes,
        )
        self._out.append(co.Mint(self.view, went_back, self._course.branch))
        self._say("info", "view", described(self.view, before))
        if plan.slowest is not None:
            self._say("info", "ring-order", plan.reason)
            if plan.carriage_reason != self._carriage:
                self._say("info", "ring-carriage", plan.carriage_reason)
            self._carriage = plan.carriage_reason
        for peer_id in chosen:
            self._who.peers[peer_id].standing = None
            self._admission.forget(peer_id)
        self._who.running, self._who.healing = set(chosen), set(chosen) - healthy
        self._links.view_began()
        self._steps.view_began()
        self.restore, self._committed = None, False
        self._short_since = None
        self._failures.clear()
        self._last_failure = ""
        self._go(Phase.RUNNING, "")

    def _cool_down(self, now: float) -> None:
        """Rule 9: members of the view before that died, unless their ring is what they came back with."""
        for peer_id in sorted(self._links.fallen - self._links.excused - self._who.heirs(self.view).keys()):
            if seconds := self._links.flaps(peer_id, now):
                text = f"{self._who.name(peer_id)} dies again and again: it is not let in for {seconds:.0f} s"
                self._say("warning", "flapping", text, peer_id)

    def _is_current(self, peer_id: str, generation: int) -> bool:
        return self.view is not None and self.view.generation == generation and self.view.rank_of(peer_id) is not None

    def _candidates(self) -> Reports:
        """Who may be put into a view now. The benched are in only where there is nobody else."""
        standing = self._who.standing()
        return {peer_id: standing[peer_id] for peer_id in standing if peer_id not in self._bench.out} or standing

    def _spares(self, heirs: Reports) -> list[Known]:
        """Who may come into a view beside these, now or when it is ready."""
        if len(heirs) >= self.terms.micro_batches:
            return []
        absent = self._who.peers.keys() - heirs.keys() - self._bench.out
        return [self._who.peers[peer_id] for peer_id in sorted(absent)]

    def _holders(self, restore: co.Restore) -> Reports:
        """Who has loaded the checkpoint that is to be restored."""
        wanted = (restore.step, restore.lineage)
        return {key: report for key, report in self._candidates().items() if (report.applied, report.lineage) == wanted}

    # -------------------------------------------------------------------------------------------------------- newcomers

    def _let_in(self, now: float) -> list[str]:
        """Rule 7. Names of those to let in now, into a view that has room; others are asked to catch up."""
        view, admission = self.view, self._admission
        room = self.terms.micro_batches - view.size if view else 0
        standing = {key: it for key, it in self._who.standing().items() if key not in self._bench.out}
        if view is None or room <= 0 or not standing:
            return []
        after = [peer_id for peer_id in standing if self._catches_up(peer_id, standing[peer_id], view)]
        for peer_id in admission.to_ask(after, view.size, room):
            admission.asked(peer_id, now, standing[peer_id].reduce_bytes, self.terms.grace_s)
            self._out.append(co.SendCatchUp(peer_id, view.generation, self._donors(peer_id, view)))
        at_hand = standing.keys() - set(after)
        for peer_id in at_hand:
            admission.let_in(peer_id, now)
        coming = {*at_hand, *admission.may_come(after)}
        return sorted(self._who.name(peer_id) for peer_id in coming)

    def _catches_up(self, peer_id: str, report: Report, view: View) -> bool:
        """Whether it has to, and can: before its first commit, the ring stands where the view began."""
        at_hand = not self._committed and peer_id not in self._admission.moving
        return self._who.peers[peer_id].peer.follows and not (at_hand and holds(report, view.step, view.lineage))

    def _comes_after(self, peer_id: str) -> bool:
        """Whether the next view is better made without it, for it would stand still until this one is healed."""
        return self._who.peers[peer_id].peer.follows and not self._admission.through(peer_id)

    def _donors(self, peer_id: str, view: View) -> tuple[MemberRecord, ...]:
        """Members that give the newcomer the state: those with the fastest way to it, then the last in rank order, for
        the first ones have checkpoints to write."""

        def cost(rank: int) -> tuple[float, int]:
            link = known_link(self._measured.links, view.members[rank].peer_id, peer_id)
            return -((link and link.bandwidth_bps) or 0.0), -rank

        return tuple(view.members[rank] for rank in sorted(range(view.size), key=cost)[:DONORS])

    def _recall(self) -> None:
        """There is no ring left to follow: who followed it says what it has got."""
        for peer_id in sorted(self._admission.moving & self._who.peers.keys()):
            self._who.peers[peer_id].standing = None
            self._assign(peer_id)
        self._admission.clear()

    # ---------------------------------------------------------------------------------------------------- small helpers

    def _go(self, phase: Phase, reason: str, *, keep: str = "") -> None:
        if phase not in TRANSITIONS[self.phase]:
            raise InvalidTransition(f"{self.phase} → {phase}: {self.story}")
        self.phase, self.reason = phase, reason
        self._deadlines.clear(keep=keep)  # each belongs to a phase
        if phase is not Phase.RUNNING:
            self._who.away.clear()

    def _stop(self, now: float, reason: str) -> None:
        """Bring the ring to a standstill. Whoever trains is told; where its ring broke it says so instead."""
        # Who is unheard and not back by then is not waited for any longer.
        self._go(Phase.STOPPING, reason, keep="absence" if self._who.unheard else "")
        if "absence" in self._deadlines:
            self._deadlines.hasten("absence", now + RETURN_S)
        self._deadlines.arm("stop", now + self.terms.hold_s)
        self._hold(sorted(self._who.running - self._who.unheard), reason)

    def _say(self, level: str, kind: str, text: str, peer_id: str = "") -> None:
        self._out.append(co.Emit(level, kind, text, peer_id))

    def _hold(self, peer_ids: Iterable[str], reason: str) -> None:
        chosen = tuple(peer_ids)
        if chosen and self.view:
            self._out.append(co.SendHold(chosen, self.view.generation, reason))

    def _assign(self, peer_id: str) -> None:
        self._who.peers[peer_id].returned = False
        self._out.append(co.SendAssign(peer_id, self.corpus, self.restore.step if self.restore else -1))

    def _begin_restore(self, now: float) -> None:
        assert self.restore is not None
        if self.phase is not Phase.WAITING:
            self._go(Phase.WAITING, f"going back to step {self.restore.step}")
        self._deadlines.clear()
        self._deadlines.arm("restore", now + self.terms.build_s)
        self._banned.clear()
        self._admission.clear()
        for peer_id, known in self._who.peers.items():
            known.standing = None
            self._assign(peer_id)

    def _ban(self, known: Known, text: str, kind: str) -> None:
        """Let it go, and do not take it again until it connects anew."""
        peer_id = known.peer.peer_id
        del self._who.peers[peer_id]
        self._banned.add(peer_id)
        self._who.healing.discard(peer_id)
        self._admission.forget(peer_id)
        self._say("error", kind, f"{known.peer.name}: {text}", peer_id)
        self._out.append(co.SendRelease(peer_id, text))

    def _strike_off(self, peer_ids: set[str], why: str) -> None:
        """Go on without them. One whose transfer broke may be loading its state anew: it is in when it is ready."""
        for peer_id in sorted(peer_ids):
            known, loading = self._who.peers.get(peer_id), peer_id in self._who.healing
            self._forget(peer_id)
            self._links.fallen.add(peer_id)
            if known and loading:
                self._links.excused.add(peer_id)
                self._who.peers[peer_id] = Known(known.peer)
                continue
            if known:
                self._out.append(co.SendRelease(peer_id, f"out of the ring: {why}"))
            name = known.peer.name if known else peer_id
            self._say("warning", "struck-off", f"{name} is out of the ring: {why}", peer_id)

    def _forget(self, peer_id: str) -> None:
        self._who.forget(peer_id)
        self._links.forget(peer_id)
        self._admission.forget(peer_id)

    def _end(self, phase: Phase, reason: str) -> None:
        """The job is over. When it is done its members keep what they hold until another job needs them."""
        keep = self._who.heirs(self.view) if phase is Phase.DONE else {}
        self._out += [co.SendRelease(peer_id, reason) for peer_id in sorted(self._who.peers) if peer_id not in keep]
        self._say("error" if phase is Phase.FAILED else "info", f"job-{phase}", reason)
        self._go(phase, reason)
        self._who.clear()
        self._bench.out.clear()
        self._admission.clear()
        self._failures.clear()
        self._banned.clear()
        self.restore, self.paused = None, False
