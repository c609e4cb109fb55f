"""What a step must not be made of, and who spoiled it: rules that members apply to one another's tokens.

*Before the vote* each member looks at two squared norms: that of its own contribution, and that of its part of the
reduced bytes. What is not finite is refused, and so is what is more than ``outlier_factor`` times as long as the
gradient usually was: the median over the steps that this member saw committed. Both are measured against the norm of
the *whole* gradient, which does not depend on shares or on the number of members: a contribution is seldom longer than
the sum of all, a part never. Who has seen less than ``LEAST_STEPS`` steps refuses only what is not finite.

*After the vote* all look at the same tokens, and so come to the same verdict. No sum is longer than its summands laid
end to end (the triangle inequality): where it is, it was spoiled on its way, and nobody's contribution is to blame.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from ring.token import Flag, Token, difference
from ring.view import Care

HISTORY_STEPS = 64
LEAST_STEPS = 8
SLACK = 2.0
"""A sum so many times longer than its summands was spoiled. Rounding and a codec's feedback make it a little longer."""


class Guard:
    """Remembers how long the gradient usually is.

    Args:
        outlier_factor: norms so many times the usual one are refused; 0: never.
    """

    def __init__(self, outlier_factor: float) -> None:
        self._factor = outlier_factor
        self._seen: deque[float] = deque(maxlen=HISTORY_STEPS)

    def committed(self, square_sum: float) -> None:
        """A step of this squared gradient norm was applied."""
        self._seen.append(square_sum)

    def forget(self) -> None:
        """The state is another one: what was usual before says nothing."""
        self._seen.clear()

    def refuses(self, own: float, part: float, care: Care) -> bool:
        """Whether a step must not be applied, given two squared norms."""
        if not (math.isfinite(own) and math.isfinite(part)):
            return True
        usual = median(self._seen) if len(self._seen) >= LEAST_STEPS else 0.0
        doubts = self._factor > 0 and care is not Care.LENIENT and usual > 0
        return doubts and max(own, part) / usual > self._factor**2


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a step cannot be committed.

    Attributes:
        cause: as ``Report.cause``.
        suspect, beside: ranks; None where the tokens do not tell.
        what: for people, to follow the suspect's name, or alone.
    """

    cause: str
    suspect: int | None
    beside: int | None
    what: str


def verdict(tokens: Sequence[Token], stages: int = 1) -> Fault | None:
    """What the tokens of all members, in rank order, say against the step; None: it is to be applied. ``stages``: that
    the model is split into, each with a ring of its own through every so many ranks."""
    size = len(tokens)
    for rank, token in enumerate(tokens):
        right, alike = (rank + 1) % size, (rank + stages) % size
        for after, is_same in (
            (right, token.sent == tokens[right].received),
            (alike, token.stage_sent == tokens[alike].stage_received),
        ):
            if not is_same:
                return Fault("hop", rank, after, f"sent other bytes than arrived at rank {after}")
    most = Counter(_identity(token) for token in tokens).most_common(1)[0][0]  # the lowest rank's, of equals
    usual = next(token for token in tokens if _identity(token) == most)
    for rank, token in enumerate(tokens):
        if what := difference(usual, token):
            return Fault("digest" if token.digest != usual.digest else "", rank, None, f"has another {what}")
    if any(Flag.REJECT in token.flags for token in tokens):
        suspect, what = _blamed(tokens)
        return Fault("contribution", suspect, None, what)
    return None


def odd_ones_out(digests: Sequence[bytes], stages: int = 1) -> set[int]:
    """Ranks whose digest is not that of the most members that hold the same of ``stages`` parts of the model; where two
    are as frequent, that of the lowest rank counts."""
    odd = set()
    for stage in range(stages):
        alike = digests[stage::stages]
        most = Counter(alike).most_common(1)[0][0]
        odd |= {stages * replica + stage for replica, digest in enumerate(alike) if digest != most}
    return odd


def _identity(token: Token) -> tuple[int, int, bytes, bytes]:
    return token.generation, token.step, token.lineage, token.digest


def _blamed(tokens: Sequence[Token]) -> tuple[int | None, str]:
    for rank, token in enumerate(tokens):
        if not math.isfinite(token.own):
            return rank, "contributed what is not finite"
    total, summands = math.fsum(token.part for token in tokens), math.fsum(math.sqrt(token.own) for token in tokens)
    if not total <= (SLACK * summands) ** 2:
        return None, "the sum is not that of what the members contributed: it was spoiled on its way"
    rank = max(range(len(tokens)), key=lambda rank: tokens[rank].own)
    return rank, f"contributed a gradient of norm {math.sqrt(tokens[rank].own):.3g}, absurdly large"
