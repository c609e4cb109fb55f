"""One thread for all computation, so that the event loop can answer heartbeats meanwhile.

``HangDetector`` tells a call that does not end from one that takes long: the worker then says so and leaves its ring.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from p2ptrain.core.errors import P2PTrainError, ResourceError
from p2ptrain.core.threads import RealThreads, Threads

HASHING_THREADS = 2
"""A GPU can fill a buffer faster than one thread hashes it."""
P = ParamSpec("P")
T = TypeVar("T")
H = TypeVar("H", bound=Hashable)


@dataclass(eq=False, slots=True)
class ComputeCall:
    """One call on the thread. ``name``: of its function."""

    name: str
    begun: bool = False
    over: bool = False

    def settled(self, future: asyncio.Future[Any]) -> None:
        self.over = self.over or (future.cancelled() and not self.begun)  # then it is skipped


class ComputeThread:
    """Runs blocking calls one after another. Callers of ``run`` wait, so each asyncio task queues at most one call.

    Attributes:
        known: names of calls that ended, also of those that ``HangDetector``, which looks once in a while, never saw.
            The owner may clear it.
    """

    def __init__(self, threads: Threads | None = None) -> None:
        threads = threads or RealThreads()
        self._thread = threads.start("compute")
        self._hashing = [threads.start("hashing") for _ in range(HASHING_THREADS)]
        self._turns = itertools.cycle(self._hashing)
        self._calls = deque[ComputeCall]()
        self.known: set[str] = set()

    @property
    def call(self) -> ComputeCall | None:
        """The call that runs, or that runs next; None: the thread has nothing to do."""
        self._drop_ended()
        return self._calls[0] if self._calls else None

    def _drop_ended(self) -> None:
        while self._calls and self._calls[0].over:
            self._calls.popleft()

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call ``function`` on the thread and return its result.

        If the caller is cancelled, a call that has not begun is skipped, and one that has begun runs to its end.

        Raises:
            P2PTrainError: raised by the call. Any other error of the call is raised as ``ComputeFailed``.
        """
        return await self.submit(function, *args, **kwargs)

    def submit(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        """As ``run``, but return a future. The call is queued when this returns, so later calls run after it."""

        entry = ComputeCall(getattr(function, "__qualname__", type(function).__name__))

        def call() -> T:
            entry.begun = True
            try:
                return _translated(function, *args, **kwargs)
            finally:
                entry.over = True
                self.known.add(entry.name)

        self._drop_ended()
        self._calls.append(entry)
        future = self._thread.submit(call)
        future.add_done_callback(entry.settled)
        return future

    def submit_hashing(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        """Call ``function``, which must not use a device, on a thread for hashing. Errors as ``run``."""
        return next(self._turns).submit(lambda: _translated(function, *args, **kwargs))

    def close(self) -> None:
        for thread in (self._thread, *self._hashing):
            thread.close()


def _translated(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    try:
        return function(*args, **kwargs)
    except P2PTrainError:
        raise
    except BaseException as error:
        raise translate_error(error) from error


HANG_S, HANG_FACTOR, FIRST_CALL_S = 10.0, 4, 600.0
"""A call hangs if it takes longer than ``HANG_S``, and longer than ``HANG_FACTOR`` times the longest call of the same
name; the first one of a name, which may compile or load, if it takes longer than ``FIRST_CALL_S``."""


class HangDetector:
    """Judges the calls of one job on the thread. A core: the owner waits, and tells how long it had planned to.

    As in ``ring.detector`` a wait counts as long as it was planned: a process that was stopped does not hang.
    """

    def __init__(self) -> None:
        self._call: ComputeCall | None = None
        self._taken_s = 0.0
        self._longest_s: dict[str, float] = {}  # by the name of the call

    def waited(self, planned_s: float, call: ComputeCall | None, known: Collection[str], *, for_others: bool) -> float:
        """Note the end of a wait. Returns for how long the call has hung; 0: it has not.

        Args:
            call: runs now. known: names of calls that ended before.
            for_others: the call may wait for other members, so the time does not count.
        """
        if call is not self._call:
            if self._call is not None:
                self._longest_s[self._call.name] = max(self._taken_s, self._longest_s.get(self._call.name, 0.0))
            self._call, self._taken_s = call, 0.0
        elif call is not None and not for_others:
            self._taken_s += planned_s
        if call is None:
            return 0.0
        limit_s = max(HANG_S, HANG_FACTOR * self._longest_s.get(call.name, 0.0))
        return self._taken_s if self._taken_s >= (limit_s if call.name in known else FIRST_CALL_S) else 0.0


class ComputeFailed(ResourceError):
    """A computation raised an error that is no ``P2PTrainError``. ``__cause__`` has the traceback."""


def translate_error(error: BaseException) -> ComputeFailed:
    line = " ".join(str(error).split())[:300] or "the exception has no message"
    remedy = ""
    if isinstance(error, MemoryError) or "out of memory" in line.lower():
        remedy = "lower batch.micro_batch_sequences and raise batch.micro_batches, or choose a smaller [model]"
    failed = ComputeFailed(f"{type(error).__name__} while computing: {line}", remedy=remedy)
    failed.__cause__ = error
    return failed
