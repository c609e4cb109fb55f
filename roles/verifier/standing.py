"""What a verifier remembers of a peer that lends a drafter, wherever it listens now and whatever it drafts with."""

from __future__ import annotations

from p2ptrain.core.errors import P2PTrainError, Refused
from roles.speculation.received import REFUSALS
from wire.handshake import RefusalCode

STRUCK_S, LONGEST_STRUCK_S = 60.0, 3600.0
"""For so long one is not dialled that sent what no correct drafter sends, or owed an answer; it doubles each time, and
begins anew where that is longer ago than the longest: a slow link now and then shall not cost an honest one its place.
"""
REDIAL_S = 5.0
"""Between two dials of one that says each time that it is elsewhere, or another."""
SAID_S, THERE_S = 3600.0, 60.0
"""After so long people hear of the same fault again, and of what a peer says of itself: that it is there, what with."""
_CODES = {*REFUSALS, *RefusalCode}


class Standing:
    """Of one peer.

    Attributes:
        struck_until: it is not dialled until then, since it was at fault.
        of_no_use: it was let go for others, for its drafts were hardly ever right.
    """

    def __init__(self) -> None:
        self.struck_until = 0.0
        self.of_no_use = False
        self._dialled_at = -REDIAL_S
        self._strikes: int = 0
        self._said: dict[str, float] = {}  # by the kind of news, of which there are few
        self._unfit = ""

    @property
    def not_before(self) -> float:
        """It is not to be dialled until then."""
        return max(self.struck_until, self._dialled_at + REDIAL_S)

    def dialled(self, now: float) -> None:
        """It is dialled now."""
        self._dialled_at = now

    def struck(self, now: float) -> float:
        """It is at fault. Returns for how long it is not dialled."""
        if now > self.struck_until + LONGEST_STRUCK_S:
            self._strikes = 0
        wait_s = min(STRUCK_S * 2.0**self._strikes, LONGEST_STRUCK_S)
        self._strikes += wait_s < LONGEST_STRUCK_S
        self.struck_until = now + wait_s
        return wait_s

    def fault_is_news(self, problem: P2PTrainError, now: float) -> bool:
        """Whether people are to hear of it."""
        kind = type(problem).__name__
        if isinstance(problem, Refused) and problem.code in _CODES:  # others are whatever it likes
            kind = problem.code
        if now - self._said.get(kind, -SAID_S) < SAID_S:
            return False
        self._said[kind] = now
        self._said.pop("there", None)
        return True

    def there_is_news(self, now: float) -> bool:
        """Whether people are to hear that it is there."""
        if now - self._said.get("there", -THERE_S) < THERE_S:
            return False
        self._said["there"] = now
        return True

    def unfit_is_news(self, tokenizer: str, now: float) -> bool:
        """Whether people are to hear that it has this tokenizer, which does not fit."""
        if tokenizer == self._unfit or now - self._said.get("unfit", -THERE_S) < THERE_S:
            return False
        self._unfit, self._said["unfit"] = tokenizer, now
        return True
