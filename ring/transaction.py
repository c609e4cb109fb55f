"""The step transaction: all members of a view apply a step exactly once, or none of them applies it.

Rules (those of ``ring.job_member`` hold, too)
-----
1. In the view that reduced it, a member applies a step only after it has seen one token from *every* member. All
   tokens must name the same generation, step, lineage and digest of the reduced bytes, and their figures must be
   plausible (``ring.token.judge_tokens``). Otherwise it applies a step only in a redo (rule 3), or fetches it from a
   member that applied it.
2. From the moment a member sends its token until it knows the outcome, it keeps the reduced bytes (the redo buffer)
   and does not compute: the step is *prepared*.
3. After a break, the next view's (step, lineage) decides. A member whose prepared step is exactly that one redoes it
   from its buffer. A member that applied it continues. Every other member fetches the state from a healthy member. A
   prepared step that the view does not name is discarded.
4. Requests to the whole ring travel as flags in the tokens (hold: stop after this step; save: write a checkpoint;
   leave: stop, because a member leaves; snapshot: copy the state for workers that fetch it; stop: this step is the
   job's last, which all members must say). All see the same tokens, so all stop, or save, after the same step.
5. A step is *confirmed* when every member has sent the digest of its state after the step. A member that sent this
   digest has applied the step, and no break can take it back. The step with which a view begins is confirmed, too: the
   seed has stored it. Only a confirmed step becomes a checkpoint.
6. The shares of a step follow from the tokens of the step before it (``ring.token.Shares``), which all members see,
   or from the view and the step's number (``ring.token.ShareRule``). Those of a view's first step are in the view.
   Every applied step is recorded with the view and the shares in which it was computed, even if a later view redoes it.

Rule 3 relies on rule 1: if any member applied step s, every member had sent its token for s, and so every member holds
the reduced bytes of s. The core does not depend on the strategy, which defines "compute" and "reduce", and returns a
digest and squared norms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

from ring import member_events as ev
from ring.job_member import COMMON, ENTERS, LEAVES, STOPS, JobMember, LeadsTo, MemberPhase, Table
from ring.token import (
    Flag,
    NormGuard,
    ShareRule,
    Shares,
    Token,
    TokenFault,
    granted,
    is_same,
    judge_tokens,
    next_lineage,
    odd_ones_out,
    square_sum,
)
from ring.view import View
from wire.job_messages import LedgerRow

# -------------------------------------------------------------------------------------------------------- transitions

_P = MemberPhase
_STARTS: LeadsTo = {_P.COMPUTING: ev.Compute, _P.CONFIRMING: ev.Confirm}  # a view may begin after the last step
_ENDS: LeadsTo = {_P.CONFIRMING: ev.Confirm, _P.BOUNDARY: ev.Boundary}

STEPS: Table = {
    (_P.REDOING, ev.ActivityFinished): ("finish_redo", {**ENTERS, **LEAVES, _P.FORMING: ev.FormRing}),  # rule 3
    (_P.FORMING, ev.ActivityFinished): ("heal_or_start", {_P.HEALING: ev.Heal, **_STARTS}),  # rule 3
    (_P.HEALING, ev.ActivityFinished): ("start_healed", _STARTS),
    (_P.COMPUTING, ev.ActivityFinished): ("reduce", {_P.REDUCING: ev.Reduce}),
    (_P.REDUCING, ev.StepReduced): ("vote", {_P.VOTING: ev.Vote}),  # rule 2
    (_P.VOTING, ev.TokensGathered): ("judge", {_P.APPLYING: ev.Apply, **LEAVES}),  # rules 1, 4 and 6
    (_P.APPLYING, ev.ActivityFinished): ("commit", {**_ENDS, **ENTERS, **LEAVES}),  # rule 6
    (_P.CONFIRMING, ev.DigestsGathered): ("compare", {_P.BOUNDARY: ev.Boundary, **LEAVES}),  # rule 5
    (_P.BOUNDARY, ev.ActivityFinished): ("go_on", {**_STARTS, **STOPS}),  # rule 4
}


class Transaction(JobMember):
    """One member's side of the step transaction, for one job.

    Args:
        outlier_factor: see ``ring.token.NormGuard``.
        robust: as in ``ring.token.judge_tokens``.
        hidden_norms: no member tells the norm of its contribution. One that is an outlier is told as NaN.
    """

    TABLE: ClassVar[Table] = COMMON | STEPS

    def __init__(
        self,
        *,
        outlier_factor: float = 0.0,
        share_rule: ShareRule = ShareRule(),  # noqa: B008 - it is immutable
        robust: bool = False,
        hidden_norms: bool = False,
        **job: Any,
    ) -> None:
        super().__init__(**job)
        self.shares = Shares(())  # of the current step
        self._next_shares = Shares(())
        self._share_rule, self._robust, self._hidden_norms = share_rule, robust, hidden_norms
        self._guard = NormGuard(outlier_factor)
        self._prepared: LedgerRow | None = None  # the row of the step in the redo buffer
        self._part = 0.0  # squared norm of what is in the redo buffer

    @property
    def prepared_lineage(self) -> str:
        return next_lineage(self.lineage, self._prepared.digest) if self._prepared is not None else ""

    # ----------------------------------------------------------------------------------------------- entering a view

    def forget(self) -> None:
        self._prepared = None
        self._guard.forget()

    def begin_view(self, view: View) -> list[Any]:
        self.shares = self._share_rule.of_step([member.count for member in view.members], view.step)
        is_named = self.applied + 1 == view.step and self.prepared_lineage == view.lineage
        if self._prepared is not None and is_named and view.square_sum > 0:  # clipping needs the norm
            return self._begin(_P.REDOING, ev.Apply, self.applied, self._redone_square_sum, redo=True)
        self._prepared = None
        return self._begin(_P.FORMING, ev.FormRing, view)

    def _finish_redo(self, _: ev.ActivityFinished) -> list[Any]:
        self.square_sum = self._redone_square_sum
        record = self._apply_prepared()
        return record + (self._follow_postponed() or self._begin(_P.FORMING, ev.FormRing, self._current))

    def _heal_or_start(self, _: ev.ActivityFinished) -> list[Any]:
        view = self._current
        if self.torn or (self.applied, self.lineage) != (view.step, view.lineage):
            torn, self.torn = self.torn, True
            return self._begin(_P.HEALING, ev.Heal, view, torn)
        return self.begin_step()

    def _start_healed(self, _: ev.ActivityFinished) -> list[Any]:
        view = self._current
        self.applied, self.lineage, self.square_sum, self.torn = view.step, view.lineage, view.square_sum, False
        return [ev.SendReport(self.report("healed")), *self.begin_step()]

    def begin_step(self) -> list[Any]:
        if self.applied >= self.steps_total:
            return self._confirm()
        view = self._current
        first, count = self.shares.of(self._rank - view.stage_of(self._rank))  # stage 0 has the replica's share
        return self._begin(_P.COMPUTING, ev.Compute, self.applied, first, count)

    # ------------------------------------------------------------------------------------------------------- the vote

    def _reduce(self, _: ev.ActivityFinished) -> list[Any]:
        return self._begin(_P.REDUCING, ev.Reduce, self.applied)

    def _vote(self, event: ev.StepReduced) -> list[Any]:
        view, own = self._current, event.own
        self._prepared = LedgerRow(self.applied + 1, view.generation, event.digest, self.shares.packed())
        self._requests.sent, self._part = self._requests.waiting, event.part
        if self._hidden_norms:
            own = math.nan if self._guard.refuses(own, lenient=view.lenient) else 0.0
        token = Token(
            view.generation,
            self.applied,
            self._requests.sent | (Flag.STOP if event.stop else Flag(0)),
            event.part,
            event.digest,
            bytes.fromhex(self.lineage),
            event.unit_us,
            own,
            self._guard.usual,
        )
        return self._begin(_P.VOTING, ev.Vote, token.encode())

    def _judge(self, event: ev.TokensGathered) -> list[Any]:
        view, last = self._current, self.square_sum
        tokens = [Token.decode_untrusted(token) for token in event.tokens]
        if len(tokens) != view.size:
            raise self._invalid(f"{len(tokens)} tokens for {view.size} members")
        fault = judge_tokens(
            tokens, self._guard, last=last, stages=view.stages, lenient=view.lenient, robust=self._robust
        )
        if fault is not None:
            return self._reject(fault)
        self._requests.granted = granted(tokens)
        self._requests.waiting &= ~self._requests.sent  # a request that came after the token waits for the next token
        self.square_sum = square_sum(tokens, last, view.stages)
        self._next_shares = self._shares_after(tokens)
        return self._begin(_P.APPLYING, ev.Apply, self.applied, self.square_sum)

    def _shares_after(self, tokens: Sequence[Token]) -> Shares:
        """Rule 6."""
        view, rule = self._current, self._share_rule
        if rule.by_size or rule.equal:
            return rule.of_step([member.count for member in view.members], self.applied + 1)
        if view.stages > 1:  # they depend on each replica's slowest stage, which the tokens do not show
            return self.shares
        return self.shares.after([token.unit_us for token in tokens])

    def _reject(self, fault: TokenFault) -> list[Any]:
        self._prepared = None
        view, suspect, reason = self._current, "", fault.what
        if fault.suspect is not None:
            member = view.members[fault.suspect]
            suspect, reason = member.peer_id, f"{member.name} (rank {fault.suspect}) {fault.what}"
        return self._break_off(ev.ViewBroken(view.generation, suspect, reason, fault.cause))

    # ----------------------------------------------------------------------------------------------------- the commit

    @property
    def _redone_square_sum(self) -> float:
        """That of the view, unless this member, which holds all the bytes, knows better."""
        view = self._current
        return view.square_sum if view.stages > 1 or is_same(view.square_sum, self._part) else self._part

    def _apply_prepared(self) -> list[Any]:
        if self._prepared is None:
            raise self._invalid("the members that computed the step are not known")
        record, lineage = ev.RecordStep(self._prepared, self.lineage), self.prepared_lineage
        self.applied, self.lineage, self._prepared = self.applied + 1, lineage, None
        self._guard.committed(self.square_sum)
        return [record]

    def _commit(self, _: ev.ActivityFinished) -> list[Any]:
        record, save = self._apply_prepared(), self._is_checkpoint_due
        if following := self._follow_postponed(stops=self.stopping and not save):
            return record + following
        self.shares = self._next_shares
        return record + (self._confirm() if save else self._begin_boundary(save=False))

    def _confirm(self) -> list[Any]:
        return self._begin(_P.CONFIRMING, ev.Confirm, self.applied)

    def _compare(self, event: ev.DigestsGathered) -> list[Any]:
        """This also checks the promise that equal lineages mean equal bits."""
        view = self._current
        if len(event.digests) != view.size:
            raise self._invalid(f"{len(event.digests)} digests")
        if self._rank in odd_ones_out(event.digests, view.stages):
            self.torn = True
            return self._break_off(ev.ViewBroken(0, "", "this member's state differs from the other members'"))
        return self._begin_boundary(save=True)

    @property
    def _rank(self) -> int:
        rank = self._current.rank_of(self.peer_id)
        if rank is None:
            raise self._invalid("no rank in the view")
        return rank
