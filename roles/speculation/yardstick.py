"""Whether drafters pay: what a token takes with them, against what it takes the verifier alone. Pure.

That drafts are right is not enough. A drafter may share its processors with the verifier, or memory, or power, and so
make each pass slower than it would be. Nothing that is measured while it works shows that. So all drafters *rest* now
and then for a few passes, and what a step takes then is what they are held against: where they are no gain they rest
on, longer each time, and are tried again. One yardstick for all sessions of a verifier, for they share the processors.
"""

from __future__ import annotations

from collections import deque
from enum import Enum, auto
from statistics import median

LOOK_TOKENS = 48
"""A rate counts from so many tokens on; the newest count most."""
SUSPECT, GAIN, EVIDENT = 0.9, 0.97, 1.25
"""Shares of a step alone: above the first, a step is measured again; above the second, drafters are no gain; above the
third, fewer tokens are enough to see it."""
EVIDENT_TOKENS = 16
SETTLE_PASSES, LOOK_PASSES = 2, 5
"""Passes of a look: before what is measured counts, for drafters have yet to hear that they rest; and that count."""
BETWEEN_TOKENS = 128
"""Between two looks at a doubtful gain, each of which costs a few plain steps."""
RENEWED_TOKENS = 1024
"""Between two looks at a gain that seems sure: the load of a machine changes."""
REST_TOKENS = (64, 2048)
"""The first rest, and the longest."""
LONGER = 4
"""Times the last one, each rest after the first."""


class Phase(Enum):
    """What drafters do; while it is ``LOOKING`` they rest so that a step alone is measured."""

    WORKING = auto()
    LOOKING = auto()
    RESTING = auto()


class Yardstick:
    """See the module's docstring.

    Args:
        step_s: of a step alone, where it was measured before; 0: it is looked at soon.
    """

    def __init__(self, step_s: float = 0.0) -> None:
        self.phase = Phase.WORKING
        self._alone: deque[float] = deque([step_s] if step_s else [], LOOK_PASSES)
        self._tokens = 0.0  # of the passes since drafters work again, old ones fading
        self._seconds = 0.0
        self._since_look = 0
        self._due = LOOK_TOKENS  # the first look at a doubtful gain
        self._passes = 0  # of the look, or that settle
        self._rest = REST_TOKENS[0]
        self._left = 0  # tokens of the rest

    @property
    def resting(self) -> bool:
        """No drafter is to work now, and no draft is to be used."""
        return self.phase is not Phase.WORKING

    @property
    def step_s(self) -> float:
        """Of a step alone; 0 where it is not known."""
        return median(self._alone) if self._alone else 0.0

    @property
    def share(self) -> float:
        """What a token takes with drafters, of a step alone; 1 where it is not known."""
        known = self._tokens and self._alone
        return self._seconds / self._tokens / self.step_s if known else 1.0

    def passed(self, tokens: int, seconds: float, *, drafts: int) -> None:
        """A pass with so many drafts gave so many tokens, and took so long with the waiting before it."""
        match self.phase:
            case Phase.WORKING:
                self._worked(tokens, seconds)
            case Phase.LOOKING:
                self._measured(seconds, drafts)
                if self._passes == SETTLE_PASSES + LOOK_PASSES:
                    self._decide()
            case Phase.RESTING:
                self._measured(seconds, drafts)
                self._left -= tokens
                if self._left <= 0:
                    self.phase, self._tokens, self._seconds = Phase.WORKING, 0.0, 0.0
                    self._since_look, self._due = 0, LOOK_TOKENS

    def _worked(self, tokens: int, seconds: float) -> None:
        kept = (1 - 1 / LOOK_TOKENS) ** tokens
        self._tokens = kept * self._tokens + tokens
        self._seconds = kept * self._seconds + seconds
        self._since_look += tokens
        if self.share > EVIDENT:
            due = EVIDENT_TOKENS
        else:
            due = self._due if self.share > SUSPECT or not self._alone else RENEWED_TOKENS
        if self._since_look >= due:
            self.phase, self._passes = Phase.LOOKING, 0

    def _measured(self, seconds: float, drafts: int) -> None:
        if not drafts:  # (one that was under way when the rest began may have some)
            self._passes += 1
            if self._passes > SETTLE_PASSES:
                self._alone.append(seconds)

    def _decide(self) -> None:
        self._since_look, self._due = 0, BETWEEN_TOKENS
        if self.share <= GAIN:
            self.phase, self._rest = Phase.WORKING, REST_TOKENS[0]
        else:
            self.phase, self._left = Phase.RESTING, self._rest
            self._rest = min(LONGER * self._rest, REST_TOKENS[1])
