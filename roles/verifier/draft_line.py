"""What a verifier knows of one drafter's session: its line of drafts, and the verdicts sent to it. Pure.

A line is what a drafter drafted after the tokens that it knew to be verified. Its *epoch* is the number of the verdict
that began it, 0 for the opening. The verifier compares the line with the text as both grow. If they differ, the line is
*dead*. A verdict tells the drafter, which cuts its line and begins a new one. The new line's epoch is that verdict's
number, and it starts where that verdict's tokens end or later. Until then the drafts of the dead line are dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from roles.drafter.drafting import GROUP
from roles.verifier.cost_model import DrafterModel

SHORTEST_WAIT_S = 0.0005
"""Shortest wait for a missing draft: a wait that rounds to zero would never end."""


class Line:
    """One drafter's line and verdicts in one text.

    Args:
        told: number of tokens that the drafter was opened with. depth: drafts beyond them that it may make.
        model: averages of the drafter, which this line updates.

    Attributes:
        told: tokens of the text that were sent to the drafter.
        depth: depth in the last verdict; 0: the drafter rests. number: number of the last verdict.
        epoch: epoch of the line. dead: the line contradicts the text.
        ahead: drafts of the line from the end of the text on.
        wasted: drafts that were wrong or based on a wrong token.
    """

    def __init__(self, told: int, depth: int, model: DrafterModel, now: float = 0.0) -> None:
        self.told, self.depth, self.model = told, depth, model
        self.number = self.epoch = 0
        self.dead = False
        self.ahead: deque[int] = deque()
        self.wasted = 0
        self._end = self._matched = told  # next draft's position; position up to which line and text agree
        self._sizes = [told]  # size of the text at each verdict, by its number
        self._reach = depth  # drafts beyond ``told`` that may still arrive
        self._heard_at = self._told_at = now  # times of the last drafts and of the last verdict
        self._cut_at: float | None = None  # time of the verdict that ended the line
        self._cut_size = 0  # size of the text in that verdict
        self._free = told + depth  # it may draft up to here before the last verdict arrives

    # --------------------------------------------------------------------------------------------------------- drafts

    def receive_untrusted(
        self, epoch: int, position: int, tokens: Sequence[int], text: Sequence[int], now: float
    ) -> str:
        """Add drafts, and compare them with ``text``. Returns what is wrong with the message; empty if nothing is."""
        if not 0 <= epoch <= self.number:
            return f"drafts name verdict {epoch}, but the last one sent is {self.number}"
        if not tokens:
            return "drafts without a token"
        if not 0 <= position <= position + len(tokens) <= self.told + self._reach:
            return f"drafts end at position {position + len(tokens)}, but the limit is {self.told + self._reach}"
        if epoch < self.epoch:
            return f"drafts for verdict {epoch} arrived after drafts for verdict {self.epoch}"
        began = epoch > self.epoch
        if began:
            if not self._sizes[epoch] <= position <= self.told:
                return f"drafts start at position {position}, expected {self._sizes[epoch]} to {self.told}"
            self._drop()
            self.epoch, self.dead = epoch, False
        elif not self._end <= position <= max(self.told, self._end):
            return f"drafts continue at position {position}, expected {self._end}, or at most {self.told}"
        follows = not began and position == self._end
        self._end = position + len(tokens)
        if self.dead:
            self.wasted += len(tokens)
            return ""
        if began:
            self._cut_at = None
        elif follows and self._end < self._free:
            self.model.draft.add((now - self._heard_at) / len(tokens))
        self._heard_at = now
        known = text[position : self._end]
        agreed = next((at for at, token in enumerate(known) if token != tokens[at]), len(known))
        self._matched = min(position + agreed, len(text))
        if agreed < len(known):
            self.dead = True
            self.wasted += len(tokens) - agreed
            self._drop()
        else:
            self.ahead.extend(tokens[agreed:])
        self.model.compared(agreed, failed=self.dead)
        return ""

    def grew(self, tokens: Sequence[int]) -> None:
        """The text has grown by ``tokens``."""
        agreed, failed = 0, False
        for token in tokens:
            if not self.ahead or failed:
                break
            failed = self.ahead[0] != token
            if failed:
                self.dead = True
                self._drop()
            else:
                self.ahead.popleft()
                agreed += 1
        self._matched += agreed
        self.model.compared(agreed, failed=failed)

    def _drop(self) -> None:
        self.wasted += len(self.ahead)
        self.ahead.clear()

    # ------------------------------------------------------------------------------------------------------- verdicts

    def verdict(self, size: int, depth: int, now: float) -> tuple[int, int, int]:
        """Make a verdict that brings the drafter to ``size`` tokens of the text.

        Returns:
            The verdict's number, the position of its first token, and the number of drafts before it that it accepts.
        """
        rested = not self.depth
        self._free = self.told + self.depth
        start = max(self.told, self._matched)
        right = start - self.told
        self.number += 1
        self._reach = max(self._reach, depth)
        self.told, self.depth = size, depth
        self._sizes.append(size)
        self._told_at = now
        if self.dead and depth and (self._cut_at is None or rested):
            self._cut_at, self._cut_size = now, size
        return self.number, start, right

    # ----------------------------------------------------------------------------------------------------- prediction

    @property
    def anew_s(self) -> float:
        return self.model.restart_s + 2 * GROUP * self.model.draft.seconds

    def waits_s(self, size: int, most: int, now: float) -> list[float]:
        """Expected seconds until one draft beyond the text's ``size`` tokens is there, two, and so on, as far as
        predictable."""
        draft_s = self.model.draft.seconds
        waits = [0.0] * min(len(self.ahead), most)
        if self.dead:
            if self._cut_at is None or not self.depth:
                return waits
            first, since = self._cut_size, self._cut_at + self.model.restart_s - draft_s
        else:
            first, since = self._end, self._heard_at
        overdue = 0.0
        for position in range(size + len(waits), min(size + most, self.told + self.depth)):
            due = since + (position - first + 1) * draft_s
            if position >= self._free:
                due = max(due, self._told_at + 2 * self.model.latency_s)
            if due <= now:  # overdue: expect it to be as late again
                overdue = max(overdue, now - due, SHORTEST_WAIT_S)
            waits.append(max(due - now, SHORTEST_WAIT_S) + overdue)
        return waits

    def validate(self, size: int) -> None:
        assert self.told <= size
        assert self._matched <= min(size, self._end)
        assert self.depth <= self._reach
        assert len(self.ahead) <= self._reach
        assert not self.dead or not self.ahead
        assert self.dead or not self.ahead or self._end == size + len(self.ahead)
        assert self.epoch <= self.number == len(self._sizes) - 1
