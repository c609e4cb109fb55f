"""What a verifier measures while it runs: how often drafts are right, what passes take, when drafts come. Pure.

Each estimate begins with a prior that costs little where it is wrong, and follows what changes.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable
from statistics import median

DECAY = 0.98
"""Weight of a comparison when the next one comes: the last fifty count most."""
PRIOR_ALPHA = 0.6
PRIOR_WEIGHT = 3.0
RECENT = 7
"""Measurements of a time of which the median is taken: one that is far off does not count."""
SURE = 3
"""Measurements of which one that is far off does not count."""
PRIOR_SLOPE = 0.1
"""Share of a pass that each draft makes it longer, until that was measured."""
SHORTEST_S = 1e-6


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
    """What a pass takes by its number of drafts: the medians of those that were, a line from the shortest elsewhere."""

    def __init__(self) -> None:
        self._by_drafts: dict[int, Recent] = {}
        self._slopes: deque[float] = deque(maxlen=4 * RECENT)
        self._step_s = math.inf
        self._since = Counter[int]()  # passes since the last one without drafts, by drafts

    def copy(self) -> PassTimes:
        """Another that begins with what this one has seen."""
        other = PassTimes()
        other._by_drafts = {drafts: item.copy() for drafts, item in self._by_drafts.items()}
        other._slopes.extend(self._slopes)
        other._step_s = self._step_s
        other._since = self._since.copy()
        return other

    def add(self, drafts: int, seconds: float) -> None:
        """A pass was."""
        seconds = max(seconds, SHORTEST_S)
        self._by_drafts.setdefault(drafts, Recent(seconds)).add(seconds)
        if not drafts:
            self._since.clear()
        self._since[drafts] += 1
        # What more work took since a step was measured is enough for less. Not what it took before: of many medians
        # that waver the least is less than any pass takes, and would stand as long as no such pass is tried.
        self._step_s = min(
            item.seconds
            for more, item in self._by_drafts.items()
            if not more or self._since[more] >= SURE or not self.known
        )
        if drafts and self.known:
            self._slopes.append((seconds - self._by_drafts[0].seconds) / drafts)

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
        if not drafts:
            return self._step_s
        if drafts in self._by_drafts:
            return max(self._by_drafts[drafts].seconds, self.seconds(0))
        step_s = self.seconds(0)
        slope = median(self._slopes) if self._slopes else PRIOR_SLOPE * step_s
        return step_s + drafts * max(slope, 0.0)


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
