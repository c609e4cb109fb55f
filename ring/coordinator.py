"""The coordinator: who trains together, from which step. One per job, run by the seed, never on the path of a step.

Rules
    1. A view is minted only when no member of the view before it may still be training: each one stands still (it said
       so for that generation), is lost, or was struck off after a deadline.
    2. The run's state belongs to the *heirs*: members of the last view that stand still in it. A newcomer heals; what
       it brings from its own disk counts only where no heir is left.
    3. A view starts at the highest step that an heir applied. Who can redo it from its redo buffer is healthy, too.
    4. A lost link to the seed is not a death, be it that of all: the ring's neighbours see a death at once and report
       ``broken``. Only for a member that stays away while the ring runs on, the ring is held, and goes on without it.
       Before the first commit of a view there may be no ring yet that could notice: there it counts as a death. A
       member that comes as a new worker has no ring any more, and so its whole view has none.
    5. Where no heir is left, nothing is given up that may still come: less than the newest known step is started from
       only when nobody has more, or after patience: as long as it took to compute what would be lost, within
       ``grace_s`` and ``build_s``. What peers hold of a course given up counts no more (``Course``).
    6. What a person asked for (pause, restore) is carried out when all stand still; cancel, at once.
    7. A newcomer fetches the state beside the running ring, which is held when the newcomer follows, or has had its
       time (``Admission``). A view of heirs is made without those that do not follow yet: nobody waits for them. What
       such a peer said of its state counts for nothing, for it changes; it is never called healthy.
    8. *Two sides.* The newest generation that the seed minted wins, however far another side has come. A side that is
       cut off from the seed goes on, with unchanged membership only, and re-forms never: when it breaks it stands
       still. It is taken back as it is as long as no newer generation was minted; after that its members are released
       and come in as newcomers. While all members of a ring are cut off and fresh workers ask, rule 5 decides: the
       fresh ones start from less than is known only after patience, and from then on the old side has lost.
    9. A member that dies again and again is kept out for a while (``Bench``). Whoever sits out, for that or for what
       it did to links or sums, is in only where there is nobody else.
    10. A step that the members refused is computed again under closer looks, then by others (``StepJudge``).

Theory of operation: ``_running`` is the set of members whose standstill is not known. Every event changes what is
known; then ``_advance`` looks whether the phase may change. Time enters only as ``now``; deadlines are named and armed,
and expire with whatever event comes after them (``Tick`` says nothing but the time).

    phase     what ends it                                             next        says
    WAITING   the state is at hand (first view: enough workers)        RUNNING     Mint
    WAITING   a member is back from a view that may still run          RUNNING
    WAITING   pause                                                    PAUSED
    RUNNING   a newcomer stands ready (rule 7)                         RUNNING     SendCatchUp
    RUNNING   newcomer, pause, restore, leave, a member stays away     STOPPING    SendHold
    RUNNING   a member reports held, broken, done, failed or ready     STOPPING    SendHold
    RUNNING   nobody is left, or came back in time                     WAITING
    STOPPING  all stand still                                          WAITING     (then Mint, if the state is at hand)
    STOPPING  all stand still, a pause was asked for                   PAUSED
    STOPPING  a neighbour of a member that is silent calls it lost     STOPPING    Doubt (then PeerLost follows soon)
    STOPPING  all stand still, all done / all failed                   DONE, FAILED
    STOPPING  all stand still, a step that nobody can compute          FAILED
    PAUSED    resume, restore, or a member that still trains           STOPPING    SendHold
    any live  cancel                                                   CANCELLED   SendRelease
    WAITING   every worker there is failed, there never was a view,    FAILED
              and none is on its way back to a seed that was away
    ended     restore                                                  WAITING     SendAssign, as peers are offered
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ring import coordination as co
from ring.coordination import BESIDE, ENDED, LEAVE_S, STANDSTILL, TORN_S, Phase
from ring.decisions import Decisions
from ring.formation import Reports, holds
from ring.roster import Known
from wire.job_messages import Report


class Coordinator(Decisions):
    """One job's core; see the head of this file. ``handle`` is the only method that changes anything."""

    def __init__(self, job: str, terms: co.Terms, *, past: co.Past | None = None, now: float = 0.0) -> None:
        super().__init__(job, terms, past or co.Past())
        if self.phase is Phase.WAITING and self.view is not None:  # its ring may well be running: take it back as it is
            self.phase = Phase.RUNNING
            self._who.running = {member.peer_id for member in self.view.members}
            self._who.unheard = set(self._who.running)
            self._deadlines.arm("absence", now + terms.grace_s)
        elif self.phase is Phase.WAITING and past is not None and past.reread:
            self._deadlines.arm("return", now + terms.grace_s)
        self._told = (past.state, past.reason) if past is not None else (self.state, self.reason)

    # ---------------------------------------------------------------------------------------------------- the interface

    @property
    def state(self) -> str:
        """``JobInfo.state``: as the phase, but ``forming`` while a view is being made or taken back."""
        unheard = bool(self._who.unheard) or not self._who.running
        forming = self.phase is Phase.STOPPING or (self.phase is Phase.RUNNING and unheard)
        return "forming" if forming else self.phase.value

    @property
    def known_step(self) -> int:
        """The newest step that somebody is known to have applied."""
        return self._course.known_step

    @property
    def peer_ids(self) -> frozenset[str]:
        """The peers that this job has now: members, spares, and those that build."""
        return frozenset(self._who.peers)

    def wants(self, peer_id: str) -> bool:
        """Whether the free worker should be offered to this job."""
        if self.phase in {*ENDED, Phase.PAUSED} or self.paused or peer_id in self._banned:
            return False
        return len(self._who.peers) < self.terms.most or (self.restore is not None and self.restore.peer_id == peer_id)

    @property
    def short(self) -> bool:
        """Whether it waits for workers."""
        enough = 1 if self.view else self.terms.workers
        return self.phase is Phase.WAITING and len(self._who.peers) < enough

    def patience_s(self, step: int) -> float:
        """How long to wait for whoever holds more than ``step``."""
        return self._course.patience_s(step, self.terms.grace_s, self.terms.build_s)

    def paused_heirs(self) -> Reports | None:
        """Those that carry a paused job's state in memory; None where it is not paused, or has nobody to let go."""
        quiet = self.phase is Phase.PAUSED and bool(self._who.peers) and not self._who.running
        return self._who.heirs(self.view) if quiet else None

    def next_deadline(self) -> float | None:
        """When to ``handle(Tick())`` at the latest."""
        return min([*self._deadlines.next(), *self._bench.next(), *self._admission.next()], default=None)

    def handle(self, event: co.Event, now: float) -> list[co.Instruction]:
        """Take in one event; returns what to do, in order. ``now`` is monotonic seconds and never goes back."""
        self._out = []
        self._history.append((now, self.phase, event))
        for part in event.events if isinstance(event, co.Together) else (event,):
            if handler := _HANDLERS.get(type(part)):
                handler(self, part, now)
        self._expire(now)
        self._advance(now)
        if self._told != (self.state, self.reason):
            self._told = (self.state, self.reason)
            self._out.append(co.SetState(*self._told))
        return self._out

    def validate(self) -> None:
        """Assert what must hold between events."""
        story, who, phase = self.story, self._who, self.phase
        who.validate(self.view, story)
        assert not self._banned & set(who.peers), story
        assert self._admission.moving <= set(who.peers), story
        assert not self._admission.moving & who.running, story
        assert phase is not Phase.RUNNING or who.running | who.away, story
        assert phase is not Phase.RUNNING or not who.unheard | who.away or "absence" in self._deadlines, story
        assert phase is not Phase.STOPPING or who.running or "leave" in self._deadlines, story
        assert (phase is Phase.STOPPING) == ("stop" in self._deadlines), story
        assert phase is not Phase.WAITING or not who.running, story
        assert phase is not Phase.PAUSED or self.paused, story
        assert phase not in ENDED or not who.peers, story
        assert phase not in ENDED or self.next_deadline() is None, story

    # ----------------------------------------------------------------------------------------------------------- events

    def _offered(self, event: co.PeerOffered, now: float) -> None:
        peer_id = event.peer.peer_id
        if not self.wants(peer_id):
            self._out.append(co.SendRelease(peer_id, f"the job is {self.state} and takes no worker now"))
            return
        self._who.peers[peer_id] = Known(event.peer)
        if event.own is not None:
            self._course.owns(peer_id, event.own)
        self._assign(peer_id)
        self._no_longer_trains(peer_id, now)  # rule 4

    def _returned(self, event: co.PeerReturned, now: float) -> None:
        """Its own report follows and says how it stands; only a restore that it missed must be told."""
        peer_id = event.peer.peer_id
        if self.phase in ENDED:
            self._out.append(co.SendRelease(peer_id, f"the job is {self.state}"))
            return
        self._who.peers[peer_id] = Known(event.peer, returned=True)
        if self.phase is Phase.WAITING and self.restore:
            self._assign(peer_id)
        elif self._is_current(peer_id, event.generation):
            self._who.away.discard(peer_id)
            self._who.running.add(peer_id)
            self._who.unheard.add(peer_id)
            if self.phase is Phase.WAITING:
                self._go(Phase.RUNNING, "a member is back")
            if self.phase is Phase.RUNNING:
                self._deadlines.start("absence", now + self.terms.grace_s)

    def _reported(self, event: co.PeerReported, now: float) -> None:
        known, report = self._who.peers.get(event.peer_id), event.report
        if known is None:
            return
        current = self._is_current(event.peer_id, report.generation)
        if report.status in BESIDE:
            self._beside(known, report, now)
        elif report.status == "failed":
            self._failed(known, report, now)
        elif self.restore and self.phase is Phase.WAITING:
            return  # it was told to load a checkpoint: what it was before that is of no interest
        elif current:
            self._of_the_view(known, report, now)
        elif report.status in STANDSTILL and self._never_heard(event.peer_id, report):
            known.standing = report
            self._no_longer_trains(event.peer_id, now)
        elif event.peer_id in self._who.running:
            return  # said before the view it is in now was announced
        elif self.phase in (Phase.RUNNING, Phase.STOPPING) and report.status in {*STANDSTILL, "training"}:
            self._give_up(event.peer_id)  # rule 8
        elif report.status in STANDSTILL:
            known.standing = report  # of a ring that is over, as is the one after it
        elif report.status == "training":
            self._give_up(event.peer_id)

    def _never_heard(self, peer_id: str, report: Report) -> bool:
        """Whether a member of the view, that says where it stood before, was lost before it was told of it, or the seed
        was. Then the view has never begun: no step is committed without all of its members."""
        view = self.view
        if view is None or view.rank_of(peer_id) is None:
            return False
        if peer_id in self._who.running:
            return peer_id in self._who.unheard
        return holds(report, view.step, view.lineage)

    def _give_up(self, peer_id: str) -> None:
        """It may come back as a newcomer: the shell offers it again."""
        self._forget(peer_id)
        self._out.append(co.SendRelease(peer_id, "the ring went on without it"))

    def _of_the_view(self, known: Known, report: Report, now: float) -> None:
        peer_id = known.peer.peer_id
        self._who.unheard.discard(peer_id)
        self._course.known_step = max(self.known_step, report.applied)
        if report.status == "training":
            self._trains(known, now)
        elif report.status == "healed":
            self._who.healing.discard(peer_id)
        elif report.status in STANDSTILL:
            known.standing = report
            if report.status == "broken":
                self._links.reported(peer_id, report.suspect)
                self._doubt(report.suspect, peer_id)
            self._no_longer_trains(peer_id, now, report.status)
            if report.suspect in self._who.unheard and report.suspect not in self._who.peers:
                # Neither its neighbour nor this seed has a link to it.
                self._forget(report.suspect)
                self._links.fallen.add(report.suspect)

    def _doubt(self, suspect: str, reporter: str) -> None:
        """A frozen member closes nothing: whoever stands beside it in the ring notices, and the seed need not wait as
        long for its beats as it would else."""
        view = self.view
        if view is None or suspect not in self._who.running or suspect not in self._who.peers:
            return
        rank = view.rank_of(suspect)
        if rank is not None and reporter in (view.left_of(rank).peer_id, view.right_of(rank).peer_id):
            self._out.append(co.Doubt(suspect, self._links.witnessed(suspect, reporter)))

    def _trains(self, known: Known, now: float) -> None:
        """After a reconnect: its ring still runs, whatever this seed thought."""
        known.standing = None
        self._admission.forget(known.peer.peer_id)  # it followed, until it heard of the view that it is in
        self._who.away.discard(known.peer.peer_id)
        self._who.running.add(known.peer.peer_id)
        if self.phase is Phase.WAITING:
            self._go(Phase.RUNNING, "its ring is running")
        elif self.phase is Phase.STOPPING:
            self._hold([known.peer.peer_id], self.reason)
        elif self.phase is Phase.PAUSED:
            self._stop(now, "the job is paused")
        if self.phase is Phase.RUNNING and not self._who.unheard | self._who.away:
            self._deadlines.drop("absence")
            self.reason = ""

    def _beside(self, known: Known, report: Report, now: float) -> None:
        """Ready, or following the ring. A member that is ready again has lost its ring."""
        peer_id = known.peer.peer_id
        if report.status == "following" and peer_id not in self._admission.moving:
            if not known.returned or peer_id in self._who.running - self._who.unheard:
                return  # it was let in, or called back, meanwhile
            self._admission.took_up(peer_id, now)
        if report.corpus and not self.corpus:
            self.corpus = report.corpus
            self._out.append(co.SetCorpus(report.corpus))
        if report.corpus == self.corpus:
            known.standing = report
            self._admission.said(peer_id, report.status, now)
        else:
            mine, ours = report.corpus[:12] or "none", self.corpus[:12]
            remedy = "give it the same files that the job began with"
            self._ban(known, f"its data differs from the job's (SHA-256 {mine}, not {ours}); {remedy}", "corpus")
        self._no_longer_trains(peer_id, now)

    def _failed(self, known: Known, report: Report, now: float) -> None:
        peer_id = known.peer.peer_id
        reason = report.reason or "it did not say why"
        if self._is_current(peer_id, report.generation):
            self._failures[peer_id] = reason
        self._ban(known, f"cannot go on: {reason}", "member-failed")
        self._no_longer_trains(peer_id, now)
        if not self._who.peers and self.view is None and "return" not in self._deadlines:
            self._end(Phase.FAILED, reason)
        elif not self._who.peers and self.phase is Phase.WAITING:
            self.reason = f"waiting for another worker: {known.peer.name} cannot go on: {reason}"
            self._last_failure = reason

    def _no_longer_trains(self, peer_id: str, now: float, status: str = "broken") -> None:
        """If it was in the running view, the others cannot go on either."""
        if peer_id not in self._who.running | self._who.away:
            return
        for group in (self._who.running, self._who.unheard, self._who.away, self._who.healing):
            group.discard(peer_id)
        if self.phase is Phase.RUNNING:
            self._stop(now, "the ring stopped")
            if status == "held":
                self._deadlines.arm("leave", now + LEAVE_S)
        if status == "broken":  # so all others report soon; held and done wait for the slowest member's disk
            self._links.broken = True
            self._hurry(now)

    def _hurry(self, now: float) -> None:
        if self._links.broken and self.phase is Phase.STOPPING:
            self._deadlines.drop("leave")
            patience_s = self.terms.settle_s if self._who.running - self._who.healing else TORN_S
            self._deadlines.hasten("stop", now + patience_s)

    def _lost(self, event: co.PeerLost | co.PeerLeft, now: float) -> None:
        peer_id = event.peer_id
        self._banned.discard(peer_id)
        known = self._who.peers.get(peer_id)
        was_running = peer_id in self._who.running
        self._forget(peer_id)
        if known is None or self.view is None or self.view.rank_of(peer_id) is None:
            return
        self._links.fallen.add(peer_id)
        if isinstance(event, co.PeerLeft):
            self._links.excused.add(peer_id)
        self._deadlines.drop("leave")
        if was_running and self.phase is Phase.RUNNING:
            if isinstance(event, co.PeerLeft):
                self._stop(now, f"{known.peer.name} left")
            elif not self._committed:  # nothing runs on yet: members that form a ring would dial it in vain
                self._stop(now, f"{known.peer.name} is lost")
            else:  # rule 4
                self._who.away.add(peer_id)
                self._deadlines.start("absence", now + self.terms.grace_s)
                if not self._who.running:
                    self.reason = "no member is connected: its ring may well be running"
        self._hurry(now)

    def _progress(self, event: co.Progress, now: float) -> None:
        if self.view and event.step <= self.view.step:
            return  # told again, or late: that says nothing of how fast this ring is
        self._course.progressed(event.step, event.step_s)
        if self.view:
            self._committed = True
            self._who.healing.clear()  # a step is committed by all members or by none
            self._links.committed()
            self._steps.committed(event.step)

    def _measured_anew(self, event: co.Measured, now: float) -> None:
        self._measured = event

    def _saved(self, event: co.Saved, now: float) -> None:
        self._course.saved = event.newest

    def _pause(self, event: co.Pause, now: float) -> None:
        """The members save with the step that they stop at, so that they may be let go (``_yield``)."""
        if self.phase in ENDED:
            return
        self.paused = True
        self._save(co.Save(), now)
        if self.phase is Phase.RUNNING:
            self._stop(now, "the job is to pause")
        elif self.phase is Phase.WAITING:
            self._go(Phase.PAUSED, "paused by a person")

    def _resume(self, event: co.Resume, now: float) -> None:
        self.paused = False
        if self.phase is Phase.PAUSED:
            self._stop(now, "the job goes on")

    def _yield(self, event: co.Yield, now: float) -> None:
        if self.paused_heirs() is not None:
            for peer_id in sorted(self._who.peers):
                self._out.append(co.SendRelease(peer_id, "the job is paused, and another needs its workers"))
                self._forget(peer_id)

    def _cancel(self, event: co.Cancel, now: float) -> None:
        if self.phase not in ENDED:
            self._end(Phase.CANCELLED, "cancelled by a person")

    def _save(self, event: co.Save, now: float) -> None:
        members = tuple(sorted(self._who.running - self._who.unheard))
        if members and self.phase in (Phase.RUNNING, Phase.STOPPING):
            self._out.append(co.SendSave(members))

    def _restore(self, event: co.Restore, now: float) -> None:
        self.restore, self.paused = event, False
        if self.phase in (Phase.RUNNING, Phase.PAUSED):
            self._stop(now, f"going back to step {event.step}")
        elif self.phase is not Phase.STOPPING:
            self._begin_restore(now)


_HANDLERS: dict[type[co.Event], Callable[[Coordinator, Any, float], None]] = {
    co.PeerOffered: Coordinator._offered,
    co.PeerReturned: Coordinator._returned,
    co.PeerReported: Coordinator._reported,
    co.PeerLost: Coordinator._lost,
    co.PeerLeft: Coordinator._lost,
    co.Progress: Coordinator._progress,
    co.Saved: Coordinator._saved,
    co.Measured: Coordinator._measured_anew,
    co.Yield: Coordinator._yield,
    co.Pause: Coordinator._pause,
    co.Resume: Coordinator._resume,
    co.Cancel: Coordinator._cancel,
    co.Save: Coordinator._save,
    co.Restore: Coordinator._restore,
}
