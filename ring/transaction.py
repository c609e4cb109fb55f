"""The step transaction: how the members of a view apply a step all together, exactly once, or not at all.

Rules
-----
1. A step is applied only after one token from *every* member of the view was seen, all tokens name the same
   generation, step, lineage and digest of the reduced bytes, and none refuses the step (``ring.token``).
2. Between the moment a member has sent its token and the moment it knows the outcome, it keeps the reduced bytes (the
   redo buffer) and neither computes nor forgets.
3. After a break, the next view's (step, lineage) decides: a member whose prepared step is exactly that one redoes it
   from its buffer; one that applied it goes on; everyone else fetches the state from a healthy member. Anything that is
   prepared and not named by the view is discarded.
4. Ring-wide wishes (hold, save, leave) travel as flags inside the tokens. All members see the same set of tokens, so
   all stop, or save, after the same step.
5. An optimizer step cannot be interrupted: a break that arrives during it is dealt with after it.
6. A step is *confirmed* when every member has sent the digest of its state after it: whoever sent that has applied it,
   and no break can take it back. Only a confirmed step becomes a checkpoint: no digests, no checkpoint.
7. The shares of a step follow from the tokens of the step before it (``ring.token.Shares``), which all members see;
   those of a view's first step stand in the view. Every step that is applied is recorded with the view and the shares
   in which it was computed, be it redone in another.
8. A state that is being replaced, or that was found to differ from the others', is *torn*. A torn state is never
   reported, trained on or given to others: it is healed again, or loaded anew from the disk.

Theory of operation
-------------------
The core has one *activity* at a time: redo, form the session, heal, compute, reduce, vote, apply, confirm, boundary
work.
``handle`` takes one event and returns instructions for the shell. The event that ends an activity carries the ticket
that was given out with it, so the late result of an abandoned activity changes nothing. Rule 1 gives rule 3 its force:
if any member applied step s, every member had sent its token for s, hence holds the reduced bytes of s.

The core is strategy-agnostic: what "compute" and "reduce" do is the strategy's affair; it gets back a digest and
squared norms.

``NEXT`` below is the table of transitions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from p2ptrain.core.texts import shortened
from ring.coordination import InvalidTransition
from ring.token import Fault, Flag, Guard, Shares, Token, next_lineage, odd_ones_out, verdict
from ring.view import View
from wire.job_messages import LedgerRow, Report

REASON_CHARS = 500
"""Of a report's reason: it may hold what a neighbour said, and must fit a control frame."""


class Phase(StrEnum):
    EMPTY = "building"  # no state yet
    IDLE = "waiting"  # has a state, no view
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


# What may follow what. A break leads to IDLE from every phase of a running view; a failure to FAILED from everywhere.
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
    """The state in memory is given up: a person took the run back to a checkpoint. ``Loaded`` follows."""

    reason: str


@dataclass(frozen=True, slots=True)
class Torn:
    """Outside a view, the state in memory begins to be replaced by another. ``Followed`` follows, or ``Unloaded``."""


@dataclass(frozen=True, slots=True)
class Followed:
    """Outside a view, the state in memory was brought to that of a running ring's step."""

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
    """The reduce with ``ticket`` ended well. The rest is what this member's token says (``ring.token.Token``)."""

    ticket: int
    digest: bytes
    part: float
    own: float = 0.0
    unit_us: int = 0
    sent: int = 0
    received: int = 0


@dataclass(frozen=True, slots=True)
class Gathered:
    """The tokens (of a vote), or the digests of the states (to confirm), of all members, in rank order."""

    ticket: int
    parts: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Broken:
    """The ring of ``generation`` cannot go on: a neighbour is gone, or a collective failed. Words as in ``Report``."""

    generation: int
    suspect: str
    reason: str
    cause: str = ""
    beside: str = ""


@dataclass(frozen=True, slots=True)
class Failed:
    """This member cannot go on at all: out of memory, a loss that is not finite, a disk that is full."""

    reason: str


@dataclass(frozen=True, slots=True)
class FlagRequested:
    """Ask the ring for something at the next step boundary. ``generation`` 0 means: whichever view runs."""

    flag: Flag
    generation: int = 0


Event: TypeAlias = (
    "Loaded | Unloaded | Torn | Followed | ViewArrived | Finished | Reduced | Gathered | Broken | Failed"
    " | FlagRequested"
)


# ------------------------------------------------------------------------------------------------------- instructions


@dataclass(frozen=True, slots=True)
class FormRing:
    ticket: int
    view: View


