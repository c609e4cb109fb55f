"""When is a silent peer dead? A core: times come in, deadlines go out.

A closed socket is a death notice and needs no detector. This one is for what closes nothing: a pulled cable, a stopped
process, a host that lost power. A peer is dead when nothing was heard from it for ``death_s``, three beats at least.

Self-doubt. The peer that judges must have been awake to hear. Where its own event loop was late by x seconds (it was
stopped, swapped out, or held up by a long callback), beats may lie unread in its sockets: it doubts itself first and
extends the deadline by x. The next sign of life restores the usual one.
"""

from __future__ import annotations


def beat_defaults(rtt_ms: float) -> tuple[float, float]:
    """(heartbeat_s, death_s) for a neighbour at ``rtt_ms``.

    Below 5 ms (the same machine or LAN) silence means death quickly: 0.25 s / 2 s. From 50 ms on it is a far peer,
    where routes flap for seconds: 5 s / 15 s. Between, both grow in proportion from the one pair to the other. In
    every case at least three beats in a row are lost before a death is called.
    """
    part = min(max((rtt_ms - 5) / (50 - 5), 0.0), 1.0)
    return 0.25 + part * (5 - 0.25), 2 + part * (15 - 2)


class FailureDetector:
    """Watches one peer over one connection.

    Args:
        heartbeat_s: how often it beats.
        death_s: the silence that kills.
        now: it counts as heard now.
    """

    def __init__(self, *, heartbeat_s: float, death_s: float, now: float) -> None:
        if not 0 < heartbeat_s <= death_s:
            raise ValueError(f"a death after {death_s} s of silence, with a beat every {heartbeat_s} s")
        self.heartbeat_s, self.death_s = heartbeat_s, death_s
        self._last_heard = now
        self._doubt_s = 0.0

    def heard(self, now: float) -> None:
        """Something came from the peer. Earlier than the last time changes nothing."""
        if now > self._last_heard:
            self._last_heard = now
            self._doubt_s = 0.0

    def loop_late(self, late_s: float) -> None:
        """This judge's own loop ran ``late_s`` later than it meant to: beats may have come and not been read yet.

        Less than a quarter of a beat is the usual unrest of a busy loop, and changes nothing.
        """
        if late_s > self.heartbeat_s / 4:
            self._doubt_s += late_s

    def silent_for(self, now: float) -> float:
        return max(now - self._last_heard, 0.0)

    def next_deadline(self) -> float:
        return self._last_heard + max(self.death_s, 3 * self.heartbeat_s) + self._doubt_s

    def dead(self, now: float) -> bool:
        return now >= self.next_deadline()
