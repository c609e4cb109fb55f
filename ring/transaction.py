"""The step transaction: all members of a view apply a step exactly once, or none of them applies it.

Rules
-----
1. In the view that reduced it, a member applies a step only after it has seen one token from *every* member. All
   tokens must name the same generation, step, lineage and digest of the reduced bytes, and their figures must be
   plausible (``ring.token.verdict``). Otherwise it applies a step only in a redo (rule 3), or fetches it from a member
   that applied it.
2. From the moment a member sends its token until it knows the outcome, it keeps the reduced bytes (the redo buffer)
   and does not compute: the step is *prepared*.
3. After a break, the next view's (step, lineage) decides. A member whose prepared step is exactly that one redoes it
   from its buffer. A member that applied it continues. Every other member fetches the state from a healthy member. A
   prepared step that the view does not name is discarded.
4. Requests to the whole ring travel as flags in the tokens (hold: stop after this step; save: write a checkpoint;
   leave: stop, because a member leaves; snapshot: copy the state for workers that fetch it; stop: this step is the
   job's last, which all members must say). All see the same tokens, so all stop, or save, after the same step.
5. An optimizer step cannot be interrupted. A break that arrives during it is handled after it.
6. A step is *confirmed* when every member has sent the digest of its state after the step. A member that sent this
   digest has applied the step, and no break can take it back. Only a confirmed step becomes a checkpoint.
7. The shares of a step follow from the tokens of the step before it (``ring.token.Shares``), which all members see,
   or from the view and the step's number (``ring.token.ShareRule``). Those of a view's first step are in the view.
   Every applied step is recorded with the view and the shares in which it was computed, even if a later view redoes it.
8. A state is *torn* while it is being replaced, and when it was found to differ from the other members' states. A
   torn state is never reported, trained on or given to others. It is healed again, or loaded again from the disk.
9. In an *asynchronous* view (``ring.staleness``) rank 0, the server, alone votes and confirms: its steps are versions.
   The others pull them: a member that took over the state of a version has applied it. They stop when they are asked
   to, or the server stops, after what they have under way. A server that waits for contributions stops at once.

Theory of operation
-------------------
The core has one *activity* at a time: redo, form the session, heal, compute, reduce, vote, apply, confirm, boundary
work; at a worker of an asynchronous view, exchange and adopt. ``handle`` takes one event and returns instructions for
the shell. The event that ends an activity repeats the activity's ticket, so the late result of an abandoned activity
changes nothing. Rule 3 relies on rule 1: if any member applied step s, every member had sent its token for s, and so
every member holds the reduced bytes of s.

The core does not depend on the strategy. The strategy defines "compute" and "reduce", and returns a digest and squared
norms. ``NEXT`` below is the table of transitions.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from p2ptrain.core.texts import shortened
from ring.coordination import InvalidTransition
from ring.token import (
    Flag,
    NormGuard,
    ShareRule,
    Shares,
    Token,
    TokenFault,
    granted,
    is_same,
    next_lineage,
    odd_ones_out,
    square_sum,
    verdict,
)
from ring.view import View
from wire.job_messages import LedgerRow, Report

_LASTING = Flag.SAVE | Flag.SNAPSHOT  # requests that leaving a view does not fulfil
REASON_CHARS = 500
"""Limit for a report's reason. The text may come from a neighbour, and the report must fit into a control frame."""


class Phase(StrEnum):
    EMPTY = "building"  # no usable state: it is being built or loaded
    IDLE = "waiting"  # no ring runs; ``view`` may still be the last one
    REDOING = "redoing"
    FORMING = "forming"
    HEALING = "healing"
    COMPUTING = "computing"
    REDUCING = "reducing"
    VOTING = "voting"
    APPLYING = "applying"
    CONFIRMING = "confirming"
    BOUNDARY = "boundary"
    HELD = "held"
    DONE = "done"
    FAILED = "failed"


