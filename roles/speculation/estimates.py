"""What a verifier measures while it runs: how often drafts are right, what passes take, when drafts come. Pure.

Each estimate begins with a prior that costs little where it is wrong, and follows what changes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

DECAY = 0.98
"""Weight of a comparison when the next one comes: the last fifty count most."""
PRIOR_ALPHA = 0.6
PRIOR_WEIGHT = 3.0
RECENT = 7
"""Measurements of a time of which the median is taken: one that is far off does not count."""
FADED = 0.97
"""Weight of a pass when the next one comes: the last thirty count most."""
FAR_OFF = 4.0
"""Times what was expected: no pass counts as more, for one that stood still says nothing of the next."""
PRIOR_SLOPE, SLOPE_WEIGHT = 0.1, 1.0
"""Share of a pass that each draft makes it longer, until that was measured; it counts as a pass with one draft."""
LINE_WEIGHT = 4.0
"""Passes that the line counts as, beside those that had as many drafts."""
SHORTEST_S = 1e-6


@dataclass(frozen=True, slots=True)
class Passed:
    """A pass behind the prompt, from the result before it to its own.

    Attributes:
        drafts: that it had; where it began behind others its first token is one, too. tokens: that it
            gave.
        between_s: from the result before to this pass, but for waiting. waited_s: for drafts. took_s: the pass itself.
        began_at: when.
    """

    drafts: int
    tokens: int
    between_s: float
    waited_s: float
    took_s: float
    began_at: float

    @property
    def seconds(self) -> float:
        """All of it, and never nothing: shares are taken of it."""
        return max(self.between_s + self.waited_s + self.took_s, SHORTEST_S)


class Acceptance:
    """How often a draft is right whose predecessors are.

    Attributes:
        count: comparisons.
    """

    def __init__(self, alpha: float = PRIOR_ALPHA) -> None:
        self.count = 0
        self._prior = alpha
        self._agreed = 0.0
        self._tried = 0.0

    def add(self, agreed: int, *, failed: bool) -> None:
        """So many were right, and then one was not (``failed``)."""
        for right in (1,) * agreed + (0,) * failed:
            self._agreed = DECAY * self._agreed + right
            self._tried = DECAY * self._tried + 1
            self.count += 1

    @property
    def alpha(self) -> float:
        """The estimate; below 1."""
        return (self._agreed + PRIOR_WEIGHT * self._prior) / (self._tried + PRIOR_WEIGHT)


class Recent:
    """A time that is measured again and again.

    Attributes:
        seconds: the median of the last ones.
    """

    def __init__(self, prior_s: float, seen: Iterable[float] = ()) -> None:
        self._seen: deque[float] = deque(seen, RECENT)
        self.seconds = median(self._seen) if self._seen else prior_s

    def copy(self) -> Recent:
        """Another that begins with what this one has seen."""
        return Recent(self.seconds, self._seen)

    def add(self, seconds: float) -> None:
        """One more."""
        self._seen.append(max(seconds, 0.0))
        self.seconds = median(self._seen)

    @property
    def known(self) -> bool:
        """It was measured."""
        return bool(self._seen)


class PassTimes:
    """What a pass takes by its number of drafts: a line through all that were lately, and the more there are of one
    number, the more their own mean. What was long ago fades: no number is held dear for good for one unlucky pass.
    """

    def __init__(self) -> None:
        self._by_drafts: dict[int, tuple[float, float]] = {}  # weight and mean
        self._step_s = self._slope_s = 0.0

    def copy(self) -> PassTimes:
        """Another that begins with what this one has seen."""
        other = PassTimes()
        other._by_drafts = dict(self._by_drafts)
        other._step_s, other._slope_s = self._step_s, self._slope_s
        return other

    def add(self, drafts: int, seconds: float) -> None:
        """A pass was."""
        seconds = max(seconds, SHORTEST_S)
        if self.known:
            seconds = min(seconds, FAR_OFF * self.seconds(drafts))
        for other, (weight, mean_s) in self._by_drafts.items():
            self._by_drafts[other] = FADED * weight, mean_s
        weight, mean_s = self._by_drafts.get(drafts, (0.0, 0.0))
        self._by_drafts[drafts] = weight + 1, (weight * mean_s + seconds) / (weight + 1)
        self._fit()

    def _fit(self) -> None:
        """The line of least squares, with a prior for its slope."""
        items = [(weight, drafts, mean_s) for drafts, (weight, mean_s) in self._by_drafts.items()]
        whole = sum(weight for weight, _, _ in items)
        first = sum(weight * drafts for weight, drafts, _ in items) / whole
        mean_s = sum(weight * seconds for weight, _, seconds in items) / whole
        square = sum(weight * (drafts - first) ** 2 for weight, drafts, _ in items)
        product = sum(weight * (drafts - first) * (seconds - mean_s) for weight, drafts, seconds in items)
        prior_s = PRIOR_SLOPE * mean_s / (1 + PRIOR_SLOPE * first)
        self._slope_s = max(0.0, (product + SLOPE_WEIGHT * prior_s) / (square + SLOPE_WEIGHT))
        self._step_s = max(mean_s - self._slope_s * first, SHORTEST_S)

    @property
    def known(self) -> bool:
        """A pass without drafts was measured."""
        return 0 in self._by_drafts

    @property
    def most(self) -> int:
        """Drafts of a pass that is not too far from those that were measured: one more may cost as much as a step."""
        return max(2, 4 * max(self._by_drafts, default=0))

    def seconds(self, drafts: int) -> float:
        """The estimate. Needs ``known``."""
        weight, mean_s = self._by_drafts.get(drafts, (0.0, 0.0))
        line_s = self._step_s + drafts * self._slope_s
        seconds = (weight * mean_s + LINE_WEIGHT * line_s) / (weight + LINE_WEIGHT)
        return max(seconds, self.seconds(0)) if drafts else seconds


class Pace:
    """When drafts of one drafter come.

    Args:
        latency_s: one way. step_s: of a draft, 0 where it is not known.
    """

    def __init__(self, latency_s: float, step_s: float) -> None:
        self.latency_s = latency_s
        self.step = Recent(step_s or 0.01)
        self._again = Recent(0.0)  # from a verdict to the first draft of the line that it begins, but for two latencies

    @property
    def restart_s(self) -> float:
        """From a verdict that ends a line to the first draft of the next."""
        return 2 * self.latency_s + (self._again.seconds if self._again.known else self.step.seconds)

    def restarted(self, seconds: float) -> None:
        """So long it took."""
        self._again.add(seconds - 2 * self.latency_s)
