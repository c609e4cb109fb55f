"""One thread for everything that computes, so that the event loop answers heartbeats whatever the model does."""

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
    """Runs blocking calls one after another. Every caller waits for its own, so at most one call a task is queued.

    Args:
        threads: what starts it: the ``World``'s.
    """

    def __init__(self, threads: Threads | None = None) -> None:
        self._thread = (threads or RealThreads()).start("compute")

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call ``function`` on the thread and give its result.

        A cancelled caller stops waiting; a call that has not begun is then skipped, one that has runs to its end.

        Raises:
            P2PTrainError: as raised by the call; whatever else it raised, libraries' errors too, as ``ComputeFailed``.
        """
        return await self.submit(function, *args, **kwargs)

    def submit(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        """As ``run``, and the call is queued when this returns: what is asked for later comes behind it."""

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
    """Something that is not this project's failed while it computed. ``__cause__`` has the traceback."""


def translated(error: BaseException) -> ComputeFailed:
    line = " ".join(str(error).split())[:300] or "it did not say why"
    remedy = ""
    if isinstance(error, MemoryError) or "out of memory" in line.lower():
        remedy = "lower batch.micro_batch_sequences, or use a smaller model"
    failed = ComputeFailed(f"{type(error).__name__} while computing: {line}", remedy=remedy)
    failed.__cause__ = error
    return failed


class Turns(Generic[H]):
    """Those that have something to do, each once. Who had a turn goes to the end, so nobody waits for more than one
    turn of each other."""

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
