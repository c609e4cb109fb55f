"""A peer's environment: time, randomness, network, disk and threads, injected as one value.

Only this file and the real implementations that it names read a clock, make a random number, open a socket or a file of
the state directory, or start a thread. The real world is ``real_world()`` with ``wire.transport.TcpNetwork``. The
simulator (``p2ptrain.lab.sim``) replaces the event loop's clock, the network, the disk and the threads, and runs the
same shells.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from p2ptrain.core.disk import Disk, RealDisk
from p2ptrain.core.errors import P2PTrainError
from p2ptrain.core.ids import ID_BYTES
from p2ptrain.core.threads import RealThreads, Threads

T = TypeVar("T")
ProtocolFactory = Callable[[], asyncio.BufferedProtocol]
OnProblem = Callable[[P2PTrainError, tuple[str, int]], None]
"""Called with an error and the address that it came from."""


class Clock(Protocol):
    """A monotonic clock and a wall clock."""

    def now(self) -> float:
        """Monotonic seconds of the running event loop. So timeouts and ``now`` agree, and both can be virtual."""

    def wall(self) -> float:
        """Unix seconds, for people and logs. Never compare them between machines."""


class Listener(Protocol):
    """A bound, listening address."""

    @property
    def address(self) -> tuple[str, int]:
        """The bound host and port. Port 0 is replaced by the port that the system chose."""

    async def close(self) -> None:
        """Stop listening. Established connections stay open."""


class Network(Protocol):
    """Byte streams between peers, as asyncio transports and buffered protocols.

    Raises ``Unreachable`` if an address does not answer, and ``UserError`` if it cannot be bound.
    """

    async def connect(self, host: str, port: int, factory: ProtocolFactory, *, timeout_s: float) -> None:
        """Dial ``host:port``. On success the factory's protocol has its transport."""

    async def listen(
        self, host: str, port: int, factory: ProtocolFactory, on_problem: OnProblem | None = None
    ) -> Listener:
        """Accept connections on ``host:port`` (port 0: any free one).

        Args:
            on_problem: called for an incoming connection that failed before it was established.
        """


class LoopClock:
    """The running event loop's clock, and the machine's wall clock."""

    def now(self) -> float:
        loop = asyncio.get_running_loop()
        # uvloop's time() has a resolution of 1 ms, too coarse for a LAN's round trip. Both use CLOCK_MONOTONIC.
        return time.monotonic() if type(loop).__module__.startswith("uvloop") else loop.time()

    def wall(self) -> float:
        return time.time()


class Probe:
    """Where the simulator and tests watch the product, and where they break it. This one does nothing.

    Shells call it; pure cores do not, so their shells report for them. A name and its facts are not kept stable.
    """

    def event(self, name: str, **facts: Any) -> None:
        """Something happened. May be called on any thread."""

    def alter(self, point: str, value: T) -> T:
        """Return ``value``, or what a test puts in its place at this point."""
        return value


@dataclass(frozen=True, slots=True)
class World:
    """Everything outside the process that a shell may use.

    Attributes:
        random: the only source of non-cryptographic randomness (jitter, tie-breaks). Training does not use it: its
            randomness is a pure function of the job's seed.
        entropy: returns so many secret random bytes, for the noise and the masks of private jobs.
    """

    clock: Clock
    network: Network
    disk: Disk
    random: random.Random
    threads: Threads = field(default_factory=RealThreads)
    entropy: Callable[[int], bytes] = os.urandom
    probe: Probe = field(default_factory=Probe)

    def new_id(self) -> str:
        """A fresh identifier (``core.ids``)."""
        return self.entropy(ID_BYTES).hex()


def real_world(network: Network) -> World:
    return World(clock=LoopClock(), network=network, disk=RealDisk(), random=random.Random())  # noqa: S311 - jitter only
