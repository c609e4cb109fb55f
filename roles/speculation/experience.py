"""What a verifier has learned from all of its texts: what a step takes alone, what passes take, how drafters are. Pure.

A new text begins with it, so nothing is learned twice. What a step takes *alone* is what drafters are held against
(``trial``). It is measured only while no drafter of any text works, for one may share its processors with the verifier,
or memory, or power. What lasts longer the more there is to look back at is kept apart for each power of two of
positions; what a step takes from one result to the next also for whether other texts are computed in between.
"""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict

from roles.speculation.estimates import FAR_OFF, Acceptance, Pace, Passed, PassTimes

SHORTEST = 512
"""Positions up to which there is no difference."""
MOST_DRAFTERS = 64
MEMORY_TOKENS = 256
"""Steps that were measured so many tokens before count for less, as do shares: the load of a machine changes."""
MOST_STEPS = 24.0
"""That a mean is of, about."""
LEAST_SPREAD = 0.05
"""Of steps: three may look alike by chance."""
SURE = 2.0
"""Standard errors."""
FRESH_TOKENS, FRESH_STEPS = 64, 8.0
"""Tokens since a step alone was measured, and such steps, with which it need not be measured anew."""
LOOK_WITHIN = 64
"""Tokens of all texts together: a look that takes longer is of one who does not go on, and holds up nobody."""
STILL_TOKENS = 128
"""Of all texts together: a drafter that was told nothing meanwhile has drafted all that it may. Who reads slowly holds
up its text, and with it what its drafters are to hear, but no look of the others."""
LEAST_DEBT, MOST_DEBT = 64.0, 1024.0
"""Tokens."""

Place = tuple[int, bool]
"""Positions, as their number of bits, and whether the text is the only one."""


class Alone:
    """Steps alone of one place.

    Attributes:
        seconds: their mean, old ones fading.
        written: tokens that there were when the last of them was measured, or a bound of it.
    """

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.written = 0
        self._weight = self._variance = 0.0

    def add(self, seconds: float, written: int) -> None:
        """One more."""
        weight = min(self.steps(written), MOST_STEPS)
        if weight >= 1:  # one that stood still says nothing of the next
            seconds = min(seconds, FAR_OFF * self.seconds)
        part = 1 / (weight + 1)
        off_s = seconds - self.seconds
        self.seconds += part * off_s
        self._variance = (1 - part) * (self._variance + part * off_s * off_s)
        self._weight, self.written = weight + 1, written

    def steps(self, written: int) -> float:
        """That the mean is of, when so many tokens are written."""
        return self._weight * math.exp((self.written - written) / MEMORY_TOKENS)

    def doubt(self, written: int) -> float:
        """Standard error of the mean, of it; infinite where the last of them is so long ago that it says nothing."""
        steps = self.steps(written)
        return self._spread / math.sqrt(steps) if steps else math.inf

    def at_most(self, seconds: float, steps: int, written: int) -> bool:
        """As of ``Experience``."""
        doubt = math.hypot(self._spread / math.sqrt(steps), self.doubt(written))
        if not 0 < seconds * (1 + SURE * doubt) < self.seconds:
            return False
        self.seconds = seconds
        self._weight, self.written = min(self.steps(written), steps), written
        return True

    @property
    def _spread(self) -> float:
        return max(LEAST_SPREAD, math.sqrt(self._variance) / self.seconds)


class Worth:
    """What drafters are in texts whose tokens are picked in one way: the likeliest one is easier to foresee than a
    drawn one, so they may be a gain in these, and none in those.

    Attributes:
        share: what a token took with drafters in the texts so far, of a step alone; 1 before there were any.
        debt: tokens that are to be written before drafters are tried again that may slow the verifier down.
    """

    def __init__(self) -> None:
        self.share = 1.0
        self.debt = 0.0
        self._least_debt = LEAST_DEBT  # of the next time
        self._shared = 0.0  # tokens that the share is of

    def learn(self, tokens: float, steps: float) -> None:
        """With drafters so many tokens took as long as so many steps alone."""
        kept = self._shared * math.exp(-tokens / MEMORY_TOKENS)
        self._shared = kept + tokens
        self.share += (steps - self.share * tokens) / self._shared

    def owe(self, tokens: float, *, slowed: bool) -> None:
        """Drafters are no gain: so many tokens more make up for it. Where they ``slowed`` steps down it will be so in
        other texts, too: at least twice as many as the last time, but for gains in between."""
        self.debt += tokens
        if slowed:
            self.debt = max(self.debt, self._least_debt)
            self._least_debt = min(2 * self._least_debt, MOST_DEBT)
        self.debt = min(self.debt, MOST_DEBT)

    def gained(self) -> None:
        """Drafters were a gain for a while; which may be chance."""
        self._least_debt = max(self._least_debt / 2, LEAST_DEBT)

    def wrote(self, tokens: int) -> None:
        """So many more."""
        self.debt = max(0.0, self.debt - tokens)


class Known:
    """A drafter, whatever the text. ``acceptance``: by how tokens are picked."""

    def __init__(self, pace: Pace) -> None:
        self.pace = pace
        self.acceptance: defaultdict[str, Acceptance] = defaultdict(Acceptance)


