"""Which peers to exclude from the next view for a while. Pure; ``now`` is passed in.

Rules
    1. One back-off serves all reasons. A peer that is excluded again before it was quiet for ten times its last
       exclusion is excluded for twice as long. After that it starts afresh. A new connection changes nothing.
    2. A step that the members refused names a suspect, which is excluded: its contribution is an outlier or not finite,
       its sum differs from most others', it told a figure that the others know to be false, or its right neighbour
       received other bytes than it sent (exact mode). A contribution is the work of a whole replica, so all its members
       are excluded.
    3. If a second replica contributes the same, the data is the cause. The same holds if one replica does so again and
       is alone. The excluded members are absolved, and the next view is *lenient*: it applies the step if it is finite.
       If then again two replicas fail, or the only one, no member can compute the step, and the job fails.
    4. If the sum is wrong and no member told so, the step is repeated, and then tried without one replica after the
       other. Without the culprit it is committed: that one stays excluded, and the others are absolved. Sums with masks
       are not tried, because two of them would show a contribution: the job pauses.
    5. A break names two members: the suspect, and the one that noticed. Either may be at fault. So the next ring runs
       the other way round, and gives both other neighbours. The member that two breaks have in common is excluded; of
       the same two again, the suspect. Breaks count until a step is committed; those by bytes that break the protocol,
       or that a living member withholds, for ``QUIET`` cooldowns. If a suspect itself names another member, as it waits
       for that one, it is not at fault. A death explains any break.
    6. A member that dies repeatedly is excluded for longer each time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from ring.coordination import Emit, Reports, Roster
from ring.view import View
from wire.address import how_to_open
from wire.job_messages import Report

CAUSES = frozenset({"contribution", "digest", "hop", "figure"})
"""Values of ``Report.cause`` for a refused step."""
WRONG = frozenset({"protocol", "stalled"})
"""Values of ``Report.cause`` of breaks that no network explains."""
DIAL = "dial"
"""The ``Report.cause`` of a member that the reporter could not connect to."""
QUIET = 10
"""How long a peer must be quiet to be forgiven, as a multiple of its last exclusion."""
COOLDOWN_S, MOST_EXCLUDED_S = 30.0, 600.0
"""First exclusion, which doubles each time, and the longest."""
FIRST_FALL_S = 1.0
"""First exclusion after repeated deaths. A death and a newcomer cost a ring about as much, so less is no use."""

_NOT_FINITE = (
    "the gradient is not finite on any worker; lower the learning rate, or go back to an older checkpoint "
    "(p2ptrain checkpoints restore)"
)


@dataclass(frozen=True, slots=True)
class Exclusion:
    """Why a ring broke. ``text``: for people. ``hopeless``: no member can compute the step. ``pauses``: a person must
    find the member at fault."""

    kind: str
    text: str
    hopeless: bool = False
    pauses: bool = False


@dataclass(frozen=True, slots=True)
class LinkBreak:
    """Two members whose link broke. ``wrong``: by a cause in ``WRONG``."""

    ends: frozenset[str]
    at: float
    wrong: bool


class Exclusions:
    """Which peers of a job are excluded, why and until when. A peer that is excluded again stays out for longer."""

    def __init__(self) -> None:
        self.out: set[str] = set()  # these should be in no view
        self._last: dict[str, tuple[float, float]] = {}  # length of the last exclusion, and its end
        self._why: dict[str, str] = {}

    def next(self) -> list[float]:
        return [self._last[peer_id][1] for peer_id in self.out]

    def expire(self, now: float) -> None:
        self.out = {peer_id for peer_id in self.out if self._last[peer_id][1] > now}
        self._why = {key: why for key, why in self._why.items() if key in self.out}
        self._last = {
            key: last for key, last in self._last.items() if key in self.out or not self.is_forgiven(key, now)
        }

    def reason(self, peer_id: str) -> tuple[str, float]:
        """Why a peer of ``out`` is excluded, and until when."""
        return f"it is excluded: {self._why[peer_id]}", self._last[peer_id][1]

    def is_forgiven(self, peer_id: str, now: float) -> bool:
        seconds, until = self._last.get(peer_id, (0.0, -math.inf))
        return now - until >= QUIET * max(seconds, FIRST_FALL_S)

    def note_fall(self, peer_id: str, now: float) -> None:
        """Note a first death: it excludes nobody, but the next one does."""
        self._last[peer_id] = 0.0, now

    def add(self, peer_id: str, why: str, now: float, first_s: float, most_s: float) -> float:
        """Exclude a peer for ``first_s``, or for twice as long as before, up to ``most_s``. Returns the seconds."""
        again = not self.is_forgiven(peer_id, now)
        seconds = min(max(2 * self._last[peer_id][0], first_s), most_s) if again else first_s
        self._last[peer_id], self._why[peer_id] = (seconds, now + seconds), why
        self.out.add(peer_id)
        return seconds

    def absolve(self, peer_ids: Collection[str]) -> None:
        self.out.difference_update(peer_ids)
        for peer_id in peer_ids:
            self._last.pop(peer_id, None)


class Quarantine:
    """Keeps the faults of one job's peers.

    Args:
        masked: nobody sees the contribution of one member (``roles.strategies.secure``).
        witnesses: members that must report alike why a step was refused, so that no lone member accuses another.

    Attributes:
        lenient: whether the next view applies an outlier.
        broken: whether the current view's ring broke.
        fallen: members of the current view that are gone, which explains any break. ``excused``: members of ``fallen``
            that left on purpose, or only lost a state that they were fetching.
    """

    def __init__(self, *, masked: bool = False, witnesses: int = 2) -> None:
        self.exclusions = Exclusions()
        self.lenient = self.broken = False
        self.fallen: set[str] = set()
        self.excused: set[str] = set()
        self._masked, self._witnesses = masked, witnesses
        self._accused: dict[str, Report] = {}  # by the member that noticed the break, in the order of the reports
        self._breaks: list[LinkBreak] = []
        self._step = 0  # the refused step; applied steps count from 1
        self._contributors: set[str] = set()  # the members whose contributions to that step were refused
        self._tried: list[str] | None = None  # those without which that step was tried; None: it was not repeated yet
        self._tries: list[str] = []  # those without which it is tried now

    def exclude_repeated_deaths(self, back: Collection[str], view: View, now: float) -> Iterator[Emit]:
        """Exclude those of the ``fallen`` members of ``view`` that are not ``back`` and died repeatedly."""
        for peer_id in sorted(self.fallen - self.excused - set(back)):
            if self.exclusions.is_forgiven(peer_id, now):
                self.exclusions.note_fall(peer_id, now)
            else:
                why = "it died repeatedly"
                seconds = self.exclusions.add(peer_id, why, now, FIRST_FALL_S, COOLDOWN_S)
                text = f"{view.name_of(peer_id)} is excluded for {seconds:.0f} s: {why}"
                yield Emit("warning", "flapping", text, peer_id)
        self.fallen.clear()  # each death counts once, also if no view can be formed now

    # --------------------------------------------------------------------------------------------------------- verdicts

    @property
    def turned(self) -> bool:
        """Whether the next ring runs the other way round."""
        return len(self._breaks) % 2 == 1

    def take_report(self, reporter: str, report: Report) -> None:
        noticed = report.beside or reporter
        if report.suspect and (noticed not in self._accused or noticed == reporter):  # else it repeats what it heard
            self._accused[noticed] = report

    def take_commit(self, step: int) -> None:
        self._forget_links()
        if step >= self._step:
            self._contributors.clear()
            self._step, self.lenient, self._tried, self._tries = 0, False, None, []

    def judge(self, survivors: Reports, view: View, roster: Roster, now: float) -> Exclusion | None:
        """Judge a break of ``view`` once all members are stopped. Returns the cause and the consequence; usually None.
        ``survivors``: the living members."""
        return self._judge_refusal(survivors, view, roster, now) or self._judge_link(survivors, view, now)

    def _judge_refusal(self, survivors: Reports, view: View, roster: Roster, now: float) -> Exclusion | None:
        votes = Counter(
            (report.applied + 1, report.cause, report.suspect, report.beside)
            for report in survivors.values()
            if report.status == "broken" and report.cause in CAUSES
        )
        agreed = {vote: count for vote, count in votes.items() if count >= min(self._witnesses, view.size)}
        if not agreed:
            return None  # members that lost a neighbour may not have seen the vote
        step, cause, suspect, other_end = min(agreed, key=lambda vote: (vote[1] != "hop", -agreed[vote], vote))
        if step != self._step:
            self.take_commit(self._step)
            self._step = step
        self.exclusions.absolve(self._tries)
        self._tries = []
        if not suspect:
            return self._judge_untraced(step, view, now)
        suspects, name = [suspect], view.name_of
        if cause == "contribution":
            if (rank := view.rank_of(suspect)) is not None:
                suspects = [member.peer_id for member in view.replica(rank)]
            what = f"{'+'.join(map(name, suspects))} sent gradients that are not finite or are outliers"
            alone = not roster.whole({key: report for key, report in survivors.items() if key not in suspects})
            if verdict := self._judge_data(step, suspects, what, alone=alone):
                return verdict
        elif cause == "figure":
            what = f"{name(suspect)} told what the other members know to be false"
        elif cause == "hop":
            what = f"{name(other_end)} received other bytes than {name(suspect)} sent"
        else:
            what = f"{name(suspect)} holds another sum than the other members"
        done = self._exclude(suspects, what, view, now)
        return Exclusion("step-refused", f"step {step} was not applied: {what}: {done}")

    def _judge_data(self, step: int, suspects: list[str], what: str, *, alone: bool) -> Exclusion | None:
        """Rule 3: whether the data is the cause, rather than the replica of ``suspects``, which may be ``alone``."""
        others = self._contributors.difference(suspects)
        confirmed = bool(others) or (alone and not self._contributors.isdisjoint(suspects))
        if self.lenient and confirmed:
            return Exclusion("step-refused", f"step {step} cannot be computed: {_NOT_FINITE}", hopeless=True)
        self._contributors = {*suspects} if alone else self._contributors.union(suspects)
        if not confirmed:
            return None
        self.lenient = True
        self.exclusions.absolve(others)
        if not alone:
            self._contributors.clear()
        done = "another worker sent the same, so the data is the cause; the step is applied if it is finite"
        return Exclusion("step-refused", f"step {step} was not applied: {what}: {done}")

    def _judge_untraced(self, step: int, view: View, now: float) -> Exclusion:
        """Rule 4."""
        text = f"step {step} was not applied: the sum is not finite or an outlier, and no member told that it caused it"
        if self._masked:
            asked = ", ".join(member.name for member in view.members)
            text = f"{text}, and masks hide whose it is: ask who runs {asked}"
        if self._tried is None:
            self._tried = []
            return Exclusion("step-refused", f"{text}; it may be damage in transit, so it is computed again")
        if self._masked:
            self._tried = None
            return Exclusion("step-refused", text, pauses=True)
        left = [rank for rank, member in enumerate(view.members) if member.peer_id not in self._tried]
        if not left:
            return Exclusion("step-refused", f"step {step} cannot be computed: {_NOT_FINITE}", hopeless=True)
        self._tries = [member.peer_id for member in view.replica(left[0])]
        self._tried += self._tries
        return Exclusion("step-refused", f"{text}: it is tried without: {self._exclude(self._tries, text, view, now)}")

    def _judge_link(self, survivors: Reports, view: View, now: float) -> Exclusion | None:
        """Rule 5."""
        if not self._accused:
            return None
        if any(report.applied > view.step for report in survivors.values()):
            self._forget_links()
        noticed, report = next(iter(self._accused.items()))
        followed = {noticed}  # from each member to the one that it waits for, to the first that accuses nobody
        while report.suspect in self._accused and report.suspect not in followed:
            followed.add(noticed := report.suspect)
            report = self._accused[noticed]
        ends = frozenset({noticed, report.suspect})
        if self.fallen or len(ends) < 2 or not ends <= set(survivors):
            return None
        by_an_end = [claim for key, claim in self._accused.items() if frozenset({key, claim.suspect}) == ends]
        report = min(by_an_end, key=lambda claim: claim.cause not in WRONG)
        self._breaks = [known for known in self._breaks if known.at > now - QUIET * COOLDOWN_S]
        common = next((known.ends & ends for known in reversed(self._breaks) if known.ends & ends), None)
        if common is None:
            self._breaks.append(LinkBreak(ends, now, report.cause in WRONG))
            return None
        culprit = next(iter(common)) if len(common) == 1 else report.suspect
        self._breaks = [known for known in self._breaks if culprit not in known.ends]
        text = f"the link between {' and '.join(sorted(map(view.name_of, ends)))} keeps breaking"
        if len(common) == 1:
            text = f"the links of {view.name_of(culprit)} to two neighbours broke one after the other"
        if report.cause in WRONG or report.cause == DIAL:
            text += f" ({report.reason})"
        if report.cause == DIAL and (rank := view.rank_of(report.suspect)) is not None:
            text += f". On {view.members[rank].name}'s machine: {how_to_open(view.members[rank].port)}"
        return Exclusion("link", f"{text}: {self._exclude([culprit], text, view, now)}")

    def _forget_links(self) -> None:
        self._breaks = [known for known in self._breaks if known.wrong]

    def _exclude(self, suspects: Sequence[str], why: str, view: View, now: float) -> str:
        seconds = max([self.exclusions.add(suspect, why, now, COOLDOWN_S, MOST_EXCLUDED_S) for suspect in suspects])
        return f"{'+'.join(map(view.name_of, suspects))} is excluded for {seconds:.0f} s"

    def view_began(self) -> None:
        self.broken = False
        self._accused.clear()
        self.fallen.clear()
        self.excused.clear()
