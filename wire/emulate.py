"""Link emulation: makes any ``Network`` as slow and unsteady as a ``LinkPreset`` says.

``EmulatedNetwork`` wraps the transport of each connection, dialled or accepted. It shapes **what this side sends**. If
both ends are emulated, each direction is shaped once. Dialling first waits for one round trip. Connections do not
compete: each has the preset's rate for itself.

Each connection has a send buffer, as in a kernel, somewhat larger than the link's bandwidth-delay product. A write is
copied, in pieces of at most ``PIECE_BYTES``; what is beyond the size of the buffer counts as unsent. Each piece is
handed to the inner transport at the time at which the shaper has its last byte arrive. The end of the stream follows
all bytes, no sooner than the link's delay. ``abort()`` takes effect at once.

Theory of operation. A ``LinkShaper`` emulates one direction of one TCP connection. Bytes pass four stages::

    write ──▶ token bucket ──▶ stall ──▶ delay + jitter + retransmission ──▶ in-order delivery ──▶ deliver_at
              (rate, burst)    (the sender's radio   (propagation)            (late bytes delay
                                is silent)                                     all that follow)

- **Rate** is a token bucket: between two departures at most ``burst_bytes + rate * seconds`` leave. Its state is one
  number, the time at which all bytes so far would have left at the plain rate (virtual scheduling; ITU-T I.371, the
  generic cell rate algorithm).
- **Stalls** hold departures, as a scanning Wi-Fi card does. Afterwards the backlog leaves at the plain rate, not at
  once.
- **Jitter** is uniform in [0, ``jitter_s``] and never reorders.
- **Loss** is emulated as an application sees it over TCP: no byte is missing, but bytes are late. A send of k segments
  of 1448 bytes is hit with probability ``1 - (1 - loss)^k``. If three segments follow the lost one (k >= 4), three
  duplicate acknowledgements start a fast retransmit, which costs one round trip (RFC 5681, 3.2). A shorter send waits
  for the timer, ``RTO = RTT + max(200 ms, 4 * jitter)`` (RFC 6298 with Linux's floor). A retransmission is lost with
  probability ``loss`` again; then the timer decides, and each wait is twice the last. The congestion window is not
  modelled: ``rate_bps`` is the goodput that the link has at that loss.

Equal generators, presets and sends give equal times.
"""

from __future__ import annotations

import asyncio
import math
import random
import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, cast

from p2ptrain.core.errors import UserError
from p2ptrain.core.world import Listener, Network, OnProblem, ProtocolFactory
from wire.transport import FlowControl, WriteData, bytes_view, unreachable


@dataclass(frozen=True, slots=True)
class LinkPreset:
    """The figures of one direction of a link. A zero switches a feature off.

    Attributes:
        delay_s: one-way propagation delay.
        jitter_s: largest additional delay of a delivery.
        rate_bps: bits per second; 0 is unlimited.
        loss: probability that a segment is lost, below 1.
        stall_every_s, stall_s: the link sends nothing for ``stall_s`` in each longer period of ``stall_every_s``; the
            first stall begins at a random point of the first period.
        burst_bytes: bytes that may leave at once after a pause.
    """

    name: str
    delay_s: float
    jitter_s: float = 0.0
    rate_bps: float = 0.0
    loss: float = 0.0
    stall_every_s: float = 0.0
    stall_s: float = 0.0
    burst_bytes: int = 0

    @property
    def rtt_s(self) -> float:
        """Round trip without queues and jitter, if both directions are like this one."""
        return 2 * self.delay_s


_ALL = (
    # gigabit Ethernet through one switch
    LinkPreset("lan", 0.00015, 5e-05, 1e9, burst_bytes=64 << 10),
    # a laptop near its access point: jitter, and short stalls while it scans
    LinkPreset("wifi", 0.002, 0.004, 150e6, stall_every_s=30.0, stall_s=0.1, burst_bytes=64 << 10),
    # fibre to fibre within one city
    LinkPreset("metro", 0.004, 0.0005, 500e6, burst_bytes=64 << 10),
    # homes or sites within one continent
    LinkPreset("wan", 0.02, 0.002, 100e6, loss=1e-4, burst_bytes=32 << 10),
    # Europe to North America's west
    LinkPreset("transcontinental", 0.075, 0.005, 100e6, loss=5e-4, burst_bytes=32 << 10),
    # geostationary
    LinkPreset("satellite", 0.3, 0.01, 20e6, loss=1e-3, burst_bytes=16 << 10),
    # a crowded mobile cell: 2 % of segments are lost, and it stalls for 3 s a minute
    LinkPreset("lossy", 0.04, 0.02, 20e6, loss=0.02, stall_every_s=20.0, stall_s=1.0, burst_bytes=16 << 10),
    # named conditions, from a good link to one that is up for 5 s and silent for 2 s
    LinkPreset("good", 0.02, 0.005, 100e6, loss=1e-3, burst_bytes=32 << 10),
    LinkPreset("cellular", 0.08, 0.04, 10e6, loss=0.02, burst_bytes=16 << 10),
    LinkPreset("degraded", 0.2, 0.08, 2e6, loss=0.1, burst_bytes=16 << 10),
    LinkPreset("brownout", 0.08, 0.04, 5e6, loss=0.05, stall_every_s=7.0, stall_s=2.0, burst_bytes=16 << 10),
)
PRESETS = MappingProxyType({preset.name: preset for preset in _ALL})
_ROUND_TRIP = re.compile(r"(\d{1,4}(?:\.\d{1,3})?)ms(?:-(\d{1,6})mbit)?", re.ASCII)


