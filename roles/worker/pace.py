"""How much a member may give to others beside its own ring's work: its steps must not take noticeably longer. Pure.

Theory of operation: a step gets an *allowance* of bytes. So much as could be given one after the other within
``SHARE`` of a usual step is always allowed: even if nothing of it were hidden, the step would take no more than that
longer. Beyond it, the allowance doubles from step to step while steps take no longer than that, for where computing and
sending do not hinder one another much more can be given for nothing; and it is halved when a step does take longer.

What a usual step takes is measured in steps in which nothing is given; one in ``QUIET_EVERY`` stays such, because
shares and machines change. Where no ring runs there is nobody to hinder.
"""

from __future__ import annotations

from collections import deque
from statistics import median

SHARE = 0.05
QUIET_EVERY = 8
KNOWN_STEPS = 3
"""So many quiet steps make a usual one; before, nothing is given."""


class Pace:
    """See the module's docstring.

    Args:
        piece_bytes: the least that a step allows: whoever waits is always served at last.
    """

    def __init__(self, piece_bytes: int) -> None:
        self._piece_bytes = piece_bytes
        self._quiet_s: deque[float] = deque(maxlen=2 * QUIET_EVERY)
        self._byte_s = 0.0  # to give one byte, averaged over what was given
        self._bold_bytes = 0.0  # the part of the allowance that stands on measured steps alone
        self._given_bytes = 0
        self._credit_bytes = 0.0
        self._steps_left = QUIET_EVERY
        self.free = True

    @property
    def usual_s(self) -> float:
        """Of a step in which nothing is given; 0 where it is not known."""
        return median(self._quiet_s) if len(self._quiet_s) >= KNOWN_STEPS else 0.0

    @property
    def allowance_bytes(self) -> float:
        """Of a step."""
        safe_bytes = SHARE * self.usual_s / self._byte_s if self._byte_s else 0.0
        return max(self._piece_bytes, safe_bytes, self._bold_bytes)

    @property
    def open(self) -> bool:
        """Whether the next piece may be given now; what goes over the allowance is taken off the steps to come."""
        return self.free or self._credit_bytes > 0

    def ring_began(self) -> None:
        """Steps are computed from now on, by other members perhaps: what was measured before counts no more."""
        self.free = False
        self._quiet_s.clear()
        self._bold_bytes = self._credit_bytes = 0.0
        self._given_bytes = 0

    def ring_ended(self) -> None:
        self.free = True

    def gives(self, size_bytes: int) -> None:
        """A piece is given now."""
        self._given_bytes += size_bytes
        if not self.free:
            self._credit_bytes -= size_bytes

    def gave(self, size_bytes: int, seconds: float) -> None:
        """It was, and the kernel took ``seconds`` to take it."""
        byte_s = max(seconds, 0.0) / max(size_bytes, 1)
        self._byte_s = (7 * self._byte_s + byte_s) / 8 if self._byte_s else byte_s

    def stepped(self, seconds: float) -> None:
        """The ring committed a step that took ``seconds``."""
        if not self._given_bytes:
            self._quiet_s.append(seconds)
        elif self.usual_s:
            bold_bytes = self._bold_bytes / 2
            if seconds <= (1 + SHARE) * self.usual_s:
                bold_bytes = max(2 * self.allowance_bytes, self._given_bytes)
            # Only doubling beyond what was really given: what is not asked for is not measured either.
            self._bold_bytes = min(bold_bytes, 2.0 * self._given_bytes)
        self._given_bytes = 0
        self._steps_left -= 1
        if self._steps_left <= 0 or len(self._quiet_s) < KNOWN_STEPS:
            self._steps_left = QUIET_EVERY
            self._credit_bytes = min(self._credit_bytes, 0.0)  # a quiet one
        else:
            self._credit_bytes = min(self._credit_bytes, 0.0) + self.allowance_bytes
