"""The course of a run: how far it is known to have come, whose state it may go on from, and what that gives up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ring.formation import Reports
from ring.view import View

EWMA = 0.2
"""The weight of a new step in what one takes: the last ten count."""


@dataclass(slots=True)
class Course:
    """Pure knowledge; the coordinator keeps one and asks it.

    Attributes:
        known_step: the newest step that somebody is known to have applied.
        saved: peer id → step of the newest checkpoint that it is known to hold.
        branch: once the run went back: the peers whose newest checkpoint is of it, and not of a course that it gave up.
            None: it never did.
        step_s: what a step takes, averaged; 0 where it is not known.
    """

    known_step: int
    saved: Mapping[str, int]
    branch: frozenset[str] | None
    step_s: float = 0.0

    def progressed(self, step: int, step_s: float) -> None:
        """Somebody tells of a committed step, and what it took: many may be told at once, long after they were made."""
        self.known_step = max(self.known_step, step)
        if step_s > 0:
            self.step_s = self.step_s + EWMA * (step_s - self.step_s) if self.step_s else step_s

    def patience_s(self, best: int, least_s: float, most_s: float) -> float:
        """How long to wait for whoever holds more than step ``best``: as long as it took to compute what would be lost,
        so that waiting for nothing costs no more than giving up too early would have."""
        return max(least_s, min((self.known_step - best) * self.step_s, most_s))

    def owns(self, peer_id: str, own: bool) -> None:
        """Whether that peer's newest checkpoint is of this run; it is, where the run never went back."""
        if self.branch is not None:
            self.branch = self.branch | {peer_id} if own else self.branch - {peer_id}

    @property
    def _reached(self) -> int:
        """How far the run came: checkpoints are told of by their holders, of steps a seed that died told nobody."""
        saved = (step for peer_id, step in self.saved.items() if self.branch is None or peer_id in self.branch)
        return max(self.known_step, *saved, 0)

    def sources(
        self, ready: Reports, heirs: Reports, view: View, *, in_memory: bool, patient: bool
    ) -> tuple[Reports, str]:
        """Whose state the next view may start from now; where nobody's, why.

        Args:
            ready: all that stand still. heirs: those that do so in ``view``, the last one; they carry the run's state.
            in_memory: a member of that view may still hold what it had there.
            patient: rather wait than give up a step that somebody may still bring.
        """
        if in_hand := carried(heirs, view):
            return in_hand, ""
        elsewhere = max((step for peer_id, step in self.saved.items() if peer_id not in ready), default=0)
        wanted = self._reached if in_memory else min(self._reached, elsewhere)
        own = {peer_id: report for peer_id, report in ready.items() if self.branch is None or peer_id in self.branch}
        if at_hand := {peer_id: report for peer_id, report in own.items() if report.applied >= wanted}:
            return at_hand, ""
        if not patient:
            return own or ready, ""
        best = f"step {max(report.applied for report in own.values())}" if own else "none of this run"
        return {}, f"waiting for a worker that holds step {wanted} (at hand: {best})"

    def given_up(self, step: int, chosen_from: Reports, heirs: Reports, view: View) -> tuple[str, str]:
        """What is, if the next view starts at ``step`` of these, as an event's kind and text; mostly nothing."""
        if carried(heirs, view):
            return "", ""
        if step < self._reached:
            lost = f"{self._reached - step} steps are lost, for nobody that holds step {self._reached} is here"
            return "steps-lost", f"goes on from step {step}: {lost}"
        if self.branch is not None and not self.branch & chosen_from.keys():
            return "branch", f"goes on from step {step} of a course that was given up: nobody here holds another"
        return "", ""

    def begin(self, step: int, members: Reports, *, went_back: bool) -> None:
        """A view starts. ``members``: the reports with which they come; the disk of one that is ready with a later step
        holds what is given up, and so its newest checkpoint must not be taken for this run's at the next restart."""
        self.known_step = step
        if went_back or self.branch is not None:
            kept = frozenset() if went_back or self.branch is None else self.branch
            fits = (peer_id for peer_id, it in members.items() if it.status == "ready" and it.applied <= step)
            self.branch = kept.union(fits)


def carried(heirs: Reports, view: View) -> Reports:
    """The heirs whose state is whole: one that was healing may have less than the view began with."""
    return {peer_id: report for peer_id, report in heirs.items() if report.applied >= view.step}