# The allowed transitions. Any phase of a running view may break (to IDLE), and any phase at all may fail (to FAILED).
NEXT: dict[Phase, frozenset[Phase]] = {
    Phase.EMPTY: frozenset({Phase.IDLE}),
    Phase.IDLE: frozenset({Phase.REDOING, Phase.FORMING, Phase.EMPTY}),
    Phase.REDOING: frozenset({Phase.FORMING, Phase.IDLE}),
    Phase.FORMING: frozenset({Phase.HEALING, Phase.COMPUTING, Phase.CONFIRMING, Phase.IDLE}),
    Phase.HEALING: frozenset({Phase.COMPUTING, Phase.CONFIRMING, Phase.IDLE}),
    Phase.COMPUTING: frozenset({Phase.REDUCING, Phase.IDLE}),
    Phase.REDUCING: frozenset({Phase.VOTING, Phase.IDLE}),
    Phase.VOTING: frozenset({Phase.APPLYING, Phase.IDLE}),
    Phase.APPLYING: frozenset({Phase.CONFIRMING, Phase.BOUNDARY, Phase.IDLE}),
    Phase.CONFIRMING: frozenset({Phase.BOUNDARY, Phase.IDLE}),
    Phase.BOUNDARY: frozenset({Phase.COMPUTING, Phase.HELD, Phase.DONE, Phase.IDLE}),
    Phase.HELD: frozenset({Phase.REDOING, Phase.FORMING, Phase.IDLE}),
    Phase.DONE: frozenset({Phase.REDOING, Phase.FORMING, Phase.IDLE}),
    Phase.FAILED: frozenset({Phase.IDLE}),
}

# Further ones of an asynchronous view: of a worker, and of a server that stops without a further version.
_STOPS = {Phase.HELD, Phase.DONE}
NEXT_ASYNCHRONOUS: dict[Phase, frozenset[Phase]] = {
    Phase.FORMING: frozenset(_STOPS),
    Phase.HEALING: frozenset({Phase.BOUNDARY}),
    Phase.COMPUTING: frozenset({Phase.APPLYING, Phase.CONFIRMING, Phase.BOUNDARY} | _STOPS),
    Phase.APPLYING: frozenset({Phase.COMPUTING} | _STOPS),
    Phase.BOUNDARY: frozenset({Phase.CONFIRMING}),
}

RUNNING = frozenset(Phase) - {Phase.EMPTY, Phase.IDLE, Phase.HELD, Phase.DONE, Phase.FAILED}
UNINTERRUPTIBLE = frozenset({Phase.REDOING, Phase.APPLYING})


# ------------------------------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Loaded:
    """The engine holds a state: the initial one or a checkpoint's."""

    applied: int
    lineage: str
    square_sum: float = 0.0


@dataclass(frozen=True, slots=True)
class Unloaded:
    """The state in memory is discarded: the job goes back to a checkpoint, or replacing it beside a ring failed or was
    called off. ``Reload`` answers, and ``Loaded`` follows."""

    reason: str


@dataclass(frozen=True, slots=True)
class Torn:
    """In IDLE, while no ring runs: the worker begins to replace its state. ``Followed`` or ``Unloaded`` follows."""


@dataclass(frozen=True, slots=True)
class Followed:
    """In IDLE, while no ring runs here: the state in memory became the state of a step of a running ring."""

    applied: int
    lineage: str
    square_sum: float


@dataclass(frozen=True, slots=True)
class ViewArrived:
    view: View


@dataclass(frozen=True, slots=True)
class Finished:
    ticket: int


@dataclass(frozen=True, slots=True)
class Reduced:
    """The reduce with ``ticket`` succeeded. The other fields are those of this member's token (``ring.token.Token``):
    ``part`` of the sum's squared norm; ``own``: squared norm of its contribution; ``unit_us`` per micro-batch.
    ``counts``, ``made_of``: of the row of an asynchronous step. ``stop``: the step is the job's last."""

    ticket: int
    digest: bytes
    part: float
    own: float = 0.0
    unit_us: int = 0
    sent: int = 0
    received: int = 0
    counts: bytes = b""
    made_of: bytes = b""
    stop: bool = False


@dataclass(frozen=True, slots=True)
class Exchanged:
    """A worker of an asynchronous view has exchanged with its server, and may adopt the state of that version.

    Attributes:
        over: the server stops here. last: the job has no further version.
    """

    ticket: int
    applied: int
    lineage: str
    square_sum: float
    over: bool = False
    last: bool = False


