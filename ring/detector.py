"""Decides when a silent peer is dead. A core: times come in, deadlines go out.

A closed socket reports a death at once and needs no detector. This one is for failures that close nothing: a pulled
cable, a stopped process, a host without power. A peer is dead if nothing was received from it for ``death_s``, and for
at least three heartbeat intervals.

Self-doubt. If this process's own event loop ran x seconds late (stopped, swapped out, or held up by a long callback),
heartbeats may lie unread in its sockets. So the detector extends the deadline by x. The next sign of life restores the
usual deadline.
"""

from __future__ import annotations


def beat_defaults(rtt_ms: float) -> tuple[float, float]:
    """(heartbeat_s, death_s) for a neighbour at ``rtt_ms``.

    Up to 5 ms (the same machine or LAN): 0.25 s / 2 s. From 50 ms on (a far peer, where routes flap for seconds): 5 s /
    15 s. Between them both grow linearly. A death always needs at least three lost heartbeats in a row.
    """
    part = min(max((rtt_ms - 5) / (50 - 5), 0.0), 1.0)
    return 0.25 + part * (5 - 0.25), 2 + part * (15 - 2)


class FailureDetector:
    """Watches one peer over one connection.

    Args:
        heartbeat_s: the peer's heartbeat interval.
        death_s: the silence after which it counts as dead.
        now: counts as the first sign of life.
    """

    def __init__(self, *, heartbeat_s: float, death_s: float, now: float) -> None:
        if not 0 < heartbeat_s <= death_s:
            raise ValueError(f"invalid heartbeat_s {heartbeat_s}, death_s {death_s}: 0 < heartbeat_s <= death_s")
        self.heartbeat_s, self.death_s = heartbeat_s, death_s
        self._last_heard = now
        self._doubt_s = 0.0

    def heard(self, now: float) -> None:
        """Note a sign of life at ``now``. A time before the last one changes nothing."""
        if now > self._last_heard:
            self._last_heard = now
            self._doubt_s = 0.0

    def loop_late(self, late_s: float) -> None:
        """Note that this process's event loop ran ``late_s`` late, so heartbeats may have arrived unread. Less than a
        quarter of a heartbeat interval is normal for a busy loop and changes nothing."""
        if late_s > self.heartbeat_s / 4:
            self._doubt_s += late_s

    def silent_for(self, now: float) -> float:
        return max(now - self._last_heard, 0.0)

    def next_deadline(self) -> float:
        return self._last_heard + max(self.death_s, 3 * self.heartbeat_s) + self._doubt_s

    def dead(self, now: float) -> bool:
        return now >= self.next_deadline()
