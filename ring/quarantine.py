"""Decides which peers of a job are excluded from its next view, and for how long. Pure; ``now`` is passed in.

The coordinator calls ``judge`` when a ring broke and all its members have stopped and reported why.

Rules
    1. *Back-off*, one for all reasons: each exclusion lasts twice as long as the peer's last one, unless the peer was
       quiet for ten times that long in between. A new connection changes nothing.
    2. *Refused step with a suspect*: the suspect is excluded. Its contribution is an outlier or not finite, its sum
       differs from most others', or it sent a figure that the others know to be false. A contribution is the work of a
       whole replica, so all its members are excluded.
    3. *The data is the cause* if the contributions of two replicas to one step are refused, or twice those of the only
       replica. Its suspects are absolved, and the next view is *lenient*: it applies outliers that are finite. If the
       same happens again in lenient views, no member can compute the step, and the job fails.
    4. *Refused step without a suspect*: the sum is wrong, and no member reported that it caused it. The step is
       repeated, first with all members, then each time without another replica. If it is committed, the replica that
       was left out last stays excluded. With masked sums none is left out, because the difference of two sums would
       reveal a contribution: the job pauses.
    5. *Broken link*: either end may be at fault. The next ring runs the other way round, so that both ends get another
       neighbour. The member that two broken links have in common is excluded; if the same link broke twice, its
       suspect. A suspect that waits for another member in turn is not at fault. Members that died or left explain any
       break. A broken link counts until the next commit; if a member sent invalid bytes or withheld some, then for
       ``QUIET_FACTOR`` cooldowns.
    6. *Repeated deaths*: from the second on, each excludes the peer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ring.coordination import Emit, Reports, Roster
from ring.view import View
from wire.address import how_to_open
from wire.job_messages import Report

CAUSES = frozenset({"contribution", "digest", "figure"})
"""Values of ``Report.cause`` for a refused step."""
MISCONDUCT = frozenset({"protocol", "stalled"})
"""Values of ``Report.cause`` of a broken link that a bad network does not explain."""
DIAL = "dial"
"""The ``Report.cause`` of a member that the reporter could not connect to."""
QUIET_FACTOR = 10
"""How long a peer must be quiet to be forgiven, as a multiple of its last exclusion."""
COOLDOWN_S, MOST_EXCLUDED_S = 30.0, 600.0
"""First exclusion, which doubles each time, and the longest."""
DEATH_COOLDOWN_S = 1.0
"""First exclusion after repeated deaths. A death and a newcomer cost a ring about as much, so less is no use."""

_NOT_FINITE = (
    "the gradient is not finite on any worker; lower the learning rate, or go back to an older checkpoint "
    "(p2ptrain checkpoints restore)"
)


@dataclass(frozen=True, slots=True)
class BreakJudgement:
    """Why a ring broke, and what follows, as an event. ``fails_job``: no member can compute the step. ``pauses_job``:
    only a person can find the member at fault."""

    kind: str
    text: str
    fails_job: bool = False
    pauses_job: bool = False


@dataclass(slots=True)
class RefusedStep:
    """What happened to a step that the members refused.

    Attributes:
        contributors: members whose contributions were refused (rule 3). ``lenient``: apply outliers in the next view.
        is_repeated: whether it was repeated with all members (rule 4).
        left_out: members without which it is repeated now. ``all_left_out``: all that a repetition left out so far.
    """

    step: int = 0
    contributors: set[str] = field(default_factory=set)
    lenient: bool = False
    is_repeated: bool = False
    left_out: list[str] = field(default_factory=list)
    all_left_out: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class LinkBreak:
    """Two members whose link broke. ``misconduct``: by a cause in ``MISCONDUCT``."""

    ends: frozenset[str]
    at: float
    misconduct: bool


class Exclusion(NamedTuple):
    """The last exclusion of a peer: how long, until when, and why."""

    seconds: float
    until: float
    reason: str


class Exclusions:
    """Exclusions of a job's peers with back-off (rule 1). ``peer_ids``: these should be in no view."""

    def __init__(self) -> None:
        self.peer_ids: set[str] = set()
        self._last: dict[str, Exclusion] = {}  # also of peers that are excluded no more but not forgiven

    def next(self) -> list[float]:
        return [self._last[peer_id].until for peer_id in self.peer_ids]

    def expire(self, now: float) -> None:
        self.peer_ids = {peer_id for peer_id in self.peer_ids if self._last[peer_id].until > now}
        for peer_id in [*self._last]:
            if peer_id not in self.peer_ids and self.is_forgiven(peer_id, now):
                del self._last[peer_id]

    def reason(self, peer_id: str) -> tuple[str, float]:
        """Why a peer of ``peer_ids`` is excluded, and until when."""
        return f"it is excluded: {self._last[peer_id].reason}", self._last[peer_id].until

    def is_forgiven(self, peer_id: str, now: float) -> bool:
        last = self._last.get(peer_id)
        return last is None or now - last.until >= QUIET_FACTOR * max(last.seconds, DEATH_COOLDOWN_S)

    def note_death(self, peer_id: str, now: float) -> None:
        """Note a first death: it excludes nobody, but the next one does."""
        self._last[peer_id] = Exclusion(0.0, now, "it died")

    def add(self, peer_id: str, reason: str, now: float, first_s: float, most_s: float) -> float:
        """Exclude a peer for ``first_s``, or for twice as long as before, up to ``most_s``. Returns the seconds."""
        seconds = first_s
        if not self.is_forgiven(peer_id, now):
            seconds = min(max(2 * self._last[peer_id].seconds, first_s), most_s)
        self._last[peer_id] = Exclusion(seconds, now + seconds, reason)
        self.peer_ids.add(peer_id)
        return seconds

    def absolve(self, peer_ids: Collection[str]) -> None:
        self.peer_ids.difference_update(peer_ids)
        for peer_id in peer_ids:
            self._last.pop(peer_id, None)


