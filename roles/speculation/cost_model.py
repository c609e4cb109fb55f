"""What drafts are worth: moving averages of what a verifier measures, and the decisions that follow from them. Pure.

With ``alpha``, the chance that a draft is right if those before it are, a pass with ``k`` drafts is expected to give
``E(k) = 1 + alpha + ... + alpha^k`` tokens (Leviathan et al. 2211.17192). ``choose`` weighs that against time, at the
rate of tokens that is reached at present. ``CostModel`` is the guard: it compares what tokens take while drafters work
with what they take the verifier alone, measured while all drafters rest, and has the drafters rest if they are no gain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

MOST_DRAFTS = 64
"""In a pass."""
FIRST_BUDGET, MOST_BUDGET = 0.8, 6.0
"""Plain steps that may be lost at first, and after gains."""
TRY_TOKENS = 32
"""Tokens after which it is judged whether drafters are a gain; as long is the first rest of those that are none."""
BASELINE_STEPS = 4
"""Steps of which a baseline is the mean, at least."""
FAR_OFF = 4.0
"""No measurement counts as more than so many times the average: one that stood still says nothing of the next."""
SHORTEST_S = 1e-6


class Average:
    """Moving average of a time. ``prior_s`` is its value until something was measured."""

    def __init__(self, prior_s: float = 0.0, *, weight: float = 0.15) -> None:
        self.seconds = prior_s
        self.count = 0
        self._weight = weight

    def add(self, seconds: float) -> None:
        seconds = max(seconds, 0.0)
        if self.count:
            seconds = min(seconds, FAR_OFF * self.seconds + SHORTEST_S)
        self.count += 1
        self.seconds += max(self._weight, 1 / self.count) * (seconds - self.seconds)


class PassTimes:
    """Time of a pass by its number of drafts: a line through the passes of late, the newest counting most."""

    FADE = 0.97
    PRIOR_SLOPE = 0.1  # of a pass, for each draft; it counts as one pass with one draft

    def __init__(self) -> None:
        self._sums = [0.0] * 5  # weight, drafts, seconds, drafts squared, drafts times seconds
        self._step_s = self._slope_s = 0.0
        self._most = 0

    def add(self, drafts: int, seconds: float) -> None:
        seconds = max(seconds, SHORTEST_S)
        if self.known:
            seconds = min(seconds, FAR_OFF * self.seconds(drafts))
        new = (1.0, drafts, seconds, drafts * drafts, drafts * seconds)
        self._sums = [self.FADE * old + more for old, more in zip(self._sums, new, strict=True)]
        weight, x, y, xx, xy = self._sums
        mean_x, mean_y = x / weight, y / weight
        prior_s = self.PRIOR_SLOPE * mean_y / (1 + self.PRIOR_SLOPE * mean_x)
        self._slope_s = max(0.0, (xy - mean_x * y + prior_s) / (xx - mean_x * x + 1))
        self._step_s = max(mean_y - self._slope_s * mean_x, SHORTEST_S)
        self._most = max(self._most, drafts)

    @property
    def known(self) -> bool:
        return self._sums[0] > 0

    @property
    def most_drafts(self) -> int:
        """Drafts of a pass that is not far from what was measured: one more may cost as much as a step."""
        return max(2, 4 * self._most)

    def seconds(self, drafts: int) -> float:
        return self._step_s + drafts * self._slope_s


class DrafterModel:
    """Moving averages of one drafter, which all texts that it drafts for share.

    Attributes:
        latency_s: one way. draft: time of a draft.
    """

    FADE = 0.97  # weight of a comparison when the next one comes: the last thirty count most

    def __init__(self, latency_s: float = 0.0, draft_s: float = 0.005) -> None:
        self.latency_s = latency_s
        self.draft = Average(draft_s)
        self._agreed = self._tried = 0.0

    def compared(self, agreed: int, *, failed: bool) -> None:
        """So many drafts were right, and then one was not (``failed``)."""
        for right in (1,) * agreed + (0,) * failed:
            self._agreed = self.FADE * self._agreed + right
            self._tried = self.FADE * self._tried + 1

    @property
    def known(self) -> bool:
        return self._tried > 0

    @property
    def alpha(self) -> float:
        """Acceptance; below 1. At first it is 0.8, as three drafts would tell: so high that others are tried."""
        return (self._agreed + 3 * 0.8) / (self._tried + 3)

    @property
    def restart_s(self) -> float:
        return 2 * self.latency_s + self.draft.seconds

    @property
    def depth(self) -> int:
        """Drafts beyond what is verified that are of use with a chance of 3 % or more: fewer leave a far drafter too
        short a line, more waste bytes."""
        return max(1, min(MOST_DRAFTS, int(math.log(0.03) / math.log(min(self.alpha, 0.999)))))

    def token_s(self, step_s: float, *, sessions: int = 0) -> float:
        """About what a token costs with it, beside so many other sessions: a draft, or, if that is wrong, a new line
        and somewhat more than a pass."""
        draft_s = (1 + sessions) * self.draft.seconds
        return self.alpha * draft_s + (1 - self.alpha) * (self.restart_s + 1.4 * step_s)


def choose(
    waits_s: Sequence[float],
    alpha: float,
    pass_s: Callable[[int], float],
    rate: float,
    *,
    line_s: float,
    most_loss_s: float,
) -> tuple[float, int, float]:
    """Choose for how many drafts the next pass waits. A pass with ``k`` drafts is worth

        E(k) - rate * (wait + pass_s(k)) + alpha^(k+1) * rate * line_s

    and a pass without drafts, which waits for nothing, is always one of the choices.

    Returns:
        Worth in tokens, drafts, and the wait.

    Args:
        waits_s: until one draft is there, two, and so on; 0 if it is there now.
        rate: tokens a second, the price of time.
        line_s: what it is worth that the drafter's line goes on.
        most_loss_s: that may be lost, against a plain step, if no draft is right.
    """
    line = rate * line_s * alpha
    best = 1.0 - rate * pass_s(0) + line, 0, 0.0
    right = expected = 1.0
    for drafts, wait_s in enumerate(waits_s, 1):
        cost_s = wait_s + pass_s(drafts)
        if cost_s - pass_s(0) > most_loss_s:
            break
        right *= alpha
        expected += right
        worth = expected - rate * cost_s + right * line
        if worth > best[0]:
            best = worth, drafts, wait_s
    return best


class CostModel:
    """What a verifier's sessions learn together, and the guard of what speculation may lose.

    Args:
        step_s: a step of the verifier alone, if it was measured before.

    Attributes:
        sessions: that write now.
        passes: times of passes while drafters work.
        resting: all drafters are to rest.
    """

    def __init__(self, step_s: float = 0.0) -> None:
        self.sessions = 0
        self.passes = PassTimes()
        self._alone = Average(step_s)  # a step while all drafters rest
        self._beside = Average()  # a step without drafts while drafters work, since the last rest
        self._budget = FIRST_BUDGET  # steps
        self._tokens = self._seconds = 0.0  # while drafters work, the newest counting most
        self._tried = 0  # tokens since they began, or were found a gain
        self._rest = TRY_TOKENS
        self._left = 0 if step_s else BASELINE_STEPS  # tokens of the rest
        self._quiet_from = 0.0  # drafters work on for a moment when they are told to rest
        self.resting = not step_s

    @property
    def step_s(self) -> float:
        """Of a step of the verifier alone; 0 before one was measured. It takes no longer than one beside drafters."""
        if self._beside.count >= BASELINE_STEPS:
            return min(self._alone.seconds, self._beside.seconds)
        return self._alone.seconds

    @property
    def most_loss_s(self) -> float:
        return self._budget * self.step_s / max(1, self.sessions)

    def works_until(self, when: float) -> None:
        self._quiet_from = max(self._quiet_from, when)

    def passed(self, drafts: int, tokens: int, seconds: float, *, began_at: float) -> None:
        """A pass gave tokens, so long after the session's result before it."""
        if self.resting:
            if not drafts and began_at >= self._quiet_from:
                self._alone.add(seconds)
            self._left -= tokens
            self._refill(tokens)
            if self._left <= 0 and self.step_s:
                self._begin()
            return
        if not drafts:
            self._beside.add(seconds)
        step_s = self.step_s
        self._budget = min(self._budget + tokens - seconds / step_s, MOST_BUDGET)
        self._refill(tokens)
        fade = (1 - 0.5 / TRY_TOKENS) ** tokens
        self._tokens, self._seconds = fade * self._tokens + tokens, fade * self._seconds + seconds
        self._tried += tokens
        judged = self._tried >= TRY_TOKENS
        if self._budget < -FIRST_BUDGET or (judged and self._seconds > 0.98 * self._tokens * step_s):
            self.resting = True
            self._left = self._rest
            self._rest = min(2 * self._rest, 32 * TRY_TOKENS)
        elif judged:
            self._tried, self._rest = 0, TRY_TOKENS

    def _refill(self, tokens: int) -> None:
        """In the long run 3 % of the time that plain decoding takes may be lost."""
        self._budget = max(self._budget, min(FIRST_BUDGET, self._budget + 0.03 * tokens))

    def _begin(self) -> None:
        self.resting = False
        self._beside = Average()
        self._tokens = self._seconds = 0.0
        self._tried = 0
        if not self.passes.known:
            self.passes.add(0, self.step_s)
