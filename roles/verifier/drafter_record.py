"""How often a drafter is right, by what the verdicts of its sessions say of its drafts. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from roles.speculation.events import Tell
from roles.speculation.received import MAX_DEPTH

PRIOR, PRIOR_WEIGHT = 0.6, 4.0
"""Acceptance before anything is known, and for how many drafts that stands."""
MEMORY = 0.99
"""What counted drafts weigh when one more is counted: the last hundred decide."""
UNREADY = 4
"""Sessions in a row that it had not taken in when they were over, after which it is known to be of no use."""
USUAL_STEP_S, USUAL_PASS_S = 0.005, 0.05
"""Of a draft where the drafter does not say, and of a verifier's pass."""
HOPELESS, HOPELESS_AFTER = 0.1, 32
SILENT_TOKENS = 128
"""Of the text, without a draft of one that is to draft: from then on each verdict counts against it. Sooner, it may be
far away."""


class DraftRecord:
    """Of one drafter, whatever the session.

    Attributes:
        latency_s: one way. step_s: of a draft; 0 where it is not known.
        counted: drafts that were judged, in all.
        unready: sessions in a row that were over before it had taken them in, or any other.
    """

    def __init__(self) -> None:
        self.latency_s = self.step_s = 0.0
        self.counted = self.unready = 0
        self._right = self._weight = 0.0

    @property
    def alpha(self) -> float:
        """Acceptance: how likely its next draft is right where those before are."""
        return (self._right + PRIOR * PRIOR_WEIGHT) / (self._weight + PRIOR_WEIGHT)

    @property
    def hopeless(self) -> bool:
        """Whether what it drafts is known to be of no use."""
        return self.unready >= UNREADY or (self.counted >= HOPELESS_AFTER and self.alpha < HOPELESS)

    def count(self, right: int, *, wrong: bool) -> None:
        """So many drafts were right, and then one was wrong, or the verdict ended."""
        for hit in [True] * right + [False] * wrong:
            self._right = MEMORY * self._right + hit
            self._weight = MEMORY * self._weight + 1
            self.counted += 1

    def cost_s(self, sessions: int) -> float:
        """Seconds that a token of the text costs, roughly, beside so many other sessions: its draft, and where that is
        wrong a pass and a round trip. The less, the better the drafter. That it says how fast it is helps one little
        that is rarely right."""
        draft_s = (1 + sessions) * (self.step_s or USUAL_STEP_S)
        return draft_s + (1 - self.alpha) * (USUAL_PASS_S + 2 * self.latency_s)


class SeatRecord:
    """The same of one session at one drafter: what it drafted, until a verdict is told of it.

    Args:
        told: positions that the drafter knows.
    """

    def __init__(self, told: int) -> None:
        self._told = told
        self._epoch = 0
        self._dead = False  # the line was contradicted: drafts of this epoch count no more
        self._drafts: dict[int, int] = {}  # position → token, of the line, not told of
        self._silent = 0  # tokens that were told since it drafted

    def drafted(self, epoch: int, position: int, tokens: Sequence[int]) -> bool:
        """Drafts came. Whether they fit is for the session to see: what does not is of no account.

        Returns:
            Whether a line was taken back of which no verdict has found anything wrong: what was wrong with it came
            after the verdict that said so, or the drafter drafts now this, now that.
        """
        self._silent = 0
        if epoch < self._epoch or (epoch == self._epoch and self._dead):
            return False
        taken_back = epoch > self._epoch and bool(self._drafts)
        if epoch > self._epoch:
            self._epoch, self._dead = epoch, False
            self._drafts.clear()
        if len(self._drafts) + len(tokens) <= 2 * MAX_DEPTH:
            self._drafts.update(enumerate(tokens, position))
        return taken_back

    def judged(self, tell: Tell) -> tuple[int, bool]:
        """A verdict is told: how many drafts it finds right, and whether it then finds one wrong, or that there were
        none for long."""
        right, wrong = 0, False
        self._silent += len(tell.tokens) if tell.depth else 0
        for position in range(self._told, tell.start):
            right += position in self._drafts
        for position, token in enumerate(tell.tokens, tell.start):
            if (draft := self._drafts.get(position)) is None:
                continue
            if draft != token:
                wrong = True
                break
            right += 1
        self._told = tell.start + len(tell.tokens)
        self._drafts = {} if wrong else {at: token for at, token in self._drafts.items() if at >= self._told}
        self._dead = self._dead or wrong
        return right, wrong or (tell.depth > 0 and self._silent > SILENT_TOKENS)
