"""Whether drafters are worth it in one text: what a token takes with them, against a step alone. Pure.

That drafts are right is not enough: a drafter may slow down each pass, or the way between passes. So all that a text
takes while they work, from result to result, is held against what its tokens would take the verifier alone. Where that
is no gain they *rest*, for as long as makes up for what was lost, and longer each time; then they are tried again. A
step alone is looked at now and then, all drafters resting for a few passes, and always before a rest: the machine may
be a busier one than it was. The more its times differ, the more steps are looked at, and what may be chance is not
counted as lost. What is learned so is for all texts of the verifier, and so is what is owed when drafters slow it down.
How often they are right is each text's own.
"""

from __future__ import annotations

from roles.speculation.experience import FAR_OFF, LOOK_PASSES, MOST_LOOK_PASSES, Experience, Place
from roles.speculation.policy import MOST_LOSS

LOOK_TOKENS = 48
"""Until the first judgement; about so many tokens count, the newest most."""
SUSPECT, EVIDENT = 0.9, 1.25
"""Shares of a step alone: above the first it is judged more often; above the second, fewer tokens are enough."""
GAIN, HARMLESS = 0.97, 0.99
"""Above, drafters are no gain; the same where a step takes no longer while they work: that they are there costs little
then, and a rest may cost more."""
EVIDENT_TOKENS, LEAST_TOKENS = 16.0, 8.0
TRY_TOKENS = 24
"""Until the judgement after a rest."""
BETWEEN_TOKENS = 128
"""Until the next judgement of a doubtful gain, each of which costs a few plain steps."""
RENEWED_TOKENS = 1024
"""The same of a gain that seems sure: the load of a machine changes."""
GRACE_TOKENS = 16
"""That do not count until drafters that begin have drafts there: they take in the text first."""
REST_TOKENS = (64, 1024)
"""The first rest, and the longest; each is twice the one before."""
FRESH_TOKENS, STEADY_TOKENS = 64, 512
"""Written since: so long a step that was measured is as good as one that is measured now; the same where a step takes
no longer while drafters work."""
SURE_DOUBTS = 2.0
"""Standard errors from which on it is not chance that there is no gain."""
SLOWED = 1.1
"""A step while drafters work, of one alone: from here on they slow the verifier down, whatever the text."""


class Trial:
    """One text's.

    Attributes:
        resting: drafters are to rest.
    """

    def __init__(self, experience: Experience) -> None:
        self._experience = experience
        self.resting = experience.debt > 0
        self._sums: dict[Place, list[float]] = {}  # tokens, seconds and passes, old ones fading
        self._since = 0  # tokens since the last judgement
        self._due = float(LOOK_TOKENS)
        self._grace = GRACE_TOKENS
        self._looked = 0  # steps alone since the look began
        self._looking = 0  # tokens left for the look; 0: there is none
        self._rest = REST_TOKENS[0]
        self._left = 0.0  # tokens of the rest
        self._slowed = 1.0
        self._first = True  # no judgement was; chance decides it where nothing is slowed down

    @property
    def share(self) -> float:
        """What a token takes with drafters, of a step alone; 1 where it is not known."""
        plain_s = sum(tokens * self._experience.step_s(place) for place, (tokens, _, _) in self._sums.items())
        return sum(seconds for _, seconds, _ in self._sums.values()) / plain_s if plain_s else 1.0

    def _doubt(self, place: Place) -> float:
        """The share's standard error, of it."""
        return self._experience.alone(place).doubt(sum(passes for _, _, passes in self._sums.values()))

    def passed(self, place: Place, tokens: int, seconds: float, began_at: float, *, drafts: int, slowed: float) -> None:
        """A pass gave tokens, so long after the one before it gave some.

        Args:
            slowed: what a step takes while drafters work, of one alone.
        """
        self._slowed = slowed
        idle = (self.resting or self._experience.looking) and not drafts
        alone = self._experience.passed(place, tokens, seconds, began_at, resting=idle)
        if not self.resting:
            self._worked(place, tokens, seconds, drafts)
            return
        self._left -= tokens
        if self._looking:
            self._looked += alone
            self._looking = max(0, self._looking - tokens)
            if self._looked >= LOOK_PASSES or not self._looking:
                self._judge(place)
        elif self._left <= 0 and not self._experience.debt:
            self._begin(TRY_TOKENS)

    @property
    def _slows(self) -> bool:
        return self._slowed >= SLOWED

    def end(self) -> None:
        """The text is over."""
        self._experience.looked(self)

    def _begin(self, due: float) -> None:
        self.resting = False
        self._since, self._due, self._grace = 0, due, GRACE_TOKENS

    def _worked(self, place: Place, tokens: int, seconds: float, drafts: int) -> None:
        if self._experience.looking:
            return  # another text's drafters made them rest
        self._grace = 0 if drafts else max(0, self._grace - tokens)
        if self._grace:
            return
        kept = (1 - 1 / LOOK_TOKENS) ** tokens
        for sums in self._sums.values():
            sums[:] = [kept * each for each in sums]
        usual_s = self._experience.alone(place).usual_s
        sums = self._sums.setdefault(place, [0.0, 0.0, 0.0])
        sums[0] += tokens
        sums[1] += min(seconds, FAR_OFF * (1 + drafts) * usual_s) if usual_s else seconds
        sums[2] += 1
        self._since += tokens
        share = self.share
        if share > EVIDENT * (1 + SURE_DOUBTS * self._doubt(place)):
            due = max(LEAST_TOKENS, EVIDENT_TOKENS * EVIDENT / share)
        else:
            sure = share <= SUSPECT / (1 + self._doubt(place)) and self._experience.measured(place)
            due = RENEWED_TOKENS if sure else self._due
        if self._since >= due:
            within = FRESH_TOKENS if self._slows else STEADY_TOKENS
            if self.share <= self._gain and self._experience.measured(place, within=within):
                self._gained(place)
                return
            self.resting = True
            self._looked, self._looking = 0, LOOK_TOKENS
            self._experience.look(self)

    @property
    def _gain(self) -> float:
        """The share above which drafters are no gain."""
        return GAIN if self._slows else HARMLESS

    def _gained(self, place: Place) -> None:
        self._rest = REST_TOKENS[0]
        chance = self.share * (1 + SURE_DOUBTS * self._doubt(place)) > self._gain
        self._begin(LOOK_TOKENS if chance else BETWEEN_TOKENS)

    def _judge(self, place: Place) -> None:
        doubt = self._doubt(place)
        gained = self.share <= self._gain
        chance = self.share <= self._gain * (1 + SURE_DOUBTS * doubt)
        vague = (chance and not gained) or not self._experience.alone(place).enough
        if vague and self._looking and self._looked < MOST_LOOK_PASSES:
            return
        self._looking = 0
        self._experience.looked(self)
        if gained:
            self._gained(place)
            return
        if self._first and not self._slows and self.share <= EVIDENT:
            self._first = False
            self._begin(LOOK_TOKENS)
            return
        self._first = False
        lost = sum(
            seconds / self._experience.step_s(at) / (1 + doubt * chance) - tokens
            for at, (tokens, seconds, _) in self._sums.items()
            if self._experience.step_s(at)
        )
        owed = max(0.0, lost) / MOST_LOSS
        if self._slows:
            self._experience.owe(owed)
        self._left = min(max(float(self._rest), owed), float(REST_TOKENS[1])) - self._looked
        self._rest = min(2 * self._rest, REST_TOKENS[1])
        self._sums.clear()