@dataclass(frozen=True, slots=True)
class Gathered:
    """All members' tokens (of a vote) or state digests (of a confirmation), in rank order."""

    ticket: int
    parts: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Broken:
    """The ring of ``generation`` lost a neighbour, or a collective failed. The fields are those of ``Report``.
    ``beside``: the member at the other end of the suspect's link, which noticed the loss or received other bytes."""

    generation: int
    suspect: str
    reason: str
    cause: str = ""
    beside: str = ""


@dataclass(frozen=True, slots=True)
class Failed:
    """This member cannot continue: out of memory, a loss that is not finite, a full disk."""

    reason: str


@dataclass(frozen=True, slots=True)
class FlagRequested:
    """Ask the ring for something at the next step boundary. ``generation`` 0: in whichever view runs."""

    flag: Flag
    generation: int = 0


Event: TypeAlias = (
    "Loaded | Unloaded | Torn | Followed | ViewArrived | Finished | Reduced | Exchanged | Gathered | Broken | Failed"
    " | FlagRequested"
)


# ------------------------------------------------------------------------------------------------------- instructions


@dataclass(frozen=True, slots=True)
class FormRing:
    ticket: int
    view: View


@dataclass(frozen=True, slots=True)
class Heal:
    """Fetch the state of ``view.step`` from ``view.sources()``. ``torn``: the state in memory cannot be reused."""

    ticket: int
    view: View
    torn: bool = True


@dataclass(frozen=True, slots=True)
class Compute:
    """Compute the gradients of micro-batches ``range(first, first + count)`` of the step after the first ``step`` ones:
    the share of this member, or of its replica if the model is split."""

    ticket: int
    step: int
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class Reduce:
    ticket: int
    step: int


@dataclass(frozen=True, slots=True)
class Exchange:
    """Push a contribution to the server, if this worker was asked for one, and pull. ``Exchanged`` follows."""

    ticket: int


@dataclass(frozen=True, slots=True)
class Adopt:
    """Replace the state by the one that was pulled, of version ``applied``."""

    ticket: int
    applied: int
    lineage: str


@dataclass(frozen=True, slots=True)
class EndCompute:
    """Let a server's ``Compute`` end without contributions."""


@dataclass(frozen=True, slots=True)
class Vote:
    ticket: int
    token: bytes


@dataclass(frozen=True, slots=True)
class Apply:
    """Take one optimizer step from the reduced bytes. ``redo``: an earlier view reduced them."""

    ticket: int
    step: int
    square_sum: float
    redo: bool


@dataclass(frozen=True, slots=True)
class Confirm:
    """Gather all members' state digests after step ``applied``, because a checkpoint is due."""

    ticket: int
    applied: int


@dataclass(frozen=True, slots=True)
class Boundary:
    """Do the work between two steps.

    Attributes:
        save: write a checkpoint; the step is confirmed.
        snapshot: copy the state, because sources were asked for it.
        last: the job is complete.
    """

    ticket: int
    applied: int
    save: bool
    last: bool
    snapshot: bool = False


@dataclass(frozen=True, slots=True)
class CloseRing:
    """Close the session of the current view and abandon its activity."""

    reason: str


@dataclass(frozen=True, slots=True)
class Reload:
    """The state in memory is torn: load the newest good state from the disk. ``Loaded`` follows."""


@dataclass(frozen=True, slots=True)
class SendReport:
    report: Report


@dataclass(frozen=True, slots=True)
class Record:
    """Record an applied step with the view that computed it. ``lineage``: before the step, hex."""

    row: LedgerRow
    lineage: str


Instruction = (
    FormRing | Heal | Compute | Exchange | Adopt | EndCompute | Reduce | Vote | Apply | Confirm | Boundary | CloseRing
    | Reload | SendReport | Record
)  # fmt: skip
"""What the shell must do. An activity carries a ticket, which the event at its end repeats."""


# --------------------------------------------------------------------------------------------------------- the machine


