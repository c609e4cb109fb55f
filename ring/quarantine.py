"""Whom to keep out of the next view for a while. Pure; ``now`` is passed in.

Rules
    1. One back-off for all reasons: a peer that must sit out again before it was quiet for ten times as long as it sat
       out last sits out twice as long; after that it starts afresh. A new connection of a peer changes nothing.
    2. A step that the members refused names a suspect, who sits out: its contribution is not finite or an outlier, its
       sum differs from most others', or its right neighbour received other bytes than it sent (exact mode).
    3. When a second member contributes the same, the data is the cause; so it is when the same one does again and there
       is nobody else. Who sat out for it is absolved, and the next view is *lenient*: the step is applied if it is
       finite. If it is refused even then, nobody can compute it, and the job has failed.
    4. When a link breaks twice without a committed step in between, the suspect sits out. A death explains any break.
    5. A member that dies again and again is let in ever more rarely.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from ring.coordination import Reports

CAUSES = frozenset({"contribution", "digest", "hop"})
"""Values of ``Report.cause`` that say that a step was refused."""
QUIET = 10
"""So many times its last time out a peer must have been quiet to be forgiven."""
FIRST_FALL_S = 1.0
"""Less than what a ring loses by a death and a newcomer is not worth keeping anybody out for."""

_NOT_FINITE = (
    "the gradient is not finite, whoever computes it; lower the learning rate, or go back to an older checkpoint "
    "(p2ptrain checkpoints restore)"
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why a ring broke. ``text``: for people. ``hopeless``: nobody can compute the step."""

    kind: str
    text: str
    hopeless: bool = False


class Quarantine:
    """Remembers what is held against the peers of one job.

    Args:
        cooldown_s: first time out.

    Attributes:
        out: who should be in no view.
        lenient: whether the next view applies an outlier.
        broken: whether the ring of the present view is.
        fallen: members of the present view that are gone, which explains any break; ``excused``: of those, who left
            on purpose, or only lost the state that it was being given.
    """

    def __init__(self, cooldown_s: float) -> None:
        self.out: set[str] = set()
        self.lenient = self.broken = False
        self.fallen: set[str] = set()
        self.excused: set[str] = set()
        self._cooldown_s = cooldown_s
        self._last: dict[str, tuple[float, float]] = {}  # how long it sat out last, and until when
        self._first: tuple[str, str] | None = None  # reporter and suspect of a break; later ones are its wake
        self._strikes: Counter[frozenset[str]] = Counter()
        self._step = 0  # the one that was refused, counted as applied
        self._contributors: list[str] = []  # who brought what was refused, at that step

    # --------------------------------------------------------------------------------------------------------- back-off

    def next(self) -> list[float]:
        return [self._last[peer_id][1] for peer_id in self.out]

    def expire(self, now: float) -> None:
        self.out = {peer_id for peer_id in self.out if self._last[peer_id][1] > now}
        self._last = {key: last for key, last in self._last.items() if key in self.out or not self._forgiven(key, now)}

    def _forgiven(self, peer_id: str, now: float) -> bool:
        seconds, until = self._last.get(peer_id, (0.0, -math.inf))
        return now - until >= QUIET * max(seconds, FIRST_FALL_S)

    def flapping(self, back: Collection[str], now: float) -> Iterator[tuple[str, float]]:
        """Of the members that fell, and are not ``back``: those that did so again, and how long they are kept out."""
        for peer_id in sorted(self.fallen - self.excused - set(back)):
            if self._forgiven(peer_id, now):
                self._last[peer_id] = 0.0, now
            else:
                yield peer_id, self._sits_out(peer_id, now, FIRST_FALL_S, max(FIRST_FALL_S, self._cooldown_s))

    def _sits_out(self, peer_id: str, now: float, first_s: float, most_s: float) -> float:
        again = not self._forgiven(peer_id, now)
        seconds = min(max(2 * self._last[peer_id][0], first_s), most_s) if again else first_s
        self._last[peer_id] = seconds, now + seconds
        self.out.add(peer_id)
        return seconds

    # --------------------------------------------------------------------------------------------------------- verdicts

    def reported(self, reporter: str, suspect: str) -> None:
        self._first = self._first or (reporter, suspect)

    def committed(self, step: int) -> None:
        self._strikes.clear()
        if step >= self._step:
            self._contributors.clear()
            self._step, self.lenient = 0, False

    def judge(self, survivors: Reports, began_at: int, name: Callable[[str], str], now: float) -> Verdict | None:
        """All stand still. Returns why, and what is done about it; mostly None.

        Args:
            survivors: the members that live. began_at: the step at which the view began. name: of a peer.
        """
        return self._refusal(survivors, name, now) or self._broken_link(survivors, began_at, name, now)

    def _refusal(self, survivors: Reports, name: Callable[[str], str], now: float) -> Verdict | None:
        told = Counter(
            (report.applied + 1, report.cause, report.suspect, report.beside)
            for report in survivors.values()
            if report.status == "broken" and report.cause in CAUSES and report.suspect
        )
        if not told:
            return None  # whoever lost its neighbour meanwhile may not have seen the vote: one that did is enough
        step, cause, suspect, beside = min(told, key=lambda it: (it[1] != "hop", -told[it], it))
        if step != self._step:
            self.committed(self._step)
            self._step = step
        if cause == "contribution":
            if self.lenient:
                return Verdict("step-refused", f"step {step} cannot be computed: {_NOT_FINITE}", hopeless=True)
            alone = not survivors.keys() - {suspect}
            others = set(self._contributors) - {suspect}
            self.lenient = bool(others) or (alone and suspect in self._contributors)
            self._contributors.append(suspect)
            what = f"{name(suspect)} contributes what is not finite, or absurdly large"
            if self.lenient:
                for peer_id in others:
                    self.out.discard(peer_id)
                    self._last.pop(peer_id, None)
                done = "as did whoever computed it before, so the data is like that, and it is applied if it is finite"
                return Verdict("step-refused", f"step {step} was not applied: {what}: {done}")
        elif cause == "hop":
            what = f"what {name(suspect)} sent is not what {name(beside)} received"
        else:
            what = f"{name(suspect)} holds another sum than others"
        return Verdict("step-refused", f"step {step} was not applied: {what}: {self._excluded(suspect, name, now)}")

    def _broken_link(self, survivors: Reports, began_at: int, name: Callable[[str], str], now: float) -> Verdict | None:
        if self._first is None:
            return None
        if any(report.applied > began_at for report in survivors.values()):
            self._strikes.clear()
        reporter, suspect = self._first
        if self.fallen or reporter == suspect or not {reporter, suspect} <= set(survivors):
            return None
        edge = frozenset({reporter, suspect})
        self._strikes[edge] += 1
        if self._strikes[edge] < 2:
            return None
        del self._strikes[edge]
        text = f"the link between {name(reporter)} and {name(suspect)} keeps breaking"
        return Verdict("link", f"{text}: {self._excluded(suspect, name, now)}")

    def _excluded(self, suspect: str, name: Callable[[str], str], now: float) -> str:
        seconds = self._sits_out(suspect, now, self._cooldown_s, 600.0)
        return f"{name(suspect)} sits out {seconds:.0f} s"

    def view_began(self) -> None:
        self.broken, self._first = False, None
        self.fallen.clear()
        self.excused.clear()
