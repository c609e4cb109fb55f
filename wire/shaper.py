"""What a link does to a stream of bytes: the arithmetic of link emulation, without clock or sockets.

Theory of operation. A ``LinkShaper`` stands for one direction of one TCP connection. Bytes pass four stages::

    write ──▶ token bucket ──▶ stall ──▶ delay + jitter + retransmission ──▶ in-order delivery ──▶ deliver_at
              (rate, burst)    (the sender's radio   (propagation)            (what is late holds up
                                is silent)                                     all that follows)

- **Rate** is a token bucket: between two departures no more than ``burst_bytes + rate * seconds`` leave. It is kept as
  one number, the time at which all that was accepted so far would be through at the plain rate (virtual scheduling;
  ITU-T I.371, the generic cell rate algorithm).
- **Stalls** hold departures, as a scanning Wi-Fi card does; afterwards the backlog leaves at the plain rate, not at
  once.
- **Jitter** is uniform in [0, ``jitter_ms``] and never reorders.
- **Loss** is what the application sees of it over TCP: never a missing byte, always a late one. A send of k segments of
  1448 bytes is hit with probability ``1 - (1 - loss)^k``. With three segments to follow the lost one (k >= 4) three
  duplicate acknowledgements start a fast retransmit, which costs one round trip (RFC 5681, 3.2); a shorter send waits
  for the timer, ``RTO = RTT + max(200 ms, 4 * jitter)`` (RFC 6298 with Linux's floor). A retransmission is lost with
  probability ``loss`` again; then the timer decides, each next time after twice the wait. The congestion window is not
  modelled: ``rate_bps`` is the goodput that the link has at that loss.
- **A cut** ends the connection ``cut_after_s`` after it was opened.

Equal generators, presets and sends give equal times.
"""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass, fields
from types import MappingProxyType

from p2ptrain.core.errors import UserError

SEGMENT_PAYLOAD_BYTES = 1448  # a full TCP segment on Ethernet, with timestamps
FAST_RETRANSMIT_SEGMENTS = 4  # the lost one, and three whose acknowledgements tell of it
RTO_FLOOR_S = 0.2
RTO_CEILING_S = 120.0


@dataclass(frozen=True, slots=True)
class LinkPreset:
    """The figures of one direction of a link. A zero switches a feature off.

    Attributes:
        delay_ms: one-way propagation delay.
        jitter_ms: what a delivery may be later than that, at most.
        rate_bps: bits per second; 0 is unlimited.
        loss: probability that a segment is lost, below 1.
        stall_every_s, stall_s: every ``stall_every_s`` the link sends nothing for ``stall_s``; the first stall begins
            at a random point of the first period.
        cut_after_s: age at which the connection breaks.
        burst_bytes: what may leave at once after a pause.
    Raises: ``UserError`` where a figure cannot be.
    """

    name: str
    delay_ms: float
    jitter_ms: float = 0.0
    rate_bps: float = 0.0
    loss: float = 0.0
    stall_every_s: float = 0.0
    stall_s: float = 0.0
    cut_after_s: float = 0.0
    burst_bytes: int = 0
    description: str = ""

    def __post_init__(self) -> None:
        figures = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("name", "description")}
        for key, value in figures.items():
            if not (math.isfinite(value) and value >= 0):
                raise UserError(f"link {self.name}: {key} = {value} is not a number of at least 0")
        if self.loss >= 1:
            raise UserError(f"link {self.name}: loss = {self.loss} is a probability and must be below 1")
        if self.stall_s and self.stall_s >= self.stall_every_s:
            raise UserError(
                f"link {self.name}: stalls of {self.stall_s} s every {self.stall_every_s} s leave no time to send",
                remedy="stall_every_s must be longer than stall_s",
            )

    @property
    def delay_s(self) -> float:
        return self.delay_ms / 1e3

    @property
    def jitter_s(self) -> float:
        return self.jitter_ms / 1e3

    @property
    def rtt_s(self) -> float:
        """The round trip without queues and jitter, where both directions are like this one."""
        return 2 * self.delay_s


