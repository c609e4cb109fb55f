"""Threads of a simulated process: calls run on the event loop, one after another, and take seeded virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any, TypeVar

from p2ptrain.core.threads import Thread, outcome_of, settle
from roles.sim.loop import Process

T = TypeVar("T")


class SimThreads:
    """Starts the threads of one process.

    Args:
        call_s: what a call takes on average; every machine has its own.
    """

    def __init__(self, process: Process, rng: random.Random, call_s: float) -> None:
        self._process, self._random, self._call_s = process, rng, call_s

    def start(self, name: str) -> Thread:
        return _SimThread(self._process, self._random, self._call_s)


class _SimThread:
    def __init__(self, process: Process, rng: random.Random, call_s: float) -> None:
        self._process, self._random, self._call_s = process, rng, call_s
        self._free_at = 0.0

    def submit(self, call: Callable[[], T], *, idle: bool = False) -> asyncio.Future[T]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        if not self._process.alive:
            future.cancel()
            return future
        begin_at = max(loop.time(), self._free_at)
        self._free_at = begin_at + self._call_s * (0.5 + self._random.random())
        if begin_at > loop.time():
            loop.call_at(begin_at, self._begin, call, future, self._free_at)
        else:
            self._begin(call, future, self._free_at)
        return future

    def close(self) -> None:
        """Nothing to let go of."""

    def _begin(self, call: Callable[[], Any], future: asyncio.Future[Any], end_at: float) -> None:
        if future.cancelled():
            return  # it had not begun
        loop = asyncio.get_running_loop()
        # What the call does is seen at its begin or at its end: others' callbacks run between in either case.
        if self._random.random() < _SEEN_EARLY:
            loop.call_soon(self._call, call, future, end_at)
        else:
            loop.call_at(end_at, self._call, call, future, end_at)

    def _call(self, call: Callable[[], Any], future: asyncio.Future[Any], end_at: float) -> None:
        if not self._process.alive:
            return
        outcome = outcome_of(call)
        if self._process.alive:
            asyncio.get_running_loop().call_at(end_at, settle, future, *outcome)


_SEEN_EARLY = 0.25
