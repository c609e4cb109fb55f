"""What a verifier expects of one drafter: its line, how often it is right, and when its next drafts come. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from roles.speculation import policy
from roles.speculation.drafting import GROUP
from roles.speculation.estimates import PRIOR_ALPHA, Acceptance, Pace
from roles.speculation.lines import Compared, Line

PROVEN = 16
"""Comparisons after which it is known how often a drafter is right."""
SHORTEST_REST, LONGEST_REST = 64, 1024
"""Tokens of text for which a drafter rests."""
SHORTEST_WAIT_S = 0.0005
"""Drafts that are not there are not there at once: without this, a wait that rounds to nothing would never end."""


class Outlook:
    """One drafter of a session.

    Attributes:
        line, pace, acceptance: what is known of it.
        resting: it is told not to draft. rests_until: tokens of text. useless: that is because it was of no use.
        paused: it is told so because all are.
        since: tokens of text when it began, or when it was last looked at. useful: drafts that passes took since.
    """

    def __init__(self, line: Line, pace: Pace, now: float) -> None:
        self.line = line
        self.pace = pace
        self.acceptance = Acceptance()
        self.resting = self.paused = False
        self.rests_until = 0
        self.useless = False
        self.since = line.told
        self.useful = 0
        self._rest = SHORTEST_REST
        self._heard_at = now  # when drafts came last
        self._told_at = now  # when the last verdict was sent
        self._ended_at: float | None = None  # when the verdict that ends its line was sent
        self._ended = 0  # and what was told by it
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
            if self._ended_at is not None:
                self.pace.restarted(now - self._ended_at - (len(tokens) - 1) * self.pace.step.seconds)
            self._ended_at = None
        elif position == end < self._free - len(tokens):
            self.pace.step.add((now - self._heard_at) / len(tokens))
        self._heard_at = now
        self.acceptance.add(compared.agreed, failed=compared.failed)
        return fault, compared

    def grew(self, tokens: Sequence[int]) -> Compared:
        """As of ``Line``, and counted."""
        compared = self.line.grew(tokens)
        self.acceptance.add(compared.agreed, failed=compared.failed)
        return compared

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
        """It is to draft, and shall show anew how often it is right."""
        self.resting = self.useless = False
        self.acceptance = Acceptance(max(self.acceptance.alpha, PRIOR_ALPHA))
        self.since, self.useful = size, 0

    def renew(self, size: int) -> None:
        """It was of use; it is looked at again later."""
        self.since, self.useful = size, 0
        self._rest = SHORTEST_REST

    def rest(self, size: int, *, useless: bool) -> None:
        """It is not to draft for a while, which is twice as long each time."""
        self.resting, self.useless = True, useless
        self.rests_until = size + self._rest
        self._rest = min(2 * self._rest, LONGEST_REST)

    def pause(self, size: int, *, paused: bool) -> None:
        """All drafters pause, or go on."""
        self.paused = paused
        self.since, self.useful = size, 0

    @property
    def silent(self) -> bool:
        """It is not to draft now."""
        return self.resting or self.paused

    @property
    def depth(self) -> int:
        """Drafts beyond what is verified that it is to make."""
        if self.silent:
            return 0
        return policy.depth_for(self.acceptance.alpha, least_use=policy.LEAST_USE, most=policy.MOST_DRAFTS)

    # ---------------------------------------------------------------------------------------------- what it will say

    def idle(self, size: int) -> bool:
        """Whether the drafter does nothing of use until it hears of the text's ``size`` tokens."""
        line = self.line
        if self.silent:
            return False
        if line.dead:
            return self._ended_at is None
        return max(line.end, size) + GROUP > line.told + line.depth

    def verdict(self, size: int, now: float) -> tuple[int, int, int]:
        """As of ``Line``."""
        self._free = self.line.told + self.line.depth
        told = self.line.verdict(size, self.depth)
        self._told_at = now
        if self.line.dead and self._ended_at is None:
            self._ended_at, self._ended = now, size
        return told

    @property
    def anew_s(self) -> float:
        """That it takes the drafter to begin a line anew and have some drafts of it there."""
        return self.pace.restart_s + 2 * GROUP * self.pace.step.seconds

    def waits_s(self, size: int, most: int, now: float) -> list[float]:
        """Until there is one draft behind the text's ``size`` tokens, two, and so on, as far as it is known."""
        line, step_s = self.line, self.pace.step.seconds
        waits = [0.0] * min(len(line.ahead), most)
        stop = min(size + most, line.told + line.depth)
        if line.dead:
            if self._ended_at is None:
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
