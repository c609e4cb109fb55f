"""Where a side of ``bench speculate`` is: a process of its own, or a host of a network in memory, on virtual time.

On virtual time nothing but passes, drafts and links takes any, whatever else the machine does, and the same setting is
the same run.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from p2ptrain.cli.bench.foreseen import Take, take
from p2ptrain.core.disk import RealDisk
from p2ptrain.core.threads import RealThreads, Thread, Threads, outcome_of, settle
from p2ptrain.core.world import LoopClock, Network, World
from ring.local import HOST
from wire.emulate import EmulatedNetwork
from wire.memory import MemoryNetwork
from wire.shaper import LinkPreset
from wire.transport import TcpNetwork

T = TypeVar("T")

SPREAD = 0.02
"""By which a call takes longer or shorter than it says, at most. Where all took exactly as long, and ten drafts as long
as a pass, each pass would end at the same moment of a draft; on a machine it is another one each time."""


@dataclass(frozen=True, slots=True)
class Place:
    """See the module's docstring.

    Attributes:
        host: at which others dial it. network: without emulated links.
        take: of ``TimedModel``, on one of its threads.
        process: what ``kill`` takes, to end it at once.
    """

    host: str
    network: Network
    threads: Threads
    take: Take
    process: Any
    kill: Callable[[Any], None]

    def world(self, delay_ms: float, jitter_ms: float, seed: int) -> World:
        """What is sent here arrives so much later; ``seed``: of jitter."""
        network = self.network
        if delay_ms or jitter_ms:
            network = EmulatedNetwork(network, LinkPreset("emulated", delay_ms, jitter_ms), seed=seed)
        return World(LoopClock(), network, RealDisk(), random.Random(seed), self.threads)  # noqa: S311 - jitter


def this_process() -> Place:
    """On the loopback."""
    return Place(HOST, TcpNetwork(), RealThreads(), take, os.getpid(), lambda pid: os.kill(pid, signal.SIGKILL))


def in_memory(network: MemoryNetwork, host: str) -> Place:
    """A host of that network, for a ``VirtualClockLoop``."""
    threads = TimedThreads()
    return Place(host, network.at(host), threads, threads.take, host, network.crash)


class TimedThreads:
    """Threads whose calls run on the event loop, one after another, each about as long as it says; for virtual
    time."""

    def __init__(self) -> None:
        self.taken_s = 0.0

    def start(self, name: str) -> Thread:
        return _TimedThread(self)

    def take(self, seconds: float, began: float) -> None:
        """The call that runs now takes so much longer."""
        self.taken_s += seconds


class _TimedThread:
    def __init__(self, threads: TimedThreads) -> None:
        self._threads = threads
        self._calls: deque[tuple[Callable[[], Any], asyncio.Future[Any]]] = deque()
        self._dice = random.Random(1)  # noqa: S311

    def submit(self, call: Callable[[], T]) -> asyncio.Future[T]:
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._calls.append((call, future))
        if len(self._calls) == 1:
            self._begin()
        return future

    def close(self) -> None:
        """Nothing to let go of."""

    def _begin(self) -> None:
        call, future = self._calls[0]
        self._threads.taken_s = 0.0
        outcome = (None, None) if future.cancelled() else outcome_of(call)
        takes_s = self._threads.taken_s * self._dice.uniform(1 - SPREAD, 1 + SPREAD)
        asyncio.get_running_loop().call_later(takes_s, self._end, future, *outcome)

    def _end(self, future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
        settle(future, result, error)
        self._calls.popleft()
        if self._calls:
            self._begin()