class Quarantine:
    """Judges breaks of one job's rings, and excludes the members at fault.

    Args:
        masked: nobody sees the contribution of one member (``roles.strategies.secure``).
        witnesses: members that must report the same about a refused step, so that no lone member accuses another.

    Attributes:
        broken: whether the current view's ring broke.
        lost_members: members of the current view that died or left.
        excused_members: those of them that left on purpose, or only lost a state that they were fetching.
        refused: the newest step that was refused.
    """

    def __init__(self, *, masked: bool = False, witnesses: int = 2) -> None:
        self.exclusions = Exclusions()
        self.broken = False
        self.lost_members: set[str] = set()
        self.excused_members: set[str] = set()
        self.refused = RefusedStep()
        self._masked, self._witnesses = masked, witnesses
        self._accusations: dict[str, Report] = {}  # by the member that noticed the break, in the order of the reports
        self._breaks: list[LinkBreak] = []

    def exclude_repeated_deaths(self, survivors: Collection[str], view: View, now: float) -> Iterator[Emit]:
        """Exclude the lost members of ``view`` that died repeatedly (rule 6), unless they are back."""
        for peer_id in sorted(self.lost_members - self.excused_members - set(survivors)):
            if self.exclusions.is_forgiven(peer_id, now):
                self.exclusions.note_death(peer_id, now)
            else:
                seconds = self.exclusions.add(peer_id, "it died repeatedly", now, DEATH_COOLDOWN_S, COOLDOWN_S)
                text = f"{view.name_of(peer_id)} is excluded for {seconds:.0f} s: it died repeatedly"
                yield Emit("warning", "flapping", text, peer_id)
        self.lost_members.clear()  # each death counts once, also if no view can be formed now

    # --------------------------------------------------------------------------------------------------------- judging

    @property
    def reverses_ring(self) -> bool:
        """Whether the next ring runs the other way round (rule 5)."""
        return len(self._breaks) % 2 == 1

    def take_report(self, reporter: str, report: Report) -> None:
        noticed_by = report.beside or reporter
        # A member's own report counts more than what others repeat after it.
        if report.suspect and (noticed_by not in self._accusations or noticed_by == reporter):
            self._accusations[noticed_by] = report

    def take_commit(self, step: int) -> None:
        self._forget_links()
        if step >= self.refused.step:
            self.refused = RefusedStep(step)

    def judge(self, survivors: Reports, view: View, roster: Roster, now: float) -> BreakJudgement | None:
        """Judge a break of ``view``. ``survivors``: its living members. None: nobody is at fault as far as is known."""
        return self._judge_refusal(survivors, view, roster, now) or self._judge_link(survivors, view, now)

    def _judge_refusal(self, survivors: Reports, view: View, roster: Roster, now: float) -> BreakJudgement | None:
        votes = Counter(
            (report.applied + 1, report.cause, report.suspect)
            for report in survivors.values()
            if report.status == "broken" and report.cause in CAUSES
        )
        agreed = {vote: count for vote, count in votes.items() if count >= min(self._witnesses, view.size)}
        if not agreed:
            return None  # members that lost a neighbour may not have seen the vote
        step, cause, suspect = min(agreed, key=lambda vote: (-agreed[vote], vote))
        if step != self.refused.step:
            self._forget_links()
            self.refused = RefusedStep(step)
        self.exclusions.absolve(self.refused.left_out)
        self.refused.left_out = []
        if not suspect:
            return self._judge_untraced(view, now)
        suspects, name = [suspect], view.name_of
        if cause == "contribution":
            if (rank := view.rank_of(suspect)) is not None:
                suspects = [member.peer_id for member in view.replica(rank)]
            what = f"{'+'.join(map(name, suspects))} sent gradients that are not finite or are outliers"
            alone = not roster.whole({key: report for key, report in survivors.items() if key not in suspects})
            if judgement := self._judge_data(suspects, what, alone=alone):
                return judgement
        elif cause == "figure":
            what = f"{name(suspect)} told what the other members know to be false"
        else:
            what = f"{name(suspect)} holds another sum than the other members"
        done = self._exclude(suspects, what, view, now)
        return BreakJudgement("step-refused", f"step {step} was not applied: {what}: {done}")

    def _judge_data(self, suspects: list[str], what: str, *, alone: bool) -> BreakJudgement | None:
        """Rule 3. None: the replica of ``suspects`` is the cause. ``alone``: the others cannot form a replica."""
        refused = self.refused
        others = refused.contributors.difference(suspects)
        data_is_cause = bool(others) or (alone and not refused.contributors.isdisjoint(suspects))
        if refused.lenient and data_is_cause:
            text = f"step {refused.step} cannot be computed: {_NOT_FINITE}"
            return BreakJudgement("step-refused", text, fails_job=True)
        refused.contributors = {*suspects} if alone else refused.contributors.union(suspects)
        if not data_is_cause:
            return None
        refused.lenient = True
        self.exclusions.absolve(others)
        if not alone:
            refused.contributors.clear()  # in the lenient view two must fail again
        done = "another worker sent the same, so the data is the cause; the step is applied if it is finite"
        return BreakJudgement("step-refused", f"step {refused.step} was not applied: {what}: {done}")

    def _judge_untraced(self, view: View, now: float) -> BreakJudgement:
        """Rule 4."""
        refused, kind = self.refused, "step-refused"
        cause = "the sum is not finite or an outlier, and no member told that it caused it"
        text = f"step {refused.step} was not applied: {cause}"
        if self._masked:
            asked = ", ".join(member.name for member in view.members)
            text = f"{text}, and masks hide whose it is: ask who runs {asked}"
        if not refused.is_repeated:
            refused.is_repeated = True
            return BreakJudgement(kind, f"{text}; it may be damage in transit, so it is computed again")
        if self._masked:
            refused.is_repeated = False  # after the pause it starts afresh
            return BreakJudgement(kind, text, pauses_job=True)
        ranks = [rank for rank, member in enumerate(view.members) if member.peer_id not in refused.all_left_out]
        if not ranks:
            return BreakJudgement(kind, f"step {refused.step} cannot be computed: {_NOT_FINITE}", fails_job=True)
        refused.left_out = [member.peer_id for member in view.replica(ranks[0])]
        refused.all_left_out += refused.left_out
        done = self._exclude(refused.left_out, text, view, now)
        return BreakJudgement(kind, f"{text}: it is tried without: {done}")

    def _judge_link(self, survivors: Reports, view: View, now: float) -> BreakJudgement | None:
        """Rule 5."""
        if not self._accusations:
            return None
        if any(report.applied > view.step for report in survivors.values()):
            self._forget_links()
        ends = self._find_broken_link()
        if self.lost_members or len(ends) < 2 or not ends <= set(survivors):
            return None
        claims = [claim for accuser, claim in self._accusations.items() if frozenset({accuser, claim.suspect}) == ends]
        report = min(claims, key=lambda claim: claim.cause not in MISCONDUCT)
        earliest = now - QUIET_FACTOR * COOLDOWN_S
        self._breaks = [link_break for link_break in self._breaks if link_break.at > earliest]
        common = next((shared for link_break in reversed(self._breaks) if (shared := link_break.ends & ends)), None)
        if common is None:
            self._breaks.append(LinkBreak(ends, now, report.cause in MISCONDUCT))
            return None
        culprit = next(iter(common)) if len(common) == 1 else report.suspect
        self._breaks = [link_break for link_break in self._breaks if culprit not in link_break.ends]
        text = f"the link between {' and '.join(sorted(map(view.name_of, ends)))} keeps breaking"
        if len(common) == 1:
            text = f"the links of {view.name_of(culprit)} to two neighbours broke one after the other"
        if report.cause in MISCONDUCT or report.cause == DIAL:
            text += f" ({report.reason})"
        if report.cause == DIAL and (rank := view.rank_of(report.suspect)) is not None:
            text += f". On {view.members[rank].name}'s machine: {how_to_open(view.members[rank].port)}"
        return BreakJudgement("link", f"{text}: {self._exclude([culprit], text, view, now)}")

    def _find_broken_link(self) -> frozenset[str]:
        """The ends of the link that broke first. A member that waits for its neighbour accuses it, and so do those that
        wait for this member. So follow the accusations to the first suspect that accuses nobody."""
        accuser = next(iter(self._accusations))
        followed = {accuser}
        while (suspect := self._accusations[accuser].suspect) in self._accusations and suspect not in followed:
            followed.add(suspect)
            accuser = suspect
        return frozenset({accuser, suspect})

    def _forget_links(self) -> None:
        self._breaks = [link_break for link_break in self._breaks if link_break.misconduct]

    def _exclude(self, suspects: Sequence[str], reason: str, view: View, now: float) -> str:
        seconds = max(self.exclusions.add(peer_id, reason, now, COOLDOWN_S, MOST_EXCLUDED_S) for peer_id in suspects)
        return f"{'+'.join(map(view.name_of, suspects))} is excluded for {seconds:.0f} s"

    def view_began(self) -> None:
        self.broken = False
        self._accusations.clear()
        self.lost_members.clear()
        self.excused_members.clear()
