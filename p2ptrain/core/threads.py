"""Threads that run blocking calls one after another. In a simulation the calls run on the event loop's thread and take
virtual time.

An executor is not suitable: CUDA contexts, thread counts and SQLite need the same thread for the life of the process.
The thread is a daemon, so that a long call does not keep the process from exiting.
"""

from __future__ import annotations

import asyncio
import operator
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

_Job = tuple[asyncio.AbstractEventLoop, "asyncio.Future[Any]", Callable[[], Any]]

SHARED_CORES = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Environment of a process that shares its cores with others that compute. By default OpenMP's threads spin while they
wait, which made a step of workers on one machine take ten times as long. To be set before torch is loaded."""
OWN_CORES = {"GOMP_SPINCOUNT": "10000"}
"""Of one that has them for itself: threads spin for less than a millisecond. To wake them for each product of a text's
next token took a quarter of the time (Intel Xeon, 2 cores, 22 M and 80 M parameters)."""


class Thread(Protocol):
    """One thread that takes calls from one event loop."""

    def submit(self, call: Callable[[], T]) -> asyncio.Future[T]:
        """Queue ``call``; the future gets its result or exception.

        If the future is cancelled before the call starts, the call is skipped. A call that has started runs to its end.
        """

    def close(self) -> None:
        """End the thread after the queued calls."""


class Threads(Protocol):
    def start(self, name: str) -> Thread:
        """Start a thread. Debuggers and profilers show its name."""


class RealThreads:
    """Threads of this machine.

    Args:
        straggler: emulates a slow computer, as ``wire.emulate`` does a slow link: calls on the thread ``compute`` take
            so many times as long, and it sleeps in the rest of that time. A call that times itself, such as the
            measurement of this machine's speed for the placement of a split model, does not notice.
        sleep, clock: in seconds; tests pass their own.
    """

    def __init__(
        self,
        straggler: float = 1.0,
        *,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._straggler, self._sleep, self._clock = straggler, sleep, clock

    def start(self, name: str) -> Thread:
        return _DaemonThread(name, self._run_slowly if name == "compute" and self._straggler > 1 else operator.call)

    def _run_slowly(self, call: Callable[[], T]) -> T:
        began = self._clock()
        try:
            return call()
        finally:
            self._sleep((self._straggler - 1) * (self._clock() - began))


class _DaemonThread:
    def __init__(self, name: str, run: Callable[[Callable[[], Any]], Any]) -> None:
        self._run = run
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        threading.Thread(target=self._loop, name=name, daemon=True).start()

    def submit(self, call: Callable[[], T]) -> asyncio.Future[T]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._jobs.put((loop, future, partial(self._run, call)))
        return future

    def close(self) -> None:
        self._jobs.put(None)

    def _loop(self) -> None:
        while (job := self._jobs.get()) is not None:
            if not _carried_out(*job):
                return
            del job  # while waiting, the thread must not keep a job's objects, such as a model, alive


class LoopThreads:
    """Threads whose calls run on the event loop, one after another; for virtual time.

    Attributes:
        call_s: thread name → seconds of the loop's time per call.
        taken_s: of the call that runs now; it may add to it.
    """

    def __init__(self) -> None:
        self.call_s: dict[str, float] = {}
        self.taken_s = 0.0

    def start(self, name: str) -> Thread:
        return _LoopThread(self, name)


class _LoopThread:
    def __init__(self, threads: LoopThreads, name: str) -> None:
        self._threads, self._name = threads, name
        self._calls = deque[tuple[Callable[[], Any], asyncio.Future[Any]]]()  # the first one runs

    def submit(self, call: Callable[[], T]) -> asyncio.Future[T]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._calls.append((call, future))
        if len(self._calls) == 1:
            loop.call_soon(self._begin)
        return future

    def close(self) -> None:
        """Nothing to release."""

    def _begin(self) -> None:
        call, future = self._calls[0]
        if future.cancelled():
            self._end(future, None, None)
            return
        self._threads.taken_s = self._threads.call_s.get(self._name, 0.0)
        outcome = outcome_of(call)
        asyncio.get_running_loop().call_later(self._threads.taken_s, self._end, future, *outcome)

    def _end(self, future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
        settle(future, result, error)
        self._calls.popleft()
        if self._calls:
            asyncio.get_running_loop().call_soon(self._begin)


def _carried_out(loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any], call: Callable[[], Any]) -> bool:
    """Run ``call`` and give its outcome to ``future``. False if the loop is closed."""
    if future.cancelled():
        return True
    try:
        loop.call_soon_threadsafe(settle, future, *outcome_of(call))
    except RuntimeError:
        return False
    return True


def outcome_of(call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """Result and exception of ``call``. The exception is in no local variable of this frame: that would be a reference
    cycle through its traceback."""
    try:
        return call(), None
    except BaseException as raised:  # noqa: BLE001 - carried to the caller, who decides
        return None, raised


def settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    """Set the future's result or exception, unless it is done."""
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
