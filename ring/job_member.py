"""A member of a job, whatever the way to train: it loads a state, enters views and leaves them. Pure.

Rules
-----
1. The member has one *activity* at a time. The event that ends it repeats its ticket, so the late end of an abandoned
   activity changes nothing. A view that is older than the newest one changes nothing, nor does a break of another view.
2. A change of the state cannot be interrupted. A view or a break that arrives during it is handled after it.
3. A state is *torn* while it is being replaced, and when it was found to differ from the other members' states. A torn
   state is never reported, trained on or given to others. It is healed again, or loaded again from the disk.
4. Leaving a view fulfils the requests to hold and to leave. A save or a snapshot is still wanted in the next view.

``COMMON`` is the table of transitions outside of a step. ``ring.transaction`` adds those of steps that all members
apply together, and ``ring.versions`` those of a server's versions. A row says what an event leads to in a phase: the
name of a method without its underscore, which ``handle`` calls, and for each phase that it may lead to an instruction
that follows. Without a row, an event has no effect.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

from p2ptrain.core.texts import shortened
from ring import member_events as ev
from ring.coordination import InvalidTransition
from ring.token import Flag
from ring.view import View
from wire.job_messages import Report

_NO_FLAG = Flag(0)
REASON_CHARS = 500
"""Limit for a report's reason. The text may come from a neighbour, and the report must fit into a control frame."""


class MemberPhase(StrEnum):
    EMPTY = "building"  # no usable state: it is being built or loaded
    IDLE = "waiting"  # no ring runs; ``view`` may still be the last one
    FORMING = "forming"
    HEALING = "healing"
    COMPUTING = "computing"
    REDUCING = "reducing"
    VOTING = "voting"
    APPLYING = "applying"
    CONFIRMING = "confirming"
    BOUNDARY = "boundary"
    REDOING = "redoing"
    HELD = "held"
    DONE = "done"
    FAILED = "failed"


# -------------------------------------------------------------------------------------------------------- transitions

_P = MemberPhase
RUNNING = frozenset(_P) - {_P.EMPTY, _P.IDLE, _P.HELD, _P.DONE, _P.FAILED}
CHANGING = frozenset({_P.REDOING, _P.APPLYING})  # rule 2

LeadsTo = Mapping[MemberPhase, type | tuple[type, ...]]
Row = tuple[str, LeadsTo]
Table = dict[tuple[MemberPhase, type], Row]


def rows(phases: Iterable[MemberPhase], event: type, method: str, leads_to: LeadsTo) -> Table:
    """The same row in several phases."""
    return {(phase, event): (method, leads_to) for phase in phases}


ENTERS: LeadsTo = {_P.FORMING: ev.FormRing, _P.REDOING: ev.Apply, _P.IDLE: ev.CloseRing, _P.EMPTY: ev.Reload}
LEAVES: LeadsTo = {_P.IDLE: ev.SendReport, _P.EMPTY: ev.Reload}  # rule 3: a torn state is loaded again
STOPS: LeadsTo = {_P.HELD: ev.SendReport, _P.DONE: ev.SendReport}
_STAYS: LeadsTo = {}

COMMON: Table = {
    **rows(_P, ev.StateLoaded, "load", {_P.IDLE: ev.SendReport, _P.FORMING: ev.FormRing}),
    **rows(_P, ev.StateDiscarded, "discard", {_P.EMPTY: ev.Reload}),
    **rows({_P.IDLE}, ev.StateTorn, "tear", _STAYS),
    **rows({_P.IDLE}, ev.StateFollowed, "follow", _STAYS),
    **rows(_P, ev.MemberFailed, "fail", {_P.FAILED: ev.SendReport}),
    **rows(frozenset(_P) - {_P.FAILED}, ev.ViewArrived, "change_view", ENTERS),
    **rows(CHANGING | {_P.EMPTY}, ev.ViewArrived, "postpone_view", _STAYS),  # rule 2
    **rows(RUNNING, ev.ViewBroken, "break_off", LEAVES),
    **rows(CHANGING, ev.ViewBroken, "postpone_break", _STAYS),  # rule 2
    **rows({_P.BOUNDARY}, ev.ViewBroken, "break_unless_stopping", LEAVES),
    **rows(RUNNING, ev.FlagRequested, "request", _STAYS),
    **rows({_P.FORMING}, ev.FlagRequested, "request_before_ring", LEAVES),
    **rows({_P.HELD, _P.DONE}, ev.FlagRequested, "report_again", _STAYS),
}


