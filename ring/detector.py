"""When is a silent neighbour dead? A core: times come in, a deadline goes out.

A closed socket is a death notice and needs no detector. This one is for what closes nothing: a pulled cable, a stopped
process, a host that lost power. A peer is dead when nothing was heard from it for ``death_s``.

The peer that judges must have been awake to hear. Where its own event loop was late by x seconds (it was stopped,
swapped out, or held up by a long callback), beats may lie unread in its sockets: it doubts itself first and extends
the deadline by x. The next beat heard restores the usual one.
"""

from __future__ import annotations

_LAN_RTT_MS = 5.0
_LAN_BEATS_S = (0.5, 2.0)
_FAR_BEATS_S = (5.0, 15.0)
_FAR_RTT_MS = 50.0


def beat_defaults(rtt_ms: float) -> tuple[float, float]:
    """(heartbeat_s, death_s) for a neighbour at ``rtt_ms``.

    Below 5 ms (the same machine or LAN) silence means death quickly: 0.5 s / 2 s. From 50 ms on it is a far peer,
    where routes flap for seconds: 5 s / 15 s. Between, both grow in proportion from the one pair to the other. In
    every case at least three beats in a row are lost before a death is called.
    """
    if rtt_ms < _LAN_RTT_MS:
        return _LAN_BEATS_S
    part = min((rtt_ms - _LAN_RTT_MS) / (_FAR_RTT_MS - _LAN_RTT_MS), 1.0)
    heartbeat_s, death_s = (near + part * (far - near) for near, far in zip(_LAN_BEATS_S, _FAR_BEATS_S, strict=True))
    return heartbeat_s, death_s


class FailureDetector:
    """Watches one neighbour.

    Args:
        death_s: silence after which the neighbour counts as dead.
        now: it counts as heard now.
    """

    def __init__(self, *, death_s: float, now: float) -> None:
        if death_s <= 0:
            raise ValueError(f"a death after {death_s} s of silence")
        self.death_s = death_s
        self._last_heard = now
        self._doubt_s = 0.0

    def heard(self, now: float) -> None:
        """Something came from the neighbour. Earlier than the last time changes nothing."""
        if now > self._last_heard:
            self._last_heard = now
            self._doubt_s = 0.0

    def loop_late(self, late_s: float) -> None:
        """This peer's own loop ran ``late_s`` later than it meant to: beats may have come and not been read yet."""
        self._doubt_s += max(late_s, 0.0)

    def silent_for(self, now: float) -> float:
        """Seconds since the neighbour was last heard."""
        return max(now - self._last_heard, 0.0)

    def next_deadline(self) -> float:
        """The time at which the neighbour counts as dead, unless it is heard before."""
        return self._last_heard + self.death_s + self._doubt_s

    def dead(self, now: float) -> bool:
        """Whether the deadline has passed."""
        return now >= self.next_deadline()

    def validate(self) -> None:
        """Assert what is true between any two calls."""
        assert self._doubt_s >= 0.0
        assert self.next_deadline() >= self._last_heard + self.death_s