def preset_named(name: str) -> LinkPreset:
    """Return a preset by name; ``80ms`` is a link with that round trip only, ``80ms-100mbit`` has a rate, too. Raises
    ``UserError``."""
    if plain := _ROUND_TRIP.fullmatch(name):
        burst_bytes = 32 << 10 if plain[2] else 0
        return LinkPreset(name, float(plain[1]) / 2e3, rate_bps=1e6 * int(plain[2] or 0), burst_bytes=burst_bytes)
    if name not in PRESETS:
        known = ", ".join(PRESETS)
        raise UserError(
            f"there is no link preset {name!r}", remedy=f"choose one of {known}, or a round trip: 20ms, 80ms-100mbit"
        )
    return PRESETS[name]


class LinkShaper:
    """One direction of one emulated connection.

    Args:
        rng: used by this shaper only.
        opened_at: when the connection was opened, on the clock of ``now``; stalls count from it.
    """

    def __init__(self, preset: LinkPreset, rng: random.Random, *, opened_at: float = 0.0) -> None:
        self.preset = preset
        self._rng = rng
        self._first_stall_at = opened_at + rng.random() * preset.stall_every_s
        self._byte_s = 8 / preset.rate_bps if preset.rate_bps else 0.0
        self._credit_s = preset.burst_bytes * self._byte_s
        self._through_at = -math.inf
        self._last_delivery_at = -math.inf

    def send(self, now: float, nbytes: int) -> float:
        """Return when the last of ``nbytes``, written at ``now``, arrives. Times of successive calls never decrease.

        ``nbytes`` = 0 asks for the arrival of a mark without payload, such as the end of the stream.
        """
        flight_s = self.preset.delay_s + self._rng.random() * self.preset.jitter_s + self._retransmission_s(nbytes)
        self._last_delivery_at = max(self._last_delivery_at, self._depart(now, nbytes) + flight_s)
        return self._last_delivery_at

    def _depart(self, now: float, nbytes: int) -> float:
        self._through_at = max(self._through_at, now) + nbytes * self._byte_s
        departs_at = wanted_at = max(now, self._through_at - self._credit_s)
        if self.preset.stall_s and wanted_at >= self._first_stall_at:
            into_s = (wanted_at - self._first_stall_at) % self.preset.stall_every_s
            departs_at = max(wanted_at, wanted_at + self.preset.stall_s - into_s)
        self._through_at += departs_at - wanted_at  # the backlog of a stall leaves at the plain rate
        return departs_at

    def _retransmission_s(self, nbytes: int) -> float:
        loss = self.preset.loss
        # a full TCP segment on Ethernet, with timestamps
        segments = max(1, math.ceil(nbytes / 1448))
        if not loss or self._rng.random() >= 1 - (1 - loss) ** segments:
            return 0.0
        timer_s = self.preset.rtt_s + max(0.2, 4 * self.preset.jitter_s)
        late_s = 0.0
        # the lost segment, and three that cause duplicate acknowledgements
        if segments >= 4:
            late_s = self.preset.rtt_s
            if self._rng.random() >= loss:
                return late_s
        while True:
            late_s += timer_s
            if self._rng.random() >= loss:
                return late_s
            timer_s = min(2 * timer_s, 120.0)


# ---------------------------------------------------------------------------------------------------------- the network


PIECE_BYTES = 16 << 10
SPARE_BYTES = 128 << 10
PresetOf = Callable[[str, int], LinkPreset]
"""The other side's host and port → the link to it. The port of an accepted connection is arbitrary."""


class EmulatedNetwork:
    """A ``Network`` over another one. Each connection sends through its own ``LinkShaper``.

    Args:
        preset: of every connection; or a function from the other side's (host, port) to a preset.
        seed: fixes jitter, losses and stalls of the n-th connection of this network.
    """

    def __init__(self, inner: Network, preset: LinkPreset | PresetOf, seed: int) -> None:
        self._inner = inner
        self._preset_of = (lambda host, port: preset) if isinstance(preset, LinkPreset) else preset
        self._seeds = random.Random(seed)  # noqa: S311 - link conditions are no secret

    async def connect(self, host: str, port: int, factory: ProtocolFactory, *, timeout_s: float) -> None:
        preset = self._preset_of(host, port)
        round_trip_s = preset.rtt_s
        await asyncio.sleep(min(round_trip_s, timeout_s))
        if round_trip_s >= timeout_s:
            raise unreachable(host, port, TimeoutError(), timeout_s)
        emulated = self._emulated(factory, lambda remote_host, remote_port: preset)
        await self._inner.connect(host, port, emulated, timeout_s=timeout_s - round_trip_s)

    async def listen(
        self, host: str, port: int, factory: ProtocolFactory, on_problem: OnProblem | None = None
    ) -> Listener:
        return await self._inner.listen(host, port, self._emulated(factory, self._preset_of), on_problem)

    def _emulated(self, factory: ProtocolFactory, preset_of: PresetOf) -> ProtocolFactory:
        return lambda: EmulatedTransport(
            factory(),
            preset_of,
            random.Random(self._seeds.getrandbits(64)),  # noqa: S311
        )