@dataclass(frozen=True, slots=True)
class Heal:
    """Fetch the state of ``view.step`` from ``view.sources()``. ``torn``: nothing in memory can be built on."""

    ticket: int
    view: View
    torn: bool = True


@dataclass(frozen=True, slots=True)
class Compute:
    """Gradients of micro-batches ``range(first, first + count)`` of step ``step`` (steps applied so far): this member's
    share, or that of its replica, of whose model it holds a part."""

    ticket: int
    step: int
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class Reduce:
    ticket: int
    step: int


@dataclass(frozen=True, slots=True)
class Vote:
    ticket: int
    token: bytes


@dataclass(frozen=True, slots=True)
class Apply:
    """One optimizer step from the reduced bytes. ``redo``: the commit was another view's."""

    ticket: int
    step: int
    square_sum: float
    redo: bool


@dataclass(frozen=True, slots=True)
class Confirm:
    """Gather the digests of all members' states after step ``applied``: a checkpoint is due."""

    ticket: int
    applied: int


@dataclass(frozen=True, slots=True)
class Boundary:
    """Between two steps.

    Attributes:
        save: a checkpoint is due, and the step is confirmed.
        snapshot: sources were asked for a copy of the state.
        last: the job is complete.
    """

    ticket: int
    applied: int
    save: bool
    last: bool
    snapshot: bool = False


@dataclass(frozen=True, slots=True)
class CloseRing:
    """Close the session of the current view, and abandon its activity."""

    reason: str


@dataclass(frozen=True, slots=True)
class Reload:
    """The state in memory is torn: load the newest good one from the disk, then say ``Loaded``."""


@dataclass(frozen=True, slots=True)
class SendReport:
    report: Report


@dataclass(frozen=True, slots=True)
class Record:
    """A step was applied: who computed it, be it redone in a later view. ``lineage``: before the step, hex."""

    row: LedgerRow
    lineage: str


Instruction = (
    FormRing | Heal | Compute | Reduce | Vote | Apply | Confirm | Boundary | CloseRing | Reload | SendReport | Record
)
"""What the shell is to do. Activities carry a ticket that their closing event repeats."""


# --------------------------------------------------------------------------------------------------------- the machine


