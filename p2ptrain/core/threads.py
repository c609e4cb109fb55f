"""Threads that run blocking calls one after another, behind a seam: in a simulation the calls run on the event loop's
own thread and take virtual time.

A thread of its own rather than an executor's: it must be the same one for the life of the process (CUDA contexts,
thread counts, SQLite), and a long call must not keep the process from leaving, so it is a daemon.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol, TypeVar, cast

T = TypeVar("T")

_Job = tuple[asyncio.AbstractEventLoop, "asyncio.Future[Any]", Callable[[], Any]]


class Thread(Protocol):
    """One thread, fed by one event loop."""

    def submit(self, call: Callable[[], T], *, idle: bool = False) -> asyncio.Future[T]:
        """Queue ``call``; the future has what it returned or raised.

        Args:
            idle: it takes only the time that nobody else wants, where the system lets threads differ.

        A cancelled future is no longer waited for; a call that has not begun is then skipped, one that has runs to its
        end.
        """

    def close(self) -> None:
        """Let the thread end after what is queued."""


class Threads(Protocol):
    def start(self, name: str) -> Thread:
        """A thread of that name, which people see in debuggers and profilers."""


class RealThreads:
    def start(self, name: str) -> Thread:
        return _DaemonThread(name)


class _DaemonThread:
    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        threading.Thread(target=self._loop, name=name, daemon=True).start()

    def submit(self, call: Callable[[], T], *, idle: bool = False) -> asyncio.Future[T]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._jobs.put((loop, future, (lambda: _idly(call)) if idle else call))
        return future

    def close(self) -> None:
        self._jobs.put(None)

    def _loop(self) -> None:
        while (job := self._jobs.get()) is not None:
            if not _carried_out(*job):
                return
            del job  # while it waits for the next one it must not keep alive what this one was about: a whole model


class LoopThreads:
    """Threads whose calls run on the event loop, one after another; for virtual time.

    Attributes:
        call_s: what a call of the thread of that name takes, in the loop's time.
    """

    def __init__(self) -> None:
        self.call_s: dict[str, float] = {}

    def start(self, name: str) -> Thread:
        return _LoopThread(self, name)


class _LoopThread:
    def __init__(self, threads: LoopThreads, name: str) -> None:
        self._threads, self._name = threads, name
        self._free_at = 0.0

    def submit(self, call: Callable[[], T], *, idle: bool = False) -> asyncio.Future[T]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        begin_at = max(loop.time(), self._free_at)
        self._free_at = begin_at + self._threads.call_s.get(self._name, 0.0)
        loop.call_at(begin_at, self._begin, call, future, self._free_at)
        return future

    def close(self) -> None:
        """Nothing to let go of."""

    def _begin(self, call: Callable[[], Any], future: asyncio.Future[Any], end_at: float) -> None:
        if future.cancelled():
            return
        asyncio.get_running_loop().call_at(end_at, settle, future, *outcome_of(call))


def _carried_out(loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any], call: Callable[[], Any]) -> bool:
    """Call, and hand over what came of it; False where the loop is closed, and so nobody waits any more."""
    if future.cancelled():
        return True
    try:
        loop.call_soon_threadsafe(settle, future, *outcome_of(call))
    except RuntimeError:
        return False
    return True


def _idly(call: Callable[[], T]) -> T:
    """What ``call`` gives on a thread that yields to everybody. It is a new one: Linux gives no urgency back."""
    outcomes: list[tuple[Any, BaseException | None]] = []

    def run() -> None:
        if hasattr(os, "SCHED_IDLE"):
            with suppress(OSError):  # a sandbox may forbid it
                os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        outcomes.append(outcome_of(call))

    thread = threading.Thread(target=run, name="idle", daemon=True)
    thread.start()
    thread.join()
    result, error = outcomes.pop()
    if error is not None:
        raise error
    return cast(T, result)


def outcome_of(call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """What ``call`` gives, or raises. No frame keeps what was raised, whose traceback would hold the frame in turn."""
    try:
        return call(), None
    except BaseException as raised:  # noqa: BLE001 - carried to the caller, who decides
        return None, raised


def settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    """Give the future what came of its call, if anybody still waits."""
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
