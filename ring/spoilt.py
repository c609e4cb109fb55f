"""Steps that the ring itself refused: whose contribution, or which hop, spoils them, and what is done about it. Pure.

    what the members say of a step     first                           again, of the same step
    contribution (not finite, absurd)  the same members, looked at     the suspect sits out; where another one brings
                                       closely (``Care.AUDITED``)      the same, or nobody else is there, the data is
                                                                       like that: ``Care.LENIENT``, and who sat out is
                                                                       absolved; refused even then: not finite, the job
                                                                       has failed. A ring of one first waits for whoever
                                                                       could compute it instead (``company``)
    digest (members hold other sums)   ``Care.AUDITED``                the member that most name sits out
    hop (sent and received differ)     the two are parted, or the sender sits out

What is known of a step is forgotten when it is committed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from ring.formation import Reports
from ring.suspects import Bench, LinkJudge
from ring.view import Care

CAUSES = frozenset({"contribution", "digest", "hop"})
"""Values of ``Report.cause`` that say that a step was refused."""
SOUGHT = 2
"""A lone member is joined so often, at most, for the sake of one step: others may never get ready, or die of it."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """``text``: for people. ``hopeless``: the step cannot be computed by anybody."""

    text: str
    hopeless: bool = False


class StepJudge:
    """Remembers the refusals of one step.

    Attributes:
        care: how closely the next view looks at contributions.
        company: whether the only member is to compute it with somebody who was not in the ring so far, in that view.
    """

    def __init__(self, bench: Bench, links: LinkJudge) -> None:
        self.care, self.company = Care.USUAL, False
        self._bench, self._links = bench, links
        self._step = 0  # the one that was refused, counted as applied
        self._sought = 0  # so often company was
        self._suspects: dict[str, list[str]] = {}  # by cause: a sum that differs says nothing of the data

    def committed(self, step: int) -> None:
        """``step`` steps are applied."""
        if step >= self._step:
            self._begin(0)

    def view_began(self) -> None:
        """With company or, as there was none to be had, without."""
        self.company = False

    def judge(self, heirs: Reports, name: Callable[[str], str], now: float, *, spare: bool = False) -> Verdict | None:
        """All stand still. None where no step was refused.

        Args:
            heirs: the members that live.
            spare: whether anybody else is there that has a place in the ring, ready or about to be.
        """
        told = Counter(
            (report.applied + 1, report.cause, report.suspect, report.beside)
            for report in heirs.values()
            if report.status == "broken" and report.cause in CAUSES and report.suspect
        )
        if not told:
            return None  # whoever lost its neighbour meanwhile may not have seen the vote: one that did is enough
        step, cause, suspect, beside = min(told, key=lambda it: (it[1] != "hop", -told[it], it))
        if step != self._step:
            self._begin(step)
        self._suspects.setdefault(cause, []).append(suspect)
        self.care = max(self.care, Care.AUDITED)
        match cause:
            case "hop":
                done = self._links.part(beside, suspect, heirs, name, now)
                text = f"what {name(suspect)} sent is not what {name(beside)} received: {done}"
            case "digest":
                text = f"{name(suspect)} holds another sum than others: {self._again(cause, suspect, heirs, name, now)}"
            case _:
                done = self._contributed(suspect, heirs, name, now, spare)
                if not done:
                    return Verdict(f"step {step} cannot be computed: {_NOT_FINITE}", hopeless=True)
                text = f"{name(suspect)} contributes what is not finite, or absurdly large: {done}"
        return Verdict(f"step {step} was not applied: {text}")

    def _contributed(self, suspect: str, heirs: Reports, name: Callable[[str], str], now: float, spare: bool) -> str:
        """What is done about it; empty where nothing can be."""
        before = self._suspects["contribution"]
        others = set(before) - {suspect}
        alone = not set(heirs) - {suspect}
        if not others and alone and spare and len(before) > 1 and self._sought < SOUGHT:
            self.care, self.company = Care.AUDITED, True
            self._sought += 1
            return "it is computed again, as soon as another worker is ready to do it, too"
        if self.care is Care.LENIENT:
            return ""
        if not others and not (alone and len(before) > 1):
            return self._again("contribution", suspect, heirs, name, now)
        for peer_id in others:
            self._bench.absolve(peer_id)
        self.care = Care.LENIENT
        return "as did whoever computed it before, so the data is like that, and it is applied if it is finite"

    def _again(self, cause: str, suspect: str, heirs: Reports, name: Callable[[str], str], now: float) -> str:
        if len(self._suspects[cause]) == 1 or len(heirs) == 1:
            return "it is computed again, and looked at closely"
        return self._links.sits_out(suspect, name, now)

    def _begin(self, step: int) -> None:
        self._step, self.care, self.company, self._sought = step, Care.USUAL, False, 0
        self._suspects.clear()


_NOT_FINITE = (
    "the gradient is not finite, whoever computes it; lower the learning rate, or go back to an older checkpoint "
    "(p2ptrain checkpoints restore)"
)