_ALL = (
    LinkPreset("lan", 0.15, 0.05, 1e9, burst_bytes=64 << 10, description="gigabit Ethernet through one switch"),
    LinkPreset(
        "wifi",
        2.0,
        4.0,
        150e6,
        stall_every_s=30.0,
        stall_s=0.1,
        burst_bytes=64 << 10,
        description="a laptop near its access point: jitter, and short stalls while it scans",
    ),
    LinkPreset("metro", 4.0, 0.5, 500e6, burst_bytes=64 << 10, description="fibre to fibre within one city"),
    LinkPreset(
        "wan", 20.0, 2.0, 100e6, loss=1e-4, burst_bytes=32 << 10, description="homes or sites within one continent"
    ),
    LinkPreset(
        "transcontinental",
        75.0,
        5.0,
        100e6,
        loss=5e-4,
        burst_bytes=32 << 10,
        description="Europe to North America's west, 150 ms round trip",
    ),
    LinkPreset(
        "satellite",
        300.0,
        10.0,
        20e6,
        loss=1e-3,
        burst_bytes=16 << 10,
        description="geostationary: 600 ms round trip",
    ),
    LinkPreset(
        "lossy",
        40.0,
        20.0,
        20e6,
        loss=0.02,
        stall_every_s=20.0,
        stall_s=1.0,
        burst_bytes=16 << 10,
        description="a crowded mobile cell: two segments in a hundred are lost, and it stalls for seconds a minute",
    ),
)

PRESETS = MappingProxyType({preset.name: preset for preset in _ALL})


_ROUND_TRIP = re.compile(r"(\d{1,4}(?:\.\d{1,3})?)ms", re.ASCII)


def preset_named(name: str) -> LinkPreset:
    """The shipped preset of that name; ``80ms`` is a link that does nothing but delay, with that round trip.

    Raises ``UserError`` naming all of them where there is none.
    """
    if plain := _ROUND_TRIP.fullmatch(name):
        return LinkPreset(name, float(plain[1]) / 2, description="nothing but its delay")
    if name not in PRESETS:
        known = ", ".join(PRESETS)
        raise UserError(f"there is no link preset {name!r}", remedy=f"choose one of {known}, or a round trip: 20ms")
    return PRESETS[name]


class LinkShaper:
    """One direction of one emulated connection.

    Args:
        rng: owned by this shaper from now on.
        opened_at: when the connection was opened, on the same clock as ``now``; stalls and the cut count from it.
    Attributes:
        cut_at: when the connection breaks; infinite where it does not.
    """

    def __init__(self, preset: LinkPreset, rng: random.Random, *, opened_at: float = 0.0) -> None:
        self.preset = preset
        self.cut_at = opened_at + preset.cut_after_s if preset.cut_after_s else math.inf
        self._rng = rng
        self._first_stall_at = opened_at + rng.random() * preset.stall_every_s
        self._byte_s = 8 / preset.rate_bps if preset.rate_bps else 0.0
        self._credit_s = preset.burst_bytes * self._byte_s
        self._through_at = -math.inf
        self._last_delivery_at = -math.inf

    def send(self, now: float, nbytes: int) -> float:
        """When the last of ``nbytes``, written at ``now``, arrives. Never earlier than what an earlier call returned.

        ``nbytes`` = 0 asks for the arrival of a mark without payload, such as the end of the stream.
        """
        flight_s = self.preset.delay_s + self._rng.random() * self.preset.jitter_s + self._retransmission_s(nbytes)
        self._last_delivery_at = max(self._last_delivery_at, self._depart(now, nbytes) + flight_s)
        return self._last_delivery_at

    def validate(self) -> None:
        """Assert what must hold between two calls."""
        assert self._credit_s >= 0
        assert self._last_delivery_at == -math.inf or (
            self._last_delivery_at >= self._through_at - self._credit_s - 1e-6
        )

    def _depart(self, now: float, nbytes: int) -> float:
        self._through_at = max(self._through_at, now) + nbytes * self._byte_s
        wanted_at = max(now, self._through_at - self._credit_s)
        departs_at = self._after_stall(wanted_at)
        self._through_at += departs_at - wanted_at  # the backlog of a stall leaves at the plain rate, not all at once
        return departs_at

    def _after_stall(self, at: float) -> float:
        if not self.preset.stall_s or at < self._first_stall_at:
            return at
        into_s = (at - self._first_stall_at) % self.preset.stall_every_s
        return max(at, at + self.preset.stall_s - into_s)

    def _retransmission_s(self, nbytes: int) -> float:
        loss = self.preset.loss
        segments = max(1, math.ceil(nbytes / SEGMENT_PAYLOAD_BYTES))
        if not loss or self._rng.random() >= 1 - (1 - loss) ** segments:
            return 0.0
        timer_s = self.preset.rtt_s + max(RTO_FLOOR_S, 4 * self.preset.jitter_s)
        late_s = 0.0
        if segments >= FAST_RETRANSMIT_SEGMENTS:
            late_s = self.preset.rtt_s
            if self._rng.random() >= loss:
                return late_s
        while True:
            late_s += timer_s
            if self._rng.random() >= loss:
                return late_s
            timer_s = min(2 * timer_s, RTO_CEILING_S)
