"""Whether drafters are worth it in one text: what a token takes with them, against a step alone. Pure.

That drafts are right is not enough: a drafter may slow down each pass, or the way between passes. So all that a text
takes while they work, from result to result, is held against what its tokens would take the verifier alone: the
*share*, a ratio of two means, which begins with what it was in the texts before. As long as it is surely below 1
nobody looks; only, a step alone takes no longer than steps among drafters' passes do. Where it is not sure, the
drafters of all texts rest for a few passes, and a step alone is measured anew: the machine may be a busier one than it
was. Where it is above 1 then they *rest*, for as long as makes up for what was lost, and longer each time; then they
are tried again.
"""

from __future__ import annotations

import math

from roles.speculation.estimates import FAR_OFF, Passed
from roles.speculation.experience import Experience, Place
from roles.speculation.policy import MOST_LOSS

MEMORY_TOKENS = 64
"""Of which the share is, about; the newest count most."""
PRIOR_TOKENS = 16.0
"""That the share of the texts before counts as."""
BLOCK_TOKENS = 32
"""Between two judgements."""
LEAST_TOKENS = 8
"""Until one that is plain."""
LOOK_PASSES, LOOK_TOKENS = 4, 48
"""Steps alone that are measured at a time; and tokens within which they are, if they can be."""
GAIN = 0.99
"""The share up to which drafters are a gain: less is not worth their work."""
DOUBTS, MOST_DOUBT = 1.5, 0.3
"""Standard errors from which on the share is sure; and one that is not too high for a look, whatever is not known."""
GRACE_TOKENS = 16
"""That do not count until drafters that begin have drafts there: they take in the text first."""
REST_TOKENS = (32, 1024)
"""The first rest, and the longest; each is twice the one before."""
SLOWED = 1.1
"""From here on drafters slow the verifier down, whatever the text: wrong drafts alone cost less, by the ``Guard``."""


