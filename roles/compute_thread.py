"""One thread for all computation, so that the event loop can answer heartbeats meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from typing import Generic, ParamSpec, TypeVar

from p2ptrain.core.errors import P2PTrainError, ResourceError
from p2ptrain.core.threads import RealThreads, Threads

P = ParamSpec("P")
T = TypeVar("T")
H = TypeVar("H", bound=Hashable)


class ComputeThread:
    """Runs blocking calls one after another. Callers of ``run`` wait, so each asyncio task queues at most one call."""

    def __init__(self, threads: Threads | None = None) -> None:
        self._thread = (threads or RealThreads()).start("compute")

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call ``function`` on the thread and return its result.

        If the caller is cancelled, a call that has not begun is skipped, and one that has begun runs to its end.

        Raises:
            P2PTrainError: raised by the call. Any other error of the call is raised as ``ComputeFailed``.
        """
        return await self.submit(function, *args, **kwargs)

    def submit(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        """As ``run``, but return a future. The call is queued when this returns, so later calls run after it."""

        def call() -> T:
            try:
                return function(*args, **kwargs)
            except P2PTrainError:
                raise
            except BaseException as error:
                raise translated(error) from error

        return self._thread.submit(call)

    def close(self) -> None:
        self._thread.close()


class ComputeFailed(ResourceError):
    """A computation raised an error that is no ``P2PTrainError``. ``__cause__`` has the traceback."""


def translated(error: BaseException) -> ComputeFailed:
    line = " ".join(str(error).split())[:300] or "the exception has no message"
    remedy = ""
    if isinstance(error, MemoryError) or "out of memory" in line.lower():
        remedy = "lower batch.micro_batch_sequences, or use a smaller model"
    failed = ComputeFailed(f"{type(error).__name__} while computing: {line}", remedy=remedy)
    failed.__cause__ = error
    return failed


class Turns(Generic[H]):
    """A round-robin queue without duplicates: nobody waits for more than one turn of each other waiting item."""

    def __init__(self) -> None:
        self._waiting: dict[H, None] = {}

    def add(self, who: H) -> None:
        self._waiting.setdefault(who)

    def drop(self, who: H) -> None:
        self._waiting.pop(who, None)

    def take(self, ready: Callable[[H], bool]) -> H | None:
        for who in self._waiting:
            if ready(who):
                del self._waiting[who]
                return who
        return None
