"""The world a peer lives in: time, randomness, network, disk and threads, injected as one value.

Nothing outside this file and the real implementations it names reads a clock, draws a random number, opens a socket or
a file of the state directory, or starts a thread. The real world is ``real_world()`` with
``wire.transport.TcpNetwork``; the simulated one (``roles.sim``) swaps the event loop's clock, the network, the disk and
the threads, and runs the same shells.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from p2ptrain.core.disk import Disk, RealDisk
from p2ptrain.core.errors import P2PTrainError
from p2ptrain.core.threads import RealThreads, Threads

ProtocolFactory = Callable[[], asyncio.BufferedProtocol]
OnProblem = Callable[[P2PTrainError, tuple[str, int]], None]
"""Told of an error, and of the address that it came from."""


class Clock(Protocol):
    """Two clocks: one that only goes forward, one that people read."""

    def now(self) -> float:
        """Monotonic seconds: the running event loop's, so that timeouts and ``now`` agree (and both can be virtual)."""

    def wall(self) -> float:
        """Unix seconds. For people and logs; never compared between machines."""


class Listener(Protocol):
    """A bound, listening address."""

    @property
    def address(self) -> tuple[str, int]:
        """Host and port that were really bound (port 0 is replaced by the one given)."""

    async def close(self) -> None:
        """Stop listening. Established connections live on."""


class Network(Protocol):
    """Streams of bytes between peers, as asyncio transports and buffered protocols.

    Raises ``Unreachable`` where an address does not answer and ``UserError`` where it cannot be bound.
    """

    async def connect(self, host: str, port: int, factory: ProtocolFactory, *, timeout_s: float) -> None:
        """Dial ``host:port``; on success the factory's protocol has been given its transport."""

    async def listen(
        self, host: str, port: int, factory: ProtocolFactory, on_problem: OnProblem | None = None
    ) -> Listener:
        """Accept connections on ``host:port`` (port 0: any free one).

        Args:
            on_problem: told of callers that never became a connection, on networks where that can be.
        """


class LoopClock:
    """The running event loop's clock, and the machine's wall clock."""

    def now(self) -> float:
        loop = asyncio.get_running_loop()
        # uvloop's time has whole milliseconds, too coarse for a round trip on a LAN; both count CLOCK_MONOTONIC.
        return time.monotonic() if type(loop).__module__.startswith("uvloop") else loop.time()

    def wall(self) -> float:
        return time.time()


@dataclass(frozen=True, slots=True)
class World:
    """Everything outside the process that a shell may touch.

    Attributes:
        random: the one source of non-cryptographic randomness (jitter, tie-breaks). Training randomness never comes
            from here: it is a pure function of the job's seed.
    """

    clock: Clock
    network: Network
    disk: Disk
    random: random.Random
    threads: Threads = field(default_factory=RealThreads)


def real_world(network: Network) -> World:
    """The world outside: the loop's clock, the given network, the disk, an unseeded generator."""
    return World(clock=LoopClock(), network=network, disk=RealDisk(), random=random.Random())  # noqa: S311 - jitter only
