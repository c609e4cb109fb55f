"""How much a member may give to others beside its own ring's work: its steps must not take noticeably longer. Pure.

Theory of operation: a step gets an *allowance* of bytes. It begins with a part of what can be sent one after the other
within ``SHARE`` of a usual step: were nothing of that hidden, the step would still hardly take longer. Where computing
and sending do not hinder one another, much more can be given for nothing: so the allowance doubles from step to step,
until a step does take longer by that share. From then on it is judged by the mean of a *round* of steps, because
single ones scatter: halved where the round took longer, else raised a little.

What a usual step takes is measured in steps in which nothing is given; each round begins with one, because shares and
machines change. A new view begins with half the allowance of the one before, after a single quiet step: followers
would fall behind for good while more are waited for. Where no ring runs there is nobody to hinder.
"""

from __future__ import annotations

from collections import deque
from statistics import median

SHARE = 0.05
ROUND = 8
"""Steps, of which the first is quiet."""
KNOWN_STEPS = 3
"""So many quiet steps make a usual one; before, nothing is given."""
FIRST = 0.5
"""Of ``SHARE``, to begin with: copying and hashing are not in the time that sending takes."""
RISE = 1.5


class Pace:
    """See the module's docstring.

    Args:
        piece_bytes: the least that a step allows: whoever waits is always served at last.
    """

    def __init__(self, piece_bytes: int) -> None:
        self._piece_bytes = piece_bytes
        self._quiet_s: deque[float] = deque(maxlen=2 * ROUND)
        self._busy: list[tuple[float, int]] = []  # seconds and bytes given, of this round's steps that were not quiet
        self._byte_s = 0.0  # to give one byte, averaged over what was given
        self._allowance_bytes = 0.0
        self._doubling = True
        self._given_bytes = 0
        self._credit_bytes = 0.0
        self._steps_left = 0  # of this round
        self._known_steps = KNOWN_STEPS
        self.free = True

    @property
    def usual_s(self) -> float:
        """Of a step in which nothing is given; 0 where it is not known."""
        return median(self._quiet_s) if len(self._quiet_s) >= self._known_steps else 0.0

    @property
    def allowance_bytes(self) -> float:
        """Of a step."""
        first_bytes = FIRST * SHARE * self.usual_s / self._byte_s if self._byte_s and not self._allowance_bytes else 0.0
        return max(self._piece_bytes, self._allowance_bytes, first_bytes)

    @property
    def ready(self) -> bool:
        """Whether anything will be given before long; else a usual step is not known yet."""
        return self.free or self.usual_s > 0

    @property
    def open(self) -> bool:
        """Whether the next piece may be given now; what goes over the allowance is taken off the steps to come."""
        return self.free or self._credit_bytes > 0

    def ring_began(self) -> None:
        """Steps are computed from now on, by other members perhaps: how long they took before counts no more."""
        self.free, self._doubling = False, True
        self._quiet_s.clear()
        self._busy.clear()
        self._known_steps, self._steps_left = (1, ROUND) if self._allowance_bytes else (KNOWN_STEPS, 0)
        self._allowance_bytes /= 2
        self._credit_bytes = 0.0
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
        byte_s, before_bytes = max(seconds, 0.0) / max(size_bytes, 1), self.allowance_bytes
        if self._byte_s:
            self._byte_s = (7 * self._byte_s + byte_s) / 8
        else:  # the first piece ever: the step under way need not pass before that is made use of
            self._byte_s = byte_s
            self._credit_bytes += max(0.0, self.allowance_bytes - before_bytes)

    def stepped(self, seconds: float) -> None:
        """The ring committed a step that took ``seconds``."""
        given_bytes, self._given_bytes = self._given_bytes, 0
        if not given_bytes:
            self._quiet_s.append(seconds)
        elif self.usual_s:
            self._busy.append((seconds, given_bytes))
            if self._doubling:
                self._judge(2.0)
        self._steps_left -= 1
        if self._steps_left < 0 and self._busy:
            self._judge(RISE)
        # A debt is paid off before anything more is given, or a piece larger than the allowance would go unbounded.
        if self._steps_left < 0 or not self.usual_s:
            self._steps_left, self._credit_bytes = ROUND - 1, min(self._credit_bytes, 0.0)
        else:
            self._credit_bytes = min(self._credit_bytes, 0.0) + self.allowance_bytes

    def _judge(self, rise: float) -> None:
        """Raise or halve the allowance by what the steps since the last time took."""
        mean_s = sum(seconds for seconds, _ in self._busy) / len(self._busy)
        most_bytes = max(given_bytes for _, given_bytes in self._busy)
        self._busy.clear()
        if mean_s <= (1 + SHARE) * self.usual_s:
            # Only so far beyond what was really given: what is not asked for is not measured either.
            self._allowance_bytes = min(rise * max(self.allowance_bytes, most_bytes), rise * most_bytes)
        else:
            self._allowance_bytes, self._doubling = min(self.allowance_bytes, most_bytes) / 2, False