class Trial:
    """One text's. ``picked``: as of ``Experience.worth``.

    Attributes:
        resting: drafters are to rest.
    """

    def __init__(self, experience: Experience, picked: str = "") -> None:
        self._experience, self._worth = experience, experience.worth(picked)
        self._place: Place | None = None
        self._clear()
        self._rest = REST_TOKENS[0]
        self._left = 0.0  # tokens of the rest
        self._looked = 0  # steps alone since the look began
        self._looking = 0  # tokens left for the look; 0: there is none
        self._tried = 0  # tokens since they began or were found a gain
        self._begin()
        self.resting = self._worth.debt > 0 or experience.unseen
        if experience.unseen:
            self._looking = LOOK_TOKENS
            experience.look(self)

    def _clear(self) -> None:
        self._tokens = self._seconds = 0.0  # sums of passes, old ones fading
        self._squares = [0.0, 0.0, 0.0]  # of tokens, of both, of seconds
        self._forget_steps()
        self._prior = PRIOR_TOKENS  # fading with them

    def _forget_steps(self) -> None:
        self._steps_s, self._steps = 0.0, 0  # passes without drafts while drafters work: what they took, and how many

    def _begin(self) -> None:
        self.resting = False
        self._forget_steps()
        self._since, self._tried, self._grace = 0, 0, GRACE_TOKENS

    @property
    def share(self) -> float:
        """What a token takes with drafters, of a step alone."""
        step_s = self._experience.step_s(self._place)
        took = self._seconds / step_s if step_s else self._tokens
        return (self._prior * self._worth.share + took) / (self._prior + self._tokens)

    @property
    def _doubt(self) -> float:
        """The share's standard error, of it."""
        error = 0.0
        if self._tokens:
            ratio_s = self._seconds / self._tokens
            tokens, both, seconds = self._squares
            error = math.sqrt(max(0.0, seconds - 2 * ratio_s * both + ratio_s**2 * tokens)) / self._seconds
            error *= self._tokens / (self._tokens + self._prior)
        return math.hypot(error, self._experience.doubt(self._place))

    @property
    def _slowed(self) -> bool:
        """Whether steps take longer while drafters work: they share processors with the verifier, or the way."""
        slow_s = SLOWED * self._steps * self._experience.step_s(self._place)
        return self._steps >= LOOK_PASSES and self._steps_s >= slow_s

    def passed(self, place: Place, passed: Passed) -> None:
        """A pass gave tokens."""
        experience = self._experience
        self._worth.wrote(passed.tokens)
        alone = experience.passed(place, passed, resting=self.resting or experience.looking)
        if not self.resting:
            if not experience.looking:  # else another text's drafters made them rest
                self._worked(place, passed)
            return
        self._left -= passed.tokens
        if self._looking:
            self._looked += alone
            self._looking = max(0, self._looking - passed.tokens)
            if self._looked >= LOOK_PASSES or not self._looking:
                self._judge()
        elif self._left <= 0 and not self._worth.debt:
            self._begin()

    def end(self) -> None:
        """The text is over."""
        self._experience.looked(self)
        self._learned()

    def _worked(self, place: Place, passed: Passed) -> None:
        drafts, tokens, seconds = passed.drafts, passed.tokens, passed.seconds
        self._tried += tokens
        step_s = self._experience.step_s(place)
        if not drafts and step_s and place == self._place:
            self._steps_s += min(seconds - passed.waited_s, FAR_OFF * step_s)
            self._steps += 1
        self._grace = 0 if drafts else max(0, self._grace - tokens)
        if self._grace:
            return
        if place != self._place:
            self._learned()
            self._place = place
        if step_s:
            seconds = min(seconds, FAR_OFF * (1 + drafts) * step_s)
        kept = (1 - 1 / MEMORY_TOKENS) ** tokens
        self._prior *= kept
        self._tokens = kept * self._tokens + tokens
        self._seconds = kept * self._seconds + seconds
        news = (tokens * tokens, tokens * seconds, seconds * seconds)
        self._squares = [kept * kept * old + new for old, new in zip(self._squares, news, strict=True)]
        self._since += tokens
        share, doubt = self.share, self._doubt
        plain = self._since >= LEAST_TOKENS and share > 1 + DOUBTS * min(doubt, MOST_DOUBT)
        if self._since < BLOCK_TOKENS and not plain:
            return
        if self._steps >= LOOK_PASSES and self._experience.at_most(place, self._steps_s / self._steps, self._steps):
            share, doubt = self.share, self._doubt
        if share * (1 + DOUBTS * doubt) <= GAIN:
            self._since = self._tried = 0
            self._forget_steps()
            self._rest = REST_TOKENS[0]
            self._worth.gained()
            return
        self._looked, self._looking = 0, LOOK_TOKENS
        if self._experience.fresh(place):
            self._judge()
        else:
            self.resting = True
            self._experience.look(self)

    def _judge(self) -> None:
        self._experience.looked(self)
        unseen = self._looking == 0 == self._looked  # another text's drafters never stopped
        self._looking = 0
        share = self.share
        if share <= GAIN or unseen or not self._tokens:
            self._rest = REST_TOKENS[0]
            self._begin()
            return
        self.resting = True
        owed = self._tried * max(0.0, share - 1) / MOST_LOSS
        if share >= max(SLOWED, 1 + DOUBTS * self._doubt):
            self._worth.owe(owed, slowed=self._slowed)
        self._left = min(max(float(self._rest), owed), float(REST_TOKENS[1])) - self._looked
        self._rest = min(2 * self._rest, REST_TOKENS[1])
        self._learned()

    def _learned(self) -> None:
        """What it was is what it begins with, here and in other texts."""
        step_s = self._experience.step_s(self._place)
        if self._tokens and step_s:
            self._worth.learn(self._tokens, self._seconds / step_s)
        self._clear()
