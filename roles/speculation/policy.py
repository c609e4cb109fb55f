"""How many drafts the next pass takes, and whether to wait for them. Pure.

With ``E(k) = 1 + alpha + ... + alpha^k`` tokens expected of a pass with ``k`` drafts, a choice is worth

    E(k) - rate * (wait + pass_s(k)) + alpha^(k+1) * rate * kept_s

``rate``, the tokens a second that are reached at present, prices time; the last term is what it is worth that the
drafter's line goes on. Without drafts a pass is a step of plain decoding: it is always one of the choices, and needs no
waiting.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

KEPT = 1.1
"""What it is worth that a line goes on, in steps of plain decoding, at most; not more than beginning anew costs."""
LEAST_USE = 0.04
"""A draft is made that is of use with this chance: less wastes bytes, more leaves a far drafter too short a line."""
LONGEST_WAIT = 1.0
"""In steps of plain decoding, from when the last pass ended."""
MOST_LOSS = 0.03
"""Of the time that plain decoding takes: may be lost, in all."""
FIRST_LOSS = 0.8
"""In steps of plain decoding: so much more, or nothing could ever be tried."""
MOST_BANKED = 6.0
"""In steps of plain decoding: a gain of before that may be lost again."""
MOST_DRAFTS = 64
"""In a pass."""


@dataclass(frozen=True, slots=True)
class Choice:
    """So many drafts, after so long."""

    drafts: int
    wait_s: float
    worth: float


def choose(
    waits_s: Sequence[float],
    alpha: float,
    pass_s: Callable[[int], float],
    rate: float,
    *,
    late: int = 0,
    kept_s: float,
    most_wait_s: float,
    most_loss_s: float,
) -> Choice:
    """The best choice.

    Args:
        waits_s: until that many drafts are there, of one more each; 0 where they are.
        alpha: acceptance.
        rate: tokens a second.
        late: drafts that come before them, for what the text has already: they must be right, too.
        kept_s: what it is worth that the line goes on.
        most_wait_s: that may be waited.
        most_loss_s: that may be lost, against a step of plain decoding, if no draft is right.
    """
    sure = alpha**late
    kept = rate * kept_s * alpha
    best = Choice(0, 0.0, 1.0 - rate * pass_s(0) + sure * kept)
    expected = 1.0
    for drafts, wait_s in enumerate(waits_s, 1):
        cost_s = wait_s + pass_s(drafts)
        if wait_s > most_wait_s or cost_s - pass_s(0) > most_loss_s:
            break
        sure *= alpha
        expected += sure
        worth = expected - rate * cost_s + sure * kept
        if worth > best.worth:
            best = Choice(drafts, wait_s, worth)
    return best


class Guard:
    """Time that was lost against plain decoding: the sum stays within a share of the whole, whatever drafters do.

    Attributes:
        lost_s: so far; what was gained counts only a little, so that no gain of before is gambled away.
    """

    def __init__(self) -> None:
        self.lost_s = 0.0
        self._steps = 0

    def passed(self, seconds: float, tokens: int, step_s: float) -> None:
        """So long after the one before it a pass gave tokens."""
        self._steps += tokens
        self.lost_s = max(self.lost_s + seconds - tokens * step_s, -MOST_BANKED * step_s)

    def most_loss_s(self, step_s: float) -> float:
        """What the next pass may lose."""
        return (FIRST_LOSS + MOST_LOSS * self._steps) * step_s - self.lost_s


def depth_for(alpha: float, *, least_use: float, most: int) -> int:
    """Drafts beyond what is verified that have so much of a chance that all before them are right."""
    if alpha >= 1:
        return most
    if alpha <= least_use:
        return 1
    return max(1, min(most, int(math.log(least_use) / math.log(alpha))))