@dataclass(slots=True)
class RingRequests:
    """What this member asks of its ring.

    Attributes:
        waiting: not granted yet. sent: those that its last token carried.
        granted: what the ring follows after the last applied step.
    """

    waiting: Flag = _NO_FLAG
    sent: Flag = _NO_FLAG
    granted: Flag = _NO_FLAG

    @property
    def asks_to_stop(self) -> bool:
        return bool(self.waiting & (Flag.HOLD | Flag.LEAVE))

    def end_view(self) -> None:
        """Rule 4."""
        self.waiting &= Flag.SAVE | Flag.SNAPSHOT
        self.granted = _NO_FLAG


class JobMember(ABC):
    """Args: ``checkpoint_every``: steps between checkpoints; 0: none. The last step always has one."""

    TABLE: ClassVar[Table] = COMMON

    def __init__(self, *, job: str, peer_id: str, steps_total: int, checkpoint_every: int = 0) -> None:
        self.job = job
        self.peer_id = peer_id
        self.steps_total = steps_total
        self.phase = MemberPhase.EMPTY
        self.applied = 0
        self.lineage = ""
        self.square_sum = 0.0
        self.view: View | None = None
        self.torn = False  # rule 3
        self.reloaded = False  # loaded again since the view began: this member no longer holds the view's state
        self.history: deque[str] = deque(maxlen=40)
        self._checkpoint_every = checkpoint_every
        self._settings = {"job.steps": steps_total, "checkpoint.every": checkpoint_every}  # at the job's beginning
        self._ticket = 0
        self._requests = RingRequests()
        self._postponed_view: View | None = None  # what arrived while the state was being changed (rule 2) or missing
        self._postponed_break: ev.ViewBroken | None = None

    # ------------------------------------------------------------------------------------------------ the one mutator

    def handle(self, event: Any) -> list[Any]:
        """Take one event and return the instructions that follow. Raises ``ProtocolError`` for malformed tokens."""
        self.history.append(f"{self.phase} ← {event}"[:200])
        if self._is_late(event):
            return []
        method, leads_to = self.TABLE.get((self.phase, type(event)), ("", _STAYS))
        if not method:
            if hasattr(event, "ticket"):
                raise self._invalid("an activity ended that this phase does not have")
            return []
        before = self.phase
        instructions: list[Any] = getattr(self, f"_{method}")(event)
        if self.phase is not before and self.phase not in leads_to:
            raise self._invalid(f"{before} may not lead here by {method}")
        return instructions

    def _is_late(self, event: Any) -> bool:
        """Rule 1."""
        generation = self.view.generation if self.view else 0
        match event:
            case ev.ViewArrived(view):
                newest = self._postponed_view or self.view
                return newest is not None and view.generation <= newest.generation
            case ev.ViewBroken():
                return self.view is None or event.generation != generation
            case ev.FlagRequested():
                return event.generation not in (0, generation)
        return bool(getattr(event, "ticket", self._ticket) != self._ticket)

    # ------------------------------------------------------------------------------------------------ what others read

    def report(self, status: str, *, suspect: str = "", reason: str = "", cause: str = "", beside: str = "") -> Report:
        generation = self.view.generation if self.view and status not in ("ready", "following") else 0
        return Report(
            job=self.job,
            generation=generation,
            status=status,
            applied=self.applied,
            prepared=self.applied + bool(self.prepared_lineage),
            lineage=self.lineage,
            prepared_lineage=self.prepared_lineage,
            square_sum=self.square_sum,
            suspect=suspect,
            reason=shortened(reason, REASON_CHARS),
            cause=cause,
            beside=beside,
        )

    @property
    def prepared_lineage(self) -> str:
        """Lineage after step ``applied + 1`` if this member can redo that step; else empty."""
        return ""

    @property
    def running(self) -> bool:
        return self.phase in RUNNING

    @property
    def may_give(self) -> bool:
        """Whether others may fetch this state: it is the view's start, until the view ends or commits a step."""
        view = self.view
        if view is None or self.torn or not (self.running or self.phase in (MemberPhase.HELD, MemberPhase.DONE)):
            return False
        return (self.applied, self.lineage) == (view.step, view.lineage)

    @property
    def stopping(self) -> bool:
        """Whether the ring stops after the last applied step. All know it, so a faster member may be gone."""
        return bool(self._requests.granted & (Flag.HOLD | Flag.LEAVE)) or self._is_last

    # ----------------------------------------------------------------------------------------- what a way to train adds

    @abstractmethod
    def begin_view(self, view: View) -> list[Any]:
        """Enter a view in which this member has a rank."""

    @abstractmethod
    def begin_step(self) -> list[Any]:
        """Begin the next step, or what comes after the last one."""

    @abstractmethod
    def forget(self) -> None:
        """Forget what belongs to the state in memory: it was replaced."""

    # ---------------------------------------------------------------------------------------------------- its state

    def _load(self, event: ev.StateLoaded) -> list[Any]:
        instructions = self._leave("the state was replaced") if self.running else []
        view, _ = self._take_postponed()
        self._replace(event)
        self.torn, self.reloaded, self.phase = False, True, MemberPhase.IDLE
        return [*instructions, ev.SendReport(self.report("ready")), *(self._enter(view) if view else [])]

    def _discard(self, event: ev.StateDiscarded) -> list[Any]:
        if self.running:
            self._leave(event.reason)
        self._take_postponed()
        self.forget()
        self.torn, self.phase = True, MemberPhase.EMPTY
        return [ev.CloseRing(event.reason), ev.Reload()]

    def _tear(self, event: ev.StateTorn) -> list[Any]:
        self.forget()
        self.torn = True
        return []

    def _follow(self, event: ev.StateFollowed) -> list[Any]:
        self._replace(event)
        self.torn = False
        return []

    def _replace(self, state: ev.StateLoaded | ev.StateFollowed) -> None:
        self.applied, self.lineage, self.square_sum = state.applied, state.lineage, state.square_sum
        self.forget()

    def _fail(self, event: ev.MemberFailed) -> list[Any]:
        instructions: list[Any] = [ev.CloseRing(event.reason)] if self.running else []
        self._take_postponed()
        self._ticket += 1
        report = self.report("failed", reason=event.reason)
        self.phase = MemberPhase.FAILED
        return [*instructions, ev.SendReport(report)]

    # ---------------------------------------------------------------------------------------------------------- views

    def _change_view(self, event: ev.ViewArrived) -> list[Any]:
        return (self._leave("a new view was announced") if self.running else []) + self._enter(event.view)

    def _postpone_view(self, event: ev.ViewArrived) -> list[Any]:
        self._postponed_view = event.view
        return []

    def _enter(self, view: View) -> list[Any]:
        if view.rank_of(self.peer_id) is None:
            self.view = None
            self.phase = MemberPhase.EMPTY if self.torn else MemberPhase.IDLE
            return [ev.Reload()] if self.torn else []
        old = [ev.CloseRing("a new view was announced")] if self.phase in (MemberPhase.HELD, MemberPhase.DONE) else []
        self.view, self.reloaded = view, False
        settings = self._settings | {change.key: json.loads(change.value) for change in view.changes}
        self.steps_total, self._checkpoint_every = settings["job.steps"], settings["checkpoint.every"]
        return old + self.begin_view(view)

    def _postpone_break(self, event: ev.ViewBroken) -> list[Any]:
        self._postponed_break = self._postponed_break or event
        return []

    def _take_postponed(self) -> tuple[View | None, ev.ViewBroken | None]:
        postponed = self._postponed_view, self._postponed_break
        self._postponed_view = self._postponed_break = None
        return postponed

    def _follow_postponed(self, *, stops: bool = False) -> list[Any]:
        """After a change of the state: enter the view that arrived meanwhile, or break off. Empty if neither came.
        ``stops``: the ring stops here, so a break does not matter."""
        view, broken = self._take_postponed()
        if view is not None:
            return self._leave("a new view was announced") + self._enter(view)
        return self._break_off(broken) if broken is not None and not stops else []

    def _break_off(self, event: ev.ViewBroken) -> list[Any]:
        cause = {"suspect": event.suspect, "reason": event.reason, "cause": event.cause, "beside": event.beside}
        return self._end_view(event.reason, "broken", **cause)

    def _end_view(self, why: str, status: str, **cause: str) -> list[Any]:
        instructions = self._leave(why)
        if self.torn:
            self.phase = MemberPhase.EMPTY
            return [*instructions, ev.Reload()]
        return [*instructions, ev.SendReport(self.report(status, **cause))]

    def _leave(self, reason: str) -> list[Any]:
        if self.phase in (MemberPhase.APPLYING, MemberPhase.CONFIRMING):
            self._requests.waiting |= self._requests.granted  # the boundary that would have granted them does not come
        self._requests.end_view()
        self._ticket += 1
        self.phase = MemberPhase.IDLE
        return [ev.CloseRing(reason)]

    def _stop(self, phase: MemberPhase) -> list[Any]:
        """Stop with the ring, which stays connected."""
        self.phase = phase
        self._requests.end_view()  # those that came too late are granted after the next step
        self._ticket += 1
        return [ev.SendReport(self.report(str(phase)))]

    def _go_on(self, _: ev.ActivityFinished) -> list[Any]:
        if self._is_last:
            return self._stop(MemberPhase.DONE)
        return self._stop(MemberPhase.HELD) if self.stopping else self.begin_step()

    def _break_unless_stopping(self, event: ev.ViewBroken) -> list[Any]:
        return [] if self.stopping else self._break_off(event)

    # ------------------------------------------------------------------------------------------------------- requests

    def _request(self, event: ev.FlagRequested) -> list[Any]:
        self._requests.waiting |= event.flag
        return []

    def _request_before_ring(self, event: ev.FlagRequested) -> list[Any]:
        if event.flag == Flag.HOLD:
            return self._end_view("the view ended before its ring was formed", "held")
        return self._request(event)

    def _report_again(self, event: ev.FlagRequested) -> list[Any]:
        return [ev.SendReport(self.report(str(self.phase)))] if event.flag == Flag.HOLD else []

    # -------------------------------------------------------------------------------------------------------- helpers

    @property
    def _is_last(self) -> bool:
        return self.applied >= self.steps_total or Flag.STOP in self._requests.granted

    @property
    def _is_checkpoint_due(self) -> bool:
        on_calendar = self._checkpoint_every > 0 and self.applied % self._checkpoint_every == 0
        return on_calendar or Flag.SAVE in self._requests.granted or self._is_last

    def _begin(self, phase: MemberPhase, activity: type, *facts: Any, **more: Any) -> list[Any]:
        """Enter ``phase`` with an activity, which gets the next ticket."""
        self.phase = phase
        self._ticket += 1
        return [activity(self._ticket, *facts, **more)]

    def _begin_boundary(self, *, save: bool) -> list[Any]:
        snapshot = Flag.SNAPSHOT in self._requests.granted
        return self._begin(MemberPhase.BOUNDARY, ev.Boundary, self.applied, save, self._is_last, snapshot)

    @property
    def _current(self) -> View:
        if self.view is None:
            raise self._invalid("no view")
        return self.view

    def _invalid(self, problem: str) -> InvalidTransition:
        return InvalidTransition(f"{self.phase}: {problem}\n" + "\n".join(self.history))