class EmulatedTransport(FlowControl, asyncio.BufferedProtocol):
    """One side of an emulated connection, between the real protocol and the inner transport. It queues only writes."""

    def __init__(self, protocol: asyncio.BufferedProtocol, preset_of: PresetOf, rng: random.Random) -> None:
        super().__init__(protocol)
        self._preset_of, self._rng = preset_of, rng
        self._loop = asyncio.get_running_loop()
        self._opened_at = self._loop.time()
        # In flight: when it arrives, its bytes, and the inner transport's call that hands it over, or ends that.
        self._queue: deque[tuple[float, int, Callable[[], None]]] = deque()
        self._queued_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._inner_full = False
        self._eof = self._read_ended = False
        self._lost = False

    # What the protocol calls.

    def write(self, data: WriteData) -> None:
        if self._eof:
            raise RuntimeError("Cannot call write() after write_eof()")
        view = bytes_view(data)
        if self._closing or not view.nbytes:
            return
        for start in range(0, view.nbytes, PIECE_BYTES):
            piece = bytes(view[start : start + PIECE_BYTES])
            self._send(len(piece), partial(self._inner.write, piece))
        self._maybe_pause()

    def write_eof(self) -> None:
        if not (self._eof or self._closing):
            self._eof = True
            self._send(0, self._inner.write_eof)

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._inner.pause_reading()  # as in asyncio, a closed transport delivers nothing more
            self._send(0, self._inner.close)

    def abort(self) -> None:
        if not self._lost:
            self._closing = True
            self._drop()
            self._inner.abort()

    def pause_reading(self) -> None:
        if not (self._closing or self._read_ended):
            self._inner.pause_reading()

    def resume_reading(self) -> None:
        if not (self._closing or self._read_ended):  # asyncio would report end of stream twice
            self._inner.resume_reading()

    def is_reading(self) -> bool:
        return not self._closing and self._inner.is_reading()

    def get_write_buffer_size(self) -> int:
        return max(0, self._queued_bytes - self._buffer_bytes)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        # the kernel's round trip lacks the emulated delay
        return default if name == "rtt_s" else self._inner.get_extra_info(name, default)

    # What the inner transport reports.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._inner = cast(asyncio.Transport, transport)  # uvloop's do not subclass it
        peername = transport.get_extra_info("peername") or ("", 0)  # None if the connection is lost already
        preset = self._preset_of(*peername[:2])
        self._shaper = LinkShaper(preset, self._rng, opened_at=self._opened_at)
        in_flight_bytes = (preset.rate_bps or 1e9) / 8 * (preset.delay_s + preset.jitter_s)
        # The bandwidth-delay product plus a reserve, so that the link never idles.
        self._buffer_bytes = min(int(in_flight_bytes) + SPARE_BYTES, 8 << 20)
        # The inner transport then reports each time that it is empty, which flow control here needs.
        self._inner.set_write_buffer_limits(high=0)
        self._protocol.connection_made(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = self._closing = True
        self._drop()
        self._protocol.connection_lost(exc)

    def get_buffer(self, sizehint: int) -> Any:
        return self._protocol.get_buffer(sizehint)

    def buffer_updated(self, nbytes: int) -> None:
        self._protocol.buffer_updated(nbytes)

    def eof_received(self) -> bool:
        self._read_ended = True
        if not self._protocol.eof_received():
            self.close()
        return True  # keep the inner transport open: bytes may still be on the emulated link

    def pause_writing(self) -> None:
        self._inner_full = True

    def resume_writing(self) -> None:
        self._inner_full = False
        self._release(self._loop.time())

    # The link.

    def _send(self, nbytes: int, hand_over: Callable[[], None]) -> None:
        self._queue.append((self._shaper.send(self._loop.time(), nbytes), nbytes, hand_over))
        self._queued_bytes += nbytes
        self._arm()

    def _arm(self) -> None:
        if self._timer is None and self._queue and not self._inner_full:
            due_at, *_ = self._queue[0]
            self._timer = self._loop.call_at(due_at, self._on_timer, due_at)

    def _on_timer(self, due_at: float) -> None:
        self._timer = None
        self._release(max(due_at, self._loop.time()))  # a loop with a coarse clock may fire slightly early

    def _release(self, now: float) -> None:
        if self._inner.is_closing():  # it failed; its connection_lost follows
            return self._drop()
        while self._queue and self._queue[0][0] <= now and not self._inner_full:
            _, nbytes, hand_over = self._queue.popleft()
            hand_over()
            self._queued_bytes -= nbytes
        self._arm()
        return self._maybe_resume()

    def _drop(self) -> None:
        self._queue.clear()
        self._queued_bytes = 0
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
