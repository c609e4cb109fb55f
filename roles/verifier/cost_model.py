"""The value of drafts: moving averages of what a verifier measures, and the decisions made from them. Pure.

``alpha`` is the chance that a draft is right if all drafts before it are. A pass with ``k`` drafts is expected to give
``E(k) = 1 + alpha + ... + alpha^k`` tokens (Leviathan et al. 2211.17192). ``choose`` weighs that against time, at the
current rate of tokens. ``CostModel`` limits the loss. It compares the time per token while drafters work with the time
of the verifier alone, measured while all drafters rest. If drafters do not save time, they rest for a while.

A split model takes long for a pass, but can begin another one when its slowest stage is free. The next pass can begin
then if the drafts under way are right, and else when a wrong one is known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

from roles.gauges import FAR_OFF, SHORTEST_S, MovingAverage

MOST_DRAFTS = 64
"""Most drafts in a pass."""
DEPTH = 16
"""Most drafts ahead of the verified text if one pass is under way at a time, and half of them if more are. Fewer leave
a distant drafter too short a line; more waste bytes."""
FIRST_BUDGET, MOST_BUDGET = 0.8, 6.0
"""Limits of the loss, in steps of the verifier alone: at first, and after gains."""
TRY_TOKENS = 32
"""Tokens after which drafters are judged. Also the length of the first rest, in tokens."""
BASELINE_STEPS = 4
"""Least number of steps in a baseline."""


class PassTimeModel:
    """Time of a pass as a linear function of its number of drafts, fitted with weights that favour recent passes."""

    FADE = 0.97
    PRIOR_SLOPE = 0.1  # in passes, for each draft; the prior has the weight of one pass with one draft

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
        """Most drafts for which the fit is trusted: beyond measured sizes one more draft may cost as much as a step."""
        return max(2, 4 * self._most)

    def seconds(self, drafts: int) -> float:
        return self._step_s + drafts * self._slope_s


class DrafterModel:
    """Moving averages of one drafter, shared by its texts. ``latency_s``: one way. ``draft``: time of a draft."""

    FADE = 0.97  # decay per comparison: about the last thirty count

    def __init__(self) -> None:
        self.latency_s = 0.0
        self.draft = MovingAverage(0.005)
        self._agreed = self._tried = 0.0

    def add_comparison(self, agreed: int, *, failed: bool) -> None:
        """Count ``agreed`` right drafts, then a wrong one if ``failed``."""
        for right in (1,) * agreed + (0,) * failed:
            self._agreed = self.FADE * self._agreed + right
            self._tried = self.FADE * self._tried + 1

    @property
    def known(self) -> bool:
        return self._tried > 0

    @property
    def alpha(self) -> float:
        """Acceptance, below 1. The prior is 0.8 with the weight of three drafts: high, so that new drafters are
        tried."""
        return (self._agreed + 3 * 0.8) / (self._tried + 3)

    @property
    def restart_s(self) -> float:
        return 2 * self.latency_s + self.draft.seconds

    def token_s(self, step_s: float, sessions: int) -> float:
        """Approximate time per token beside ``sessions`` other sessions: a draft, or after a wrong one a new line and a
        pass."""
        draft_s = (1 + sessions) * self.draft.seconds
        return self.alpha * draft_s + (1 - self.alpha) * (self.restart_s + 1.4 * step_s)


def choose(
    waits_s: Sequence[float],
    alpha: float,
    pass_s: Callable[[int], float],
    free_s: Callable[[int], float],
    rate: float,
    *,
    line_s: float,
    most_loss_s: float,
    chance: float = 1.0,
) -> tuple[int, float]:
    """Choose how many tokens the next pass has. With ``k`` drafts after its first token, which is right with
    probability ``chance``, it is worth

        chance * (E(k) - rate * (wait + time) + alpha^(k+1) * rate * line_s) - (1 - chance) * rate * free_s(k)
        time = free_s(k) if all its drafts and the one after them are right, else pass_s(k)

    If the first token is right for sure, some pass must begin. Else none is worth 0: one that is under way ends first.

    Returns:
        Number of tokens, 0: no pass; and the wait in seconds.

    Args:
        waits_s: seconds until a pass with one token can begin, with two, and so on; 0: now.
        free_s: time after which another pass may begin, by drafts; ``pass_s`` if one is under way at a time.
        rate: tokens per second, the price of time.
        line_s: time saved if the drafter's line goes on.
        most_loss_s: time that may be lost against a plain step if no draft is right.
    """
    follows = chance < 1
    most_worth, best = 0.0 if follows else -inf, (0, 0.0)
    right = alpha
    expected = 1.0
    for drafts, wait_s in enumerate(waits_s):
        whole_s, next_s = pass_s(drafts), free_s(drafts)
        if (next_s if follows else wait_s + whole_s - pass_s(0)) > most_loss_s and (drafts or follows):
            break
        cost_s = wait_s + whole_s - right * (whole_s - next_s)
        worth = chance * (expected - rate * cost_s + right * rate * line_s) - (1 - chance) * rate * next_s
        if worth > most_worth:
            most_worth, best = worth, (drafts + 1, wait_s)
        expected += right
        right *= alpha
    return best


class CostModel:
    """What all sessions of a verifier learn, and the limit of what speculation may lose. Drafters first rest, until a
    step of the verifier alone was measured.

    Attributes:
        passes, busy: times of passes while drafters work, and before they first do, and of their slowest stages.
        resting: all drafters shall rest.
    """

    def __init__(self) -> None:
        self.sessions = 0
        self.passes, self.busy = PassTimeModel(), PassTimeModel()
        self._alone = MovingAverage()  # a step while all drafters rest
        self._without_drafts = MovingAverage()  # steps without drafts while drafters work, since the last rest
        self._budget = FIRST_BUDGET  # steps
        self._tokens = self._seconds = 0.0  # while drafters work, with decay
        self._tried = 0  # tokens since drafters began or were last found useful
        self._rest = TRY_TOKENS
        self._left = BASELINE_STEPS  # tokens left of the rest
        self.resting = True

    @property
    def step_s(self) -> float:
        """Time of a step of the verifier alone; 0: not measured. It is never above the time of a step beside
        drafters: the machine may have been busy when it was measured."""
        if self._without_drafts.count >= BASELINE_STEPS:
            return min(self._alone.seconds, self._without_drafts.seconds)
        return self._alone.seconds

    def free_s(self, drafts: int) -> float:
        """Time from the beginning of a pass until the text may begin another one, if several may be under way: all
        texts share the time of the slowest stage."""
        return min(self.passes.seconds(drafts), self.sessions * self.busy.seconds(drafts))

    @property
    def most_loss_s(self) -> float:
        return self._budget * self.step_s / max(1, self.sessions)

    def add_pass(self, drafts: int, tokens: int, seconds: float, step_s: float) -> None:
        """Record a pass. ``seconds``: time since the session's previous result. ``step_s``: time of the pass and of the
        wait for its drafts, which may have begun before that result."""
        if self.resting:
            if not drafts:
                self._alone.add(step_s)
            self._left -= tokens
            self._refill(tokens)
            if self._left <= 0 and self.step_s:
                self.resting, self._tried = False, 0
                self._tokens = self._seconds = 0.0
                self._without_drafts = MovingAverage()
            return
        if not drafts:
            self._without_drafts.add(step_s)
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
        """Let the budget grow by 3 % of plain decoding time: so much may be lost in the long run."""
        self._budget = max(self._budget, min(FIRST_BUDGET, self._budget + 0.03 * tokens))
