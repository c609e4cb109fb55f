"""When is a silent peer dead? A core: times come in, deadlines go out.

A closed socket is a death notice and needs no detector. This one is for what closes nothing: a pulled cable, a stopped
process, a host that lost power. A peer is dead when nothing was heard from it for longer than its own past allows.

Learned deadlines (``Rhythm``). Of each peer the newest ``WINDOW`` gaps between two beats are remembered, across views
and connections, and the patience is ``median + FACTOR * (longest - median)``, within bounds. (Not phi accrual: the gaps
of a machine whose cores are shared are not normal, and its variance forgets exactly the few long ones that matter.)
``tests/ring/test_detector.py`` replays what eight busy workers on two cores did, and states the margin.

Bounds. Below: three quarters of ``death_s``, and three beats at least: one lost beat is weather, and a machine may
stop for a second (swap, a container's quota). Above: ``death_s``: whatever a
peer got us used to, that silence is a death, so that nobody waits longer than a person was told. Before ``ENOUGH`` gaps
are known: ``death_s``.

Self-doubt. The peer that judges must have been awake to hear. Where its own event loop was late by x seconds (it was
stopped, swapped out, or held up by a long callback), beats may lie unread in its sockets: it doubts itself first and
extends the deadline by x. The next sign of life restores the usual one, and what the judge slept through is not
learned as the peer's.
"""

from __future__ import annotations

from collections import OrderedDict, deque

WINDOW = 256
"""Gaps remembered of a peer: a minute near by, twenty minutes far away."""
ENOUGH = 16
FACTOR = 3.0
PEERS_KEPT = 256


def beat_defaults(rtt_ms: float) -> tuple[float, float]:
    """(heartbeat_s, death_s) for a neighbour at ``rtt_ms``.

    Below 5 ms (the same machine or LAN) silence means death quickly: 0.25 s / 2 s. From 50 ms on it is a far peer,
    where routes flap for seconds: 5 s / 15 s. Between, both grow in proportion from the one pair to the other. In
    every case at least three beats in a row are lost before a death is called.
    """
    part = min(max((rtt_ms - 5) / (50 - 5), 0.0), 1.0)
    return 0.25 + part * (5 - 0.25), 2 + part * (15 - 2)


class Rhythm:
    """The gaps between one peer's beats, in seconds: what its silence is measured by."""

    def __init__(self) -> None:
        self._gaps: deque[float] = deque(maxlen=WINDOW)

    def add(self, gap_s: float) -> None:
        self._gaps.append(max(gap_s, 0.0))

    def patience_s(self, heartbeat_s: float, death_s: float) -> float:
        """How long the peer may be silent; see the module's docstring for the rule and its bounds."""
        least_s = max(0.75 * death_s, 3 * heartbeat_s)
        if len(self._gaps) < ENOUGH:
            return max(death_s, least_s)
        ordered = sorted(self._gaps)
        median_s = ordered[len(ordered) // 2]
        return min(max(median_s + FACTOR * (ordered[-1] - median_s), least_s), max(death_s, least_s))


class Memory:
    """What one judge knows of its peers, across views: bounded, the one heard longest ago is forgotten first."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, Rhythm] = OrderedDict()

    def of(self, peer_id: str) -> Rhythm:
        known = self._known.setdefault(peer_id, Rhythm())
        self._known.move_to_end(peer_id)
        while len(self._known) > PEERS_KEPT:
            self._known.popitem(last=False)
        return known


class FailureDetector:
    """Watches one peer over one connection.

    Args:
        heartbeat_s: how often it beats.
        death_s: the silence that kills where nothing is known of it.
        now: it counts as heard now.
        rhythm: what is known of it from before.
    """

    def __init__(self, *, heartbeat_s: float, death_s: float, now: float, rhythm: Rhythm | None = None) -> None:
        if not 0 < heartbeat_s <= death_s:
            raise ValueError(f"a death after {death_s} s of silence, with a beat every {heartbeat_s} s")
        self.heartbeat_s, self.death_s = heartbeat_s, death_s
        self._rhythm = rhythm or Rhythm()
        self._last_heard = now
        self._last_beat: float | None = None
        self._patience_s = self._rhythm.patience_s(heartbeat_s, death_s)
        self._doubt_s = 0.0
        self._asleep_s = 0.0  # of this judge, since the last beat

    def heard(self, now: float) -> None:
        """Something came from the peer. Earlier than the last time changes nothing."""
        if now > self._last_heard:
            self._last_heard = now
            self._doubt_s = 0.0

    def beat(self, now: float) -> None:
        """A beat came, or the acknowledgement of one: heard, and learned from."""
        self.heard(now)
        if self._last_beat is not None:
            self._rhythm.add(now - self._last_beat - self._asleep_s)
            self._patience_s = self._rhythm.patience_s(self.heartbeat_s, self.death_s)
        self._last_beat, self._asleep_s = now, 0.0

    def loop_late(self, late_s: float) -> None:
        """This judge's own loop ran ``late_s`` later than it meant to: beats may have come and not been read yet.

        Less than a quarter of a beat is the usual unrest of a busy loop, and changes nothing.
        """
        if late_s > self.heartbeat_s / 4:
            self._doubt_s += late_s
            self._asleep_s += late_s

    def silent_for(self, now: float) -> float:
        """Seconds since the peer was last heard."""
        return max(now - self._last_heard, 0.0)

    def next_deadline(self) -> float:
        """The time at which the peer counts as dead, unless it is heard before."""
        return self._last_heard + self._patience_s + self._doubt_s

    def dead(self, now: float) -> bool:
        """Whether the deadline has passed."""
        return now >= self.next_deadline()

    def validate(self) -> None:
        """Assert what is true between any two calls."""
        assert self._doubt_s >= 0.0 <= self._asleep_s
        assert self.next_deadline() >= self._last_heard + min(2 * self.heartbeat_s, self.death_s)