class Transaction:
    """One member's side of the step transaction, for one job.

    Args:
        job, peer_id: whose.
        steps_total: the job is complete when so many steps are applied.
        checkpoint_every: a checkpoint is due after every so many steps, and after the last; 0: only then.
        outlier_factor: see ``ring.token.Guard``.
    """

    def __init__(
        self, *, job: str, peer_id: str, steps_total: int, checkpoint_every: int = 0, outlier_factor: float = 0.0
    ) -> None:
        self.job = job
        self.peer_id = peer_id
        self.steps_total = steps_total
        self.shares = Shares(())  # of this step
        self.phase = Phase.EMPTY
        self.applied = 0
        self.lineage = ""
        self.square_sum = 0.0
        self.prepared_lineage = ""  # non-empty: the redo buffer holds step ``applied + 1``
        self.view: View | None = None
        self.torn = False  # the state in memory is half replaced
        self.anew = False  # the state was loaded since the view began: this member carries nothing of it any more
        self.history: deque[str] = deque(maxlen=40)
        self._checkpoint_every = checkpoint_every
        self._guard = Guard(outlier_factor)
        self._rank = 0
        self._ticket = 0
        self._prepared: LedgerRow | None = None  # the row of the step in the redo buffer
        self._next_shares = Shares(())
        self._wishes = Flag(0)
        self._asked = Flag(0)  # the wishes that went out with this member's token
        self._granted = Flag(0)  # what the tokens of the last committed step asked for
        self._pending_break: Broken | None = None
        self._pending_view: View | None = None

    # ------------------------------------------------------------------------------------------------ the one mutator

    def handle(self, event: Event) -> list[Instruction]:
        """Take one event, give the instructions that follow. Raises ``ProtocolError`` for tokens that are none."""
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
                return self._wish(event)
            case Finished(ticket) if ticket == self._ticket:
                return self._finished()
            case Reduced(ticket) if ticket == self._ticket:
                return self._reduced(event)
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
        """Whether the state stands still as the view's start: until this view ends or commits its first step."""
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
        if self.phase in (Phase.VOTING, Phase.APPLYING, Phase.REDOING):
            assert self.prepared_lineage, "nothing to apply"
        if self.prepared_lineage:
            assert self._prepared is not None
            assert self._prepared.step == self.applied + 1, "a row of another step"
        if self.view is not None:
            given = sum(member.count for member in self.view.members)
            assert sum(self.shares.counts) == given, "shares that do not cover"
        assert self._pending_break is None or self.phase in UNINTERRUPTIBLE
        assert self._pending_view is None or self.phase in (*UNINTERRUPTIBLE, Phase.EMPTY)

    # --------------------------------------------------------------------------------------------------------- events

    def _loaded(self, event: Loaded) -> list[Instruction]:
        instructions = self._leave_view("the state was replaced") if self.running else []
        view, self._pending_view = self._pending_view, None
        self.applied, self.lineage, self.torn, self.anew = event.applied, event.lineage, False, True
        self.square_sum, self.prepared_lineage, self._pending_break = event.square_sum, "", None
        self._guard.forget()
        self.phase = Phase.IDLE  # from everywhere
        return [*instructions, SendReport(self.report("ready")), *(self._enter(view) if view else [])]

    def _moved_beside(self, event: Torn | Followed) -> list[Instruction]:
        """It was not a step of this member's ring: nobody may redo it from here, and norms of before say nothing."""
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
        self.phase = Phase.EMPTY  # from everywhere
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
        self.shares = Shares(member.count for member in view.members)
        old = [CloseRing("a new view was announced")] if self.phase in (Phase.HELD, Phase.DONE) else []
        committed = self.applied + 1 == view.step and self.prepared_lineage == view.lineage
        redo = bool(self.prepared_lineage) and committed and view.square_sum > 0  # without the norm: other bits
        if redo:
            self._go(Phase.REDOING)
            return [*old, Apply(self._next_ticket(), self.applied, view.square_sum, redo=True)]
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
            return []  # held, done or waiting: nothing was under way
        return self._break_off(event)

    def _break_off(self, event: Broken) -> list[Instruction]:
        instructions = self._leave_view(event.reason)
        if self.torn:
            self._go(Phase.EMPTY)
            return [*instructions, Reload()]
        report = self.report(
            "broken", suspect=event.suspect, reason=event.reason, cause=event.cause, beside=event.beside
        )
        return [*instructions, SendReport(report)]

    def _failed(self, reason: str) -> list[Instruction]:
        instructions: list[Instruction] = [CloseRing(reason)] if self.running else []
        report = self.report("failed", reason=reason)
        self._pending_break = self._pending_view = None
        self._ticket += 1
        self.phase = Phase.FAILED  # from everywhere
        return [*instructions, SendReport(report)]

    def _wish(self, event: FlagRequested) -> list[Instruction]:
        generation = self.view.generation if self.view else 0
        if event.generation not in (0, generation):
            return []
        if event.flag is Flag.HOLD and self.phase is Phase.FORMING:
            return self._stop_forming()
        if self.running:
            self._wishes |= event.flag
            return []
        if event.flag is Flag.HOLD:
            match self.phase:
                case Phase.HELD:
                    return [SendReport(self.report("held"))]
                case Phase.DONE:
                    return [SendReport(self.report("done"))]
        return []

    def _stop_forming(self) -> list[Instruction]:
        instructions = self._leave_view("the view was given up before its ring was formed")
        if self.torn:
            self._go(Phase.EMPTY)
            return [*instructions, Reload()]
        return [*instructions, SendReport(self.report("held"))]

    # -------------------------------------------------------------------------------------------- ends of activities

    def _finished(self) -> list[Instruction]:
        match self.phase:
            case Phase.REDOING | Phase.APPLYING:
                return self._applied()
            case Phase.FORMING:
                return self._formed()
            case Phase.HEALING:
                return self._healed()
            case Phase.COMPUTING:
                self._go(Phase.REDUCING)
                return [Reduce(self._next_ticket(), self.applied)]
            case Phase.BOUNDARY:
                return self._boundary_done()
        raise self._invalid("an activity ended that cannot end so")

    def _formed(self) -> list[Instruction]:
        view = self._current_view()
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
        first, count = self.shares.of(self._rank - view.stage_of(self._rank))  # the replica's is that of its stage 0
        self._go(Phase.COMPUTING)
        return [Compute(self._next_ticket(), self.applied, first, count)]

    def _reduced(self, event: Reduced) -> list[Instruction]:
        view = self._current_view()
        self.prepared_lineage = next_lineage(self.lineage, event.digest)
        self._prepared = LedgerRow(self.applied + 1, view.generation, event.digest, self.shares.packed())
        self._go(Phase.VOTING)
        self._asked = self._wishes
        refused = self._guard.refuses(event.own, event.part, lenient=view.lenient)
        token = Token(
            view.generation,
            self.applied,
            self._asked | (Flag.REJECT if refused else Flag(0)),
            event.part,
            event.digest,
            bytes.fromhex(self.lineage),
            event.unit_us,
            event.own,
            event.sent,
            event.received,
        )
        return [Vote(self._next_ticket(), token.encode())]

    def _voted(self, encoded: Sequence[bytes]) -> list[Instruction]:
        view = self._current_view()
        tokens = [Token.decode_untrusted(token) for token in encoded]
        if len(tokens) != view.size:
            raise self._invalid(f"{len(tokens)} tokens for {view.size} members")
        if fault := verdict(tokens):
            return self._rejected(fault)
        self._granted = Flag(0)
        for token in tokens:
            self._granted |= token.flags
        self._wishes &= ~self._asked  # a wish that came after the token waits for the next one
        # The same numbers summed in the same order on every member: clipping is bit-equal.
        self.square_sum = sum((token.part for token in tokens), start=0.0)
        # Of a split model the replicas' shares stay: what moves them is the slowest stage, and that is not in a token.
        self._next_shares = self.shares if view.stages > 1 else self.shares.after([token.unit_us for token in tokens])
        self._go(Phase.APPLYING)
        return [Apply(self._next_ticket(), self.applied, self.square_sum, redo=False)]

    def _rejected(self, fault: Fault) -> list[Instruction]:
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
            self.square_sum = self._current_view().square_sum
        if self._prepared is None:
            raise self._invalid("nobody knows who computed the step")
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
        return on_calendar or Flag.SAVE in self._granted or self.applied >= self.steps_total

    def _confirm(self) -> list[Instruction]:
        self._go(Phase.CONFIRMING)
        return [Confirm(self._next_ticket(), self.applied)]

    def _confirmed(self, digests: Sequence[bytes]) -> list[Instruction]:
        """Rule 6; and equal lineages promise equal bits: this checks it."""
        view = self._current_view()
        if len(digests) != view.size:
            raise self._invalid(f"{len(digests)} digests")
        if self._rank in odd_ones_out(digests, view.stages):
            self.torn = True
            return self._break_off(Broken(0, "", "its state has drifted from the others'"))
        return self._to_boundary(confirmed=True)

    def _unconfirmed(self, event: Broken) -> list[Instruction]:
        """Somebody cannot say any more that it has applied the step. All have voted to stop after it, so they stand
        still, without a checkpoint; but not where that was to be the run's last.
        """
        if not self.stopping or self.applied >= self.steps_total:
            return self._break_off(event)
        self._wishes |= self._granted & Flag.SAVE  # not now, but still wanted
        return self._to_boundary(confirmed=False)

    def _to_boundary(self, *, confirmed: bool) -> list[Instruction]:
        self._go(Phase.BOUNDARY)
        snapshot, last = Flag.SNAPSHOT in self._granted, self.applied >= self.steps_total
        return [Boundary(self._next_ticket(), self.applied, save=confirmed, last=last, snapshot=snapshot)]

    @property
    def stopping(self) -> bool:
        """Whether the ring stands still after the step that was applied last: all have voted for that, so whoever was
        faster may be gone.
        """
        return bool(self._granted & (Flag.HOLD | Flag.LEAVE)) or self.applied >= self.steps_total

    def _boundary_done(self) -> list[Instruction]:
        if self.applied >= self.steps_total:
            return self._stop(Phase.DONE, "done")
        if self.stopping:
            return self._stop(Phase.HELD, "held")
        return self._start_step()

    # -------------------------------------------------------------------------------------------------------- helpers

    def _stop(self, phase: Phase, status: str) -> list[Instruction]:
        self._go(phase)
        self._wishes &= (
            Flag.SAVE | Flag.SNAPSHOT
        )  # one that came too late for the last token is granted after the next step
        self._granted = Flag(0)
        self._ticket += 1
        return [SendReport(self.report(status))]

    def _leave_view(self, reason: str) -> list[Instruction]:
        if self.phase in (Phase.APPLYING, Phase.CONFIRMING):  # the boundary that would have granted it does not come
            self._wishes |= self._granted
        self._wishes &= (
            Flag.SAVE | Flag.SNAPSHOT
        )  # a hold or a leave has happened with this; a copy of the state is still wanted
        self._granted = Flag(0)
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
        if phase is not self.phase and phase not in NEXT[self.phase]:
            raise self._invalid(f"to {phase}")
        self.phase = phase

    def _invalid(self, what: str) -> InvalidTransition:
        return InvalidTransition(f"{self.phase}: {what}\n" + "\n".join(self.history))