class Transaction:
    """One member's side of the step transaction, for one job.

    Args:
        steps_total: number of steps after which the job is complete.
        checkpoint_every: steps between checkpoints; 0: none. The last step always has one.
        outlier_factor: see ``ring.token.NormGuard``.
        robust: as in ``ring.token.verdict``.
        hidden_norms: no member tells the norm of its contribution. One that is an outlier is told as NaN.
        asynchronous: rule 9.
    """

    def __init__(
        self,
        *,
        job: str,
        peer_id: str,
        steps_total: int,
        checkpoint_every: int = 0,
        outlier_factor: float = 0.0,
        share_rule: ShareRule = ShareRule(),  # noqa: B008 - it is immutable
        robust: bool = False,
        hidden_norms: bool = False,
        asynchronous: bool = False,
    ) -> None:
        self.asynchronous = asynchronous
        self._exchanged: Exchanged | None = None  # what is adopted
        self.job = job
        self.peer_id = peer_id
        self.steps_total = steps_total
        self.shares = Shares(())  # of the current step
        self.phase = Phase.EMPTY
        self.applied = 0
        self.lineage = ""
        self.square_sum = 0.0
        self.prepared_lineage = ""  # non-empty: the redo buffer holds step ``applied + 1``
        self.view: View | None = None
        self.torn = False  # rule 8
        self.anew = False  # loaded again since the view began: this member no longer holds the view's state
        self.history: deque[str] = deque(maxlen=40)
        self._checkpoint_every = checkpoint_every
        self._share_rule, self._robust, self._hidden_norms = share_rule, robust, hidden_norms
        self._part = 0.0  # squared norm of what is in the redo buffer
        self._guard = NormGuard(outlier_factor)
        self._rank = 0
        self._ticket = 0
        self._prepared: LedgerRow | None = None  # the row of the step in the redo buffer
        self._next_shares = Shares(())
        self._requested_flags = Flag(0)
        self._flags_sent = Flag(0)  # the requests that this member's last token carried
        self._granted = Flag(0)  # the union of the flags in the last committed step's tokens
        self._pending_break: Broken | None = None
        self._pending_view: View | None = None

    # ------------------------------------------------------------------------------------------------ the one mutator

    def handle(self, event: Event) -> list[Instruction]:
        """Take one event and return the instructions that follow. Raises ``ProtocolError`` for malformed tokens."""
        self.history.append(f"{self.phase} ← {event}"[:200])
        match event:
            case Loaded():
                return self._loaded(event)
            case Unloaded(reason):
                return self._unloaded(reason)
            case Torn() | Followed() if self.phase is Phase.IDLE:
                return self._moved_beside(event)
            case ViewArrived(view):
                return self._view_arrived(view)
            case Broken():
                return self._broken(event)
            case Gathered(ticket, parts) if ticket == self._ticket:
                return self._confirmed(parts) if self.phase is Phase.CONFIRMING else self._voted(parts)
            case Failed(reason):
                return self._failed(reason)
            case FlagRequested():
                return self._flag_requested(event)
            case Finished(ticket) if ticket == self._ticket:
                return self._finished()
            case Reduced(ticket) if ticket == self._ticket:
                return self._reduced(event)
            case Exchanged(ticket) if ticket == self._ticket:
                return self._pulled(event)
        return []  # the late end of an abandoned activity

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
    def running(self) -> bool:
        return self.phase in RUNNING

    @property
    def may_give(self) -> bool:
        """Whether others may fetch this state: it is the view's start, until the view ends or commits a step."""
        view = self.view
        if view is None or self.torn or not (self.running or self.phase in (Phase.HELD, Phase.DONE)):
            return False
        return (self.applied, self.lineage) == (view.step, view.lineage)

    def validate(self) -> None:
        assert self.applied >= 0
        assert self.lineage or self.phase in (Phase.EMPTY, Phase.FAILED)
        assert not self.torn or self.phase in (Phase.EMPTY, Phase.IDLE, Phase.FORMING, Phase.HEALING, Phase.FAILED)
        assert not self.running or self.view is not None
        if self.phase in (Phase.FORMING, Phase.COMPUTING, Phase.REDUCING):
            assert not self.prepared_lineage, "computing would overwrite the redo buffer"
        if self.phase in (Phase.VOTING, Phase.APPLYING, Phase.REDOING) and self._exchanged is None:
            assert self.prepared_lineage, "nothing to apply"
        if self.prepared_lineage:
            assert self._prepared is not None
            assert self._prepared.step == self.applied + 1, "a row of another step"
        if self.view is not None:
            given = sum(member.count for member in self.view.members)
            assert sum(self.shares.counts) == given, "the shares do not cover the micro-batches"
        assert self._pending_break is None or self.phase in UNINTERRUPTIBLE
        assert self._pending_view is None or self.phase in (*UNINTERRUPTIBLE, Phase.EMPTY)

    # --------------------------------------------------------------------------------------------------------- events

    def _loaded(self, event: Loaded) -> list[Instruction]:
        instructions = self._leave_view("the state was replaced") if self.running else []
        view, self._pending_view = self._pending_view, None
        self.applied, self.lineage, self.torn, self.anew = event.applied, event.lineage, False, True
        self.square_sum, self.prepared_lineage, self._pending_break = event.square_sum, "", None
        self._guard.forget()
        self.phase = Phase.IDLE  # allowed from every phase
        return [*instructions, SendReport(self.report("ready")), *(self._enter(view) if view else [])]

    def _moved_beside(self, event: Torn | Followed) -> list[Instruction]:
        """Forget the redo buffer; with the new state, also the norms: it is from no step of this member's ring."""
        self.prepared_lineage, self.torn = "", isinstance(event, Torn)
        if isinstance(event, Followed):
            self.applied, self.lineage, self.square_sum = event.applied, event.lineage, event.square_sum
            self._guard.forget()
        return []

    def _unloaded(self, reason: str) -> list[Instruction]:
        if self.running:
            self._leave_view(reason)
        self._pending_view = self._pending_break = None
        self.prepared_lineage, self.torn = "", True
        self.phase = Phase.EMPTY  # allowed from every phase
        return [CloseRing(reason), Reload()]

    def _view_arrived(self, view: View) -> list[Instruction]:
        newest = self._pending_view or self.view
        if self.phase is Phase.FAILED or (newest is not None and view.generation <= newest.generation):
            return []  # an old view changes nothing
        if self.phase in (*UNINTERRUPTIBLE, Phase.EMPTY):
            self._pending_view = view
            return []
        instructions = self._leave_view("a new view was announced") if self.running else []
        return instructions + self._enter(view)

    def _enter(self, view: View) -> list[Instruction]:
        rank = view.rank_of(self.peer_id)
        if rank is None:
            self.view = None
            self._go(Phase.EMPTY if self.torn else Phase.IDLE)
            return [Reload()] if self.torn else []
        self.view, self._rank, self.anew = view, rank, False
        self.shares = self._share_rule.of_step([member.count for member in view.members], view.step)
        old = [CloseRing("a new view was announced")] if self.phase in (Phase.HELD, Phase.DONE) else []
        named = self.applied + 1 == view.step and self.prepared_lineage == view.lineage
        redo = bool(self.prepared_lineage) and named and view.square_sum > 0  # clipping needs the norm
        if redo:
            self._go(Phase.REDOING)
            return [*old, Apply(self._next_ticket(), self.applied, self._redone_square_sum, redo=True)]
        self.prepared_lineage = ""
        self._go(Phase.FORMING)
        return [*old, FormRing(self._next_ticket(), view)]

    def _broken(self, event: Broken) -> list[Instruction]:
        if self.view is None or event.generation != self.view.generation:
            return []
        if self.phase is Phase.BOUNDARY and self.stopping:
            return []
        if self.phase is Phase.CONFIRMING:
            return self._unconfirmed(event)
        if self.phase in UNINTERRUPTIBLE:
            self._pending_break = self._pending_break or event
            return []
        if not self.running:
            return []  # held, done or waiting: no activity to break
        return self._break_off(event)

    def _break_off(self, event: Broken) -> list[Instruction]:
        told = {"suspect": event.suspect, "reason": event.reason, "cause": event.cause, "beside": event.beside}
        return self._end_view(event.reason, "broken", **told)

    def _end_view(self, why: str, status: str, **told: str) -> list[Instruction]:
        instructions = self._leave_view(why)
        if self.torn:
            self._go(Phase.EMPTY)
            return [*instructions, Reload()]
        return [*instructions, SendReport(self.report(status, **told))]

    def _failed(self, reason: str) -> list[Instruction]:
        instructions: list[Instruction] = [CloseRing(reason)] if self.running else []
        report = self.report("failed", reason=reason)
        self._pending_break = self._pending_view = self._exchanged = None
        self._ticket += 1
        self.phase = Phase.FAILED  # allowed from every phase
        return [*instructions, SendReport(report)]

    def _flag_requested(self, event: FlagRequested) -> list[Instruction]:
        generation = self.view.generation if self.view else 0
        if event.generation not in (0, generation):
            return []
        if event.flag is Flag.HOLD and self.phase is Phase.FORMING:
            return self._end_view("the view ended before its ring was formed", "held")
        if self.running:
            self._requested_flags |= event.flag
            waits = self._is_server and self.phase is Phase.COMPUTING
            return [EndCompute()] if waits and self._is_asked_to_stop else []
        if event.flag is Flag.HOLD:
            match self.phase:
                case Phase.HELD:
                    return [SendReport(self.report("held"))]
                case Phase.DONE:
                    return [SendReport(self.report("done"))]
        return []

    # -------------------------------------------------------------------------------------------- ends of activities

    def _finished(self) -> list[Instruction]:
        match self.phase:
            case Phase.APPLYING if self._exchanged is not None:
                return self._adopted(self._exchanged)
            case Phase.REDOING | Phase.APPLYING:
                return self._applied()
            case Phase.FORMING:
                return self._formed()
            case Phase.HEALING:
                return self._healed()
            case Phase.COMPUTING if self._is_server and self._is_asked_to_stop:
                return self._stop_without_a_version()
            case Phase.COMPUTING:
                self._go(Phase.REDUCING)
                return [Reduce(self._next_ticket(), self.applied)]
            case Phase.BOUNDARY:
                return self._boundary_done()
        raise self._invalid("an activity ended that this phase does not have")

    def _formed(self) -> list[Instruction]:
        view = self._current_view()
        if self._is_worker:
            return self._next_exchange()
        if self.torn or (self.applied, self.lineage) != (view.step, view.lineage):
            self._go(Phase.HEALING)
            torn, self.torn = self.torn, True
            return [Heal(self._next_ticket(), view, torn)]
        return self._start_step()

    def _healed(self) -> list[Instruction]:
        view = self._current_view()
        self.applied, self.lineage, self.square_sum = view.step, view.lineage, view.square_sum
        self.torn = False
        return [SendReport(self.report("healed")), *self._start_step()]

    def _start_step(self) -> list[Instruction]:
        view = self._current_view()
        if self.applied >= self.steps_total:
            return self._confirm()
        if self._is_server and self._is_asked_to_stop:
            return self._stop_without_a_version()
        first, count = self.shares.of(self._rank - view.stage_of(self._rank))  # stage 0 has the replica's share
        if self.asynchronous:
            first = count = 0  # the server's workers compute
        self._go(Phase.COMPUTING)
        return [Compute(self._next_ticket(), self.applied, first, count)]

    # ----------------------------------------------------------------------------------------------- asynchronous views

    @property
    def _is_server(self) -> bool:
        return self.asynchronous and self._rank == 0

    @property
    def _is_worker(self) -> bool:
        return self.asynchronous and self._rank > 0

    @property
    def _is_asked_to_stop(self) -> bool:
        return bool(self._requested_flags & (Flag.HOLD | Flag.LEAVE))

    @property
    def _voters(self) -> int:
        return 1 if self.asynchronous else self._current_view().size

    def _stop_without_a_version(self) -> list[Instruction]:
        self._granted, self._requested_flags = self._requested_flags, Flag(0)
        return self._confirm() if Flag.SAVE in self._granted else self._to_boundary(confirmed=False)

    def _next_exchange(self) -> list[Instruction]:
        if self._is_asked_to_stop:
            return self._stop(Phase.HELD, "held")
        self._go(Phase.COMPUTING)
        return [Exchange(self._next_ticket())]

    def _pulled(self, event: Exchanged) -> list[Instruction]:
        if (event.applied, event.lineage) == (self.applied, self.lineage):
            return self._after_exchange(event)
        self._exchanged = event
        self._go(Phase.APPLYING)
        return [Adopt(self._next_ticket(), event.applied, event.lineage)]

    def _adopted(self, event: Exchanged) -> list[Instruction]:
        self.applied, self.lineage, self.square_sum = event.applied, event.lineage, event.square_sum
        view, broken = self._pending_view, self._pending_break
        self._exchanged = self._pending_view = self._pending_break = None
        if view is not None:
            return self._leave_view("a new view was announced") + self._enter(view)
        if broken is not None and not event.last:
            return self._break_off(broken)
        return self._after_exchange(event)

    def _after_exchange(self, event: Exchanged) -> list[Instruction]:
        if event.last:
            return self._stop(Phase.DONE, "done")
        return self._stop(Phase.HELD, "held") if event.over else self._next_exchange()

    # --------------------------------------------------------------------------------------------------------- the vote

    def _reduced(self, event: Reduced) -> list[Instruction]:
        view = self._current_view()
        self.prepared_lineage = next_lineage(self.lineage, event.digest)
        counts = event.counts or self.shares.packed()
        self._prepared = LedgerRow(self.applied + 1, view.generation, event.digest, counts, event.made_of)
        self._go(Phase.VOTING)
        self._flags_sent, self._part = self._requested_flags, event.part
        own = event.own
        if self._hidden_norms:
            own = math.nan if self._guard.refuses(own, lenient=view.lenient) else 0.0
        token = Token(
            view.generation,
            self.applied,
            self._flags_sent | (Flag.STOP if event.stop else Flag(0)),
            event.part,
            event.digest,
            bytes.fromhex(self.lineage),
            event.unit_us,
            own,
            self._guard.usual,
            event.sent,
            event.received,
        )
        return [Vote(self._next_ticket(), token.encode())]

    def _voted(self, encoded: Sequence[bytes]) -> list[Instruction]:
        view = self._current_view()
        tokens = [Token.decode_untrusted(token) for token in encoded]
        if len(tokens) != self._voters:
            raise self._invalid(f"{len(tokens)} tokens for {view.size} members")
        last, stages = self.square_sum, view.stages
        if fault := verdict(tokens, self._guard, last=last, stages=stages, lenient=view.lenient, robust=self._robust):
            return self._rejected(fault)
        self._granted = granted(tokens)
        self._requested_flags &= ~self._flags_sent  # a request that came after the token waits for the next token
        self.square_sum = square_sum(tokens, last, stages)
        if not self._share_rule.by_speed:
            self._next_shares = self._share_rule.of_step([member.count for member in view.members], self.applied + 1)
        elif view.stages > 1:  # they depend on each replica's slowest stage, which the tokens do not show
            self._next_shares = self.shares
        else:
            self._next_shares = self.shares.after([token.unit_us for token in tokens])
        self._go(Phase.APPLYING)
        return [Apply(self._next_ticket(), self.applied, self.square_sum, redo=False)]

    @property
    def _redone_square_sum(self) -> float:
        """That of the view, unless this member, which holds all the bytes, knows better."""
        view = self._current_view()
        return view.square_sum if view.stages > 1 or is_same(view.square_sum, self._part) else self._part

    def _rejected(self, fault: TokenFault) -> list[Instruction]:
        self.prepared_lineage = ""
        members = self._current_view().members
        suspect, beside = (members[rank] if rank is not None else None for rank in (fault.suspect, fault.beside))
        reason = f"{suspect.name} (rank {fault.suspect}) {fault.what}" if suspect else fault.what
        return self._break_off(
            Broken(
                self._current_view().generation,
                suspect.peer_id if suspect else "",
                reason,
                cause=fault.cause,
                beside=beside.peer_id if beside else "",
            )
        )

    def _applied(self) -> list[Instruction]:
        redone = self.phase is Phase.REDOING
        if redone:
            self.square_sum = self._redone_square_sum
        if self._prepared is None:
            raise self._invalid("the members that computed the step are not known")
        record = Record(self._prepared, self.lineage)
        self.applied += 1
        self.lineage, self.prepared_lineage = self.prepared_lineage, ""
        self._guard.committed(self.square_sum)
        return [record, *self._after_commit(redone)]

    def _after_commit(self, redone: bool) -> list[Instruction]:
        view, broken = self._pending_view, self._pending_break
        self._pending_view = self._pending_break = None
        if view is not None:
            return self._leave_view("a new view was announced") + self._enter(view)
        if broken is not None and (redone or not self.stopping):
            return self._break_off(broken)
        if redone:
            self._go(Phase.FORMING)
            return [FormRing(self._next_ticket(), self._current_view())]
        self.shares = self._next_shares
        if not self._checkpoint_due():
            return self._to_boundary(confirmed=False)
        return self._unconfirmed(broken) if broken is not None else self._confirm()

    def _checkpoint_due(self) -> bool:
        on_calendar = self._checkpoint_every > 0 and self.applied % self._checkpoint_every == 0
        return on_calendar or Flag.SAVE in self._granted or self._is_last

    def _confirm(self) -> list[Instruction]:
        self._go(Phase.CONFIRMING)
        return [Confirm(self._next_ticket(), self.applied)]

    def _confirmed(self, digests: Sequence[bytes]) -> list[Instruction]:
        """Rule 6. This also checks the promise that equal lineages mean equal bits."""
        view = self._current_view()
        if len(digests) != self._voters:
            raise self._invalid(f"{len(digests)} digests")
        if self._rank in odd_ones_out(digests, view.stages):
            self.torn = True
            return self._break_off(Broken(0, "", "this member's state differs from the other members'"))
        return self._to_boundary(confirmed=True)

    def _unconfirmed(self, event: Broken) -> list[Instruction]:
        """Handle a break before the step was confirmed. If all members voted to stop here, this member stops without a
        checkpoint. But the run's last step needs its checkpoint, so a break there ends the view."""
        if not self.stopping or self._is_last:
            return self._break_off(event)
        self._requested_flags |= self._granted & Flag.SAVE  # still wanted, after a later step
        return self._to_boundary(confirmed=False)

    def _to_boundary(self, *, confirmed: bool) -> list[Instruction]:
        self._go(Phase.BOUNDARY)
        snapshot = Flag.SNAPSHOT in self._granted
        return [Boundary(self._next_ticket(), self.applied, save=confirmed, last=self._is_last, snapshot=snapshot)]

    @property
    def stopping(self) -> bool:
        """Whether the ring stops after the last applied step. All voted for it, so a faster member may be gone."""
        return bool(self._granted & (Flag.HOLD | Flag.LEAVE)) or self._is_last

    @property
    def _is_last(self) -> bool:
        return self.applied >= self.steps_total or Flag.STOP in self._granted

    def _boundary_done(self) -> list[Instruction]:
        if self._is_last:
            return self._stop(Phase.DONE, "done")
        if self.stopping:
            return self._stop(Phase.HELD, "held")
        return self._start_step()

    # -------------------------------------------------------------------------------------------------------- helpers

    def _stop(self, phase: Phase, status: str) -> list[Instruction]:
        self._go(phase)
        # A save or a copy of the state that was requested after the last token is granted after the next step.
        self._requested_flags &= _LASTING
        self._granted = Flag(0)
        self._ticket += 1
        return [SendReport(self.report(status))]

    def _leave_view(self, reason: str) -> list[Instruction]:
        if self.phase in (Phase.APPLYING, Phase.CONFIRMING):  # the boundary that would have granted them does not come
            self._requested_flags |= self._granted
        # Leaving the view fulfils a hold or a leave. A save or a copy of the state is still wanted.
        self._requested_flags &= _LASTING
        self._granted, self._exchanged = Flag(0), None
        self._ticket += 1
        self._go(Phase.IDLE)
        return [CloseRing(reason)]

    def _next_ticket(self) -> int:
        self._ticket += 1
        return self._ticket

    def _current_view(self) -> View:
        if self.view is None:
            raise self._invalid("no view")
        return self.view

    def _go(self, phase: Phase) -> None:
        further = NEXT_ASYNCHRONOUS.get(self.phase, frozenset()) if self.asynchronous else frozenset[Phase]()
        if phase is not self.phase and phase not in NEXT[self.phase] | further:
            raise self._invalid(f"to {phase}")
        self.phase = phase

    def _invalid(self, what: str) -> InvalidTransition:
        return InvalidTransition(f"{self.phase}: {what}\n" + "\n".join(self.history))