class Experience:
    """See the module's docstring. One for a verifier, which its sessions share.

    Args:
        step_s: of a step alone, if it was measured already; it counts until one is measured among the texts.

    Attributes:
        sessions: that write now.
    """

    def __init__(self, step_s: float = 0.0) -> None:
        self.sessions = 0
        self._worth: defaultdict[str, Worth] = defaultdict(Worth)
        self._written = 0
        self._first = Alone(step_s)
        self._alone: dict[Place, Alone] = {}
        self._pass_times: dict[int, PassTimes] = {}
        self._drafters: OrderedDict[str, Known] = OrderedDict()
        self._working: dict[object, int] = {}  # and how many tokens were written when it was told of its text last
        self._looking: dict[object, int] = {}  # and how many tokens were written when it began
        self._quiet_from = 0.0

    def place(self, positions: int) -> Place:
        """Where a pass behind so many positions belongs."""
        return max(positions, SHORTEST).bit_length(), self.sessions <= 1

    def worth(self, picked: str) -> Worth:
        """Of drafters, by how tokens are picked: a word out of few."""
        return self._worth[picked]

    # ----------------------------------------------------------------------------------------------- a step alone

    def alone(self, place: Place | None = None) -> Alone:
        """What is known of the nearest place, seconds of 0 where nothing is. Without a place: the last known."""
        if not self._alone:
            return self._first
        if place is None:
            return max(self._alone.values(), key=lambda alone: alone.written)
        return self._alone[min(self._alone, key=lambda at: _distance(at, place))]

    def step_s(self, place: Place | None = None) -> float:
        """Of a step alone; as of ``alone``."""
        return self.alone(place).seconds

    def doubt(self, place: Place | None) -> float:
        """Its standard error, of it; infinite where none was measured there."""
        alone = self._alone.get(place) if place else None
        return alone.doubt(self._written) if alone else math.inf

    @property
    def unseen(self) -> bool:
        """Texts were written, and no step alone was measured: they were too short to."""
        return not self._alone and self._written >= FRESH_TOKENS / 2

    def fresh(self, place: Place) -> bool:
        """Whether it was measured there a moment ago, and well."""
        alone = self._alone.get(place)
        return (
            alone is not None
            and self._written - alone.written <= FRESH_TOKENS
            and alone.steps(self._written) >= FRESH_STEPS
        )

    def at_most(self, place: Place, seconds: float, steps: int) -> bool:
        """So many steps took ``seconds`` each, while drafters worked. Where one alone surely took more, the machine has
        less to do than it had then, and a step alone takes no longer than they did.

        Returns:
            Whether it is.
        """
        alone = self._alone.get(place)
        return alone is not None and alone.at_most(seconds, steps, self._written)

    def passed(self, place: Place, passed: Passed, *, resting: bool) -> bool:
        """A pass of one that has drafters gave tokens. ``resting``: its drafters rest.

        Returns:
            Whether it was a step alone.
        """
        self._written += passed.tokens
        working = any(self._written - told < STILL_TOKENS for told in self._working.values())
        if not resting or passed.drafts or working or passed.began_at < self._quiet_from:
            return False
        self._alone.setdefault(place, Alone()).add(passed.seconds, self._written)
        return True

    # -------------------------------------------------------------------------------------- who works, and who looks

    def works(self, who: object) -> None:
        """A drafter works from now on, or goes on: it was told of its text."""
        self._working[who] = self._written

    def rests(self, who: object, quiet_from: float) -> None:
        """A drafter does nothing any more, from then on."""
        if who in self._working:
            del self._working[who]
            self._quiet_from = max(self._quiet_from, quiet_from)

    @property
    def looking(self) -> bool:
        """Somebody measures a step alone: all drafters rest."""
        return any(self._written - since < LOOK_WITHIN for since in self._looking.values())

    def look(self, who: object) -> None:
        """This session begins to measure a step alone."""
        self._looking[who] = self._written

    def looked(self, who: object) -> None:
        """It has, or does not want to any more."""
        self._looking.pop(who, None)

    # ------------------------------------------------------------------------------------------------ passes, drafters

    def pass_times(self, positions: int) -> PassTimes:
        """Of passes behind so many positions, while drafters work."""
        bits, _ = self.place(positions)
        if bits not in self._pass_times:
            near = min(self._pass_times, key=lambda other: abs(other - bits), default=None)
            self._pass_times[bits] = PassTimes() if near is None else self._pass_times[near].copy()
        return self._pass_times[bits]

    def drafter(self, name: str, latency_s: float, step_s: float) -> Known:
        """What is known of a drafter. ``name``: of it and its model; empty: it is met for the first time."""
        known = self._drafters.pop(name, None) or Known(Pace(latency_s, step_s))
        known.pace.latency_s = latency_s
        if name:
            self._drafters[name] = known
            while len(self._drafters) > MOST_DRAFTERS:
                self._drafters.popitem(last=False)
        return known


def _distance(at: Place, place: Place) -> tuple[int, bool]:
    return abs(at[0] - place[0]), at[1] != place[1]
