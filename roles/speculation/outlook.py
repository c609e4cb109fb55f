"""What a verifier expects of one drafter: its line, how often it is right, and when its next drafts come. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from roles.speculation import policy
from roles.speculation.drafting import GROUP
from roles.speculation.estimates import PRIOR_ALPHA, Acceptance
from roles.speculation.experience import Known
from roles.speculation.lines import Compared, Line

PROVEN = 16
"""Comparisons after which it is known how often a drafter is right."""
SHORTEST_REST, LONGEST_REST = 64, 1024
"""Tokens of text for which one rests that is not the best."""
FORGOTTEN = 32
"""Tokens of a rest after which a drafter shows anew how often it is right: the text has changed."""
LEAST_ALPHA, MOST_ALPHA = 0.3, 0.95
"""What is expected of a drafter, at least and at most, in a new text, by what it did in others."""
LONGEST_STOP_S = 1.0
"""That a drafter is thought to work on when it was told to rest: it may say what it likes of how long a draft takes."""
SHORTEST_WAIT_S = 0.0005
"""Drafts that are not there are not there at once: without this, a wait that rounds to nothing would never end."""


class Outlook:
    """One drafter of a session.

    Args:
        known: of the drafter, from all texts. picked: how the tokens of this one are, as of ``Experience.worth``.

    Attributes:
        line, pace, acceptance: what is known of it; acceptance is that in this text.
        resting: it is told not to draft. rests_until: tokens of text.
    """

    def __init__(self, line: Line, known: Known, now: float, *, resting: bool, picked: str = "") -> None:
        self.line = line
        self.pace = known.pace
        self.resting = resting
        self.rests_until = 0
        self._before = known.acceptance[picked]
        alpha = self._before.alpha
        self.acceptance = Acceptance(min(max(alpha, LEAST_ALPHA), MOST_ALPHA))
        self._rested_at = line.told  # tokens of text
        self._rest = SHORTEST_REST
        self._heard_at = now  # when drafts came last
        self._told_at = now  # when the last verdict was sent
        self._ended_at: float | None = None  # when the verdict was sent upon which its next line begins
        self._ended = 0  # and what was told by it
        self._steady = True  # it drafted until then
        self._free = line.told + line.depth  # up to here it may have drafted before it hears the last verdict

    def receive_untrusted(
        self, epoch: int, position: int, tokens: Sequence[int], text: Sequence[int], now: float
    ) -> tuple[str, Compared]:
        """As of ``Line``, and measured."""
        line = self.line
        before, end = line.epoch, line.end
        fault, compared = line.receive_untrusted(epoch, position, tokens, text)
        if fault or line.epoch != epoch or (line.dead and not compared.failed):
            return fault, compared
        if epoch != before:
            if self._ended_at is not None and self._steady:
                self.pace.restarted(now - self._ended_at - (len(tokens) - 1) * self.pace.step.seconds)
            self._ended_at = None
        elif position == end < self._free - len(tokens):
            self.pace.step.add((now - self._heard_at) / len(tokens))
        self._heard_at = now
        self._compared(compared)
        return fault, compared

    def grew(self, tokens: Sequence[int]) -> Compared:
        """As of ``Line``, and counted."""
        compared = self.line.grew(tokens)
        self._compared(compared)
        return compared

    def _compared(self, compared: Compared) -> None:
        for acceptance in (self.acceptance, self._before):
            acceptance.add(compared.agreed, failed=compared.failed)

    # ----------------------------------------------------------------------------------------------- work and rest

    @property
    def proven(self) -> bool:
        """It is known how often it is right."""
        return self.acceptance.count >= PROVEN

    def token_s(self, step_s: float) -> float:
        """What a token costs with it, roughly: a draft, or where that is wrong a new line and more than a pass."""
        alpha = self.acceptance.alpha
        wrong_s = self.pace.restart_s + 1.4 * step_s
        return alpha * self.pace.step.seconds + (1 - alpha) * wrong_s

    def begin(self, size: int) -> None:
        """It is to draft. After a long rest it shall show anew how often it is right."""
        self.resting = False
        if size - self._rested_at >= FORGOTTEN:
            self.acceptance = Acceptance(max(self.acceptance.alpha, PRIOR_ALPHA))

    def rest(self, size: int) -> None:
        """It is not to draft."""
        self.resting = True
        self._rested_at = size

    def lag(self, size: int) -> None:
        """Another is better: it rests, twice as long each time."""
        self.rest(size)
        self.rests_until = size + self._rest
        self._rest = min(2 * self._rest, LONGEST_REST)

    @property
    def stops_s(self) -> float:
        """From when it is told to rest, until it does nothing any more."""
        return self.pace.latency_s + min(2 * self.pace.step.seconds, LONGEST_STOP_S)

    @property
    def depth(self) -> int:
        """Drafts beyond what is verified that it is to make."""
        if self.resting:
            return 0
        return policy.depth_for(self.acceptance.alpha, least_use=policy.LEAST_USE, most=policy.MOST_DRAFTS)

    # ---------------------------------------------------------------------------------------------- what it will say

    def verdict(self, size: int, now: float) -> tuple[int, int, int]:
        """As of ``Line``."""
        line, rested = self.line, not self.line.depth
        self._free = line.told + line.depth
        told = line.verdict(size, self.depth)
        self._told_at = now
        if line.dead and line.depth and (self._ended_at is None or rested):
            self._ended_at, self._ended, self._steady = now, size, not rested
        return told

    @property
    def anew_s(self) -> float:
        """That it takes the drafter to begin a line anew and have some drafts of it there."""
        return self.pace.restart_s + 2 * GROUP * self.pace.step.seconds

    def late(self, size: int) -> int:
        """Drafts that come before those behind the text's ``size`` tokens, as far as it is known."""
        return max(0, size - (self._ended if self.line.dead else self.line.end))

    def waits_s(self, size: int, most: int, now: float) -> list[float]:
        """Until there is one draft behind the text's ``size`` tokens, two, and so on, as far as it is known."""
        line, step_s = self.line, self.pace.step.seconds
        waits = [0.0] * min(len(line.ahead), most)
        stop = min(size + most, line.told + line.depth)
        if line.dead:
            if self._ended_at is None or not line.depth:
                return waits
            first, since = self._ended, self._ended_at + self.pace.restart_s - step_s
        else:
            first, since = line.end, self._heard_at
        overdue = 0.0
        for position in range(size + len(waits), stop):
            due = since + (position - first + 1) * step_s
            if position >= self._free:
                due = max(due, self._told_at + 2 * self.pace.latency_s)
            if due <= now:  # it was expected by now: the longer ago, the longer it will take yet
                overdue = max(overdue, now - due, SHORTEST_WAIT_S)
            waits.append(max(due - now, SHORTEST_WAIT_S) + overdue)
        return waits
