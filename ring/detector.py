"""Decides when a silent peer is dead. A core: times come in, deadlines go out.

A closed socket reports a death at once and needs no detector. This one is for failures that close nothing: a pulled
cable, a stopped process, a host without power. A peer is dead if nothing was received from it for ``death_s``, and for
at least three heartbeat intervals.

If this process's own event loop runs late, heartbeats may lie unread in its sockets. So each wait counts as long as it
was planned, however long it took. A peer may run late, too, while it loads libraries or shares a busy machine. So a
peer that was silent for longer than its heartbeat interval before, and lived, is granted more, for a while.
"""

from __future__ import annotations

LATE_FACTOR, MOST_FACTOR = 2, 3
"""A peer is granted ``LATE_FACTOR`` times its recent lateness on top of the usual silence, and at most ``MOST_FACTOR``
times that silence in all."""
FORGET = 0.98  # share of the known lateness that is left at each wait that ran out and that a sign of life preceded
LEAST_WAIT_S = 0.001  # a timer may fire a little early; the rest is no reason to spin


def beat_defaults(rtt_ms: float) -> tuple[float, float]:
    """(heartbeat_s, death_s) for a neighbour at ``rtt_ms``.

    Up to 5 ms (the same machine or LAN): 0.25 s / 2 s. From 50 ms on (a far peer, where routes flap for seconds): 5 s /
    15 s. Between them both grow linearly. A death always needs at least three lost heartbeats in a row.
    """
    part = min(max((rtt_ms - 5) / (50 - 5), 0.0), 1.0)
    return 0.25 + part * (5 - 0.25), 2 + part * (15 - 2)


class FailureDetector:
    """Watches one peer. The owner waits ``wait_s`` for a sign of life, calls ``waited`` if none
    came, and begins again.

    Args:
        heartbeat_s: the peer's heartbeat interval.
        death_s: the silence after which it counts as dead.
        late_s: lateness to assume before any is known; a newcomer loads libraries.

    Attributes:
        silent_s: the silence that counts so far.
        late_s: how late the peer was lately.
    """

    def __init__(self, *, heartbeat_s: float, death_s: float, late_s: float = 0.0) -> None:
        self.heartbeat_s, self.death_s = heartbeat_s, death_s
        self.silent_s = 0.0
        self._heard_at, self.late_s = 0.0, late_s

    @property
    def wait_s(self) -> float:
        return max(min(self.heartbeat_s, self._limit_s - self.silent_s), LEAST_WAIT_S)

    def waited(self, planned_s: float, now: float, heard_at: float) -> bool:
        """Note the end of a wait. Returns whether the peer counts as dead.

        Args:
            planned_s: how long the wait was to take.
            heard_at: time of the peer's last sign of life.
        """
        if heard_at > self._heard_at:
            self.late_s = max(FORGET * self.late_s, self.silent_s - self.heartbeat_s)
            self._heard_at, self.silent_s = heard_at, 0.0
        self.silent_s = min(self.silent_s + planned_s, max(now - heard_at, 0.0))
        return self.silent_s >= self._limit_s

    @property
    def _limit_s(self) -> float:
        usual_s = max(self.death_s, 3 * self.heartbeat_s)
        return min(usual_s + LATE_FACTOR * self.late_s, MOST_FACTOR * usual_s)
