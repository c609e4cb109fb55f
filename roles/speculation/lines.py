"""What a verifier knows of one drafter's session: its line of drafts, and what it was told. Pure.

A line is what a drafter drafted behind what it knew to be verified. It has an *epoch*: the number of the verdict that
began it, 0 for the opening. The verifier compares it with the text as both grow. Where they differ the line is *dead*:
the drafter will hear, cut it, and begin the next one with a verdict's number as its epoch, where what that verdict told
ends or later. Until then whatever it sends stands on a wrong token and is dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Compared:
    """Drafts that were compared with the text: so many agreed, and then one did not (``failed``)."""

    agreed: int
    failed: bool


@dataclass(slots=True)
class Line:
    """One drafter's line and verdicts.

    Attributes:
        told: tokens of the text that the drafter has, or will have when it hears what it was told.
        depth: that it was told last. reach: positions beyond ``told`` that it may have drafted when told more.
        number: of the last verdict.
        epoch: of the line. dead: the line contradicts the text.
        end: position of the line's next draft. matched: up to here it agrees with the text.
        ahead: drafts of the line from the end of the text on.
        dropped: drafts that were of a line that is dead, or that the text was ahead of and contradicted.
    """

    told: int
    depth: int
    number: int = 0
    epoch: int = 0
    dead: bool = False
    end: int = 0
    matched: int = 0
    reach: int = 0
    dropped: int = 0
    ahead: deque[int] = field(default_factory=deque)
    _sizes: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.end = self.matched = self.told
        self._sizes = [self.told]  # of the text, by the number of the verdict that told of it
        self.reach = self.depth

    def receive_untrusted(
        self, epoch: int, position: int, tokens: Sequence[int], text: Sequence[int]
    ) -> tuple[str, Compared]:
        """Take drafts.

        Returns:
            What is wrong with them, empty if nothing is: then also what came of comparing them with ``text``.
        """
        none = Compared(0, False)
        if not 0 <= epoch <= self.number:
            return f"drafts after verdict {epoch}, with {self.number} sent", none
        if not tokens:
            return "drafts without a token", none
        if not 0 <= position <= position + len(tokens) <= self.told + self.reach:
            return f"drafts up to position {position + len(tokens)}, with {self.told + self.reach} allowed", none
        if epoch < self.epoch:
            return f"drafts after verdict {epoch}, behind some after verdict {self.epoch}", none
        if epoch > self.epoch:
            if not self._sizes[epoch] <= position <= self.told:
                return f"a line from position {position}, with {self._sizes[epoch]} to {self.told} told", none
            self.dropped += len(self.ahead)
            self.ahead.clear()
            self.epoch, self.dead, self.end = epoch, False, position
        elif not self.end <= position <= max(self.told, self.end):
            return f"drafts from position {position}, with {self.end} next and {self.told} told", none
        self.end = position + len(tokens)
        if self.dead:
            self.dropped += len(tokens)
            return "", none
        known = text[position : self.end]
        agreed = next((at for at, token in enumerate(known) if token != tokens[at]), len(known))
        self.matched = min(position + agreed, len(text))
        if agreed < len(known):
            self._die(len(tokens) - agreed)
            return "", Compared(agreed, True)
        self.ahead.extend(tokens[agreed:])
        return "", Compared(agreed, False)

    def grew(self, tokens: Sequence[int]) -> Compared:
        """The text has ``tokens`` more."""
        agreed = 0
        for token in tokens:
            if not self.ahead:
                break
            if self.ahead[0] != token:
                self._die(len(self.ahead))
                return Compared(agreed, True)
            self.ahead.popleft()
            self.matched += 1
            agreed += 1
        return Compared(agreed, False)

    def _die(self, dropped: int) -> None:
        self.dead = True
        self.dropped += dropped
        self.ahead.clear()

    def verdict(self, size: int, depth: int) -> tuple[int, int, int]:
        """The text, of ``size`` tokens, is told.

        Returns:
            The verdict's number, the position from which its tokens are to be told, and how many drafts before that
            are found right by it.
        """
        start = max(self.told, self.matched)
        right = start - self.told
        self.number += 1
        self.reach = max(self.reach, depth)
        self.depth = depth
        self.told = size
        self._sizes.append(size)
        return self.number, start, right

    def validate(self, size: int) -> None:
        """Raises ``AssertionError`` where what must always hold does not. ``size``: tokens of the text."""
        assert self.told <= size
        assert self.matched <= min(size, self.end)
        assert self.depth <= self.reach
        assert len(self.ahead) <= self.reach
        assert not self.dead or not self.ahead
        assert self.dead or not self.ahead or self.end == size + len(self.ahead)
        assert self.epoch <= self.number == len(self._sizes) - 1
