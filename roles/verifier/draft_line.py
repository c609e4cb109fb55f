"""What a verifier knows of one drafter's session: its line of drafts, and the verdicts sent to it. Pure.

A line is what a drafter drafted after the tokens that it knew to be verified. Its *epoch* is the number of the verdict
that began it, 0 for the opening. The verifier compares the line with the text as both grow. If they differ, the line is
*dead*. A verdict tells the drafter, which cuts its line and begins a new one. The new line's epoch is that verdict's
number, and it starts where that verdict's tokens end or later. Until then the drafts of the dead line are dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from p2ptrain.core.errors import ProtocolError
from roles.drafter.drafting import GROUP, DraftVerdict
from roles.verifier.cost_model import DrafterModel

SHORTEST_WAIT_S = 0.0005
"""Shortest wait for a missing draft: a wait that rounds to zero would never end."""


class SentVerdicts:
    """The verdicts sent to one drafter.

    Attributes:
        size: tokens of the text that the drafter knows, or will know without a further message.
        depth: in the last verdict: most drafts beyond them; 0: the drafter rests.
        number: number of the last verdict. sizes: ``size`` at each verdict, by its number.
        reach: drafts beyond ``size`` that may still arrive.
        free: the drafter may draft up to this position before the last verdict arrives.
        sent_at: time of the last verdict.
    """

    def __init__(self, size: int, depth: int, now: float) -> None:
        self.size, self.depth, self.number = size, depth, 0
        self.sizes = [size]
        self.reach = depth
        self.free = size + depth
        self.sent_at = now

    @property
    def limit(self) -> int:
        """Position up to which drafts may arrive."""
        return self.size + self.reach

    def add(self, size: int, depth: int, now: float) -> None:
        self.free = self.size + self.depth
        self.number += 1
        self.reach = max(self.reach, depth)
        self.size, self.depth = size, depth
        self.sizes.append(size)
        self.sent_at = now


class DraftLine:
    """One drafter's line in one text.

    Args:
        known: number of tokens that the drafter was opened with. depth: drafts beyond them that it may make.
        model: averages of the drafter, which this line updates.

    Attributes:
        epoch: epoch of the line. dead: the line contradicts the text.
        ahead: drafts of the line from the end of the text on.
        wasted: drafts that were wrong or based on a wrong token.
    """

    def __init__(self, known: int, depth: int, model: DrafterModel, now: float = 0.0) -> None:
        self.verdicts = SentVerdicts(known, depth, now)
        self.model = model
        self.epoch = 0
        self.dead = False
        self.ahead: deque[int] = deque()
        self.wasted = 0
        self._end = self._matched = known  # next draft's position; position up to which line and text agree
        self._drafts_at = now  # time of the last drafts
        self._cut_at: float | None = None  # time of the verdict that ended the line
        self._cut_size = 0  # size of the text in that verdict

    # --------------------------------------------------------------------------------------------------------- drafts

    def receive_untrusted(
        self, epoch: int, position: int, tokens: Sequence[int], text: Sequence[int], now: float
    ) -> None:
        """Add drafts, and compare them with ``text``. Raises ``ProtocolError``: no correct drafter sends them."""
        begins = self._check(epoch, position, tokens)
        if begins:
            self._waste_ahead()
            self.epoch, self.dead = epoch, False
        follows = not begins and position == self._end
        self._end = position + len(tokens)
        if self.dead:
            self.wasted += len(tokens)
            return
        if begins:
            self._cut_at = None
        elif follows:
            self.model.draft.add((now - self._drafts_at) / len(tokens))
        self._drafts_at = now
        known = text[position : self._end]
        agreed = next((at for at, token in enumerate(known) if token != tokens[at]), len(known))
        self._matched = min(position + agreed, len(text))
        if agreed < len(known):
            self.dead = True
            self.wasted += len(tokens) - agreed
            self._waste_ahead()
        else:
            self.ahead.extend(tokens[agreed:])
        self.model.add_comparison(agreed, failed=self.dead)

    def _check(self, epoch: int, position: int, tokens: Sequence[int]) -> bool:
        """Raise ``ProtocolError`` for drafts that no correct drafter sends. Returns whether they begin a new line."""
        verdicts, stop = self.verdicts, position + len(tokens)
        if not 0 <= epoch <= verdicts.number:
            raise ProtocolError(f"drafts name verdict {epoch}, but the last one sent is {verdicts.number}")
        if not tokens:
            raise ProtocolError("drafts without a token")
        if not 0 <= position <= stop <= verdicts.limit:
            raise ProtocolError(f"drafts end at position {stop}, but the limit is {verdicts.limit}")
        if epoch < self.epoch:
            raise ProtocolError(f"drafts for verdict {epoch} arrived after drafts for verdict {self.epoch}")
        if epoch > self.epoch:
            first = verdicts.sizes[epoch]
            if not first <= position <= verdicts.size:
                raise ProtocolError(f"drafts start at position {position}, expected {first} to {verdicts.size}")
            return True
        if not self._end <= position <= max(verdicts.size, self._end):
            raise ProtocolError(
                f"drafts continue at position {position}, expected {self._end}, or at most {verdicts.size}"
            )
        return False

    def compare_growth(self, tokens: Sequence[int]) -> None:
        """Compare the line with ``tokens``, by which the text has grown."""
        agreed, failed = 0, False
        for token in tokens:
            if not self.ahead or failed:
                break
            failed = self.ahead[0] != token
            if failed:
                self.dead = True
                self._waste_ahead()
            else:
                self.ahead.popleft()
                agreed += 1
        self._matched += agreed
        self.model.add_comparison(agreed, failed=failed)

    def _waste_ahead(self) -> None:
        self.wasted += len(self.ahead)
        self.ahead.clear()

    # ------------------------------------------------------------------------------------------------------- verdicts

    def make_verdict(self, text: Sequence[int], depth: int, now: float) -> DraftVerdict:
        """Make a verdict that brings the drafter to all tokens of the text."""
        verdicts = self.verdicts
        rested = not verdicts.depth
        start = max(verdicts.size, self._matched)
        right = start - verdicts.size
        verdicts.add(len(text), depth, now)
        if self.dead and depth and (self._cut_at is None or rested):
            self._cut_at, self._cut_size = now, len(text)
        return DraftVerdict(verdicts.number, start, tuple(text[start:]), depth, right)

    # ----------------------------------------------------------------------------------------------------- prediction

    @property
    def anew_s(self) -> float:
        """Expected time until the first drafts of a new line."""
        return self.model.restart_s + 2 * GROUP * self.model.draft.seconds

    def waits_s(self, size: int, most: int, now: float) -> list[float]:
        """Expected seconds until one draft beyond the text's ``size`` tokens is there, two, and so on, as far as
        predictable."""
        verdicts, draft_s = self.verdicts, self.model.draft.seconds
        waits = [0.0] * min(len(self.ahead), most)
        if self.dead:
            if self._cut_at is None or not verdicts.depth:
                return waits
            first, since = self._cut_size, self._cut_at + self.model.restart_s - draft_s
        else:
            first, since = self._end, self._drafts_at
        overdue = 0.0
        for position in range(size + len(waits), min(size + most, verdicts.size + verdicts.depth)):
            due = since + (position - first + 1) * draft_s
            if position >= verdicts.free:
                due = max(due, verdicts.sent_at + 2 * self.model.latency_s)
            if due <= now:  # overdue: expect it to be as late again
                overdue = max(overdue, now - due, SHORTEST_WAIT_S)
            waits.append(max(due - now, SHORTEST_WAIT_S) + overdue)
        return waits

    def validate(self, size: int) -> None:
        verdicts = self.verdicts
        assert verdicts.size <= size
        assert self._matched <= min(size, self._end)
        assert verdicts.depth <= verdicts.reach
        assert len(self.ahead) <= verdicts.reach
        assert not self.dead or not self.ahead
        assert self.dead or not self.ahead or self._end == size + len(self.ahead)
        assert self.epoch <= verdicts.number == len(verdicts.sizes) - 1
